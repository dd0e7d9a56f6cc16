"""Runs that others train, on virtual time: whatever goes wrong, who asks is answered, by weights that were offered."""

import os
import subprocess
import sys

import pytest

from elastic.testing.faults.kinds import FaultKind
from elastic.testing.faults.shell.outside.plan import draw_outside
from elastic.testing.faults.shell.simulate import simulate
from elastic.testing.faults.worlds import live

SEED, SEVERAL_SEED = 7, 35
KILLS = [FaultKind.KILL_TRAINER, FaultKind.KILL_ORCHESTRATOR, FaultKind.KILL_WORKER, FaultKind.KILL_FRONT]


def test_who_asks_is_answered_whatever_is_killed() -> None:
    assert simulate(draw_outside(SEED, KILLS)).faults


def test_a_request_of_several_choices_is_answered_whole_where_some_were_given_and_others_not() -> None:
    """A whole world with a client outside."""
    assert simulate(draw_outside(SEVERAL_SEED)).faults


@pytest.mark.nightly
def test_whatever_goes_wrong_too() -> None:
    first = int.from_bytes(os.urandom(3), "big")
    for seed in (*range(12), *range(first, first + 12)):
        simulate(draw_outside(seed))


@pytest.mark.nightly
def test_one_seed_gives_one_history_whatever_the_hashes() -> None:
    program = f"from elastic.testing.faults.worlds import live; print(live('outside', {SEED}).history)"
    environment = os.environ | {"PYTHONHASHSEED": "2"}
    command = [sys.executable, "-c", program]
    told = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True, timeout=300)
    assert told.stdout.strip() == live("outside", SEED).history
