"""Jobs in a pool on virtual time: whatever goes wrong, each comes to what follows from its own seed."""

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from elastic.testing.faults.kinds import FaultKind
from elastic.testing.faults.shell.pooled.plan import draw_pooled
from elastic.testing.faults.shell.simulate import simulate
from elastic.testing.faults.worlds import live

FIXED = 3
"""A seed that every change is tried with."""
PLANTED = "parked_is_said_too_early", "resident_parks_no_engine", "trainer_computes_while_parked"


@pytest.mark.nightly
def test_jobs_in_a_pool_come_to_their_end_and_one_seed_gives_one_history() -> None:
    """A world of production shells is lived through twice, once where texts hash to other numbers."""
    program = "from elastic.system.imports import importing\nwith importing():\n"
    program += "    from elastic.testing.faults.shell.simulate import SHELL_WORLDS, simulate\n"
    program += f"print(simulate(SHELL_WORLDS['pool'].draw({FIXED}, ())).history)"
    told = subprocess.run(
        [sys.executable, "-c", program], env=os.environ | {"PYTHONHASHSEED": "3"}, capture_output=True, check=True
    ).stdout
    assert told.decode().strip() == live("pool", FIXED).history


@pytest.mark.nightly
@pytest.mark.parametrize("seed", [1, 2])
def test_jobs_in_another_pool_do_too(seed: int) -> None:
    live("pool", seed)


def test_a_pool_that_dies_often_loses_nothing() -> None:
    """A whole world of a pool's production shells, with several lives of the pool."""
    kills = [FaultKind.KILL_POOL, FaultKind.KILL_NODE_AGENT, FaultKind.KILL_RESIDENT]
    assert simulate(draw_pooled(1, kills)).incarnations > 3


@pytest.mark.nightly
@pytest.mark.parametrize("seed", [1, 3])
def test_jobs_in_a_pool_are_evaluated_in_the_phases_of_their_rollouts(seed: int) -> None:
    plan = draw_pooled(seed)
    jobs = [msgspec.structs.replace(job, run=msgspec.structs.replace(job.run, evaluates=5)) for job in plan.jobs]
    simulate(msgspec.structs.replace(plan, jobs=(*jobs,)))


def test_parked_residents_follow_the_weights() -> None:
    """Their workers' leases are over then, and with them what these alone could read."""
    plan = draw_pooled(7)
    assert simulate(msgspec.structs.replace(plan, faults=())).followed > 0


@pytest.mark.nightly
def test_planted_bugs_of_a_job_s_side_are_found() -> None:
    planted = [sys.executable, str(Path(__file__).with_name("planted.py")), "--known", *PLANTED]
    assert subprocess.run(planted, check=False).returncode == 0


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_many_worlds_of_jobs_in_a_pool() -> None:
    for seed in range(2000, 3000):
        live("pool", seed)
