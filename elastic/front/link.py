"""A front's connection to its run, over the Unix socket in the run's directory.

The run may die and be started again at any time: the link dials again, and a caller that waits for an answer is told
that the link was lost (`LinkLost`). It hands the run the socket at which the fronts listen, so that the run's next
process has it, too.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import NamedTuple, NoReturn, TypeAlias

import msgspec
import structlog

from elastic.protocol.connection import ConnectionLost
from elastic.protocol.frames import RefusedFrame, WireError
from elastic.protocol.front_messages import (
    FRONT_VERSION,
    AnswerDelivered,
    AskUpstream,
    BranchFound,
    ClientGone,
    CloseEpisode,
    Declined,
    FromFront,
    FromRun,
    FrontHello,
    FrontWelcome,
    HistoryFound,
    MetricsTold,
    OpenedTurn,
    ResetEpisode,
    ServingTold,
    StepEpisode,
    StreamTokens,
    TrajectoryBegun,
    TrajectoryShown,
    TruncateEpisode,
    TurnOver,
    TurnSettled,
    TurnsTaken,
    UpstreamAllowed,
    UpstreamOver,
    UpstreamWaived,
    VersionServed,
)
from elastic.protocol.run_connection import REDIAL_MAX_S, REDIAL_S, RunConnection, welcomed
from elastic.protocol.sampled import TOKEN_BYTES
from elastic.system.host import here

log = structlog.get_logger(__name__)

NOT_MADE = 0
"""The status of a call of a model elsewhere for which nobody waits once it may be made."""

Answer: TypeAlias = (
    BranchFound
    | HistoryFound
    | TurnsTaken
    | TrajectoryBegun
    | TrajectoryShown
    | MetricsTold
    | VersionServed
    | ServingTold
    | UpstreamAllowed
    | Declined
)


class LinkLost(Exception):
    """The run's process, or the connection to it, is gone. Asking again may help."""


class TokensCame(NamedTuple):
    """Tokens of a choice, packed, all of one version."""

    choice: int
    ids: memoryview
    logprobs: memoryview
    version: int


class ChoiceOver(NamedTuple):
    """All tokens of a choice have come, or it has failed."""

    choice: int
    over: TurnOver


class ChoiceSettled(NamedTuple):
    choice: int


News: TypeAlias = TokensCame | ChoiceOver | ChoiceSettled


class TurnInbox:
    """What a call hears of its turns, in the order in which it comes."""

    def __init__(self) -> None:
        self.streams: dict[int, int] = {}
        """Those of the turns that it hears of, by their choices."""
        self._news: deque[News] = deque()
        self._waiting: asyncio.Future[None] | None = None
        self._lost = False

    def put(self, news: News) -> None:
        self._news.append(news)
        self._stir()

    def lose(self) -> None:
        self._lost = True
        self._stir()

    async def take(self) -> list[News]:
        """All that has come since the last time, once there is anything. Raises `LinkLost`."""
        while not self._news:
            if self._lost:
                raise LinkLost("the run is gone")
            self._waiting = asyncio.get_running_loop().create_future()
            try:
                await self._waiting
            finally:
                self._waiting = None
        news = list(self._news)
        self._news.clear()
        return news

    def _stir(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)


Connect: TypeAlias = Callable[[], Awaitable[RunConnection]]


class _Stream(NamedTuple):
    inbox: TurnInbox
    choice: int


class RunLink:
    """Keeps the connection while `run` is awaited. `connect` makes one; it may raise `OSError` and `ConnectionLost`."""

    def __init__(self, connect: Connect) -> None:
        self._connect = connect
        self._connection: RunConnection | None = None
        self._stands = asyncio.Event()
        self._requests = 0
        self._asked: dict[int, tuple[asyncio.Future[Answer], TurnInbox | None]] = {}
        self._streams: dict[int, _Stream] = {}
        self.lost_s: float | None = here().monotonic()
        """Since when there has been no connection (monotonic); None while there is one."""
        self.run_name = ""

    @property
    def up(self) -> bool:
        return self._connection is not None and self._connection.open

    async def stands(self) -> None:
        """Wait until there is a connection of which more can be said and heard.

        One that has just ended may not be known as lost yet; a caller that asks again at once would never let that be
        known.
        """
        while not self.up:
            self._stands.clear()
            await self._stands.wait()

    async def run(self) -> NoReturn:
        """Dial, and dial again whenever the connection is lost. Raises `SessionRefused` if the run wants no front."""
        wait_s = REDIAL_S
        while True:
            try:
                connection = await self._dial()
            except (OSError, ConnectionLost) as error:
                log.debug("run not reached", error=str(error))
                await asyncio.sleep(wait_s)
                wait_s = min(2 * wait_s, REDIAL_MAX_S)
                continue
            wait_s = REDIAL_S
            self._connection, self.lost_s = connection, None
            self._stands.set()
            try:
                await connection.listen(self._hear)
            except ConnectionLost as error:
                log.warning("run lost", cause=str(error))
            finally:
                self._lose()
                connection.abort()

    async def ask(self, request: Callable[[int], FromFront], inbox: TurnInbox | None = None) -> Answer:
        """The run's answer to what `request` makes of a number. `inbox` hears of the turns that the answer brings.

        Raises `LinkLost`.
        """
        connection = self._connection
        if connection is None or not connection.open:
            raise LinkLost("the run is gone")
        self._requests += 1
        number = self._requests
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._asked[number] = answer, inbox
        asked = request(number)
        connection.send(asked)
        try:
            return await answer
        except asyncio.CancelledError:
            if isinstance(asked, AskUpstream):
                self._waive(number, answer)
            raise
        finally:
            self._asked.pop(number, None)

    def _waive(self, number: int, answer: asyncio.Future[Answer]) -> None:
        """Nobody waits for this leave any more, which may have been given a moment ago."""
        if answer.cancelled() or not answer.done():
            self.send(UpstreamWaived(number))
        elif answer.exception() is None and isinstance(given := answer.result(), UpstreamAllowed):
            self.send(UpstreamOver(given.call, NOT_MADE))

    def send(self, message: FromFront) -> None:
        """Say it, if there is a connection."""
        if self._connection is not None:
            self._connection.send(message)

    def delivered(self, inbox: TurnInbox) -> None:
        """The client has been given the whole answer, which the inbox has heard of."""
        self._finish(inbox, AnswerDelivered)

    def leave(self, inbox: TurnInbox) -> None:
        """The client is gone before it was given the whole answer."""
        self._finish(inbox, ClientGone)

    def _finish(self, inbox: TurnInbox, say: type[AnswerDelivered | ClientGone]) -> None:
        for stream in inbox.streams.values():
            if self._streams.pop(stream, None) is not None:
                self.send(say(stream))
        inbox.streams.clear()

    async def _dial(self) -> RunConnection:
        connection = await self._connect()
        welcome = await welcomed(connection, FrontHello(FRONT_VERSION, here().pid()))
        self.run_name = welcome.run
        return connection

    def _hear(self, messages: list[FromRun]) -> None:
        for message in messages:
            match message:
                case StreamTokens():
                    self._deliver(message)
                case TurnOver(stream):
                    if (to := self._streams.get(stream)) is not None:
                        to.inbox.put(ChoiceOver(to.choice, message))
                case TurnSettled(stream):
                    if (to := self._streams.get(stream)) is not None:
                        to.inbox.put(ChoiceSettled(to.choice))
                case RefusedFrame(reason, _):
                    raise ConnectionLost(reason)
                case FrontWelcome():
                    raise WireError("a second welcome")
                case ResetEpisode() | StepEpisode() | TruncateEpisode() | CloseEpisode():
                    raise WireError("an order for an env worker")
                case _:
                    self._answer(message)

    def _deliver(self, message: StreamTokens) -> None:
        ids, logprobs = memoryview(message.ids), memoryview(message.logprobs)
        at = 0
        for stream, count, version in zip(message.streams, message.counts, message.versions, strict=True):
            to = self._streams.get(stream)
            end = at + count * TOKEN_BYTES
            if to is not None:
                to.inbox.put(TokensCame(to.choice, ids[at:end], logprobs[at:end], version))
            at = end

    def _answer(self, message: Answer) -> None:
        answer, inbox = self._asked.get(message.request, (None, None))
        if answer is None or answer.done():
            answer = None
        if isinstance(message, TurnsTaken):
            message = self._attach(message, None if answer is None else inbox)
        if isinstance(message, UpstreamAllowed) and answer is None:
            self.send(UpstreamOver(message.call, NOT_MADE))
        if answer is not None:
            answer.set_result(message)

    def _attach(self, taken: TurnsTaken, inbox: TurnInbox | None) -> TurnsTaken:
        """Have the inbox hear of the turns, of one for each choice; the others are given back."""
        heard: list[OpenedTurn] = []
        for turn in taken.turns:
            if inbox is None or turn.choice in inbox.streams:
                self.send(ClientGone(turn.stream))
                continue
            inbox.streams[turn.choice] = turn.stream
            self._streams[turn.stream] = _Stream(inbox, turn.choice)
            heard.append(turn)
        return msgspec.structs.replace(taken, turns=heard)

    def _lose(self) -> None:
        self._connection, self.lost_s = None, here().monotonic()
        self._stands.clear()
        asked, self._asked = self._asked, {}
        for answer, _ in asked.values():
            if not answer.done():
                answer.set_exception(LinkLost("the run is gone"))
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.inbox.lose()
