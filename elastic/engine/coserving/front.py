"""An OpenAI-compatible endpoint on the serving engine: completions and chat, streamed or whole, and the model list.

Prompts are text or token ids. Like vLLM's, a request may ask to `ignore_eos` and to have its token ids returned.
A request for what would make another answer than this server's is refused, never passed over; so is a field that
nobody here knows. Everything but `/health` asks for a key.
"""

import asyncio
import codecs
import json
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypeVar
from uuid import uuid4
from xml.sax.saxutils import escape

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import BaseRoute, Route

from elastic.core.types import FinishReason, SamplingParameters
from elastic.engine.base import GenerateRequest, TokenChunk
from elastic.protocol.http_server import BodyLimits, HostCheck

if TYPE_CHECKING:
    from elastic.engine.coserving.serving import SharedServingEngine

DEFAULT_MAX_TOKENS = 16
"""OpenAI's for completions."""
CODES = {
    401: "invalid_api_key",
    404: "not_found",
    405: "method_not_allowed",
    408: "request_timeout",
    413: "request_too_large",
    415: "unsupported_media_type",
    421: "misdirected_request",
    503: "overloaded",
}
"""`error.code` where there is no better one; to OpenAI's clients it is a string."""
BODY_BYTES = 256 * 1024
BODY_BYTES_PER_TOKEN = 32
"""A body may have `BODY_BYTES`, and so many for each token of the context: digits of an id, or a long word."""
REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}


Detokenizer = Callable[[Sequence[int]], str]
"""Tells the text that tokens add to that of the tokens before them."""


class Tokenizer(Protocol):
    def encode(self, text: str) -> list[int]: ...

    def decoder(self) -> Detokenizer: ...


class Utf8Tokenizer:
    """A token for each byte; for models without a vocabulary of their own, such as random ones."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decoder(self) -> Detokenizer:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        return lambda token_ids: decoder.decode(bytes(min(token, 255) for token in token_ids))


class NoTokenizer:
    """For models with unknown vocabularies: prompts and answers are token ids."""

    def encode(self, text: str) -> list[int]:
        raise FrontError(400, "this server has no tokenizer for its model: send token ids", "prompt")

    def decoder(self) -> Detokenizer:
        return lambda token_ids: ""


class ModelCard(BaseModel):
    """The model that the endpoint serves, and its limits."""

    model_config = ConfigDict(frozen=True)

    name: str
    vocab_size: int = Field(ge=1)
    max_context_tokens: int = Field(ge=2)
    eos_token_ids: tuple[int, ...] = ()
    max_waiting: int = Field(512, ge=1, description="requests in the house, above which more are sent away")


NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "top_p": (1,),
    "top_k": (-1, 0),
    "min_p": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "min_tokens": (0,),
    "stop": ([],),
    "stop_token_ids": ([],),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "priority": (0,),
    "echo": (False,),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none",),
    "response_format": ({"type": "text"},),
    "store": (False,),
    "continuous_usage_stats": (False,),
}
"""Fields of which any other value would make another answer than this server's, so that it is refused."""
HARMLESS = ("user", "metadata", "safety_identifier", "prompt_cache_key", "request_id", "include_obfuscation")
"""Fields that change no answer, whatever they say."""


def _telling(fields: Any) -> Any:
    """Drop what says nothing; for OpenAI's clients a null field is a missing field."""
    if not isinstance(fields, dict):
        return fields
    return {
        name: value
        for name, value in fields.items()
        if value is not None and name not in HARMLESS and value not in NEUTRAL.get(name, ())
    }


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid")

    _dropped = model_validator(mode="before")(_telling)


class StreamOptions(_Body):
    include_usage: bool = False


class _Common(_Body):
    model: str | None = None
    temperature: float = Field(1.0, ge=0, le=2, allow_inf_nan=False)
    seed: int | None = None
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    ignore_eos: bool = False
    return_token_ids: bool = False


class CompletionRequest(_Common):
    prompt: str | list[int]
    max_tokens: int = Field(DEFAULT_MAX_TOKENS, ge=1)


class TextPart(_Body):
    type: Literal["text"]
    text: str


class Message(_Body):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ChatRequest(_Common):
    messages: list[Message] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)


BodyT = TypeVar("BodyT", bound=BaseModel)


class FrontError(Exception):
    """A request that is not served: its HTTP status, and the field and the code that clients branch on."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code or CODES.get(status)

    def response(self) -> Response:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        error = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        headers = {503: {"Retry-After": "1"}, 401: {"WWW-Authenticate": "Bearer"}}.get(self.status)
        return JSONResponse({"error": error}, self.status, headers)


def openai_error(status: int, message: str) -> Response:
    """An answer in the shape that OpenAI's clients read."""
    return FrontError(status, message).response()


class ServingFront:
    """Carries requests from the event loop to the engine's thread, and chunks back. `sink` is the engine's.

    Who shows one of `keys` is served.
    """

    def __init__(self, card: ModelCard, keys: Sequence[str], tokenizer: Tokenizer | None = None) -> None:
        if not keys or not all(keys):
            raise ValueError("ServingFront: needs a key; without one any page in a browser could use it")
        self._card = card
        self._keys = [f"Bearer {key}".encode() for key in keys]
        self._tokenizer = tokenizer or Utf8Tokenizer()
        self._queues: dict[str, asyncio.Queue[TokenChunk]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._engine: SharedServingEngine | None = None

    def connect(self, engine: "SharedServingEngine", loop: asyncio.AbstractEventLoop) -> None:
        self._engine, self._loop = engine, loop

    def sink(self, chunks: Sequence[TokenChunk]) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._deliver, chunks)

    @property
    def body_bytes_max(self) -> int:
        """The largest request that can be meant for this model."""
        return BODY_BYTES + BODY_BYTES_PER_TOKEN * self._card.max_context_tokens

    def routes(self) -> list[BaseRoute]:
        """Return the routes, for an application whose errors are OpenAI's (`ERROR_HANDLERS`)."""
        return [
            Route("/v1/completions", self._completions, methods=["POST"]),
            Route("/v1/chat/completions", self._chat, methods=["POST"]),
            Route("/v1/models", self._models),
            Route("/health", self._health),
        ]

    def app(self, host_names: Sequence[str] = ()) -> Starlette:
        return Starlette(
            routes=self.routes(),
            middleware=[
                Middleware(HostCheck, host_names, openai_error),
                Middleware(BodyLimits, self.body_bytes_max),
            ],
            exception_handlers=ERROR_HANDLERS,
        )

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        """Yield chunks up to the last. A caller that stops early, or is cancelled, aborts the request."""
        engine = self._engine
        if engine is None:
            raise FrontError(503, "the engine is not running yet")
        if len(self._queues) >= self._card.max_waiting:
            raise FrontError(503, f"{len(self._queues)} requests are waiting already; try again later")
        queue = self._queues[request.request_id] = asyncio.Queue()
        ended = False
        try:
            try:
                engine.submit([request])
            except RuntimeError as error:
                raise FrontError(503, str(error)) from error
            while not ended:
                chunk = await queue.get()
                ended = chunk.finish is not None
                yield chunk
        finally:
            del self._queues[request.request_id]
            if not ended:
                engine.abort([request.request_id])

    def _deliver(self, chunks: Sequence[TokenChunk]) -> None:
        for chunk in chunks:
            if (queue := self._queues.get(chunk.request_id)) is not None:
                queue.put_nowait(chunk)

    async def _completions(self, request: Request) -> Response:
        body = await self._body(request, CompletionRequest)
        prompt = self._tokenizer.encode(body.prompt) if isinstance(body.prompt, str) else body.prompt
        return await self._answer(request, body, prompt, body.max_tokens, _COMPLETION)

    async def _chat(self, request: Request) -> Response:
        body = await self._body(request, ChatRequest)
        # No text may end its own message, or begin another's.
        text = "".join(f"<{message.role}>{escape(message.text)}</{message.role}>" for message in body.messages)
        prompt = self._tokenizer.encode(f"{text}<assistant>")
        most = body.max_completion_tokens or body.max_tokens
        room = self._card.max_context_tokens - len(prompt)
        return await self._answer(request, body, prompt, most or max(1, room), _CHAT)

    async def _models(self, request: Request) -> Response:
        self._check_key(request)
        card = {"id": self._card.name, "object": "model", "max_model_len": self._card.max_context_tokens}
        return JSONResponse({"object": "list", "data": [card]})

    async def _health(self, _: Request) -> Response:
        return Response(status_code=503 if self._engine is None or self._engine.closed else 200)

    def _check_key(self, request: Request) -> None:
        shown = request.headers.get("authorization", "").encode()
        if not any(secrets.compare_digest(shown, key) for key in self._keys):
            raise FrontError(401, "the key is missing or wrong; send it as Authorization: Bearer KEY")

    async def _body(self, request: Request, kind: type[BodyT]) -> BodyT:
        """The request, which shows a key before anything of it is read."""
        self._check_key(request)
        # A page in a browser can send other types anywhere without asking first.
        media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if media_type != "application/json":
            raise FrontError(415, f"the body is {media_type or 'of no type'}; allowed: application/json")
        try:
            return kind.model_validate_json(await request.body())
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            param = ".".join(map(str, first["loc"])) or None
            said = first["msg"]
            if first["type"] == "extra_forbidden":
                neutral = NEUTRAL.get(str(first["loc"][-1]), ())
                said = "not supported by this server" + (f", but as {neutral[-1]!r}" if neutral else "")
            raise FrontError(400, f"{param or 'body'}: {said}", param) from None

    async def _answer(
        self, request: Request, body: _Common, prompt: list[int], max_tokens: int, form: "_AnswerFormat"
    ) -> Response:
        self._check(body, prompt, max_tokens)
        wanted = GenerateRequest(
            request_id=f"{form.prefix}-{uuid4().hex}",
            token_ids=prompt,
            start=0,
            sampling=SamplingParameters(
                max_new_tokens=max_tokens,
                stop_token_ids=() if body.ignore_eos else self._card.eos_token_ids,
                temperature=body.temperature,
                noise_seed=secrets.randbits(64) if body.seed is None else body.seed % 2**64,
            ),
        )
        answer = _Answer(wanted, self._card.name, body, form, self._tokenizer.decoder())
        if body.stream:
            # The first chunk decides on the status: nothing has been sent by then.
            chunks = self.generate(wanted)
            first = await _unless_disconnected(request, anext(chunks))
            if first.finish is not None and first.finish not in REASONS:
                raise _failure(first)
            return StreamingResponse(answer.events(first, chunks), media_type="text/event-stream")
        return JSONResponse(await _unless_disconnected(request, answer.whole(self.generate(wanted))))

    def _check(self, body: _Common, prompt: list[int], max_tokens: int) -> None:
        card = self._card
        if body.model is not None and body.model != card.name:
            raise FrontError(404, f"no model {body.model!r}; there is {card.name!r}", "model", "model_not_found")
        if not prompt:
            raise FrontError(400, "the prompt is empty", "prompt")
        foreign = next((token for token in prompt if not 0 <= token < card.vocab_size), None)
        if foreign is not None:
            raise FrontError(400, f"token id {foreign} is not in the vocabulary (0 to {card.vocab_size - 1})", "prompt")
        if len(prompt) + max_tokens > card.max_context_tokens:
            raise FrontError(
                400,
                f"This model's maximum context length is {card.max_context_tokens} tokens. However, {len(prompt)} of "
                f"prompt and {max_tokens} of output were asked for.",
                "max_tokens",
                "context_length_exceeded",
            )


class _AnswerFormat(NamedTuple):
    """The names in an answer: of its id, of a whole answer and of a piece of one."""

    prefix: str
    whole: str
    piece: str

    def choice(self, text: str, streaming: bool) -> dict[str, Any]:
        if self is _COMPLETION:
            return {"text": text}
        return {"delta" if streaming else "message": {"role": "assistant", "content": text}}


_COMPLETION = _AnswerFormat("cmpl", "text_completion", "text_completion")
_CHAT = _AnswerFormat("chatcmpl", "chat.completion", "chat.completion.chunk")


class _Answer:
    """One request's chunks in the shape that its client knows."""

    def __init__(
        self, request: GenerateRequest, model: str, body: _Common, form: _AnswerFormat, decoder: Detokenizer
    ) -> None:
        self._request = request
        self._body = body
        self._form = form
        self._decode = decoder
        self._shell = {"id": request.request_id, "created": int(time.time()), "model": model}
        self._count = 0

    async def events(self, first: TokenChunk, rest: AsyncIterator[TokenChunk]) -> AsyncIterator[str]:
        """Server-sent events: one for each chunk, usage if asked for, and the end mark."""
        try:
            yield self._event(first)
            if first.finish is None:
                async for chunk in rest:
                    yield self._event(chunk)
            if self._body.stream_options.include_usage:
                yield _event({**self._shell, "object": self._form.piece, "choices": [], "usage": self._usage()})
            yield "data: [DONE]\n\n"
        finally:
            await rest.aclose()  # type: ignore[attr-defined]

    async def whole(self, chunks: AsyncIterator[TokenChunk]) -> dict[str, Any]:
        text, token_ids, last = "", [], None
        async for chunk in chunks:
            text += self._decode(chunk.token_ids)
            token_ids += chunk.token_ids
            last = chunk
        assert last is not None
        if last.finish is None or last.finish not in REASONS:
            raise _failure(last)
        self._count = len(token_ids)
        choice = {"index": 0, "finish_reason": REASONS[last.finish], **self._form.choice(text, False)}
        if self._body.return_token_ids:
            choice["token_ids"] = token_ids
        return {**self._shell, "object": self._form.whole, "choices": [choice], "usage": self._usage()}

    def _event(self, chunk: TokenChunk) -> str:
        self._count += len(chunk.token_ids)
        reason = None if chunk.finish is None else REASONS.get(chunk.finish, "abort")
        text = self._decode(chunk.token_ids)
        choice = {"index": 0, "finish_reason": reason, **self._form.choice(text, True)}
        if self._body.return_token_ids:
            choice["token_ids"] = chunk.token_ids
        return _event({**self._shell, "object": self._form.piece, "choices": [choice]})

    def _usage(self) -> dict[str, int]:
        prompt = len(self._request.token_ids)
        return {"prompt_tokens": prompt, "completion_tokens": self._count, "total_tokens": prompt + self._count}


def _failure(last: TokenChunk) -> FrontError:
    """A request that was fit to be served, but was not."""
    aborted = last.finish is FinishReason.ABORTED
    return FrontError(503 if aborted else 500, last.detail or "the request was aborted")


def _event(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data, separators=(',', ':'))}\n\n"


async def _unless_disconnected(request: Request, answer: Any) -> Any:
    """The answer; its work is cancelled when the client goes away."""

    async def disconnected() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    async with asyncio.TaskGroup() as tasks:
        working = tasks.create_task(_settled(answer))
        watching = tasks.create_task(disconnected())
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        watching.cancel()
        working.cancel()
    result = working.result() if not working.cancelled() else FrontError(499, "the client went away")
    if isinstance(result, FrontError):
        raise result
    return result


async def _settled(answer: Any) -> Any:
    try:
        return await answer
    except FrontError as error:
        return error


async def _refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, FrontError)
    return error.response()


async def _not_routed(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return openai_error(error.status_code, error.detail)


ERROR_HANDLERS: Mapping[Any, Any] = {FrontError: _refused, HTTPException: _not_routed}
"""Error handlers that give errors the shape that OpenAI's clients read."""
