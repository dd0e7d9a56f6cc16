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
    assert "allowed: --seed, --worlds, --world, --only, --keep, --shrink-within, --log, --json" in ended.err


def test_without_a_configuration_it_says_what_to_give(elastic) -> None:
    ended = elastic("simulate")
    assert ended.code == 2
    assert ended.err == "error: elastic simulate: give a configuration file, or --faults\n"


def test_worlds_are_for_faults(elastic) -> None:
    for option in (("--worlds", "3"), ("--world", "run"), ("--log",)):
        ended = elastic("simulate", "some.toml", *option)
        assert ended.code == 2
        assert f"{option[0]} is for --faults" in ended.err


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--world", "moon"), "allowed: core, run, outside, pool, pool-shell"),
        (("--world", "core", "--only", "cut"), "--only is for --world run and --world outside and --world pool"),
        (("--world", "pool-shell", "--shrink-within", "3"), "--shrink-within is for --world run and"),
        (("--world", "run", "--only", "cut,rain"), "unknown rain; allowed: kill_worker"),
        (("--world", "run", "--only", "kill_pool"), "unknown kill_pool"),
        (("--world", "run", "--only", "cut", "--keep", "99"), "allowed: none, or numbers from 0 to"),
    ],
)
def test_a_world_says_what_it_takes(elastic, options: tuple[str, ...], told: str) -> None:
    ended = elastic("simulate", "--faults", *options)
    assert (ended.code, ended.out) == (2, "")
    assert told in ended.err


@pytest.mark.parametrize("world", ["pool", pytest.param("run", marks=pytest.mark.nightly), "pool-shell"])
def test_the_world_of_a_seed_is_lived_through_again(elastic, world: str) -> None:
    keep = () if world == "pool-shell" else ("--keep", "none")
    ended = elastic("simulate", "--faults", "--world", world, "--seed", "4", *keep)
    assert ended.code == 0
    assert "1 worlds from seed 4" in ended.out


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
    """The command as a process, which a real signal interrupts."""
    process = start("simulate", "--faults", "--worlds", "1000000", "--json")
    assert "worlds from seed 0" in process.stderr.readline()
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    told = json.loads(out)
    assert process.returncode == 130
    assert told["interrupted"]
    assert told["seeds"] == len(told["histories"]) > 0
