"""Answers as tokens come: the text that parsers are given, and the parsers that are named."""

import json
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple, Protocol, TypeVar

from elastic.front.rendering.parsing import AnswerParser
from elastic.front.rendering.reasoning_grammars import REASONING_PARSERS, THINK, THOUGHT, Situation
from elastic.front.rendering.templates import RendererError
from elastic.front.rendering.tokenizer import Tokenizer
from elastic.front.rendering.tool_grammars import CALL, CALLED, TOOL_PARSERS
from elastic.protocol.openai.answers import ParsedAnswer

TAIL_TOKENS = 32
"""How much of a prompt's end says whether an answer begins within reasoning."""
HARMONY_REASONING, HARMONY_TOOLS = "openai_gptoss", "openai"

NamedT = TypeVar("NamedT")


class Decoding(Protocol):
    """The text of tokens, as they come."""

    def feed(self, ids: Sequence[int]) -> str: ...

    def finish(self) -> str: ...


class Parsing(Protocol):
    """What text says, as it comes."""

    def feed(self, text: str) -> ParsedAnswer: ...

    def finish(self) -> ParsedAnswer: ...


class AnswerReader(NamedTuple):
    """Reads one answer as its tokens come: the `parser` is given the text that the `decoder` makes of them, up to where
    the answer ends. Joined, what it gives is what `ChatRenderer.parse` gives for the whole."""

    decoder: Decoding
    parser: Parsing

    def whole(self, token_ids: Sequence[int]) -> ParsedAnswer:
        said = self.parser.feed(self.decoder.feed(token_ids)).plus(self.parser.feed(self.decoder.finish()))
        return said.plus(self.parser.finish())


class AnswerParsers:
    """The parsers of a model's answers, by their names; empty for none."""

    def __init__(self, tokenizer: Tokenizer, tool_parser: str, reasoning_parser: str) -> None:
        """Raises `RendererError` for a name that no parser has, and for two that do not go together."""
        self._tokenizer = tokenizer
        self.tool_parser, self.reasoning_parser = tool_parser, reasoning_parser
        self._tools = _named("tool_parser", tool_parser, TOOL_PARSERS)
        if tool_parser == HARMONY_TOOLS and not reasoning_parser:
            reasoning_parser = HARMONY_REASONING
        self._reasoning = _named("reasoning_parser", reasoning_parser, REASONING_PARSERS)
        if self._tools is not None and (self._tools.grammar is None) != (reasoning_parser == HARMONY_REASONING):
            raise RendererError(
                f"front.reasoning_parser: {reasoning_parser!r} does not go with front.tool_parser {tool_parser!r}: "
                f"{HARMONY_REASONING!r} and {HARMONY_TOOLS!r} read answers of gpt-oss, together"
            )
        named = [one for one in (self._tools, self._reasoning) if one is not None]
        markers = {THINK, THOUGHT, CALL, CALLED, *(marker for one in named for marker in one.markers)}
        self._silent = frozenset(n for n, content in tokenizer.special.items() if content not in markers)

    @property
    def named(self) -> bool:
        return self._tools is not None or self._reasoning is not None

    @property
    def reads_calls(self) -> bool:
        return self._tools is not None

    @property
    def reads_reasoning(self) -> bool:
        return self._reasoning is not None

    def plain(self, calls_tools: bool) -> bool:
        return self._reasoning is None and not (calls_tools and self._tools is not None)

    def reader(self, prompt_ids: Sequence[int] | None, tools: Any, turn: str) -> AnswerReader:
        return AnswerReader(_Decoder(self._tokenizer, self._silent), self.parser(prompt_ids, tools, turn))

    def parser(self, prompt_ids: Sequence[int] | None, tools: Any, turn: str) -> AnswerParser:
        end = None if prompt_ids is None else self._tokenizer.decode(prompt_ids[-TAIL_TOKENS:], special=True)
        reads = self._tools if tools else None
        situation = Situation(end, reads is not None, "" if reads is None else reads.begin)
        return AnswerParser(
            None if self._reasoning is None else self._reasoning.grammar(situation),
            None if reads is None or reads.grammar is None else reads.grammar(tools),
            call_seed(turn, prompt_ids),
        )


class _Decoder:
    """Text with those special tokens that parsers read."""

    def __init__(self, tokenizer: Tokenizer, silent: frozenset[int]) -> None:
        self._decoder = tokenizer.decoder(special=True)
        self._silent = silent

    def feed(self, ids: Sequence[int]) -> str:
        return self._decoder.feed([number for number in ids if number not in self._silent])

    def finish(self) -> str:
        return self._decoder.finish()


def call_seed(turn: str, prompt_ids: Sequence[int] | None) -> bytes:
    """What ids of an answer's calls follow from: the turn, or its prompt where no turn is named."""
    said = turn or json.dumps(list(prompt_ids or ()))
    return blake2b(said.encode(), digest_size=16).digest()


def _named(setting: str, name: str, there: Mapping[str, NamedT]) -> NamedT | None:
    if not name:
        return None
    if name not in there:
        raise RendererError(f"front.{setting}: found {name!r}; allowed: {', '.join(sorted(map(repr, there)))}")
    return there[name]
