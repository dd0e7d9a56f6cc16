"""What an answer's text says: reasoning, content and calls of tools, as it comes or at once. Pure.

Parsers are named as vLLM's flags name them. Whatever they cannot read stays content, so no text is lost: a block that
is no call, or that a limit cut off. Blank space around calls and around reasoning is no part of anything.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple, Protocol

from elastic.front.messages import read_json, read_json_at_start
from elastic.protocol.openai.answers import CallDelta, ParsedAnswer

THINK, THOUGHT = "<think>", "</think>"
CALL, CALLED = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"
_FUNCTION = re.compile(r"<function=(?P<name>[^>\n]+)>(?P<body>.*?)(</function>)?", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=(?P<name>[^>\n]+)>(?P<value>.*?)</parameter>", re.DOTALL)
_SURROGATE = re.compile("[\ud800-\udfff]")


class NamedCall(NamedTuple):
    name: str
    arguments: str


class ReasoningParser(Protocol):
    """Splits text as it comes. Both methods return (reasoning, content)."""

    def feed(self, text: str) -> tuple[str, str]: ...

    def finish(self) -> tuple[str, str]: ...


class ToolParser(Protocol):
    """Finds calls in content as it comes. Both methods return (content, calls)."""

    def feed(self, text: str) -> tuple[str, list[NamedCall]]: ...

    def finish(self) -> tuple[str, list[NamedCall]]: ...


class AnswerParser:
    """Parses one answer. `seed` makes the ids of its calls, which are the same whenever the answer is parsed."""

    def __init__(self, reasoning: ReasoningParser | None, tools: ToolParser | None, seed: bytes) -> None:
        self._reasoning = reasoning
        self._tools = tools
        self._seed = seed
        self._calls = 0

    def feed(self, text: str) -> ParsedAnswer:
        """What this text completes."""
        reasoning, content = ("", text) if self._reasoning is None else self._reasoning.feed(text)
        return self._answered(reasoning, *((content, []) if self._tools is None else self._tools.feed(content)))

    def finish(self) -> ParsedAnswer:
        """What was held back; no more text comes."""
        reasoning, content = ("", "") if self._reasoning is None else self._reasoning.finish()
        if self._tools is None:
            return self._answered(reasoning, content, [])
        more, calls = self._tools.feed(content)
        rest, last = self._tools.finish()
        return self._answered(reasoning, more + rest, [*calls, *last])

    def whole(self, text: str) -> ParsedAnswer:
        return self.feed(text).plus(self.finish())

    def _answered(self, reasoning: str, content: str, calls: Sequence[NamedCall]) -> ParsedAnswer:
        named = []
        for call in calls:
            named.append(CallDelta(self._calls, call_id(self._seed, self._calls), *call))
            self._calls += 1
        return ParsedAnswer(content, reasoning, tuple(named))


def call_id(seed: bytes, place: int) -> str:
    """The id of an answer's call at this place, by the `seed` of the answer: it is known before the call is whole."""
    return f"call_{blake2b(place.to_bytes(8), key=seed, digest_size=12).hexdigest()}"


class ThinkParser:
    """Reasoning up to `</think>`, which may begin with `<think>`.

    opened: whether the prompt ends within reasoning; None if that is not known. Then an answer that does not begin with
    `<think>` is held back until `</think>` shows that it began with reasoning.
    """

    def __init__(self, opened: bool | None) -> None:
        self._inside: bool | None = opened
        self._begun = False
        """Whether it is known if `<think>` begins the answer."""
        self._held = ""
        self._trimmed = True
        """Whether blank space that comes next is left out."""

    def feed(self, text: str) -> tuple[str, str]:
        self._held += text
        if not self._begun:
            start = self._held.lstrip()
            if len(start) < len(THINK) and THINK.startswith(start):
                return "", ""
            self._begun = True
            if start.startswith(THINK):
                self._inside, self._held = True, start.removeprefix(THINK)
            elif self._inside is not True:
                self._trimmed = False
        reasoning = ""
        if self._inside is not False:
            before, found, after = self._held.partition(THOUGHT)
            if found:
                reasoning = before.strip() if self._inside is None else self._shown(before).rstrip()
                self._held = after
                self._inside, self._trimmed = False, True
            elif self._inside:
                return self._safe(), ""
            else:
                return "", ""
        content, self._held = self._shown(self._held), ""
        return reasoning, content

    def finish(self) -> tuple[str, str]:
        self._trimmed = self._trimmed and (self._begun or self._inside is True)
        rest, self._held = self._shown(self._held), ""
        return (rest.rstrip(), "") if self._inside else ("", rest)

    def _safe(self) -> str:
        """Reasoning but for its end, which may be the beginning of `</think>` or blank space before it."""
        size = next((n for n in range(len(THOUGHT) - 1, 0, -1) if self._held.endswith(THOUGHT[:n])), 0)
        kept = len(self._held[: len(self._held) - size].rstrip())
        shown, self._held = self._held[:kept], self._held[kept:]
        return self._shown(shown)

    def _shown(self, text: str) -> str:
        if self._trimmed:
            text = text.lstrip()
            self._trimmed = not text
        return text


class BlocksParser:
    """Calls between `<tool_call>` and `</tool_call>`; `read` makes a call of what is in between, or nothing."""

    def __init__(self, read: Callable[[str], NamedCall | None]) -> None:
        self._read = read
        self._held = ""
        self._space = ""
        """Blank space that is content if content follows it, or the end."""
        self._after_call = False

    def feed(self, text: str) -> tuple[str, list[NamedCall]]:
        self._held += text
        content, calls = "", []
        while True:
            before, found, after = self._held.partition(CALL)
            if not found:
                size = next((n for n in range(len(CALL) - 1, 0, -1) if self._held.endswith(CALL[:n])), 0)
                kept = len(self._held) - size
                content += self._shown(self._held[:kept])
                self._held = self._held[kept:]
                return content, calls
            content += self._shown(before)
            body, closed, rest = after.partition(CALLED)
            if not closed:
                self._held = found + after
                return content, calls
            self._held = rest
            if call := self._read(body):
                self._space, self._after_call = "", True
                calls.append(call)
            else:
                content += self._shown(found + body + closed)

    def finish(self) -> tuple[str, list[NamedCall]]:
        held, self._held = self._held, ""
        if held.startswith(CALL) and (call := self._read(held.removeprefix(CALL))):
            return "", [call]
        content = self._shown(held)
        return content if self._after_call else content + self._space, []

    def _shown(self, text: str) -> str:
        if self._after_call:
            text = text.lstrip()
        if not text.strip():
            self._space += text
            return ""
        self._after_call = False
        shown = self._space + text.rstrip()
        self._space = text[len(text.rstrip()) :]
        return shown


class RowParser:
    """An answer that is JSON of calls, one after the other, with `;` or a comma between them: Llama 3's and 4's."""

    def __init__(self) -> None:
        self._held = ""
        self._content = False

    def feed(self, text: str) -> tuple[str, list[NamedCall]]:
        if self._content:
            return text, []
        self._held += text
        start = self._held.lstrip()
        if not start or start[0] == "{" or start.startswith(PYTHON_TAG) or PYTHON_TAG.startswith(start):
            return "", []
        self._content = True
        content, self._held = self._held, ""
        return content, []

    def finish(self) -> tuple[str, list[NamedCall]]:
        held, self._held = self._held, ""
        calls = _calls_in_a_row(held.strip().removeprefix(PYTHON_TAG))
        return ("", calls) if calls else (held, [])


def named_call(name: Any, arguments: Any) -> NamedCall | None:
    """A call with a name and an object of arguments; None if that is not what these are."""
    if not isinstance(name, str) or not name or not isinstance(arguments, dict) or _SURROGATE.search(name):
        return None
    said = json.dumps(arguments, ensure_ascii=False)
    return NamedCall(name, json.dumps(arguments) if _SURROGATE.search(said) else said)


def call_of_json(text: str) -> NamedCall | None:
    """The call that a text is, as JSON with a name and arguments; None if it is none."""
    try:
        return _call(read_json(text.strip()))
    except (ValueError, RecursionError):
        return None


def call_of_tags(text: str, tools: Sequence[Mapping[str, Any]]) -> NamedCall | None:
    """The call that `<function=NAME>` and its `<parameter=NAME>` are, with values as the tool's schema types them."""
    function = _FUNCTION.fullmatch(text.strip())
    if function is None:
        return None
    types = _types_of(function["name"], tools)
    arguments: dict[str, Any] = {}
    rest = function["body"].strip()
    while rest:
        parameter = _PARAMETER.match(rest)
        if parameter is None:
            return None
        value = parameter["value"].removeprefix("\n").removesuffix("\n")
        arguments[parameter["name"]] = _typed(value, types.get(parameter["name"]))
        rest = rest[parameter.end() :].strip()
    return named_call(function["name"], arguments)


def _types_of(name: str, tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The types of a tool's parameters, as far as its schema says them."""
    for tool in tools:
        function = tool.get("function", tool)
        if function.get("name") == name:
            properties = (function.get("parameters") or {}).get("properties")
            properties = properties if isinstance(properties, dict) else {}
            return {key: schema.get("type") for key, schema in properties.items() if isinstance(schema, dict)}
    return {}


def _typed(value: str, of: Any) -> Any:
    """The value, as JSON where its type is no string; a text where it is none of its type."""
    if of in (None, "string"):
        return value
    try:
        return read_json(value.strip().lower() if of == "boolean" else value)
    except (ValueError, RecursionError):
        return value


def _calls_in_a_row(text: str) -> list[NamedCall]:
    """The calls that a text consists of; none at all if anything else is in it."""
    calls: list[NamedCall] = []
    rest = text.strip()
    while rest:
        try:
            value, end = read_json_at_start(rest)
        except (ValueError, RecursionError):
            return []
        call = _call(value)
        if call is None:
            return []
        calls.append(call)
        rest = rest[end:].lstrip(";, \n\t")
    return calls


def _call(value: Any) -> NamedCall | None:
    if not isinstance(value, dict):
        return None
    return named_call(value.get("name"), value.get("arguments", value.get("parameters", {})))


def _hermes(_tools: Sequence[Mapping[str, Any]]) -> ToolParser:
    return BlocksParser(call_of_json)


def _qwen3_coder(tools: Sequence[Mapping[str, Any]]) -> ToolParser:
    return BlocksParser(lambda text: call_of_tags(text, tools))


def _llama_json(_tools: Sequence[Mapping[str, Any]]) -> ToolParser:
    return RowParser()


TOOL_PARSERS: Mapping[str, Callable[[Sequence[Mapping[str, Any]]], ToolParser]] = {
    "hermes": _hermes,
    "llama3_json": _llama_json,
    "llama4_json": _llama_json,
    "qwen3_coder": _qwen3_coder,
    "qwen3_xml": _qwen3_coder,
}
"""By vLLM's names: JSON in blocks, JSON in a row, tags in blocks. Made for the tools of one call."""

MARKERS = (THINK, THOUGHT, CALL, CALLED, PYTHON_TAG)
"""Tokens that parsers read, even where a tokenizer calls them special."""


def _qwen3(opened: bool | None) -> ReasoningParser:
    return ThinkParser(opened)


def _deepseek_r1(opened: bool | None) -> ReasoningParser:
    """An answer of R1's begins with reasoning, unless the prompt has closed it."""
    return ThinkParser(opened is not False)


REASONING_PARSERS: Mapping[str, Callable[[bool | None], ReasoningParser]] = {
    "qwen3": _qwen3,
    "deepseek_r1": _deepseek_r1,
}
"""By vLLM's names. Made for a prompt that ends within reasoning, or does not; None if that is not known."""


def ends_in_reasoning(prompt: str) -> bool:
    """Whether a prompt whose end is this text leaves off within reasoning."""
    return prompt.rfind(THINK) > prompt.rfind(THOUGHT) and not prompt[prompt.rfind(THINK) + len(THINK) :].strip()
