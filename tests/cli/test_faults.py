"""`elastic simulate --faults`: what it tells, and what it refuses."""

import json
import signal

import pytest

from elastic.testing.faults.core.world import simulate


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        (("some.toml",), "CONFIG"),
        (("--providers", "spot"), "--providers"),
        (("--profile", "local"), "--profile"),
        (("--set", "run.steps=3"), "--set"),
        (("--hours", "3"), "--hours"),
        (("--turns-from", "latest"), "--turns-from"),
    ],
)
def test_what_does_not_apply_is_refused(elastic, extra: tuple[str, ...], named: str) -> None:
    ended = elastic("simulate", "--faults", *extra)
    assert (ended.code, ended.out) == (2, "")
    assert named in ended.err
    assert "allowed: --seed, --worlds, --json" in ended.err


def test_without_a_configuration_it_says_what_to_give(elastic) -> None:
    ended = elastic("simulate")
    assert ended.code == 2
    assert ended.err == "error: elastic simulate: give a configuration file, or --faults\n"


def test_worlds_are_for_faults(elastic) -> None:
    ended = elastic("simulate", "some.toml", "--worlds", "3")
    assert ended.code == 2
    assert "--worlds" in ended.err


def test_worlds_are_counted_and_reported(elastic) -> None:
    ended = elastic("simulate", "--faults", "--seed", "3", "--worlds", "2", "--json")
    assert ended.code == 0
    told = json.loads(ended.out)
    one, two = simulate(3), simulate(4)
    assert (told["first_seed"], told["seeds"], told["failed_seeds"]) == (3, 2, [])
    assert (told["events"], told["faults"]) == (one.events + two.events, one.faults + two.faults)
    assert [world["history"] for world in told["histories"]] == [one.history, two.history]
    assert not told["interrupted"]


@pytest.mark.slow
def test_interrupted_it_tells_what_it_has_seen(start) -> None:
    process = start("simulate", "--faults", "--worlds", "1000000", "--json")
    assert "worlds from seed 0" in process.stderr.readline()
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    told = json.loads(out)
    assert process.returncode == 130
    assert told["interrupted"]
    assert told["seeds"] == len(told["histories"]) > 0
