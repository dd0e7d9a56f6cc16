"""Agents that cost little of what they share with a front: they stream chats over kept connections, read by hand.

A *runner* has one turn that is as long as it can be. A *talker* has short ones, each behind the last: it sends its
messages, reads the answer, and sends both with another message, at an even pace. A chatter that is a *probe* is told
with each event how many tokens there were, so that the delay of each of them can be had.

They live in a process of their own (`chatters`), which is asked over a pipe.
"""

import asyncio
import json
import os
import time
from collections.abc import Coroutine
from dataclasses import dataclass, field
from multiprocessing.connection import Connection as Pipe
from typing import Any, NamedTuple, TypeAlias, cast

import uvloop

from benchmarks._spoken import CHAT, ROUTES, SpokenRoute
from elastic.system.machine import raise_descriptor_limit

SYSTEM = "You are a helpful assistant. You may call functions."
QUESTION = "What is the sum of these numbers? Let me think about it once more, step by step."
OPENING_AT_ONCE = 64
STARTS_PER_S = 400
"""Runners that begin, so that their prompts are no burst."""
BUSY_S = 0.2
BUSY = 429
LAST_CHUNK = b"0\r\n\r\n"


class BeginChats(NamedTuple):
    """Open so many trajectories with a driver's key; answered by `ChatsDone`.

    Without a `group_size` there are none to open: `key` is then everybody's. All of them talk by one `route`.
    """

    host: str
    port: int
    key: str
    trajectories: int
    group_size: int = 0
    route: str = CHAT


class StreamChats(NamedTuple):
    """Have the next so many be runners, every `probe_every`-th a probe; answered by `ChatsDone` as the first begins."""

    runners: int
    max_tokens: int
    probe_every: int


class TalkShortly(NamedTuple):
    """Have the next so many talk, from now on; answered by `ChatsDone` at once."""

    talkers: int
    max_tokens: int
    period_s: float


class PlayTurns(NamedTuple):
    """Have all have so many turns of so many tokens, some at once; answered by `ChatsDone` after the last one."""

    turns: int
    max_tokens: int
    at_once: int


class LookAtChats(NamedTuple):
    """Asks for `LookedAtChats`."""


class TellOfChats(NamedTuple):
    """Asks for `ToldOfChats`."""


class ChatsDone(NamedTuple):
    pass


class LookedAtChats(NamedTuple):
    """What there has been so far. `events` have content; `streaming` turns have had one, and are not over."""

    at_s: float
    cpu_s: float
    events: int
    begun: int
    ended: int
    streaming: int


class TurnHeard(NamedTuple):
    turn: str
    talked: bool
    first_s: float
    last_s: float


class ProbedTokens(NamedTuple):
    """Then, so many tokens of a turn had come."""

    turn: str
    at_s: float
    tokens: int


class ToldOfChats(NamedTuple):
    turns: list[TurnHeard]
    probed: list[ProbedTokens]


Question: TypeAlias = BeginChats | StreamChats | TalkShortly | PlayTurns | LookAtChats | TellOfChats


class ServerFailed(Exception):
    """The answer is an error, or was cut."""


@dataclass(slots=True)
class _ChatAnswer:
    probe: bool
    done: asyncio.Future[bytes]
    begun: bool = False
    parts: list[bytes] = field(default_factory=list[bytes])
    turn: str = ""
    events: int = 0
    first_s: float = 0.0
    last_s: float = 0.0


class _ChatConnection(asyncio.Protocol):
    """A connection for one request at a time."""

    def __init__(self, probed: list[ProbedTokens], spoken: SpokenRoute) -> None:
        self._probed = probed
        self._spoken = spoken
        self._transport: asyncio.Transport | None = None
        self._head = b""
        self._left = -1
        """Bytes of a body that has a length."""
        self.answer: _ChatAnswer | None = None
        self.events = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    async def post(self, request: bytes, *, probe: bool = False) -> _ChatAnswer:
        """Raises `ServerFailed` for an error and for an answer that is cut."""
        assert self._transport is not None
        self.answer = answer = _ChatAnswer(probe, asyncio.get_running_loop().create_future())
        self._transport.write(request)
        await answer.done
        return answer

    def data_received(self, data: bytes) -> None:
        answer = self.answer
        assert answer is not None
        if not answer.begun:
            self._head += data
            end = self._head.find(b"\r\n\r\n")
            if end < 0:
                return
            head, data = self._head[:end].lower(), self._head[end + 4 :]
            self._head = b""
            answer.begun = True
            self._left = _length(head)
            if not head.startswith(b"http/1.1 200"):
                said = head.partition(b"\r\n")[0] + b": " + data
                answer.done.set_exception(ServerFailed(said.decode(errors="replace")))
                self.close()
                return
        if not data:
            return
        answer.parts.append(data)
        if self._left >= 0:
            self._left -= len(data)
            if not self._left:
                answer.done.set_result(b"".join(answer.parts))
            return
        events = data.count(self._spoken.piece)
        if events:
            self.events += events
            answer.events += events
            if not answer.first_s:
                answer.first_s = time.monotonic()
                answer.turn = _turn_of(data, self._spoken.identifier)
            if answer.probe and (at := data.rfind(b'"completion_tokens":')) >= 0:
                self._probed.append(ProbedTokens(answer.turn, time.monotonic(), _number(data, at + 20)))
        if data.endswith(LAST_CHUNK):
            answer.last_s = time.monotonic()
            answer.done.set_result(b"")

    def connection_lost(self, exc: Exception | None) -> None:
        if self.answer is not None and not self.answer.done.done():
            self.answer.done.set_exception(ServerFailed("the connection was cut"))

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()


def chatters(pipe: Pipe) -> None:
    raise_descriptor_limit()
    uvloop.run(_Chatters(pipe).live())


class _Chatters:
    def __init__(self, pipe: Pipe) -> None:
        self._pipe = pipe
        self._begin: BeginChats | None = None
        self._keys: list[str] = []
        self._taken = 0
        """Of the keys, how many are given to runners and talkers."""
        self._connections: list[_ChatConnection] = []
        self._told = ToldOfChats([], [])
        self._begun = self._ended = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._failed: Exception | None = None

    async def live(self) -> None:
        loop, self._over = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self._pipe.fileno(), self._hear)
        await self._over.wait()

    def _hear(self) -> None:
        try:
            asked: Question = self._pipe.recv()
        except (EOFError, OSError):
            self._over.set()
            return
        if self._failed is not None:
            self._pipe.send(self._failed)
            return
        match asked:
            case BeginChats():
                self._begin = asked
                self._spawn(self._answered(self._open(asked)))
            case PlayTurns():
                self._spawn(self._answered(self._play(asked)))
            case StreamChats():
                for place, key in enumerate(self._next(asked.runners)):
                    self._spawn(self._run(key, asked.max_tokens, place, place % asked.probe_every == 0))
                self._pipe.send(ChatsDone())
            case TalkShortly():
                for place, key in enumerate(self._next(asked.talkers)):
                    self._spawn(self._talk(key, asked, place / asked.talkers))
                self._pipe.send(ChatsDone())
            case LookAtChats():
                self._pipe.send(self._looked())
            case TellOfChats():
                # The loop has made it non-blocking, and what is told may be more than it holds.
                os.set_blocking(self._pipe.fileno(), True)
                self._pipe.send(self._told)

    def _looked(self) -> LookedAtChats:
        events = sum(connection.events for connection in self._connections)
        answers = [connection.answer for connection in self._connections]
        streaming = sum(answer is not None and answer.first_s > 0 and not answer.last_s for answer in answers)
        return LookedAtChats(time.monotonic(), time.process_time(), events, self._begun, self._ended, streaming)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failed = self._failed or ServerFailed(f"{type(error).__name__}: {error}")

    async def _answered(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Exception as error:
            self._pipe.send(ServerFailed(f"{type(error).__name__}: {error}"))
            raise
        self._pipe.send(ChatsDone())

    def _next(self, count: int) -> list[str]:
        self._taken += count
        return self._keys[self._taken - count : self._taken]

    @property
    def route(self) -> str:
        assert self._begin is not None
        return self._begin.route

    @property
    def spoken(self) -> SpokenRoute:
        return ROUTES[self.route]

    async def _connected(self) -> _ChatConnection:
        assert self._begin is not None
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(
            lambda: _ChatConnection(self._told.probed, self.spoken), self._begin.host, self._begin.port
        )
        self._connections.append(connection)
        return connection

    async def _open(self, begin: BeginChats) -> None:
        if not begin.group_size:
            self._keys = [begin.key] * begin.trajectories
            return
        places = iter(range(begin.trajectories))

        async def open_some() -> None:
            connection = await self._connected()
            for place in places:
                body = json.dumps({"task": {}, "group": f"group-{place // begin.group_size}"}).encode()
                while True:
                    try:
                        answer = await connection.post(_request("/trajectories", begin.key, body))
                        break
                    except ServerFailed as error:
                        if f" {BUSY} " not in str(error):
                            raise
                        await asyncio.sleep(BUSY_S)
                        connection = await self._connected()
                self._keys.append(json.loads(answer.done.result())["key"])
            connection.close()

        async with asyncio.TaskGroup() as opening:
            for _ in range(min(OPENING_AT_ONCE, begin.trajectories)):
                opening.create_task(open_some())

    async def _run(self, key: str, max_tokens: int, place: int, probe: bool) -> None:
        await asyncio.sleep(place / STARTS_PER_S)
        await _ChatAgent(self, await self._connected(), key).say(max_tokens, talks=False, probe=probe)

    async def _talk(self, key: str, asked: TalkShortly, share: float) -> None:
        agent, loop = _ChatAgent(self, await self._connected(), key), asyncio.get_running_loop()
        due_s = loop.time() + share * asked.period_s
        while True:
            await asyncio.sleep(due_s - loop.time())
            due_s += asked.period_s
            await agent.say(asked.max_tokens, talks=True)

    async def _play(self, asked: PlayTurns) -> None:
        keys = iter(self._next(len(self._keys)))
        self._taken = 0

        async def play_some() -> None:
            connection = await self._connected()
            for key in keys:
                agent = _ChatAgent(self, connection, key)
                for _ in range(asked.turns):
                    await agent.say(asked.max_tokens, talks=True)
            connection.close()

        async with asyncio.TaskGroup() as playing:
            for _ in range(asked.at_once):
                playing.create_task(play_some())

    async def turn(self, connection: _ChatConnection, request: bytes, *, talks: bool, probe: bool) -> _ChatAnswer:
        self._begun += 1
        answer = await connection.post(request, probe=probe)
        self._ended += 1
        self._told.turns.append(TurnHeard(answer.turn, talks, answer.first_s, answer.last_s))
        return answer


class _ChatAgent:
    """Plays a trajectory: its messages are a conversation, to which each answer is added."""

    def __init__(self, chatters: _Chatters, connection: _ChatConnection, key: str) -> None:
        self._chatters, self._connection, self._key = chatters, connection, key
        self._messages = [{"role": "system", "content": SYSTEM}]

    async def say(self, max_tokens: int, *, talks: bool, probe: bool = False) -> None:
        self._messages.append({"role": "user", "content": QUESTION})
        spoken = self._chatters.spoken
        body: dict[str, Any] = {**spoken.body(self._messages, max_tokens), "stream": True}
        if probe:
            body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
        request = _request(self._chatters.route, self._key, json.dumps(body).encode())
        answer = await self._chatters.turn(self._connection, request, talks=talks, probe=probe)
        if not (text := spoken.said(_events(b"".join(answer.parts)))):
            raise ServerFailed("the answer has no text, or did not end as it should")
        self._messages.append({"role": "assistant", "content": text})


def _request(path: str, key: str, body: bytes) -> bytes:
    head = (
        f"POST {path} HTTP/1.1\r\nhost: agents\r\nauthorization: Bearer {key}\r\naccept: */*\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def _length(head: bytes) -> int:
    """That of the body; -1 where it comes in chunks."""
    at = head.find(b"content-length:")
    return -1 if at < 0 else int(head[at + 15 :].split(b"\r\n", 1)[0])


def _turn_of(data: bytes, identifier: bytes) -> str:
    """The turn whose first event this is; what others than a run call it tells nothing."""
    at = data.find(identifier)
    begin = at + len(identifier)
    return data[begin : data.find(b'"', begin)].decode().replace("-", "/") if at >= 0 else ""


def _number(data: bytes, at: int) -> int:
    end = at
    while data[end : end + 1].isdigit():
        end += 1
    return int(data[at:end])


def _events(chunked: bytes) -> list[bytes]:
    """The events of a stream; raises `ServerFailed` where the last one is not whole."""
    pieces: list[bytes] = []
    at = 0
    while True:
        end = chunked.index(b"\r\n", at)
        size = int(chunked[at:end], 16)
        if not size:
            break
        pieces.append(chunked[end + 2 : end + 2 + size])
        at = end + 2 + size + 2
    *events, rest = b"".join(pieces).split(b"\n\n")
    if rest:
        raise ServerFailed("the answer ends within an event")
    return events
