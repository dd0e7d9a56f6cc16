"""The house: every room stands in the contracts that say who may import whom."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
BESIDE = ("functions", "policies", "providers", "traces")
ENTRIES_MAX = 16


def rooms() -> set[str]:
    """The entries of `elastic/`."""
    return {path.stem for path in (ROOT / "elastic").iterdir() if not path.stem.startswith("__")}


def layers(of_elastic: bool) -> list[str]:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    found = [c for c in contracts if c["type"] == "layers" and c.get("containers", []) == ["elastic"] * of_elastic]
    return [room for contract in found for layer in contract["layers"] for room in re.split(r"\s*\|\s*", layer)]


def test_each_room_stands_in_both_contracts_once() -> None:
    assert sorted(layers(of_elastic=True)) == sorted(rooms())
    assert sorted(layers(of_elastic=False)) == sorted([*(f"elastic.{room}" for room in rooms()), *BESIDE])


def test_one_takes_it_in_at_a_glance() -> None:
    assert len(rooms()) <= ENTRIES_MAX
