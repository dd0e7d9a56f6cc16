"""An OpenAI-compatible endpoint on the serving engine: completions and chat, streamed or whole, and the model list.

Prompts are text or token ids. Like vLLM's, a request may ask to `ignore_eos` and to have its token ids returned.
A request for what would make another answer than this server's is refused, never passed over; so is a field that
nobody here knows. Everything but `/health` asks for a key.
"""

import asyncio
import codecs
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar
from uuid import uuid4
from xml.sax.saxutils import escape

from pydantic import BaseModel, ConfigDict, Field
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import BaseRoute, Route

from elastic.core.types import FinishReason, SamplingParameters
from elastic.engine.base import GenerateRequest, TokenChunk
from elastic.protocol.http_server import BodyLimits, HostCheck
from elastic.protocol.openai import answers, bodies
from elastic.protocol.openai.answers import Answered, AnswerSettings, ChoiceEnd, ChunkWriter, ParsedAnswer, Sample
from elastic.protocol.openai.bodies import AnswerFields, ChatRequest, CompletionRequest
from elastic.protocol.openai.errors import ERROR_HANDLERS, JSON_TYPE, FrontError, no_such_model, openai_error, too_long

if TYPE_CHECKING:
    from elastic.engine.coserving.serving import SharedServingEngine

DEFAULT_MAX_TOKENS = 16
"""OpenAI's for completions."""
BODY_BYTES = 256 * 1024
BODY_BYTES_PER_TOKEN = 32
"""A body may have `BODY_BYTES`, and so many for each token of the context: digits of an id, or a long word."""
REASONS = {FinishReason.STOP: ChoiceEnd("stop"), FinishReason.LENGTH: ChoiceEnd("length")}
ABORTED = ChoiceEnd("abort")
TURNS = ("system", "developer", "user", "assistant")
_COMMON = ("model", "temperature", "seed", "stream", "stream_options", "ignore_eos", "return_token_ids", "max_tokens")
COMPLETION = bodies.strict(*_COMMON, "prompt")
CHAT = bodies.strict(*_COMMON, "messages", "max_completion_tokens")


Detokenizer = Callable[[Sequence[int]], str]
"""Tells the text that tokens add to that of the tokens before them."""


class PromptTokenizer(Protocol):
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


RequestT = TypeVar("RequestT", ChatRequest, CompletionRequest)


class ServingFront:
    """Carries requests from the event loop to the engine's thread, and chunks back. `sink` is the engine's.

    Who shows one of `keys` is served.
    """

    def __init__(self, card: ModelCard, keys: Sequence[str], tokenizer: PromptTokenizer | None = None) -> None:
        if not keys or not all(keys):
            raise ValueError("ServingFront: needs a key; without one any page in a browser could use it")
        self._card = card
        self._keys = [f"Bearer {key}".encode() for key in keys]
        self._tokenizer = tokenizer or Utf8Tokenizer()
        self._queues: dict[str, asyncio.Queue[TokenChunk]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._engine: SharedServingEngine | None = None
        self._started_s = int(time.time())

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
        body = await self._body(request, CompletionRequest, COMPLETION)
        prompts = body.prompts()
        if len(prompts) != 1:
            raise FrontError(400, "prompt: one is served at a time", "prompt")
        prompt = self._tokenizer.encode(prompts[0]) if isinstance(prompts[0], str) else prompts[0]
        return await self._answer(request, body, prompt, body.max_tokens or DEFAULT_MAX_TOKENS, answers.COMPLETION)

    async def _chat(self, request: Request) -> Response:
        body = await self._body(request, ChatRequest, CHAT)
        for number, message in enumerate(body.messages):
            if message.role not in TURNS or message.tool_calls or message.function_call:
                said = f"messages.{number}.role: calls of tools are not served; allowed: {', '.join(TURNS)}"
                raise FrontError(400, said, f"messages.{number}.role")
        # No text may end its own message, or begin another's.
        text = "".join(f"<{message.role}>{escape(message.text)}</{message.role}>" for message in body.messages)
        prompt = self._tokenizer.encode(f"{text}<assistant>")
        room = self._card.max_context_tokens - len(prompt)
        return await self._answer(request, body, prompt, body.most_tokens or max(1, room), answers.CHAT)

    async def _models(self, request: Request) -> Response:
        self._check_key(request)
        listed = answers.models([self._card.name], self._card.max_context_tokens, self._started_s)
        return Response(listed, media_type=JSON_TYPE)

    async def _health(self, _: Request) -> Response:
        return Response(status_code=503 if self._engine is None or self._engine.closed else 200)

    def _check_key(self, request: Request) -> None:
        shown = request.headers.get("authorization", "").encode()
        if not any(secrets.compare_digest(shown, key) for key in self._keys):
            raise FrontError(401, "the key is missing or wrong; send it as Authorization: Bearer KEY")

    async def _body(self, request: Request, kind: type[RequestT], terms: bodies.Terms) -> RequestT:
        """The request, which shows a key before anything of it is read."""
        self._check_key(request)
        # A page in a browser can send other types anywhere without asking first.
        media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if media_type != JSON_TYPE:
            raise FrontError(415, f"the body is {media_type or 'of no type'}; allowed: {JSON_TYPE}")
        return bodies.read(kind, bodies.parsed(await request.body()), terms)

    async def _answer(
        self, request: Request, body: AnswerFields, prompt: list[int], max_tokens: int, form: answers.Format
    ) -> Response:
        self._check(body, prompt, max_tokens)
        identifier = uuid4().hex
        wanted = GenerateRequest(
            request_id=f"{form.prefix}{identifier}",
            token_ids=prompt,
            start=0,
            sampling=SamplingParameters(
                max_new_tokens=max_tokens,
                stop_token_ids=() if body.ignore_eos else self._card.eos_token_ids,
                temperature=1.0 if body.temperature is None else body.temperature,
                noise_seed=secrets.randbits(64) if body.seed is None else body.seed % 2**64,
            ),
        )
        settings = AnswerSettings(token_ids=body.return_token_ids, usage=body.include_usage)
        writer = ChunkWriter(form, identifier, self._card.name, int(time.time()), settings)
        answer = _Answer(len(prompt), writer, self._tokenizer.decoder())
        if body.stream:
            # The first chunk decides on the status: nothing has been sent by then.
            chunks = self.generate(wanted)
            first = await _unless_disconnected(request, anext(chunks))
            if first.finish is not None and first.finish not in REASONS:
                raise _failure(first)
            return StreamingResponse(answer.events(first, chunks), media_type=answers.EVENT_STREAM)
        whole = await _unless_disconnected(request, answer.whole(self.generate(wanted)))
        return Response(whole, media_type=JSON_TYPE)

    def _check(self, body: AnswerFields, prompt: list[int], max_tokens: int) -> None:
        card = self._card
        if body.model is not None and body.model != card.name:
            raise no_such_model(body.model, card.name)
        if not prompt:
            raise FrontError(400, "the prompt is empty", "prompt")
        foreign = next((token for token in prompt if not 0 <= token < card.vocab_size), None)
        if foreign is not None:
            raise FrontError(400, f"token id {foreign} is not in the vocabulary (0 to {card.vocab_size - 1})", "prompt")
        if len(prompt) + max_tokens > card.max_context_tokens:
            raise too_long(card.max_context_tokens, len(prompt), max_tokens)


class _Answer:
    """One request's chunks in the shape that its client knows."""

    def __init__(self, prompt_tokens: int, writer: ChunkWriter, decoder: Detokenizer) -> None:
        self._prompt_tokens = prompt_tokens
        self._writer = writer
        self._decode = decoder
        self._count = 0

    async def events(self, first: TokenChunk, rest: AsyncIterator[TokenChunk]) -> AsyncIterator[bytes]:
        """Server-sent events: one for each chunk, usage if asked for, and the end mark."""
        try:
            yield self._event(first)
            if first.finish is None:
                async for chunk in rest:
                    yield self._event(chunk)
            yield self._writer.end((), self._prompt_tokens, self._count)
        finally:
            await rest.aclose()  # type: ignore[attr-defined]

    async def whole(self, chunks: AsyncIterator[TokenChunk]) -> bytes:
        text, token_ids, last = "", [], None
        async for chunk in chunks:
            text += self._decode(chunk.token_ids)
            token_ids += chunk.token_ids
            last = chunk
        assert last is not None
        if last.finish is None or last.finish not in REASONS:
            raise _failure(last)
        choice = Answered(ParsedAnswer(text), Sample(token_ids), REASONS[last.finish])
        return self._writer.whole([choice], self._prompt_tokens, len(token_ids))

    def _event(self, chunk: TokenChunk) -> bytes:
        self._count += len(chunk.token_ids)
        ending = None if chunk.finish is None else REASONS.get(chunk.finish, ABORTED)
        return self._writer.piece(0, self._decode(chunk.token_ids), Sample(chunk.token_ids), ending)


def _failure(last: TokenChunk) -> FrontError:
    """A request that was fit to be served, but was not."""
    aborted = last.finish is FinishReason.ABORTED
    return FrontError(503 if aborted else 500, last.detail or "the request was aborted")


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
