"""Rows of a trace's file by their columns. Whatever is not as it must be is named with its line."""

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from traces.errors import TraceError, at_line, numbered_lines


class Row(NamedTuple):
    """One line's fields, by their columns' names."""

    path: Path
    line: int
    fields: Mapping[str, str]

    def wrong(self, found: str, allowed: str) -> TraceError:
        """Return an error that names the line."""
        return at_line(self.path, self.line, found, allowed)

    def number(self, column: str, least: float = 0.0) -> float:
        """Return a finite number. Raises `TraceError` if it is none, or below `least`."""
        text = self.fields[column]
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not least <= value < math.inf:
            raise self.wrong(f"{column} {text!r}", f"a number from {least:g} on")
        return value

    def whole(self, column: str, least: int = 0) -> int:
        """Return a whole number. Raises `TraceError` if it is none, or below `least`."""
        text = self.fields[column]
        if not (text.isascii() and text.isdigit() and int(text) >= least):
            raise self.wrong(f"{column} {text!r}", f"a whole number from {least} on")
        return int(text)


@contextlib.contextmanager
def rows(path: Path, columns: Sequence[str]) -> Iterator[Iterator[Row]]:
    """The rows below a header of these columns. Raises `TraceError`, also where there is none."""
    with numbered_lines(path) as lines:
        _, header = next(lines, (1, ""))
        if header != (wanted := ",".join(columns)):
            raise at_line(path, 1, repr(header), f"the header {wanted}")
        yield rows_of(path, columns, lines)


def rows_of(path: Path, columns: Sequence[str], lines: Iterator[tuple[int, str]]) -> Iterator[Row]:
    """The rows of numbered lines. Raises `TraceError`, also where there is none."""
    line = 0
    for line, text in lines:
        fields = text.split(",")
        if len(fields) != len(columns):
            raise at_line(path, line, f"{len(fields)} fields in {text!r}", f"{len(columns)}")
        yield Row(path, line, dict(zip(columns, fields, strict=True)))
    if not line:
        raise TraceError(f"{path}: no rows; allowed: at least one")
