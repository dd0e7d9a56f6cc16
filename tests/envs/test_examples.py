"""The examples that learn: what they train on, what they imitate and what they are judged by have nothing in common."""

import json
from pathlib import Path
from typing import Any

import pytest

from elastic.compose.plan import resolve
from elastic.config import load_config
from elastic.system.named_code import load

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
LINES_MOST = 80


def _of(file: str, name: str) -> Any:
    return load(f"{EXAMPLES / file}:{name}")


@pytest.mark.parametrize("config", sorted(EXAMPLES.glob("*.toml")), ids=lambda path: path.name)
def test_an_example_is_a_short_file_beside_its_configuration(config: Path) -> None:
    assert all(len(file.read_text().splitlines()) <= LINES_MOST for file in EXAMPLES.glob("*.py"))
    if config.name not in ("jobs.toml", "pool.toml", "clouds.toml"):
        resolve(load_config(config, []), [], config.name)


def test_no_sum_is_in_two_parts() -> None:
    rows = _of("sums.py", "rows")
    trained, held_out = ({row["prompt"] for row in rows(part)} for part in ("trained", "held-out"))
    demonstrated = {one["messages"][0]["content"] for one in _of("sums.py", "demonstrations")()}
    assert (len(held_out), trained & held_out, demonstrated & (trained | held_out)) == (200, set(), set())
    assert all(f"{other}+{one}=" in trained for one, other in (prompt[:-1].split("+") for prompt in trained))


def test_a_sum_is_right_by_what_stands_last() -> None:
    right = _of("sums.py", "right")
    assert right(completions=["7+8=15 3+4+1=8 85", "7+8=15 3+4=7 75", ""], answer=["85"] * 3) == [1.0, 0.0, 0.0]
    said = [one["messages"][1]["content"].split(" ")[-1] for one in _of("sums.py", "demonstrations")()]
    asked = [one["messages"][0]["content"][:-1].split("+") for one in _of("sums.py", "demonstrations")()]
    known = [str(int(one) + int(other)) for one, other in asked]
    assert 0.4 < sum(right(completions=said, answer=known)) / len(known) < 0.6


@pytest.mark.clients
def test_no_question_is_in_two_parts() -> None:
    rows = _of("calculator.py", "rows")
    trained, held_out = ({row["prompt"] for row in rows(part)} for part in ("trained", "held-out"))
    demonstrated = {one["messages"][0]["content"] for one in _of("calculator.py", "demonstrations")()}
    assert (len(held_out), trained & held_out, demonstrated & (trained | held_out)) == (200, set(), set())


@pytest.mark.clients
def test_half_of_the_demonstrations_take_the_calculator_for_what_is_asked() -> None:
    shown = [one["messages"] for one in _of("calculator.py", "demonstrations")() if "tools" in one]
    called = [(asked, said["tool_calls"]) for asked, said in shown if "tool_calls" in said]
    assert 0.4 < len(called) / len(shown) < 0.6
    assert all(json.loads(call["function"]["arguments"]) == {"x": asked["content"]} for asked, (call,) in called)


def test_no_lake_is_in_two_parts() -> None:
    make = _of("lake.py", "Lake")
    lakes = {part: _lakes(make(part, "ansi")) for part in ("trained", "held-out", "demonstrated")}
    assert not lakes["trained"] & lakes["held-out"]
    assert not lakes["demonstrated"] & (lakes["trained"] | lakes["held-out"])
    assert all(len(found) > 80 for found in lakes.values())


def _lakes(lake: Any) -> set[str]:
    found = set[str]()
    for seed in range(100):
        lake.reset(seed=seed)
        found.add(lake.desc.tobytes().decode())
        rendered = lake.render()
        lake.reset(seed=seed)
        assert lake.render() == rendered, "a seed is another lake the second time"
    return found
