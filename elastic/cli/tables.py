"""Lists for people, in which whatever is to be copied stays whole."""

from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len
from rich.table import Table

from elastic.cli.output import console, emit

if TYPE_CHECKING:
    from pydantic import BaseModel

COPIED = frozenset(
    {"id", "run", "upload", "ticket", "job", "node", "group", "name", "email", "project", "resource", "url"}
)
"""Headings of columns that other commands take."""


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
