"""A run as its fronts see it, at the other end of a real Unix socket: it joins, opens and settles turns.

It keeps what a run would have in its journal across `restart`, and what it heard in `heard`.
"""

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from elastic.core.ids import parse_agent_id
from elastic.protocol.connection import Connection, ConnectionLost, over_socket
from elastic.protocol.frames import RefusedFrame
from elastic.protocol.front_messages import (
    FRONT_VERSION,
    RUN_SIDE,
    SOCKET,
    AgentCaller,
    AnswerDelivered,
    AskMetrics,
    AskUpstream,
    BeginTrajectory,
    BindSession,
    BranchFound,
    ClientGone,
    CutTurn,
    Declined,
    EndTrajectory,
    FromFront,
    FromRun,
    FrontHello,
    FrontWelcome,
    GiveReward,
    HistoryFound,
    LookUp,
    MetricsTold,
    OpenedTurn,
    OpenTurns,
    RecallHistory,
    SettleTurn,
    ShowTrajectory,
    StreamTokens,
    TrajectoryBegun,
    TrajectoryShown,
    TrajectoryStatus,
    TurnOver,
    TurnSettled,
    TurnsTaken,
    UpstreamAllowed,
)
from elastic.protocol.run_control import socket_address
from elastic.protocol.sampled import ids_of, last_of, pack_ids, pack_logprobs

Wire = Connection[FromRun, FromFront]
TRAJECTORY = "2/5/0"


@dataclass
class Turn:
    """A turn as the run keeps it. `ids` are those of its tokens that came so far."""

    name: str
    choice: int
    call: OpenTurns
    prompt: list[int]
    stream: int = 0
    ids: list[int] = field(default_factory=list)
    finish: str = ""
    cause: str = ""
    kept: int | None = None
    answer: bytes | None = None
    delivered: bool = False
    gone: bool = False

    @property
    def over(self) -> bool:
        return bool(self.finish or self.cause)


class ModelledRun:
    """`answer` plays a turn once it is opened: it calls `tokens` and `over`. `decline` may refuse a request."""

    def __init__(self, directory: Path, answer: Callable[["ModelledRun", Turn], Awaitable[None]] | None = None) -> None:
        self.directory = directory
        self.answer = answer
        self.decline: Callable[[FromFront], Declined | None] = lambda message: None
        self.branches: dict[bytes, tuple[list[int], int]] = {}
        """By the digest of a conversation that ends with an answer: its tokens, and how many of them are the answer."""
        self.histories: dict[bytes, tuple[bytes, bytes]] = {}
        """By the same, of those that may be named: what it is behind, and the piece."""
        self.turns: list[Turn] = []
        self.heard: list[FromFront] = []
        self.status: dict[str, TrajectoryStatus] = {}
        self.told = MetricsTold(0, {}, {}, [])
        self.fds = 0
        self.settles = True
        self.mute = False
        self.refusal = ""
        self.stirred = asyncio.Event()
        self._server: asyncio.Server | None = None
        self._wires: set[Wire] = set()
        self._streams = 0
        self._of_stream: dict[tuple[int, int], Turn] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    # Its life.

    async def start(self) -> None:
        (self.directory / SOCKET).unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with socket_address(self.directory, SOCKET) as address:
            self._listener.bind(address)
        self._listener.listen()
        self._listener.setblocking(False)
        self._accepting = asyncio.create_task(self._accept())

    async def stop(self) -> None:
        """As if its process were killed."""
        self._accepting.cancel()
        self._listener.close()
        await asyncio.gather(self._accepting, return_exceptions=True)  # Whom it has taken is served then.
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for wire in list(self._wires):
            wire.abort()
        self._wires.clear()
        self._of_stream.clear()

    async def restart(self) -> None:
        """Another process goes on with what was journaled."""
        await self.stop()
        await self.start()

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(60):
            while not condition():
                self.stirred.clear()
                await self.stirred.wait()

    def of(self, kind: type) -> list:
        return [message for message in self.heard if isinstance(message, kind)]

    # What a test has it say.

    def tokens(self, turn: Turn, ids: list[int], version: int = 1) -> None:
        if turn.over:
            return
        turn.ids += ids
        self._send_tokens(turn, ids, version)

    def over(self, turn: Turn, finish: str = "stop", cause: str = "") -> None:
        if not turn.over:
            turn.finish, turn.cause = finish, cause
            self.say(turn, TurnOver(turn.stream, finish, cause))

    def _send_tokens(self, turn: Turn, ids: list[int], version: int = 1) -> None:
        if ids:
            logprobs = pack_logprobs([logprob_of(token) for token in ids])
            self.say(turn, StreamTokens([turn.stream], [len(ids)], [version], pack_ids(ids), logprobs))

    def say(self, turn: Turn, message: FromRun) -> None:
        for wire in self._wires:
            if self._of_stream.get((id(wire), turn.stream)) is turn:
                wire.send(message)

    # What it hears.

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            end, _ = await loop.sock_accept(self._listener)
            self._spawn(self._serve(end))

    def _spawn(self, work) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, end: socket.socket) -> None:
        end.setblocking(True)
        try:
            _, fds, _, _ = await asyncio.to_thread(socket.recv_fds, end, 1, 4)
            self.fds += len(fds)
            for fd in fds:
                socket.close(fd)
            wire = await over_socket(end, RUN_SIDE, "a front")
        except BaseException:
            end.close()
            raise
        hello = await wire.receive()
        assert isinstance(hello, FrontHello)
        if self.refusal:
            wire.close(RefusedFrame(self.refusal, False))
            return
        wire.send(FrontWelcome(FRONT_VERSION, "run"))
        self._wires.add(wire)
        self.stirred.set()

        def hear(messages: list[FromFront]) -> None:
            for message in messages:
                self._hear(wire, message)

        with contextlib.suppress(ConnectionLost):
            await wire.listen(hear)
        self._wires.discard(wire)
        self.stirred.set()

    def _hear(self, wire: Wire, message: FromFront) -> None:
        self.heard.append(message)
        self.stirred.set()
        if self.mute:
            return
        request = getattr(message, "request", None)
        if request is not None and (refusal := self.decline(message)) is not None:
            wire.send(Declined(request, *[getattr(refusal, name) for name in refusal.__struct_fields__[1:]]))
            return
        match message:
            case LookUp():
                found = self._found(wire, message)
                wire.send(found)
                if isinstance(found, TurnsTaken):
                    self._again([self._of_stream[id(wire), turn.stream] for turn in found.turns])
            case RecallHistory(request, _, turn):
                wire.send(self._recalled(request, turn))
            case OpenTurns():
                self._open(wire, message)
            case CutTurn(stream, kept):
                turn = self._of_stream[id(wire), stream]
                turn.kept = kept
                self.over(turn)
            case SettleTurn(stream, kept, answer, history, behind):
                turn = self._of_stream[id(wire), stream]
                turn.kept, turn.answer = kept, answer
                if answer:
                    self.branches[answer] = (turn.prompt + turn.ids[:kept], kept)
                if history:
                    assert not behind or behind in self.histories
                    self.histories.setdefault(answer, (behind, history))
                if self.settles:
                    wire.send(TurnSettled(stream))
            case AnswerDelivered(stream):
                self._of_stream.pop((id(wire), stream)).delivered = True
            case ClientGone(stream):
                if (gone := self._of_stream.pop((id(wire), stream), None)) is not None:
                    gone.gone = True
            case BeginTrajectory():
                again = any(m.key == message.key for m in self.of(BeginTrajectory)[:-1])
                self._stand(TRAJECTORY, group=message.group)
                wire.send(TrajectoryBegun(message.request, TRAJECTORY, 1, again))
            case AskUpstream():
                wire.send(UpstreamAllowed(message.request, len(self.of(AskUpstream))))
            case AskMetrics():
                wire.send(msgspec.structs.replace(self.told, request=message.request))
            case ShowTrajectory() | GiveReward() | EndTrajectory() | BindSession():
                wire.send(self._shown(message))

    def _stand(self, trajectory: str, **changed) -> TrajectoryStatus:
        before = self.status.get(trajectory)
        known = (
            {name: getattr(before, name) for name in before.__struct_fields__}
            if before
            else {"trajectory": trajectory, "group": "", "state": "open", "turns": 0, "tokens": 0, "branches": 0}
        )
        self.status[trajectory] = TrajectoryStatus(**{**known, **changed})
        return self.status[trajectory]

    def _shown(self, message) -> FromRun:
        caller: AgentCaller = message.caller
        try:
            trajectory = caller.trajectory or parse_agent_id(caller.named)
        except ValueError:
            return Declined(message.request, 404, "session_not_found", f"no session {caller.named!r}")
        match message:
            case GiveReward(reward=reward):
                status = self._stand(trajectory, reward=reward)
            case EndTrajectory(cause=cause):
                status = self._stand(trajectory, state="failed" if cause else "finished", cause=cause)
            case _:
                status = self._stand(trajectory)
        return TrajectoryShown(message.request, status)

    def _found(self, wire: Wire, message: LookUp) -> FromRun:
        call = message.call
        alike = [t for t in self.turns if t.call.call.digest == call.digest and t.call.call.route == call.route]
        if alike and (call.retry or (call.key and alike[-1].call.call.key == call.key) or not alike[-1].delivered):
            newest = {turn.choice: turn for turn in alike}
            turns = [newest[choice] for choice in sorted(newest)]
            before = message.ids_before
            prompt = b"" if before is None else last_of(pack_ids(turns[0].prompt), len(turns[0].prompt), before)
            return self._taken(wire, message.request, turns, joined=True, ids=prompt)
        known = max((n for n, digest in enumerate(message.chain, 1) if digest in self.histories), default=0)
        for matched in range(len(message.chain), 0, -1):
            if (found := self.branches.get(message.chain[matched - 1])) is not None:
                ids, answer = found
                before = message.ids_before
                packed = b"" if before is None else last_of(pack_ids(ids), len(ids), before + answer)
                return BranchFound(message.request, TRAJECTORY, 0, len(ids), matched, answer, packed, known)
        return BranchFound(message.request, TRAJECTORY, known=known)

    def _recalled(self, request: int, name: str) -> FromRun:
        answer = next((turn.answer for turn in self.turns if turn.name == name), None)
        pieces: list[bytes] = []
        while answer:
            if answer not in self.histories:
                break
            answer, piece = self.histories[answer]
            pieces.append(piece)
        if not pieces:
            return Declined(request, 400, "previous_response_not_found", f"no {name}", "previous_response_id")
        return HistoryFound(request, pieces[::-1])

    def _open(self, wire: Wire, message: OpenTurns) -> None:
        before = [] if message.branch is None else self._branch(message.tokens)
        new = []
        for choice in range(message.first_choice, message.first_choice + message.choices):
            name = f"{TRAJECTORY}/{len(self.turns)}"
            turn = Turn(name, choice, message, before + ids_of(message.ids))
            self.turns.append(turn)
            new.append(turn)
        wire.send(self._taken(wire, message.request, new))
        for turn in new:
            if self.answer is not None:
                self._spawn(self.answer(self, turn))

    def _branch(self, tokens: int) -> list[int]:
        return next(ids for ids, _ in self.branches.values() if len(ids) == tokens)

    def _taken(self, wire: Wire, request: int, turns: list[Turn], joined: bool = False, ids: bytes = b"") -> TurnsTaken:
        for turn in turns:
            self._streams += 1
            turn.stream = self._streams
            self._of_stream[id(wire), turn.stream] = turn
            turn.gone = False
        opened = [OpenedTurn(t.stream, t.name, t.choice, len(t.prompt), 1000) for t in turns]
        return TurnsTaken(request, TRAJECTORY, opened, joined, ids)

    def _again(self, turns: list[Turn]) -> None:
        for turn in turns:
            self._send_tokens(turn, turn.ids)
            if turn.over:
                self.say(turn, TurnOver(turn.stream, turn.finish, turn.cause))


def logprob_of(token: int) -> float:
    """One that a float32 has exactly."""
    return -(token % 64) / 16
