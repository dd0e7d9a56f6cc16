"""How models write calls of tools: a grammar for each of vLLM's `--tool-call-parser` that is known here. Pure.

A call is shown as it comes: its name once that is sure, then its arguments. From then on it is a call: what follows is
its arguments, whether they are JSON or not, and whether they end or not. Arguments that were cut off stay open, so that
nobody takes them for whole. All else stays content, so no text is lost.

Arguments of JSON stay as the model wrote them. Those in tags become JSON: values are read as the tool's schema types
them, and keys that come twice are there twice.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from elastic.front.rendering.incoming import Findings, Grammar, Incoming, Reading, Withheld
from elastic.front.rendering.messages import Tools, read_json
from elastic.front.rendering.reasoning_grammars import HARMONY

CALL, CALLED = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"
V3_CALLS, V3_ALL_CALLED = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
V3_CALL, V3_SEPARATOR, V3_CALLED = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
DSML = "｜DSML｜"
DSML_CALL = f"<{DSML}invoke"
_DSML_HEAD = re.compile(r'\s+name="(.*?)"\s*', re.DOTALL)
_DSML_PARAMETER = re.compile(r'\s+name="(.*?)"\s+string="(true|false)"\s*', re.DOTALL)

TRIES_MAX = 16
"""Most beginnings of calls, one within the other, that are tried where none of them leads to a call: a text of nothing
else would be read once for each."""

_SURROGATE = re.compile("[\ud800-\udfff]")
_ANY_STRING = {"type": "string"}


class ToolFormat(NamedTuple):
    """How calls of tools are read.

    grammar: made for the tools that there are; None where the parser of reasoning reads calls, too.
    markers: tokens that the grammar reads. Other special tokens are no text.
    begin: what a call, or a section of them, begins with; empty where nothing says so.
    """

    grammar: Callable[[Tools], Grammar] | None
    markers: tuple[str, ...]
    begin: str = ""


# Blocks.

Block: TypeAlias = Callable[[Incoming, Findings], Reading[bool]]
"""Reads what follows the marker of a call. False if that is none: then it has found nothing."""


def _blocks(block: Block, begin: str, sections: Sequence[str] = (), section_ends: Sequence[str] = ()) -> Grammar:
    """Content with calls in it. They begin with `begin`, and may stand in sections with markers of their own."""

    def grammar(text: Incoming, found: Findings) -> Reading[None]:
        tries = in_vain = 0
        while opener := (yield from text.show_until(found.content, begin, *sections)):
            if text.taken > in_vain:
                tries = 0
            elif tries == TRIES_MAX:
                found.content(opener)
                continue
            text.mark()
            if opener != begin:
                yield from text.blank()
            if (opener == begin or (yield from text.take(begin))) and (yield from block(text, found)):
                text.commit()
                if section_ends:
                    yield from text.blank()
                    yield from text.take(*section_ends)
            else:
                # Up to here nothing has led to a call.
                tries, in_vain = tries + 1, max(in_vain, text.taken)
                text.back()
                found.content(opener)

    return grammar


def _to_end(
    text: Incoming, found: Findings, close: str, begin: str, is_end: Callable[[str], bool] = lambda _: False
) -> Reading[None]:
    """Up to the end of a call's block, or to where the next one begins. What is before it is content, unless it belongs
    to the end."""
    rest, marker = yield from text.until(close, begin)
    if marker == begin:
        text.give_back(marker)
    if rest.strip() and not is_end(rest):
        found.content(rest)


# JSON, in blocks and in a row.


def _hermes(text: Incoming, found: Findings) -> Reading[bool]:
    if not (yield from _json_call(text, found, CALLED)):
        return False
    yield from _to_end(text, found, CALLED, CALL, lambda rest: json_of('{"":0' + rest) is not None)
    return True


def _rows(text: Incoming, found: Findings) -> Reading[None]:
    """An answer that is calls, one after the other, with `;` or a comma between them: Llama 3's and 4's."""
    text.mark()
    yield from text.blank()
    yield from text.take(PYTHON_TAG)
    while (yield from _json_call(text, found, "")):
        text.mark()
        yield from text.blank()
        yield from text.take(";", ",")
        yield from text.blank()
        if (yield from text.ended()):
            return
    text.back()
    yield from text.show_until(found.content)


def _json_call(text: Incoming, found: Findings, close: str) -> Reading[bool]:
    """A call as an object of JSON, with a name and arguments."""
    text.mark()
    if name := (yield from _json_head(text)):
        text.commit()
        found.call(name)
        if (yield from text.show_object(found.arguments, close)):
            text.mark()
            if (yield from text.row("}")):
                text.commit()
            else:
                text.back()
        return True
    text.back()
    yield from text.blank()
    if not (yield from text.take("{")):
        return False
    text.give_back("{")
    shown: list[str] = []
    whole = yield from text.show_object(shown.append, close)
    name, arguments = call_of(json_of("".join(shown))) if whole else ("", "")
    if not name:
        return False
    text.commit()
    found.call(name)
    found.arguments(arguments)
    return True


def _json_head(text: Incoming) -> Reading[str]:
    """The name of a call whose object begins with it, up to where its arguments begin; empty if it does otherwise."""
    if not (yield from text.row("{", '"name"', ":")):
        return ""
    yield from text.blank()
    name = json_of((yield from text.string()))
    if not isinstance(name, str) or not is_name(name) or not (yield from text.row(",")):
        return ""
    yield from text.blank()
    if not (yield from text.take('"arguments"', '"parameters"')) or not (yield from text.row(":", "{")):
        return ""
    text.give_back("{")
    return name


# JSON between tokens.


def _deepseek_v3(text: Incoming, found: Findings) -> Reading[bool]:
    kind, separator = yield from text.until(V3_SEPARATOR, V3_CALLED)
    if separator != V3_SEPARATOR or kind.strip() != "function":
        return False
    name, _ = yield from text.until("\n")
    if not (yield from text.row("```json")):
        return False
    return (yield from _object_after(text, found, name.strip(), lambda rest: not rest.strip().strip("`")))


def _deepseek_v31(text: Incoming, found: Findings) -> Reading[bool]:
    name, separator = yield from text.until(V3_SEPARATOR, V3_CALLED)
    return separator == V3_SEPARATOR and (yield from _object_after(text, found, name.strip(), lambda _: False))


def _object_after(text: Incoming, found: Findings, name: str, is_end: Callable[[str], bool]) -> Reading[bool]:
    if not is_name(name) or not (yield from text.row("{")):
        return False
    text.give_back("{")
    text.commit()
    found.call(name)
    yield from text.show_object(found.arguments, V3_CALLED)
    yield from _to_end(text, found, V3_CALLED, V3_CALL, is_end)
    return True


# Tags.


def _qwen3_coder(tools: Tools) -> Block:
    opening, closing = "<parameter=", "</function>"

    def block(text: Incoming, found: Findings) -> Reading[bool]:
        if not (yield from text.row("<function=")):
            return False
        name, ended = yield from text.until(">", "\n")
        yield from text.blank()
        step = yield from text.take(opening, closing)
        if ended != ">" or not is_name(name) or not step:
            return False
        text.commit()
        arguments = _Arguments(found, name, schemas_of(name, tools))
        while step == opening:
            key, ended = yield from text.until(">")
            if ended:
                yield from text.take("\n")
                yield from arguments.value(text, key, "</parameter>", default=_ANY_STRING, of_line=True)
            else:
                arguments.keep(opening + key)
            step = yield from arguments.step(text, opening, closing, CALLED, CALL)
        arguments.end(text, step, CALL)
        if step == closing:
            yield from _to_end(text, found, CALLED, CALL)
        return True

    return block


def _glm(tools: Tools) -> Block:
    names = {str(function_of(tool).get("name")) for tool in tools}
    opening = "<arg_key>"

    def block(text: Incoming, found: Findings) -> Reading[bool]:
        name, step = yield from text.until(opening, CALLED)
        name = name.strip()
        if not step or name not in names:
            return False
        text.commit()
        arguments = _Arguments(found, name, schemas_of(name, tools))
        while step == opening:
            key, ended = yield from text.until("</arg_key>")
            between, begun = yield from text.until("<arg_value>")
            if begun:
                arguments.keep(between)
                yield from arguments.value(text, key.strip(), "</arg_value>")
            else:
                arguments.keep(opening + key + ended + between)
            step = yield from arguments.step(text, opening, CALLED, CALL)
        arguments.end(text, step, CALL)
        return True

    return block


def _dsml(text: Incoming, found: Findings) -> Reading[bool]:
    """DeepSeek's, from V3.2 on. A parameter's tag says whether its value is a string."""
    opening, closing = f"<{DSML}parameter", f"</{DSML}invoke>"
    head, _ = yield from text.until(">")
    named = _DSML_HEAD.fullmatch(head)
    yield from text.blank()
    step = yield from text.take(opening, closing)
    if named is None or not is_name(named[1]) or not step:
        return False
    text.commit()
    arguments = _Arguments(found, named[1], {})
    while step == opening:
        head, _ = yield from text.until(">")
        if parameter := _DSML_PARAMETER.fullmatch(head):
            schema = _ANY_STRING if parameter[2] == "true" else None
            yield from arguments.value(text, parameter[1], f"</{DSML}parameter>", default=schema)
        else:
            arguments.keep(f"{opening}{head}>")
        step = yield from arguments.step(text, opening, closing, DSML_CALL)
    arguments.end(text, step, DSML_CALL)
    return True


class _Arguments:
    """Writes arguments in tags as the text of a JSON object. What is between them becomes content behind the call."""

    def __init__(self, found: Findings, name: str, schemas: Mapping[str, Any]) -> None:
        self._found = found
        self._schemas = schemas
        self._rest = ""
        self._before = "{"
        found.call(name)

    def value(
        self, text: Incoming, key: str, close: str, default: Mapping[str, Any] | None = None, of_line: bool = False
    ) -> Reading[None]:
        """The value up to `close`. Its schema is the tool's for the key, or else the default. A value of lines of its
        own has a newline before `close` that is no part of it."""
        self._found.arguments(f"{self._before}{_json(key)}: ")
        self._before = ", "
        schema = self._schemas.get(key, default)
        if is_string(schema):
            self._found.arguments('"')
            show = Withheld(_Escaping(self._found), _without_newline if of_line else len)
            if (yield from text.show_until(show, close)):
                self._found.arguments('"')
            else:
                show.rest()
            return
        said, ended = yield from text.until(close)
        if ended:
            self._found.arguments(_typed(said.removesuffix("\n") if of_line else said, schema))
        else:
            self._found.arguments(said)

    def step(self, text: Incoming, *expected: str) -> Reading[str]:
        """What of these comes next. What is before it is kept."""
        rest, step = yield from text.until(*expected)
        self.keep(rest)
        return step

    def keep(self, text: str) -> None:
        """This is no argument."""
        self._rest += text if text.strip() else ""

    def end(self, text: Incoming, step: str, begin: str) -> None:
        """The call has come to this step; it is open where there is none. The next call's `begin` ends one, too."""
        if step == begin:
            text.give_back(step)
        if step:
            self._found.arguments("{}" if self._before == "{" else "}")
        self._found.content(self._rest.strip())


class _Escaping:
    def __init__(self, found: Findings) -> None:
        self._found = found

    def __call__(self, text: str) -> None:
        self._found.arguments(_json(text)[1:-1])


def _without_newline(text: str) -> int:
    return len(text.removesuffix("\n"))


def _typed(said: str, schema: Any) -> str:
    """The JSON of a value that may be no string: it itself if it is JSON, and else a string."""
    of = schema.get("type") if isinstance(schema, Mapping) else None
    text = said.strip().lower() if of == "boolean" else said.strip()
    return _json(said) if json_of(text) is None and text != "null" else text


def is_string(schema: Any) -> bool:
    """Whether a value of this schema can only be a string."""
    if not isinstance(schema, Mapping):
        return False
    of = schema.get("type")
    return of in ("string", ["string"])


def schemas_of(name: str, tools: Tools) -> dict[str, Any]:
    """The schemas of a tool's parameters, as far as it says them."""
    for tool in tools:
        if (function := function_of(tool)).get("name") == name:
            parameters = function.get("parameters")
            properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
            return dict(properties) if isinstance(properties, Mapping) else {}
    return {}


def function_of(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    function = tool.get("function", tool)
    return function if isinstance(function, Mapping) else {}


def is_name(name: str) -> bool:
    """Whether a tool can be called so."""
    return bool(name.strip()) and not _SURROGATE.search(name)


def json_of(text: str) -> Any:
    """The value of a JSON text; None if it is none."""
    try:
        return read_json(text.strip())
    except (ValueError, RecursionError):
        return None


def call_of(value: Any) -> tuple[str, str]:
    """The name and the arguments of the call that a value of JSON is; empty if it is none."""
    name = value.get("name") if isinstance(value, dict) else None
    arguments = value.get("arguments", value.get("parameters", {})) if isinstance(value, dict) else None
    if not isinstance(name, str) or not is_name(name) or not isinstance(arguments, dict):
        return "", ""
    said = _json(arguments)
    return name, json.dumps(arguments) if _SURROGATE.search(said) else said


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


_DSML_SECTIONS = [f"<{DSML}{name}>" for name in ("function_calls", "tool_calls")]
_DSML_ENDS = [f"</{DSML}{name}>" for name in ("function_calls", "tool_calls")]


def _of_blocks(block: Callable[[Tools], Block], *markers: str) -> ToolFormat:
    return ToolFormat(lambda tools: _blocks(block(tools), CALL), (CALL, CALLED, *markers), CALL)


def _of_v3(block: Block) -> ToolFormat:
    grammar = _blocks(block, V3_CALL, [V3_CALLS], [V3_ALL_CALLED])
    return ToolFormat(lambda _: grammar, (V3_CALLS, V3_CALL, V3_SEPARATOR, V3_CALLED, V3_ALL_CALLED), V3_CALLS)


_LLAMA = ToolFormat(lambda _: _rows, (PYTHON_TAG,))
_GLM = _of_blocks(_glm, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
_DSML = ToolFormat(lambda _: _blocks(_dsml, DSML_CALL, _DSML_SECTIONS, _DSML_ENDS), (DSML,), _DSML_SECTIONS[0])

TOOL_PARSERS: Mapping[str, ToolFormat] = {
    "deepseek_v3": _of_v3(_deepseek_v3),
    "deepseek_v31": _of_v3(_deepseek_v31),
    "deepseek_v32": _DSML,
    "deepseek_v4": _DSML,
    "glm45": _GLM,
    "glm47": _GLM,
    "hermes": _of_blocks(lambda _: _hermes),
    "llama3_json": _LLAMA,
    "llama4_json": _LLAMA,
    "openai": ToolFormat(None, HARMONY.markers),
    "qwen3_coder": _of_blocks(_qwen3_coder),
    "qwen3_xml": _of_blocks(_qwen3_coder),
}
"""By vLLM's names."""
