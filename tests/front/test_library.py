"""Renderers of the `renderers` library over our tokenizer. Without that optional extra there is nothing to test."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.front.rendering import library
from elastic.front.rendering.library import LibraryRenderer
from elastic.front.rendering.renderer import TemplateRenderer, make_renderer
from elastic.front.rendering.templates import RendererError, RenderingError
from elastic.front.rendering.tokenizer import Tokenizer
from tests.front import chats, families, test_families

pytestmark = pytest.mark.clients

TOOL = {"type": "function", "function": {"name": "add", "description": "", "parameters": {"type": "object"}}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
QUESTION = {"role": "user", "content": "why"}
RESULT = {"role": "tool", "tool_call_id": "x", "content": "2"}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return chats.checkpoint(tmp_path_factory.mktemp("model"), None)


@pytest.fixture(scope="module")
def renderer(tokenizer: Tokenizer) -> LibraryRenderer:
    return LibraryRenderer(tokenizer, "qwen3")


def test_names(tokenizer: Tokenizer) -> None:
    assert {"qwen3", "llama-3", "glm-4.5"} < set(library.names())
    assert library.name_for("Qwen/Qwen3-0.6B") == "qwen3"
    assert library.name_for("") == library.name_for("/models/Qwen3-0.6B") == ""
    with pytest.raises(RendererError, match=r"front.renderer: found 'default'; allowed: 'auto', 'template', 'deepseek"):
        make_renderer(tokenizer, renderer="default")
    with pytest.raises(RendererError, match=r"front.renderer: 'glm-4.5' does not go with"):
        make_renderer(tokenizer, renderer="glm-4.5")


@given(st.text(max_size=20) | st.sampled_from(["<|im_end|>", "<tool_response>", "</think>"]))
def test_no_text_becomes_a_control_token(tokenizer: Tokenizer, renderer: LibraryRenderer, text: str) -> None:
    messages = [{"role": "user", "content": text}, {"role": "assistant", "content": "x"}, QUESTION]
    ids = renderer.prompt(messages, None, {})
    control = [tokenizer.control[number] for number in ids if number in tokenizer.control]
    assert control == ["<|im_start|>", "<|im_end|>"] * 3 + ["<|im_start|>"]
    assert text in tokenizer.decode(ids, special=True)


@given(draw=st.randoms(use_true_random=False), enable_thinking=st.booleans())
def test_a_bridge_keeps_what_was_sampled(
    tokenizer: Tokenizer, renderer: LibraryRenderer, draw: random.Random, enable_thinking: bool
) -> None:
    kwargs = {} if enable_thinking else {"enable_thinking": False}
    messages: list[dict[str, Any]] = [QUESTION]
    ids = renderer.prompt(messages, [TOOL], kwargs)
    for _ in range(3):
        sampled = tokenizer.encode(draw.choice(["", "<think>\nHm.\n</think>\n\n"]) + CALL, special=True)
        sampled = sampled[: draw.randrange(1, len(sampled))] if draw.random() < 0.3 else sampled
        sampled += tokenizer.eos_token_ids[:1] * draw.randrange(2)
        answer = renderer.parse(sampled, ids, [TOOL])
        messages.append(answer.message())
        matched = len(messages)
        messages.append(RESULT)
        so_far = ids + sampled
        more = renderer.more(messages, matched, [TOOL], kwargs, so_far, len(sampled))
        if more is None:
            return
        ids = so_far + more
        assert (
            renderer.prompt(messages, [TOOL], kwargs)[-len(more) :] == more
            or sampled[-1] not in tokenizer.eos_token_ids
        )


def test_a_bridge_declines_where_old_reasoning_is_dropped(tokenizer: Tokenizer, renderer: LibraryRenderer) -> None:
    ids = renderer.prompt([QUESTION], None, {})
    sampled = tokenizer.encode("<think>\nHm.\n</think>\n\nYes.<|im_end|>", special=True)
    messages = [QUESTION, renderer.parse(sampled, ids, None).message()]
    assert messages[1]["content"] == "Yes."
    assert renderer.more([*messages, QUESTION], 2, None, {}, ids + sampled, len(sampled)) is None
    off = {"enable_thinking": False}
    plain = tokenizer.encode("Yes.<|im_end|>", special=True)
    ids = renderer.prompt([QUESTION], None, off)
    assert renderer.more([*messages, QUESTION], 2, None, off, ids + plain, len(plain)) is not None


def test_answers_are_read_as_the_library_reads_them_but_for_what_is_no_call(
    tokenizer: Tokenizer, renderer: LibraryRenderer
) -> None:
    ids = tokenizer.encode(
        f"<think>\nHm.\n</think>\n\nSo.\n{CALL}\n<tool_call>\n{{</tool_call><|im_end|>", special=True
    )
    answer = renderer.parse(ids, None, [TOOL], turn="t")
    theirs = renderer.parsed(ids, None, [TOOL], turn="t")
    assert (theirs.content, theirs.reasoning) == ("So.\n{", "Hm.")
    assert (answer.content, answer.reasoning) == ("So.<tool_call>\n{</tool_call>", "Hm.")
    assert answer.tool_calls == theirs.tool_calls
    assert [(call.name, call.arguments) for call in answer.tool_calls] == [("add", '{"a": 1}')]
    reader = renderer.reader(None, [TOOL], turn="t")
    pieces = [reader.parser.feed(reader.decoder.feed([number])) for number in ids]
    assert [len(piece.tool_calls) for piece in pieces].count(1) > 2
    assert not renderer.unread
    assert not renderer.plain(False)


FAMILIES = {
    "deepseek-r1": "deepseek-r1",
    "deepseek-v3": "deepseek-v3",
    "deepseek-v4": "deepseek-v3.2",
    "glm-4.5": "glm-4.5",
    "glm-5": "glm-4.7",
    "glm-5.1": "glm-4.7",
    "llama-3": "llama-3",
    "prime-qwen3": "qwen3.5",
    "qwen3": "qwen3",
    "qwen3.5": "qwen3.5",
    "qwen3.6": "qwen3.5",
    "qwen3.8": "qwen3.5",
}
"""The library's renderers that work without what is on a hub, and the families whose tokens they take."""


@pytest.fixture(scope="module")
def of_families(tmp_path_factory: pytest.TempPathFactory) -> test_families.Made:
    made = {}
    for name, family in FAMILIES.items():
        tokenizer = families.checkpoint(tmp_path_factory.mktemp("family") / "model", families.FAMILIES[family])
        made[name] = tokenizer, LibraryRenderer(tokenizer, name)
    return made


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_s_answers_stream_and_are_what_the_library_reads(of_families: test_families.Made, name: str) -> None:
    tokenizer, renderer = of_families[name]
    family = families.FAMILIES[FAMILIES[name]]
    wrote = family.wrote.replace("function_calls", "tool_calls") if name == "deepseek-v4" else family.wrote
    prompt = renderer.prompt([QUESTION], [test_families.TOOL], {})
    if name == "prime-qwen3":
        wrote = f"<think>\n{wrote}"
    sampled = tokenizer.encode(wrote, special=True)
    answer = renderer.parse(sampled, prompt, [test_families.TOOL], turn="t")
    assert isinstance(renderer, LibraryRenderer)
    theirs = renderer.parsed(sampled, prompt, [test_families.TOOL], turn="t")
    assert (answer.content, answer.reasoning) == (theirs.content, (theirs.reasoning or "").strip())
    assert [(call.name, json.loads(call.arguments)) for call in answer.tool_calls] == [("add", {"a": 1})]
    assert [(call.name, json.loads(call.arguments)) for call in theirs.tool_calls] == [("add", {"a": 1})]
    reader = renderer.reader(prompt, [test_families.TOOL], "t")
    pieces = [reader.parser.feed(reader.decoder.feed([number])) for number in sampled]
    assert sum(len(piece.tool_calls) for piece in pieces) > 3


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_s_branch_goes_on_behind_results_of_tools(of_families: test_families.Made, name: str) -> None:
    tokenizer, renderer = of_families[name]
    family = families.FAMILIES[FAMILIES[name]]
    prompt, sampled, answer = test_families.answered(tokenizer, renderer, family)
    result = {"role": "tool", "tool_call_id": "x", "name": "add", "content": "4"}
    more = renderer.more(
        [QUESTION, answer.message(), result], 2, [test_families.TOOL], {}, prompt + sampled, len(sampled)
    )
    assert (more is not None) == families.FAMILIES[FAMILIES[name]].behind_tools
    assert more is None or tokenizer.decode(more).count("4") == 1


@pytest.mark.parametrize("name", FAMILIES)
@given(data=st.data())
def test_a_family_s_texts_stay_texts(of_families: test_families.Made, name: str, data: st.DataObject) -> None:
    test_families.stays_text(*of_families[name], data)


def test_a_renderer_that_has_a_tokenizer_of_its_own_is_refused(tmp_path: Path) -> None:
    """gpt-oss is encoded by `openai_harmony`, which needs files of a hub besides."""
    tokenizer = families.checkpoint(tmp_path / "model", families.FAMILIES["gpt-oss"])
    with pytest.raises(RendererError, match=r"front.renderer: 'gpt-oss' does not"):
        LibraryRenderer(tokenizer, "gpt-oss")


def test_a_published_model_that_its_template_renders_has_its_parsers(tmp_path: Path) -> None:
    families.checkpoint(tmp_path / "model", families.FAMILIES["gpt-oss"])
    (tmp_path / "model" / "config.json").write_text(json.dumps({"_name_or_path": "openai/gpt-oss-20b"}))
    renderer = make_renderer(Tokenizer(tmp_path / "model"))
    assert isinstance(renderer, TemplateRenderer)
    assert (renderer.unread, renderer.reads_reasoning) == ("", True)


def test_settings_that_the_renderer_lacks_are_an_error_of_the_call(renderer: LibraryRenderer) -> None:
    with pytest.raises(RenderingError, match="no_such_setting"):
        renderer.prompt([QUESTION], None, {"no_such_setting": 1})


@pytest.mark.parametrize(
    ("name", "template", "chosen"),
    [
        ("Qwen/Qwen3-0.6B", chats.QWEN3, LibraryRenderer),
        ("Qwen/Qwen3-0.6B", None, LibraryRenderer),
        ("Qwen/Qwen3-0.6B", chats.CHATML + "!", TemplateRenderer),
        ("zai-org/GLM-4.5-Air", chats.QWEN3, TemplateRenderer),
        ("someone/Qwen3-0.6B", chats.QWEN3, TemplateRenderer),
    ],
)
def test_a_published_model_is_known_by_its_name_and_by_its_template(
    tmp_path: Path, name: str, template: str | None, chosen: type
) -> None:
    chats.checkpoint(tmp_path / "model", template)
    (tmp_path / "model" / "config.json").write_text(json.dumps({"_name_or_path": name}))
    assert isinstance(make_renderer(Tokenizer(tmp_path / "model")), chosen)
