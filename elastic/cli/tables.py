"""Lists for people, in which whatever is to be copied stays whole."""

from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table

from elastic.cli.output import console, emit

if TYPE_CHECKING:
    from pydantic import BaseModel

COPIED = frozenset(
    {"id", "run", "upload", "ticket", "job", "node", "group", "name", "email", "project", "resource", "url"}
)
"""Headings of columns that other commands take."""


_PADDING = 2
"""Columns of the terminal between two of a list."""
_FOLDED = 28
"""Columns of the terminal in which a long text, folded, can still be read."""


def listing(columns: Sequence[str], rows: Iterable[Sequence[str]], *, right: Collection[str] = ()) -> Table:
    """A table of these rows. What is to be copied is never cut or folded, though lines be longer than the terminal;
    all else is folded. The numbers of columns in `right` stand below each other."""
    cells = [columns, *rows]
    table = Table(box=None, header_style="dim")
    for number, column in enumerate(columns):
        whole = column in COPIED
        table.add_column(
            column,
            justify="right" if column in right else "left",
            no_wrap=whole,
            overflow="fold",
            min_width=max(cell_len(row[number]) for row in cells) if whole else None,
        )
    for row in cells[1:]:
        table.add_row(*row)
    return table


class FittedListing:
    """A list of which a terminal that is too narrow for it leaves out columns: those of `spare`, the first one first.
    Elsewhere it has all of them."""

    def __init__(
        self,
        columns: Sequence[str],
        rows: Iterable[Sequence[str]],
        *,
        spare: Sequence[str],
        right: Collection[str] = (),
    ) -> None:
        self._columns, self._rows, self._right, self._spare = columns, list(rows), right, spare

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        kept = list(range(len(self._columns)))
        for name in self._spare if options.is_terminal else ():
            if sum(map(self._width, kept)) <= options.max_width:
                break
            kept.remove(self._columns.index(name))
        rows = [[row[number] for number in kept] for row in self._rows]
        yield listing([self._columns[number] for number in kept], rows, right=self._right)

    def _width(self, number: int) -> int:
        whole = max(cell_len(row[number]) for row in (self._columns, *self._rows))
        return _PADDING + (whole if self._columns[number] in COPIED else min(whole, _FOLDED))


def show_listing(columns: Sequence[str], rows: Iterable[Sequence[str]], *, right: Collection[str] = ()) -> None:
    """Print such a table on standard output."""
    console().print(listing(columns, rows, right=right), crop=False)


def show_objects(found: Iterable["BaseModel"], columns: Sequence[str], *, as_json: bool) -> None:
    """A table of some of their fields, or all of them as JSON."""
    rows = [one.model_dump(mode="json") for one in found]
    if as_json:
        emit(rows)
        return
    show_listing(columns, [[_cell(row[column]) for column in columns] for row in rows])


def _cell(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else "-" if value in (None, "") else str(value)
