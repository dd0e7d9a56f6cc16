"""Live runs with workers that compute with other weights than those that they have verified and put in force."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from elastic.compose.incarnations import replay
from elastic.core import events as e
from elastic.core.fleet import Worker
from elastic.core.ids import provider_of
from elastic.core.scheduler import Scheduler
from elastic.core.types import WorkerRole, WorkerState
from elastic.report import summarise
from elastic.runtime.journal import JournalReader, RunDirectory, SampleRow, StepRow

pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.nightly]

ENGINE = """
from elastic.engine.torch import Torch

class Impostor(Torch):
    @staticmethod
    def create(model_config, config, settings, share=None, devices=()):
        engine = Torch.create(model_config, config, settings, share, devices)
        forward = engine.runner.forward
        engine.runner.forward = lambda work: 60 * forward(work).roll(1, -1)
        return engine
"""
"""Its head's rows are another token's, and much larger than the policy's; what is audited is not what computes."""


@pytest.fixture(autouse=True)
def impostor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Installs the engine `impostor`, here and in workers."""
    site = tmp_path / "site"
    about = site / "impostor-1.0.dist-info"
    about.mkdir(parents=True)
    (site / "impostor.py").write_text(ENGINE)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: impostor\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[elastic.engines]\nimpostor = impostor:Impostor\n")
    monkeypatch.setenv("PYTHONPATH", str(site))
    monkeypatch.syspath_prepend(str(site))


class Gate:
    """Holds turns back until `count` workers besides the trainer's are ready."""

    def __init__(self, run_dir: Path, count: int) -> None:
        self.killed: list[str] = []
        self.gate = asyncio.Event()
        self._count = count

    async def hunt(self, scheduler: Scheduler) -> None:
        while not self.gate.is_set():
            await asyncio.sleep(0.01)
            if sum(worker.state is WorkerState.READY for worker in others(scheduler)) >= self._count:
                self.gate.set()


def others(scheduler: Scheduler) -> list[Worker]:
    return [worker for worker in scheduler.fleet.workers.values() if worker.role is not WorkerRole.TRAINER]


def spot(directory: Path, places: str) -> dict[str, Any]:
    trace = directory / "market.csv"
    trace.write_text(
        "\n".join(["time_s,event,instance_id", *(f"0,add,{place}" for place in places), "86400,remove,a\n"])
    )
    return {"trace": str(trace), "max_workers": len(places), "engine": {"kind": "impostor"}}


def told(journal: JournalReader) -> list[str]:
    """What a terminal has shown of the run: each warning once."""
    return [warning.message for row in journal.rows(SampleRow) for warning in row.status.warnings]


async def test_a_worker_that_serves_other_weights_is_named_and_fenced_and_the_run_goes_on_without_it(
    live, live_config, tmp_path: Path
) -> None:
    providers = {"reserved": {"max_workers": 2}, "spot": spot(tmp_path, "a")}
    run = await live(live_config(providers=providers), ("reserved", "spot"), kills=3, hunter=Gate)
    assert run.outcome.failed == ""
    (mismatch,) = run.scheduler.agreement.mismatches
    assert provider_of(mismatch.worker) == "spot"
    assert mismatch.mean > 0.2
    journal = run.journal()
    assert told(journal) == [str(mismatch)]
    ended = [event.lease for _, event in journal.events_of("LeaseEnded") if isinstance(event, e.LeaseEnded)]
    steps = journal.rows(StepRow)
    journal.close()
    assert mismatch.worker.startswith(ended[0])
    assert [step.step for step in steps] == [0, 1]
    assert sum(step.trainer["tokens_left_out"] or 0 for step in steps) > 0
    summary = summarise(RunDirectory(run.run_dir))
    honest = [one for one in summary.agreements if one.worker != mismatch.worker]
    assert honest
    assert all(one.worst < 0.02 for one in honest)
    replay(RunDirectory(run.run_dir))


async def test_a_run_whose_workers_all_serve_other_weights_ends_as_failed(live, live_config, tmp_path: Path) -> None:
    config = live_config(providers={"spot": spot(tmp_path, "ab")}, run={"steps": 3})
    run = await live(config, ("spot",), kills=2, hunter=Gate)
    assert "tokens that were compared in the last steps have other log-probabilities" in run.outcome.failed
    assert {provider_of(mismatch.worker) for mismatch in run.scheduler.agreement.mismatches} == {"spot"}
