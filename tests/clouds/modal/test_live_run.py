"""`elastic run` with rollouts and rewards on Modal: leases end by time, containers and the orchestrator are lost."""

import contextlib
import itertools
import json
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from benchmarks import _crashes, _runs
from elastic.compose.incarnations import replay
from elastic.core.events import LeaseEnded, LeaseGranted, RewardScored, TokensReceived, WeightsApplied
from elastic.core.ids import lease_of, tagged
from elastic.core.ledger import NANO_USD_PER_USD
from elastic.core.types import EndCause
from elastic.protocol.run_secrets import RunSecrets
from elastic.report import summarise
from elastic.runtime.journal import JournalError, RunDirectory
from providers.modal import CALL
from tests import proof
from tests.cli.conftest import CONFIG
from tests.clouds.modal_server import Bench

pytestmark = [pytest.mark.clouds, pytest.mark.timeout(1200)]

PATIENCE_S = 240.0
BUDGET_USD, STOPPED = 0.08, 3
SETTINGS = (
    "run.steps=100000",
    "rewards.name=frozenlake",
    "rewards.pool=modal",
    "rewards.timeout_s=30",
    "rewards.pool_settings={batch=4}",
    "seeding.policy=none",
    "providers.modal.max_workers=1",
    "providers.modal.cores=1",
    "providers.modal.memory_mb=2048",
    "providers.modal.gpu=H100",
    "providers.modal.cold_start_s=6",
    "providers.modal.ask_s=10",
    "providers.modal.reconcile_s=5",
)
SLOW = 'engine.pacing={prefill_tokens_per_s=8000, decode_step_s={"1"=0.5}}'
"""Turns of seconds, so that some are under way whenever a lease ends."""
OFTEN_REPLACED = "providers.modal.lease_s=80", "providers.modal.ask_s=60"
"""What starts again waits for half a minute: a successor may have been asked for already."""


class OnModal:
    """A run whose rollout workers are Modal's containers, and what its journal and Modal say of them."""

    def __init__(self, directory: Path, checkpoint: Path, platform: Bench, *own: str) -> None:
        self.platform = platform
        config = directory / "small.toml"
        text = CONFIG.format(directory=directory, checkpoint=checkpoint).partition("[providers.spot]")[0]
        config.write_text(text)
        arguments = [str(config), "--providers", "modal", *_runs.sets([*SETTINGS, *own])]
        self.run = _crashes.CrashingRun(directory / "runs", arguments)

    @property
    def name(self) -> str:
        run_dir = self.run.run_dir
        return f"{tagged(run_dir.name, RunSecrets.of(run_dir).host_token('modal modal'))}/modal"

    def events(self) -> list[Any]:
        with contextlib.suppress(JournalError, ValueError), RunDirectory(self.run.run_dir).journals() as journals:
            return [event for journal in journals for _, event in journal.events()]
        return []

    def of(self, kind: type) -> list[Any]:
        found = [event for event in self.events() if isinstance(event, kind)]
        return [event for event in found if getattr(event, "lease", "modal").startswith("modal")]

    def ended(self, cause: EndCause) -> list[str]:
        return [event.lease for event in self.of(LeaseEnded) if event.cause is cause]

    def tokens(self) -> dict[str, int]:
        """Accepted of each of Modal's workers so far."""
        workers = {worker for grant in self.of(LeaseGranted) for worker in grant.workers}
        counts = dict.fromkeys(workers, 0)
        for event in self.of(TokensReceived):
            if event.worker in workers:
                counts[event.worker] += sum(chunk.count for chunk in event.chunks)
        return counts

    def moved_warm(self) -> list[str]:
        """Turns that went on with a lease's successor, which had its weights before that lease ended by its time."""
        at = {}
        went: dict[str, list[str]] = {}
        for number, event in enumerate(self.events()):
            match event:
                case LeaseGranted() if event.lease.startswith("modal"):
                    at |= {("granted", worker): number for worker in event.workers}
                case WeightsApplied():
                    at.setdefault(("ready", event.worker), number)
                case LeaseEnded() if event.cause in (EndCause.RELEASED, EndCause.EXPIRED):
                    at["ended", event.lease] = number
                case _:
                    pass
        with RunDirectory(self.run.run_dir).journals() as journals:
            for frame in (frame for journal in journals for frame in journal.frames()):
                for turn in filter(None, frame.turns):
                    workers = went.setdefault(turn, [])
                    workers += [frame.worker] if frame.worker not in workers[-1:] else []

        def warm(before: str, after: str) -> bool:
            ended = at.get(("ended", lease_of(before)), 0)
            return at.get(("granted", before), ended) < at.get(("ready", after), ended) < ended

        return [turn for turn, workers in went.items() if any(warm(*pair) for pair in itertools.pairwise(workers))]

    def until(self, what: str, holds: Callable[[], object]) -> None:
        self.run.until(what, holds, PATIENCE_S)

    def more_tokens(self) -> None:
        had = sum(self.tokens().values())
        self.until("tokens of Modal's workers", lambda: sum(self.tokens().values()) > had)

    def containers(self) -> list[dict[str, Any]]:
        return self.platform.running(self.name)

    def leases_of(self, container: Mapping[str, Any]) -> list[str]:
        """Which leases have a container's call, by what the run keeps of them."""
        found: list[str] = []
        for path in (self.run.run_dir / "leases").glob("modal-*.json"):
            with contextlib.suppress(OSError, ValueError):
                record = json.loads(path.read_bytes())
                found += [record["name"]] if record["kept"].get(CALL) in container["calls"] else []
        return found

    def stop(self) -> None:
        """As by ^C; it ends in time."""
        self.run.process.send_signal(signal.SIGINT)
        self.run.process.wait(PATIENCE_S)

    def nothing_is_left(self) -> None:
        """By Modal's own record."""
        assert self.containers() == []
        record = self.platform.record()
        ours = {call for one in record["containers"] if one["run"] == self.name for call in one["calls"]}
        assert not ours & set(record["unfinished_calls"])
        deadline_s = time.monotonic() + PATIENCE_S
        while self.platform.running():  # Rewards' containers go when idle.
            assert time.monotonic() < deadline_s, self.platform.running()
            time.sleep(0.2)

    def nothing_was_lost(self) -> None:
        run = RunDirectory(self.run.run_dir)
        assert proof.check_tokens(run) == (0, 0)
        assert replay(run).ledger.imbalance_ns() == 0

    def bills(self) -> tuple[float, float]:
        """What the run says that Modal's containers cost, and what Modal does."""
        run = RunDirectory(self.run.run_dir)
        ours = replay(run).ledger.bill_nano_usd(0)["modal"] / NANO_USD_PER_USD
        theirs = sum(one["usd"] for one in self.platform.record()["containers"] if one["run"] == self.name)
        return ours, theirs


def test_turns_move_over_warm_and_nothing_is_lost_with_containers_or_the_orchestrator(
    tmp_path: Path, checkpoint: Path, platform: Bench
) -> None:
    live = OnModal(tmp_path, checkpoint, platform, *OFTEN_REPLACED, SLOW)
    with contextlib.ExitStack() as undo:
        undo.callback(live.run.discard)
        live.more_tokens()
        live.until("rewards", lambda: live.of(RewardScored))

        live.until("turns that went on with a successor", live.moved_warm)

        live.until("a container", live.containers)
        platform.kill(live.containers()[0]["task"])
        live.until("its lease has ended", lambda: live.ended(EndCause.LOST))
        live.more_tokens()

        live.until("a container of a lease", lambda: any(live.leases_of(one) for one in live.containers()))
        first = next(one for one in live.containers() if live.leases_of(one))
        (former,) = live.leases_of(first)
        platform.preempt(first["task"])
        live.until("another lease has its call", lambda: set(live.leases_of(first)) - {former})
        (lease,) = live.leases_of(first)
        live.until("tokens of that lease", lambda: sum(n for w, n in live.tokens().items() if lease_of(w) == lease))

        before = {one["task"] for one in live.containers()}
        live.run.kill("orchestrator")
        live.run.resume()
        live.until("the run has gone on", live.run.has_gone_on)
        assert before & {one["task"] for one in live.containers()}, "a container outlived its orchestrator"
        live.more_tokens()
        # A start of a call that is given up before it begins would be on nobody's bill.
        live.until("all containers have begun", lambda: all(one["calls"] for one in live.containers()))
        live.stop()
    live.nothing_is_left()
    live.nothing_was_lost()
    ours, theirs = live.bills()
    assert ours == pytest.approx(theirs, rel=1e-3)


def test_a_budget_holds_by_modals_own_bill(tmp_path: Path, checkpoint: Path, platform: Bench) -> None:
    before = len(platform.record()["containers"])
    live = OnModal(tmp_path, checkpoint, platform, f"run.budget_usd={BUDGET_USD}", "trainer.usd_per_gpu_hour=1")
    with contextlib.ExitStack() as undo:
        undo.callback(live.run.discard)
        live.until("rewards", lambda: live.of(RewardScored))
        assert live.run.process.wait(PATIENCE_S) == STOPPED
    live.nothing_is_left()
    summary = summarise(RunDirectory(live.run.run_dir))
    theirs = sum(one["usd"] for one in platform.record()["containers"][before:])
    assert BUDGET_USD / 2 < summary.usd <= BUDGET_USD
    assert theirs + summary.providers["trainer"].usd <= BUDGET_USD
