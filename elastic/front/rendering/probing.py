"""What made-up conversations show of how a checkpoint's answers are rendered, and whether they are read as such. Pure.

- `habits_of`: how a template closes messages, and where the rendering of a prefix is a prefix of the whole.
- `losses_of`: what is lost where an answer is rendered, parsed, and rendered once more.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from elastic.front.rendering.messages import AnyMessage, Tools, arguments_of
from elastic.front.rendering.templates import ChatTemplate, RenderingError, now_here
from elastic.front.rendering.tokenizer import Tokenizer
from elastic.protocol.openai.answers import ParsedAnswer

QUESTION_TEXT, ANSWER, THOUGHT, RESULT_TEXT = "elastic-question", "elastic-answer", "elastic-thought", "elastic-result"
VALUE = "elastic-value"
CALLS_UNREAD = "calls of tools are not read as the template writes them"
NAME = "elastic"
QUESTION = {"role": "user", "content": QUESTION_TEXT}
CALL = {"id": "call00000", "type": "function", "function": {"name": NAME, "arguments": {"value": VALUE}}}
RESULT = {"role": "tool", "content": RESULT_TEXT, "tool_call_id": CALL["id"], "name": NAME}
TOOL = {"type": "function", "function": {"name": NAME, "description": "", "parameters": {"type": "object"}}}


class Habits(NamedTuple):
    """What probes show of a template, for some settings.

    closing, closing_of_calls: what closes an assistant's message, and one that ends with calls. It begins with a
    control token; or it is empty, where a message ends with the control token that begins the next one.
    thought: the reasoning that stands for that of earlier answers; empty for a template that shows none.
    after_user, after_tools: whether the rendering stays a prefix where a user's message, or tools' results, follow.
    drops_thoughts: whether reasoning within an answer's content is left out of its message.
    """

    closing: str
    closing_of_calls: str
    thought: str
    after_user: bool
    after_tools: bool
    drops_thoughts: bool


def habits_of(tokenizer: Tokenizer, template: ChatTemplate, tools: bool, kwargs: Mapping[str, Any]) -> Habits | None:
    """None where an answer cannot be gone on from.

    Tried with reasoning in answers at first, and without where that is not how answers are rendered.
    """
    probe = _Probe(tokenizer, template, [TOOL] if tools else None, kwargs)
    return next((habits for thought in (THOUGHT, "") if (habits := probe.habits(thought)) is not None), None)


class _Probe:
    """Renders made-up conversations."""

    def __init__(
        self, tokenizer: Tokenizer, template: ChatTemplate, tools: Tools | None, kwargs: Mapping[str, Any]
    ) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._tools = tools
        self._kwargs = kwargs
        self._now = now_here()

    def habits(self, thought: str) -> Habits | None:
        reasoning = {"reasoning_content": thought} if thought else {}
        answer = {"role": "assistant", "content": ANSWER, **reasoning}
        prompt = self._text([QUESTION], generation=True)
        answered = self._text([QUESTION, answer])
        inline = self._text([QUESTION, {"role": "assistant", "content": f"<think>\n{THOUGHT}\n</think>\n\n{ANSWER}"}])
        if prompt is None or answered is None or not answered.startswith(prompt) or answered.count(ANSWER) != 1:
            return None
        closing = answered.partition(ANSWER)[2]
        if closing and self._tokenizer.control_at_start(closing.lstrip()) is None:
            return None
        closing = closing.lstrip()
        calling = {"role": "assistant", "content": "", **reasoning, "tool_calls": [CALL]}
        called = self._text([QUESTION, calling]) or ""
        closing_of_calls = self._closing_of_calls(called.rpartition(VALUE)[2], closing) if VALUE in called else closing
        return Habits(
            closing,
            closing_of_calls,
            thought,
            after_user=self._stays([QUESTION, answer], QUESTION, closing),
            after_tools=self._stays([QUESTION, calling], RESULT, closing_of_calls),
            drops_thoughts=inline is None or THOUGHT not in inline,
        )

    def _closing_of_calls(self, behind: str, closing: str) -> str:
        """Return the part of what follows a call's arguments that begins the end of an answer."""
        ends = {self._tokenizer.control.get(number) for number in self._tokenizer.eos_token_ids}
        if (number := self._tokenizer.control_at_start(closing)) is not None:
            ends.add(self._tokenizer.control[number])
        places = [behind.find(end) for end in ends if end and end in behind]
        return behind[min(places) :] if places else ""

    def _stays(self, messages: list[dict[str, Any]], new: dict[str, Any], closing: str) -> bool:
        before, whole = self._text(messages), self._text([*messages, new], generation=True)
        if before is None or whole is None or not whole.startswith(before) or not before.endswith(closing):
            return False
        return self._tokenizer.control_at_start(closing + whole[len(before) :]) is not None

    def _text(self, messages: list[dict[str, Any]], generation: bool = False) -> str | None:
        try:
            return self._template.given(messages, self._tools, self._kwargs, self._now).text(generation=generation)
        except RenderingError:
            return None


# What is lost.


class Renders(Protocol):
    """What of a renderer is probed: see `elastic.front.rendering.renderer.ChatRenderer`."""

    stop_token_ids: tuple[int, ...]

    def prompt(
        self, messages: Sequence[AnyMessage], tools: Tools | None, template_kwargs: Mapping[str, Any]
    ) -> list[int]: ...

    def answered(
        self, messages: Sequence[AnyMessage], tools: Tools | None, template_kwargs: Mapping[str, Any]
    ) -> list[int]: ...


Parse = Callable[[Sequence[int], Sequence[int], Tools | None], ParsedAnswer]
"""Makes an answer of its tokens, of its prompt's, and of the tools."""

_ARGUMENTS = {"text": 'é "quoted"\n<b>', "count": 3, "on": True, "of": [1, None, {"b": "x"}]}
_TYPES = {"text": "string", "count": "integer", "on": "boolean", "of": "array"}
PROBED_TOOL = {
    "type": "function",
    "function": {
        "name": NAME,
        "description": "",
        "parameters": {"type": "object", "properties": {name: {"type": of} for name, of in _TYPES.items()}},
    },
}


def reads_calls(renderer: Renders, tokenizer: Tokenizer, parse: Parse) -> bool:
    """Whether a call is read out of an answer as the renderer writes it."""
    call = _RoundTrip(renderer, tokenizer, parse).read(_calling(1), [PROBED_TOOL])
    return call is not None and _called(call.answer) == [(NAME, _ARGUMENTS)]


def reads_reasoning(renderer: Renders, tokenizer: Tokenizer, parse: Parse) -> bool:
    """Whether reasoning is read out of an answer as the renderer writes it."""
    thought = _RoundTrip(renderer, tokenizer, parse).read({"content": ANSWER, "reasoning_content": THOUGHT}, None)
    return thought is not None and (thought.answer.reasoning, thought.answer.content) == (THOUGHT, ANSWER)


def losses_of(renderer: Renders, tokenizer: Tokenizer, parse: Parse, calls: bool, reasoning: bool) -> list[str]:
    """What is lost of answers that are rendered and parsed, each in words.

    calls, reasoning: whether these are to be read.
    """
    said: list[str] = []
    probe = _RoundTrip(renderer, tokenizer, parse)
    plain = probe.read({"content": ANSWER}, None)
    if plain is None or not plain.answer.content.strip().endswith(ANSWER):
        said.append("the text of answers is not read as it is rendered")
    if reasoning:
        thought = probe.read({"content": ANSWER, "reasoning_content": THOUGHT}, None)
        if thought is None or THOUGHT not in thought.text:
            said.append("the template leaves the reasoning of answers out")
        elif thought.answer.reasoning.strip() != THOUGHT:
            said.append("reasoning is not read as the template writes it")
    if not calls:
        return said
    tools = [PROBED_TOOL]
    if not probe.shows_tools(tools):
        said.append("the template does not show tools to the model")
    call = probe.read(_calling(1), tools)
    if call is None or NAME not in call.text:
        said.append("the template leaves calls of tools out of answers")
    elif not call.answer.tool_calls:
        said.append(CALLS_UNREAD)
    else:
        if _called(call.answer) != [(NAME, _ARGUMENTS)]:
            said.append("arguments of calls are not read as they were rendered")
        elif not call.again:
            said.append("calls that are read and rendered once more become other tokens")
        several = probe.read(_calling(2), tools)
        if several is None or len(several.answer.tool_calls) != 2:
            said.append("an answer has one call of a tool at most")
        beside = probe.read({**_calling(1), "content": ANSWER}, tools)
        if beside is None or beside.answer.content.strip() != ANSWER:
            said.append("text beside calls is left out, or is not read as text")
    return said


class _Read(NamedTuple):
    """An answer as it is rendered, as it is read, and whether that is rendered in the same tokens."""

    text: str
    answer: ParsedAnswer
    again: bool


class _RoundTrip:
    def __init__(self, renderer: Renders, tokenizer: Tokenizer, parse: Parse) -> None:
        self._renderer = renderer
        self._tokenizer = tokenizer
        self._parse = parse

    def read(self, answer: dict[str, Any], tools: Tools | None) -> _Read | None:
        """None where the template does not take it. An answer to a prompt that begins its reasoning has some."""
        try:
            before = self._renderer.prompt([QUESTION], tools, {})
            whole = self._answered(answer, tools)
            if whole[: len(before)] != before:
                thinking = self._answered({"reasoning_content": THOUGHT, **answer}, tools)
                whole = thinking if thinking[: len(before)] == before else whole
        except RenderingError:
            return None
        same = zip(before, whole, strict=False)
        start = next((at for at, (one, other) in enumerate(same) if one != other), min(len(before), len(whole)))
        ids = whole[start:]
        ids = ids[: next((at for at, number in enumerate(ids) if number in self._renderer.stop_token_ids), len(ids))]
        read = self._parse(ids, whole[:start], tools)
        try:
            again = self._answered(read.message(), tools) == whole
        except RenderingError:
            again = False
        return _Read(self._tokenizer.decode(ids, special=True), read, again)

    def _answered(self, answer: dict[str, Any], tools: Tools | None) -> list[int]:
        return self._renderer.answered([QUESTION, {"role": "assistant", **answer}], tools, {})

    def shows_tools(self, tools: Tools | None) -> bool:
        try:
            return NAME in self._tokenizer.decode(self._renderer.prompt([{"role": "user", "content": "?"}], tools, {}))
        except RenderingError:
            return False


def _calling(count: int) -> dict[str, Any]:
    called = {"name": NAME, "arguments": json.dumps(_ARGUMENTS)}
    calls = [{"id": f"call0000{number}", "type": "function", "function": called} for number in range(count)]
    return {"content": None, "tool_calls": calls}


def _called(answer: ParsedAnswer) -> list[tuple[str, Any]]:
    return [(call.name, arguments_of(call.arguments)) for call in answer.tool_calls]
