"""A live orchestrator under any number of stand-ins for workers, as benchmarks measure it.

The orchestrator is the whole of it: gateway, core, environments' loops, journal, with its full garbage collections
deferred as in production. Its stand-ins (`_stand_ins.py`) live in processes of their own.
"""

import asyncio
import contextlib
import math
import random
import tempfile
import time
from bisect import bisect_right
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel

from benchmarks._configurations import configuration
from benchmarks._orchestrated import OwnWorkers, orchestrated
from benchmarks._processes import Child
from benchmarks._stand_ins import (
    PATIENCE_S,
    TOKENS_PER_S,
    USUAL_PACE,
    Looked,
    Question,
    Schedule,
    StandInPace,
    stand_ins,
)
from elastic.compose.plan import TRAINER_PROVIDER
from elastic.config import Config
from elastic.core import commands as c
from elastic.core import events as e
from elastic.core.scheduler import Scheduler
from elastic.core.types import Chunks
from elastic.environments.base import StepResult
from elastic.runtime.journal import RunDirectory, SqliteJournal
from elastic.runtime.orchestrator import Orchestrator
from elastic.runtime.status import total_tokens
from elastic.system.machine import raise_descriptor_limit
from elastic.worker.connection import Ticket

STREAMS_PER_WORKER = 16
GROUP_SIZE = 8
PROMPT_TOKENS, ANSWER_TOKENS = 64, 64
TOOL_SHARE, TOOL_S = 0.25, 1.0
"""One end in four is a tool call; its environment takes so long, on average."""
POLL_S = 0.05
LOOKS_LESS = 20
"""Times as long as a look takes, nobody looks: of large runs it takes milliseconds."""
STILL_S, STILL_LOOKS = 30.0, 20
"""After so long, and so many looks, without growth a figure is not waited for any longer. Of a large run one round of
the event loop may take as long."""
FEW_CHUNKS = 4
"""Of a frame that left for the sake of a turn or two, and not because a flush was due."""


class PausingEnvironment:
    """An episode without an end. One turn in four calls a tool, which takes a while."""

    class Settings(BaseModel):
        pass

    vocabulary: ClassVar[tuple[str, ...]] = ()
    stop_token_ids: ClassVar[tuple[int, ...]] = ()

    def __init__(self, settings: BaseModel | None = None) -> None:
        self._drawn: random.Random | None = None

    async def reset(self, seed: int) -> list[int]:
        self._drawn = random.Random(seed)
        return [1] * PROMPT_TOKENS

    async def step(self, token_ids: list[int]) -> StepResult:
        assert self._drawn is not None
        if self._drawn.random() < TOOL_SHARE:
            await asyncio.sleep(self._drawn.expovariate(1 / TOOL_S))
        return StepResult([1] * ANSWER_TOKENS, done=False)

    async def truncate(self) -> float:
        return 0.0

    async def aclose(self) -> None:
        pass


class StandInProcess(Child):
    """A process of stand-ins, which lives until it is killed."""

    def __init__(self, credit: int, seed: int, *, produces: bool = True, pace: StandInPace = USUAL_PACE) -> None:
        self.workers: set[str] = set()
        super().__init__(stand_ins, credit, seed, produces, pace)
        self._dead = asyncio.Event()

    async def work(self, ticket: Ticket) -> None:
        """Be the worker of this ticket for as long as the process lives."""
        self.workers.add(ticket.worker)
        try:
            self.pipe.send(ticket)
            await self._dead.wait()
        finally:
            self.workers.discard(ticket.worker)

    def close(self) -> None:
        """End it by SIGKILL, at once; its workers are gone."""
        super().close()
        self._dead.set()

    @property
    def alive(self) -> bool:
        return not self._dead.is_set()


@dataclass(frozen=True)
class Use:
    """What processes of stand-ins did between two looks."""

    core_share: float
    """Of the busiest."""
    produced: int
    turns_ended: int


class StandInFleet:
    """Processes of stand-ins, over which workers are spread evenly."""

    def __init__(self, processes: int, credit: int, *, produces: bool = True, pace: StandInPace = USUAL_PACE) -> None:
        self._credit, self._produces, self._pace = credit, produces, pace
        self.processes: list[StandInProcess] = []
        self.add(processes)

    def add(self, processes: int) -> None:
        known = len(self.processes)
        self.processes += [
            StandInProcess(self._credit, known + number, produces=self._produces, pace=self._pace)
            for number in range(processes)
        ]

    async def work(self, ticket: Ticket) -> None:
        """Have a worker for this ticket in the process with the fewest."""
        await min(self._alive, key=lambda process: len(process.workers)).work(ticket)

    async def ask(self, question: Question, patience_s: float = PATIENCE_S) -> list[Any]:
        return list(await asyncio.gather(*(process.ask(question, patience_s) for process in self._alive)))

    def close(self) -> None:
        for process in self._alive:
            process.close()

    @property
    def _alive(self) -> list[StandInProcess]:
        return [process for process in self.processes if process.alive]


def used(before: Sequence[Looked], after: Sequence[Looked]) -> Use:
    pairs = list(zip(before, after, strict=True))
    return Use(
        max((now.cpu_s - then.cpu_s) / (now.at_s - then.at_s) for then, now in pairs),
        sum(now.produced - then.produced for then, now in pairs),
        sum(now.turns_ended - then.turns_ended for then, now in pairs),
    )


async def comes_to(
    figure: Callable[[], float], wanted: float, patience_s: float = math.inf, still_s: float = STILL_S
) -> bool:
    """Wait for a growing figure to come to `wanted`; returns whether it did in time, and without standing still."""
    best, grew_s, looks = -math.inf, time.monotonic(), 0
    ends_s = grew_s + patience_s
    while True:
        asked_s = time.monotonic()
        now = figure()
        now_s = time.monotonic()
        if now >= wanted:
            return True
        looks += 1
        if now > best:
            best, grew_s, looks = now, now_s, 0
        if now_s > ends_s or (now_s > grew_s + still_s and looks > STILL_LOOKS):
            return False
        await asyncio.sleep(max(POLL_S, LOOKS_LESS * (now_s - asked_s)))


async def grows_to(what: str, figure: Callable[[], float], wanted: float) -> None:
    """As `comes_to`. Raises `TimeoutError`, which says how far `what` has come."""
    if not await comes_to(figure, wanted, still_s=PATIENCE_S):
        raise TimeoutError(f"{what}: {figure():g} of {wanted:g}, and no more for {PATIENCE_S:g} s")


@dataclass
class StreamedRun:
    """A run under way, and where its journal is."""

    orchestrator: Orchestrator
    kept: RunDirectory
    journal: SqliteJournal
    fleet: StandInFleet

    @property
    def scheduler(self) -> Scheduler:
        return self.orchestrator.scheduler

    @property
    def accepted(self) -> int:
        """Tokens, since the run began."""
        return total_tokens(self.orchestrator._recorder.counts)

    def streaming(self) -> int:
        """How many turns have had a token."""
        return sum(turn.accepted > 0 for turn in self.scheduler.turns.live.values())


def streaming_config(workers: int, streams: int, *kinds: str, policy: Path | str = ".", **sections: Any) -> Config:
    """A run with as many trajectories as streams; of these kinds, and with these sections, besides."""
    return configuration(
        *("streaming", *kinds),
        policy=policy,
        rollout={"groups": streams // GROUP_SIZE},
        engine={"max_pending": streams},
        seeding={"reserved_engines": max(1, workers - 1)},
        **sections,
    )


@contextlib.asynccontextmanager
async def streamed_run(
    config: Config,
    workers: int,
    fleet: StandInFleet,
    *,
    make_environment: Callable[[], object] = PausingEnvironment,
    **more: Any,
) -> AsyncIterator[StreamedRun]:
    """A run of these workers from before its begin to its end; `more` is as of `orchestrated`."""
    raise_descriptor_limit()
    providers = [OwnWorkers(TRAINER_PROVIDER, 1, fleet.work), OwnWorkers("spot", workers - 1, fleet.work)]
    with (
        tempfile.TemporaryDirectory() as directory,
        orchestrated(config, Path(directory), providers, make_environment, **more) as ours,
    ):
        run = asyncio.create_task(ours.orchestrator.run())
        try:
            yield StreamedRun(*ours, fleet)
        finally:
            ours.orchestrator.stop("measured")
            await run
            fleet.close()


@dataclass
class Acceptances:
    """Frames as the core took them, and when: every `stride`-th, and those that left for a turn's sake.

    `note` is for `Orchestrator`'s `decided`; it costs a fraction of a microsecond a frame.
    """

    stride: int = 1
    noting: bool = False
    kept: list[tuple[bool, float, str, Chunks]] = field(default_factory=list[tuple[bool, float, str, Chunks]])
    """Whether it is one of the `stride`-th; when; the worker; the chunks."""
    _frames: int = 0

    def note(self, event: e.Event, commands: Sequence[c.Command]) -> None:
        if not self.noting or type(event) is not e.TokensReceived:
            return
        self._frames += 1
        sampled = self._frames % self.stride == 0
        if sampled or event.chunks.ends or len(event.chunks.slots) <= FEW_CHUNKS:
            self.kept.append((sampled, time.monotonic(), event.worker, event.chunks))

    def delays(self, schedules: Iterable[Schedule]) -> "Delays":
        """From each token's production to its acceptance."""
        of_slot: dict[tuple[str, int], list[Schedule]] = {}
        for schedule in schedules:
            of_slot.setdefault((schedule.worker, schedule.slot), []).append(schedule)
        firsts_s, lasts_s = list[float](), list[float]()
        oldest_s, counts = list[float](), list[int]()
        for sampled, at_s, worker, chunks in self.kept:
            last_places = {end.place for end in chunks.ends}
            for place, (slot, start, count) in enumerate(zip(chunks.slots, chunks.starts, chunks.counts, strict=True)):
                known = of_slot.get((worker, slot), [])
                number = bisect_right(known, at_s, key=lambda schedule: schedule.begun_s)
                if not number or not count:
                    continue
                turn = known[number - 1]
                waited_s = at_s - turn.begun_s - (start - turn.start + 1) / TOKENS_PER_S
                if sampled:
                    oldest_s.append(waited_s)
                    counts.append(count)
                if start == turn.start:
                    firsts_s.append(waited_s)
                if place in last_places:
                    lasts_s.append(waited_s - (count - 1) / TOKENS_PER_S)
        return Delays(_of_tokens(oldest_s, counts), np.array(firsts_s), np.array(lasts_s))


class Delays(NamedTuple):
    """In seconds."""

    tokens_s: npt.NDArray[np.float64]
    firsts_s: npt.NDArray[np.float64]
    lasts_s: npt.NDArray[np.float64]


def _of_tokens(oldest_s: Sequence[float], counts: Sequence[int]) -> npt.NDArray[np.float64]:
    """The delay of every token, from those of the chunks' first ones."""
    lengths = np.array(counts, np.int64)
    places = np.arange(lengths.sum()) - np.repeat(lengths.cumsum() - lengths, lengths)
    return np.repeat(np.array(oldest_s), lengths) - places / TOKENS_PER_S


def percentile_ms(times_s: npt.NDArray[np.float64], percent: float) -> float | None:
    """None of nothing."""
    return float(np.percentile(times_s, percent)) * 1e3 if len(times_s) else None
