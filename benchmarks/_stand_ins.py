"""Stand-ins for workers: they speak the workers' protocol as the agent does, over real connections; no engine is there.

A stand-in dials, announces its credit, beats, takes orders, and streams drawn tokens (ids and log-probabilities) for
each of its turns, 50 a second if no other `StandInPace` is given. What it says leaves as an agent's does: every flush
interval what all turns have produced, at once a turn's first token, its last one, and what is called back. When each
token was produced follows from its position, which `Schedule` tells; so the time until it is accepted can be measured.

Turns are as long as real ones: log-normal, with a median of 2,000 tokens. A trajectory's first turn has what would be
left of one that began before, so that turns end and begin from the first second on as they will after an hour.

Any number of stand-ins share a process (`stand_ins`), which is asked and told over a pipe.
"""

import asyncio
import math
import os
import random
import time
from collections.abc import Coroutine, Iterable
from dataclasses import dataclass
from multiprocessing.connection import Connection as Pipe
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import uvloop

from elastic.core.types import Account, Capabilities, ChunkEnd, ChunkPrompt, Chunks, FinishReason
from elastic.protocol import wire
from elastic.protocol.connection import ConnectionLost, SessionRefused
from elastic.protocol.sampled import TOKEN_BYTES
from elastic.system.machine import raise_descriptor_limit
from elastic.worker.connection import Ticket, dial

TOKENS_PER_S = 50
TURN_TOKENS_MEDIAN, TURN_TOKENS_SIGMA = 2_000, 0.8
DRAWN_TOKENS = 1 << 20
"""Drawn once for a process; each frame takes some of them, from the next place on."""
PATIENCE_S = 120.0
DIALS_AT_ONCE = 64
"""Of a process: machines of a fleet do not boot within one second either."""
FILL_UNSENT_BYTES = 1 << 20
CAPABILITIES = Capabilities(engine="stream", replayable_sampling=True, max_context_tokens=1 << 22, device="cpu")


def turn_tokens(turn: str) -> int:
    """How long a turn is, which its name alone decides: a worker that takes it over ends it at the same place."""
    drawn = random.Random(turn)
    if not turn.endswith("/0"):
        return max(1, round(TURN_TOKENS_MEDIAN * drawn.lognormvariate(0, TURN_TOKENS_SIGMA)))
    # Of the turns that run at a moment, long ones are more by their length, and on average half of one is left.
    running = TURN_TOKENS_MEDIAN * drawn.lognormvariate(TURN_TOKENS_SIGMA**2, TURN_TOKENS_SIGMA)
    return max(1, round(running * drawn.random()))


class StandInPace(NamedTuple):
    """How fast turns are. Without `own_lengths` a turn is as long as its order lets it be. Token ids are drawn from
    `ids`, or else from the whole vocabulary."""

    tokens_per_s: float = TOKENS_PER_S
    own_lengths: bool = True
    ids: range | None = None


USUAL_PACE = StandInPace()


@dataclass(slots=True)
class TurnTimes:
    """When token `n` of a turn was produced: `begun_s + (n + 1) / tokens_per_s`; and when its first and its last token
    were sent. All by the machine's monotonic clock."""

    begun_s: float
    first_s: float = 0.0
    last_s: float = 0.0


class Schedule(NamedTuple):
    """When an attempt's tokens were produced: `start + n` at `begun_s + (n + 1) / TOKENS_PER_S`, by the machine's
    monotonic clock."""

    worker: str
    slot: int
    begun_s: float
    start: int


class Looked(NamedTuple):
    """What a process of stand-ins has come to. `produced` tokens were sent; `lost` are connections that broke."""

    at_s: float
    cpu_s: float
    produced: int
    turns_ended: int
    lost: int
    flush_interval_s: float


class Look(NamedTuple):
    """Asks for `Looked`."""


class Rest(NamedTuple):
    """Produce nothing more from now on; answered by `Looked` once all that was produced is sent."""


class Tell(NamedTuple):
    """Asks for all schedules."""


class TellTimes(NamedTuple):
    """Asks for the `TurnTimes` of all turns by their names."""


class Fill(NamedTuple):
    """Bring `turns` turns of each of so many workers to `tokens` tokens, as fast as they are taken, once each has as
    many; answered by `Looked`."""

    workers: int
    turns: int
    tokens: int
    chunk_tokens: int


Question: TypeAlias = Look | Rest | Tell | TellTimes | Fill


def stand_ins(pipe: Pipe, credit: int, seed: int, produces: bool, pace: StandInPace) -> None:
    """A process of them: one for each ticket that comes, until the pipe's other end is closed."""
    raise_descriptor_limit()
    uvloop.run(_StandInHost(pipe, credit, random.Random(seed), produces, pace).live())


class _Drawn:
    """Ids and log-probabilities, drawn and packed once."""

    def __init__(self, seed: int, ids: range) -> None:
        drawn = np.random.default_rng(seed)
        self._ids = memoryview(drawn.integers(ids.start, ids.stop, DRAWN_TOKENS, np.int32).tobytes())
        logprobs = -drawn.exponential(0.5, DRAWN_TOKENS).astype(np.float32)
        self._logprobs = memoryview(np.maximum(logprobs, np.float32(wire.LOGPROB_MIN)).tobytes())
        self._at = 0

    def next(self, tokens: int) -> tuple[Any, Any]:
        """As many packed ids and log-probabilities."""
        if self._at + tokens > DRAWN_TOKENS:
            self._at = 0
        at = slice(TOKEN_BYTES * self._at, TOKEN_BYTES * (self._at + tokens))
        self._at += tokens
        return self._ids[at], self._logprobs[at]


class _StandInHost:
    def __init__(self, pipe: Pipe, credit: int, rng: random.Random, produces: bool, pace: StandInPace) -> None:
        self.credit, self.rng, self.produces, self.pace = credit, rng, produces, pace
        self.schedules: list[Schedule] = []
        self.times: dict[str, TurnTimes] = {}
        self.produced = self.turns_ended = self.lost = 0
        self.dialling = asyncio.Semaphore(DIALS_AT_ONCE)
        self._pipe = pipe
        self._workers: list[StandIn] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._drawn: _Drawn | None = None

    async def live(self) -> None:
        loop, self._ended = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self._pipe.fileno(), self._hear)
        # uvloop has switched that off; thousands of schedules are more than a pipe takes at once.
        os.set_blocking(self._pipe.fileno(), True)
        await self._ended.wait()

    def drawn(self, vocab_size: int) -> _Drawn:
        self._drawn = self._drawn or _Drawn(self.rng.getrandbits(32), self.pace.ids or range(vocab_size))
        return self._drawn

    def _hear(self) -> None:
        try:
            said: Ticket | Question = self._pipe.recv()
        except (EOFError, OSError):
            self._ended.set()
            return
        match said:
            case Ticket():
                worker = StandIn(self, said)
                self._workers.append(worker)
                self._begin(worker.live())
            case Look():
                self._pipe.send(self._looked())
            case Rest():
                for worker in self._workers:
                    worker.rest()
                self._pipe.send(self._looked())
            case Tell():
                self._pipe.send(self.schedules)
            case TellTimes():
                self._pipe.send(self.times)
            case Fill():
                self._begin(self._fill(said))

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _fill(self, order: Fill) -> None:
        for worker in self._workers[: order.workers]:
            await worker.fill(order.turns, order.tokens, order.chunk_tokens)
        self._pipe.send(self._looked())

    def _looked(self) -> Looked:
        intervals = sorted(worker.flush_interval_s for worker in self._workers) or [0.0]
        middle = intervals[len(intervals) // 2]
        return Looked(time.monotonic(), time.process_time(), self.produced, self.turns_ended, self.lost, middle)


@dataclass(slots=True)
class _StandInTurn:
    """An attempt. Iterations are the worker's: it began in `begun`, is over with `ends`, is sent up to `sent`."""

    slot: int
    start: int
    prompt_tokens: int
    begun: int
    ends: int
    sent: int
    finish: FinishReason
    times: TurnTimes


class StandIn:
    """One worker, from its first dial to the end of its session."""

    def __init__(self, process: _StandInHost, ticket: Ticket) -> None:
        self.flush_interval_s = 0.0
        self._process, self._ticket = process, ticket
        self._turns: dict[tuple[str, int], _StandInTurn] = {}
        self._rate = process.pace.tokens_per_s
        self._phase_s = process.rng.random() / self._rate
        self._spread = process.rng.random()
        self._version = self._decoded = 0
        self._born_s = time.monotonic()
        self._rests = not process.produces
        self._refused = False
        """The orchestrator has ended the session."""
        self._urgent: int | None = None
        """The next iteration at which something leaves at once."""
        self._flush_s = 0.0
        self._due_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    async def live(self) -> None:
        key = ""
        while not self._refused:
            try:
                async with self._process.dialling:
                    self._connection, welcome = await dial(self._ticket, key, PATIENCE_S)
            except (ConnectionLost, SessionRefused):
                return
            key = welcome.session_key or key
            self._drawn = self._process.drawn(welcome.model["vocab_size"])
            self.flush_interval_s = welcome.flush_interval_s
            self._turns.clear()
            self._connection.send(wire.Ready(CAPABILITIES, self._version))
            self._beat()
            self._flush_s = self._next_flush_s()
            self._arm()
            beating = asyncio.create_task(self._beat_forever(welcome.heartbeat_interval_s))
            try:
                self._connection.watch(PATIENCE_S)
                await self._connection.listen(self._hear)
            except ConnectionLost:
                self._process.lost += not self._refused
            finally:
                beating.cancel()
                self._still()

    def rest(self) -> None:
        """Send what has been produced, and produce nothing more."""
        if not self._rests:
            self._say(self._turns.values(), self._iteration())
            self._rests = True
            self._still()

    async def fill(self, turns: int, tokens: int, chunk_tokens: int) -> None:
        """Bring so many of the turns to so many tokens each, once they have come."""
        while len(self._turns) < turns:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        filled = list(self._turns.values())[:turns]
        for done in range(0, tokens, chunk_tokens):
            for turn in filled:
                turn.ends = turn.begun + tokens + 1
            self._say(filled, min(tokens, done + chunk_tokens), since_begun=True)
            await asyncio.sleep(0)
            while self._connection.transport.get_write_buffer_size() > FILL_UNSENT_BYTES:  # noqa: ASYNC110
                await asyncio.sleep(0.001)

    # Orders

    def _hear(self, orders: list[wire.FromOrchestrator]) -> None:
        for order in orders:
            match order:
                case wire.Generate():
                    self._generate(order)
                case wire.Abort():
                    self._abort(order)
                case wire.FlushEvery():
                    self._flush_every(order.interval_s)
                case wire.PullWeights():
                    self._version = order.version
                    self._connection.send(wire.WeightsReport(order.version, "", 0, 0.0, 0.0))
                case wire.Sleep():
                    self._connection.send(wire.Slept())
                case wire.Wake():
                    self._connection.send(wire.Awoke())
                case wire.RefusedFrame():
                    self._refused = True
                case _:
                    pass

    def _generate(self, order: wire.Generate) -> None:
        now, room = self._iteration(), order.sampling.max_new_tokens - order.start
        left = max(1, turn_tokens(order.turn) - order.start) if self._process.pace.own_lengths else room
        finish = FinishReason.STOP if left < room else FinishReason.LENGTH
        begun_s = self._phase_s + now / self._rate
        times = self._process.times[order.turn] = TurnTimes(begun_s)
        self._turns[order.turn, order.attempt] = _StandInTurn(
            order.slot, order.start, len(order.token_ids) // TOKEN_BYTES, now, now + min(left, room), now, finish, times
        )
        if self._process.produces:
            self._process.schedules.append(Schedule(self._ticket.worker, order.slot, begun_s, order.start))
            self._urgent = now + 1 if self._urgent is None else min(self._urgent, now + 1)
            self._arm()

    def _abort(self, order: wire.Abort) -> None:
        turn = self._turns.get((order.turn, order.attempt))
        if turn is not None:
            at = turn.sent if self._rests else min(turn.ends, self._iteration())
            turn.ends, turn.finish = max(turn.sent, at), FinishReason.ABORTED
            self._say([turn], turn.ends)

    def _flush_every(self, interval_s: float) -> None:
        self.flush_interval_s = interval_s
        self._flush_s = self._next_flush_s()
        self._arm()

    # Tokens

    def _next_flush_s(self) -> float:
        """By a clock of the worker's own, so that the frames of many do not come together."""
        interval_s = self.flush_interval_s
        return (math.floor(time.monotonic() / interval_s - self._spread) + 1 + self._spread) * interval_s

    def _iteration(self) -> int:
        return int((time.monotonic() - self._phase_s) * self._rate)

    def _wake(self) -> None:
        self._timer = None
        now_s, at = time.monotonic(), self._iteration()
        if now_s >= self._flush_s:
            self._say(self._turns.values(), at)
            self._flush_s = self._next_flush_s()
        elif self._urgent is not None and at >= self._urgent:
            self._say([turn for turn in self._turns.values() if _urgent_at(turn) <= at], at)
        self._arm()

    def _arm(self) -> None:
        """Wake up for the next flush, or before it for what leaves at once."""
        due_s = self._flush_s
        if self._urgent is not None:
            due_s = min(due_s, self._phase_s + self._urgent / self._rate)
        if self._rests or (self._timer is not None and self._due_s <= due_s):
            return
        self._still()
        self._due_s = due_s
        self._timer = asyncio.get_running_loop().call_later(max(0.0, due_s - time.monotonic()), self._wake)

    def _still(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _say(self, turns: Iterable[_StandInTurn], at: int, *, since_begun: bool = False) -> None:
        """Send what these turns have produced up to this iteration, counted from each one's begin if so said."""
        slots, starts, counts = list[int](), list[int](), list[int]()
        ends, prompts = list[ChunkEnd](), list[ChunkPrompt]()
        for turn in turns:
            until = min(at + turn.begun if since_begun else at, turn.ends)
            over = until == turn.ends
            if until <= turn.sent and not over:
                continue
            if turn.sent == turn.begun:
                prompts.append(ChunkPrompt(len(slots), turn.prompt_tokens, 0))
                turn.times.first_s = time.monotonic()
            if over:
                turn.times.last_s = time.monotonic()
                ends.append(ChunkEnd(len(slots), turn.finish))
            slots.append(turn.slot)
            starts.append(turn.start + turn.sent - turn.begun)
            counts.append(until - turn.sent)
            turn.sent = until
        if not slots:
            return
        tokens = sum(counts)
        ids, logprobs = self._drawn.next(tokens)
        self._connection.send(
            wire.Tokens(Chunks(slots, starts, counts, [(self._version, len(slots))], ends, prompts), ids, logprobs)
        )
        self._decoded += tokens
        self._process.produced += tokens
        if ends:
            self._turns = {name: turn for name, turn in self._turns.items() if turn.sent < turn.ends}
            self._process.turns_ended += len(ends)
        if ends or prompts:
            self._urgent = min(map(_urgent_at, self._turns.values()), default=None)

    # Signs of life

    def _beat(self) -> None:
        executing, age_ns = len(self._turns), round((time.monotonic() - self._born_s) * 1e9)
        accounts_ns = {Account.DECODE: age_ns}
        beat = (self._process.credit, 0, executing, self._iteration(), accounts_ns, self._decoded, 0.0, 0, 0)
        self._connection.send(wire.Heartbeat(*beat))

    async def _beat_forever(self, interval_s: float) -> None:
        await asyncio.sleep(self._spread * interval_s)
        while True:
            self._beat()
            await asyncio.sleep(interval_s)


def _urgent_at(turn: _StandInTurn) -> int:
    """The iteration at which a turn has something to say at once: its first token, or its last."""
    return turn.begun + 1 if turn.sent == turn.begun else turn.ends
