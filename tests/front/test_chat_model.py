"""The real chat model's tokenizer and template, as `make chat-model` makes them: tokens as transformers have them."""

import os
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.front.rendering.renderer import TemplateRenderer
from elastic.front.rendering.tokenizer import Tokenizer

pytestmark = pytest.mark.clients

DIRECTORY = Path(os.environ.get("ELASTIC_CHAT_MODEL", Path(__file__).parents[2] / ".cache/chat-model"))
ODD = ["<|im_end|>", "<|endoftext|>", "  12 apples\n\n", "def f(x):\n\treturn x"]
texts = st.text(max_size=40) | st.sampled_from(ODD)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(DIRECTORY)


@pytest.fixture(scope="module")
def theirs() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(DIRECTORY)


@given(text=texts)
def test_text_is_encoded_as_by_transformers(tokenizer: Tokenizer, theirs: Any, text: str) -> None:
    ids = tokenizer.encode(text)
    assert ids == theirs.encode(text, add_special_tokens=False, split_special_tokens=True)
    assert not set(ids) & (set(tokenizer.special) - {theirs.unk_token_id})
    assert tokenizer.encode(text, special=True) == theirs.encode(text)
    decoder = tokenizer.decoder()
    assert "".join(decoder.feed([number]) for number in ids) + decoder.finish() == tokenizer.decode(ids)
    assert tokenizer.decode(ids, special=True) == theirs.decode(ids)


@given(contents=st.lists(texts.filter(lambda text: "<|" not in text), min_size=1, max_size=5))
def test_chats_are_rendered_as_by_transformers(tokenizer: Tokenizer, theirs: Any, contents: list[str]) -> None:
    messages = [
        {"role": "assistant" if number % 2 else "user", "content": content} for number, content in enumerate(contents)
    ]
    there = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert TemplateRenderer(tokenizer).prompt(messages, None, {}) == there


@given(draw=st.randoms(use_true_random=False))
def test_a_conversation_is_gone_on_with_token_for_token(tokenizer: Tokenizer, draw: random.Random) -> None:
    renderer = TemplateRenderer(tokenizer)
    messages: list[dict[str, Any]] = [{"role": "user", "content": "What is 7 + 5?"}]
    ids = renderer.prompt(messages, None, {})
    for _ in range(4):
        sampled = [draw.randrange(20, tokenizer.vocab_size) for _ in range(draw.randrange(6))]
        sampled += tokenizer.eos_token_ids[:1] * draw.randrange(2)
        messages += [renderer.parse(sampled, ids, None).message(), {"role": "user", "content": "And more?"}]
        so_far = ids + sampled
        more = renderer.more(messages, len(messages) - 1, None, {}, so_far, len(sampled))
        assert more is not None
        assert renderer.prompt(messages, None, {})[-len(more) :] == more
        ids = so_far + more


def test_calls_of_tools_are_text_of_ordinary_tokens(tokenizer: Tokenizer) -> None:
    """The model has no tokens for calls; what it writes comes back as it was sampled."""
    renderer = TemplateRenderer(tokenizer, "hermes", "qwen3")
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    messages: list[dict[str, Any]] = [{"role": "user", "content": "What is 7 + 5?"}]
    ids = renderer.prompt(messages, tools, {})
    wrote = '<think>Hm.</think>\n<tool_call>\n{"name": "add", "arguments": {"a":7, "b":5}}\n</tool_call>'
    sampled = [*tokenizer.encode(wrote), *tokenizer.eos_token_ids[:1]]
    reader = renderer.reader(ids, tools, "t")
    pieces = [reader.parser.feed(reader.decoder.feed([number])) for number in sampled]
    answer = renderer.parse(sampled, ids, tools, turn="t")
    assert sum(len(piece.tool_calls) for piece in pieces) > 3
    assert [(call.name, call.arguments) for call in answer.tool_calls] == [("add", '{"a":7, "b":5}')]
    assert (answer.content, answer.reasoning) == ("", "Hm.")
    message = answer.message()
    message.pop("reasoning_content")
    messages += [message, {"role": "tool", "tool_call_id": answer.tool_calls[0].id, "content": "<|im_end|>12"}]
    more = renderer.more(messages, 2, tools, {}, ids + sampled, len(sampled))
    assert more is not None
    assert tokenizer.decode(more, special=True) == (
        "\n<|im_start|>tool\n<|im_end|>12<|im_end|>\n<|im_start|>assistant\n"
    )
    assert more.count(tokenizer.eos_token_ids[0]) == 1
