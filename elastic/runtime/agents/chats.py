"""Chats: turns that viewers of a run ask for, of no trajectory, on its spare credit (`elastic.core.spare`).

Nothing of them is trained, counted among rollouts or journaled, but for what they have come to in all. They end with
this process, and at once when their clients leave.
"""

import asyncio
import dataclasses
import secrets
from collections.abc import Callable, Iterable, Sequence

import msgspec

from elastic.core import commands as c
from elastic.core.spare import FIRST_SLOT, SpareCredit, SpareTurn
from elastic.core.types import NS_PER_S, Chunk, Chunks, Nanoseconds, TurnId, WorkerId
from elastic.protocol import wire
from elastic.protocol.front_messages import BranchFound, LookUp, OpenTurns
from elastic.protocol.sampled import TOKEN_BYTES
from elastic.runtime.agents import notes
from elastic.runtime.agents.branches import Opening
from elastic.runtime.agents.limits import AgentLimits
from elastic.runtime.agents.refusals import TOO_MANY_TURNS, CallRefused
from elastic.runtime.agents.rollouts import Watcher
from elastic.runtime.agents.trajectory import AgentTurn
from elastic.runtime.episodes import OpenTurn, stable_hash
from elastic.runtime.ports import WorkerOrder, Workers

CHATS = "chat"
"""Stands for the trajectory that chats have not, before the number in their turns' names."""
CHATS_NOTE = "chats"
"""The journal's note of what chats have come to."""
LOOK_S = 0.05
"""How often it is looked whether chats that wait have a place, or must leave theirs."""


class ChatTotals(msgspec.Struct, kw_only=True):
    """What chats have come to: turns, their tokens, and the time of GPUs that these took."""

    turns: int = 0
    tokens: int = 0
    prompt_tokens: int = 0
    gpu_s: float = 0.0


def chats_of(notes: Iterable[str]) -> ChatTotals:
    """What the journals of a run's processes have noted of chats, in all."""
    of = [msgspec.json.decode(note, type=ChatTotals) for note in notes]
    return ChatTotals(
        turns=sum(one.turns for one in of),
        tokens=sum(one.tokens for one in of),
        prompt_tokens=sum(one.prompt_tokens for one in of),
        gpu_s=sum(one.gpu_s for one in of),
    )


@dataclasses.dataclass(frozen=True, slots=True)
class ChatLimits:
    """Most chats at once, and most tokens of each."""

    turns: int
    tokens: int


class Chats:
    """`clock_ns` is the run's time, `workers` whom it tells what `credit` decides."""

    def __init__(
        self,
        limits: AgentLimits,
        chat_limits: ChatLimits,
        credit: SpareCredit,
        workers: Workers,
        clock_ns: Callable[[], Nanoseconds],
    ) -> None:
        self.watcher = Watcher()
        self.totals = ChatTotals()
        sampling = msgspec.structs.replace(limits.sampling, max_new_tokens=chat_limits.tokens)
        self._limits = dataclasses.replace(limits, pinned=frozenset[str](), sampling=sampling)
        self._chat_limits = chat_limits
        self._credit = credit
        self._workers = workers
        self._clock_ns = clock_ns
        self._turns: dict[TurnId, AgentTurn] = {}
        self._slots: dict[tuple[WorkerId, int], set[int]] = {}
        """The slots of each worker in an epoch whose last tokens have not come."""
        self._asked = asyncio.Event()
        self._number = secrets.randbits(32)
        """Another process's chats have other names."""

    @property
    def under_way(self) -> int:
        """How many are answered, or wait."""
        return len(self._credit.turns)

    # What fronts ask

    def look_up(self, ask: LookUp) -> BranchFound:
        """A chat goes on from nothing: its client sends all of it."""
        return BranchFound(ask.request, CHATS)

    def open(self, ask: OpenTurns) -> tuple[list[AgentTurn], bool]:
        """A call's turns; none is joined. Raises `CallRefused`."""
        if ask.choices > self._chat_limits.turns:
            said = f"the run answers {self._chat_limits.turns} chats at once, and {ask.choices} were asked for"
            raise CallRefused(400, TOO_MANY_TURNS, said, param="n")
        if self.under_way + ask.choices > self._chat_limits.turns:
            said = f"the run answers {self._chat_limits.turns} chats at once, and has {self.under_way}"
            raise CallRefused(429, TOO_MANY_TURNS, said, retry_after_s=1.0)
        self._limits.check_ids(ask.ids)
        prompt_tokens = len(ask.ids) // TOKEN_BYTES
        sampling = self._limits.granted(ask.sampling, prompt_tokens)
        seed = secrets.randbits(62) if ask.sampling.seed is None else ask.sampling.seed
        turns: list[AgentTurn] = []
        for choice in range(ask.first_choice, ask.first_choice + ask.choices):
            self._number += 1
            generated = OpenTurn(f"{CHATS}/{self._number}", prompt_tokens, prompt=bytearray(ask.ids))
            generated.sampling = msgspec.structs.replace(sampling, noise_seed=stable_hash(seed, choice))
            asked = notes.TurnAsked(ask.call, choice, None, 0, b"", seed, sampling.temperature)
            turn = self._turns[generated.id] = AgentTurn(asked, Opening(0, prompt_tokens, 0), generated)
            turns.append(turn)
        for turn in turns:
            self._carry_out(self._credit.ask(turn.id, sampling.max_new_tokens, self._clock_ns()))
        self._asked.set()
        self.look()
        return turns, False

    def cut(self, turn: AgentTurn, kept: int) -> None:
        """Its answer ends there."""
        if turn.over:
            return
        self._end(turn)
        turn.shorten(kept)
        self.watcher.over(turn)

    def settle(self, turn: AgentTurn, kept: int, answer: bytes, history: bytes = b"", behind: bytes = b"") -> None:
        turn.kept = kept

    def deliver(self, turn: AgentTurn) -> None:
        """Its client has the answer."""
        self.alone(turn)

    def alone(self, turn: AgentTurn, *, cut_off: bool = False) -> None:
        """Its client is gone, and it with that."""
        self._end(turn)
        self._turns.pop(turn.id, None)

    def said(self, turn: AgentTurn) -> tuple[bytes, bytes]:
        """The turn's ids and log-probabilities so far, packed."""
        return bytes(turn.generated.token_ids), bytes(turn.generated.logprobs)

    # What workers say, and are told

    def own(self, worker: WorkerId, epoch: int, frame: wire.Tokens) -> wire.Tokens | None:
        """Take what is of chats out of a worker's frame; returns the rest, None if there is none."""
        if not self._slots or (slots := self._slots.get((worker, epoch))) is None:
            return frame
        rest, begin = _Frame(), 0
        for chunk in frame.chunks:
            end = begin + TOKEN_BYTES * chunk.count
            ids, logprobs = frame.token_ids[begin:end], frame.logprobs[begin:end]
            if chunk.slot >= FIRST_SLOT:
                self._take(worker, epoch, chunk, ids, logprobs)
                if chunk.finish is not None:
                    slots.discard(chunk.slot)
            else:
                rest.add(chunk, ids, logprobs)
            begin = end
        if not slots:
            self._slots.pop((worker, epoch), None)
        self.look()
        return rest.whole()

    def yield_places(self, worker: WorkerId) -> None:
        """A rollout's turn is about to go to the worker."""
        self._carry_out(self._credit.yield_places(worker, self._clock_ns()))

    def leave_worker(self, worker: WorkerId) -> None:
        """The worker is about to do something else."""
        self._carry_out(self._credit.leave(worker, self._clock_ns()))

    def beside(self, worker: WorkerId, pending: int, executing: int) -> tuple[int, int]:
        """How many of these turns of a worker, waiting and in execution, are of rollouts."""
        if not (held := self._credit.holds(worker)):
            return pending, executing
        waiting = self._credit.pending(worker)
        return max(0, pending - waiting), max(0, executing - (held - waiting))

    async def look_after(self) -> None:
        """Place what waits, and end what has waited for too long, until cancelled."""
        while True:
            await self._asked.wait()
            while self.under_way:
                self.look()
                await asyncio.sleep(LOOK_S)
            self._asked.clear()

    def look(self) -> None:
        self._carry_out(self._credit.look(self._clock_ns()))
        given_up, self._credit.given_up = self._credit.given_up, []
        for spare, cause in given_up:
            self._count(spare)
            if (turn := self._turns.get(spare.id)) is not None:
                turn.generated.ended = cause
                self.watcher.over(turn)

    def _take(self, worker: WorkerId, epoch: int, chunk: Chunk, ids: bytes, logprobs: bytes) -> None:
        spare, over = self._credit.take(worker, epoch, chunk, self._clock_ns())
        turn = None if spare is None else self._turns.get(spare.id)
        if spare is None or turn is None:
            return
        if chunk.count:
            turn.generated.accept(ids, logprobs, chunk.version, worker)
            self.watcher.accepted([(turn, chunk.version, chunk.count)], ids, logprobs)
        if over:
            self._count(spare)
            turn.generated.ended = ""
            self.watcher.over(turn)

    def _end(self, turn: AgentTurn) -> None:
        if (spare := self._credit.turns.get(turn.id)) is not None:
            self._carry_out(self._credit.end(turn.id, self._clock_ns()))
            self._count(spare)

    def _count(self, spare: SpareTurn) -> None:
        totals, turn = self.totals, self._turns.get(spare.id)
        totals.turns += 1
        totals.tokens += spare.accepted
        totals.prompt_tokens += 0 if turn is None else turn.at.prompt_tokens
        totals.gpu_s += spare.device_ns / NS_PER_S

    def _carry_out(self, commands: Sequence[c.Command]) -> None:
        for command in commands:
            match command:
                case c.StartTurn():
                    self._open_slot(command)
                    self._workers.start_turn(command, self._turns[command.turn].generated)
                case c.AbortTurn():
                    self._workers.order(command)
                case _:
                    raise AssertionError(f"spare credit orders {command}")

    def _open_slot(self, start: c.StartTurn) -> None:
        session = start.worker, start.epoch
        if session not in self._slots:
            self._slots = {known: slots for known, slots in self._slots.items() if known[0] != start.worker}
        self._slots.setdefault(session, set()).add(start.slot)


class ChattingWorkers:
    """The workers of a run that has chats: these make room before an order of the run's leaves."""

    def __init__(self, workers: Workers, chats: Chats) -> None:
        self._workers = workers
        self._chats = chats

    def start_turn(self, order: c.StartTurn, prompt: OpenTurn) -> None:
        self._chats.yield_places(order.worker)
        self._workers.start_turn(order, prompt)

    def order(self, order: WorkerOrder) -> None:
        if not isinstance(order, c.AbortTurn):
            self._chats.leave_worker(order.worker)
        self._workers.order(order)

    def fence(self, worker: WorkerId, reason: str) -> None:
        self._workers.fence(worker, reason)

    def blame(self, worker: WorkerId, reason: str) -> None:
        self._workers.blame(worker, reason)


class _Frame:
    """Chunks that are left of a frame."""

    def __init__(self) -> None:
        self._chunks: list[Chunk] = []
        self._ids: list[bytes] = []
        self._logprobs: list[bytes] = []

    def add(self, chunk: Chunk, ids: bytes, logprobs: bytes) -> None:
        self._chunks.append(chunk)
        self._ids.append(ids)
        self._logprobs.append(logprobs)

    def whole(self) -> wire.Tokens | None:
        if not self._chunks:
            return None
        return wire.Tokens(Chunks.of(self._chunks), b"".join(self._ids), b"".join(self._logprobs))
