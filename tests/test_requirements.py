"""What gets installed is what is pinned: no more, and no release below the floors."""

import tomllib
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[1]
PINNED = {
    canonicalize_name(name): Version(version)
    for name, _, version in (line.partition("==") for line in (ROOT / "requirements.txt").read_text().splitlines())
}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
ASKED = [
    Requirement(text)
    for texts in (
        PROJECT["build-system"]["requires"],
        PROJECT["project"]["dependencies"],
        *(PROJECT["project"]["optional-dependencies"][extra] for extra in ("train", "server", "dev")),
    )
    for text in texts
]
FOR_BENCHMARKS = {"httptools"}
"""What a rival in `benchmarks/` runs on, and nothing of ours asks for."""


def needs(requirement: Requirement) -> list[Requirement]:
    """What a package asks for here, its extras included. CUDA parts are no part of a CPU build, which is installed."""
    try:
        texts = requires(requirement.name) or []
    except PackageNotFoundError:
        return []
    extras = requirement.extras or {""}
    found = [Requirement(text) for text in texts]
    return [r for r in found if r.marker is None or any(r.marker.evaluate({"extra": extra}) for extra in extras)]


def closure(asked: list[Requirement]) -> dict[str, Requirement]:
    reached: dict[str, Requirement] = {}
    left = list(asked)
    while left:
        requirement = left.pop()
        name = canonicalize_name(requirement.name)
        if name not in reached:
            reached[name] = requirement
            left += needs(requirement)
    return reached


def test_everything_that_gets_installed_is_pinned_and_nothing_else_is() -> None:
    reached = closure([r for r in ASKED if r.marker is None or r.marker.evaluate()])
    assert set(PINNED) == set(reached) | FOR_BENCHMARKS


def test_pins_are_above_the_floors() -> None:
    assert [str(r) for r in ASKED if not r.specifier.contains(PINNED[canonicalize_name(r.name)])] == []


def test_the_lock_has_a_hash_for_every_pin_but_torch() -> None:
    """Torch's build differs from index to index."""
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    locked = {}
    for line in lines:
        if "==" in line:
            name, _, version = line.removesuffix(" \\").partition("==")
            locked[canonicalize_name(name)] = Version(version)
    assert locked == {name: version for name, version in PINNED.items() if name != "torch"}
    assert sum("--hash=sha256:" in line for line in lines) >= len(locked)
