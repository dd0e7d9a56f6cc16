"""The real chat model's tokenizer and template, as `make chat-model` makes them: tokens as transformers have them."""

import os
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.front.rendering import TemplateRenderer
from elastic.front.tokenizer import Tokenizer

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
