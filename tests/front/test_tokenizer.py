"""Tokenizers of checkpoints: what transformers make of a text, no control tokens out of text, text as tokens come."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.front.rendering.tokenizer import ControlTextError, Tokenizer, TokenizerError
from elastic.front.tiny import PLAIN, SPECIAL, VOCABULARY, tokenizer_files, write_tokenizer

MARKS = st.sampled_from([*SPECIAL, *PLAIN, "<|im_", "end|>", "<", "|>", "\ufdd0", "\ue000"])
texts = st.lists(st.text(max_size=6) | MARKS, max_size=6).map("".join)
token_ids = st.lists(st.integers(0, VOCABULARY + 40), max_size=40)
WORDS = ["▁", "▁the", "the", "é", "a", "▁a", "."]


def fallback_files() -> dict[str, str]:
    """A tokenizer of the other sort: words that begin with a mark for the space, and tokens for single bytes."""
    added = {"<unk>": 0, "<s>": 1, "</s>": 2}
    words = [*added, *(f"<0x{byte:02X}>" for byte in range(256)), *WORDS]
    model = {
        "type": "BPE",
        "unk_token": "<unk>",
        "byte_fallback": True,
        "fuse_unk": True,
        "vocab": {word: number for number, word in enumerate(words)},
        "merges": [["▁", "a"]],
    }
    decoders = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    ]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [{"id": number, "content": content, **flags} for content, number in added.items()],
        "normalizer": {
            "type": "Sequence",
            "normalizers": [
                {"type": "Prepend", "prepend": "▁"},
                {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
            ],
        },
        "pre_tokenizer": None,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
        },
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": model,
    }
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "unk_token": "<unk>"}
    return {"tokenizer.json": json.dumps(tokenizer), "tokenizer_config.json": json.dumps(config)}


@pytest.fixture(scope="module")
def fallback(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = tmp_path_factory.mktemp("fallback")
    for name, text in fallback_files().items():
        (directory / name).write_text(text)
    return Tokenizer(directory)


@pytest.fixture(scope="module")
def theirs(tiny_directory: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_directory)


@given(text=texts)
def test_text_is_encoded_as_by_transformers(tiny: Tokenizer, theirs: Any, text: str) -> None:
    plain = not any(control in text for control in tiny.control.values())
    assert not plain or tiny.encode(text) == theirs.encode(text, add_special_tokens=False)
    assert tiny.encode(text, special=True) == theirs.encode(text)
    assert tiny.encode_coded(tiny.coded(text)) == theirs.encode(text, add_special_tokens=False)


@given(text=texts)
def test_text_never_becomes_a_control_token_and_comes_back(tiny: Tokenizer, text: str) -> None:
    ids = tiny.encode(text)
    assert not set(ids) & set(tiny.control)
    assert tiny.decode(ids) == text


@given(ids=token_ids, special=st.booleans())
def test_tokens_are_decoded_as_by_transformers(tiny: Tokenizer, theirs: Any, ids: list[int], special: bool) -> None:
    known = [number for number in ids if number < VOCABULARY]
    assert tiny.decode(ids, special) == theirs.decode(known, skip_special_tokens=not special)


@given(draw=st.randoms(use_true_random=False), ids=token_ids, special=st.booleans())
@pytest.mark.parametrize("name", ["tiny", "fallback"])
def test_text_as_tokens_come_joins_to_the_whole(
    request: pytest.FixtureRequest, name: str, draw: random.Random, ids: list[int], special: bool
) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(name)
    if name == "fallback":
        ids = [number % (tokenizer.vocab_size + 2) for number in ids]
    decoder = tokenizer.decoder(special)
    text, at = "", 0
    while at < len(ids):
        step = draw.randrange(5)
        text += decoder.feed(ids[at : at + step])
        at += step
        assert tokenizer.decode(ids, special).startswith(text)
    assert text + decoder.finish() == tokenizer.decode(ids, special)


def test_bytes_that_spoil_one_another_do_so_over_tokens_that_are_not_shown(fallback: Tokenizer) -> None:
    ids = [fallback.token_id("<0x00>"), next(iter(fallback.special)), fallback.token_id("<0x80>")]
    decoder = fallback.decoder()
    assert "".join(decoder.feed([number]) for number in ids) + decoder.finish() == fallback.decode(ids)


@pytest.mark.parametrize("name", ["tiny", "fallback"])
def test_only_characters_that_are_not_whole_are_held_back(request: pytest.FixtureRequest, name: str) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(name)
    decoder = tokenizer.decoder()
    assert [decoder.feed([number]) for number in tokenizer.encode("a 🎉.")][-1] == ("." if name == "tiny" else "🎉.")
    assert tokenizer.decoder().feed(tokenizer.encode("a")) == "a"


def test_half_of_a_surrogate_pair_is_a_question_mark(tiny: Tokenizer) -> None:
    assert tiny.decode(tiny.encode("a\ud800b")) == "a?b"


def test_what_ends_an_answer(tiny: Tokenizer, fallback: Tokenizer) -> None:
    assert [tiny.token(number) for number in tiny.eos_token_ids] == ["<|im_end|>", "<|endoftext|>"]
    assert fallback.eos_token_ids == (2,)
    assert (tiny.vocab_size, tiny.token(VOCABULARY), tiny.token(0x21)) == (VOCABULARY, "", "!")


def test_plain_prompts_get_what_the_tokenizer_puts_around_them(fallback: Tokenizer) -> None:
    assert fallback.encode("a", special=True) == [1, *fallback.encode("a")]
    assert fallback.encode("a</s>", special=True) == [1, *fallback.encode("a"), 2]
    assert 2 not in fallback.encode("a</s>")


def test_a_tokenizer_that_makes_control_tokens_of_text_is_caught(tmp_path: Path) -> None:
    """Its vocabulary merges characters to what is a special token's name."""
    files = tokenizer_files()
    tokenizer = json.loads(files["tokenizer.json"])
    tokenizer["added_tokens"].append(
        {**tokenizer["added_tokens"][0], "id": tokenizer["model"]["vocab"]["The"], "content": "The"}
    )
    write_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ControlTextError, match="control token 'The'"):
        Tokenizer(tmp_path).encode("The")


def test_tokens_of_the_configuration_are_taken_over(tmp_path: Path) -> None:
    files = tokenizer_files()
    config = json.loads(files["tokenizer_config.json"])
    config["added_tokens_decoder"] = {str(VOCABULARY): {"content": "<|tool|>", "special": True}}
    config["extra_special_tokens"] = ["<tool_call>"]
    write_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer(tmp_path)
    assert (tokenizer.vocab_size, tokenizer.token(VOCABULARY)) == (VOCABULARY + 1, "<|tool|>")
    assert {"<|tool|>", "<tool_call>"} < set(tokenizer.special.values())
    assert "<think>" not in tokenizer.special.values()
    assert "<think>" in tokenizer.control.values()


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("tokenizer.json", None, "tokenizer.json: cannot be read"),
        ("tokenizer.json", "[]", "list; an object is allowed"),
        ("tokenizer.json", "{", "no JSON"),
        ("tokenizer.json", "{}", "no tokenizer"),
        ("tokenizer_config.json", "\udcff", "tokenizer_config.json: cannot be read"),
        ("generation_config.json", "nul", "generation_config.json: no JSON"),
    ],
)
def test_what_is_wrong_with_a_checkpoint_is_named(tmp_path: Path, name: str, text: str | None, said: str) -> None:
    write_tokenizer(tmp_path)
    if text is None:
        (tmp_path / name).unlink()
    else:
        (tmp_path / name).write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(TokenizerError, match=said):
        Tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("folder", "config", "name"),
    [
        ("models--Qwen--Qwen3-0.6B/snapshots/c1899de289a04d12100db370d81485cdf75e47ca", {}, "Qwen/Qwen3-0.6B"),
        ("Qwen/Qwen3-0.6B", {}, ""),
        ("mine", {"_name_or_path": "Qwen/Qwen3-0.6B"}, "Qwen/Qwen3-0.6B"),
        ("mine", {"_name_or_path": "/models/Qwen/Qwen3-0.6B"}, ""),
        ("mine", {"_name_or_path": "./Qwen3-0.6B"}, ""),
        ("mine", {"_name_or_path": 5}, ""),
    ],
)
def test_a_hub_name_is_what_the_checkpoint_says_and_no_directory(
    tmp_path: Path, folder: str, config: dict[str, Any], name: str
) -> None:
    directory = tmp_path / folder
    write_tokenizer(directory)
    (directory / "config.json").write_text(json.dumps(config))
    assert Tokenizer(directory).hub_name == name


def test_a_model_may_have_more_tokens_than_its_tokenizer(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": VOCABULARY + 88}))
    tokenizer = Tokenizer(tmp_path)
    assert tokenizer.vocab_size == VOCABULARY + 88
    assert {tokenizer.token(number) for number in range(VOCABULARY, VOCABULARY + 88)} == {""}
    assert tokenizer.decode(range(VOCABULARY, VOCABULARY + 88), special=True) == ""


def test_templates_of_a_checkpoint(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config["chat_template"] = [{"name": "default", "template": "old"}, {"name": "tool_use", "template": "tools"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    found = Tokenizer(tmp_path).templates
    assert found == {"default": (tmp_path / "chat_template.jinja").read_text(), "tool_use": "tools"}
