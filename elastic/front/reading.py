"""Answers as tokens come: the text that parsers are given, and the parsers that are named."""

import json
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any, Protocol

from elastic.front.parsing import (
    MARKERS,
    REASONING_PARSERS,
    TOOL_PARSERS,
    AnswerParser,
    ParsedAnswer,
    ends_in_reasoning,
)
from elastic.front.templates import RendererError
from elastic.front.tokenizer import Tokenizer

TAIL_TOKENS = 32
"""How much of a prompt's end says whether an answer begins within reasoning."""


class AnswerReader(Protocol):
    """Reads one answer as its tokens come. Joined, what it gives is what `ChatRenderer.parse` gives for the whole."""

    def feed(self, token_ids: Sequence[int]) -> ParsedAnswer: ...

    def finish(self) -> ParsedAnswer: ...


class AnswerParsers:
    """The parsers of a model's answers, by their names; empty for none."""

    def __init__(self, tokenizer: Tokenizer, tool_parser: str, reasoning_parser: str) -> None:
        """Raises `RendererError` for a name that no parser has."""
        self._tokenizer = tokenizer
        self._tools = _named("tool_parser", tool_parser, TOOL_PARSERS)
        self._reasoning = _named("reasoning_parser", reasoning_parser, REASONING_PARSERS)
        self._silent = frozenset(n for n, content in tokenizer.special.items() if content not in MARKERS)

    @property
    def named(self) -> bool:
        return self._tools is not None or self._reasoning is not None

    @property
    def reads_calls(self) -> bool:
        return self._tools is not None

    def plain(self, calls_tools: bool) -> bool:
        return self._reasoning is None and not (calls_tools and self._tools is not None)

    def reader(self, prompt_ids: Sequence[int] | None, tools: Any, turn: str) -> AnswerReader:
        return _TextReader(self._tokenizer, self._silent, self.parser(prompt_ids, tools, turn))

    def parser(self, prompt_ids: Sequence[int] | None, tools: Any, turn: str) -> AnswerParser:
        opened = None
        if prompt_ids is not None:
            opened = ends_in_reasoning(self._tokenizer.decode(prompt_ids[-TAIL_TOKENS:], special=True))
        return AnswerParser(
            None if self._reasoning is None else self._reasoning(opened),
            None if self._tools is None or not tools else self._tools(tools),
            call_seed(turn, prompt_ids),
        )


class _TextReader:
    def __init__(self, tokenizer: Tokenizer, silent: frozenset[int], parser: AnswerParser) -> None:
        self._decoder = tokenizer.decoder(special=True)
        self._silent = silent
        self._parser = parser

    def feed(self, token_ids: Sequence[int]) -> ParsedAnswer:
        return self._parser.feed(self._decoder.feed([number for number in token_ids if number not in self._silent]))

    def finish(self) -> ParsedAnswer:
        return self._parser.feed(self._decoder.finish()).plus(self._parser.finish())


def call_seed(turn: str, prompt_ids: Sequence[int] | None) -> bytes:
    """What ids of an answer's calls follow from: the turn, or its prompt where no turn is named."""
    said = turn or json.dumps(list(prompt_ids or ()))
    return blake2b(said.encode(), digest_size=16).digest()


def _named(setting: str, name: str, there: Mapping[str, Any]) -> Any:
    if not name:
        return None
    if name not in there:
        raise RendererError(f"front.{setting}: found {name!r}; allowed: {', '.join(sorted(map(repr, there)))}")
    return there[name]
