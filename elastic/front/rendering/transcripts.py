"""A trajectory's tokens as the messages that they are: who said what, what the policy thought, which tools it called.

Messages are told apart by control tokens, and these by their ids, never by their text: whatever an agent or a tool has
written is within its own message, also what looks like the beginning of another one. What the policy sampled is read as
the run's fronts read it. Where a checkpoint marks no messages, what is not the policy's is the user's.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from elastic.front.rendering import library
from elastic.front.rendering.reading import TAIL_TOKENS, AnswerParsers
from elastic.front.rendering.tokenizer import Tokenizer
from elastic.protocol.openai.answers import ParsedAnswer

ASSISTANT, USER, TOOL = "assistant", "user", "tool"
ROLE_CHARACTERS = 32
_OPENERS = ("<|im_start|>", "<|start_header_id|>", "<start_of_turn>", "<|start|>")
"""Marks after which the message's role stands, up to the end of the line or to one of the following marks."""
_HEADER_ENDS = ("<|end_header_id|>", "<|im_sep|>", "<|message|>")
_HEADER_PARTS = ("<|channel|>", "<|constrain|>")
"""From them on, a header says more than whose message it is."""
_SPEAKERS = {
    "<|system|>": "system",
    "<|user|>": USER,
    "<|assistant|>": ASSISTANT,
    "<|observation|>": TOOL,
    "<tool_response>": TOOL,
    "<｜User｜>": USER,
    "<｜Assistant｜>": ASSISTANT,
    "<｜tool▁output▁begin｜>": TOOL,
    "[SYSTEM_PROMPT]": "system",
    "[INST]": USER,
    "[/INST]": ASSISTANT,
    "[TOOL_RESULTS]": TOOL,
}
"""Tokens that begin a message and say whose it is."""
_ENDS = (
    *("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end|>", "<|call|>", "<|return|>", "<|endoftext|>"),
    *(
        "</tool_response>",
        "<｜tool▁output▁end｜>",
        "<｜end▁of▁sentence｜>",
        "[/SYSTEM_PROMPT]",
        "[/TOOL_RESULTS]",
        "</s>",
    ),
)
_ROLES = {"model": ASSISTANT, "ipython": TOOL}
"""What checkpoints call roles that have another name elsewhere."""
_ANY_TOOL: list[dict[str, Any]] = [{"type": "function", "function": {"name": ""}}]
"""Stands for the tools that there were, which tokens do not tell."""


class SpokenMessage(NamedTuple):
    """What somebody said: an answer if it is the assistant's, else content alone.

    by_policy: the policy sampled it. start, tokens: its place among the trajectory's tokens.
    """

    role: str
    said: ParsedAnswer
    by_policy: bool
    start: int
    tokens: int


class Transcriber:
    """Reads tokens of one checkpoint."""

    def __init__(self, tokenizer: Tokenizer, renderer: str, tool_parser: str, reasoning_parser: str) -> None:
        """The names are those of the run's `front`, empty for what is known of the model.

        Raises `RendererError` for a parser that there is not.
        """
        self._tokenizer = tokenizer
        self._answers = AnswerParsers(
            tokenizer, *library.parsers_of(tokenizer, renderer, tool_parser, reasoning_parser)
        )
        marks = {*_OPENERS, *_HEADER_ENDS, *_HEADER_PARTS, *_SPEAKERS, *_ENDS}
        self._marks = {number: content for number, content in tokenizer.control.items() if content in marks}

    def pieces(self, token_ids: Sequence[int], most_characters: int) -> Iterator[str]:
        """The text that each token completes, special tokens included. Joined they are the text of all of them; it ends
        before it would have more than so many characters."""
        decoder, characters = self._tokenizer.decoder(special=True), 0
        for place, number in enumerate(token_ids, 1):
            piece = decoder.feed((number,)) + (decoder.finish() if place == len(token_ids) else "")
            characters += len(piece)
            if characters > most_characters:
                return
            yield piece

    def text(self, token_ids: Sequence[int]) -> str:
        """The text of tokens, without special ones."""
        return self._tokenizer.decode(token_ids)

    def messages(self, token_ids: Sequence[int], spans: Sequence[tuple[int, int]]) -> list[SpokenMessage]:
        """The messages of a context. Of it the policy sampled the `spans` (start, tokens)."""
        found, at, prefix = list[SpokenMessage](), 0, ""
        for start, count in spans:
            found += self._told(token_ids, at, start)
            if found and not found[-1].by_policy and found[-1].role == ASSISTANT and _is_open(found[-1], start):
                prefix = found.pop().said.content
            said = self._answer(token_ids, start, start + count)
            if prefix and not self._answers.reads_reasoning:
                said = said._replace(content=prefix + said.content)
            found.append(SpokenMessage(ASSISTANT, said, True, start, count))
            at, prefix = start + count, ""
        found += self._told(token_ids, at, len(token_ids))
        return [one for one in found if one.by_policy or not _is_blank(one.said)]

    def _told(self, token_ids: Sequence[int], start: int, end: int) -> Iterator[SpokenMessage]:
        """The messages in a stretch that the policy did not sample."""
        begin, role, header, at = start, "", -1, start
        for place in range(start, end + 1):
            mark = self._marks.get(token_ids[place]) if place < end else ""
            if mark is None:
                continue
            if mark in _HEADER_PARTS or mark in _HEADER_ENDS:
                if header >= 0:
                    role = role or self.text(token_ids[header:place])
                    header, at = (place, place) if mark in _HEADER_PARTS else (-1, place + 1)
                continue
            if header >= 0:
                role, _, content = self.text(token_ids[header:place]).partition("\n")
            else:
                content = self.text(token_ids[at:place])
            role = _role(role)
            said = ParsedAnswer(content.strip("\n") if mark or role != ASSISTANT else content)
            if role == ASSISTANT and mark:
                said = self._answer(token_ids, at, place) if header < 0 else self._parsed(content)
            yield SpokenMessage(role, said, False, begin, place - begin)
            begin, at, role = place, place + 1, _SPEAKERS.get(mark, "")
            header = place + 1 if mark in _OPENERS else -1

    def _answer(self, token_ids: Sequence[int], start: int, end: int) -> ParsedAnswer:
        before = token_ids[max(0, start - TAIL_TOKENS) : start]
        return self._answers.reader(before, _ANY_TOOL, str(start)).whole(token_ids[start:end])

    def _parsed(self, text: str) -> ParsedAnswer:
        return self._answers.parser(None, _ANY_TOOL, text[:TAIL_TOKENS]).whole(text)


def _role(said: str) -> str:
    """Return the role that a header names; the user's where it names none."""
    name = (said.split() or [USER])[0][:ROLE_CHARACTERS]
    return TOOL if name.startswith("functions.") else _ROLES.get(name, name)


def _is_open(message: SpokenMessage, end: int) -> bool:
    """Whether the message goes on where the stretch ends in which it stands."""
    return message.start + message.tokens == end


def _is_blank(said: ParsedAnswer) -> bool:
    return not said.tool_calls and not said.content.strip() and not said.reasoning.strip()
