"""A vocabulary of bytes and a chat template of a few characters, for fronts whose model does not matter."""

import codecs
import re
from collections.abc import Sequence

from elastic.front.asked import ServedModel
from elastic.protocol.front_messages import ALL_IDS
from elastic.protocol.openai.answers import CallDelta, ParsedAnswer, joined_calls

EOS = 256
VOCABULARY = 300


class BytesDecoder:
    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token_ids: Sequence[int]) -> str:
        return self._decoder.decode(bytes(token for token in token_ids if token < 256))

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class BytesVocabulary:
    eos_token_ids = (EOS,)
    vocab_size = VOCABULARY

    def encode(self, text: str, special: bool = False) -> list[int]:
        return list(text.encode())

    def estimate(self, texts: Sequence[str], most: int) -> int:
        return sum(len(text.encode()) for text in texts)

    def decode(self, ids: Sequence[int], special: bool = False) -> str:
        return bytes(token for token in ids if token < 256).decode(errors="replace")

    def decoder(self) -> BytesDecoder:
        return BytesDecoder()


class BracketRenderer:
    """Each message is `[role:text]`; an answer begins behind `[assistant:`, and its closing is `EOS` and `]`.

    A call of a tool is `<name {"JSON": 1}>` in an answer; reasoning stands before `|`, where `reasons`.
    """

    stop_token_ids = (EOS,)
    ids_before = ALL_IDS

    def __init__(self, reasons: bool = False, reads_calls: bool = True) -> None:
        self.unread = "" if reads_calls else "nothing reads calls: front.tool_parser"
        self._reasons = reasons

    def plain(self, calls_tools: bool) -> bool:
        return not (calls_tools or self._reasons)

    def prompt(self, messages, tools, template_kwargs) -> list[int]:
        text = ""
        for message in messages:
            if message["role"] == "refused":
                raise ValueError("a role that the template refuses")
            text += f"[{message['role']}:{_text(message)}"
            text += chr(EOS) if message["role"] == "assistant" else ""
            text += "]"
        return [EOS if char == chr(EOS) else byte for char in f"{text}[assistant:" for byte in _bytes(char)]

    def more(self, messages, matched, tools, template_kwargs, so_far, answer_tokens) -> list[int]:
        closing = [] if so_far[-1] == EOS else [EOS]
        rendered = self.prompt(messages[matched:], tools, template_kwargs)
        return [*closing, *b"]", *rendered]

    def reader(self, prompt_ids, tools, turn="") -> "BracketReader":
        return BracketReader(self._reasons, bool(tools), turn)


class BracketReader:
    """Gives characters one by one as it is sure of them: those of a call's arguments, too."""

    def __init__(self, reasons: bool, reads_calls: bool, turn: str) -> None:
        self.decoder = BytesDecoder()
        self.parser = self
        self._thinking = reasons
        self._reads_calls = reads_calls
        self._turn = turn
        self._held = ""
        self._calling = False
        self._calls = 0

    def feed(self, text: str) -> ParsedAnswer:
        content, reasoning, calls = "", "", []
        for char in text:
            if self._thinking:
                self._thinking = char != "|"
                reasoning += char if self._thinking else ""
            elif self._calling:
                self._calling = char != ">"
                if self._calling:
                    calls.append(CallDelta(self._calls - 1, arguments=char))
            elif self._reads_calls and (self._held or char == "<"):
                self._held += char
                if found := re.fullmatch(r"<(\w+) ", self._held):
                    self._held, self._calling = "", True
                    calls.append(CallDelta(self._calls, f"{self._turn}:{self._calls}", found[1]))
                    self._calls += 1
            else:
                content += char
        return ParsedAnswer(content, reasoning, joined_calls(calls))

    def finish(self) -> ParsedAnswer:
        rest, self._held = self._held, ""
        return ParsedAnswer(rest)


def small_model(
    context_tokens: int = 4096,
    reasons: bool = False,
    reads_calls: bool = True,
    policies: tuple[str, ...] = (),
    upstream: bool = False,
) -> ServedModel:
    renderer = BracketRenderer(reasons, reads_calls)
    return ServedModel("small", context_tokens, VOCABULARY, BytesVocabulary(), renderer, 1, policies, upstream)


def _text(message) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def _bytes(char: str) -> list[int]:
    return [0] if char == chr(EOS) else list(char.encode())
