"""Answers as OpenAI's clients read them, with vLLM's additions: whole, and in streamed chunks.

`AnswerWriter` is what writes them; other dialects have writers of their own. Here is that of OpenAI's chats and
completions: a stream is server-sent events of `data:` lines alone. Its last chunk of a choice has a `finish_reason`,
and `[DONE]` follows all of them. An answer that cannot go on ends with `failed`, or with the connection.

Most of a chunk is the same for all chunks of a choice, so it is made once.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, Protocol

import msgspec

from elastic.protocol.openai.errors import FrontError

DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"
EVENT_STREAM = "text/event-stream"
STREAM_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}

_json = msgspec.json.encode
_NO_IDS: Sequence[int] = ()
_NO_LOGPROBS: Sequence[float] = ()


class Format(NamedTuple):
    """What distinguishes the answers of one route: the prefix of their ids, and what objects they are."""

    prefix: str
    whole: str
    piece: str


COMPLETION = Format("cmpl-", "text_completion", "text_completion")
CHAT = Format("chatcmpl-", "chat.completion", "chat.completion.chunk")
TOKENS = Format("generate-tokens-", "", "")
"""vLLM's generate: token ids and no text."""


class Sample(NamedTuple):
    """Tokens that were sampled one behind the other, with their log-probabilities."""

    ids: Sequence[int] = _NO_IDS
    logprobs: Sequence[float] = _NO_LOGPROBS


class CallDelta(msgspec.Struct, frozen=True):
    """A call of a tool, or what a piece of an answer adds to one.

    `index` is the call's number in its answer. The first delta of a call has its `id` and its `name`; those that follow
    have neither. Joined, `arguments` are the text of a JSON object as the model wrote it. Where the model was cut off,
    or did not write JSON, they are what it wrote.
    """

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""

    @property
    def begins(self) -> bool:
        """Whether this is the first of its call."""
        return bool(self.id)

    def as_told(self) -> dict[str, Any]:
        """The call in a message."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}

    def as_streamed(self) -> dict[str, Any]:
        """The delta in a chunk."""
        if self.begins:
            return {"index": self.index, **self.as_told()}
        return {"index": self.index, "function": {"arguments": self.arguments}}


class ParsedAnswer(NamedTuple):
    """An answer, or what a piece of one adds to it.

    A stream shows a piece in this order: what it adds to a call that has begun before, reasoning, content, and calls
    that begin. What belongs to a call comes in one go: nothing else is between its first delta and its last.
    """

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[CallDelta, ...] = ()

    @property
    def empty(self) -> bool:
        return not (self.content or self.reasoning or self.tool_calls)

    def plus(self, more: "ParsedAnswer") -> "ParsedAnswer":
        return ParsedAnswer(
            self.content + more.content,
            self.reasoning + more.reasoning,
            joined_calls((*self.tool_calls, *more.tool_calls)) if more.tool_calls else self.tool_calls,
        )

    def message(self) -> dict[str, Any]:
        """The answer as the message that its client gets, and sends back as history."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.tool_calls:
            message["content"] = self.content or None
            message["tool_calls"] = [call.as_told() for call in self.tool_calls]
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        return message


def joined_calls(deltas: Sequence[CallDelta]) -> tuple[CallDelta, ...]:
    """The calls that these deltas make, one for each index."""
    calls: dict[int, list[CallDelta]] = {}
    for delta in deltas:
        calls.setdefault(delta.index, []).append(delta)
    return tuple(
        CallDelta(index, found[0].id, found[0].name, "".join(delta.arguments for delta in found))
        for index, found in calls.items()
    )


class ChoiceEnd(NamedTuple):
    """Why a choice is over: `stop`, `length` or `tool_calls`; `stop_reason` is the stop string or token, if any."""

    finish: Literal["stop", "length", "tool_calls", "abort"]
    stop_reason: str | int | None = None


class VersionSpan(NamedTuple):
    """The tokens of a choice from `start` to before `end` were sampled from the weights of this version."""

    version: str
    start: int
    end: int


class Answered(NamedTuple):
    """A choice that is over. `prompt_ids` and `spans` are given where the client wants to see them."""

    said: ParsedAnswer
    sample: Sample
    ending: ChoiceEnd
    prompt_ids: Sequence[int] | None = None
    spans: Sequence[VersionSpan] | None = None


class AnswerSettings(NamedTuple):
    """What of its tokens a client wants to see. `token_text` names a token where it is shown as text.

    usage: whether a stream ends with the usage; usage_always: whether each of its chunks has it.
    """

    token_ids: bool = False
    logprobs: bool = False
    as_token_ids: bool = False
    token_text: Callable[[int], str] = str
    usage: bool = False
    usage_always: bool = False


class AnswerHead(NamedTuple):
    """What is known of an answer before its first token. `identifier` tells it from others."""

    identifier: str
    model: str
    created_s: int
    prompt_tokens: int


class AnswerWriter(Protocol):
    """Writes the answer to one call in its client's dialect: whole, or as a stream of events."""

    def piece(
        self,
        index: int,
        said: str | ParsedAnswer,
        sample: Sample = ...,
        ending: ChoiceEnd | None = None,
        usage: tuple[int, int] | None = None,
        prompt_ids: Sequence[int] | None = None,
    ) -> bytes:
        """Events with what follows of a choice. `prompt_ids` are given with its first piece, if they are wanted."""
        ...

    def end(self, choices: Sequence[Answered], prompt_tokens: int, completion_tokens: int) -> bytes:
        """The end of a stream, behind the last piece of each of these choices."""
        ...

    def whole(self, choices: Sequence[Answered], prompt_tokens: int, completion_tokens: int) -> bytes:
        """The answer that is no stream."""
        ...

    def failed(self, error: FrontError) -> bytes:
        """The last of a stream that cannot go on: clients raise an error for it."""
        ...


class Dialect(NamedTuple):
    """How the answers to a call are written.

    ping: keeps a quiet stream alive; shows_tokens: whether tokens are written that say nothing.
    """

    make_writer: Callable[[AnswerHead], AnswerWriter]
    ping: bytes = PING
    shows_tokens: bool = False


class ChunkWriter:
    """Writes what chats, completions and vLLM's generate answer with. `identifier` is what tells it from others."""

    def __init__(
        self,
        form: Format,
        identifier: str,
        model: str,
        created_s: int,
        settings: AnswerSettings = AnswerSettings(),  # noqa: B008  # immutable
    ) -> None:
        self._form = form
        self._settings = settings
        self.id = form.prefix + identifier
        self._shell: dict[str, Any] = {"id": self.id, "object": form.piece, "created": created_s, "model": model}
        if form is TOKENS:
            self._shell = {
                "request_id": self.id,
                "model": model,
                "created": created_s,
                "output_mode": "tokens",
            }
        self._start = b"data: " + _json(self._shell)[:-1]
        self._heads: dict[int, bytes] = {}
        self._text_offsets: dict[int, int] = {}
        self._end_of_text = {CHAT: b"}", COMPLETION: b"", TOKENS: b""}[form]
        self._plain = not (settings.token_ids or settings.logprobs or form is TOKENS)
        self._usual = self._end_of_text + b',"logprobs":null,"finish_reason":null}]}\n\n'

    def piece(
        self,
        index: int,
        said: str | ParsedAnswer,
        sample: Sample = Sample(),  # noqa: B008  # immutable
        ending: ChoiceEnd | None = None,
        usage: tuple[int, int] | None = None,
        prompt_ids: Sequence[int] | None = None,
    ) -> bytes:
        """A chunk with what follows of a choice. `prompt_ids` are given with its first."""
        head = self._heads.get(index)
        if head is not None and self._plain and ending is None and usage is None and type(said) is str:
            return b"".join((head, _json(said), self._usual))
        parts = [self._first(index, said) if head is None or type(said) is not str else head + self._shown(said)]
        parts.append(self._end_of_text)
        parts.append(b',"logprobs":')
        parts.append(self._logprobs(index, said if type(said) is str else "", sample))
        parts.append(b',"finish_reason":%b' % _json(ending and ending.finish))
        if ending is not None:
            parts.append(b',"stop_reason":%b' % _json(ending.stop_reason))
        if self._settings.token_ids or self._form is TOKENS:
            parts.append(b',"token_ids":%b' % _json(sample.ids))
        if prompt_ids is not None and self._form is COMPLETION:
            parts.append(b',"prompt_token_ids":%b' % _json(prompt_ids))
        parts.append(b"}]")
        if prompt_ids is not None and self._form is not COMPLETION:
            parts.append(b',"prompt_token_ids":%b' % _json(prompt_ids))
        if usage is not None:
            parts.append(b',"usage":%b' % _json(usage_of(*usage)))
        parts.append(b"}\n\n")
        return b"".join(parts)

    def end(self, choices: Sequence[Answered], prompt_tokens: int, completion_tokens: int) -> bytes:
        """A chunk with the usage alone, which has no choices, and the end mark."""
        if not self._settings.usage:
            return DONE
        used = _json(usage_of(prompt_tokens, completion_tokens))
        return b"".join((self._start, b',"choices":[],"usage":', used, b"}\n\n", DONE))

    def whole(self, choices: Sequence[Answered], prompt_tokens: int, completion_tokens: int) -> bytes:
        told = [self._choice(index, choice) for index, choice in enumerate(choices)]
        answer = {**self._shell, "choices": told, "usage": usage_of(prompt_tokens, completion_tokens)}
        if self._form is not TOKENS:
            answer["object"] = self._form.whole
        if choices and choices[0].prompt_ids is not None and self._form is not COMPLETION:
            answer["prompt_token_ids"] = choices[0].prompt_ids
        return _json(answer)

    def failed(self, error: FrontError) -> bytes:
        return b"data: %b\n\n" % error.body()

    def _choice(self, index: int, answered: Answered) -> dict[str, Any]:
        said, sample, ending, prompt_ids, spans = answered
        choice: dict[str, Any] = {"index": index}
        if self._form is CHAT:
            choice["message"] = said.message()
        elif self._form is COMPLETION:
            choice["text"] = said.content
        choice["logprobs"] = msgspec.Raw(self._logprobs(index, said.content, sample))
        choice |= {"finish_reason": ending.finish, "stop_reason": ending.stop_reason}
        if self._settings.token_ids or self._form is TOKENS:
            choice["token_ids"] = sample.ids
        if prompt_ids is not None and self._form is COMPLETION:
            choice["prompt_token_ids"] = prompt_ids
        if spans is not None:
            choice["weight_versions"] = [span._asdict() for span in spans]
        return choice

    def _first(self, index: int, said: str | ParsedAnswer) -> bytes:
        """The beginning of a choice's first chunk, or of one with more than text, up to the end of what was said."""
        first = index not in self._heads
        head = self._start + b',"choices":[{"index":%d' % index
        if self._form is TOKENS:
            self._heads[index] = head
            return head
        if self._form is COMPLETION:
            self._heads[index] = head + b',"text":'
            return self._heads[index] + _json(said if isinstance(said, str) else said.content)
        self._heads[index] = head + b',"delta":{"content":'
        if isinstance(said, str):
            return head + b',"delta":{"role":"assistant","content":' + _json(said)
        delta = self._delta(said, first)
        return head + b',"delta":' + _json(delta)[:-1]

    def _delta(self, said: ParsedAnswer, first: bool) -> dict[str, Any]:
        delta: dict[str, Any] = {"role": "assistant"} if first else {}
        if said.reasoning:
            delta["reasoning_content"] = said.reasoning
        if said.content or not (said.tool_calls or said.reasoning):
            delta["content"] = said.content
        if said.tool_calls:
            delta["tool_calls"] = [call.as_streamed() for call in said.tool_calls]
        return delta

    def _shown(self, text: str) -> bytes:
        return b"" if self._form is TOKENS else _json(text)

    def _logprobs(self, index: int, text: str, sample: Sample) -> bytes:
        settings = self._settings
        if not settings.logprobs:
            return b"null"
        if self._form is TOKENS:
            return _json(
                {
                    "content": [
                        {
                            "token": f"token_id:{token}",
                            "token_id": token,
                            "logprob": logprob,
                            "rank": None,
                            "top_logprobs": [],
                        }
                        for token, logprob in zip(sample.ids, sample.logprobs, strict=True)
                    ]
                }
            )
        texts = [settings.token_text(token) for token in sample.ids]
        names = [f"token_id:{token}" for token in sample.ids] if settings.as_token_ids else texts
        if self._form is CHAT:
            content = [
                {
                    "token": name,
                    "token_id": token,
                    "logprob": logprob,
                    "bytes": list(shown.encode(errors="replace")),
                    "top_logprobs": [],
                }
                for name, shown, token, logprob in zip(names, texts, sample.ids, sample.logprobs, strict=True)
            ]
            return _json({"content": content})
        offset = self._text_offsets.get(index, 0)
        offsets: list[int] = []
        for shown in texts:
            offsets.append(offset)
            offset += len(shown)
        self._text_offsets[index] = offset
        return _json(
            {
                "tokens": names,
                "token_logprobs": sample.logprobs,
                "top_logprobs": [{name: logprob} for name, logprob in zip(names, sample.logprobs, strict=True)],
                "text_offset": offsets,
            }
        )


def usage_of(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def models(names: Sequence[str], context_tokens: int, created_s: int) -> bytes:
    """The list of models: the one that is served, by its own name first, of which the others are further names."""
    cards = [
        {
            "id": name,
            "object": "model",
            "created": created_s,
            "owned_by": "elastic",
            "root": names[0],
            "parent": None if name == names[0] else names[0],
            "max_model_len": context_tokens,
            "permission": [],
        }
        for name in names
    ]
    return _json({"object": "list", "data": cards})
