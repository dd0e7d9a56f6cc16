"""Entry points of what is installed: ours and third parties' alike."""

import functools
import importlib.metadata
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import structlog

from elastic.system.named_code import CodeUnusable, where
from elastic.system.plain_values import told

CHECKOUT = Path(__file__).parents[2] / "pyproject.toml"
"""Ours, where this package is used from a checkout."""
OWN_PACKAGES = ("elastic", "functions", "policies", "providers", "traces")
OWN_DISTRIBUTION = "elastic-rl"

log = structlog.get_logger(__name__)


def installed(group: str) -> Mapping[str, importlib.metadata.EntryPoint]:
    """Return the entry points of one group by name. For one `sys.path` they are read once: it takes milliseconds.

    A checkout names its own entry points itself: what was noted as it was installed may be older. Of a name that
    several packages have, Elastic's own stands, else the one that comes first on `sys.path`; the log says once which
    others are not used.
    """
    return _read(group, tuple(sys.path))[0]


def passed_over(group: str) -> Sequence[str]:
    """Say, a sentence each, which entry points of a group are not used because another package has their name."""
    return _read(group, tuple(sys.path))[1]


def package_of(point: importlib.metadata.EntryPoint) -> str:
    """Return the name and the version of the package that brings an entry point."""
    return f"{point.dist.name} {point.dist.version}" if point.dist is not None else OWN_DISTRIBUTION


def is_ours(point: importlib.metadata.EntryPoint) -> bool:
    """Whether an entry point leads into this package, so that loading it imports no code of others."""
    return point.module.partition(".")[0] in OWN_PACKAGES


def found_point(point: importlib.metadata.EntryPoint) -> str:
    """Return how a message begins that is about an entry point: its name, another package that brings it, what it
    names."""
    brought = "" if is_ours(point) else f" of the package {package_of(point)}"
    return f"found {point.name!r}{brought}, whose {point.value}"


def load_point(point: importlib.metadata.EntryPoint) -> Any:
    """Import what an entry point names. Raises `CodeUnusable`."""
    try:
        return point.load()
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        problem = f"{found_point(point)} cannot be loaded by {sys.executable}"
        raise CodeUnusable(f"{problem}: {told(error)}{where(error, __file__)}") from error


@functools.lru_cache(64)
def _read(group: str, path: tuple[str, ...]) -> tuple[Mapping[str, importlib.metadata.EntryPoint], Sequence[str]]:
    own = _of_checkout().get(group, {})
    found = {name: importlib.metadata.EntryPoint(name, value, group) for name, value in own.items()}
    passed: list[str] = []
    points = list(importlib.metadata.entry_points(group=group))
    for point in sorted(points, key=lambda point: not is_ours(point)):
        stands = found.setdefault(point.name, point)
        # What packages are called is read for these alone: it takes a millisecond each.
        if stands.value != point.value and point.dist is not None and point.dist.name != OWN_DISTRIBUTION:
            passed.append(
                f"{group}: {point.name!r} of {package_of(point)} ({point.value}) is not used: "
                f"{package_of(stands)} has one of that name; allowed: a name of its own"
            )
    for words in passed:
        log.warning(words)
    return MappingProxyType(found), passed


@functools.cache
def _of_checkout() -> Mapping[str, Mapping[str, str]]:
    """The entry points by group that the checkout's pyproject.toml names; none where there is no checkout."""
    try:
        return tomllib.loads(CHECKOUT.read_text())["project"]["entry-points"]
    except (OSError, KeyError, ValueError):
        return {}
