"""The runner's loop: compares what each run should do with its process, and acts.

- One runner at a time owns a server's home; it holds `runner.lock`. One at a time owns a database, on any machine; a
  runner that has lost the database leaves runs alone until it leads again.
- Every act is in the store before it (a start) or after it (an observed end), so that another runner can take over at
  any point. A living process is adopted by its id and start time, or by the mark in its environment, and is never
  started twice.
- The runner waits for a database that does not answer, and for a full disk. Runs go on meanwhile.
"""

import asyncio
import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import structlog

from elastic.config import ConfigError
from elastic.protocol.api import ALIVE, ENDED, Condition, RunFigures, RunPhase
from elastic.server.history.journals import cost_nano_usd, count_journals, figures_of
from elastic.server.quotas.budgets import day_of
from elastic.server.runner import conditions, decisions, launching
from elastic.server.runner.allotting import allotted
from elastic.server.runner.control import told_its_limits, told_to_stop
from elastic.server.runner.decisions import Decision, Ending, NextStep, ProcessSeen
from elastic.server.runner.launching import HeldProcess
from elastic.server.runner.retiring import retire
from elastic.server.settings import ServerSettings
from elastic.server.store import Store, StoreUnavailable, people, quotas, runs, secrets
from elastic.server.store.database import Leadership, now_us
from elastic.server.store.runs import HostedRunRow, RunProcess
from elastic.server.store.vault import Vault, VaultError
from elastic.system import tenant_files
from elastic.system.isolation import IsolatedLoop, LoopFaults
from elastic.system.processes import Identity
from elastic.system.supervision import WatchedProcess

T = TypeVar("T")

log = structlog.get_logger(__name__)

LOCK = "runner.lock"
ALLOTTING, HOUSEKEEPING = "shares and budgets", "housekeeping"
FULL = (errno.ENOSPC, errno.EDQUOT)
FORGET_ANSWERS_S = 24 * 3600
READ_TIMEOUT_S = 5.0
UNREAD_S = 60.0
"""How long it is tried to read what a run's process has left, before it counts as nothing: its user may make that last
for ever, and a run that has finished is not to begin again because the server was busy."""
LOOK_S = 2.0
"""How long a look waits for the runs that it attends to; a run that takes longer goes on beside the next looks."""
READERS = 64
"""Threads that read what runs' users wrote; each run has one of them at a time."""
LEADER_TIMEOUT_S = 10.0
"""How long a database may take to notice that its leader was killed."""


class RunnerBusy(Exception):
    """Another runner owns this server's home or database. The message says which."""


class RunnerLoop:
    """Starts, adopts and ends runs. Any thread may call `wake`. `begin` starts a run's process, `ending_of` reads how
    the last one ended."""

    def __init__(
        self,
        store: Store,
        settings: ServerSettings,
        faults: LoopFaults | None = None,
        begin: launching.Begin = launching.begin,
        ending_of: launching.EndingOf = launching.ending,
        leader_timeout_s: float = LEADER_TIMEOUT_S,
    ) -> None:
        self._store = store
        self._begin_process, self._ending_of = begin, ending_of
        self._settings = settings
        self._leader_timeout_s = leader_timeout_s
        base_s, max_s = settings.restart_base_s, settings.restart_max_s
        self._isolated = IsolatedLoop("runner", faults or LoopFaults(), base_s, max_s, outages=(StoreUnavailable,))
        self._held: dict[str, HeldProcess] = {}
        self._readers = ThreadPoolExecutor(READERS, "files of runs")
        self._reading: dict[str, Future[Any]] = {}
        self._unread_s: dict[tuple[str, Callable[..., Any]], float] = {}
        """Since when each read of a run's files has been late."""
        self.wake = self._isolated.wake
        """Have it look at the runs now, because a request has changed. Any thread may call this."""
        self._observed_s: dict[str, float] = {}
        self._attending: dict[str, asyncio.Task[None]] = {}
        self._housekept_s = float("-inf")
        self._housekeeping: asyncio.Task[None] | None = None
        self._allotted_s = float("-inf")
        self.ticked_s = time.monotonic()
        """When it last looked at everything: its health."""

    async def run(self) -> None:
        """Work until cancelled. Runs are left as they are. Raises `RunnerBusy`."""
        with claimed_home(self._settings.home), self._store.leading() as leadership:
            try:
                await self._lead(leadership)
                await self._isolated.repeat(partial(self._look_if_leading, leadership), self._settings.tick_s)
            finally:
                for attending in (left := list(self._attending.values())):
                    attending.cancel()
                await asyncio.gather(*left, return_exceptions=True)
                for held in self._held.values():
                    held.watched.close()
                if self._housekeeping is not None:
                    self._housekeeping.cancel()

    async def _look_if_leading(self, leadership: Leadership) -> None:
        if await asyncio.to_thread(leadership.holds):
            await self.tick()
        else:
            log.warning("another runner attends to this database; waiting")

    async def _lead(self, leadership: Leadership) -> None:
        """Wait until this is the database's only runner. Raises `RunnerBusy`."""
        until_s = time.monotonic() + self._leader_timeout_s
        while True:
            try:
                if await asyncio.to_thread(leadership.holds):
                    return
                if time.monotonic() > until_s:
                    raise RunnerBusy(
                        "--database: another server or runner attends to its runs already; stop that one first, or "
                        "start this server with --no-runner"
                    )
            except StoreUnavailable as error:
                log.warning("the database does not answer; runs go on", error=str(error))
            await asyncio.sleep(self._settings.tick_s)

    async def tick(self) -> None:
        """Look at every run once, but those that an earlier look still attends to. Raises `StoreUnavailable`."""
        busy = set(self._attending)  # Their records may be older than what comes of it.
        records = await asyncio.to_thread(self._managed)
        due = time.monotonic() - self._allotted_s >= self._settings.observe_s or self._wants_more(records)
        if due and not self._isolated.wait_s(ALLOTTING):
            with self._isolated.attempt(ALLOTTING):
                await allotted(self._store, self._settings, records, self._isolated)
                self._allotted_s = time.monotonic()
                records = await asyncio.to_thread(self._managed)
        await self._attend_all([run for run in records if run.id not in busy and not self._isolated.wait_s(run.id)])
        known = {run.id for run in records} | self._attending.keys()
        for gone in self._held.keys() - known:
            self._held.pop(gone).watched.close()
        self._reading = {id_: one for id_, one in self._reading.items() if id_ in known}
        self._unread_s = {what: since_s for what, since_s in self._unread_s.items() if what[0] in known}
        if self._housekeeping is None or self._housekeeping.done():
            self._housekeeping = asyncio.create_task(self._housekeep(), name=HOUSEKEEPING)
        self.ticked_s = time.monotonic()

    async def _attend_all(self, due: Sequence[HostedRunRow]) -> None:
        """Look at these runs at the same time: a process that does not answer delays its own run only."""
        begun = {run.id: asyncio.create_task(self._attend_isolated(run), name=f"attend {run.id}") for run in due}
        self._attending |= begun
        for id_, task in begun.items():
            task.add_done_callback(partial(self._attended, id_))
        if begun:
            done, _ = await asyncio.wait(begun.values(), timeout=LOOK_S)
            for task in done:
                task.result()

    def _attended(self, id_: str, task: asyncio.Task[None]) -> None:
        del self._attending[id_]
        if not task.cancelled():
            task.exception()  # Its look raises it; after that look, the next one meets the same outage.

    async def _attend_isolated(self, run: HostedRunRow) -> None:
        """Look at a run. One that cannot be looked at is looked at again later, and its conditions say so."""
        failed_before = self._isolated.has_failed(run.id)
        with self._isolated.attempt(run.id) as attempt:
            await self._attend(run)
        if attempt.fault or failed_before:
            with self._isolated.attempt(f"{run.id}: conditions"):
                await asyncio.to_thread(self._tell_fault, run.id, attempt.fault)

    def _tell_fault(self, id_: str, fault: str) -> None:
        with self._store.writing() as tx:
            run = runs.find(tx, id_)
            if run is not None:
                told = self._settings.without_places(fault, run.project)
                found = conditions.with_fault(run.conditions, told, now_us(), run.generation)
                runs.observe(tx, id_, conditions=found)

    def _wants_more(self, records: Sequence[HostedRunRow]) -> bool:
        """Return whether there is a run without a decision on its share."""
        return any(run.phase is RunPhase.PENDING and run.limits is None for run in records)

    async def _attend(self, run: HostedRunRow) -> None:
        seen = await self._look(run)
        settings = self._settings
        if seen.ending is not None:
            run = decisions.since_progress(run, await self._read_or(None, run, figures_of, settings.run_dir(run.id)))
        decision = decisions.decide(run, seen, now_us(), settings.restart_base_s, settings.restart_max_s)
        if decision.step is NextStep.NOTHING:
            if seen.alive:
                await self._observe(run)
        elif decision.step is NextStep.START:
            if run.limits is None or (run.phase is RunPhase.PENDING and run.waits is not None):
                await self._wait(run)
            else:
                await self._start(run)
        elif decision.step is NextStep.BECOME:
            await self._become(run, decision)
            if seen.ending is not None:
                self._held.pop(run.id, None)  # Until then its status is asked for again.
                log.info("a run's process has ended", run=run.id, how=seen.ending.how, cause=seen.ending.cause)
        elif decision.step is NextStep.SETTLE:
            await asyncio.to_thread(self._settle, run)
        elif decision.step is NextStep.REMOVE:
            await asyncio.to_thread(self._remove, run)
        else:
            await self._stop(run, decision.step)

    async def _look(self, run: HostedRunRow) -> ProcessSeen:
        """Return the run's process. Adopts it if another server started it.

        Raises `TimeoutError` while what it left cannot be read yet.
        """
        held = self._held.get(run.id)
        began = run.phase in ALIVE
        if held is None:
            found = await asyncio.to_thread(launching.living, self._settings, run) if began or run.attempt else None
            if found is not None:
                held = self._held[run.id] = HeldProcess(WatchedProcess(found))
                log.info("adopted", run=run.id, pid=found.pid)
                await asyncio.to_thread(self._adopted, run, held, found)
        if held is not None and not held.watched.over:
            return ProcessSeen(alive=True, signalled=held.stopped)
        status, signalled = (held.watched.status, held.stopped) if held is not None else (None, False)
        leaves = await self._read_or(0, run, count_journals, self._settings.run_dir(run.id)) > 0
        if not began:
            self._held.pop(run.id, None)
            return ProcessSeen(alive=False, leaves=leaves)
        unread = Ending(how=decisions.DIED, cause="its process ended, and its files cannot be read")
        ending = await self._read_or(unread, run, self._ending_of, self._settings, run, status)
        return ProcessSeen(alive=False, signalled=signalled, ending=ending, leaves=leaves)

    def _adopted(self, run: HostedRunRow, held: HeldProcess, found: Identity) -> None:
        if run.identity == found:
            return
        # Its server died after it had begun it, and before it had said so.
        process = RunProcess(found, launching.world(), run.process.journals if run.process else 0)
        with self._store.writing() as tx:
            runs.observe(tx, run.id, process=process, phase=_while_alive(run))

    async def _start(self, run: HostedRunRow) -> None:
        """Start a process: record the intent in the store, start it, and record the process."""
        user, sealed = await asyncio.to_thread(self._announce, run)
        try:
            child, journals = await asyncio.to_thread(self._begin, run, user, sealed)
        except Exception as error:
            expected = isinstance(error, (OSError, ConfigError, KeyError, VaultError))
            full = isinstance(error, OSError) and error.errno in FULL
            # Room may come, or a server that can do it, and no attempt of the run's own has failed.
            passes = full or not expected
            ending = Ending(how=decisions.DIED, cause=f"its process could not be begun: {error}", with_world=passes)
            begun, seen = replace(run, phase=RunPhase.STARTING), ProcessSeen(alive=False, ending=ending)
            base_s, max_s = self._settings.restart_base_s, self._settings.restart_max_s
            later = decisions.decide(begun, seen, now_us(), base_s, max_s)
            if passes:
                later = replace(later, not_before_us=now_us() + round(max_s * 1e6))
            await self._become(run, later)
            if not expected:
                raise
            log.error("a run's process cannot be begun", run=run.id, error=str(error))
            return
        held = HeldProcess(WatchedProcess(child))
        self._held[run.id] = held
        asyncio.create_task(self._wake_at_end(held), name=f"watch {run.id}")  # noqa: RUF006 - ends with its process
        log.info("begun", run=run.id, pid=child.pid, attempt=run.attempt + 1)
        record = RunProcess(held.watched.identity, launching.world(), journals)
        await asyncio.to_thread(self._write, run.id, process=record)

    async def _wake_at_end(self, held: HeldProcess) -> None:
        await held.watched.wait()
        self.wake()

    def _announce(self, run: HostedRunRow) -> tuple[str | None, dict[str, bytes]]:
        """Record the intent to start; returns the process's user, and the project's secrets, encrypted."""
        with self._store.writing() as tx:
            project = people.project(tx, run.project)
            phase = RunPhase.STARTING
            runs.observe(
                tx,
                run.id,
                phase=phase,
                process=None,
                attempt=run.attempt + 1,
                started_us=run.started_us or now_us(),
                told=run.told if run.attempt else run.limits,
                conditions=self._conditions(run, phase, run.cause, run.figures),
            )
            sealed = {row["name"]: row["sealed"] for row in secrets.all_of(tx, run.project)}
        return (project["unix_user"] if project is not None else None), sealed

    def _begin(self, run: HostedRunRow, user: str | None, sealed: dict[str, bytes]):
        vault = Vault(self._settings.home)
        opened = {name: vault.opened(value) for name, value in sealed.items()}
        return self._begin_process(self._settings, run, user, opened)

    async def _wait(self, run: HostedRunRow) -> None:
        """Leave the run waiting. Its conditions say why."""
        found = self._conditions(run, run.phase, run.cause, run.figures)
        if found != run.conditions:
            await asyncio.to_thread(self._write, run.id, conditions=found)

    async def _stop(self, run: HostedRunRow, step: NextStep) -> None:
        held = self._held[run.id]
        if step is NextStep.KILL:
            held.force(self._settings.stop_patience_s)
        elif await told_to_stop(self._settings, run):
            held.stopped = True
        elif time.monotonic() - held.since_s >= self._settings.stop_patience_s:
            held.stop()
        if run.phase is not RunPhase.STOPPING:
            found = self._conditions(run, RunPhase.STOPPING, run.cause, run.figures)
            await asyncio.to_thread(self._write, run.id, phase=RunPhase.STOPPING, conditions=found)

    async def _observe(self, run: HostedRunRow) -> None:
        """Record the status of a living run, and send it new commands."""
        now_s = time.monotonic()
        if now_s - self._observed_s.get(run.id, 0.0) < self._settings.observe_s:
            return
        self._observed_s[run.id] = now_s
        journals = run.process.journals if run.process else 0
        figures = await self._read(run, figures_of, self._settings.run_dir(run.id), journals)
        if run.told != run.limits and await told_its_limits(self._settings, run):
            run = replace(run, told=run.limits)
            await asyncio.to_thread(self._write, run.id, told=run.told)
        if run.observed_generation != run.generation and run.told == run.limits:
            await asyncio.to_thread(self._write, run.id, observed_generation=run.generation)
        phase = _while_alive(run) if figures is None else RunPhase.RUNNING
        if run.phase is RunPhase.STOPPING and (run.wanted != runs.RUN or self._held[run.id].stopped):
            phase = run.phase
        now, former = figures or run.figures, run
        run = decisions.since_progress(run, figures)
        found = self._conditions(run, phase, run.cause, now)
        warned = conditions.budget_nearly_used(run.budget_usd, now)
        seen = {"phase": phase, "figures": now, "conditions": found, "warned": warned}
        seen |= {"furthest_step": run.furthest_step, "restarts": run.restarts}
        if any(value != getattr(former, key) for key, value in seen.items()):
            await asyncio.to_thread(self._write, run.id, **seen)

    async def _read(self, run: HostedRunRow, read: Callable[..., T], *arguments: Any) -> T:
        """Return what a run's files say. Its user may make that last for ever: this delays that run only.

        Raises `TimeoutError`.
        """
        if (former := self._reading.get(run.id)) is not None and not former.done():
            raise TimeoutError("its files are still being read")
        reading = self._reading[run.id] = self._readers.submit(read, *arguments)
        async with asyncio.timeout(READ_TIMEOUT_S):
            return await asyncio.wrap_future(reading)

    async def _read_or(self, otherwise: T, run: HostedRunRow, read: Callable[..., T], *arguments: Any) -> T:
        """As `_read`. What is late is asked for again, for `UNREAD_S`: until then this raises `TimeoutError`. Then, and
        of files that cannot be read at all, `otherwise` is returned."""
        what = (run.id, read)
        try:
            found = await self._read(run, read, *arguments)
        except OSError as error:
            since_s = self._unread_s.setdefault(what, time.monotonic())
            if isinstance(error, TimeoutError) and time.monotonic() - since_s < UNREAD_S:
                raise
            return otherwise
        self._unread_s.pop(what, None)
        return found

    async def _become(self, run: HostedRunRow, decision: Decision) -> None:
        """Put the run into another phase, and record it in the store."""
        run_dir = self._settings.run_dir(run.id)
        decision = replace(decision, cause=self._settings.without_places(decision.cause, run.project))
        figures = await self._read_or(None, run, figures_of, run_dir)
        cost = await self._read_or(0, run, cost_nano_usd, run_dir)
        await asyncio.to_thread(self._record, run, decision, figures or run.figures, cost or run.seen_nano_usd)

    def _record(self, run: HostedRunRow, decision: Decision, figures: RunFigures, cost: int) -> None:
        phase = decision.phase
        returns = phase in ENDED or phase is RunPhase.PENDING
        # One that waits again begins with what is decided then.
        limits = None if phase is RunPhase.PENDING else run.limits
        counted = run.restarts + decision.counts
        with self._store.writing() as tx:
            runs.observe(
                tx,
                run.id,
                phase=phase,
                cause=decision.cause,
                restarts=counted,
                furthest_step=run.furthest_step,
                not_before_us=decision.not_before_us,
                figures=figures,
                conditions=self._conditions(run, phase, decision.cause, figures),
                ended_us=now_us() if phase in ENDED else None,
                cost_nano_usd=cost,
                limits=limits,
                allotted_nano_usd=cost if returns and run.allotted_nano_usd is not None else run.allotted_nano_usd,
            )
            if phase in ENDED:
                runs.settle(tx, run.id, run.generation)

    def _settle(self, run: HostedRunRow) -> None:
        with self._store.writing() as tx:
            runs.settle(tx, run.id, run.generation)

    def _remove(self, run: HostedRunRow) -> None:
        tenant_files.remove(self._settings.run_dir(run.id))
        cost = run.seen_nano_usd
        with self._store.writing() as tx:
            quotas.deleted(tx, run.project, cost, cost - run.base_nano_usd(day_of(now_us())))
            runs.remove(tx, run.id)
        log.info("removed", run=run.id)

    async def _housekeep(self) -> None:
        """Apply retention, if it is time. Removals may last: nothing waits for them."""
        early = time.monotonic() - self._housekept_s <= self._settings.housekeeping_s
        if early or self._isolated.wait_s(HOUSEKEEPING):
            return
        with contextlib.suppress(StoreUnavailable), self._isolated.attempt(HOUSEKEEPING):
            await asyncio.to_thread(self._forget)
            more = await asyncio.to_thread(retire, self._store, self._settings, self._isolated)
            self._housekept_s = float("-inf") if more else time.monotonic()

    def _forget(self) -> None:
        with self._store.writing() as tx:
            runs.forget_answers(tx, now_us() - FORGET_ANSWERS_S * 1_000_000)

    def _managed(self) -> list[HostedRunRow]:
        with self._store.reading() as connection:
            return runs.managed(connection, attempting=self._isolated.attempt)

    def _write(self, id_: str, **seen: object) -> None:
        with self._store.writing() as tx:
            runs.observe(tx, id_, **seen)

    def _conditions(self, run: HostedRunRow, phase: RunPhase, cause: str, figures: RunFigures) -> list[Condition]:
        found = conditions.findings(run, phase, cause, figures)
        return conditions.updated(run.conditions, found, now_us(), run.generation)


def _while_alive(run: HostedRunRow) -> RunPhase:
    """Return the phase of a run whose process lives and has reported nothing new."""
    return run.phase if run.phase in ALIVE and run.phase is not RunPhase.STOPPING else RunPhase.STARTING


@contextlib.contextmanager
def claimed_home(home: Path) -> Iterator[None]:
    """A context: this process alone attends to the runs in `home`. Raises `RunnerBusy`. A dead process's claim is
    void."""
    home.mkdir(parents=True, exist_ok=True)
    with (home / LOCK).open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            raise RunnerBusy(
                f"{home}: process {lock.read().strip() or '?'} attends to its runs already; stop that server or runner "
                "first, or start this server with --no-runner"
            ) from None
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        yield
