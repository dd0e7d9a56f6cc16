"""A run of whose processes some are killed with SIGKILL; it is taken up again where its orchestrator was.

Kills come at seeded moments: some while the run is being taken up, the others after it has gone on.
"""

import contextlib
import json
import os
import random
import signal
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal, TypeAlias

import psutil

from benchmarks._runs import CommandRun, processes_of
from benchmarks._waiting import until
from elastic.core.types import NS_PER_S
from elastic.protocol.run_secrets import RunSecrets
from elastic.runtime.journal import AGENTS, JournalError, JournalReader, RunDirectory

Victim: TypeAlias = Literal["orchestrator", "trainer", "both", "rank", "worker"]
"""`rank` is a further rank of the trainer, whose first one is `trainer`."""

OF_THE_ORCHESTRATOR: tuple[Victim, ...] = ("orchestrator", "both")

WHILE_RESUMING = 0.25
"""Share of kills that do not wait for the first token after the last one."""
RANK_MODULE = "elastic.worker.trainer.transformers.rank"
WAIT_S = 2.5
"""Longest from the moment that a kill waits for to the kill."""
END_TIMEOUT_S = 900.0


class CrashingRun(CommandRun):
    """A run of the command line, whose arguments are for its first incarnation."""

    def __init__(self, runs: Path, arguments: Sequence[str]) -> None:
        self.kills: Counter[str] = Counter()
        self.memory: set[Path] = set()
        """Places in shared memory that the run has had."""
        self._former_journals: set[str] = set()
        super().__init__(runs, arguments)

    # What can be seen of it

    def has_gone_on(self) -> bool:
        """Whether the incarnation that there is now has accepted a token."""
        with contextlib.suppress(JournalError):
            paths = RunDirectory(self.run_dir).journal_paths()
            # An earlier incarnation cannot have made it after this one began.
            if paths and paths[-1].name not in self._former_journals:
                with JournalReader(paths[-1]) as journal:
                    return any(chunks for _, _, chunks in journal.entries())
        return False

    def recorded(self, pattern: str) -> list[int]:
        """The ids of the processes of leases whose records are called so."""
        found: list[int] = []
        for path in sorted((self.run_dir / "leases").glob(pattern)):
            with contextlib.suppress(OSError, ValueError):
                found += (process["pid"] for process in json.loads(path.read_bytes()).get("processes", {}).values())
        return [pid for pid in found if psutil.pid_exists(pid)]

    def processes(self, victim: Victim) -> list[int]:
        """The ids of those of the processes to kill that are not the orchestrator's: at most one, and none where there
        is none."""
        match victim:
            case "orchestrator":
                return []
            case "trainer" | "both":
                return self.recorded("trainer-*.json")[:1]
            case "rank":
                return [rank for trainer in self.recorded("trainer-*.json") for rank in _further_ranks(trainer)][-1:]
            case "worker":
                return self.recorded("spot-*.json")[:1]

    # What is done to it

    def kill(self, victim: Victim) -> None:
        """The orchestrator is not started again by this."""
        self._look_at_memory()
        for pid in self.processes(victim):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if victim in OF_THE_ORCHESTRATOR:
            self.process.kill()
            self.process.wait()
        self.kills[victim] += 1

    def kill_processes(self, what: str, pids: Iterable[int]) -> None:
        """Kill these processes of it."""
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                self.kills[what] += 1

    def resume(self, *arguments: str) -> None:
        self._former_journals = {path.name for path in RunDirectory(self.run_dir).journal_paths()}
        self.start("run", "--resume", str(self.run_dir), "--json", *arguments)

    def disturb(self, rng: random.Random, victims: deque[Victim]) -> None:
        """Kill the first of the victims and take up again, until there are none or the run has ended; then wait."""
        while victims:
            victim = victims[0]
            if rng.random() >= WHILE_RESUMING or len(self.exec_ns) == 1:
                self.until("a token, or the end", lambda: self.has_gone_on() or self.ended())
            until("its end", self.ended, rng.uniform(0.0, WAIT_S), must=False)
            if victim != "orchestrator":
                until(victim, lambda v=victim: self.ended() or self.processes(v), END_TIMEOUT_S, must=False)
            if self.ended():
                return
            self.kill(victims.popleft())
            if victim in OF_THE_ORCHESTRATOR:
                self.resume()
        self.wait()

    def kill_in_turn(self, rng: random.Random, victims: Iterable[str]) -> None:
        """Strike each once the run has gone on since the last strike, until it has ended; then wait. A victim is a
        pattern of env workers' records, or the orchestrator, which is taken up again."""
        for victim in victims:
            self.until("a token, or the end", lambda: self.has_gone_on() or self.ended())
            time.sleep(rng.uniform(0.2, 1.5))
            if self.ended():
                break
            if victim == "orchestrator":
                self.kill("orchestrator")
                self.resume()
            else:
                self.kill_processes("env worker", self.recorded(victim)[:1])
        self.wait()

    def wait(self) -> None:
        """For its end. Raises `RunFailed` or `TimeoutError` unless that is a good one."""

        def ended() -> bool:
            self._look_at_memory()
            return self.ended()

        self.until("its end", ended, END_TIMEOUT_S)

    def _look_at_memory(self) -> None:
        with contextlib.suppress(OSError):
            self.memory.add((self.run_dir / "weights" / ".memory").readlink())

    def leftovers(self) -> list[str]:
        """What is left of a run that has ended: processes, records of leases, places in shared memory."""
        return [
            *(f"process {process.pid}" for process in processes_of(self.run_dir.name)),
            *map(str, (self.run_dir / "leases").glob("*")),
            *(str(place) for place in self.memory if place.exists()),
        ]

    def resumed_s(self) -> Iterator[float]:
        """From the start of each process that took the run up to the first token that it accepted."""
        with RunDirectory(self.run_dir).journals() as journals:
            began_ns = json.loads(journals[0].meta()["began"])["monotonic_ns"]
            for journal in journals[1:]:
                first_ns = next((t_ns for t_ns, _, chunks in journal.entries() if chunks), None)
                if first_ns is not None:
                    at_ns = began_ns + first_ns
                    yield (at_ns - max(exec_ns for exec_ns in self.exec_ns if exec_ns < at_ns)) / NS_PER_S


class FrontedRun(CrashingRun):
    """A run with fronts, and dedicated workers."""

    def url(self) -> str:
        """Where its fronts are; waits until that is known."""
        return f"http://{self.until('the address of its fronts', self._served)}"

    def _served(self) -> str:
        with contextlib.suppress(JournalError), RunDirectory(self.run_dir).newest_journal() as journal:
            return journal.meta().get(AGENTS, "")
        return ""

    @property
    def secrets(self) -> RunSecrets:
        return RunSecrets.of(self.run_dir)

    def fronts(self) -> list[int]:
        """The ids of its fronts' processes."""
        return self.recorded("front-*.json")

    def workers(self) -> list[int]:
        """The ids of its dedicated workers' processes."""
        return self.recorded("reserved-*.json")


def _further_ranks(trainer: int) -> list[int]:
    with contextlib.suppress(psutil.Error):
        children = psutil.Process(trainer).children()
        return [child.pid for child in children if RANK_MODULE in child.cmdline()]
    return []
