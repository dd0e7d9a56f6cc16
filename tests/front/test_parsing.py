"""Answers: the same however their text is cut, no text lost, calls and reasoning as vLLM's parsers find them."""

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.front.rendering.incoming import CallPart, Findings, Incoming, Read, Reader
from elastic.front.rendering.parsing import AnswerParser
from elastic.front.rendering.reading import AnswerParsers
from elastic.front.rendering.reasoning_grammars import REASONING_PARSERS, Situation, ends_in_reasoning
from elastic.front.rendering.renderer import NO_PARSER, TemplateRenderer
from elastic.front.rendering.templates import RendererError
from elastic.front.rendering.tokenizer import Tokenizer
from elastic.front.rendering.tool_grammars import TOOL_PARSERS
from elastic.protocol.openai.answers import ParsedAnswer

ADD = '{"name": "add", "arguments": {"a": 1, "b": "é"}}'
BLOCK = f"<tool_call>\n{ADD}\n</tool_call>"
CALL = ("add", '{"a": 1, "b": "é"}')
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "parameters": {
                "type": "object",
                "properties": {
                    "a": {"type": "integer"},
                    "b": {"type": "string"},
                    "exact": {"type": "boolean"},
                    "of": {"type": ["array", "null"]},
                    "most": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
                },
            },
        },
    }
]

QWEN3_CODER = (
    "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\né\n</parameter>\n</function>\n"
    "</tool_call>"
)
GLM45 = (
    "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n<arg_key>b</arg_key>\n<arg_value>é</arg_value>\n"
    "</tool_call>"
)
GLM47 = (
    "<tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value><arg_key>b</arg_key><arg_value>é</arg_value></tool_call>"
)
V3 = '<｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{"a": 1, "b": "é"}\n```<｜tool▁call▁end｜>'
V31 = '<｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 1, "b": "é"}<｜tool▁call▁end｜>'
V3_SECTION = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
DSML = (
    '<｜DSML｜invoke name="add">\n<｜DSML｜parameter name="a" string="false">1</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="b" string="true">é</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
)
DSML_SECTION = ("<｜DSML｜function_calls>\n", "</｜DSML｜function_calls>")
V4_SECTION = ("<｜DSML｜tool_calls>\n", "</｜DSML｜tool_calls>")
HARMONY = '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1, "b": "é"}<|call|>'
FAMILIES = {
    "deepseek_v3": (V3_SECTION[0] + V3 + V3_SECTION[1], V3_SECTION[0] + V3 + "\n" + V3 + V3_SECTION[1]),
    "deepseek_v31": (V3_SECTION[0] + V31 + V3_SECTION[1], V3_SECTION[0] + V31 + V31 + V3_SECTION[1]),
    "deepseek_v32": (DSML_SECTION[0] + DSML + DSML_SECTION[1], DSML_SECTION[0] + DSML + DSML + DSML_SECTION[1]),
    "deepseek_v4": (V4_SECTION[0] + DSML + V4_SECTION[1], V4_SECTION[0] + DSML + DSML + V4_SECTION[1]),
    "glm45": (GLM45, f"{GLM45}\n{GLM45}"),
    "glm47": (GLM47, GLM47 + GLM47),
    "hermes": (BLOCK, f"{BLOCK}\n{BLOCK}"),
    "llama3_json": (ADD.replace("arguments", "parameters"), f"<|python_tag|>{ADD}; {ADD}"),
    "llama4_json": (ADD, f"{ADD}, {ADD}"),
    "openai": (HARMONY, HARMONY + "<|start|>assistant" + HARMONY),
    "qwen3_coder": (QWEN3_CODER, f"{QWEN3_CODER}\n{QWEN3_CODER}"),
    "qwen3_xml": (QWEN3_CODER, f"{QWEN3_CODER}\n{QWEN3_CODER}"),
}
"""One call, and two of them, as each family writes them by its published format."""
SPELLED = [
    *(text for one in FAMILIES.values() for text in one),
    *(marker for tools in TOOL_PARSERS.values() for marker in tools.markers),
    *(marker for reasoning in REASONING_PARSERS.values() for marker in reasoning.markers),
    "<|channel|>final<|message|>",
    "<|start|>assistant<|channel|>analysis<|message|>",
    "<function=add>",
    "</function>",
    "<parameter=b>",
    "</parameter>",
    "<｜DSML｜invoke",
    ' name="add">',
    ADD,
    ADD[:-3],
    "\\",
    '"',
    "{",
    "}",
    "\n",
    "  ",
    "<",
    ";",
    "é",
]
PAIRS = [
    (tools, reasoning)
    for tools in ("", *TOOL_PARSERS)
    for reasoning in ("", *REASONING_PARSERS)
    if not tools or (tools == "openai") == (reasoning == "openai_gptoss")
]


@st.composite
def answers(draw: st.DrawFn) -> str:
    """Texts of markers, of calls, and of words of which each is there once."""
    pieces = draw(st.lists(st.sampled_from([*SPELLED, "word", "word", "word"]), max_size=10))
    return "".join(f"w{number}w" if piece == "word" else piece for number, piece in enumerate(pieces))


def parser(tools: str, reasoning: str, opened: bool | None = None) -> AnswerParser:
    reads = TOOL_PARSERS[tools] if tools else None
    prompt = {None: None, True: "<think>\n", False: "</think>\n\n"}[opened]
    situation = Situation(prompt, reads is not None, "" if reads is None else reads.begin)
    return AnswerParser(
        REASONING_PARSERS[reasoning].grammar(situation) if reasoning else None,
        reads.grammar(TOOLS) if reads is not None and reads.grammar is not None else None,
        b"seed",
    )


def parsed(text: str, tools: str = "hermes", reasoning: str = "qwen3", opened: bool | None = False) -> tuple[Any, ...]:
    """Content, reasoning and the calls' names and arguments."""
    found = parser(tools, reasoning, opened).whole(text)
    return found.content, found.reasoning, [(call.name, call.arguments) for call in found.tool_calls]


def cut(text: str, sizes: list[int]) -> list[str]:
    pieces = []
    for size in sizes:
        pieces.append(text[:size])
        text = text[size:]
    return [*pieces, text]


@given(answers(), st.sampled_from(PAIRS), st.sampled_from([None, True, False]), st.lists(st.integers(1, 7)))
def test_cut_anywhere_it_is_the_same_answer(
    text: str, pair: tuple[str, str], opened: bool | None, sizes: list[int]
) -> None:
    """Joined, what a stream says is what the whole says. Each call is told at once, and by its name at first."""
    whole = parser(*pair, opened).whole(text)
    one = parser(*pair, opened)
    pieces = [one.feed(piece) for piece in cut(text, sizes)] + [one.finish()]
    joined = ParsedAnswer()
    for piece in pieces:
        begun = len(joined.tool_calls)
        for delta in piece.tool_calls:
            if delta.index < begun:
                assert (delta.index, delta.id, delta.name) == (begun - 1, "", "")
            else:
                assert delta.index == begun
                assert delta.id
                assert delta.name
                begun += 1
        joined = joined.plus(piece)
    assert joined == whole


@given(answers(), st.sampled_from(PAIRS), st.sampled_from([None, True, False]))
def test_no_word_is_lost(text: str, pair: tuple[str, str], opened: bool | None) -> None:
    content, reasoning, calls = parsed(text, *pair, opened)
    everything = content + reasoning + "".join(name + arguments for name, arguments in calls)
    assert all(word in everything for word in (f"w{number}w" for number in range(10)) if word in text)


@given(answers(), st.sampled_from(PAIRS))
def test_text_in_which_nothing_is_read_is_content_as_it_stands(text: str, pair: tuple[str, str]) -> None:
    content, reasoning, calls = parsed(text, *pair)
    thinks = "<think>" in text or "</think>" in text or pair[1] == "openai_gptoss"
    if not reasoning and not calls and not (pair[1] and thinks):
        assert content == text


def test_without_parsers_an_answer_is_its_text() -> None:
    text = "<think>\nHm</think> " + BLOCK + "\n"
    assert parsed(text, "", "") == (text, "", [])


# Calls of tools, by family.


@pytest.mark.parametrize("tools", FAMILIES)
def test_each_family_writes_calls_its_own_way(tools: str) -> None:
    reasoning = "openai_gptoss" if tools == "openai" else ""
    one, two = FAMILIES[tools]
    assert parsed(one, tools, reasoning) == ("", "", [CALL])
    assert parsed(f"{two}\n", tools, reasoning) == ("", "", [CALL, CALL])
    if tools not in ("llama3_json", "llama4_json", "openai"):
        assert parsed(f"Let me see.\n\n{one}\nSo.", tools, reasoning) == ("Let me see.So.", "", [CALL])


@pytest.mark.parametrize("tools", FAMILIES)
def test_a_name_comes_first_and_then_arguments_as_they_are_written(tools: str) -> None:
    reasoning = "openai_gptoss" if tools == "openai" else ""
    one = FAMILIES[tools][0].replace("é", "0123456789" * 3)
    reading = parser(tools, reasoning, False)
    seen: list[tuple[str, str]] = []
    """Of each delta: what of the answer had come, and what it said."""
    for at, char in enumerate(one):
        seen += [(one[: at + 1], delta.name or delta.arguments) for delta in reading.feed(char).tool_calls]
    written, name = seen[0]
    assert name == "add"
    assert "0" not in written
    behind = [
        len(written) - written.rindex(said[-1]) for written, said in seen[1:] if said.isdigit() and "0" in written
    ]
    assert len(behind) > 20
    assert max(behind) == 1


@pytest.mark.parametrize("tools", FAMILIES)
def test_a_call_that_is_cut_off_stays_open(tools: str) -> None:
    """Wherever a call is cut: either it is content, or its arguments are the beginning of those that were meant. What
    of it is neither is content."""
    reasoning = "openai_gptoss" if tools == "openai" else ""
    one = FAMILIES[tools][0]
    for size in range(len(one)):
        if any(marker.start() < size < marker.end() for marker in re.finditer(r"</?[^>]*>", one)):
            continue  # most markers are one token
        content, _, calls = parsed(one[:size], tools, reasoning)
        if not calls:
            assert content == one[:size]
            continue
        ((name, arguments),) = calls
        assert name == "add"
        assert one[:size].strip().endswith(content)
        assert CALL[1].startswith(arguments.removesuffix("\\n").rstrip())


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("Yes.\n", ("Yes.\n", "", [])),
        (f"A\n{BLOCK}\nB", ("AB", "", [CALL])),
        (f"<tool_call>{ADD}", ("", "", [CALL])),
        (f"<tool_call>{ADD[:-1]}</tool_call>", ("", "", [CALL])),
        (f"<tool_call>{ADD}}}</tool_call>", ("", "", [CALL])),
        (f"<tool_call>{ADD} and so on</tool_call> B", ("and so on B", "", [CALL])),
        (f"<tool_call>{ADD}\n{BLOCK}", ("", "", [CALL, CALL])),
        (f'<tool_call>{ADD[:-1]}, "id": 7}}</tool_call>', ("", "", [CALL])),
        ('<tool_call>{"arguments": {"a":1}, "name": "f"}</tool_call>', ("", "", [("f", '{"a": 1}')])),
        ('<tool_call>{"name": "f"}</tool_call>', ("", "", [("f", "{}")])),
        (f"<tool_call>\nno\n</tool_call>{BLOCK}", ("<tool_call>\nno\n</tool_call>", "", [CALL])),
        (f"<tool_call>{BLOCK}", ("<tool_call>", "", [CALL])),
        ('<tool_call>{"name": 5, "arguments": {}}</tool_call>', None),
        ('<tool_call>{"name": "", "arguments": {}}</tool_call>', None),
        ('<tool_call>{"name": "f", "arguments": "x"}</tool_call>', None),
        ('<tool_call>["f"]</tool_call>', None),
        ('<tool_call>{"name": "f", "argu', None),
        ('<tool_call>{"name": "\\', None),
        ("<tool_call>" + "[" * 100_000 + "</tool_call>", None),
        ("<tool_call>" + '{"a":' * 100_000 + "</tool_call>", None),
        ("<tool", None),
        ('<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>', None),
        ('<tool_call>{"name": "a\\nb", "arguments": {}}</tool_call>', ("", "", [("a\nb", "{}")])),
    ],
)
def test_hermes(text: str, found: Any) -> None:
    assert parsed(text) == (found or (text, "", []))


@pytest.mark.parametrize(
    "arguments",
    [
        '{"x": NaN}',
        '{"x": 1e999}',
        '{"x": ' + "9" * 10_000 + "}",
        '{"x":1,   "x" : 2.0}',
        '{"\\ud800": "\\u00e9"}',
        '{"x": "</tool_call>", "y": "\\"}{"}',
        '{"x": "\\\\"}',
        '{"x": [1}}',
        "{'x': 1}",
        '{"x": ' * 5000 + "1" + "}" * 5000,
    ],
)
def test_arguments_stay_as_the_model_wrote_them(arguments: str) -> None:
    text = f'<tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call>{BLOCK}'
    assert parsed(text) == ("", "", [("f", arguments), CALL])


@pytest.mark.parametrize("arguments", ['{"x": "a', '{"x": 1', '{"x": ["a"', '{"x": "a\nb'])
def test_arguments_that_are_no_json_end_with_their_block(arguments: str) -> None:
    text = f'<tool_call>{{"name": "f", "arguments": {arguments}\n</tool_call>B'
    assert parsed(text) == ("B", "", [("f", f"{arguments}\n")])


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (ADD, ("", "", [CALL])),
        (f"<|python_tag|>{ADD}; {ADD}", ("", "", [CALL, CALL])),
        (' {"name": "f", "parameters": {"x": 1}}\n', ("", "", [("f", '{"x": 1}')])),
        (f"Sure: {ADD}", (f"Sure: {ADD}", "", [])),
        ('{"answer": 42}', ('{"answer": 42}', "", [])),
        (f"{ADD} and", ("and", "", [CALL])),
        (f"{ADD};{{no}}", (";{no}", "", [CALL])),
        ("<|python_tag|>print(1)", ("<|python_tag|>print(1)", "", [])),
        ("{", ("{", "", [])),
    ],
)
def test_llama3_json(text: str, found: Any) -> None:
    assert parsed(text, "llama3_json", "") == found


@pytest.mark.parametrize(
    ("value", "of", "read"),
    [
        ("12", "b", "12"),
        ("12", "a", 12),
        ("True", "exact", True),
        ('[1, "a"]', "of", [1, "a"]),
        ("null", "of", None),
        ("7", "most", 7),
        ("null", "most", None),
        ("many", "a", "many"),
        ("NaN", "a", "NaN"),
        ("9" * 10_000, "a", "9" * 10_000),
        ('a\n\n<b> "\\', "b", 'a\n\n<b> "\\'),
        ("</tool_call>", "b", "</tool_call>"),
        ("", "b", ""),
    ],
)
@pytest.mark.parametrize("tools", ["qwen3_coder", "glm45"])
def test_values_in_tags_are_read_as_the_schema_types_them(tools: str, value: str, of: str, read: Any) -> None:
    text = (
        f"<tool_call>\n<function=add>\n<parameter={of}>\n{value}\n</parameter>\n</function>\n</tool_call>"
        if tools == "qwen3_coder"
        else f"<tool_call>add\n<arg_key>{of}</arg_key>\n<arg_value>{value}</arg_value>\n</tool_call>"
    )
    content, _, ((name, arguments),) = parsed(text, tools, "")
    assert (content, name, json.loads(arguments)) == ("", "add", {of: read})


@pytest.mark.parametrize(
    ("body", "content", "arguments"),
    [
        (
            "<function=add><parameter=b>12</parameter>\n<parameter=a>\n3</parameter></function>",
            "",
            '{"b": "12", "a": 3}',
        ),
        ("<function=add><parameter=new>7</parameter></function>", "", '{"new": "7"}'),
        ("<function=add><parameter=b>x</parameter><parameter=b>y</parameter></function>", "", '{"b": "x", "b": "y"}'),
        ("<function=add>\n</function>", "", "{}"),
        ("<function=add>\n<parameter=a>1</parameter>", "", '{"a": 1}'),
        ("<function=add><parameter=b>x</parameter>, and\n</function>", ", and", '{"b": "x"}'),
        ("<function=add><parameter=b>cut", "", '{"b": "cut\\n</tool_call>'),
        ("<function=add><parameter=a>12", "", '{"a": 12\n</tool_call>'),
        ("<function=add>and more</function>", None, None),
        ("<function=add", None, None),
        ("add", None, None),
        ("<function=>", None, None),
    ],
)
def test_qwen3_coder(body: str, content: str | None, arguments: str | None) -> None:
    text = f"So.\n<tool_call>\n{body}\n</tool_call>"
    calls = [] if arguments is None else [("add", arguments)]
    assert parsed(text, "qwen3_coder", "") == (text if content is None else f"So.{content}", "", calls)


@pytest.mark.parametrize(
    "block",
    [
        "<tool_call>subtract\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>",
        "<tool_call>add\n<arg_value>1</arg_value>\n</tool_call>",
        "<tool_call>I will call add</tool_call>",
    ],
)
def test_a_block_of_glm_s_that_names_no_tool_is_content(block: str) -> None:
    assert parsed(block, "glm45", "") == (block, "", [])


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (V3_SECTION[0] + "no" + V3_SECTION[1], None),
        (V3_SECTION[0] + V3.replace("{", "", 1) + V3_SECTION[1], None),
        (V3, ("", "", [CALL])),
        (V3_SECTION[0] + V3.removesuffix("<｜tool▁call▁end｜>"), ("", "", [CALL])),
        (V3.replace("}", "} no"), ("no\n```", "", [CALL])),
    ],
)
def test_deepseek_v3(text: str, found: Any) -> None:
    assert parsed(text, "deepseek_v3", "") == (found or (text, "", []))


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("<｜DSML｜invoke>x", None),
        (
            DSML.replace('string="false"', ""),
            ('<｜DSML｜parameter name="a" >1</｜DSML｜parameter>', "", [("add", '{"b": "é"}')]),
        ),
        (DSML.replace("1<", "many<"), ("", "", [("add", '{"a": "many", "b": "é"}')])),
    ],
)
def test_deepseek_v32(text: str, found: Any) -> None:
    assert parsed(text, "deepseek_v32", "") == (found or (text, "", []))


# Reasoning.


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
        (f"<think>Hm.\n{BLOCK}", False, ("", "Hm.", [CALL])),
        (f"Hm.\n{BLOCK}", True, ("", "Hm.", [CALL])),
    ],
)
def test_qwen3(text: str, opened: bool | None, found: Any) -> None:
    assert parsed(text, opened=opened) == found


def test_an_answer_of_r1_begins_with_reasoning() -> None:
    assert parsed("Hm.", reasoning="deepseek_r1", opened=None) == ("", "Hm.", [])
    assert parsed("<think>Hm.</think>Yes.", reasoning="deepseek_r1", opened=True) == ("Yes.", "Hm.", [])
    assert parsed("Yes.", reasoning="deepseek_r1", opened=False) == ("Yes.", "", [])


ANALYSIS = "<|channel|>analysis<|message|>Hm.<|end|>"
FINAL = "<|start|>assistant<|channel|>final<|message|>Yes."


@pytest.mark.parametrize(
    ("text", "prompt", "found"),
    [
        (ANALYSIS + FINAL, "<|start|>assistant", ("Yes.", "Hm.", [])),
        ("Hm.<|end|>" + FINAL, "<|start|>assistant<|channel|>analysis<|message|>", ("Yes.", "Hm.", [])),
        (ANALYSIS + "<|start|>assistant" + HARMONY, None, ("", "Hm.", [CALL])),
        (" to=functions.add<|channel|>commentary json<|message|>{}<|call|>", None, ("", "", [("add", "{}")])),
        (
            ANALYSIS + FINAL.replace("final", "commentary") + "<|end|><|start|>assistant" + HARMONY,
            None,
            ("Yes.", "Hm.", [CALL]),
        ),
        ("Yes.", None, ("Yes.", "", [])),
        ("<|channel|>analy", None, ("<|channel|>analy", "", [])),
        ("<|channel|>analysis<|message|> Hm", None, ("", "Hm", [])),
        (HARMONY[:-9], None, ("", "", [("add", '{"a": 1, "b": "é"')])),
        ("<|channel|>commentary to=python<|message|>1", None, ("<|channel|>commentary to=python<|message|>1", "", [])),
        (
            "<|channel|>commentary to=functions.add<|message|>no",
            None,
            ("<|channel|>commentary to=functions.add<|message|>no", "", []),
        ),
        ("<|channel|>final, I say<|message|>Yes.", None, ("<|channel|>final, I say<|message|>Yes.", "", [])),
    ],
)
def test_harmony(text: str, prompt: str | None, found: Any) -> None:
    grammar = REASONING_PARSERS["openai_gptoss"].grammar(Situation(prompt, calls=True))
    read = AnswerParser(grammar, None, b"").whole(text)
    assert (read.content, read.reasoning, [(call.name, call.arguments) for call in read.tool_calls]) == found
    unread = AnswerParser(REASONING_PARSERS["openai_gptoss"].grammar(Situation(prompt)), None, b"").whole(text)
    assert not unread.tool_calls
    assert all(name in unread.content and arguments in unread.content for name, arguments in found[2])


def test_parsers_of_gpt_oss_go_together(tiny: Tokenizer) -> None:
    assert AnswerParsers(tiny, "openai", "").reads_reasoning
    assert not AnswerParsers(tiny, "openai", "").plain(False)
    for tools, reasoning in (("openai", "qwen3"), ("hermes", "openai_gptoss")):
        with pytest.raises(RendererError, match=f"front.reasoning_parser: '{reasoning}' does not go with"):
            AnswerParsers(tiny, tools, reasoning)


def test_whether_a_prompt_leaves_off_within_reasoning() -> None:
    assert ends_in_reasoning("<|im_start|>assistant\n<think>\n")
    assert not ends_in_reasoning("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert not ends_in_reasoning("say <think><|im_end|>\n<|im_start|>assistant\n")
    assert not ends_in_reasoning("")


# Of tokens.


def test_ids_of_calls_are_the_same_whenever_an_answer_is_parsed(tiny: Tokenizer) -> None:
    renderer = TemplateRenderer(tiny, "hermes", "qwen3")
    prompt = renderer.prompt([{"role": "user", "content": "hi"}], TOOLS, {})
    ids = tiny.encode(f"<think>Hm.</think>{BLOCK}\n{BLOCK}<|im_end|>", special=True)
    answer = renderer.parse(ids, prompt, TOOLS, turn="1/0/0/3")
    reader = renderer.reader(prompt, TOOLS, turn="1/0/0/3")
    streamed = ParsedAnswer()
    for number in ids:
        streamed = streamed.plus(reader.parser.feed(reader.decoder.feed([number])))
    assert streamed.plus(reader.parser.finish()) == answer
    names = [call.id for call in answer.tool_calls]
    others = [renderer.parse(ids, prompt, TOOLS, turn=turn).tool_calls[0].id for turn in ("1/0/0/4", "1/0/1/3", "")]
    assert len({*names, *others}) == 5
    assert renderer.parse(ids, prompt, TOOLS) == renderer.parse(ids, prompt, TOOLS)
    assert renderer.parse(ids, prompt, None).tool_calls == ()
    assert renderer.parse([], prompt, TOOLS, text="Yes.").content == "Yes."


@given(st.data(), st.sampled_from(PAIRS))
def test_whatever_tokens_come_the_stream_says_what_the_whole_says(
    tiny: Tokenizer, data: st.DataObject, pair: tuple[str, str]
) -> None:
    """Bytes that are no text, tokens beyond the vocabulary, special ones."""
    pieces = [
        *(tiny.encode(text) for text in (BLOCK, QWEN3_CODER, GLM47, HARMONY)),
        *([number] for number in range(0, 600, 7)),
    ]
    ids = [number for piece in data.draw(st.lists(st.sampled_from(pieces), max_size=8)) for number in piece]
    parsers = AnswerParsers(tiny, *pair)
    reader = parsers.reader([], TOOLS, "t")
    joined = ParsedAnswer()
    for number in ids:
        joined = joined.plus(reader.parser.feed(reader.decoder.feed([number])))
    joined = joined.plus(reader.parser.feed(reader.decoder.finish())).plus(reader.parser.finish())
    assert joined == parsers.reader([], TOOLS, "t").whole(ids)


def test_blank_space_without_end_takes_no_longer_than_its_length() -> None:
    for tools, reasoning in PAIRS:
        parser(tools, reasoning, True).whole(" " * 300_000 + "x")


class CountedText(Incoming):
    """Counts what is given back, to be read again."""

    again = 0

    def back(self) -> None:
        before = self.taken
        super().back()
        self.again += before - self.taken


BLOCKS = [name for name, tools in TOOL_PARSERS.items() if tools.begin]


@pytest.mark.parametrize("tools", BLOCKS)
@pytest.mark.parametrize("end", ["", "</tool_call>", "<｜tool▁call▁end｜>", "\n"])
def test_calls_that_only_begin_take_no_longer_than_their_length(tools: str, end: str) -> None:
    begins = ("<tool_call>", "<｜tool▁call▁begin｜>", "<｜DSML｜invoke")
    call = next(marker for marker in begins if marker in FAMILIES[tools][0])

    def read_again(count: int) -> float:
        """How often a character is read again, on average."""
        grammar = TOOL_PARSERS[tools].grammar
        assert grammar is not None
        text, found, begun = CountedText(), Findings(), (call + "{") * count + end
        text.add(begun)
        text.end()
        assert next(grammar(TOOLS)(text, found), "over") == "over"
        found.end()
        assert found.taken() == Read(begun)
        return text.again / len(begun)

    assert read_again(4_000) <= 2 * read_again(1_000) + 1


@given(st.sampled_from(BLOCKS), st.integers(15, 40), st.lists(st.integers(1, 99)), st.booleans())
def test_calls_that_only_begin_are_the_same_however_they_are_cut(
    tools: str, count: int, sizes: list[int], closed: bool
) -> None:
    one, (call, calls) = TOOL_PARSERS[tools], FAMILIES[tools]
    begun = (call[: call.index("add")].removesuffix('"name": "') * count) + "}</tool_call>" * closed + calls
    assert one.grammar is not None
    whole, streamed = Reader(one.grammar(TOOLS)), Reader(one.grammar(TOOLS))
    read = [streamed.feed(piece) for piece in cut(begun, sizes)] + [streamed.finish()]
    expected = [whole.feed(begun), whole.finish()]
    assert said(read) == said(expected)


def said(parts: list[Read]) -> tuple[str, list[CallPart]]:
    """The content, and the calls with their arguments joined."""
    calls: list[CallPart] = []
    for part in (part for read in parts for part in read.calls):
        if part.name:
            calls.append(part)
        else:
            calls[-1] = CallPart(calls[-1].name, calls[-1].arguments + part.arguments)
    return "".join(read.content for read in parts), calls


def test_half_of_a_character_is_shown_once_it_is_whole_or_at_the_end(tiny: Tokenizer) -> None:
    renderer = TemplateRenderer(tiny, "hermes", "qwen3")
    ids = tiny.encode(f"<think>é</think>{BLOCK}🎉", special=True)
    for size in range(len(ids)):
        reader = renderer.reader([], TOOLS, turn="t")
        shown = [reader.parser.feed(reader.decoder.feed([number])) for number in ids[:size]]
        assert not any("\ufffd" in str(piece) for piece in shown)
        whole = renderer.parse(ids[:size], [], TOOLS, turn="t")
        rest = reader.parser.feed(reader.decoder.finish()).plus(reader.parser.finish())
        joined = ParsedAnswer()
        for piece in [*shown, rest]:
            joined = joined.plus(piece)
        assert joined == whole


def test_an_answer_as_a_message(tiny: Tokenizer) -> None:
    renderer = TemplateRenderer(tiny, "hermes", "qwen3")
    message = renderer.parse(tiny.encode(f"<think>Hm.</think>{BLOCK}", special=True), [], TOOLS, turn="t").message()
    assert message["content"] is None
    assert message["reasoning_content"] == "Hm."
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"a": 1, "b": "é"}
    assert renderer.parse(tiny.encode("Yes."), [], TOOLS).message() == {"role": "assistant", "content": "Yes."}


def test_whether_anything_is_parsed(tiny: Tokenizer) -> None:
    plain = TemplateRenderer(tiny)
    assert (plain.plain(True), plain.plain(False), plain.unread) == (True, True, NO_PARSER)
    tools = TemplateRenderer(tiny, "hermes")
    assert (tools.plain(True), tools.plain(False), tools.unread) == (False, True, "")
    assert not TemplateRenderer(tiny, reasoning_parser="qwen3").plain(False)
