"""Journals as runs leave them, written with the real `Journal` and a real ledger."""

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

from elastic.core import events as e
from elastic.core.ledger import NANO_USD_PER_USD, Ledger
from elastic.core.types import NS_PER_S, Account, EndCause
from elastic.report import Summary, summarise
from elastic.runtime.journal import Journal, JournalReader
from elastic.runtime.status import ProviderStatus, RunStatus

SHARES: Mapping[str, Mapping[Account, float]] = {
    "trainer": {Account.TRAINING: 0.52, Account.DECODE: 0.2, Account.PREFILL: 0.06, Account.IDLE: 0.22},
    "serving": {
        Account.DECODE: 0.47,
        Account.PREFILL: 0.12,
        Account.APPLYING: 0.03,
        Account.RECOMPUTE: 0.01,
        Account.IDLE: 0.14,
        Account.ASLEEP: 0.13,
        Account.SERVING: 0.1,
    },
    "spot": {
        Account.DECODE: 0.6,
        Account.PREFILL: 0.15,
        Account.LOADING: 0.02,
        Account.APPLYING: 0.03,
        Account.RECOMPUTE: 0.02,
        Account.IDLE: 0.18,
    },
}


@dataclass
class Lease:
    name: str
    provider: str
    opened_s: float
    closed_s: float
    cause: EndCause | None


class SyntheticRun:
    """Writes a run of `wall_s` seconds second by second: leases, books, turns, moves, steps and samples."""

    def __init__(self, journal: Journal, leases: list[Lease], wall_s: float, steps: int, seed: int) -> None:
        self.journal = journal
        self.leases = leases
        self.wall_s = wall_s
        self.steps = steps
        self.random = random.Random(seed)
        self.ledger = Ledger()
        self.prices = {"trainer": 10.47, "spot": 2.66, "serving": 0.0}
        self.rates = {"trainer": 900.0, "serving": 1100.0, "spot": 1250.0}
        self.boot_s = {"trainer": 2.0, "serving": 0.6, "spot": 2.4}
        self.counts: dict[str, ProviderStatus] = {}
        self.reported: dict[str, dict[Account, int]] = {}

    def write(self) -> None:
        ticks = round(self.wall_s * 2)
        for tick in range(ticks + 1):
            self._tick(tick / 2, 0.5 if tick else 0.0)
        for step in range(self.steps):
            self._step(step)
        self._turns()

    def _tick(self, now_s: float, elapsed_s: float) -> None:
        for lease in self.leases:
            count = self.counts.setdefault(lease.provider, ProviderStatus())
            if lease.opened_s <= now_s and lease.name not in self.ledger.books:
                price = self.prices.get(lease.provider, 1.0)
                self.ledger.open(lease.name, lease.name, lease.provider, 1, price, _ns(lease.opened_s))
                self.reported[lease.name] = dict.fromkeys(Account, 0)
            book = self.ledger.books.get(lease.name)
            if book is None or book.closed_ns is not None:
                continue
            ready_s = now_s - lease.opened_s - self.boot_s.get(lease.provider, 1.0)
            if lease.cause is not None and lease.closed_s <= now_s:
                at_ns = _ns(lease.closed_s)
                self.ledger.close(lease.name, at_ns, clean=lease.cause is EndCause.RELEASED)
                self.journal.event(e.LeaseEnded(lease=lease.name, cause=lease.cause), at_ns)
                count.leases_ended += 1
                count.preemptions += lease.cause is EndCause.PREEMPTED
                if lease.cause is EndCause.PREEMPTED and ready_s > 0:
                    self._moves(lease)
            elif ready_s > 0:
                self._report(lease, min(ready_s, elapsed_s), now_s)
                count.tokens += round(self._rate(lease, now_s) * elapsed_s)
        self._sample(now_s)

    def _rate(self, lease: Lease, now_s: float) -> float:
        phase = now_s % 5.2
        busy = phase < 0.8 if lease.provider == "trainer" else phase < 4.1
        return self.rates.get(lease.provider, 800.0) * busy * self.random.uniform(0.75, 1.1)

    def _report(self, lease: Lease, elapsed_s: float, now_s: float) -> None:
        accounts = self.reported[lease.name]
        for account, share in SHARES.get(lease.provider, {Account.DECODE: 1.0}).items():
            accounts[account] += int(share * elapsed_s * NS_PER_S)
        self.ledger.report(lease.name, accounts, sum(c.tokens for c in self.counts.values()), _ns(now_s))

    def _sample(self, now_s: float) -> None:
        now_ns = _ns(now_s)
        for name, count in self.counts.items():
            live = [x for x in self.leases if x.provider == name and x.opened_s <= now_s < x.closed_s]
            ready = [x for x in live if now_s - x.opened_s > self.boot_s.get(name, 1.0)]
            resting = name == "trainer" and now_s % 5.2 >= 0.8
            count.ready = 0 if resting else len(ready)
            count.other = len(ready) if resting else 0
            count.booting = len(live) - len(ready)
            count.usd = self.ledger.bill_nano_usd(now_ns).get(name, 0) / NANO_USD_PER_USD
        status = make_status(
            step=min(self.steps, int(now_s / 5.2)),
            steps=self.steps,
            elapsed_s=now_s,
            cpu_share=min(1.0, self.random.gauss(0.66, 0.1)),
            providers={name: msgspec.structs.replace(count) for name, count in self.counts.items()},
        )
        self.journal.sample(now_ns, msgspec.to_builtins(status))
        write_books(self.journal, self.ledger)

    def _moves(self, lease: Lease) -> None:
        for n in range(self.random.randint(4, 14)):
            left_ns = _ns(lease.closed_s)
            waited_ns = _ns(self.random.lognormvariate(-3.2, 0.7))
            kept = self.random.randint(0, 15)
            self.journal.move(f"{lease.name}/{n}", 2, lease.name, "other", left_ns, left_ns + waited_ns, kept)

    def _step(self, step: int) -> None:
        at_ns = _ns((step + 1) * self.wall_s / (self.steps + 0.5))
        rate = 0.34 + 0.46 * (1 - 2.718 ** (-step / 18))
        trained = 0
        for group in range(16):
            hardness = self.random.gauss(0, 0.22)
            rewards = [float(self.random.random() < rate + hardness) for _ in range(8)]
            for member, reward in enumerate(rewards):
                failed = self.random.random() < 0.001
                write_trajectory(
                    self.journal,
                    step,
                    group,
                    member,
                    None if failed else reward,
                    "environment timed out" if failed else "",
                )
            if len(set(rewards)) > 1:
                trained += 1
                self.journal.event(e.GroupTrained(group=f"{step}/{group}"), at_ns)
        write_step(self.journal, step, at_ns, trained, 16 - trained)
        for lease in self.leases:
            if lease.provider != "trainer" and lease.opened_s <= at_ns / NS_PER_S < lease.closed_s:
                pull_s, apply_s = self.random.lognormvariate(-3.5, 0.4), self.random.lognormvariate(-4.5, 0.3)
                self.journal.pull(at_ns, lease.name, step + 1, 1_190_016, pull_s, apply_s, "")

    def _turns(self) -> None:
        for n in range(4000):
            requested_ns = _ns(self.random.uniform(0, self.wall_s * 0.95))
            first_ns = requested_ns + _ns(self.random.lognormvariate(-3.0, 0.55))
            finished_ns = first_ns + _ns(self.random.lognormvariate(-2.2, 0.8))
            self.journal.turn(f"t{n}", f"t{n}", requested_ns, first_ns, finished_ns, 24, 5, 1, 0, "w")


def make_status(**fields: object) -> RunStatus:
    defaults: dict[str, object] = {
        "run": "sampled",
        "phase": "running",
        "step": 0,
        "steps": 3,
        "elapsed_s": 0.0,
        "success_rate": None,
        "last_success_rate": None,
        "trajectories_running": 0,
        "queued_turns": 0,
        "tokens_per_s": 0.0,
        "preemptions": 0,
        "usd": 0.0,
        "cpu_share": 0.5,
        "pacing_holds": True,
        "trainer": "awake",
        "providers": {},
    }
    return RunStatus(**(defaults | fields))  # type: ignore[arg-type]


def write_books(journal: Journal, ledger: Ledger) -> None:
    books = [msgspec.to_builtins(book) for book in ledger.books.values()]
    journal.meta("books", msgspec.json.encode(books).decode())


def write_trajectory(journal: Journal, step: int, group: int, member: int, reward: float | None, cause: str) -> None:
    journal.trajectory(f"{step}/{group}/{member}", step, f"{step}/{group}", 0, 1, reward, cause, 5, 25, b"")


def write_step(journal: Journal, step: int, at_ns: int, trained: int, dropped: int) -> None:
    times_ns = {"duration_ns": NS_PER_S, "seeding_ns": NS_PER_S // 5, "rollout_ns": NS_PER_S // 2}
    groups = {"groups_trained": trained, "groups_dropped": dropped}
    journal.step(step, at_ns, {"step": step, "success_rate": 0.5, "trainer": {"loss": 0.1}, **times_ns, **groups})


def realistic_leases(wall_s: float, seed: int) -> list[Lease]:
    rng = random.Random(seed)
    leases = [Lease("trainer-1", "trainer", 0.0, wall_s - 1, EndCause.RELEASED)]
    for host in range(2):
        start_s = 3.0 + host
        for visit in range(3):
            end_s = min(start_s + rng.uniform(60, 140), wall_s - 2)
            leases.append(Lease(f"serving-{host}-{visit}", "serving", start_s, end_s, EndCause.RELEASED))
            start_s = end_s + rng.uniform(8, 25)
            if start_s > wall_s - 20:
                break
    for slot in range(3):
        start_s, visit = 4.0 + 11 * slot, 0
        while start_s < wall_s - 10:
            end_s = start_s + rng.expovariate(1 / 38)
            cause = EndCause.PREEMPTED if end_s < wall_s - 2 else EndCause.RELEASED
            leases.append(Lease(f"spot-{slot}-{visit}", "spot", start_s, min(end_s, wall_s - 2), cause))
            start_s, visit = end_s + rng.choice((1.0, 1.0, rng.uniform(5, 40))), visit + 1
    return leases


def _ns(value_s: float) -> int:
    return round(value_s * NS_PER_S)


@pytest.fixture
def write_journal(tmp_path: Path) -> Callable[[Callable[[Journal], None]], Path]:
    """Write a journal with the real writer; returns its file."""
    numbers = iter(range(1_000_000))

    def write(fill: Callable[[Journal], None]) -> Path:
        path = tmp_path / f"{next(numbers)}.db"
        journal = Journal(path, commit_interval_s=10.0)
        fill(journal)
        journal.close()
        return path

    return write


@pytest.fixture
def summary_of(write_journal) -> Callable[[Callable[[Journal], None]], Summary]:
    def summary(fill: Callable[[Journal], None]) -> Summary:
        reader = JournalReader(write_journal(fill))
        try:
            return summarise(reader)
        finally:
            reader.close()

    return summary


def fill_realistic(journal: Journal, wall_s: float = 312.0, steps: int = 60, seed: int = 7) -> None:
    journal.meta("run", "frozenlake")
    journal.meta("seed", str(seed))
    journal.meta("started_at", "2026-11-20 14:03 UTC")
    journal.meta("providers", "serving,spot")
    journal.meta("status", "finished")
    journal.meta("config", '{"engine": {"pacing": {"prefill_tokens_per_s": 8000}}, "run": {"steps": 60}}')
    SyntheticRun(journal, realistic_leases(wall_s, seed), wall_s, steps, seed).write()


@pytest.fixture
def realistic(summary_of) -> Iterator[Summary]:
    """A run of some five minutes on three providers, with preemptions."""
    return summary_of(fill_realistic)
