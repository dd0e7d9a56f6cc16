"""What an answer's text says: reasoning, content and calls of tools, as it comes or at once. Pure.

Parsers are named as vLLM's flags name them. Whatever they cannot read stays content, so no text is lost.
"""

from hashlib import blake2b

from elastic.front.rendering.incoming import CallPart, Grammar, Read, Reader
from elastic.protocol.openai.answers import CallDelta, ParsedAnswer, joined_calls


class AnswerParser:
    """Parses one answer. `seed` makes the ids of its calls, which are the same whenever the answer is parsed."""

    def __init__(self, reasoning: Grammar | None, tools: Grammar | None, seed: bytes) -> None:
        """`tools` reads what `reasoning` leaves as content."""
        self._reasoning = None if reasoning is None else Reader(reasoning)
        self._tools = None if tools is None else Reader(tools)
        self._seed = seed
        self._calls = 0
        """The calls that have begun."""

    def feed(self, text: str) -> ParsedAnswer:
        """What this text completes."""
        read = Read(text) if self._reasoning is None else self._reasoning.feed(text)
        return self._answered(read, None if self._tools is None else self._tools.feed(read.content))

    def finish(self) -> ParsedAnswer:
        """What was held back; no more text comes."""
        read = Read() if self._reasoning is None else self._reasoning.finish()
        if self._tools is None:
            return self._answered(read)
        return self._answered(read, self._tools.feed(read.content)).plus(self._answered(Read(), self._tools.finish()))

    def whole(self, text: str) -> ParsedAnswer:
        return self.feed(text).plus(self.finish())

    def _answered(self, read: Read, of_tools: Read | None = None) -> ParsedAnswer:
        content, calls = (read.content, read.calls) if of_tools is None else (of_tools.content, of_tools.calls)
        return ParsedAnswer(
            content, read.reasoning, joined_calls([self._delta(part) for part in calls]) if calls else ()
        )

    def _delta(self, part: CallPart) -> CallDelta:
        if not part.name:
            return CallDelta(self._calls - 1, arguments=part.arguments)
        self._calls += 1
        return CallDelta(self._calls - 1, call_id(self._seed, self._calls - 1), part.name, part.arguments)


def call_id(seed: bytes, place: int) -> str:
    """The id of an answer's call at this place, by the `seed` of the answer: it is known before the call is whole."""
    return f"call_{blake2b(place.to_bytes(8), key=seed, digest_size=12).hexdigest()}"
