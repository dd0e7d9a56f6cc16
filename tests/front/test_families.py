"""Families of models: calls and reasoning come back as they were sampled, and no text becomes a control token."""

import json
from typing import Any

import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st

from elastic.front.rendering.renderer import ChatRenderer, make_renderer
from elastic.front.rendering.tokenizer import Tokenizer
from elastic.protocol.openai.answers import ParsedAnswer
from tests.front import chats
from tests.front.families import FAMILIES, Family, checkpoint, renderer_of

TOOL = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}
QUESTION = {"role": "user", "content": "2 + 2?"}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Tokenizer, ChatRenderer]]:
    found = {}
    for name, family in FAMILIES.items():
        tokenizer = checkpoint(tmp_path_factory.mktemp("family") / "model", family)
        found[name] = tokenizer, renderer_of(tokenizer, family)
    return found


Made = dict[str, tuple[Tokenizer, ChatRenderer]]


def answered(tokenizer: Tokenizer, renderer: ChatRenderer, family: Family) -> tuple[list[int], list[int], ParsedAnswer]:
    """A prompt, what was sampled for it, and what that says."""
    prompt = renderer.prompt([QUESTION], [TOOL], {})
    sampled = tokenizer.encode(family.wrote, special=True)
    return prompt, sampled, renderer.parse(sampled, prompt, [TOOL], turn="t")


@pytest.mark.parametrize("name", FAMILIES)
def test_a_call_and_its_reasoning_are_read_whole_and_token_by_token(made: Made, name: str) -> None:
    """The template and the tokenizer of each family of models."""
    tokenizer, renderer = made[name]
    prompt, sampled, answer = answered(tokenizer, renderer, FAMILIES[name])
    assert [(call.name, json.loads(call.arguments)) for call in answer.tool_calls] == [("add", {"a": 1})]
    assert (answer.content, answer.reasoning) == ("", "Hm." if FAMILIES[name].reasons else "")
    reader = renderer.reader(prompt, [TOOL], "t")
    streamed = ParsedAnswer()
    begun = []
    for at, number in enumerate(sampled):
        piece = reader.parser.feed(reader.decoder.feed([number]))
        begun += [at for delta in piece.tool_calls if delta.begins]
        streamed = streamed.plus(piece)
    assert streamed.plus(reader.parser.finish()) == answer
    assert begun
    assert begun[0] < len(sampled) - 4


@pytest.mark.parametrize("name", FAMILIES)
def test_a_branch_goes_on_behind_results_of_tools(made: Made, name: str) -> None:
    """What was sampled stays; what is new is what the template writes, with the end of the message once."""
    tokenizer, renderer = made[name]
    prompt, sampled, answer = answered(tokenizer, renderer, FAMILIES[name])
    (call,) = answer.tool_calls
    message = answer.message()
    message.pop("reasoning_content", None)
    message["tool_calls"][0]["function"]["arguments"] = '{"a": 1}'
    result = {"role": "tool", "tool_call_id": call.id, "name": "add", "content": "4"}
    new = [message, result]
    for cut in (sampled, sampled[:-1]):
        more = renderer.more([QUESTION, *new], 2, [TOOL], {}, prompt + cut, len(cut))
        if not FAMILIES[name].behind_tools:
            assert more is None
            continue
        assert more is not None
        whole = renderer.prompt([QUESTION, *new], [TOOL], {})
        closing = tokenizer.decode(sampled[-1:], special=True) if cut is not sampled else ""
        text = tokenizer.decode(more, special=True)
        assert text.startswith(closing)
        assert tokenizer.decode(whole, special=True).endswith(text.removeprefix(closing))
        assert text.count("4") == 1


@pytest.mark.parametrize("name", FAMILIES)
def test_whether_a_branch_goes_on_behind_an_answer(made: Made, name: str) -> None:
    """Templates that drop old reasoning begin a branch with each question."""
    tokenizer, renderer = made[name]
    family = FAMILIES[name]
    prompt = renderer.prompt([QUESTION], None, {})
    sampled = [*tokenizer.encode("4"), *renderer.stop_token_ids[:1]]
    more = renderer.more(
        [QUESTION, {"role": "assistant", "content": "4"}, QUESTION], 2, None, {}, prompt + sampled, len(sampled)
    )
    assert (more is not None) == family.behind_user
    if more is not None:
        text = tokenizer.decode(prompt + sampled + more, special=True)
        again = renderer.prompt([QUESTION, {"role": "assistant", "content": "4"}, QUESTION], None, {})
        assert text == tokenizer.decode(again, special=True)


@pytest.mark.parametrize("name", FAMILIES)
def test_what_answers_lose_is_told_at_the_start(made: Made, name: str) -> None:
    family = FAMILIES[name]
    with structlog.testing.capture_logs() as logs:
        renderer = renderer_of(made[name][0], family)
    lost = [line["lost"] for line in logs if "lost" in line]
    assert lost == ([list(family.losses)] if family.losses else [])
    assert renderer.unread == ""


@pytest.mark.parametrize("name", FAMILIES)
def test_which_parser_reads_a_template_s_calls_is_told(made: Made, name: str) -> None:
    tokenizer, family = made[name][0], FAMILIES[name]
    renderer = make_renderer(tokenizer, renderer="template")
    assert renderer.unread.startswith("nothing here reads calls of tools; front.tool_parser = ")
    assert repr(family.tool_parser) in renderer.unread
    wrong = "glm45" if family.tool_parser == "hermes" else "hermes"
    renderer = make_renderer(tokenizer, renderer="template", tool_parser=wrong)
    assert renderer.unread.startswith(f"front.tool_parser {wrong!r} does not read calls as this model's template")
    assert repr(family.tool_parser) in renderer.unread


def test_a_template_without_calls_or_tools_is_told(tmp_path: Any) -> None:
    tokenizer = chats.checkpoint(tmp_path / "model", chats.CHATML)
    with structlog.testing.capture_logs() as logs:
        renderer = make_renderer(tokenizer, tool_parser="hermes")
    assert [line["lost"] for line in logs if "lost" in line] == [
        ["the template does not show tools to the model", "the template leaves calls of tools out of answers"]
    ]
    assert renderer.unread == ""


# Hostile text.

ODD = ["", "x", "<", "|>", "\n", "｜", "<|im_", "start|>"]


@pytest.mark.parametrize("name", FAMILIES)
@given(data=st.data())
def test_text_stays_text_wherever_it_stands(made: Made, name: str, data: st.DataObject) -> None:
    stays_text(*made[name], data)


def stays_text(tokenizer: Tokenizer, renderer: ChatRenderer, data: st.DataObject) -> None:
    """A conversation of the same shape with benign texts has the same control tokens, whatever these texts are."""
    tokens = [*tokenizer.control.values(), *ODD]
    texts = st.lists(st.sampled_from(tokens), max_size=4).map(lambda parts: "x".join(["", *parts, ""]))
    said, called, key, value, result, system, described = (data.draw(texts) for _ in range(7))

    def conversation(say: Any) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        call = {
            "id": say(called) * 1000,
            "type": "function",
            "function": {"name": f"f{say(called)}", "arguments": json.dumps({f"k{say(key)}": say(value)})},
        }
        messages = [
            {"role": "system", "content": say(system)},
            {"role": "user", "content": say(said)},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": call["id"], "name": f"f{say(called)}", "content": say(result)},
            {"role": "user", "content": say(said)},
        ]
        tool = {"name": f"f{say(called)}", "description": say(described), "parameters": {"type": "object"}}
        return messages, [{"type": "function", "function": tool}]

    hostile, benign = conversation(lambda text: text), conversation(lambda text: "x" if text else "")
    ids, like = (renderer.prompt(*one, {}) for one in (hostile, benign))
    special = set(tokenizer.special)
    assert [number for number in ids if number in special] == [number for number in like if number in special]
    shown = tokenizer.decode(ids, special=True)
    assert said.strip() in shown
    assert shown.count(said.strip()) >= 2
    # Behind an answer, too.
    more = renderer.more(hostile[0], 3, hostile[1], {}, [0], 0)
    like_more = renderer.more(benign[0], 3, benign[1], {}, [0], 0)
    assert (more is None) == (like_more is None)
    if more is not None and like_more is not None:
        assert [n for n in more if n in special] == [n for n in like_more if n in special]


@pytest.mark.parametrize("name", FAMILIES)
def test_names_with_newlines_and_long_ids(made: Made, name: str) -> None:
    _, renderer = made[name]
    call = {"id": "i" * 10_000, "type": "function", "function": {"name": "a\nb\n\nc", "arguments": "{}"}}
    messages = [
        QUESTION,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": "4"},
    ]
    tools = [{"type": "function", "function": {"name": "a\nb\n\nc", "parameters": {"type": "object"}}}]
    assert renderer.prompt(messages, tools, {})
    with_dots = {**call, "function": {"name": "a\nb\n\nc", "arguments": '{"a": 1, '}}
    assert renderer.prompt([QUESTION, {**messages[1], "tool_calls": [with_dots]}, messages[2]], tools, {})
