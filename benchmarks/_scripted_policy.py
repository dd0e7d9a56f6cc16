"""A policy whose answers are known without training: it calls a tool that it is shown, and says what has come of it.

Its weights are made by hand. Tokens are one-hot, and the head tells what may follow each. Attention looks for three
tokens anywhere before: that tools are shown, that one has answered, and that one of them is called `bash`.

- With no tools, or behind a tool's result, an answer is `WORDS` words, each one of `CHOICES` at random.
- With tools it calls `add` with two random numbers, or `bash` with random words behind `./next`.
"""

import json
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from elastic.engine.model.checkpoint import model_tensors, write_checkpoint
from elastic.engine.model.config import Qwen3Config
from elastic.engine.model.qwen3 import Qwen3
from elastic.front import tiny
from elastic.front.rendering.tokenizer import BYTE_CHARACTERS

BASH, COMMAND = "bash", "./next"
CONSONANTS, VOWELS = "bcdfghklmnprstvz", "aeio"
WORDS, CHOICES = len(CONSONANTS), len(VOWELS)
ADD_HEAD, ADD_MIDDLE, ADD_END = '\n{"name": "add", "arguments": {"a": ', ', "b": ', "}}\n"
BASH_HEAD, BASH_END = '\n{"name": "bash", "arguments": {"command": "./next', '"}}\n'
SAID = [[f" {consonant}{vowel}" for vowel in VOWELS] for consonant in CONSONANTS]
NUMBERS = [[str(10 * place + last) for last in range(CHOICES)] for place in range(1, 7)]
"""Pieces of `a` and `b`, half of them each."""
ARGUMENTS = [[f" {vowel}{consonant}" for vowel in VOWELS] for consonant in CONSONANTS[:6]]

SHOWN, ANSWERED, SHELL = range(3)
"""The states: tools are shown, one has answered, one of them is a shell."""
HEAD_DIM = 32
SLOW = HEAD_DIM // 2 - 1
"""The dimension of queries and keys that positions turn least."""
SHARPNESS = 3.0
FOLLOWS, OTHERWISE = 40.0, 37.0
"""What the head says of a token that follows, and of one that follows only where a state adds to it."""


def extra_words() -> list[str]:
    """The pieces of text that the policy writes, each a token of its own."""
    pieces = [ADD_HEAD, ADD_MIDDLE, ADD_END, BASH_HEAD, BASH_END]
    return [*pieces, *(text for stage in (*SAID, *NUMBERS, *ARGUMENTS) for text in stage)]


def write_scripted_policy(directory: Path) -> Path:
    """Its checkpoint and tokenizer."""
    ids = _write_tokenizer(directory)
    size = len(ids)
    config = Qwen3Config(
        vocab_size=size,
        hidden_size=-(-(size + 4) // 16) * 16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=3,
        num_key_value_heads=3,
        head_dim=HEAD_DIM,
        rope_theta=1e6,
        tie_word_embeddings=False,
    )
    model = Qwen3(config)
    with torch.no_grad():
        _make_weights(model, ids)
    write_checkpoint(directory, config, model_tensors(model))
    return directory


def _write_tokenizer(directory: Path) -> dict[str, int]:
    """The tiny tokenizer with more tokens. Returns all tokens' ids by their text as the vocabulary spells it."""
    files = tiny.tokenizer_files()
    tokenizer, generation = json.loads(files["tokenizer.json"]), json.loads(files["generation_config.json"])
    vocabulary, merges = tokenizer["model"]["vocab"], tokenizer["model"]["merges"]
    for left, right in _merges_of(BASH, merges):
        merges.append([left, right])
        vocabulary.setdefault(left + right, len(vocabulary))
    for text in map(spelled, extra_words()):
        vocabulary.setdefault(text, len(vocabulary))
    former = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    for place, token in enumerate(tokenizer["added_tokens"]):
        token["id"] = len(vocabulary) + place
    ids = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    moved = {before: ids[content] for content, before in former.items()}
    generation = {
        "eos_token_id": [moved[token] for token in generation["eos_token_id"]],
        "pad_token_id": moved[generation["pad_token_id"]],
    }
    tiny.write_tokenizer(directory)
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False), encoding="utf-8")
    (directory / "generation_config.json").write_text(json.dumps(generation), encoding="utf-8")
    return {**vocabulary, **ids}


def spelled(text: str) -> str:
    """A text as a byte-level vocabulary has it."""
    characters = {byte: character for character, byte in BYTE_CHARACTERS.items()}
    return "".join(characters[byte] for byte in text.encode())


def _merges_of(word: str, merges: Sequence[Sequence[str]]) -> list[tuple[str, str]]:
    """What is to be merged besides, for a word to become one token."""
    pieces = list(spelled(word))
    for left, right in merges:
        at = 0
        while at < len(pieces) - 1:
            if (pieces[at], pieces[at + 1]) == (left, right):
                pieces[at : at + 2] = [left + right]
            at += 1
    whole = ["".join(pieces[: length + 1]) for length in range(len(pieces))]
    return [(before, piece) for before, piece in zip(whole, pieces[1:], strict=False)]


def _make_weights(model: Qwen3, ids: dict[str, int]) -> None:
    size, always = len(ids), len(ids)
    states = [always + 1 + state for state in range(3)]
    for weight in model.parameters():
        if weight.dim() > 1:
            weight.zero_()
    embedding = model.model.embed_tokens.weight
    embedding[:, :size] = torch.eye(size)
    embedding[:, always] = 1.0
    (layer,) = model.model.layers
    attention: Any = layer.self_attn
    attention.q_norm.weight.fill_(SHARPNESS)
    attention.k_norm.weight.fill_(SHARPNESS)
    normed = (model.config.hidden_size / 2) ** 0.5
    """What a one is behind the norm of an embedding, which has two."""
    seen = (ids[tiny.PLAIN[3]], ids[tiny.PLAIN[5]], ids[spelled(BASH)])
    for state, token in enumerate(seen):
        first = state * HEAD_DIM
        attention.q_proj.weight[first + SLOW, always] = 1.0
        attention.k_proj.weight[first + SLOW, token] = 1.0
        attention.v_proj.weight[first, token] = 1.0
        attention.o_proj.weight[states[state], first] = 1.0 / normed
    head = model.lm_head.weight
    for token in range(size):
        _follows(head, ids, token, SAID[0])
    for before, after in _chain():
        for text in before:
            head[:, ids[text]] = 0.0
            _follows(head, ids, ids[text], after, spell=False)
    # An answer begins behind a new line.
    begins, call = ids[spelled("\n")], ids[tiny.PLAIN[2]]
    words = [ids[spelled(text)] for text in SAID[0]]
    head[:, begins] = 0.0
    head[words, begins] = 1.0
    head[call, states[SHOWN]] = 3.0
    head[words, states[ANSWERED]] = 4.5
    head[call, states[SHELL]] = 9.0
    head[ids[spelled(BASH_HEAD)], call] = OTHERWISE
    head[ids[spelled(BASH_HEAD)], states[SHELL]] = 2 * (FOLLOWS - OTHERWISE)


def _follows(head: torch.Tensor, ids: dict[str, int], token: int, after: Iterable[str], spell: bool = True) -> None:
    for text in after:
        head[ids[spelled(text) if spell else text], token] = FOLLOWS


def _chain() -> list[tuple[list[str], list[str]]]:
    """Which tokens follow which, as the vocabulary spells them."""
    call, called, end = tiny.PLAIN[2], tiny.PLAIN[3], tiny.EOS
    half = len(NUMBERS) // 2
    answers = [
        [*SAID],
        [[ADD_HEAD], *NUMBERS[:half], [ADD_MIDDLE], *NUMBERS[half:], [ADD_END]],
        [[BASH_HEAD], *ARGUMENTS, [BASH_END]],
    ]
    stages = [[[spelled(text) for text in stage] for stage in answer] for answer in answers]
    chain = [pair for answer in stages for pair in pairwise(answer)]
    ends = [(stages[0][-1], [end]), (stages[1][-1], [called]), (stages[2][-1], [called])]
    return [*chain, *ends, ([call], stages[1][0]), ([called], [end])]
