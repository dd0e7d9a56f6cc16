"""The environment of these tests has what its packages ask for, and nothing of what is pinned there is borrowed."""

from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement

pytestmark = pytest.mark.clouds

ROOT = Path(__file__).parents[2]
PINNED = dict(line.split("==") for line in (ROOT / "requirements-clouds.txt").read_text().splitlines())


def test_what_is_pinned_is_installed() -> None:
    assert {name: version(name) for name in PINNED} == PINNED


def test_what_the_pinned_packages_need_is_there() -> None:
    missing = []
    for name in PINNED:
        for requirement in map(Requirement, requires(name) or []):
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                try:
                    if not requirement.specifier.contains(version(requirement.name), prereleases=True):
                        missing.append(f"{name}: {requirement} (found {version(requirement.name)})")
                except PackageNotFoundError:
                    missing.append(f"{name}: {requirement}")
    assert missing == []
