"""The tokens of one choice of an answer as they come: its text, stop strings, and tokens that come again. Pure.

- Joined, the texts that `take` and `rest` return are the choice's text, however its tokens are cut into pieces.
- No part of a stop string is ever shown: text that may be the beginning of one is held back.
"""

from collections.abc import Sequence
from typing import Protocol


class AnswerDecoder(Protocol):
    """Makes text of tokens as they come. Characters that are not whole yet are held back."""

    def feed(self, token_ids: Sequence[int]) -> str: ...

    def finish(self) -> str:
        """What is held back, at the end."""
        ...


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
        """What is held back, at the end."""
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
    """One choice of an answer. `silent` are token ids that end a turn and are no text."""

    def __init__(self, decoder: AnswerDecoder, stops: Sequence[str] = (), silent: frozenset[int] = frozenset()) -> None:
        self.ids: list[int] = []
        self.logprobs: list[float] = []
        self.text = ""
        """All text that can be shown so far."""
        self._decoder = decoder
        self._finder = StopFinder(stops) if stops else None
        self._silent = silent
        self._tail: str | None = None
        """The text that was held back, once the turn is over."""
        self._known = 0
        """Of the tokens, how many have come since the turn was last joined."""

    @property
    def stop(self) -> str | None:
        """The stop string at which the text ends; the tokens end with the one that made it whole."""
        return None if self._finder is None else self._finder.found

    def join(self) -> None:
        """All tokens come once more."""
        self._known = 0

    def again(self) -> tuple[list[int], list[float]]:
        """The tokens that have come since the turn was last joined."""
        return self.ids[: self._known], self.logprobs[: self._known]

    def take(self, ids: Sequence[int], logprobs: Sequence[float]) -> tuple[str, int]:
        """The text that these tokens add, and how many of them are new. Raises `TokensDiffer`."""
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
        text, taken = self._decoded(ids)
        self.ids += ids[:taken]
        self.logprobs += logprobs[:taken]
        self._known = len(self.ids)
        self.text += text
        return text, taken

    def rest(self) -> str:
        """The text that was held back up to the end. Raises `TokensDiffer` if tokens from before are missing."""
        if self._known < len(self.ids) and self.stop is None:
            raise TokensDiffer(f"of {len(self.ids)} tokens {self._known} came again")
        if self._tail is None:
            self._tail = self._held() if self.stop is None else ""
            self.text += self._tail
        return self._tail

    def _held(self) -> str:
        text = self._decoder.finish()
        if self._finder is None:
            return text
        text = self._finder.feed(text)
        return text if self._finder.found else text + self._finder.rest()

    def _decoded(self, ids: Sequence[int]) -> tuple[str, int]:
        """The text to be shown of these, and how many of them the answer keeps."""
        finder = self._finder
        if finder is None:
            said = ids[:-1] if ids[-1] in self._silent else ids
            return self._decoder.feed(said), len(ids)
        text = ""
        for number, token in enumerate(ids, 1):
            if token not in self._silent:
                text += finder.feed(self._decoder.feed((token,)))
            if finder.found is not None:
                return text, number
        return text, len(ids)
