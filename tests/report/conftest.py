"""Journals as runs leave them, written with the real `SqliteJournal` and a real ledger."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from elastic.config import JournalConfig
from elastic.core import events as e
from elastic.core.ids import group_id
from elastic.core.ledger import NANO_USD_PER_USD, Ledger
from elastic.core.types import NS_PER_S, Account, EndCause
from elastic.protocol import wire
from elastic.report import Summary, summarise
from elastic.runtime.journal import (
    CallRow,
    GroupRow,
    MoveRow,
    PullRow,
    RunDirectory,
    SampleRow,
    SqliteJournal,
    StepRow,
    StepWeights,
    TurnRow,
    event_row,
)
from elastic.runtime.status import ProviderStatus
from functions.base import Call, CallOutcome
from tests.journal_rows import run_status, step_record, trajectory_row

FULL_BYTES = 1_190_016


class RunWriter:
    """Writes a journal in seconds, as the orchestrator would in nanoseconds."""

    def __init__(self, journal: SqliteJournal) -> None:
        self.journal = journal
        self.ledger = Ledger()

    def meta(self, **values: str) -> None:
        for key, value in values.items():
            self.journal.meta(key, value)

    def open(self, worker: str, provider: str, at_s: float, usd_per_gpu_hour: float = 0.0, gpus: int = 1) -> None:
        """Open the book of a lease with one worker, which has its name."""
        self.ledger.open(worker, worker, provider, gpus, usd_per_gpu_hour, _ns(at_s))

    def report(self, worker: str, accounts_s: Mapping[Account, float], at_s: float) -> None:
        """`accounts_s` is cumulative."""
        self.ledger.report(worker, {a: _ns(s) for a, s in accounts_s.items()}, 0, _ns(at_s))

    def grant(self, worker: str, provider: str, at_s: float, life_s: float) -> None:
        """Open the book of a lease that ends by time."""
        self.open(worker, provider, at_s)
        self.journal.append(
            event_row(e.LeaseGranted(lease=worker, workers=(worker,), expires_at_ns=_ns(at_s + life_s)), _ns(at_s))
        )

    def ready(self, worker: str, at_s: float) -> None:
        self.journal.append(event_row(e.WeightsApplied(worker=worker, epoch=1, version=0), _ns(at_s)))

    def end(self, worker: str, cause: EndCause, at_s: float, clean: bool | None = None) -> None:
        self.ledger.close(worker, _ns(at_s), clean=cause is EndCause.RELEASED if clean is None else clean)
        self.journal.append(event_row(e.LeaseEnded(lease=worker, cause=cause), _ns(at_s)))

    def books(self) -> None:
        self.journal.books(self.ledger.books.values())

    def sample(
        self,
        at_s: float,
        providers: Mapping[str, ProviderStatus],
        cpu_share: float = 0.5,
        late_share: float | None = None,
        **figures: float,
    ) -> None:
        """A sample of the run with the books as they are."""
        own = {"elapsed_s": at_s, "cpu_share": cpu_share, "late_share": late_share, "providers": dict(providers)}
        own |= figures
        status = run_status(run="sampled", steps=60, **own)
        self.journal.append(SampleRow(t_ns=_ns(at_s), status=status))
        self.books()

    def turn(self, name: str, requested_s: float, first_s: float | None, finished_s: float) -> None:
        first_ns = None if first_s is None else _ns(first_s)
        self.journal.append(
            TurnRow(
                turn=name,
                trajectory=name,
                requested_ns=_ns(requested_s),
                first_token_ns=first_ns,
                finished_ns=_ns(finished_s),
                prompt_tokens=24,
                tokens=5,
                attempts=1,
                cached_tokens=0,
                worker="w",
            )
        )

    def move(self, turn: str, worker: str, left_s: float, started_s: float, kept: int) -> None:
        self.journal.append(
            MoveRow(
                turn=turn,
                attempt=2,
                from_worker=worker,
                to_worker="another",
                left_ns=_ns(left_s),
                started_ns=_ns(started_s),
                accepted_tokens=kept,
            )
        )

    def call(self, at_s: float, usd: float) -> None:
        call = Call(
            function="reward",
            key="key",
            outcome=CallOutcome.OK,
            queued_s=0.0,
            cold_start_s=0.0,
            duration_s=0.1,
            usd=usd,
        )
        self.journal.append(CallRow.of(call, _ns(at_s)))

    def group(self, step: int, group: int, rewards: list[float | None], *, trained: bool, cause: str = "") -> None:
        """A finished group; a member without a reward failed for `cause`."""
        for n, reward in enumerate(rewards):
            why = cause if reward is None else ""
            self.trajectory(step, group, n, reward, why)
        scored = [reward for reward in rewards if reward is not None]
        dropped = "" if trained else "zero_variance" if len(scored) > 1 else "infrastructure: broken"
        ages = {0: 20 * len(rewards), 1: 5 * len(rewards)}
        self.fate(group_id(step, group), step, dropped, [25] * len(rewards), ages)
        if trained:
            self.journal.append(event_row(e.GroupTrained(worker="trainer", epoch=1, group=group_id(step, group)), 0))

    def fate(
        self, group: str, step: int, dropped: str, lengths: list[int] | None = None, ages: dict[int, int] | None = None
    ) -> None:
        self.journal.append(
            GroupRow(
                group=group,
                t_ns=0,
                step=step,
                version=step,
                dropped=dropped,
                lengths=lengths or [],
                tokens_by_age=ages or {},
            )
        )

    def trajectory(
        self, step: int, group: int, member: int, reward: float | None, cause: str = "", *, truncated: bool = False
    ) -> None:
        self.journal.append(
            trajectory_row(
                step, group, member, reward=reward, cause=cause, turns=5, policy_tokens=25, truncated=truncated
            )
        )

    def step(
        self,
        step: int,
        at_s: float,
        duration_s: float = 1.0,
        *,
        groups_trained: int = 12,
        groups_dropped: int = 4,
        groups_unusable: int = 0,
    ) -> None:
        record = step_record(
            step,
            duration_ns=_ns(duration_s),
            seeding_ns=_ns(duration_s / 6),
            rollout_ns=_ns(duration_s * 0.8),
            groups_trained=groups_trained,
            groups_dropped=groups_dropped,
        )
        layers = {"embedding": 0.004, **{str(n): 0.01 + 0.002 * n for n in range(12)}, "head": 0.0}
        changed = {layer: share * (1 + 0.1 * (step % 3)) for layer, share in layers.items()}
        weights = StepWeights(version=step + 1, changed=changed)
        trainer = {
            "loss": 0.1,
            "clip_share": None,
            "groups_unusable": float(groups_unusable),
            "weights_bytes": 20_000.0 + 100 * step,
            "weights_over_full": (20_000 + 100 * step) / FULL_BYTES,
            "weights_encode_s": 0.012,
            "weights_changed_share": 0.02,
        }
        self.journal.append(
            StepRow(step=step, t_ns=_ns(at_s), record=record, success_rate=0.5, trainer=trainer, weights=weights)
        )

    def pull(
        self,
        at_s: float,
        n_bytes: int,
        pull_s: float,
        apply_s: float,
        error: str = "",
        worker: str = "w",
        version: int = 1,
        refused: Sequence[wire.UnverifiedWeights] = (),
        **further: float,
    ) -> None:
        split_s: dict[Any, float] = {
            "wire": pull_s / 2,
            "decode": pull_s / 4,
            "queue": pull_s / 4,
            "apply": apply_s / 4,
            "pause": apply_s,
            **further,
        }
        self.journal.append(
            PullRow(
                t_ns=_ns(at_s),
                worker=worker,
                version=version,
                bytes=n_bytes,
                pull_s=pull_s,
                apply_s=apply_s,
                error=error,
                full_bytes=FULL_BYTES,
                split_s={} if error else split_s,
                refused=list(refused),
            )
        )


def _ns(value_s: float) -> int:
    return round(value_s * NS_PER_S)


@pytest.fixture(scope="session")
def run_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., RunDirectory]:
    """A run on disk: what fills the journal of each of its segments, the first segment's first."""

    def write(*fills: Callable[[RunWriter], None]) -> RunDirectory:
        run = RunDirectory(tmp_path_factory.mktemp("run"))
        for fill in fills:
            journal = run.begin_journal(JournalConfig.model_validate({}))
            fill(RunWriter(journal))
            journal.close()
        return run

    return write


@pytest.fixture(scope="session")
def summary_of(run_of) -> Callable[..., Summary]:
    """As in `run_of`."""
    return lambda *fills: summarise(run_of(*fills))


@pytest.fixture(scope="session")
def realistic(summary_of) -> Summary:
    """A run of some five minutes on three providers, with preemptions."""
    return summary_of(fill_realistic)


PRICES = {"trainer": 10.47, "serving": 0.0, "spot": 2.66}
SHARES = {Account.DECODE: 0.6, Account.PREFILL: 0.1, Account.LOADING: 0.02, Account.RECOMPUTE: 0.01, Account.IDLE: 0.2}
WALL_S, STEPS, GROUPS, MEMBERS = 312, 60, 4, 4


def fill_realistic(run: RunWriter) -> None:
    run.meta(run="frozenlake", seed="7", started_at="2026-11-20 14:03 UTC", providers="serving,spot")
    run.meta(status="finished", config='{"engine": {"pacing": {"prefill_tokens_per_s": 8000}}, "run": {"steps": 60}}')
    leases = [("trainer-1", "trainer", 0, 311), ("serving-1", "serving", 3, 130), ("serving-2", "serving", 160, 310)]
    leases += [(f"spot-{n}", "spot", 5 + 24 * n, 40 + 24 * n) for n in range(11)]
    tokens = dict.fromkeys(PRICES, 0)
    for second in range(WALL_S + 1):
        for lease, provider, opened_s, closed_s in leases:
            if second == opened_s:
                run.open(lease, provider, opened_s, PRICES[provider])
            elif opened_s < second < closed_s:
                run.report(lease, {account: share * (second - opened_s) for account, share in SHARES.items()}, second)
                tokens[provider] += 1000
            elif second == closed_s and provider == "spot":
                run.end(lease, EndCause.PREEMPTED, closed_s)
                run.move(f"{lease}/0", lease, closed_s, closed_s + 0.1, 7)
            elif second == closed_s:
                run.end(lease, EndCause.RELEASED, closed_s)
        bill = run.ledger.bill_nano_usd(_ns(second))
        up = {name: sum(one == name and opened_s <= second < closed_s for _, one, opened_s, closed_s in leases)
              for name in PRICES}  # fmt: skip
        usd = {name: bill.get(name, 0) / NANO_USD_PER_USD for name in PRICES}
        run.sample(second, {n: ProviderStatus(ready=up[n], tokens=tokens[n], usd=usd[n]) for n in PRICES}, 0.66)
    for step in range(STEPS):
        _train(run, step, (step + 1) * WALL_S / (STEPS + 0.5), leases)


def _train(run: RunWriter, step: int, at_s: float, leases: list[tuple[str, str, int, int]]) -> None:
    """Ever more groups succeed, one member has failed, and groups without a difference are dropped."""
    for group in range(GROUPS):
        wins = min(MEMBERS, step // 20 + group)
        rewards: list[float | None] = [float(member < wins) for member in range(MEMBERS)]
        if step == group == 5:
            rewards[0] = None
        run.group(step, group, rewards, trained=0 < wins < MEMBERS, cause="the environment did not answer within 30 s")
        run.turn(f"t{step}-{group}", at_s - 2, at_s - 1.9 + 0.01 * group, at_s - 1 + 0.1 * group)
    run.journal.append(event_row(e.WeightsPublished(worker="trainer", epoch=1, version=step + 1), _ns(at_s)))
    run.step(step, at_s, WALL_S / STEPS)
    for lease, provider, opened_s, closed_s in leases:
        if provider != "trainer" and opened_s <= at_s < closed_s:
            run.pull(at_s + 0.1, 30_000, 0.03, 0.01, worker=lease, version=step + 1)
