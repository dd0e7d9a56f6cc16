"""A pool's job whose trainer has two ranks gives its devices to another job between its steps, and takes them again.

The ranks are on one training node, or on one each of two.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from elastic.core import events as e
from elastic.runtime.journal import RunDirectory
from elastic.worker.trainer.base import saved
from elastic.worker.trainer.checkpoint_shards import StoredDirectory
from elastic.worker.trainer.ranks import ALONE
from tests.pool.live import STEPS, LivePool

pytestmark = [pytest.mark.trainers, pytest.mark.timeout(1500)]

WITHIN_S = 1200.0
TRAIN_S = 120.0
"""Planned for a step, so that no device is taken from ranks that share the cores with others."""
RANKS = """
[trainer]
kind = "transformers"
gpus = 2
entropy_coefficient = 0.01 # Groups of equal rewards are trained on, too.
checkpoint_every_steps = 1
[trainer.engine]
device = "cpu"
"""


@pytest.fixture(params=[1, 2], ids=["one_node", "two_nodes"])
def pool(tmp_path: Path, checkpoint: Path, request: pytest.FixtureRequest) -> Iterator[LivePool]:
    pool = LivePool(tmp_path, checkpoint, WITHIN_S)
    pool.start(train_nodes=request.param, train_gpus=2 // request.param, start_s=600)
    yield pool
    pool.stop()


def test_all_ranks_park_and_resume_under_one_permit_and_train_the_same_bits(pool: LivePool) -> None:
    pool.submit("other", 2)
    pool.submit("ranks", 1, beside=RANKS, train_s=TRAIN_S)
    jobs = pool.until(lambda jobs: all(job["over"] for job in jobs.values()))
    assert {job["state"] for job in jobs.values()} == {"finished"}
    run_dir = pool.run_dir("ranks")
    report = pool.elastic("report", run_dir)
    assert all(step["trainer"]["updates"] > 0 for step in report["steps"])
    spent_s = report["providers"]["trainer"]["accounts_s"]
    assert min(spent_s["parked"], spent_s["switching"], spent_s["training"]) > 0
    with RunDirectory(run_dir).journals() as journals:
        permits = [t_ns for journal in journals for t_ns, _ in journal.events_of(e.PermitGranted.__name__)]
    assert len(permits) >= STEPS

    reserved = ["--providers", "reserved", "--set", "providers.reserved.max_workers=1"]
    alone = pool.elastic("run", pool.write_job("alone", 1, RANKS), *reserved)
    expected = last_state(Path(alone["report"]).parent)
    found = last_state(run_dir)
    assert found.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())


def last_state(run_dir: Path) -> dict[str, Tensor]:
    """Masters and moments of the newest checkpoint. What is told beside them names who has generated."""
    state = StoredDirectory(saved(run_dir / "checkpoints")[-1])
    return state.load(list(state.shapes), ALONE)
