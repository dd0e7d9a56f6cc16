"""The bugs that are planted into the production shell still are bugs of the code as it is."""

from pathlib import Path

import pytest

from tests.chaos.planted import PLACES, patched

PATCHES = sorted(path for place in PLACES for path in place.glob("*.patch"))


@pytest.mark.parametrize("patch", PATCHES, ids=[path.stem for path in PATCHES])
def test_a_planted_bug_applies_and_says_where_it_shows(patch: Path):
    faults, seed, *_ = patch.read_text().splitlines()
    assert faults in ("World: core", "World: outside", "World: pool", "World: pool-shell") or faults.startswith(
        "Faults: "
    )
    assert seed.removeprefix("Seed: ").isdecimal()
    assert all(patched(patch).values())
