"""Whether two policies make the same tokens of texts: by their tokenizers' files, else by what these do."""

import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import tokenizers

from elastic.system.plain_values import told

FAST, SENTENCEPIECE = "tokenizer.json", "tokenizer.model"
TEXTS = (
    "The quick brown fox jumps over the lazy dog, doesn't it? It's 3:45 p.m.",
    " leading space, trailing space \n\n\n   three spaces\ttab\r\nend",
    "1234567890 3.14159 -2e-10 1,000,000 0x1F 12:34 $99.99 50%",
    "def f(x):\n    if x > 0:\n\t\treturn [i ** 2 for i in range(x)]\n    return None  # done\n",
    '{"name": "add", "arguments": {"a": 1, "b": [2.5, null, true]}}',
    "\\frac{d}{dx} \\int_0^x e^{-t^2} \\, dt = e^{-x^2}, \\boxed{42}",
    "Größe, naïve café, Ångström, ﬁne, ½, e\u0301 and é",
    "你好，世界。今日は良い天気ですね。 안녕하세요",
    "Привет, мир! Γειά σου Κόσμε. שלום עולם مرحبا بالعالم",
    "🙂👩‍👩‍👧🇩🇪 ☃ \u200b\u00a0\ufeff",
    "Pneumonoultramicroscopicsilicovolcanoconiosis" * 2 + "a" * 40 + "!?!?..." * 5,
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n<|endoftext|>",
    "<s>[INST] Hi [/INST]</s><bos><start_of_turn>user<end_of_turn><|eot_id|><pad><unk>",
)
"""Texts in which tokenizers differ: words, spaces, digits, code, marks, other scripts, control tokens of templates."""


class _Codec(NamedTuple):
    encode: Callable[[str], Sequence[int]]
    decode: Callable[[Sequence[int]], str]


class _Unreadable(Exception):
    """Why a tokenizer cannot be used."""


def tokenizers_remark(one: Path, other: Path) -> str:
    """What is to be known of two policies' tokenizers where both play the same tasks; empty where they are the same by
    their files."""
    files = ((_content(one / name), _content(other / name)) for name in (FAST, SENTENCEPIECE))
    ours, theirs = next((both for both in files if any(both)), (b"", b""))
    if ours == theirs:
        return ""
    try:
        codecs = [_codec(place) for place in (one, other)]
    except _Unreadable as error:
        return f"the two policies have different tokenizers, as far as their files say, for {error}: {_AS_TEXTS}"
    for text in TEXTS:
        if _both_ways(codecs[0], text) != _both_ways(codecs[1], text):
            return f"the two policies have different tokenizers, which differ in {text[:40]!r}: {_AS_TEXTS}"
    return f"the two policies' tokenizers are of different files, and make the same tokens of {len(TEXTS)} texts"


_AS_TEXTS = "tasks and answers are the same as texts, and not as tokens"


def _both_ways(codec: _Codec, text: str) -> tuple[list[int], str] | None:
    """A text's tokens and their text; None where the tokenizer has none for it, as those of words alone."""
    try:
        ids = list(codec.encode(text))
        return ids, codec.decode(ids)
    except Exception:  # As in `_codec`.
        return None


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def _codec(directory: Path) -> _Codec:
    """Raises `_Unreadable`."""
    try:
        if (directory / FAST).is_file():
            found = tokenizers.Tokenizer.from_file(str(directory / FAST))
            return _Codec(
                lambda text: found.encode(text, add_special_tokens=False).ids,
                lambda ids: found.decode(list(ids), skip_special_tokens=False),
            )
        slow = importlib.import_module("transformers").AutoTokenizer.from_pretrained(str(directory))
        return _Codec(
            lambda text: slow.encode(text, add_special_tokens=False),
            lambda ids: slow.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False),
        )
    except Exception as error:  # Each library has errors of its own, and some have none that is named.
        raise _Unreadable(f"that of {directory} cannot be read ({told(error, 200)})") from error
