"""A run whose orchestrator and trainer are killed with SIGKILL, taken up again each time; what its journals then prove.

Kills come at seeded moments: some while the run is being taken up, the others after it has gone on.
"""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias, TypeVar

import msgspec
import psutil
from _common import ROOT

from elastic import compose, wire
from elastic.core import commands as c
from elastic.core import events as e
from elastic.core.digest import digest
from elastic.core.ids import parse_turn, turn_id
from elastic.core.types import NS_PER_S
from elastic.report import summarise
from elastic.runtime.journal import JournalError, JournalReader, RunDirectory, Sampled, StepRow, TrajectoryRow, TurnRow

T = TypeVar("T")

Victim: TypeAlias = Literal["orchestrator", "trainer", "both"]

WHILE_RESUMING = 0.25
"""Share of kills that do not wait for the first token after the last one."""
WAIT_S = 2.5
"""Longest from the moment that a kill waits for to the kill."""
PROGRESS_TIMEOUT_S = 240.0
END_TIMEOUT_S = 60.0
POLL_S = 0.02


class Broken(Exception):
    """The run did not go on, or not to its end; the message says how it ended."""


@dataclass
class Incarnation:
    """One process of the orchestrator, and when it was started."""

    process: "subprocess.Popen[bytes]"
    exec_ns: int
    log: Path


@dataclass
class CrashingRun:
    """A run of the command line. `arguments` are those of `elastic run` for its first incarnation."""

    arguments: Sequence[str]
    runs: Path
    kills: Counter[str] = field(default_factory=Counter[str])
    exec_ns: list[int] = field(default_factory=list[int])
    """Of each incarnation, when its process was started."""
    memory: set[Path] = field(default_factory=set[Path])
    """Places in shared memory that the run has had."""

    def __post_init__(self) -> None:
        self.runs.mkdir(parents=True, exist_ok=True)
        self._known = set(self.runs.iterdir())
        self._now = self._start("run", *self.arguments, "--set", f"run.directory={self.runs}")
        self.run_dir = self.until(
            "its directory", lambda: next((p for p in self.runs.iterdir() if p not in self._known and p.is_dir()), None)
        )

    def _start(self, *arguments: str) -> Incarnation:
        log = Path(tempfile.mkstemp(prefix="incarnation-", suffix=".log", dir=self.runs.parent)[1])
        command = [sys.executable, "-m", "elastic.cli", *arguments]
        with log.open("wb") as out:
            self.exec_ns.append(time.monotonic_ns())
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=out,
                start_new_session=True,
            )
        return Incarnation(process, self.exec_ns[-1], log)

    # What can be seen of it

    def ended(self) -> bool:
        """Whether the incarnation that there is now has ended by itself, and well. Raises `Broken`."""
        code = self._now.process.poll()
        if code:
            raise Broken(f"incarnation {len(self.exec_ns)} ended with {code}:\n{self._now.log.read_text()[-3000:]}")
        return code == 0

    def until(self, what: str, condition: Callable[[], T | None], timeout_s: float = PROGRESS_TIMEOUT_S) -> T:
        deadline_s = time.monotonic() + timeout_s
        while not (found := condition()):
            if self.ended():
                raise Broken(f"it ended before {what}")
            if time.monotonic() > deadline_s:
                raise Broken(f"not within {timeout_s:g} s: {what}; see {self._now.log}")
            time.sleep(POLL_S)
        return found

    def has_gone_on(self) -> bool:
        """Whether the incarnation that there is now has accepted a token."""
        with contextlib.suppress(JournalError):
            paths = RunDirectory(self.run_dir).journal_paths()
            if paths and self._is_new(paths[-1]):
                with JournalReader(paths[-1]) as journal:
                    return any(chunks for _, _, chunks in journal.entries())
        return False

    def _is_new(self, journal: Path) -> bool:
        """Written by the incarnation that there is now: an earlier one cannot have made it after this one began."""
        return journal.name not in self._former_journals

    def trainer(self) -> int | None:
        """The id of the trainer's process, where there is one."""
        for path in sorted((self.run_dir / "leases").glob("trainer-*.json")):
            with contextlib.suppress(OSError, ValueError):
                for process in json.loads(path.read_bytes()).get("processes", {}).values():
                    if psutil.pid_exists(process["pid"]):
                        return process["pid"]
        return None

    # What is done to it

    def kill(self, victim: Victim) -> None:
        """The orchestrator is not started again by this."""
        self._look_at_memory()
        if victim != "orchestrator" and (pid := self.trainer()) is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if victim != "trainer":
            self._now.process.kill()
            self._now.process.wait()
        self.kills[victim] += 1

    def resume(self, *arguments: str) -> None:
        self._former_journals = {path.name for path in RunDirectory(self.run_dir).journal_paths()}
        self._now = self._start("run", "--resume", str(self.run_dir), "--json", *arguments)

    _former_journals: set[str] = field(default_factory=set[str])

    def disturb(self, rng: random.Random, victims: deque[Victim]) -> None:
        """Kill the first of the victims and take up again, until there are none or the run has ended; then wait."""
        while victims:
            victim = victims[0]
            if rng.random() >= WHILE_RESUMING or len(self.exec_ns) == 1:
                try:
                    self.until("a token, or the end", lambda: self.has_gone_on() or self.ended())
                except Broken:
                    if not self.ended():
                        raise
            pause_ends_s = time.monotonic() + rng.uniform(0.0, WAIT_S)
            while time.monotonic() < pause_ends_s and not self.ended():
                time.sleep(POLL_S)
            if victim != "orchestrator":
                while not self.ended() and self.trainer() is None:
                    time.sleep(POLL_S)
            if self.ended():
                return
            self.kill(victims.popleft())
            if victim != "trainer":
                self.resume()
        self.wait()

    def wait(self, timeout_s: float = 900.0) -> None:
        """For its end. Raises `Broken` unless that is a good one."""
        deadline_s = time.monotonic() + timeout_s
        while not self.ended():
            self._look_at_memory()
            if time.monotonic() > deadline_s:
                raise Broken(f"it did not end within {timeout_s:g} s; see {self._now.log}")
            time.sleep(10 * POLL_S)

    def discard(self) -> None:
        """End what is left of it, whatever happened."""
        self._now.process.kill()
        self._now.process.wait()
        for process in processes_of(self.run_dir.name):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

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


def processes_of(run: str) -> list[psutil.Process]:
    """Living processes that are tagged as this run's."""
    found: list[psutil.Process] = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if process.status() != psutil.STATUS_ZOMBIE and process.environ().get("ELASTIC_RUN") == run:
                found.append(process)
    return found


class Verdict(msgspec.Struct, kw_only=True):
    """What the journals of a run's incarnations prove.

    Lost are accepted tokens that are not where they belong in what their trajectory came to; a duplicate's position was
    accepted before, or the bill has it once more. `groups_twice` counts groups that the report or the steps' records
    have more of than the trainer was told of. Repeated is a turn that had finished and was asked for, begun or
    generated again.
    """

    tokens_lost: int
    tokens_duplicated: int
    groups_twice: int
    turns_repeated: int
    ledger_imbalance_ns: int
    resumed_s: list[float]
    events: int


class _Witness:
    """Hears a run once more."""

    def __init__(self) -> None:
        self.accepted: dict[str, dict[int, int]] = {}
        """Of each turn, token ids by position."""
        self.duplicated = self.repeated = self.events = 0
        self.trained: set[str] = set()
        self._finished: set[str] = set()
        self._over: set[str] = set()

    def hear(self, _: int, event: e.Event, chunks: Mapping[int, wire.Chunk], commands: Sequence[c.Command]) -> None:
        self.events += 1
        for chunk in chunks.values():
            tokens = self.accepted.setdefault(chunk.turn, {})
            positions = range(chunk.start, chunk.start + len(chunk.token_ids))
            self.duplicated += sum(position in tokens for position in positions)
            self.repeated += chunk.turn in self._finished
            tokens.update(zip(positions, chunk.token_ids, strict=True))
        if isinstance(event, e.TurnRequested):
            self.repeated += event.turn in self._finished
        elif isinstance(event, e.TrajectoryFinished):
            self.repeated += event.trajectory in self._over
            self._over.add(event.trajectory)
        for command in commands:
            match command:
                case c.StartTurn():
                    self.repeated += command.turn in self._finished
                case c.FinishTurn():
                    self._finished.add(command.turn)
                case c.TrainGroup():
                    self.trained.add(command.group)
                case _:
                    pass


def judge(run: CrashingRun) -> Verdict:
    """Raises `Broken` where replaying the journals does not come to the state that the run ended in."""
    kept, witness = RunDirectory(run.run_dir), _Witness()
    found = digest(compose.replay(kept, witness.hear))
    episodes, summary = trajectories(kept), summarise(kept)
    with kept.journals() as journals:
        said = journals[-1].meta()["digest"]
        turns = Counter(row.turn for journal in journals for row in journal.rows(TurnRow))
        steps = {row.step: row.record for journal in journals for row in journal.rows(StepRow)}
        resumed_s = list(_resumed_s(run, journals))
    if found != said:
        raise Broken(f"{run.run_dir}: replaying the journals comes to another state than the run did")
    trained = sum(record.groups_trained for record in steps.values())
    tokens = sum(map(len, witness.accepted.values()))
    return Verdict(
        tokens_lost=_lost(witness.accepted, episodes),
        tokens_duplicated=witness.duplicated + abs(summary.total.tokens - tokens),
        groups_twice=abs(trained - len(witness.trained)) + abs(summary.groups_trained - len(witness.trained)),
        turns_repeated=witness.repeated + sum(count - 1 for count in turns.values()),
        ledger_imbalance_ns=abs(summary.ledger_imbalance_ns),
        resumed_s=resumed_s,
        events=witness.events,
    )


def trajectories(run: RunDirectory) -> dict[str, TrajectoryRow]:
    """Every trajectory as the last incarnation has it that knows of it."""
    with run.journals() as journals:
        return {row.trajectory: row for journal in journals for row in journal.rows(TrajectoryRow)}


def same_episode(one: TrajectoryRow, other: TrajectoryRow | None) -> bool:
    """All that is trained on is the same, bit for bit."""
    if other is None:
        return False
    told = ("token_ids", "sampled", "reward", "cause", "turns", "truncated")
    return all(getattr(one, name) == getattr(other, name) for name in told)


def same_weights(one: Path, other: Path) -> bool:
    """Whether two runs came to the same last checkpoint: masters, moments and counters, bit for bit."""
    import torch
    from safetensors import safe_open

    last = [max((run_dir / "checkpoints").glob("*.safetensors")) for run_dir in (one, other)]
    with safe_open(last[0], framework="pt") as mine, safe_open(last[1], framework="pt") as others:
        names = set(mine.keys())
        same_header = last[0].name == last[1].name and mine.metadata() == others.metadata()
        return same_header and all(torch.equal(mine.get_tensor(name), others.get_tensor(name)) for name in names)


def _lost(accepted: Mapping[str, Mapping[int, int]], episodes: Mapping[str, TrajectoryRow]) -> int:
    """A trajectory's tokens that the policy sampled are those of its turns, one after the other."""
    turns: dict[str, list[int]] = {}
    for turn in accepted:
        trajectory, number = parse_turn(turn)
        turns.setdefault(trajectory, []).append(number)
    lost = 0
    for trajectory, numbers in turns.items():
        wanted = [token for n in sorted(numbers) for _, token in sorted(accepted[turn_id(trajectory, n)].items())]
        row = episodes.get(trajectory)
        if row is None or row.cause:
            lost += len(wanted)
            continue
        token_ids = msgspec.msgpack.decode(row.token_ids, type=list[int])
        sampled = msgspec.msgpack.decode(row.sampled, type=Sampled)
        found = [token for token, trained in zip(token_ids, sampled.trained, strict=True) if trained]
        lost += sum(one != other for one, other in zip(wanted, found, strict=False)) + max(0, len(wanted) - len(found))
    return lost


def _resumed_s(run: CrashingRun, journals: Sequence[JournalReader]) -> Iterator[float]:
    """From the start of each process that took the run up to the first token that it accepted."""
    began_ns = json.loads(journals[0].meta()["began"])["monotonic_ns"]
    for journal in journals[1:]:
        first_ns = next((t_ns for t_ns, _, chunks in journal.entries() if chunks), None)
        if first_ns is not None:
            at_ns = began_ns + first_ns
            yield (at_ns - max(exec_ns for exec_ns in run.exec_ns if exec_ns < at_ns)) / NS_PER_S
