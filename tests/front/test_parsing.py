"""Answers: the same however their text is cut, no text lost, calls and reasoning as vLLM's parsers find them."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.front.parsing import (
    REASONING_PARSERS,
    TOOL_PARSERS,
    AnswerParser,
    ParsedAnswer,
    ends_in_reasoning,
)
from elastic.front.rendering import TemplateRenderer
from elastic.front.tokenizer import Tokenizer

ADD = '{"name": "add", "arguments": {"a": 1, "b": "é"}}'
BLOCK = f"<tool_call>\n{ADD}\n</tool_call>"
CALL = ("add", '{"a": 1, "b": "é"}')
TOOLS: list[dict[str, Any]] = [{"type": "function", "function": {"name": "add"}}]
PIECES = [
    "<think>",
    "</think>",
    BLOCK,
    "<tool_call>",
    "</tool_call>",
    ADD,
    "\n",
    "  ",
    "a",
    "é b",
    "<",
    "{",
    ";",
    "<think",
]
said = st.lists(st.sampled_from(PIECES), max_size=8).map("".join)


def parser(tools: str, reasoning: str, opened: bool | None = None) -> AnswerParser:
    return AnswerParser(
        REASONING_PARSERS[reasoning](opened) if reasoning else None,
        TOOL_PARSERS[tools](TOOLS) if tools else None,
        b"seed",
    )


def parsed(text: str, tools: str = "hermes", reasoning: str = "qwen3", opened: bool | None = False) -> tuple[Any, ...]:
    """Content, reasoning and the calls' names and arguments."""
    found = parser(tools, reasoning, opened).whole(text)
    return found.content, found.reasoning, [(call.name, call.arguments) for call in found.tool_calls]


@given(
    said,
    st.sampled_from(["", *TOOL_PARSERS]),
    st.sampled_from(["", *REASONING_PARSERS]),
    st.sampled_from([None, True, False]),
    st.data(),
)
def test_cut_anywhere_it_is_the_same_answer(
    text: str, tools: str, reasoning: str, opened: bool | None, data: st.DataObject
) -> None:
    whole = parser(tools, reasoning, opened).whole(text)
    found, at, cut = ParsedAnswer(), 0, parser(tools, reasoning, opened)
    while at < len(text):
        step = data.draw(st.integers(1, 5))
        found = found.plus(cut.feed(text[at : at + step]))
        at += step
    assert found.plus(cut.finish()) == whole


@given(said, st.sampled_from(["", *TOOL_PARSERS]), st.sampled_from(["", *REASONING_PARSERS]))
def test_no_text_is_lost(text: str, tools: str, reasoning: str) -> None:
    """But for blank space and markers, everything is somewhere."""
    found = parser(tools, reasoning).whole(text)
    everything = found.reasoning + found.content + ADD * len(found.tool_calls)

    def bare(said: str) -> str:
        for marker in ("<think>", "</think>", "<tool_call>", "</tool_call>", ";"):
            said = said.replace(marker, "")
        return "".join(sorted("".join(said.split())))

    assert bare(everything) == bare(text)


def test_without_parsers_an_answer_is_its_text() -> None:
    text = "<think>\nHm</think> " + BLOCK + "\n"
    assert parsed(text, "", "") == (text, "", [])


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("Yes.\n", ("Yes.\n", "", [])),
        (f"Let me see.\n{BLOCK}", ("Let me see.", "", [CALL])),
        (f"{BLOCK}\n{BLOCK}\n", ("", "", [CALL, CALL])),
        (f"A\n{BLOCK}\nB", ("AB", "", [CALL])),
        (f"<tool_call>{ADD}", ("", "", [CALL])),
        (f"<tool_call>\n{ADD[:-3]}", (f"<tool_call>\n{ADD[:-3]}", "", [])),
        (f"<tool_call>\nno\n</tool_call>{BLOCK}", ("<tool_call>\nno\n</tool_call>", "", [CALL])),
        ('<tool_call>{"name": 5, "arguments": {}}</tool_call>', None),
        ('<tool_call>{"name": "", "arguments": {}}</tool_call>', None),
        ('<tool_call>{"name": "f", "arguments": "x"}</tool_call>', None),
        ('<tool_call>["f"]</tool_call>', None),
        ("<tool_call>" + "[" * 100_000 + "</tool_call>", None),
        ('<tool_call>{"name": "f"}</tool_call>', ("", "", [("f", "{}")])),
        ("<tool", ("<tool", "", [])),
        ('<tool_call>{"name": "f", "arguments": {"x": NaN}}</tool_call>', None),
        ('<tool_call>{"name": "f", "arguments": {"x": 1e999}}</tool_call>', None),
        ('<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>', None),
        ('<tool_call>{"name": "f", "arguments": {"\\ud800": 1}}</tool_call>', ("", "", [("f", '{"\\ud800": 1}')])),
    ],
)
def test_hermes(text: str, found: Any) -> None:
    assert parsed(text) == (found or (text, "", []))


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (ADD, ("", "", [CALL])),
        (f"<|python_tag|>{ADD}; {ADD}", ("", "", [CALL, CALL])),
        (' {"name": "f", "parameters": {"x": 1}}\n', ("", "", [("f", '{"x": 1}')])),
        (f"Sure: {ADD}", (f"Sure: {ADD}", "", [])),
        ('{"answer": 42}', ('{"answer": 42}', "", [])),
        (f"{ADD} and", (f"{ADD} and", "", [])),
        ("{", ("{", "", [])),
    ],
)
def test_llama3_json(text: str, found: Any) -> None:
    assert parsed(text, "llama3_json", "") == found


SEARCH = {
    "name": "search",
    "parameters": {
        "type": "object",
        "properties": {
            "text": {"type": "string"},
            "most": {"type": "integer"},
            "exact": {"type": "boolean"},
            "of": {"type": ["array", "null"]},
        },
    },
}


@pytest.mark.parametrize(
    ("body", "arguments"),
    [
        ("<function=search>\n<parameter=text>\n12\n</parameter>\n</function>", {"text": "12"}),
        (
            "<function=search><parameter=most>12</parameter>\n<parameter=exact>\nTrue\n</parameter></function>",
            {"most": 12, "exact": True},
        ),
        ('<function=search><parameter=of>[1, "a"]</parameter></function>', {"of": [1, "a"]}),
        ("<function=search><parameter=of>null</parameter></function>", {"of": None}),
        ("<function=search><parameter=most>many</parameter></function>", {"most": "many"}),
        ("<function=search><parameter=text>a\n\n<b></parameter></function>", {"text": "a\n\n<b>"}),
        ("<function=search><parameter=new>7</parameter></function>", {"new": "7"}),
        ("<function=search>\n</function>", {}),
        ("<function=search><parameter=text>cut", None),
        ("<function=search>and more</function>", None),
        ("search", None),
        ("<function=>", None),
    ],
)
def test_qwen3_coder(body: str, arguments: Any) -> None:
    text = f"So.\n<tool_call>\n{body}\n</tool_call>"
    found = AnswerParser(None, TOOL_PARSERS["qwen3_coder"]([{"type": "function", "function": SEARCH}]), b"").whole(text)
    assert found.content == ("So." if arguments is not None else text)
    assert [json.loads(call.arguments) for call in found.tool_calls] == ([] if arguments is None else [arguments])


@pytest.mark.parametrize(
    ("text", "opened", "found"),
    [
        ("<think>\nHm.\n</think>\n\nYes.", False, ("Yes.", "Hm.", [])),
        ("\n<think>Hm.</think>Yes.\n", False, ("Yes.\n", "Hm.", [])),
        ("Hm.\n</think>\nYes.", True, ("Yes.", "Hm.", [])),
        ("Hm.\n</think>\nYes.", None, ("Yes.", "Hm.", [])),
        ("Yes.", False, ("Yes.", "", [])),
        ("Yes.", None, ("Yes.", "", [])),
        ("Hm. Hm", True, ("", "Hm. Hm", [])),
        ("\n \n", False, ("\n \n", "", [])),
        ("<thi", None, ("<thi", "", [])),
        ("<think>Hm. </thi", False, ("", "Hm. </thi", [])),
        ("Yes </think> no", False, ("Yes </think> no", "", [])),
        ("<think>\n\n</think>\n\nYes.", False, ("Yes.", "", [])),
        (f"<think>{BLOCK}</think>Yes.", False, ("Yes.", BLOCK, [])),
        (f"<think>Hm.</think>\n\n{BLOCK}", False, ("", "Hm.", [CALL])),
    ],
)
def test_qwen3(text: str, opened: bool | None, found: Any) -> None:
    assert parsed(text, opened=opened) == found


def test_an_answer_of_r1_begins_with_reasoning() -> None:
    assert parsed("Hm.", reasoning="deepseek_r1", opened=None) == ("", "Hm.", [])
    assert parsed("<think>Hm.</think>Yes.", reasoning="deepseek_r1", opened=True) == ("Yes.", "Hm.", [])
    assert parsed("Yes.", reasoning="deepseek_r1", opened=False) == ("Yes.", "", [])


def test_whether_a_prompt_leaves_off_within_reasoning() -> None:
    assert ends_in_reasoning("<|im_start|>assistant\n<think>\n")
    assert not ends_in_reasoning("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert not ends_in_reasoning("say <think><|im_end|>\n<|im_start|>assistant\n")
    assert not ends_in_reasoning("")


def test_ids_of_calls_are_the_same_whenever_an_answer_is_parsed(tiny: Tokenizer) -> None:
    renderer = TemplateRenderer(tiny, "hermes", "qwen3")
    prompt = renderer.prompt([{"role": "user", "content": "hi"}], TOOLS, {})
    ids = tiny.encode(f"<think>Hm.</think>{BLOCK}\n{BLOCK}<|im_end|>", special=True)
    answer = renderer.parse(ids, prompt, TOOLS, turn="1/0/0/3")
    reader = renderer.reader(prompt, TOOLS, turn="1/0/0/3")
    streamed = ParsedAnswer()
    for number in ids:
        streamed = streamed.plus(reader.feed([number]))
    assert streamed.plus(reader.finish()) == answer
    names = [call.id for call in answer.tool_calls]
    others = [renderer.parse(ids, prompt, TOOLS, turn=turn).tool_calls[0].id for turn in ("1/0/0/4", "1/0/1/3", "")]
    assert len({*names, *others}) == 5
    assert renderer.parse(ids, prompt, TOOLS) == renderer.parse(ids, prompt, TOOLS)
    assert renderer.parse(ids, prompt, None).tool_calls == ()
    assert renderer.parse([], prompt, TOOLS, text="Yes.").content == "Yes."


def test_an_answer_as_a_message(tiny: Tokenizer) -> None:
    renderer = TemplateRenderer(tiny, "hermes", "qwen3")
    message = renderer.parse(tiny.encode(f"<think>Hm.</think>{BLOCK}", special=True), [], TOOLS, turn="t").message()
    assert message["content"] is None
    assert message["reasoning_content"] == "Hm."
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"a": 1, "b": "é"}
    assert renderer.parse(tiny.encode("Yes."), [], TOOLS).message() == {"role": "assistant", "content": "Yes."}


def test_whether_anything_is_parsed(tiny: Tokenizer) -> None:
    plain = TemplateRenderer(tiny)
    assert (plain.plain(True), plain.plain(False), plain.reads_calls) == (True, True, False)
    tools = TemplateRenderer(tiny, "hermes")
    assert (tools.plain(True), tools.plain(False), tools.reads_calls) == (False, True, True)
    assert not TemplateRenderer(tiny, reasoning_parser="qwen3").plain(False)
