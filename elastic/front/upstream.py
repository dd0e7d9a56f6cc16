"""Calls of models that are elsewhere: passed on as they are, under the run's key, and metered.

- The run gives leave for each call before it is made, and hears afterwards what it came to.
- What goes there is the client's body, and of its headers those that say how to read it. No key of this run, and no
  key of an agent's, is among them.
- What comes back is the upstream's answer, byte for byte: a whole one once it is all there, a stream as it comes.
- What the upstream cannot be blamed on its client for is an error of ours (502 and 504); a stream that breaks is torn.
- Redirections are not followed: the key is for that host alone.
"""

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Mapping
from typing import Any, NamedTuple

import httpx
import msgspec
from starlette.datastructures import Headers

from elastic.front.calls import ClientReply, declined
from elastic.front.link import LinkLost, RunLink
from elastic.protocol.front_messages import (
    NAME_MAX,
    AgentCaller,
    AskUpstream,
    Declined,
    UpstreamAllowed,
    UpstreamOver,
)
from elastic.protocol.http_clients import far_client
from elastic.protocol.openai.answers import EVENT_STREAM, STREAM_HEADERS
from elastic.protocol.openai.bodies import INTEGER_MAX, encoded
from elastic.protocol.openai.errors import JSON_TYPE, FrontError
from elastic.system.host import here

CONNECT_S = 10.0
MIB = 1024 * 1024
SENT_ON = ("content-type", "accept", "user-agent", "anthropic-version", "anthropic-beta", "openai-beta")
"""Headers of a client's that the upstream gets."""
GIVEN_BACK = ("content-type", "retry-after", "retry-after-ms", "x-should-retry", "openai-model", "openai-version")
GIVEN_BACK_PREFIXES = ("x-ratelimit-", "anthropic-ratelimit-", "openai-processing-")
"""Headers of the upstream's that a client gets."""
REQUEST_ID, THEIR_REQUEST_ID = "x-request-id", "x-upstream-request-id"
USAGE_MAX_BYTES = 8 * MIB
"""A stream's event that is longer is not looked into for what the call came to."""
TOLD_CHARS = 300
"""The most characters of an upstream's error that a client is shown."""
ELSEWHERE = (
    *(b'"previous_response_id"', b'"conversation"', b'"pmpt_', b'"file_id"', b'_url"', b'"url"'),
    *(b'"image"', b'"input_image"', b'"input_audio"', b'"document"', b'"input_file"', b'"file"'),
)
"""In a body: its prompt may have more tokens than the body has bytes."""
OWN_TOOLS = (None, "function", "custom")
"""Types of tools that the client runs. What the upstream's own find, web pages for instance, joins the prompt."""
BESIDE_TOKENS = 1024
"""What an upstream adds to a prompt of its own, for tools for instance."""
CHOICES_MAX = 4096
TOKENS_MAX = 2**31 - 1
"""More tokens than an upstream can have had of one call are not believed."""
HIDDEN = "…".encode()
"""Stands for the run's key in what an upstream says."""
READABLE = ("", "identity", "gzip", "deflate")
"""Content encodings that can be read."""
MOST_TOKENS = ("max_completion_tokens", "max_output_tokens", "max_tokens")
EMBEDDINGS, COUNT_TOKENS = "/v1/embeddings", "/v1/messages/count_tokens"


class UpstreamSettings(NamedTuple):
    """`url` is without `/v1`; `key` is empty where none is needed."""

    url: str
    key: str
    timeout_s: float
    hold_s: float
    concurrency: int
    answer_bytes_max: int


class UpstreamCall(NamedTuple):
    """A client's call of `model`: its headers, and what `body` says in its fields."""

    route: str
    model: str
    headers: Headers
    fields: Mapping[str, Any]
    body: bytes = b""

    @property
    def session(self) -> str:
        named = self.fields.get("session_id")
        return named if isinstance(named, str) and len(named) <= NAME_MAX else ""


class UsedTokens(NamedTuple):
    """Tokens that an upstream has told; None where it has not."""

    prompt_tokens: int | None = None
    answer_tokens: int | None = None

    def then(self, later: "UsedTokens") -> "UsedTokens":
        """What both have told; the later one counts."""
        return UsedTokens(*(old if new is None else new for old, new in zip(self, later, strict=True)))


NOTHING = UsedTokens(0, 0)


class Upstream:
    """`link` leads to the run."""

    def __init__(self, settings: UpstreamSettings, link: RunLink) -> None:
        self._settings = settings
        self._link = link
        self._telling: set[asyncio.Task[None]] = set()
        self._client = far_client(
            settings.url,
            follow_redirects=False,
            timeout=httpx.Timeout(None, connect=CONNECT_S),
            limits=httpx.Limits(max_connections=settings.concurrency, keepalive_expiry=30.0),
        )

    async def aclose(self) -> None:
        """End. The run takes a call that it has not heard of for the dearest that it can have been."""
        for task in self._telling:
            task.cancel()
        await asyncio.gather(*self._telling, return_exceptions=True)
        await self._client.aclose()

    async def forward(self, caller: AgentCaller, call: UpstreamCall, reply: ClientReply) -> None:
        """Answer the call. Raises `FrontError` if nothing was sent by then, and `ClientLeft`."""
        number = await self._leave(caller, call)
        metered = _Metered()
        began_s = here().monotonic()
        try:
            async with asyncio.timeout(self._settings.timeout_s):
                await self._exchange(call, reply, metered)
        except TimeoutError:
            metered.status = 504
            await _fail(reply, FrontError(504, f"{_of(call)}: no answer for {self._settings.timeout_s:g} s", code=LATE))
        except _Broken as broken:
            metered.status = broken.error.status
            await _fail(reply, broken.error)
        finally:
            duration_s = here().monotonic() - began_s
            self._send(UpstreamOver(number, metered.status, *metered.usage, duration_s))

    # The run

    async def _leave(self, caller: AgentCaller, call: UpstreamCall) -> int:
        """The number under which the run knows of the call. Raises `FrontError` if it may not be made."""
        most = most_tokens(call.route, call.fields, call.body)
        try:
            async with asyncio.timeout(self._settings.hold_s):
                while True:
                    await self._link.stands()
                    with contextlib.suppress(LinkLost):
                        answer = await self._link.ask(
                            lambda number: AskUpstream(number, caller, call.route, call.model, *most)
                        )
                        break
        except TimeoutError:
            said = f"{_of(call)}: others of its calls took longer than {self._settings.hold_s:g} s to end"
            raise FrontError(429, said, code="upstream_busy") from None
        if isinstance(answer, Declined):
            raise declined(answer)
        assert isinstance(answer, UpstreamAllowed)
        return answer.call

    def _send(self, over: UpstreamOver) -> None:
        """Say what a call has come to, to the run's next process if there is none now."""
        if self._link.up:
            self._link.send(over)
            return

        async def tell() -> None:
            await self._link.stands()
            self._link.send(over)

        task = asyncio.create_task(tell(), name="upstream call")
        self._telling.add(task)
        task.add_done_callback(self._telling.discard)

    # The upstream

    async def _exchange(self, call: UpstreamCall, reply: ClientReply, metered: "_Metered") -> None:
        request = self._client.build_request(
            "POST", self._settings.url + call.route, headers=self._headers(call.headers), content=call.body
        )
        try:
            answer = await self._client.send(request, stream=True)
        except (httpx.ConnectError, httpx.ConnectTimeout, httpx.UnsupportedProtocol, ssl.SSLError) as error:
            metered.usage = NOTHING
            raise _Broken(502, f"{_of(call)}: not reached: {_cause(error)}", UNREACHABLE) from error
        except httpx.HTTPError as error:
            raise _Broken(502, f"{_of(call)}: no answer: {_cause(error)}", BROKEN) from error
        try:
            await self._answered(call, answer, reply, metered)
        except (httpx.HTTPError, httpx.StreamError) as error:
            raise _Broken(502, f"{_of(call)}: its answer broke off: {_cause(error)}", BROKEN) from error
        finally:
            await answer.aclose()

    async def _answered(
        self, call: UpstreamCall, answer: httpx.Response, reply: ClientReply, metered: "_Metered"
    ) -> None:
        headers = _given_back(answer.headers)
        kind = headers.pop("content-type", JSON_TYPE)
        if (encoding := answer.headers.get("content-encoding", "").lower()) not in READABLE:
            raise _Broken(502, f"{_of(call)}: its answer is encoded as {encoding!r:.100}, unasked", BROKEN)
        pieces = _bounded(answer.aiter_bytes(), self._settings.answer_bytes_max, call)
        if answer.status_code == 200 and kind.startswith(EVENT_STREAM):
            usage = StreamedUsage()
            await reply.start(kind, {**STREAM_HEADERS, **headers})
            async for piece in pieces:
                usage.feed(piece)
                await reply.write(piece)
            metered.status, metered.usage = 200, usage.told
            framed = "transfer-encoding" in answer.headers or "content-length" in answer.headers
            if not framed and not usage.ended:
                # Its connection's end is all that tells a whole stream from a part of one.
                raise _Broken(502, f"{_of(call)}: its answer broke off", BROKEN)
            await reply.end(b"")
            return
        body = b"".join([piece async for piece in pieces])
        if answer.status_code >= 300 and self._settings.key:
            body = body.replace(self._settings.key.encode(), HIDDEN)
        metered.status = answer.status_code
        # What was refused costs nothing.
        metered.usage = usage_of(body) if answer.status_code < 300 else NOTHING
        if (refused := self._refused(call, answer, body)) is not None:
            raise refused
        await reply.start(kind, headers, answer.status_code)
        await reply.end(body)

    def _refused(self, call: UpstreamCall, answer: httpx.Response, body: bytes) -> "_Broken | None":
        """What is no answer to the client, but something between the run and its upstream."""
        status = answer.status_code
        if status in (401, 403):
            return _Broken(502, f"{_of(call)}: it does not take the run's key ({status})", DENIED, retry=False)
        if 300 <= status < 400:
            return _Broken(502, f"{_of(call)}: it redirects elsewhere ({status})", REDIRECTED, retry=False)
        if status >= 500 or status < 200:
            said = body[: 4 * TOLD_CHARS].decode(errors="replace")
            return _Broken(502, f"{_of(call)}: it answered {status}: {' '.join(said.split())[:TOLD_CHARS]}", FAILED)
        return None

    def _headers(self, headers: Headers) -> dict[str, str]:
        shown = {name: headers[name] for name in SENT_ON if name in headers}
        sent = {"content-type": JSON_TYPE} | {name: value for name, value in shown.items() if value.isascii()}
        # What is compressed could not be metered.
        sent["accept-encoding"] = "identity"
        if key := self._settings.key:
            # As the client shows its own: those of Anthropic's API do it their way.
            by_header = "x-api-key" in headers and "authorization" not in headers
            sent |= {"x-api-key": key} if by_header else {"authorization": f"Bearer {key}"}
        return sent


CLIENT_LEFT = 499
UNREACHABLE, BROKEN, FAILED = "upstream_unreachable", "upstream_broken", "upstream_failed"
DENIED, REDIRECTED, LATE, TOO_LARGE = "upstream_denied", "upstream_redirects", "upstream_timeout", "upstream_too_large"


class _Broken(Exception):
    """The upstream has given no answer that could be passed on."""

    def __init__(self, status: int, said: str, code: str, *, retry: bool | None = None) -> None:
        super().__init__(said)
        self.error = FrontError(status, said, code=code, retry=retry)


class _Metered:
    """What a call comes to. This is what is said of one whose client leaves, or whose front ends."""

    def __init__(self) -> None:
        self.status = CLIENT_LEFT
        self.usage = UsedTokens()


async def _bounded(pieces: AsyncIterator[bytes], bytes_max: int, call: UpstreamCall) -> AsyncIterator[bytes]:
    size = 0
    async for piece in pieces:
        size += len(piece)
        if size > bytes_max:
            said = f"{_of(call)}: its answer has more than {bytes_max} bytes (front.upstream_answer_mb)"
            raise _Broken(502, said, TOO_LARGE, retry=False)
        yield piece


async def _fail(reply: ClientReply, error: FrontError) -> None:
    if not reply.started:
        raise error
    await reply.tear()


def _of(call: UpstreamCall) -> str:
    return f"model {call.model!r} of the upstream"


def _cause(error: Exception) -> str:
    return str(error) or type(error).__name__


def _given_back(headers: httpx.Headers) -> dict[str, str]:
    given = {
        name: value for name, value in headers.items() if name in GIVEN_BACK or name.startswith(GIVEN_BACK_PREFIXES)
    }
    if REQUEST_ID in headers:
        given[THEIR_REQUEST_ID] = headers[REQUEST_ID]
    return given


# What a call comes to


def most_tokens(route: str, fields: Mapping[str, Any], body: bytes) -> tuple[int | None, int | None, int]:
    """The most tokens that a body can lead to: of its prompt, of each choice of the answer, and how many choices.

    A token of the prompt takes a byte of the body at least, unless it stands elsewhere: at a URL, in an earlier answer,
    or where a tool of the upstream's finds it. None where the body bounds nothing.
    """
    if route == COUNT_TOKENS:
        return 0, 0, 1
    # Names of fields may be written in escapes.
    plain = encoded(fields) if b"\\u" in body else body
    unbounded = _finds_more(fields) or any(mark in plain for mark in ELSEWHERE)
    prompt = None if unbounded else len(body) + BESIDE_TOKENS
    if route == EMBEDDINGS:
        return prompt, 0, 1
    # Which of the fields counts is the upstream's to say, and what it makes of a number that is written otherwise.
    told = [most for name in MOST_TOKENS if (most := fields.get(name)) is not None]
    answer = max(told) if told and all(type(most) is int and 0 <= most <= INTEGER_MAX for most in told) else None
    wanted = [1, *(most for name in ("n", "best_of") if (most := fields.get(name)) is not None)]
    choices = min(max(wanted), CHOICES_MAX) if all(type(most) is int for most in wanted) else CHOICES_MAX
    prompts = fields.get("prompt")
    if isinstance(prompts, list) and prompts and isinstance(prompts[0], str | list):
        choices *= len(prompts)
    return prompt, answer, choices


def _finds_more(fields: Mapping[str, Any]) -> bool:
    """Whether the upstream may run tools of its own for the call."""
    if fields.get("web_search_options") is not None:
        return True
    tools = fields.get("tools")
    if not isinstance(tools, list):
        return tools is not None
    return not all(isinstance(tool, Mapping) and tool.get("type") in OWN_TOOLS for tool in tools)


def usage_of(body: bytes) -> UsedTokens:
    """What a whole answer tells of its tokens."""
    try:
        return _told(_usage_in(body))
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return UsedTokens()


class _ToldTokens(msgspec.Struct):
    """`usage` as OpenAI's chat, its Responses, and Anthropic's Messages have it."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    cache_creation_input_tokens: int | None = None
    cache_read_input_tokens: int | None = None

    @property
    def usage(self) -> UsedTokens:
        if self.input_tokens is None and self.output_tokens is None:
            answer = self.completion_tokens
            # Embeddings have no answer.
            return UsedTokens(self.prompt_tokens, 0 if answer is None and self.prompt_tokens is not None else answer)
        prompt = self.input_tokens
        if prompt is not None:
            prompt += (self.cache_creation_input_tokens or 0) + (self.cache_read_input_tokens or 0)
        return UsedTokens(prompt, self.output_tokens)


class _UsageWithin(msgspec.Struct):
    usage: _ToldTokens | None = None


class _MeteredAnswer(msgspec.Struct):
    """An answer or an event of a stream; that of Responses and Messages may have it within."""

    usage: _ToldTokens | None = None
    response: _UsageWithin | None = None
    message: _UsageWithin | None = None


_usage_in = msgspec.json.Decoder(_MeteredAnswer).decode


def _told(answer: _MeteredAnswer) -> UsedTokens:
    """All that an answer or an event tells."""
    usage = UsedTokens()
    for one in (answer.message, answer.response, answer):
        if one is not None and one.usage is not None:
            usage = usage.then(one.usage.usage)
    return usage if all(tokens is None or 0 <= tokens <= TOKENS_MAX for tokens in usage) else UsedTokens()


LAST_EVENTS = (
    *(b'"finish_reason":"', b'"finish_reason": "', b'"message_stop"', b'"error"'),
    *(b'"response.completed"', b'"response.incomplete"', b'"response.failed"'),
)
"""In an event: the answer is over with it, as OpenAI's chat, its Responses, and Anthropic's Messages say it."""


class StreamedUsage:
    """What the events of a stream tell of its tokens, of which the last that is said counts, and whether it `ended`."""

    def __init__(self) -> None:
        self.told = UsedTokens()
        self.ended = False
        self._line = bytearray()
        self._passed_over = False

    def feed(self, piece: bytes) -> None:
        *whole, rest = piece.split(b"\n")
        for part in whole:
            self._take(part)
            if not self._passed_over:
                self._read()
            self._line.clear()
            self._passed_over = False
        self._take(rest)

    def _take(self, part: bytes) -> None:
        if len(self._line) + len(part) > USAGE_MAX_BYTES:
            self._passed_over = True
            self._line.clear()
        if not self._passed_over:
            self._line += part

    def _read(self) -> None:
        line = self._line
        if not line.startswith(b"data:"):
            return
        if b'"usage"' in line:
            self.told = self.told.then(usage_of(bytes(line[5:])))
        self.ended = self.ended or line[5:].strip() == b"[DONE]" or any(event in line for event in LAST_EVENTS)
