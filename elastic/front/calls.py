"""The life of one call: its turns are joined or opened, their tokens become an answer, and the run hears how it ended.

- A call that has no token within `CallTimes.hold_s`, or whose run is gone for that long, ends with 503 and a time to
  come back.
- What a client is given whole is durable: the end of each choice waits for `TurnSettled`.
- Where the run is started again the call looks for its turns once more. A stream goes on if the tokens that come again
  are those that it has shown; else it is cut.
- A stream that fails ends with an error event or is cut, and never cleanly without a `finish_reason`.
- A client that leaves is told to the run at once.
"""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import asynccontextmanager
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec
from starlette.types import Receive, Scope, Send

from elastic.core.ids import agent_id
from elastic.front.asked import Asked, Chat, ServedModel
from elastic.front.choices import Choice, TokensDiffer
from elastic.front.history import packed, unpacked
from elastic.front.link import (
    Answer,
    ChoiceOver,
    LinkLost,
    News,
    RunLink,
    TokensCame,
    TurnInbox,
)
from elastic.front.prompts import ChatPrompts, TurnPrompt
from elastic.front.rendering.messages import chained
from elastic.protocol.front_messages import (
    ALL_IDS,
    CHOICES_MAX,
    AgentCaller,
    BranchFound,
    CutTurn,
    Declined,
    HistoryFound,
    LookUp,
    OpenedTurn,
    OpenTurns,
    RecallHistory,
    SettleTurn,
    TurnOver,
    TurnsTaken,
)
from elastic.protocol.http_server import CONNECTION, ServedConnection
from elastic.protocol.openai import answers
from elastic.protocol.openai.answers import Answered, AnswerHead, AnswerWriter, ChoiceEnd, ParsedAnswer, Sample
from elastic.protocol.openai.errors import JSON_TYPE, FrontError, too_long
from elastic.protocol.sampled import ids_of, logprobs_of, pack_ids

NO_SAMPLE = Sample()
LOOKS_MAX = 3
"""How often a call looks for its branch, which other calls may change meanwhile."""
NO_HEADERS: Mapping[str, str] = MappingProxyType({})
BRANCH_GONE = "branch_gone"


class CallTimes(NamedTuple):
    """How long a call waits for its first token, and for the run; when a whole answer that takes long is begun with a
    space, so that its client does not give up; and what is between such spaces, or the pings of a quiet stream."""

    hold_s: float = 60.0
    quiet_s: float = 60.0
    breath_s: float = 20.0


class ClientLeft(Exception):
    """Nobody waits for the answer any more."""


class ClientReply:
    """What goes to the client."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, headers: Mapping[str, str] = NO_HEADERS) -> None:
        self._headers = headers
        self._connection: ServedConnection = scope["extensions"][CONNECTION]
        self._receive = receive
        self._send = send
        self._wrote_s = -math.inf
        self.started = False
        self._done = False

    async def start(self, content_type: str, headers: Mapping[str, str] = NO_HEADERS, status: int = 200) -> None:
        self.started = True
        named = {"content-type": content_type, **self._headers, **headers}
        raw = [(name.encode(), value.encode()) for name, value in named.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": raw})

    async def write(self, data: bytes) -> None:
        self._wrote_s = asyncio.get_running_loop().time()
        if self._connection.chunked:
            await self._connection.write_chunk(data)
        else:
            await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self, data: bytes) -> None:
        """Write the last of it. Raises `ClientLeft` if nobody is there to take it."""
        if self.gone:
            raise ClientLeft
        self._done = True
        await self._send({"type": "http.response.body", "body": data})

    @property
    def gone(self) -> bool:
        """Whether the client's connection has ended."""
        return self._connection.gone

    async def tear(self) -> None:
        """Cut the connection, so that nobody takes what was sent for a whole answer."""
        self._done = True
        self._connection.cut()
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def breathe(self, first_s: float, every_s: float, breath: bytes, content_type: str = "") -> None:
        """Write a `breath` whenever nothing was written for `every_s`, the first time after `first_s`, for ever.

        An answer that was not begun by then is begun if its `content_type` is given.
        """
        await asyncio.sleep(first_s)
        while True:
            quiet_s = asyncio.get_running_loop().time() - self._wrote_s
            if quiet_s < every_s:
                await asyncio.sleep(every_s - quiet_s)
                continue
            if not self.started and not content_type:
                await asyncio.sleep(every_s)
                continue
            if not self.started:
                await self.start(content_type)
            await self.write(breath)

    @asynccontextmanager
    async def attended(self) -> AsyncIterator[None]:
        """Raises `ClientLeft` within once the client is gone."""
        try:
            async with asyncio.timeout(None) as presence:
                watching = asyncio.create_task(self._watch(presence), name="client")
                try:
                    yield
                finally:
                    watching.cancel()
        except TimeoutError:
            raise ClientLeft from None

    async def _watch(self, presence: asyncio.Timeout) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        if not self._done:
            presence.reschedule(asyncio.get_running_loop().time())


class _Progress:
    """One choice on its way to the client."""

    def __init__(self, turn: OpenedTurn, new_choice: Callable[[OpenedTurn], Choice], stop_ids: frozenset[int]) -> None:
        self.turn = turn
        self._stop_ids = stop_ids
        self.choice = new_choice(turn)
        self._new_choice = new_choice
        self.shown = False
        """Whether anything of it was sent."""
        self.sent = 0
        """The tokens that were sent."""
        self.cut = False
        self.settled = False
        self.finish = ""
        self.said = ParsedAnswer()
        self.ended = False
        """Whether its end was sent."""

    def join(self, turn: OpenedTurn) -> None:
        self.turn = turn
        self.cut = self.settled = False
        self.choice.join()

    def begin_again(self) -> None:
        """Other tokens have come than before. Raises `TokensDiffer` if the client has seen some of those."""
        if self.shown:
            raise TokensDiffer
        same, self.choice = self.choice.again(), self._new_choice(self.turn)
        self.choice.take(*same)

    def end(self) -> ChoiceEnd:
        stop = self.choice.stop
        if stop is not None:
            return ChoiceEnd("stop", stop)
        if self.finish == "length":
            return ChoiceEnd("length")
        last = self.choice.ids[-1] if self.choice.ids else -1
        return ChoiceEnd("tool_calls" if self.said.tool_calls else "stop", last if last in self._stop_ids else None)

    def fresh(self) -> Sample:
        """The tokens that were not sent yet, which count as sent now."""
        start, self.sent = self.sent, len(self.choice.ids)
        return Sample(self.choice.ids[start:], self.choice.logprobs[start:])


class LiveCall:
    """A call of an agent's, from its body to its last byte."""

    def __init__(
        self, link: RunLink, model: ServedModel, caller: AgentCaller, asked: Asked, times: CallTimes, renders: Executor
    ) -> None:
        self._link = link
        self._model = model
        self._caller = caller
        self._asked = asked
        self._times = times
        self._prompts = ChatPrompts(model, renders)
        self._call = self._retry = asked.call
        """As it is said to the run, and as it will be said to the run's next process."""
        self._inbox = TurnInbox()
        self._chain: list[bytes] = []
        self._known = 0
        """How many of the chat's messages are in a history that the run has."""
        self._prompt_ids: Sequence[int] | None = None
        """The token ids of a chat; where no reader wants all of them, the last ones."""
        self._progress: dict[int, _Progress] = {}
        self._prompt_tokens: dict[int, int] = {}
        """By the number of the prompt."""
        self._writer: AnswerWriter | None = None

    async def answer(self, reply: ClientReply) -> None:
        """Raises `FrontError` if nothing was sent by then, and `ClientLeft`."""
        breathing = asyncio.create_task(self._breathe(reply), name="breath")
        try:
            async with asyncio.timeout(self._times.hold_s) as holding:
                await self._live(reply, holding)
            breathing.cancel()
            await self._finish(reply)
            self._link.delivered(self._inbox)
        except TimeoutError:
            await self._fail(reply, FrontError(503, f"nothing came from the run for {self._times.hold_s:g} s"))
        except FrontError as error:
            await self._fail(reply, error)
        except TokensDiffer:
            await reply.tear()
        finally:
            breathing.cancel()
            self._link.leave(self._inbox)
            # They refer to this call: the answers of all calls would be kept until the next full garbage collection.
            self._progress.clear()

    async def _live(self, reply: ClientReply, holding: asyncio.Timeout) -> None:
        """Up to the end of the last choice; what is streamed is sent. `holding` runs while nothing comes."""
        while True:
            try:
                await self._link.stands()
                await self._take_turns()
                while not all(progress.settled for progress in self._progress.values()):
                    news = await self._inbox.take()
                    if holding.when() is not None:
                        holding.reschedule(None)
                    if pieces := b"".join(self._pieces(news)):
                        if not reply.started:
                            await reply.start(answers.EVENT_STREAM, answers.STREAM_HEADERS)
                        await reply.write(pieces)
                return
            except LinkLost:
                if self._caller.viewer and self._progress:
                    said = "the run's process has ended, and with it this chat, which is not kept: ask again"
                    raise FrontError(503, said, code="chat_lost") from None
                holding.reschedule(asyncio.get_running_loop().time() + self._times.hold_s)
                self._inbox, self._call = TurnInbox(), self._retry

    async def _breathe(self, reply: ClientReply) -> None:
        times = self._times
        if self._asked.stream:
            await reply.breathe(times.breath_s, times.breath_s, self._asked.dialect.ping)
        else:
            await reply.breathe(times.quiet_s, times.breath_s, b" ", JSON_TYPE)

    async def _finish(self, reply: ClientReply) -> None:
        choices = [self._answered(number, progress) for number, progress in sorted(self._progress.items())]
        prompt_tokens = sum(self._prompt_tokens.values())
        tokens = sum(len(choice.sample.ids) for choice in choices)
        if self._asked.stream:
            await reply.end(self._writing().end(choices, prompt_tokens, tokens))
            return
        whole = self._writing().whole(choices, prompt_tokens, tokens)
        if not reply.started:
            await reply.start(JSON_TYPE)
        await reply.end(whole)

    def _answered(self, number: int, progress: _Progress) -> Answered:
        choice = progress.choice
        return Answered(progress.said, Sample(choice.ids, choice.logprobs), progress.end(), self._prompt_shown(number))

    async def _fail(self, reply: ClientReply, error: FrontError) -> None:
        if not reply.started:
            raise error
        if self._asked.stream:
            await reply.end(self._writing().failed(error))
        else:
            await reply.tear()

    # Turns.

    async def _take_turns(self) -> None:
        """Join the call's turns, and open those that there are not."""
        asked, chat = self._asked, self._asked.chat
        ids_before = None
        if chat is not None:
            ids_before = ALL_IDS if asked.settings.token_ids else self._model.renderer.ids_before
            if not self._chain:
                chat = await self._recall(chat)
                self._chain = await self._prompts.chain(chat)
        for left in reversed(range(LOOKS_MAX)):
            found = await self._ask(lambda number: LookUp(number, self._caller, self._call, self._chain, ids_before))
            if isinstance(found, TurnsTaken):
                self._take(found)
                found = BranchFound(0, "")
            assert isinstance(found, BranchFound)
            self._known = found.known
            try:
                await self._open_missing(found)
                return
            except FrontError as error:
                # Another call has changed what this one was to go on from.
                if error.code != BRANCH_GONE or not left:
                    raise

    async def _recall(self, chat: Chat) -> Chat:
        """The chat with what was said before, where it names an earlier answer instead."""
        thread = self._asked.thread
        if thread is None or not thread.behind:
            return chat
        found = await self._ask(lambda number: RecallHistory(number, self._caller, thread.behind))
        assert isinstance(found, HistoryFound)
        before = unpacked(found.pieces)
        chat = chat._replace(messages=[*chat.messages[: thread.own], *before, *chat.messages[thread.own :]])
        self._asked = self._asked._replace(chat=chat)
        return chat

    async def _open_missing(self, found: BranchFound) -> None:
        asked, chat = self._asked, self._asked.chat
        if chat is not None:
            if self._missing(0):
                prompt = await self._prompts.behind(chat, found)
                self._prompt_ids = prompt.ids
                await self._open(0, prompt)
            return
        for number, ids in enumerate(asked.prompts):
            if self._missing(number):
                await self._open(number, TurnPrompt(None, 0, ids, ids))

    def _missing(self, prompt: int) -> list[int]:
        """The choices of a prompt that nothing is heard of."""
        return [choice for choice in self._choices_of(prompt) if choice not in self._inbox.streams]

    def _choices_of(self, prompt: int) -> range:
        n = self._asked.n
        return range(prompt * n, (prompt + 1) * n)

    async def _open(self, number: int, prompt: TurnPrompt) -> None:
        if prompt.size >= self._model.context_tokens:
            raise too_long(self._model.context_tokens, prompt.size)
        ids = pack_ids(prompt.new)
        # From here on the run may have turns of this call, whether it can say so or not.
        self._retry = msgspec.structs.replace(self._call, retry=True)
        while missing := self._missing(number):
            first, count = _first_stretch(missing)
            answer = await self._ask(
                lambda request, first=first, count=count: OpenTurns(
                    request,
                    self._caller,
                    self._call,
                    prompt.branch,
                    prompt.tokens,
                    ids,
                    first,
                    count,
                    self._asked.sampling,
                )
            )
            assert isinstance(answer, TurnsTaken)
            self._take(answer)
            if first in self._missing(number):
                raise FrontError(500, f"the run has opened no turn for choice {first}")

    async def _ask(self, request: Callable[[int], LookUp | RecallHistory | OpenTurns]) -> Answer:
        answer = await self._link.ask(request, self._inbox)
        if isinstance(answer, Declined):
            raise declined(answer)
        return answer

    def _take(self, taken: TurnsTaken) -> None:
        self._retry = msgspec.structs.replace(self._call, retry=True)
        if taken.ids:
            self._prompt_ids = ids_of(taken.ids)
        for turn in taken.turns:
            if (progress := self._progress.get(turn.choice)) is not None:
                progress.join(turn)
            else:
                self._progress[turn.choice] = _Progress(turn, self._new_choice, self._asked.stop_ids)
            self._prompt_tokens[turn.choice // self._asked.n] = turn.prompt_tokens

    def _new_choice(self, turn: OpenedTurn) -> Choice:
        asked, model = self._asked, self._model
        chat = asked.chat
        reader = None
        if chat is not None and not model.renderer.plain(chat.calls_tools):
            tools = chat.tools if chat.calls_tools else None
            reader = model.renderer.reader(self._prompt_ids, tools, turn.turn)
        calls_max = 1 if chat is not None and chat.one_call else None
        return Choice(model.tokenizer.decoder(), reader, asked.stops, asked.silent, calls_max)

    # Tokens.

    def _pieces(self, news: Sequence[News]) -> list[bytes]:
        """What of a stream is to be sent now."""
        pieces: list[bytes] = []
        for one in news:
            number = one.choice
            progress = self._progress[number]
            if type(one) is TokensCame:
                logprobs = logprobs_of(one.logprobs) if self._asked.settings.logprobs else NO_SAMPLE.logprobs
                said, new = self._taken(progress, ids_of(one.ids), logprobs)
                if self._asked.stream and new and (self._asked.dialect.shows_tokens or not _empty(said)):
                    pieces.append(self._piece(number, progress, said))
            elif type(one) is ChoiceOver:
                if not one.over.finish:
                    raise _failed(one.over)
                self._settle(progress, one.over.finish)
            else:
                progress.settled = True
                if self._asked.stream and not progress.ended:
                    progress.ended = True
                    pieces.append(self._piece(number, progress, progress.choice.rest(), progress.end()))
        return pieces

    def _taken(self, progress: _Progress, ids: list[int], logprobs: Sequence[float]) -> tuple[ParsedAnswer | str, int]:
        """What tokens add to a choice, and how many of them are new."""
        try:
            said, new = progress.choice.take(ids, logprobs)
        except TokensDiffer:
            progress.begin_again()
            said, new = progress.choice.take(ids, logprobs)
        if progress.choice.stop is not None and not progress.cut:
            progress.cut = True
            self._link.send(CutTurn(progress.turn.stream, len(progress.choice.ids)))
        if logprobs and not all(map(math.isfinite, logprobs)):
            raise FrontError(500, "the turn has failed: a log-probability is no number", code="turn_failed")
        return said, new

    def _settle(self, progress: _Progress, finish: str) -> None:
        try:
            progress.choice.rest()
        except TokensDiffer:
            progress.begin_again()
            progress.choice.rest()
        progress.finish = finish
        progress.said = progress.choice.said
        settled = SettleTurn(progress.turn.stream, len(progress.choice.ids))
        if self._asked.chat is not None:
            message = progress.said.message()
            history, behind = self._history(self._asked.chat, message)
            answer = chained(self._chain[-1], message)
            settled = msgspec.structs.replace(settled, answer=answer, history=history, behind=behind)
        self._link.send(settled)

    def _history(self, chat: Chat, answer: Mapping[str, Any]) -> tuple[bytes, bytes]:
        """The part of the history that the run does not have, and the digest of the one behind which it is; empty if it
        is not to have it."""
        thread, known = self._asked.thread, self._known
        if thread is None or not thread.kept:
            return b"", b""
        return packed([*chat.messages[max(known, thread.own) :], answer]), self._chain[known - 1] if known else b""

    def _piece(self, number: int, progress: _Progress, said: str | ParsedAnswer, end: ChoiceEnd | None = None) -> bytes:
        first = not progress.shown
        progress.shown = True
        asked = self._asked
        return self._writing().piece(
            number,
            said,
            progress.fresh() if self._asked.dialect.shows_tokens else NO_SAMPLE,
            end,
            self._used(number) if asked.settings.usage_always else None,
            self._prompt_shown(number) if first else None,
        )

    def _used(self, number: int) -> tuple[int, int]:
        return self._prompt_tokens[number // self._asked.n], len(self._progress[number].choice.ids)

    def _prompt_shown(self, number: int) -> Sequence[int] | None:
        asked = self._asked
        if not asked.settings.token_ids:
            return None
        return self._prompt_ids if asked.chat is not None else asked.prompts[number // asked.n]

    def _writing(self) -> AnswerWriter:
        if self._writer is None:
            first = self._progress[min(self._progress)].turn
            name = self._asked.call.policy or self._model.name
            head = AnswerHead(agent_id(first.turn), name, int(time.time()), sum(self._prompt_tokens.values()))
            self._writer = self._asked.dialect.make_writer(head)
        return self._writer


def declined(answer: Declined) -> FrontError:
    return FrontError(
        answer.status,
        answer.message,
        answer.param or None,
        answer.code,
        retry=answer.retry,
        retry_after_s=answer.retry_after_s,
    )


def _failed(over: TurnOver) -> FrontError:
    return FrontError(
        over.status or 500,
        f"the turn has failed: {over.cause}",
        code=over.code or "turn_failed",
        retry=over.retry,
        retry_after_s=over.retry_after_s,
    )


def _empty(said: ParsedAnswer | str) -> bool:
    return not said if isinstance(said, str) else said.empty


def _first_stretch(numbers: Sequence[int]) -> tuple[int, int]:
    """The first of these, and how many follow it without a gap, as far as one message asks for."""
    first = numbers[0]
    count = 1
    while count < min(len(numbers), CHOICES_MAX) and numbers[count] == first + count:
        count += 1
    return first, count
