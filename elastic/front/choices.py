"""The tokens of one choice of an answer as they come: what it says, stop strings, and tokens that come again. Pure.

- Joined, what `take` and `rest` return is what the choice says, however its tokens are cut into pieces.
- No part of a stop string is ever shown: text that may be the beginning of one is held back.
"""

from collections.abc import Sequence

from elastic.front.rendering.reading import AnswerReader, Decoding
from elastic.protocol.openai.answers import CallDelta, ParsedAnswer, joined_calls


class TokensDiffer(Exception):
    """Tokens that came again are others than before."""


class StopFinder:
    """Finds the stop string that is whole first; of two that end together, the longer one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = sorted(stops, key=len, reverse=True)
        self._held = ""
        self.found: str | None = None

    def feed(self, text: str) -> str:
        """What can be shown of all text so far, without what was shown before."""
        if self.found is not None:
            return ""
        if not self._stops:
            return text
        self._held += text
        ends = [(at + len(stop), at, stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if ends:
            _, start, self.found = min(ends)
            shown, self._held = self._held[:start], ""
            return shown
        split = len(self._held) - self._beginning()
        shown, self._held = self._held[:split], self._held[split:]
        return shown

    def rest(self) -> str:
        """What is held back, at the end; nothing if a stop string was found."""
        rest, self._held = self._held, ""
        return rest

    def _beginning(self) -> int:
        """How many characters at the end may be the beginning of a stop string."""
        longest = min(len(self._held), max(map(len, self._stops), default=1) - 1)
        for size in range(longest, 0, -1):
            tail = self._held[-size:]
            if any(stop.startswith(tail) for stop in self._stops):
                return size
        return 0


class Choice:
    """One choice of an answer. Where nobody wants log-probabilities there are none.

    What it says is the text that `decoder` makes of its tokens, or what a `reader` reads out of them, with at most
    `calls_max` calls of tools. `silent` are token ids that end a turn and are no text. Of text that ends at a stop
    string, a reader is given what is before it.
    """

    def __init__(
        self,
        decoder: Decoding,
        reader: AnswerReader | None = None,
        stops: Sequence[str] = (),
        silent: frozenset[int] = frozenset(),
        calls_max: int | None = None,
    ) -> None:
        self.ids: list[int] = []
        self.logprobs: list[float] = []
        self._decoder: Decoding = decoder if reader is None else reader.decoder
        self._parser = None if reader is None else reader.parser
        self._finder = StopFinder(stops) if stops else None
        self._silent = silent
        self._calls_max = calls_max
        self._text: list[str] = []
        self._thought: list[str] = []
        self._calls: list[CallDelta] = []
        self._tail: ParsedAnswer | str | None = None
        """What was held back, once the turn is over."""
        self._known = 0
        """How many of the tokens have come since the turn was last joined."""

    @property
    def stop(self) -> str | None:
        """The stop string at which the answer ends; the tokens end with the one that made it whole."""
        return None if self._finder is None else self._finder.found

    @property
    def said(self) -> ParsedAnswer:
        """All that can be shown so far."""
        return ParsedAnswer("".join(self._text), "".join(self._thought), joined_calls(self._calls))

    def join(self) -> None:
        """All tokens come once more."""
        self._known = 0

    def again(self) -> tuple[list[int], list[float]]:
        """The tokens that have come since the turn was last joined."""
        return self.ids[: self._known], self.logprobs[: self._known]

    def take(self, ids: Sequence[int], logprobs: Sequence[float]) -> tuple[ParsedAnswer | str, int]:
        """What these tokens add, and how many of them are new. Raises `TokensDiffer`."""
        if again := min(len(self.ids) - self._known, len(ids)):
            if list(ids[:again]) != self.ids[self._known : self._known + again]:
                raise TokensDiffer(f"token {self._known} and what follows came again, otherwise")
            self.logprobs[self._known : self._known + again] = logprobs[:again]
            self._known += again
            ids, logprobs = ids[again:], logprobs[again:]
        if not ids or self.stop is not None:
            return "", 0
        if self._tail is not None:
            raise TokensDiffer(f"the turn was over with token {len(self.ids)}, and goes on")
        said, taken = self._read(ids)
        self.ids += ids[:taken]
        self.logprobs += logprobs[:taken]
        self._known = len(self.ids)
        return said, taken

    def rest(self) -> ParsedAnswer | str:
        """What was held back up to the end. Raises `TokensDiffer` if tokens from before are missing."""
        if self._known < len(self.ids) and self.stop is None:
            raise TokensDiffer(f"of {len(self.ids)} tokens {self._known} came again")
        if self._tail is None:
            self._tail = self._held()
        return self._tail

    def _read(self, ids: Sequence[int]) -> tuple[ParsedAnswer | str, int]:
        """What these say, and how many of them the answer keeps."""
        finder = self._finder
        if finder is None:
            return self._noted(self._decoder.feed(ids[:-1] if ids[-1] in self._silent else ids)), len(ids)
        text = ""
        for number, token in enumerate(ids, 1):
            if token not in self._silent:
                text += finder.feed(self._decoder.feed((token,)))
            if finder.found is not None:
                return self._noted(text), number
        return self._noted(text), len(ids)

    def _held(self) -> ParsedAnswer | str:
        text = ""
        if self.stop is None:
            text = self._decoder.finish()
            if self._finder is not None:
                text = self._finder.feed(text)
                text += self._finder.rest()
        if self._parser is None:
            self._text.append(text)
            return text
        return self._kept(self._parser.feed(text).plus(self._parser.finish()))

    def _noted(self, text: str) -> ParsedAnswer | str:
        """What this text says."""
        if self._parser is None:
            self._text.append(text)
            return text
        return self._kept(self._parser.feed(text))

    def _kept(self, said: ParsedAnswer) -> ParsedAnswer:
        """What of this is to be shown."""
        if self._calls_max is not None and said.tool_calls:
            said = said._replace(tool_calls=tuple(call for call in said.tool_calls if call.index < self._calls_max))
        self._text.append(said.content)
        self._thought.append(said.reasoning)
        self._calls += said.tool_calls
        return said
