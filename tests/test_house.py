"""The house: every room stands in the contracts that say who may import whom."""

import ast
import asyncio
import re
import threading
import tomllib
from pathlib import Path

from benchmarks import house

ROOT = Path(__file__).parents[1]
BESIDE = ("functions", "policies", "providers", "traces")
ENTRIES_MAX = 18
STEPPING = "loops", "threads"
"""Modules of a world that step what asyncio and threading keep to themselves."""


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


def test_worlds_of_faults_replace_no_code_and_look_into_no_other_room() -> None:
    """They hand in what production code asks for."""
    testing = [source for source in house.sources(ROOT) if source.module.startswith("elastic.testing")]
    worlds = [source for source in testing if source.module.startswith(house.WORLDS)]
    assert {source.module: count for source in worlds if (count := house.global_patches(source.tree))} == {}
    loop = asyncio.BaseEventLoop()
    kept = {name for thing in (loop, asyncio.TimerHandle, asyncio.events, threading.Condition()) for name in dir(thing)}
    loop.close()
    own = {name for source in testing for name in defined(source.tree)}
    looks = {
        (source.module, name)
        for source in worlds
        for name in house.foreign_private(source.tree)
        if name not in own and not (source.path.stem in STEPPING and name in kept)
    }
    assert looks == set()


def defined(tree: ast.Module) -> set[str]:
    """The names of functions, and of what objects have of their own."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            found.add(node.attr)
    return found
