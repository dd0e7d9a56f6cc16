"""The bugs that are planted into the production shell still are bugs of the code as it is."""

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
PATCHES = sorted(ROOT.glob("tests/*/bugs/*.patch"))


@pytest.mark.parametrize("patch", PATCHES, ids=[path.stem for path in PATCHES])
def test_a_planted_bug_applies_and_says_where_it_shows(patch: Path, tmp_path: Path):
    faults, seed, *lines = patch.read_text().splitlines()
    assert faults in ("World: pool", "World: pool-shell") or faults.startswith("Faults: ")
    assert seed.removeprefix("Seed: ").isdecimal()
    for line in lines:
        if line.startswith("+++ b/"):
            copy = tmp_path / line.removeprefix("+++ b/")
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_text((ROOT / copy.relative_to(tmp_path)).read_text())
    applied = subprocess.run(
        ["git", "apply", "-p1", "--check", str(patch)], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert applied.returncode == 0, applied.stderr
