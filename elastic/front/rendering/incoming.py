"""Text that comes bit by bit, and what a grammar finds in it. Pure.

A grammar is a generator that is written as if all of the text were there. It takes of `Incoming` what it expects, says
to `Findings` what it has read, and waits, by a bare `yield`, where it needs more text. So it finds the same however the
text is cut.
"""

import re
from collections.abc import Callable, Generator
from typing import NamedTuple, TypeAlias, TypeVar

T = TypeVar("T")
Reading: TypeAlias = Generator[None, None, T]
"""Gives a value in the end, and waits for more text meanwhile."""
Show: TypeAlias = Callable[[str], object]

_BLANK = re.compile(r"\s*")
_IN_STRING = re.compile(r'\\.|"', re.DOTALL)


class Incoming:
    """Text as it comes. What a grammar has taken is gone, but behind a `mark` it can be given back."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        """Up to here the text has been taken."""
        self._gone = 0
        self._marks: list[int] = []
        self._over = False

    def add(self, text: str) -> None:
        if self._at and not self._marks:
            self._gone += self._at
            self._text, self._at = self._text[self._at :], 0
        self._text += text

    def end(self) -> None:
        """No more text comes."""
        self._over = True

    @property
    def taken(self) -> int:
        """How many characters have been taken so far."""
        return self._gone + self._at

    # Taking back.

    def mark(self) -> None:
        """Keep what is taken from here on, for `back`."""
        self._marks.append(self._at)

    def back(self) -> None:
        """Return to the last mark, which is gone then."""
        self._at = self._marks.pop()

    def commit(self) -> None:
        """What was taken stays taken: all marks are gone."""
        self._marks.clear()

    def give_back(self, taken: str) -> None:
        """Return what was taken last."""
        self._at -= len(taken)

    # Taking.

    def blank(self) -> Reading[str]:
        """Take blank space, and return it."""
        taken = ""
        while True:
            found = _BLANK.match(self._text, self._at)
            assert found is not None
            self._at = found.end()
            taken += found[0]
            if self._at < len(self._text) or self._over:
                return taken
            yield

    def take(self, *literals: str) -> Reading[str]:
        """Take the one of these that is next, and return it: empty if none of them is."""
        longest_first = sorted(literals, key=len, reverse=True)
        while True:
            here = self._text[self._at : self._at + len(longest_first[0])]
            for literal in longest_first:
                if here.startswith(literal):
                    self._at += len(literal)
                    return literal
            if self._over or not any(literal.startswith(here) for literal in literals):
                return ""
            yield

    def row(self, *literals: str) -> Reading[bool]:
        """Take these one behind the other, with blank space before each. False at the first that is not next."""
        for literal in literals:
            yield from self.blank()
            if not (yield from self.take(literal)):
                return False
        return True

    def ended(self) -> Reading[bool]:
        """Whether nothing follows."""
        while self._at == len(self._text) and not self._over:
            yield
        return self._at == len(self._text)

    def show_until(self, show: Show, *markers: str) -> Reading[str]:
        """Show what is before the first of these markers, as it comes, and take both. Returns the marker; empty where
        the text ends before."""
        pattern = re.compile("|".join(map(re.escape, sorted(markers, key=len, reverse=True))) or "(?!)")
        while True:
            found = pattern.search(self._text, self._at)
            if found is not None:
                self._show(show, found.start())
                self._at = found.end()
                return found[0]
            self._show(show, len(self._text) if self._over else self._safe(markers))
            if self._over:
                return ""
            yield

    def until(self, *markers: str) -> Reading[tuple[str, str]]:
        """Take what is before the first of these markers, and the marker. Returns both."""
        shown: list[str] = []
        marker = yield from self.show_until(shown.append, *markers)
        return "".join(shown), marker

    def string(self) -> Reading[str]:
        """Take a string of JSON, if one is next, and return it with its quotes; empty if none is, or it has no end."""
        if not (yield from self.take('"')):
            return ""
        seen = 0
        while True:
            for found in _IN_STRING.finditer(self._text, self._at + seen):
                seen = found.end() - self._at
                if found[0] == '"':
                    taken, self._at = self._text[self._at : found.end()], found.end()
                    return '"' + taken
            if self._over:
                return ""
            seen = self._before_escape(self._at + seen, len(self._text)) - self._at
            yield

    def show_object(self, show: Show, close: str = "") -> Reading[bool]:
        """Show the object of JSON that is next, as it comes, and take it. Returns whether it has ended.

        It ends with its last bracket, by brackets and strings alone. One that is no JSON ends before `close`, too.
        Within a string of one line, `close` is text.
        """
        pattern = re.compile(rf'\\.|["\[\]{{}}\n]{"|" + re.escape(close) if close else ""}', re.DOTALL)
        depth, quoted, torn = 0, False, False
        while True:
            at, end = self._at, len(self._text) if self._over else self._safe((close,))
            for found in pattern.finditer(self._text, at, end):
                sign, at = found[0], found.end()
                if sign == '"':
                    quoted = not quoted
                elif sign == "\n":
                    torn = torn or quoted
                elif sign == close:
                    if torn or not quoted:
                        self._show(show, found.start())
                        return False
                elif not quoted and sign in "[]{}":
                    depth += 1 if sign in "[{" else -1
                    if not depth:
                        self._show(show, at)
                        return True
            self._show(show, end if self._over else self._before_escape(at, end))
            if self._over:
                return False
            yield

    def _before_escape(self, start: int, end: int) -> int:
        """The end, but for a backslash that what follows belongs to. Escapes before `start` are whole."""
        return end - 1 if start < end and self._text[end - 1] == "\\" else end

    def _show(self, show: Show, end: int) -> None:
        """Show and take what is before `end`."""
        if end > self._at:
            shown, self._at = self._text[self._at : end], end
            show(shown)

    def _safe(self, markers: tuple[str, ...]) -> int:
        """Up to where the text is the beginning of none of these markers."""
        text, size, first = self._text, len(self._text), len(self._text)
        for marker in markers:
            at = max(self._at, size - len(marker) + 1)
            while marker and (at := text.find(marker[0], at, first)) >= 0:
                if marker.startswith(text[at:]):
                    first = at
                    break
                at += 1
        return first


def without_blank_end(text: str) -> int:
    """Where the blank space at the end of a text begins."""
    return len(text.rstrip())


class Withheld:
    """Shows text, but for its end until more follows; `ends` says where that begins."""

    def __init__(self, show: Show, ends: Callable[[str], int] = without_blank_end) -> None:
        self._show = show
        self._ends = ends
        self._held = ""

    def __call__(self, text: str) -> None:
        text = self._held + text
        end = self._ends(text)
        self._held = text[end:]
        if end:
            self._show(text[:end])

    def rest(self) -> None:
        """Nothing follows: show what is held."""
        held, self._held = self._held, ""
        if held:
            self._show(held)


class CallPart(NamedTuple):
    """A call of a tool begins, with its `name`; or, without a name, its arguments go on."""

    name: str
    arguments: str = ""


class Read(NamedTuple):
    """What was found in text. Content in it is behind what belongs to a call from before."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[CallPart, ...] = ()


NOTHING = Read()


class Findings:
    """Gathers what a grammar finds.

    Blank space around calls is no content; other blank space is, once content follows or the answer ends.
    """

    def __init__(self) -> None:
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[CallPart] = []
        self._blank = ""
        self._behind_call = False

    def content(self, text: str) -> None:
        if self._behind_call:
            text = text.lstrip()
        shown = text.rstrip()
        if not shown:
            self._blank += text
            return
        self._content.append(self._blank + shown)
        self._blank = text[len(shown) :]
        self._behind_call = False

    def reasoning(self, text: str) -> None:
        self._reasoning.append(text)

    def call(self, name: str) -> None:
        """A call begins. Until the next one its arguments follow, and then content may."""
        self._calls.append(CallPart(name))
        self._blank, self._behind_call = "", True

    def arguments(self, text: str) -> None:
        self._calls.append(CallPart("", text))

    def end(self) -> None:
        """Nothing more is found."""
        if self._blank and not self._behind_call:
            self._content.append(self._blank)

    def taken(self) -> Read:
        """What was found since the last time."""
        if not (self._content or self._reasoning or self._calls):
            return NOTHING
        read = Read("".join(self._content), "".join(self._reasoning), tuple(self._calls))
        self._content, self._reasoning, self._calls = [], [], []
        return read


Grammar: TypeAlias = Callable[[Incoming, Findings], Reading[None]]


class Reader:
    """Reads text by a grammar, as it comes."""

    def __init__(self, grammar: Grammar) -> None:
        self._text, self._found = Incoming(), Findings()
        self._reading = grammar(self._text, self._found)

    def feed(self, text: str) -> Read:
        self._text.add(text)
        next(self._reading, None)
        return self._found.taken()

    def finish(self) -> Read:
        self._text.end()
        next(self._reading, None)
        self._found.end()
        return self._found.taken()
