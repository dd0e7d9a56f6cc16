"""A small tokenizer with a chat template, so that tiny checkpoints can be chatted with: byte-level BPE, learned here.

- The files are equal on every machine, since learning only counts.
- Special tokens and tool calls are spelled as Qwen3's, so its parsers (`hermes`, `qwen3`) read such a model's answers.
- The template is ChatML. Its rendering of a prefix is a prefix of the whole. Its one setting is `enable_thinking`, by
  which an answer begins with `<think>`.
"""

import functools
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from elastic.front.rendering.tokenizer import BYTE_CHARACTERS

VOCABULARY = 512
"""Tokens: bytes, what was learned and the special ones, which come last."""
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
PLAIN = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
EOS = "<|im_end|>"

_TEXT = """
You are a helpful assistant. You may call functions; here are their signatures as JSON: {"type": "function", "function":
{"name": "add", "description": "Adds two numbers.", "parameters": {"type": "object", "properties": {"a": {"type":
"number"}, "b": {"type": "number"}}, "required": ["a", "b"]}}}. For each function call, return a JSON object with its
name and arguments: {"name": <function-name>, "arguments": <args-json-object>}. The user asks: What is the sum of these
numbers? The assistant answers: The sum is 42. Is this the right answer? No, that is not what I asked for. Let me think
about it once more, step by step. First I will read the file, then I will write what is in there and run all the tests.
system user assistant tool error: no such file or directory. def main(): return None. import os, sys. 0 1 2 3 4 5 6 7 8
"""
_WORD = re.compile(r" ?[^\W\d_]+| ?\d| ?[^\s\w]+|\s+(?!\S)|\s+|_")
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

TEMPLATE = """\
{%- if tools or messages[0].role == 'system' -%}
{{ '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{ messages[0].content + ('\\n\\n' if tools else '') }}{% endif %}
{%- if tools -%}
{{ '# Tools\\n\\nYou may call one or more functions.\\n\\n<tools>' }}
{%- for tool in tools %}{{ '\\n' }}{{ tool | tojson }}{% endfor -%}
{{ '\\n</tools>\\n\\nFor each function call, return a JSON object with its name and arguments:\\n<tool_call>\\n' }}
{{- '{"name": <function-name>, "arguments": <args-json-object>}\\n</tool_call>' }}
{%- endif -%}
{{ '<|im_end|>\\n' }}
{%- endif -%}
{%- for message in messages -%}
{%- if message.role == 'tool' -%}
{{ '<|im_start|>user' if loop.first or loop.previtem.role != 'tool' else '' }}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{{- '<|im_end|>\\n' if loop.last or loop.nextitem.role != 'tool' else '' }}
{%- elif message.role == 'assistant' -%}
{{ '<|im_start|>assistant\\n' }}
{%- if message.reasoning_content -%}
{{ '<think>\\n' + message.reasoning_content.strip() + '\\n</think>\\n\\n' }}
{%- endif %}
{{- message.content }}
{%- for call in message.tool_calls or [] -%}
{{ '\\n' if message.content or not loop.first else '' }}
{{- '<tool_call>\\n{"name": ' }}{{ call.function.name | tojson }}{{ ', "arguments": ' }}
{{- call.function.arguments | tojson }}{{ '}\\n</tool_call>' }}
{%- endfor -%}
{{ '<|im_end|>\\n' }}
{%- elif not (loop.first and message.role == 'system') -%}
{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|im_start|>assistant\\n' + ('<think>\\n' if enable_thinking else '') }}
{%- endif -%}
"""


def learned_merges(text: str, count: int) -> list[tuple[str, str]]:
    """The first `count` pairs that byte pair encoding merges. Of equally frequent ones the lesser goes first."""
    characters = {byte: character for character, byte in BYTE_CHARACTERS.items()}
    words = [
        ([characters[byte] for byte in word.encode()], times) for word, times in Counter(_WORD.findall(text)).items()
    ]
    merges: list[tuple[str, str]] = []
    while len(merges) < count:
        pairs: Counter[tuple[str, str]] = Counter()
        for word, times in words:
            for pair in pairwise(word):
                pairs[pair] += times
        if not pairs:
            break
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        merges.append(best)
        for word, _ in words:
            at = 0
            while at < len(word) - 1:
                if (word[at], word[at + 1]) == best:
                    word[at : at + 2] = ["".join(best)]
                at += 1
    return merges


@functools.cache
def tokenizer_files() -> Mapping[str, str]:
    """The files of the tokenizer by name, for a model whose vocabulary has `VOCABULARY` tokens or more."""
    added = (*SPECIAL, *PLAIN)
    merges = learned_merges(_TEXT, VOCABULARY - len(BYTE_CHARACTERS) - len(added))
    words = [*sorted(BYTE_CHARACTERS, key=BYTE_CHARACTERS.__getitem__), *("".join(pair) for pair in merges)]
    vocabulary = {word: number for number, word in enumerate(dict.fromkeys(words))}
    tokenizer: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": VOCABULARY - len(added) + place,
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": token in SPECIAL,
            }
            for place, token in enumerate(added)
        ],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": _SPLIT}, "behavior": "Isolated", "invert": False},
                {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False},
            ],
        },
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocabulary,
            "merges": [list(pair) for pair in merges],
        },
    }
    ids = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": EOS,
        "pad_token": SPECIAL[0],
        "model_max_length": 1_000_000,
        "clean_up_tokenization_spaces": False,
    }
    generation = {"eos_token_id": [ids[EOS], ids[SPECIAL[0]]], "pad_token_id": ids[SPECIAL[0]]}
    return {
        "tokenizer.json": json.dumps(tokenizer, ensure_ascii=False, indent=1) + "\n",
        "tokenizer_config.json": json.dumps(config, indent=2) + "\n",
        "generation_config.json": json.dumps(generation, indent=2) + "\n",
        "chat_template.jinja": TEMPLATE,
    }


def write_words(directory: Path, words: Sequence[str]) -> None:
    """Put a tokenizer of these words beside a checkpoint's files, a token each in their order."""
    tokenizer: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "Split", "pattern": {"String": ""}, "behavior": "Isolated", "invert": False},
        "post_processor": None,
        "decoder": {"type": "Fuse"},
        "model": {"type": "WordLevel", "vocab": {word: number for number, word in enumerate(words)}, "unk_token": ""},
    }
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer, indent=1) + "\n", encoding="utf-8")


def write_tokenizer(directory: Path) -> None:
    """Put the tokenizer's files beside a checkpoint's."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in tokenizer_files().items():
        (directory / name).write_text(text, encoding="utf-8")
