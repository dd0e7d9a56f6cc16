"""Makes what a call asks for of its headers and its body, one reader a route.

Values from outside are checked here, against the model: names, token ids, tools. Raises `FrontError` throughout.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from functools import partial
from hashlib import blake2b
from typing import Any, TypeAlias, TypeVar

import msgspec
from starlette.datastructures import Headers
from starlette.requests import Request

from elastic.core.ids import turn_of
from elastic.front.asked import Asked, Chat, ChatThread, CountCall, ServedModel
from elastic.front.destinations import ToUpstream, destination
from elastic.front.rendering.messages import Tools
from elastic.front.upstream import COUNT_TOKENS, UpstreamCall
from elastic.protocol.anthropic.answers import PING, MessageWriter
from elastic.protocol.anthropic.bodies import MESSAGES, MessagesRequest
from elastic.protocol.front_messages import NAME_MAX, AgentCall, WantedSampling
from elastic.protocol.openai import answers, bodies, responses
from elastic.protocol.openai.answers import AnswerSettings, ChunkWriter, Dialect
from elastic.protocol.openai.bodies import AnswerFields, ChatRequest, CompletionRequest
from elastic.protocol.openai.errors import FrontError, too_long
from elastic.protocol.openai.response_answers import ResponseWriter, told_again
from elastic.protocol.openai.responses import ResponseRequest

IDEMPOTENCY_HEADERS = ("idempotency-key", "x-idempotency-key", "x-irid")
RETRY_HEADER = "x-stainless-retry-count"
RETRIES_DIGITS = 9
CHARS_PER_TOKEN_MAX = 256
"""No vocabulary has a longer token. Text of more characters than the context holds is refused before it is encoded."""
TURNS_MAX = 4096
"""Most choices of all prompts of one call."""
READ_HERE_BYTES = 256 * 1024
"""Larger bodies are read on a thread, while streams go on."""

T = TypeVar("T")
Reader: TypeAlias = Callable[[ServedModel, Headers, dict[str, Any]], T]


def read_chat(model: ServedModel, headers: Headers, fields: dict[str, Any]) -> Asked:
    body = bodies.read(ChatRequest, fields, bodies.CHAT)
    kwargs = dict(body.chat_template_kwargs)
    if body.reasoning_effort is not None:
        kwargs.setdefault("reasoning_effort", body.reasoning_effort)
    tools = fields["tools"] if body.tools else None
    chat = Chat(
        fields["messages"],
        tools,
        kwargs,
        calls_tools=_calls_tools(model, tools, body.tool_choice),
        one_call=not body.parallel_tool_calls,
    )
    _check_chat(model, chat)
    settings = _settings(model, body, logprobs=body.logprobs, as_token_ids=body.return_tokens_as_token_ids)
    dialect, ends = _chunks(answers.CHAT, settings), model.renderer.stop_token_ids
    return _asked(model, "/v1/chat/completions", headers, fields, body, ends, dialect, settings)._replace(chat=chat)


def read_completion(model: ServedModel, headers: Headers, fields: dict[str, Any]) -> Asked:
    body = bodies.read(CompletionRequest, fields, bodies.COMPLETION)
    settings = _settings(model, body, logprobs=body.logprobs is not None, as_token_ids=body.return_tokens_as_token_ids)
    dialect, ends = _chunks(answers.COMPLETION, settings), model.tokenizer.eos_token_ids
    asked = _asked(model, "/v1/completions", headers, fields, body, ends, dialect, settings)
    prompts = [encoded(model, prompt) if isinstance(prompt, str) else prompt for prompt in body.prompts()]
    return asked._replace(prompts=_checked(model, prompts, body.n, "prompt"))


def read_tokens(model: ServedModel, headers: Headers, fields: dict[str, Any]) -> Asked:
    body = bodies.read_tokens(fields)
    settings = _settings(model, body, logprobs=body.logprobs is not None)
    dialect, ends = _chunks(answers.TOKENS, settings, body.request_id or ""), model.tokenizer.eos_token_ids
    asked = _asked(model, "/inference/v1/generate", headers, fields, body, ends, dialect, settings)
    return asked._replace(prompts=_checked(model, [body.token_ids], body.n, "token_ids"))


def read_response(model: ServedModel, headers: Headers, fields: dict[str, Any]) -> Asked:
    body = bodies.read(ResponseRequest, responses.flattened(fields), responses.RESPONSE)
    said = body.messages()
    own = [] if body.instructions is None else [{"role": "system", "content": body.instructions}]
    kwargs = dict(body.chat_template_kwargs)
    if body.reasoning.effort is not None:
        kwargs.setdefault("reasoning_effort", body.reasoning.effort)
    if not said and not body.behind:
        raise bodies.invalid("input", "is missing")
    dialect = Dialect(partial(ResponseWriter, request=told_again(body, fields)))
    tools = body.chat_tools()
    chat = Chat(
        [*own, *said],
        tools,
        kwargs,
        calls_tools=_calls_tools(model, tools, body.tool_choice),
        one_call=not body.parallel_tool_calls,
    )
    thread = ChatThread(turn_of(body.behind), len(own), body.store)
    return _said(model, "/v1/responses", headers, fields, body, dialect, chat)._replace(thread=thread)


def read_messages(model: ServedModel, headers: Headers, fields: dict[str, Any]) -> Asked:
    body = bodies.read(MessagesRequest, fields, MESSAGES)
    tools = body.chat_tools()
    messages = body.chat_messages()
    if messages[-1]["role"] == "assistant":
        raise bodies.invalid("messages", "end with the assistant's; an answer that is begun is not gone on with")
    chat = Chat(
        messages,
        tools,
        body.template_kwargs(),
        calls_tools=_calls_tools(model, tools, body.tool_choice.type),
        one_call=body.tool_choice.disable_parallel_tool_use,
    )
    return _said(model, "/v1/messages", headers, fields, body, Dialect(MessageWriter, PING), chat)


READERS: Mapping[str, Reader[Asked]] = {
    "/v1/chat/completions": read_chat,
    "/v1/completions": read_completion,
    "/inference/v1/generate": read_tokens,
    "/v1/responses": read_response,
    "/v1/messages": read_messages,
}


def reader_of(route: str) -> Reader[Asked | CountCall | UpstreamCall]:
    """What reads calls of a route: those of the run's model, under the policy that they name, and of others."""

    def read(model: ServedModel, headers: Headers, fields: dict[str, Any]) -> Asked | CountCall | UpstreamCall:
        going = destination(model.names, route, fields.get("model"))
        if isinstance(going, ToUpstream):
            return UpstreamCall(route, going.model, headers, fields)
        if route == COUNT_TOKENS:
            return CountCall(read_messages(model, headers, fields))
        if route not in READERS:
            raise FrontError(404, f"model {model.name!r} makes no answers by {route}", code="not_found")
        asked = READERS[route](model, headers, fields)
        return asked._replace(call=msgspec.structs.replace(asked.call, policy=going.policy))

    return read


async def read_body(read: Reader[T], model: ServedModel, request: Request, threads: Executor) -> T:
    """What a reader makes of a request; of a large one on a thread, while streams go on."""
    body = await request.body()
    if len(body) <= READ_HERE_BYTES:
        return read(model, request.headers, bodies.parsed(body))
    reading = partial(_parse_and_read, read, model, request.headers, body)
    return await asyncio.get_running_loop().run_in_executor(threads, reading)


def _parse_and_read(read: Reader[T], model: ServedModel, headers: Headers, body: bytes) -> T:
    return read(model, headers, bodies.parsed(body))


def idempotency_key(headers: Headers) -> str:
    """The key by which a client says that a request is one that it has made before; empty if it has none."""
    key = next((found for name in IDEMPOTENCY_HEADERS if (found := headers.get(name))), "")
    return bounded_key(key)


def bounded_key(key: str) -> str:
    """A key that the run takes, however long the one is that it stands for."""
    return key if len(key) <= NAME_MAX else blake2b(key.encode(), digest_size=16).hexdigest()


def _chunks(form: answers.Format, settings: AnswerSettings, identifier: str = "") -> Dialect:
    """The dialect of OpenAI's chats and completions, and of vLLM's generate."""
    return Dialect(
        lambda head: ChunkWriter(form, identifier or head.identifier, head.model, head.created_s, settings),
        shows_tokens=settings.token_ids or settings.logprobs or form is answers.TOKENS,
    )


def _asked(
    model: ServedModel,
    route: str,
    headers: Headers,
    fields: Mapping[str, Any],
    body: AnswerFields,
    stop_token_ids: Sequence[int],
    dialect: Dialect,
    settings: AnswerSettings,
) -> Asked:
    check_model(model, body.model)
    check_ids(model, body.stop_token_ids, "stop_token_ids")
    ends = () if body.ignore_eos else tuple(stop_token_ids)
    ends = tuple(dict.fromkeys((*ends, *body.stop_token_ids)))
    retries = headers.get(RETRY_HEADER, "0")[:RETRIES_DIGITS]
    return Asked(
        AgentCall(
            route, bodies.digest(fields), idempotency_key(headers), retry=retries.isdecimal() and int(retries) > 0
        ),
        dialect,
        body.n,
        WantedSampling(
            max_tokens=body.most_tokens,
            temperature=body.temperature,
            top_p=body.top_p,
            top_k=body.top_k,
            seed=body.seed,
            stop_token_ids=ends,
            ignore_eos=body.ignore_eos,
        ),
        body.stops,
        frozenset(ends),
        frozenset(body.stop_token_ids),
        settings,
        body.stream,
        body.session_id or "",
    )


def _said(
    model: ServedModel,
    route: str,
    headers: Headers,
    fields: Mapping[str, Any],
    body: AnswerFields,
    dialect: Dialect,
    chat: Chat,
) -> Asked:
    """What is asked by a chat whose answer is what it says, without its tokens."""
    _check_chat(model, chat)
    ends = model.renderer.stop_token_ids
    return _asked(model, route, headers, fields, body, ends, dialect, AnswerSettings())._replace(chat=chat)


def _calls_tools(model: ServedModel, tools: Tools | None, choice: str) -> bool:
    """Whether calls of tools are looked for in answers."""
    calls_tools = tools is not None and choice != "none"
    if calls_tools and model.renderer.unread:
        said = f"tools: {model.renderer.unread}; or send tool_choice 'none'"
        raise FrontError(400, said, "tools", "unsupported_parameter")
    return calls_tools


def _settings(model: ServedModel, body: AnswerFields, *, logprobs: bool, as_token_ids: bool = False) -> AnswerSettings:
    return AnswerSettings(
        body.return_token_ids, logprobs, as_token_ids, model.token_text, body.include_usage, body.usage_always
    )


def check_model(model: ServedModel, name: str | None) -> None:
    """Raise what is said of a model that the run does not serve."""
    destination(model.names._replace(upstream=False), "", name)


def encoded(model: ServedModel, prompt: str) -> list[int]:
    """The tokens of a prompt that no template has made: special tokens in it count as such, as in vLLM."""
    _check_chars(model, len(prompt))
    return model.tokenizer.encode(prompt, special=True)


def _check_chat(model: ServedModel, chat: Chat) -> None:
    """Refuse what cannot fit before it is rendered: a message takes a token at least."""
    if len(chat.messages) > model.context_tokens:
        raise too_long(model.context_tokens, len(chat.messages))
    _check_chars(model, len(bodies.encoded((chat.messages, chat.tools, chat.template_kwargs))))


def _check_chars(model: ServedModel, chars: int) -> None:
    if chars > model.context_tokens * CHARS_PER_TOKEN_MAX:
        raise too_long(model.context_tokens, chars // CHARS_PER_TOKEN_MAX)


def _checked(model: ServedModel, prompts: Sequence[Sequence[int]], n: int, param: str) -> Sequence[Sequence[int]]:
    if not prompts or len(prompts) * n > TURNS_MAX:
        raise FrontError(
            400, f"{param}: {len(prompts)} prompts of {n} choices; 1 to {TURNS_MAX} in all are allowed", param
        )
    for prompt in prompts:
        if not prompt:
            raise FrontError(400, f"{param}: the prompt is empty", param)
        check_ids(model, prompt, param)
    return prompts


def check_ids(model: ServedModel, ids: Sequence[int], param: str) -> None:
    if ids and max(ids) >= model.vocab_size:
        foreign = next(token for token in ids if token >= model.vocab_size)
        said = f"{param}: token id {foreign} is not in the vocabulary (0 to {model.vocab_size - 1})"
        raise FrontError(400, said, param)
