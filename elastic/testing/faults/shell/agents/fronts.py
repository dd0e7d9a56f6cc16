"""Fronts among simulated processes: the run's end of their connections, and a model of a front with its calls.

A front can be killed with all its streams: the run sees its connection break, its clients that they have no answer.
"""

import asyncio
from collections.abc import Callable, Coroutine
from hashlib import blake2b
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec

from elastic.front.link import ChoiceOver, ChoiceSettled, LinkLost, RunLink, TokensCame, TurnInbox
from elastic.protocol import front_messages as m
from elastic.protocol.connection import Connection, ConnectionLost
from elastic.protocol.run_connection import PeerConnection
from elastic.protocol.sampled import ids_of, pack_ids
from elastic.runtime.agents import Doorkeeper
from elastic.testing.faults.shell.agents.record import AgentAnswer, AgentRecord, CallAttempt
from elastic.testing.faults.shell.network import WorldTransport

T = TypeVar("T")

FRONTS = 2
ADDRESS, PORT = "10.0.0.1", 39_999
HOLD_S = 20.0
"""Longest that a call waits for its first token."""

Message = tuple[int, ...]
"""A message is its tokens, and a rendering the tokens of all messages."""


class WorldDoor:
    """Where `peers` of a run dial on the world's network, at a port of the run's address."""

    def __init__(self, doorkeeper: Doorkeeper, peers: str) -> None:
        self._doorkeeper, self._peers = doorkeeper, peers
        self._welcoming: set[asyncio.Task[None]] = set()

    async def open(self, address: str, port: int) -> None:
        came = lambda: Connection(m.RUN_SIDE, self._peers, self._came)  # noqa: E731
        self._server = await asyncio.get_running_loop().create_server(came, address, port)

    def _came(self, connection: PeerConnection) -> None:
        task = asyncio.get_running_loop().create_task(self._welcome(connection), name=self._peers)
        self._welcoming.add(task)
        task.add_done_callback(self._welcoming.discard)

    async def _welcome(self, connection: PeerConnection) -> None:
        try:
            await self._doorkeeper.welcome(connection)
        except (TimeoutError, ConnectionLost):
            connection.abort()

    async def aclose(self) -> None:
        self._server.close()
        for task in list(self._welcoming):
            task.cancel()
        self._doorkeeper.close()


class WorldFronts(WorldDoor):
    """`elastic.runtime.agents.Fronts` on the world's network: takes fronts' connections to the run."""

    def __init__(self, doorkeeper: Doorkeeper) -> None:
        super().__init__(doorkeeper, "a front")

    async def start(self) -> str:
        await self.open(ADDRESS, PORT)
        return f"{ADDRESS}:{PORT}"


class FrontGone(Exception):
    """The front was killed. Another one may do it."""


class StreamTorn(Exception):
    """The stream was cut: other tokens have come than the client had been shown."""


class FrontRefusal(Exception):
    """The front answers with an error."""

    def __init__(self, status: int, code: str, message: str = "") -> None:
        super().__init__(f"{status} {code}: {message}")
        self.status, self.code = status, code


class AgentAsk(NamedTuple):
    """A call as a front reads it. Those that are no chat are looked for by their tokens alone. An answer ends behind
    the token `stop`, if it has one."""

    caller: m.AgentCaller
    call: m.AgentCall
    messages: tuple[Message, ...]
    chat: bool = True
    stream: bool = True
    choices: int = 1
    stop: int | None = None
    sampling: m.WantedSampling = m.WantedSampling()


class _Choice:
    """One choice of a call on its way to the client."""

    def __init__(self, turn: m.OpenedTurn) -> None:
        self.turn = turn
        self.token_ids: list[int] = []
        self.shown: list[int] = []
        """What the client has been shown of it."""
        self.kept: int | None = None
        self.settled = False

    def join(self, turn: m.OpenedTurn) -> None:
        self.turn, self.token_ids, self.kept, self.settled = turn, [], None, False


def chain_of(messages: tuple[Message, ...]) -> list[bytes]:
    digests, before = list[bytes](), b""
    for message in messages:
        before = chained(before, message)
        digests.append(before)
    return digests


def chained(before: bytes, message: Message) -> bytes:
    return blake2b(before + pack_ids(message), digest_size=m.DIGEST_BYTES).digest()


class LinkedFront:
    """A front's process, as far as it is one: its link to the run, and the calls that end with it. They run on the loop
    of its clients, as its link does."""

    def __init__(self) -> None:
        self.link = RunLink(self._connect)
        self.served_by: object = None
        """The process of the run to which it is connected."""
        self.alive = True
        self._calls: set[asyncio.Task[Any]] = set()
        self._linking = asyncio.get_running_loop().create_task(self.link.run(), name="link")

    async def _connect(self) -> Connection[m.FromFront, m.FromRun]:
        transport, connection = await asyncio.get_running_loop().create_connection(
            lambda: Connection(m.FRONT_SIDE, "the run"), ADDRESS, PORT
        )
        assert isinstance(transport, WorldTransport)
        assert transport.peer is not None
        self.served_by = transport.peer.loop
        return connection

    def kill(self) -> None:
        self.alive = False
        self._linking.cancel()
        for call in list(self._calls):
            call.cancel()

    async def attended(self, work: Coroutine[Any, Any, T]) -> T:
        """What becomes of a client's request. Raises `FrontGone` if the front is killed meanwhile."""
        if not self.alive:
            work.close()
            raise FrontGone
        call = asyncio.get_running_loop().create_task(work, name="call")
        call.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._calls.add(call)
        try:
            await asyncio.wait([call])
        finally:
            self._calls.discard(call)
            call.cancel()
        if call.cancelled():
            raise FrontGone
        return call.result()


FrontT = TypeVar("FrontT", bound=LinkedFront)


class ReplacedFronts(Generic[FrontT]):
    """The fronts that clients of a run share. There are none before `begin`; who is killed has a successor."""

    def __init__(self, make: Callable[[], FrontT]) -> None:
        self.all: list[FrontT] = []
        self._make = make

    def begin(self) -> None:
        """On the loop of the clients."""
        self._loop = asyncio.get_running_loop()
        self.all = [self._make() for _ in range(FRONTS)]

    def kill(self, which: float, down_s: float) -> bool:
        """Kill a front; another one takes its place after a while. Returns whether there was one."""
        place = int(which * FRONTS)
        if not self.all or not self.all[place].alive:
            return False
        self._loop.call_soon(self.all[place].kill)
        self._loop.call_later(down_s, self._replace, place)
        return True

    def _replace(self, place: int) -> None:
        self.all[place] = self._make()


class ModelFront(LinkedFront):
    """One front of agents."""

    def __init__(self, record: AgentRecord, found: Callable[[str], None]) -> None:
        super().__init__()
        self.record = record
        self.found = found
        """Is told of what must not be."""

    async def request(self, make: Callable[[int], m.FromFront]) -> Any:
        """The answer to a request that asks for no turns. Raises `FrontGone` and `FrontRefusal`."""
        return await self.attended(self._requested(make))

    async def _requested(self, make: Callable[[int], m.FromFront]) -> Any:
        try:
            async with asyncio.timeout(HOLD_S):
                await self.link.stands()
                answer = await self.link.ask(make)
        except (LinkLost, TimeoutError):
            raise FrontRefusal(503, "run_gone") from None
        if isinstance(answer, m.Declined):
            raise FrontRefusal(answer.status, answer.code, answer.message)
        return answer

    async def serve(self, asked: AgentAsk) -> list[Message]:
        """The answers of all choices. Raises `FrontGone`, `StreamTorn` and `FrontRefusal`."""
        return await self.attended(_Call(self, asked).answer())


class _Call:
    """A call from its body to its last byte, as `elastic.front.calls` has it."""

    def __init__(self, front: ModelFront, asked: AgentAsk) -> None:
        self._front = front
        self._link = front.link
        self._asked = asked
        self._call = asked.call
        self._inbox = TurnInbox()
        self._chain = chain_of(asked.messages) if asked.chat else []
        self._prompt = tuple(token for message in asked.messages for token in message)
        self._choices: dict[int, _Choice] = {}
        self._attempts: list[CallAttempt] = []
        self._trajectory = ""
        self._body = asked.caller.trajectory or asked.caller.named, asked.call.route, asked.call.digest
        self._repeated = False
        """Whether the last such call was delivered whole, as the run has heard before it hears of this one."""

    async def answer(self) -> list[Message]:
        try:
            async with asyncio.timeout(HOLD_S) as holding:
                await self._live(holding)
            return self._deliver()
        except TimeoutError:
            raise FrontRefusal(503, "nothing_came") from None
        finally:
            self._link.leave(self._inbox)

    async def _live(self, holding: asyncio.Timeout) -> None:
        while True:
            try:
                await self._link.stands()
                await self._take_turns()
                while not all(choice.settled for choice in self._choices.values()):
                    for news in await self._inbox.take():
                        self._hear(news)
                    holding.reschedule(None)
                return
            except LinkLost:
                holding.reschedule(asyncio.get_running_loop().time() + HOLD_S)
                self._inbox = TurnInbox()

    def _deliver(self) -> list[Message]:
        front, record = self._front, self._front.record
        record.given.setdefault(self._trajectory, set()).update(self._answer(n) for n in self._choices)
        if self._link.up:
            record.delivered[self._body] = front, front.served_by
        self._link.delivered(self._inbox)
        for attempt in self._attempts:
            attempt.delivered = True
        return [self._answer(number).token_ids for number in sorted(self._choices)]

    def _answer(self, number: int) -> AgentAnswer:
        choice = self._choices[number]
        return AgentAnswer(choice.turn.turn, self._prompt, tuple(choice.token_ids[: choice.kept]))

    # Turns

    async def _take_turns(self) -> None:
        asked, front = self._asked, self._front
        told = front.record.delivered.pop(self._body, None)
        self._repeated = told == (front, front.served_by) and not self._call.retry and not self._call.key
        found = await self._ask(lambda number: m.LookUp(number, asked.caller, self._call, self._chain, m.ALL_IDS))
        missing = list(range(asked.choices))
        if isinstance(found, m.TurnsTaken):
            self._take(found)
            missing = [number for number in missing if number not in {turn.choice for turn in found.turns}]
        if not missing:
            return
        branch, tokens = None, 0
        if isinstance(found, m.BranchFound) and asked.chat and found.branch is not None:
            branch, tokens = found.branch, found.tokens
            self._check_branch(found)
        call, self._call = self._call, msgspec.structs.replace(self._call, retry=True)
        ids = pack_ids(self._prompt[tokens:])
        self._take(
            await self._ask(
                lambda number: m.OpenTurns(
                    number, asked.caller, call, branch, tokens, ids, missing[0], len(missing), asked.sampling
                )
            )
        )

    def _check_branch(self, found: m.BranchFound) -> None:
        rendered = tuple(token for message in self._asked.messages[: found.matched] for token in message)
        if tuple(ids_of(found.ids)) != rendered or len(rendered) != found.tokens:
            self._front.found(f"branch {found.branch} of {found.trajectory} is not what the messages are rendered to")

    async def _ask(self, make: Callable[[int], m.LookUp | m.OpenTurns]) -> Any:
        answer = await self._link.ask(make, self._inbox)
        if isinstance(answer, m.Declined):
            raise FrontRefusal(answer.status, answer.code, answer.message)
        return answer

    def _take(self, taken: m.TurnsTaken) -> None:
        front = self._front
        self._trajectory = taken.trajectory
        turns = {turn.choice: turn.turn for turn in taken.turns}
        self._attempts.append(CallAttempt(taken.trajectory, self._call, turns, self._repeated))
        front.record.attempts.append(self._attempts[-1])
        for turn in taken.turns:
            if turn.choice in self._choices:
                self._choices[turn.choice].join(turn)
            else:
                self._choices[turn.choice] = _Choice(turn)
            if self._asked.sampling.seed is not None:
                front.record.seeds[turn.turn] = self._asked.sampling.seed
            if turn.prompt_tokens != len(self._prompt):
                front.found(f"{turn.turn} has {turn.prompt_tokens} tokens before it instead of {len(self._prompt)}")

    # Tokens

    def _hear(self, news: TokensCame | ChoiceOver | ChoiceSettled) -> None:
        choice = self._choices[news.choice]
        match news:
            case TokensCame(_, ids, _, _):
                self._came(choice, ids_of(ids))
            case ChoiceOver(_, over):
                if not over.finish:
                    raise FrontRefusal(over.status, over.code, over.cause)
                if len(choice.token_ids) < len(choice.shown):
                    raise StreamTorn
                choice.kept = len(choice.token_ids) if choice.kept is None else choice.kept
                answer = self._answer(news.choice)
                self._front.record.settled.setdefault(self._trajectory, set()).add(answer)
                digest = chained(self._chain[-1], answer.token_ids) if self._asked.chat else b""
                self._link.send(m.SettleTurn(choice.turn.stream, choice.kept, digest))
            case ChoiceSettled():
                choice.settled = True

    def _came(self, choice: _Choice, ids: list[int]) -> None:
        choice.token_ids += ids
        stop = self._asked.stop
        if choice.kept is None and stop in choice.token_ids:
            choice.kept = choice.token_ids.index(stop) + 1
            self._link.send(m.CutTurn(choice.turn.stream, choice.kept))
        if self._asked.stream:
            said = choice.token_ids[: choice.kept]
            common = min(len(said), len(choice.shown))
            if said[:common] != choice.shown[:common]:
                raise StreamTorn
            choice.shown = max(said, choice.shown, key=len)
