"""The directories that a trainer may name, and where they are here. Pure."""

from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from elastic.front.doors.base import DoorRefused


class WeightsRoot(NamedTuple):
    """What the trainer calls `theirs` is `ours` on this machine; its weights are in directories below."""

    theirs: PurePosixPath
    ours: Path


def read_root(said: str) -> WeightsRoot:
    """The root that `DIR` or `THEIRS=OURS` says. Raises `ValueError` unless both are absolute."""
    theirs, mapped, ours = said.partition("=")
    root = WeightsRoot(PurePosixPath(theirs), Path(ours if mapped else theirs))
    if not (root.theirs.is_absolute() and root.ours.is_absolute()) or ".." in (*root.theirs.parts, *root.ours.parts):
        raise ValueError(f"found {said!r}; allowed: an absolute path, or THEIRS=OURS of two")
    return root


class WeightsRoots:
    """Maps the paths that a trainer names. Of two roots, one below the other, the inner one counts."""

    def __init__(self, roots: Iterable[WeightsRoot]) -> None:
        self._roots = sorted(roots, key=lambda root: len(root.theirs.parts), reverse=True)

    def ours(self, named: str, param: str) -> Path:
        """The path here of one that the field `param` names. Raises `DoorRefused` for one that is below no root."""
        path = PurePosixPath(named)
        if path.is_absolute() and ".." not in path.parts and "\0" not in named:
            for root in self._roots:
                if path.is_relative_to(root.theirs):
                    return root.ours / path.relative_to(root.theirs)
        allowed = ", ".join(str(root.theirs) for root in self._roots) or "none is given"
        raise DoorRefused(
            f"{param}: found {named!r:.300}; allowed: below a root of --weights-root ({allowed})", param=param
        )
