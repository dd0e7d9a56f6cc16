"""What a call asks for, whichever route it came by: made of its headers and its body, before the run is asked.

Values from outside are checked here, against the model: names, token ids, tools. Raises `FrontError` throughout.
"""

from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

import msgspec
from starlette.datastructures import Headers

from elastic.front.rendering import ChatRenderer
from elastic.front.tokenizer import Tokenizer
from elastic.protocol.front_messages import NAME_MAX, AgentCall, WantedSampling
from elastic.protocol.openai import answers, bodies
from elastic.protocol.openai.answers import AnswerSettings
from elastic.protocol.openai.bodies import AnswerFields, ChatRequest, CompletionRequest
from elastic.protocol.openai.errors import FrontError, no_such_model, too_long

IDEMPOTENCY_HEADERS = ("idempotency-key", "x-idempotency-key", "x-irid")
RETRY_HEADER = "x-stainless-retry-count"
RETRIES_DIGITS = 9
CHARS_PER_TOKEN_MAX = 256
"""No vocabulary has a longer token. Text of more characters than the context holds is refused before it is encoded."""
TURNS_MAX = 4096
"""Most choices of all prompts of one call."""


class ServedModel(NamedTuple):
    """The policy as agents see it."""

    name: str
    context_tokens: int
    vocab_size: int
    tokenizer: Tokenizer
    renderer: ChatRenderer
    created_s: int

    def token_text(self, token: int) -> str:
        return self.tokenizer.decode([token], special=True)


class Chat(NamedTuple):
    """The messages of a chat, and what changes their rendering besides."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None
    template_kwargs: Mapping[str, Any]
    calls_tools: bool
    """Whether calls of tools are looked for in answers."""
    one_call: bool
    """Whether an answer has one call of a tool at most."""


class Asked(NamedTuple):
    """`prompts` are those of a completion, each with `n` choices. A chat has none of its own but its messages."""

    call: AgentCall
    form: answers.Format
    n: int
    sampling: WantedSampling
    stops: tuple[str, ...]
    silent: frozenset[int]
    """Token ids that end an answer, and are no text of it."""
    stop_ids: frozenset[int]
    """Those of them that the client has named."""
    settings: AnswerSettings
    stream: bool
    include_usage: bool
    usage_always: bool
    session: str
    chat: Chat | None = None
    prompts: Sequence[Sequence[int]] = ()
    identifier: str = ""


def read_chat(model: ServedModel, headers: Headers, fields: dict[str, Any]) -> Asked:
    body = bodies.read(ChatRequest, fields, bodies.CHAT)
    _check_chars(model, sum(len(message.text) for message in body.messages))
    kwargs = dict(body.chat_template_kwargs)
    if body.reasoning_effort is not None:
        kwargs.setdefault("reasoning_effort", body.reasoning_effort)
    tools = fields["tools"] if body.tools else None
    calls_tools = tools is not None and body.tool_choice != "none"
    if calls_tools and not model.renderer.reads_calls:
        said = "tools: nothing here reads their calls; name one in front.tool_parser, or send tool_choice 'none'"
        raise FrontError(400, said, "tools", "unsupported_parameter")
    chat = Chat(
        fields["messages"],
        tools,
        kwargs,
        calls_tools=calls_tools,
        one_call=not body.parallel_tool_calls,
    )
    asked = _asked(model, "/v1/chat/completions", answers.CHAT, headers, fields, body, model.renderer.stop_token_ids)
    sampling = msgspec.structs.replace(asked.sampling, max_tokens=body.most_tokens)
    settings = AnswerSettings(body.return_token_ids, body.logprobs, body.return_tokens_as_token_ids, model.token_text)
    return asked._replace(sampling=sampling, settings=settings, chat=chat)


def read_completion(model: ServedModel, headers: Headers, fields: dict[str, Any]) -> Asked:
    body = bodies.read(CompletionRequest, fields, bodies.COMPLETION)
    asked = _asked(model, "/v1/completions", answers.COMPLETION, headers, fields, body, model.tokenizer.eos_token_ids)
    prompts = [_encoded(model, prompt) if isinstance(prompt, str) else prompt for prompt in body.prompts()]
    settings = AnswerSettings(
        body.return_token_ids, body.logprobs is not None, body.return_tokens_as_token_ids, model.token_text
    )
    return asked._replace(settings=settings, prompts=_checked(model, prompts, body.n, "prompt"))


def read_tokens(model: ServedModel, headers: Headers, fields: dict[str, Any]) -> Asked:
    body = bodies.read_tokens(fields)
    asked = _asked(
        model, "/inference/v1/generate", answers.TOKENS, headers, fields, body, model.tokenizer.eos_token_ids
    )
    return asked._replace(
        settings=AnswerSettings(body.return_token_ids, body.logprobs is not None),
        prompts=_checked(model, [body.token_ids], body.n, "token_ids"),
        identifier=body.request_id or "",
    )


READERS: Mapping[str, Callable[[ServedModel, Headers, dict[str, Any]], Asked]] = {
    "/v1/chat/completions": read_chat,
    "/v1/completions": read_completion,
    "/inference/v1/generate": read_tokens,
}


def idempotency_key(headers: Headers) -> str:
    """The key by which a client says that a request is one that it has made before; empty if it has none."""
    key = next((found for name in IDEMPOTENCY_HEADERS if (found := headers.get(name))), "")
    return key if len(key) <= NAME_MAX else blake2b(key.encode(), digest_size=16).hexdigest()


def _asked(
    model: ServedModel,
    route: str,
    form: answers.Format,
    headers: Headers,
    fields: Mapping[str, Any],
    body: AnswerFields,
    stop_token_ids: Sequence[int],
) -> Asked:
    if body.model and body.model != model.name:
        raise no_such_model(body.model, model.name)
    _check_ids(model, body.stop_token_ids, "stop_token_ids")
    ends = () if body.ignore_eos else tuple(stop_token_ids)
    ends = tuple(dict.fromkeys((*ends, *body.stop_token_ids)))
    retries = headers.get(RETRY_HEADER, "0")[:RETRIES_DIGITS]
    return Asked(
        AgentCall(
            route, bodies.digest(fields), idempotency_key(headers), retry=retries.isdecimal() and int(retries) > 0
        ),
        form,
        body.n,
        WantedSampling(
            max_tokens=body.max_tokens,
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
        AnswerSettings(),
        body.stream,
        body.include_usage,
        body.usage_always,
        body.session_id or "",
    )


def _encoded(model: ServedModel, prompt: str) -> list[int]:
    """The tokens of a prompt that no template has made: special tokens in it count as such, as in vLLM."""
    _check_chars(model, len(prompt))
    return model.tokenizer.encode(prompt, special=True)


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
        _check_ids(model, prompt, param)
    return prompts


def _check_ids(model: ServedModel, ids: Sequence[int], param: str) -> None:
    if ids and max(ids) >= model.vocab_size:
        foreign = next(token for token in ids if token >= model.vocab_size)
        said = f"{param}: token id {foreign} is not in the vocabulary (0 to {model.vocab_size - 1})"
        raise FrontError(400, said, param)
