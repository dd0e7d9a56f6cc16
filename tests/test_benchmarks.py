"""The benchmarks are run in one way, and their tables have what they name."""

import re
from pathlib import Path

import pytest

from benchmarks import HERE, _configurations
from benchmarks._common import flattened
from benchmarks._configurations import KINDS, configuration
from benchmarks._shapes import SHAPES
from elastic.engine.model.config import Qwen3Config


@pytest.mark.parametrize("path", sorted(HERE.glob("[a-z]*.py")), ids=lambda path: path.stem)
def test_every_benchmark_prints_as_the_others(path: Path) -> None:
    text = path.read_text()
    assert re.search(r"benchmark\(\s*__doc__,", text) or "emit(figures, given, began_s)" in text


def test_every_kind_of_configuration_is_one() -> None:
    for kind in KINDS:
        configuration(kind, policy="policy")


def test_keys_go_before_those_of_kinds_and_kinds_before_earlier_ones() -> None:
    made = configuration("paced", "patient", "endless", policy="policy", scheduler={"stall_timeout_s": 5.0})
    limits = made.scheduler
    assert (limits.heartbeat_timeout_s, limits.stall_timeout_s, limits.boot_timeout_s) == (20.0, 5.0, 240.0)
    assert str(made.model.checkpoint) == "policy"
    room = _configurations.endless(policy=Path("policy"), turns=6, engine={"max_pending": 2}).engine
    assert (room.max_batch, room.max_pending, room.pacing is not None) == (6, 2, True)


def test_every_shape_is_one() -> None:
    for fields in SHAPES.values():
        Qwen3Config(**fields)


def test_figures_within_figures_have_dots() -> None:
    assert flattened({"a": 1, "b": {"c": {"d": 2}, "e": []}}) == [("a", 1), ("b.c.d", 2), ("b.e", [])]
