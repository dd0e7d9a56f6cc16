"""A checkpoint's tokenizer, by the `tokenizers` library alone: neither transformers nor torch is imported.

- Control tokens are the special ones, and added tokens that the chat template itself writes, such as `<tool_response>`.
- Text never becomes a control token: whatever an agent writes, `encode` gives ordinary tokens for it.
- Those that a chat template writes do become control tokens. The template's output is *coded* for that: each of them
  stands there as a word that nobody outside this process can know (`coded`, `encode_coded`).
- What an incremental `TextDecoder` gives joins to exactly what `decode` gives for the whole.
"""

import codecs
import json
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from elastic.config import ConfigError

FILES_MAX_BYTES = 256 * 1024 * 1024
ENCODED_HERE_CHARS = 4096
"""Longer texts are encoded while other threads go on."""
COUNTED_CHARS = 16 * 1024
SPLIT_TOKENS = 4
"""As many tokens more may a text have that is cut."""
NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Attributes of `tokenizer_config.json` that templates may name."""
_BYTE_TOKEN = re.compile("<0x[0-9A-F]{2}>")


class TokenizerError(ConfigError):
    """The checkpoint has no tokenizer that can be used; the message names the file."""


class ControlTextError(ValueError):
    """A text would become a control token."""


class Tokenizer:
    """Turns text into token ids and back.

    eos_token_ids: end an answer, by the tokenizer's and the generation's configuration.
    vocab_size: token ids are below it. A model may have more than its tokenizer; those above are no text.
    template: the chat template's source; None if the checkpoint has none. `templates` has all by name.
    named: special tokens by the names that templates know, such as `eos_token`.
    special, control: special and control tokens by their ids.
    hub_name: under which the checkpoint was published, as far as it says; else empty.
    """

    def __init__(self, directory: Path) -> None:
        """Raises `TokenizerError`."""
        self.directory = directory
        given = _read_json(directory / "tokenizer.json", needed=True)
        config = _read_json(directory / "tokenizer_config.json")
        self.named = {name: token for name in NAMED_TOKENS if (token := _token_text(config.get(name)))}
        _take_over(given, config, self.named)
        self.templates = _templates(directory, config)
        self.template = self.templates.get("default")
        self.hub_name = _hub_name(directory, config)
        special = {token["content"] for token in given["added_tokens"] if token.get("special")}
        _make_control_tokens_special(given, "\0".join(self.templates.values()))
        self._tokens = _library_tokenizer(directory / "tokenizer.json", given)
        added = self._tokens.get_added_tokens_decoder()
        self._known = max(self._tokens.get_vocab_size(with_added_tokens=True), max(added, default=-1) + 1)
        self.vocab_size = max(self._known, _model_vocabulary(directory))
        self.control = {number: token.content for number, token in added.items() if token.special}
        self.special = {number: content for number, content in self.control.items() if content in special}
        self.eos_token_ids = self._ends()
        unknown = self.named.get("unk_token")
        self._refused = {number for number, content in self.control.items() if content != unknown}
        longest_first = sorted((token.content for token in added.values() if token.content), key=len, reverse=True)
        self._added = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self._words = _words_for(self.control)
        self._coded_ids = self._learn_words({number: added[number] for number in self.control})
        self._byte_level = _is_byte_level(given.get("decoder"))
        self._bytes: dict[int, bytes] = {}

    # Text to tokens.

    def encode(self, text: str, special: bool = False) -> list[int]:
        """The tokens of a text. With `special`, special tokens in it count as such, and those that the tokenizer puts
        around a text are added, as completions of plain prompts want it.

        Raises `ControlTextError` if this tokenizer makes a control token of an ordinary text.
        """
        return self._encode(self.coded(text) if special else text, around=special)

    def coded(self, text: str, broken_by: str = "") -> str:
        """The text with its control tokens as words for `encode_coded`, but those that have `broken_by` in them, which
        is taken out: they are text."""
        text = self._added.sub(lambda found: self._words.get(found[0], found[0]), text)
        return text.replace(broken_by, "") if broken_by else text

    def encode_coded(self, text: str) -> list[int]:
        """Raises `ControlTextError`."""
        return self._encode(text, around=False)

    def control_at_start(self, text: str) -> int | None:
        """The control token with which a template's text begins."""
        found = self._added.match(text)
        return next((number for number, content in self.control.items() if found and content == found[0]), None)

    def token_id(self, token: str) -> int | None:
        return self._tokens.token_to_id(token)

    def estimate(self, texts: Sequence[str], most: int) -> int:
        """About how many tokens the texts have. They are not counted any further once there are more than `most`."""
        chars, counted, tokens = sum(map(len, texts)), 0, 0
        for text in texts:
            for start in range(0, len(text), COUNTED_CHARS):
                piece = text[start : start + COUNTED_CHARS].encode("utf-8", "replace").decode()
                counted += len(piece)
                tokens += max(len(self._encode_batch(piece)) - SPLIT_TOKENS, 0)
                if tokens > most:
                    return tokens * chars // counted
        return tokens

    def _learn_words(self, tokens: Mapping[int, tokenizers.AddedToken]) -> dict[int | None, int]:
        """The tokens' own ids by those of their words, which are found in a text as the tokens would be."""
        words = [
            tokenizers.AddedToken(
                self._words[token.content], lstrip=token.lstrip, rstrip=token.rstrip, normalized=token.normalized
            )
            for token in tokens.values()
        ]
        self._tokens.add_tokens(words)
        return {self._tokens.token_to_id(word.content): number for word, number in zip(words, tokens, strict=True)}

    def _encode(self, text: str, around: bool) -> list[int]:
        try:
            ids = self._ids(text, around)
        except (TypeError, UnicodeEncodeError):  # half of a surrogate pair
            ids = self._ids(text.encode("utf-8", "replace").decode(), around)
        if not around and (wrong := self._refused.intersection(ids)):
            raise ControlTextError(f"text would become the control token {self.control[min(wrong)]!r}")
        return [self._coded_ids.get(number, number) for number in ids]

    def _ids(self, text: str, around: bool) -> list[int]:
        if len(text) <= ENCODED_HERE_CHARS:
            return self._tokens.encode(text, add_special_tokens=around).ids
        return self._encode_batch(text, around)

    def _encode_batch(self, text: str, around: bool = False) -> list[int]:
        """As the library encodes several texts: without Python's lock, which it holds while it encodes a single one."""
        return self._tokens.encode_batch_fast([text], add_special_tokens=around)[0].ids

    # Tokens to text.

    def token(self, number: int) -> str:
        """How the vocabulary spells a token; empty for a number beyond it."""
        return (self._tokens.id_to_token(number) or "") if number < self._known else ""

    def decode(self, ids: Iterable[int], special: bool = False) -> str:
        """The text of tokens, with the special ones or without. Numbers beyond the vocabulary are no text."""
        if self._byte_level:
            return b"".join(self._bytes_of(number, special) for number in ids).decode("utf-8", "replace")
        return self._tokens.decode(self.shown(ids, special), skip_special_tokens=False)

    def shown(self, ids: Iterable[int], special: bool = False) -> list[int]:
        """The tokens that are text."""
        left_out = () if special else self.special
        return [number for number in ids if number < self._known and number not in left_out]

    def decoder(self, special: bool = False) -> "TextDecoder":
        return _ByteDecoder(self, special) if self._byte_level else TextDecoder(self, special)

    def _bytes_of(self, number: int, special: bool) -> bytes:
        found = self._bytes.get(number)
        if found is None:
            found = self._bytes[number] = _bytes_of_token(self.token(number))
        return b"" if number in self.special and not special else found

    def _ends(self) -> tuple[int, ...]:
        generation = _read_json(self.directory / "generation_config.json").get("eos_token_id")
        if generation is None:
            generation = _read_json(self.directory / "config.json").get("eos_token_id")
        found = [generation] if isinstance(generation, int) else list(generation or ())
        named = self.named.get("eos_token")
        own = None if named is None else self._tokens.token_to_id(named)
        return tuple(dict.fromkeys([*([] if own is None else [own]), *found]))


class TextDecoder:
    """Text of tokens as they come. Text that the next token may still change is held back."""

    def __init__(self, tokenizer: Tokenizer, special: bool = False) -> None:
        self._tokenizer = tokenizer
        self._special = special
        self._ids: list[int] = []
        self._window = self._given = 0  # text is decoded from the first on; up to the second it has been given
        self._sent = 0

    def feed(self, ids: Sequence[int]) -> str:
        """The text that these tokens complete."""
        self._ids += self._tokenizer.shown(ids, self._special)
        last = self._tokenizer.token(self._ids[-1]) if self._ids else ""
        if _BYTE_TOKEN.fullmatch(last):
            return ""
        before = self._decode(self._ids[self._window : self._given])
        now = self._decode(self._ids[self._window :])
        if len(now) <= len(before) or now.endswith("\ufffd"):
            return ""
        self._window, self._given = self._given, len(self._ids)
        self._sent += len(now) - len(before)
        return now[len(before) :]

    def finish(self) -> str:
        """What was held back; no more tokens come."""
        return self._decode(self._ids)[self._sent :]

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, self._special)


class _ByteDecoder(TextDecoder):
    """For vocabularies of bytes: only a character's own bytes are held back, whatever tokens they are in."""

    def __init__(self, tokenizer: Tokenizer, special: bool) -> None:
        self._of = tokenizer._bytes_of
        self._special = special
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, ids: Sequence[int]) -> str:
        return self._utf8.decode(b"".join(self._of(number, self._special) for number in ids))

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)


def _byte_characters() -> dict[str, int]:
    """The byte that a character of a byte-level vocabulary stands for, as in GPT-2."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}


BYTE_CHARACTERS = _byte_characters()


def _bytes_of_token(token: str) -> bytes:
    try:
        return bytes(BYTE_CHARACTERS[character] for character in token)
    except KeyError:
        return token.encode()


def _is_byte_level(decoder: Any) -> bool:
    if not isinstance(decoder, dict):
        return False
    steps = decoder.get("decoders", [decoder]) if decoder.get("type") == "Sequence" else [decoder]
    return [step.get("type") for step in steps] == ["ByteLevel"]


def _token_text(token: Any) -> str:
    """A special token of `tokenizer_config.json`, which is a text or a record with its `content`."""
    return str(token.get("content", "")) if isinstance(token, dict) else token if isinstance(token, str) else ""


def _take_over(given: dict[str, Any], config: Mapping[str, Any], named: Mapping[str, str]) -> None:
    """Complete `tokenizer.json` by tokens that `tokenizer_config.json` adds or calls special, as transformers do."""
    added = given.setdefault("added_tokens", [])
    known = {token["content"]: token for token in added}
    declared = config.get("added_tokens_decoder")
    for number, token in sorted((declared or {}).items(), key=lambda item: int(item[0])):
        if token.get("content") not in known:
            flags = {
                flag: bool(token.get(flag)) for flag in ("single_word", "lstrip", "rstrip", "normalized", "special")
            }
            known[token["content"]] = {"id": int(number), "content": token["content"], **flags}
            added.append(known[token["content"]])
    more = config.get("extra_special_tokens") or config.get("additional_special_tokens") or ()
    for token in (*named.values(), *map(_token_text, more.values() if isinstance(more, dict) else more)):
        if token in known:
            known[token]["special"] = True


def _model_vocabulary(directory: Path) -> int:
    """How many token ids the model has, as far as its configuration says."""
    config = _read_json(directory / "config.json")
    said = config.get("vocab_size", (config.get("text_config") or {}).get("vocab_size"))
    return said if isinstance(said, int) else 0


def _library_tokenizer(path: Path, given: Mapping[str, Any]) -> tokenizers.Tokenizer:
    try:
        tokens = tokenizers.Tokenizer.from_str(json.dumps(given))
    except Exception as error:  # the library raises bare exceptions for files that it cannot read
        raise TokenizerError(f"{path}: no tokenizer ({error})") from error
    tokens.no_padding()
    tokens.no_truncation()
    tokens.encode_special_tokens = True
    return tokens


def _words_for(control: Mapping[int, str]) -> dict[str, str]:
    """A word of private characters for each token, which cannot be guessed."""
    nonce = "".join(chr(0xE000 + byte) for byte in secrets.token_bytes(16))
    return {
        content: f"{nonce}{chr(0xE100 + place // 4096)}{chr(0xE800 + place % 4096)}"
        for place, content in enumerate(control.values())
    }


def _make_control_tokens_special(given: dict[str, Any], templates: str) -> None:
    """Mark those added tokens as special that the templates write, so that the library finds none of them in texts."""
    for token in given["added_tokens"]:
        if token["content"] in templates and not token["content"].isspace():
            token["special"] = True


def _templates(directory: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """The checkpoint's chat templates by name. Those in files of their own count before those in the configuration."""
    said = config.get("chat_template")
    found = {"default": said} if isinstance(said, str) else {}
    if isinstance(said, list):
        found = {str(one["name"]): str(one["template"]) for one in said if isinstance(one, dict) and "template" in one}
    single = directory / "chat_template.jinja"
    files = {"default": single} if single.is_file() else {}
    files |= {path.stem: path for path in sorted((directory / "additional_chat_templates").glob("*.jinja"))}
    return found | {name: _read_text(path) for name, path in files.items()}


def _hub_name(directory: Path, config: Mapping[str, Any]) -> str:
    """`owner/model`, by a cache of the hub that the directory is in, or as the checkpoint's files say."""
    for folder in directory.resolve().parts:
        if found := re.fullmatch(r"models--([^/]+?)--([^/]+)", folder):
            return f"{found[1]}/{found[2]}"
    for name in (_read_json(directory / "config.json").get("_name_or_path"), config.get("name_or_path")):
        if isinstance(name, str) and re.fullmatch(r"[\w.-]+/[\w.-]+", name) and not name.startswith("."):
            return name
    return ""


def _read_text(path: Path) -> str:
    try:
        if path.stat().st_size > FILES_MAX_BYTES:
            raise TokenizerError(f"{path}: larger than {FILES_MAX_BYTES} bytes")
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TokenizerError(f"{path}: cannot be read ({error})") from error


def _read_json(path: Path, needed: bool = False) -> dict[str, Any]:
    if not needed and not path.is_file():
        return {}
    try:
        found = json.loads(_read_text(path))
    except (ValueError, RecursionError) as error:
        if isinstance(error, TokenizerError):
            raise
        raise TokenizerError(f"{path}: no JSON ({error})") from error
    if not isinstance(found, dict):
        raise TokenizerError(f"{path}: {type(found).__name__}; an object is allowed")
    return found
