"""Runs of the production shell on virtual time: whatever goes wrong, they come to what they had to come to."""

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from elastic.runtime.episodes import OpenTurn
from elastic.testing.faults.kinds import FaultKind
from elastic.testing.faults.outcome import WorldFailed
from elastic.testing.faults.shell.plan import draw_plan
from elastic.testing.faults.shell.shrink import shrunk
from elastic.testing.faults.shell.simulate import simulate

SEEDS = 3, 10
"""That every change is tried with: they have many faults, and few groups."""
FRESH = 4
"""Of so many seeds that no list has, the one with the second fewest faults is tried with every change: some worlds take
ten times as long."""
LASTING_SEEDS = {"hold": 5, "trickle": 5, "badstart": 4, "spam": 3, "flap": 3}
"""Seeds of worlds with one worker that lies for as long as it lives."""
PLANTED = "outbox_not_emptied"
"""One of the bugs: `benchmarks/faults.py` tries all."""


@pytest.mark.nightly
def test_more_runs_come_to_their_end() -> None:
    for seed in range(12):
        simulate(draw_plan(seed))


def test_a_fresh_seed_does_too() -> None:
    """A whole world of a seed that no list has: it finds what the fixed ones do not."""
    first = int.from_bytes(os.urandom(3), "big")
    _, plan, *_ = sorted(map(draw_plan, range(first, first + FRESH)), key=lambda plan: len(plan.faults))
    simulate(plan)


@pytest.mark.parametrize("seed", [10, pytest.param(2, marks=pytest.mark.nightly)])
def test_what_agents_were_given_whole_is_trained_whatever_is_killed(seed: int) -> None:
    kills = [FaultKind.KILL_FRONT, FaultKind.KILL_ORCHESTRATOR, FaultKind.KILL_WORKER]
    assert simulate(draw_plan(seed, kills)).faults


@pytest.mark.parametrize("seed", [2, pytest.param(1, marks=pytest.mark.nightly)])
def test_every_version_is_evaluated_once_whatever_is_killed(seed: int) -> None:
    kills = [FaultKind.KILL_ORCHESTRATOR, FaultKind.KILL_WORKER, FaultKind.KILL_TRAINER]
    plan = msgspec.structs.replace(draw_plan(seed, kills), evaluates=6)
    assert simulate(plan).faults


@pytest.mark.parametrize("seed", [1, pytest.param(0, marks=pytest.mark.nightly)])
def test_nobody_is_fenced_for_the_orchestrators_own_silence(seed: int) -> None:
    """Whole worlds in which the orchestrator's machine is suspended."""
    simulate(draw_plan(seed, [FaultKind.HOLD_UP]))


@pytest.mark.parametrize("seed", [7, pytest.param(4, marks=pytest.mark.nightly)])
def test_no_peer_is_judged_by_the_time_that_the_machine_slept_and_leases_are(seed: int) -> None:
    assert simulate(draw_plan(seed, [FaultKind.SUSPEND])).faults


@pytest.mark.parametrize(("seed", "kind"), [(3, FaultKind.KILL_RANK), (4, FaultKind.HANG_RANK)])
def test_a_trainer_whose_rank_dies_or_hangs_is_replaced_and_leaves_no_half_checkpoint(
    seed: int, kind: FaultKind
) -> None:
    """Whole worlds with ranks, of which one dies at a drawn moment."""
    assert simulate(draw_plan(seed, [kind])).faults


@pytest.mark.parametrize(("seed", "kind"), [(0, FaultKind.KILL_ENVIRONMENT), (3, FaultKind.HANG_ENVIRONMENT)])
def test_episodes_go_on_as_if_nothing_were_where_their_env_workers_die_or_hang(seed: int, kind: FaultKind) -> None:
    """Whole worlds with env workers, whose episodes are compared with undisturbed ones."""
    assert simulate(draw_plan(seed, [kind])).faults


@pytest.mark.parametrize("lie", LASTING_SEEDS)
def test_a_worker_that_lies_on_and_on_is_named_and_holds_nobody_up(lie: str) -> None:
    """A whole world for each lie, since a Byzantine worker is known by its time alone."""
    seed, kind = LASTING_SEEDS[lie], FaultKind(lie)
    assert simulate(draw_plan(seed, [kind])).faults


def test_runs_come_to_their_end_and_one_seed_gives_one_history_whatever_the_hashes() -> None:
    """In this process others were lived through before."""
    first, last = SEEDS
    program = "from elastic.system.imports import importing\nwith importing():\n"
    program += "    from elastic.testing.faults.shell.simulate import SHELL_WORLDS, simulate\n"
    program += f"print(simulate(SHELL_WORLDS['run'].draw({last}, ())).history)"
    command, environment = [sys.executable, "-c", program], os.environ | {"PYTHONHASHSEED": "2"}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as elsewhere:
        simulate(draw_plan(first))
        told, _ = elsewhere.communicate()
    assert told.strip() == simulate(draw_plan(last)).history


def test_a_failure_names_the_command_that_replays_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """And of its faults only those are left that it takes: none, where every run fails."""
    monkeypatch.delattr(OpenTurn, "end")
    plan = draw_plan(1, [FaultKind.CUT])
    some = msgspec.structs.replace(plan, faults=plan.faults[1:])
    with pytest.raises(WorldFailed, match="elastic simulate --faults --world run --seed 1 --only cut --keep 1"):
        simulate(some)
    assert shrunk(plan)[0].faults == ()
    assert shrunk(plan, limit_s=0)[0].faults == plan.faults


def test_a_planted_bug_is_found() -> None:
    """A planted bug needs a process whose source is patched, and a world in which it shows."""
    planted = [sys.executable, str(Path(__file__).with_name("planted.py")), "--known", PLANTED]
    assert subprocess.run(planted, check=False).returncode == 0
