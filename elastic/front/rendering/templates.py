"""A checkpoint's chat template: messages to text, in a sandbox, as transformers render it.

What comes out is coded (`elastic.front.rendering.tokenizer`): control tokens that the template wrote are told from
those that somebody put into a message. For that, control tokens in texts of messages are broken by a private mark
before they are rendered, and so is what could become one with its neighbours; the mark is taken out behind the
template.

In texts of users and tools no control token counts. The operator (`system`), tools' descriptions and the model itself
(`assistant`) may name added tokens that are not special: `<think>` in a system prompt is the token, as for vLLM.
"""

import json
import random
import re
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

import jinja2
import jinja2.ext
import jinja2.nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

from elastic.config import ConfigError
from elastic.front.rendering.messages import AnyMessage, MessageError, Messages, Tools, as_rendered
from elastic.front.rendering.tokenizer import Tokenizer
from elastic.system.host import here

RENDERED_CHARS_MAX = 64 * 1024 * 1024
TRUSTED_ROLES = ("system", "assistant")
PRIVATE_CHARACTERS = range(0xF0000, 0xFFFFE)
_ROLE = re.compile("[A-Za-z_]+")
_PROBE = "elastic-probe"
_QUESTION = {"role": "user", "content": _PROBE}


class RendererError(ConfigError):
    """There is no such renderer or parser, or the checkpoint cannot be rendered; the message names what there is."""


class RenderingError(ValueError):
    """The template does not take these messages."""


class ChatTemplate:
    """Renders messages that `elastic.front.rendering.messages.as_rendered` has made plain.

    Templates differ in what they take: most want content as a text and arguments of calls as values; some want parts,
    or arguments as the text of JSON. Probes show which.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Raises `RendererError` for a template that is none."""
        self._tokenizer = tokenizer
        environment = _environment()
        self._compiled: dict[str, jinja2.Template] = {}
        for name, source in tokenizer.templates.items():
            try:
                self._compiled[name] = environment.from_string(source)
            except (jinja2.TemplateError, RecursionError) as error:
                raise RendererError(f"{tokenizer.directory}: chat template {name!r}: {error}") from error
        self._guards = Guards(tokenizer)
        self._wants = _Wants()
        if "default" in self._compiled:
            self._wants = self._better([_QUESTION], self._wants._replace(parts=True))
            self._wants = self._better(_calling({"value": _PROBE}), self._wants._replace(text_arguments=True))
            self._wants = self._better(_calling("no JSON: " + _PROBE), self._wants._replace(named_arguments=True))
            for key in ("thinking", "reasoning"):
                self._wants = self._better(_calling({}, _PROBE), self._wants._replace(thought=key))

    def given(
        self,
        messages: Messages,
        tools: Tools | None,
        kwargs: Mapping[str, Any],
        now: datetime | None = None,
    ) -> "Conversation":
        """A conversation that can be rendered; `now` is what the template takes for today. Raises `RenderingError`."""
        return self._given(messages, tools, kwargs, self._wants, now)

    def coded(
        self,
        messages: Messages,
        tools: Tools | None,
        kwargs: Mapping[str, Any],
    ) -> str:
        """The coded text of a conversation, up to where an answer begins. Raises `RenderingError`."""
        conversation = self.given(messages, tools, kwargs)
        return conversation.coded(conversation.text(generation=True))

    def _given(
        self,
        messages: Messages,
        tools: Tools | None,
        kwargs: Mapping[str, Any],
        wants: "_Wants",
        now: datetime | None = None,
    ) -> "Conversation":
        template = self._compiled.get("tool_use" if tools and "tool_use" in self._compiled else "default")
        if template is None:
            raise RenderingError("this model has no chat template: it takes prompts, but no messages")
        mark, guarded = self._guards.guarded(messages, tools, kwargs)
        for message in guarded.messages:
            wants.shape(message)
        return Conversation(self._tokenizer, template, mark, guarded, now or now_here())

    def _better(self, messages: list[dict[str, Any]], wants: "_Wants") -> "_Wants":
        """These, if the probe's text comes out with them and not without; else those from before."""
        return wants if not self._shows(messages, self._wants) and self._shows(messages, wants) else self._wants

    def _shows(self, messages: list[dict[str, Any]], wants: "_Wants") -> bool:
        try:
            return _PROBE in self._given(messages, None, {}, wants).text()
        except RenderingError:
            return False


class Conversation:
    """A conversation as a template is given it, with control tokens in its texts broken, at one time."""

    def __init__(
        self, tokenizer: Tokenizer, template: jinja2.Template, mark: str, guarded: "Guarded", now: datetime
    ) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._mark = mark
        self._messages = guarded.messages
        self._given = {
            **tokenizer.named,
            **guarded.kwargs,
            "tools": guarded.tools,
            "documents": None,
            "strftime_now": now.strftime,
        }

    def text(self, messages: int | None = None, *, generation: bool = False) -> str:
        """What the template makes of the first so many messages, or of all; with `generation`, it ends where an answer
        begins. Control tokens in it are the template's own. Raises `RenderingError`."""
        given = {**self._given, "messages": self._messages[:messages], "add_generation_prompt": generation}
        return _rendered(self._template, given, self._mark)

    def coded(self, text: str) -> str:
        """A part of such a text for `Tokenizer.encode_coded`."""
        return self._tokenizer.coded(text, broken_by=self._mark)


class _Wants(NamedTuple):
    """How a template wants messages.

    parts: content in parts.
    text_arguments: arguments of calls as the text of JSON.
    named_arguments: nothing but objects as arguments; a text that is no JSON becomes one.
    thought: what a message's reasoning is called.
    """

    parts: bool = False
    text_arguments: bool = False
    named_arguments: bool = False
    thought: str = ""

    def shape(self, message: dict[str, Any]) -> None:
        if self.parts:
            message["content"] = [{"type": "text", "text": message["content"]}] if message["content"] else []
        if self.thought and "reasoning_content" in message:
            message[self.thought] = message["reasoning_content"]
        for call in message.get("tool_calls", ()):
            arguments = call["function"]["arguments"]
            if self.text_arguments and not isinstance(arguments, str):
                call["function"]["arguments"] = _to_json(arguments)
            elif self.named_arguments and not isinstance(arguments, dict):
                call["function"]["arguments"] = {"arguments": arguments}


class Guarded(NamedTuple):
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    kwargs: dict[str, Any]


class Guards:
    """Break control tokens in what agents send."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._untrusted = _Tokens(tokenizer.control.values())
        self._trusted = _Tokens(tokenizer.special.values())
        self._draw = random.Random()

    def guarded(
        self,
        messages: Messages,
        tools: Tools | None,
        kwargs: Mapping[str, Any],
    ) -> tuple[str, Guarded]:
        """A mark that stands in none of the texts, and the same with control tokens broken by it.

        Raises `RenderingError`.
        """
        for message in messages:
            if not _ROLE.fullmatch(str(message.get("role"))):
                raise RenderingError(f"role {message.get('role')!r}: a name in letters is allowed")
        for _ in range(16):
            mark = chr(self._draw.choice(PRIVATE_CHARACTERS))
            trusted, untrusted = _Breaker(self._trusted, mark), _Breaker(self._untrusted, mark)
            try:
                return mark, Guarded(
                    [
                        (trusted if message["role"] in TRUSTED_ROLES else untrusted).message(message)
                        for message in messages
                    ],
                    trusted.value(list(tools)) if tools else None,
                    trusted.value(dict(kwargs)),
                )
            except _MarkFound:
                continue
        raise RenderingError("the messages use up all private characters of Unicode")


def _calling(arguments: Any, thought: str = "") -> list[dict[str, Any]]:
    """A conversation with a call, for probes."""
    call = {"id": "call00000", "type": "function", "function": {"name": "elastic", "arguments": arguments}}
    reasoning = {"reasoning_content": thought} if thought else {}
    answer = {"role": "assistant", "content": "", **reasoning, "tool_calls": [call]}
    return [{"role": "user", "content": "x"}, answer]


def plain_messages(messages: Sequence[AnyMessage]) -> list[dict[str, Any]]:
    """Messages as templates take them. Raises `RenderingError`."""
    if not messages:
        raise RenderingError("messages are empty: there must be one at least")
    try:
        return [as_rendered(message) for message in messages]
    except MessageError as error:
        raise RenderingError(str(error)) from error


def now_here() -> datetime:
    return datetime.fromtimestamp(here().unix_ns() / 1e9)


class _MarkFound(Exception):
    """A text has the mark in it."""


class _Tokens:
    """Control tokens, and how texts are searched for them and for their parts."""

    def __init__(self, tokens: Collection[str]) -> None:
        tokens = [token for token in tokens if token]
        self._begun = re.compile(f"(?={'|'.join(map(re.escape, tokens))})(.)" if tokens else "(?!)", re.DOTALL)
        self._firsts, self._lasts = {token[0] for token in tokens}, {token[-1] for token in tokens}
        self._heads = {token[:size] for token in tokens for size in range(1, len(token))}
        self._tails = {token[size:] for token in tokens for size in range(1, len(token))}
        self._longest = max(map(len, tokens), default=1) - 1

    def broken(self, text: str, mark: str) -> str:
        """The text with a mark in each token, and at an end that may be part of one."""
        start, end = text[: self._longest], text[-self._longest :] if self._longest else ""
        marked = self._begun.sub(lambda found: found[1] + mark, text)
        if any(first in end for first in self._firsts) and any(end[at:] in self._heads for at in range(len(end))):
            marked += mark
        if any(last in start for last in self._lasts) and any(
            start[:at] in self._tails for at in range(len(start) + 1)
        ):
            marked = mark + marked
        return marked


class _Breaker:
    """Puts a mark into the control tokens of all texts in a value of JSON."""

    def __init__(self, tokens: _Tokens, mark: str) -> None:
        self._tokens = tokens
        self._mark = mark

    def message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        return {key: value if key == "role" else self.value(value) for key, value in message.items()}

    def value(self, value: Any) -> Any:
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, dict):
            return {self.text(key) if isinstance(key, str) else key: self.value(one) for key, one in value.items()}
        if isinstance(value, list | tuple):
            return [self.value(one) for one in value]
        return value

    def text(self, text: str) -> str:
        if self._mark in text:
            raise _MarkFound
        return self._tokens.broken(text, self._mark)


def _rendered(template: jinja2.Template, given: Mapping[str, Any], mark: str) -> str:
    pieces: list[str] = []
    size = 0
    try:
        for piece in template.generate(**given):
            size += len(piece)
            if size > RENDERED_CHARS_MAX:
                raise RenderingError(f"the chat template makes more than {RENDERED_CHARS_MAX} characters")
            pieces.append(piece)
    except RenderingError:
        raise
    except Exception as error:  # a template is a program of its own, which may fail in any way
        said = str(error).replace(mark, "") or type(error).__name__
        raise RenderingError(f"the chat template does not take these messages: {said}") from error
    escaped = json.dumps(mark)[1:-1]  # as a template writes it that asks for ASCII
    return "".join(pieces).replace(escaped, mark)


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` … `{% endgeneration %}`, by which templates say what of them is an answer: its body alone."""

    tags = {"generation"}  # noqa: RUF012 - jinja's own interface

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


class _Namespace(jinja2.utils.Namespace):
    """Jinja's, without the underscored attributes that lead out of the sandbox."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *given = args
        attributes = dict(*given, **kwargs)
        for name in attributes:
            _no_underscore(name)
        jinja2.utils.Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _no_underscore(name)
        super().__setitem__(name, value)


def _no_underscore(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace has no attribute {name!r}")


def _dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    """`dict` itself has attributes that lead out of the sandbox."""
    return dict(*args, **kwargs)


def _raise_exception(message: Any) -> Any:
    raise jinja2.TemplateError(str(message))


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """JSON without the escapes for HTML that Jinja's own filter makes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    offered: dict[str, Any] = environment.globals
    offered |= {"raise_exception": _raise_exception, "namespace": _Namespace, "dict": _dict}
    return environment
