"""Runs as pages show them: journals with so many steps, events and losses, written without running anything."""

import json
import math
from collections.abc import Iterator
from pathlib import Path

from elastic.config import JournalConfig
from elastic.core import events as e
from elastic.core.ledger import DeviceBook
from elastic.core.policy import StepRecord
from elastic.core.types import NS_PER_S, Account, Capabilities, EndCause, Offer, WorkerRole
from elastic.runtime.journal import GroupRow, JournalRecord, RunDirectory, SampleRow, StepRow, TrajectoryRow
from elastic.runtime.journal.frames import event_row
from elastic.runtime.status import ProviderStatus, RunStatus

STEP_S = 30.0
AT_ONCE = 5_000
"""Records that are appended before their writer is waited for."""
CAPABILITIES = Capabilities(engine="torch", replayable_sampling=True, max_context_tokens=1024, device="cpu")


class WrittenRun:
    """The journal of a run with so many steps, of `members` trajectories each, and some `events`; it may grow.

    A spot worker is lost every ten steps, and another follows. `name` is what workers are called besides, and `cause`
    why a trajectory of each step failed.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        steps: int,
        of: int = 0,
        events: int = 0,
        members: int = 8,
        name: str = "",
        cause: str = "",
        **notes: str,
    ) -> None:
        """`of` is how many steps the run is to have: no more, unless given."""
        run_dir.mkdir(parents=True, exist_ok=True)
        config = json.dumps({"model": {"checkpoint": "policy"}})
        told = {"run": run_dir.name, "config": config, "status": "running", **notes}
        self._journal = RunDirectory(run_dir).begin_journal(JournalConfig.model_validate({}), notes=told)
        self._of = of or steps
        self._each, self._members, self._name, self._cause = events // max(1, steps), members, name, cause
        self._waits = 0
        self.steps = 0
        self.append(event_row(_joined("trainer-1"), 0))
        for _ in range(steps):
            self._step()
        self._journal.books(list(_books(steps, name)))
        self._journal.durable().result(60)

    def grow(self) -> RunStatus:
        """One more step, which readers see now: how the run stands then."""
        self._step()
        self._journal.durable().result(60)
        return status_at(self.steps, self._of)

    def close(self) -> None:
        self._journal.close()

    def _step(self) -> None:
        at_ns = round((self.steps + 1) * STEP_S * NS_PER_S)
        for record in (
            *_events(self.steps, at_ns, self._each, self._name),
            *_results(self.steps, at_ns, self._members, self._cause),
            SampleRow(t_ns=at_ns, status=status_at(self.steps + 1, self._of)),
        ):
            self.append(record)
        self.steps += 1

    def append(self, record: JournalRecord) -> None:
        """Append another record; its writer is waited for now and then."""
        self._journal.append(record)
        self._waits += 1
        if self._waits == AT_ONCE:
            self._waits = 0
            self._journal.durable().result(60)


def write_run(run_dir: Path, *, steps: int, events: int = 0, members: int = 8, name: str = "", cause: str = "") -> Path:
    """Write such a run whole."""
    WrittenRun(run_dir, steps=steps, events=events, members=members, name=name, cause=cause).close()
    return run_dir


def _worker(step: int, name: str) -> str:
    return f"spot{name}-{step // 10 + 1}"


def _joined(worker: str) -> e.WorkerJoined:
    return e.WorkerJoined(worker=worker, epoch=1, capabilities=CAPABILITIES, weights_version=0)


def _offer(step: int) -> e.OfferChanged:
    """A market that has less, and asks for more, every other time."""
    scarce = step % 10 == 5
    return e.OfferChanged(
        offer=Offer(
            provider="spot",
            role=WorkerRole.ELASTIC,
            available=1 if scarce else 4,
            usd_per_gpu_hour=3.1 if scarce else 2.4,
        )
    )


def _events(step: int, at_ns: int, each: int, name: str) -> Iterator[JournalRecord]:
    began_ns, worker = at_ns - round(STEP_S * NS_PER_S), _worker(step, name)
    if step % 5 == 0:
        yield event_row(_offer(step), began_ns)
    if step % 10 == 0:
        yield event_row(e.LeaseGranted(lease=worker, workers=(worker,)), began_ns)
        yield event_row(_joined(worker), began_ns + 5 * NS_PER_S)
    for number in range(each):
        done = e.TrajectoryFinished(trajectory=f"{step}/{number}/0", reward=1.0, tokens=30)
        yield event_row(done, began_ns + number)
    yield event_row(e.WeightsPublished(worker="trainer-1", epoch=1, version=step + 1), at_ns - 2)
    if step % 10 == 9:
        yield event_row(
            e.LeaseNotice(lease=worker, deadline_ns=at_ns, reason=f"the market took {worker} back"), at_ns - 1
        )
        yield event_row(e.LeaseEnded(lease=worker, cause=EndCause.PREEMPTED), at_ns)


def _results(step: int, at_ns: int, members: int, cause: str) -> Iterator[JournalRecord]:
    rewards = [float((step * 7 + member) % 3 > 0) for member in range(members)]
    for member, reward in enumerate(rewards):
        failed = bool(cause) and member == 0
        yield TrajectoryRow(
            trajectory=f"{step}/0/{member}",
            step=step,
            group=f"{step}/0",
            started_ns=at_ns - 10 * NS_PER_S,
            ended_ns=at_ns,
            reward=None if failed else reward,
            cause=cause if failed else "",
            turns=3,
            policy_tokens=30 + member,
            token_ids=b"",
            truncated=member == 1,
            environment="lake",
        )
    yield GroupRow(
        group=f"{step}/0",
        t_ns=at_ns,
        step=step,
        version=step,
        dropped="",
        lengths=[30] * members,
        tokens_by_age={0: 100, 1: 20},
    )
    record = StepRecord(
        step=step,
        duration_ns=round(STEP_S * NS_PER_S),
        seeding_ns=0,
        rollout_ns=round(STEP_S * NS_PER_S / 2),
        groups_trained=1,
        groups_dropped=0,
    )
    trainer: dict[str, float | None] = {
        "entropy": 1.0 + math.exp(-step / 50),
        "gradient_norm": 0.5,
        "mismatch_kl": 0.001 * (1 + step % 5),
        "mismatch_kl/spot/torch": 0.002,
    }
    yield StepRow(step=step, t_ns=at_ns, record=record, success_rate=sum(rewards) / members, trainer=trainer)


def status_at(step: int, steps: int) -> RunStatus:
    """How such a run stands at the end of a step."""
    spot = ProviderStatus(
        ready=step % 10 and 1,
        gpus=1,
        capacity_turns=8,
        running_turns=4,
        tokens=200 * step,
        preemptions=step // 10,
        usd=0.02 * step,
        usd_per_hour=2.4,
    )
    trainer = ProviderStatus(ready=1, gpus=1, capacity_turns=8, tokens=100 * step, usd=0.05 * step, usd_per_hour=6.0)
    return RunStatus(
        run="run",
        phase="running",
        step=step,
        steps=steps,
        elapsed_s=step * STEP_S,
        success_rate=0.5,
        last_success_rate=0.5,
        mean_reward=0.5,
        last_mean_reward=0.5,
        trajectories_running=8,
        queued_turns=2,
        tokens_per_s=300 / STEP_S,
        preemptions=step // 10,
        usd=0.07 * step,
        cpu_share=0.2,
        pacing_holds=True,
        trainer="asleep",
        providers={"spot": spot, "trainer": trainer},
    )


def _books(steps: int, name: str) -> Iterator[DeviceBook]:
    end_ns = round(steps * STEP_S * NS_PER_S)
    yield _book("trainer-1", "trainer", 0, None, end_ns)
    for first in range(0, steps, 10):
        opened_ns = round(first * STEP_S * NS_PER_S)
        closed_ns = round((first + 10) * STEP_S * NS_PER_S)
        worker = _worker(first, name)
        yield _book(worker, "spot", opened_ns, closed_ns if closed_ns <= end_ns else None, min(closed_ns, end_ns))


def _book(worker: str, provider: str, opened_ns: int, closed_ns: int | None, until_ns: int) -> DeviceBook:
    whole_ns = until_ns - opened_ns
    accounts = {Account.DECODE: whole_ns // 2, Account.BOOTING: whole_ns // 4}
    accounts[Account.IDLE] = whole_ns - sum(accounts.values())
    return DeviceBook(
        lease=worker,
        worker=worker,
        provider=provider,
        gpus=1,
        nano_usd_per_gpu_hour=2_400_000_000,
        opened_ns=opened_ns,
        cursor_ns=until_ns,
        closed_ns=closed_ns,
        accounts_ns=accounts,
    )
