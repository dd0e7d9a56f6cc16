"""The report as text: the closing table of a run in the terminal, Markdown for an issue or a notebook, JSON."""

import re
from collections.abc import Sequence
from typing import Any

import msgspec
from rich import box
from rich.table import Table as RichTable
from rich.text import Text

from elastic.report import tables, units
from elastic.report.comparison import Comparison
from elastic.report.document import Table
from elastic.report.summary import Summary
from elastic.system.plain_values import printable

_MARKDOWN_SPECIAL = re.compile(r"([\\`*_\[\]<>|~])")
SHOWN = ("provider", "leases", "preempted", "GPU time", "overhead", "tokens/s", "cost")
"""The columns of the table of providers that a terminal has room for."""
_OUTCOME_STYLES = {"finished": "green", "failed": "red"} | dict.fromkeys(
    ("stopped", "interrupted", "incomplete"), "yellow"
)


def as_json(summary: Summary, comparison: Comparison | None = None) -> dict[str, Any]:
    """The whole summary as plain JSON values, and under `comparison` how it stands beside another run."""
    plain = msgspec.to_builtins(summary, str_keys=True)
    return plain | ({"comparison": msgspec.to_builtins(comparison)} if comparison is not None else {})


def as_markdown(summary: Summary, comparison: Comparison | None = None) -> str:
    """The page's headline and tables in GitHub's Markdown."""
    parts = [f"# {_escaped(summary.run)}: {summary.outcome}"]
    if tables.subtitle(summary):
        parts.append(_escaped(tables.subtitle(summary)))
    if summary.diagnoses:
        said = [
            f"- {_escaped(one.says)} {_escaped(one.advice)} (see {_escaped(one.place)})" for one in summary.diagnoses
        ]
        parts += ["## What went wrong", "\n".join(said)]
    parts += [f"> **Note:** {_escaped(words)}" for words in tables.warnings(summary)]
    parts.append(
        "\n".join(f"- **{f.name}** {_escaped(f.value)} ({_escaped(f.detail)})" for f in tables.headline(summary))
    )
    for table in tables.tables(summary, comparison):
        parts += [f"## {table.title}", _markdown_table(table)]
        if table.note:
            parts.append(_escaped(table.note))
    return "\n\n".join(parts) + "\n"


def closing_table(summary: Summary) -> RichTable:
    """What stays in the terminal when a run is over, what went wrong first: 80 columns, legible without colour too.

    Where rollouts came from several providers, `alone` is what the run would have cost on each.
    """
    alone = {one.provider: units.usd(one.usd) for one in summary.alone}
    table = _rich(_title(summary), _caption(summary))
    table.padding, table.pad_edge = (0, 1, 0, 0), False
    said = tables.providers(summary)
    columns = [said.header.index(name) for name in SHOWN]
    names = [*SHOWN, "alone"] if alone else [*SHOWN]
    for i, name in enumerate(names):
        table.add_column(name, justify="right" if i else "left", header_style="dim", no_wrap=True)
    for row, bill in zip(said.rows, tables.bills(summary), strict=True):
        provider, *figures = (row[column] for column in columns)
        cells = [units.shortened(printable(provider), 12), *figures, *([alone.get(provider, "")] if alone else [])]
        table.add_row(*map(Text, cells), style="bold" if bill.usage is summary.total else "")
    return table


def causes(summary: Summary) -> list[RichTable | Text]:
    """What a failed run's trajectories have failed for, and where the first environment raised; empty for others."""
    found: list[RichTable | Text] = []
    if summary.outcome != "failed":
        return found
    if (said := tables.causes(summary)).rows:
        found.append(_rich_of(said))
    if summary.traceback:
        lines = [printable(line) for line in summary.traceback.splitlines()]
        found.append(Text("\n".join(["the first environment that raised:", *lines])))
    return found


def comparison_table(summary: Summary, comparison: Comparison) -> RichTable:
    """This run beside another, in the terminal."""
    return _rich_of(tables.cost(summary, comparison))


def _rich_of(said: Table) -> RichTable:
    """A table of two columns, words and a number."""
    table = _rich(Text(said.title), Text(said.note))
    words, value = said.header
    table.add_column(words, header_style="dim", overflow="fold")
    table.add_column(value, header_style="dim", justify="right", no_wrap=True)
    for row in said.rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    return table


def _rich(title: Text, caption: Text) -> RichTable:
    return RichTable(
        title=title,
        caption=caption,
        box=box.SIMPLE_HEAD,
        title_justify="left",
        caption_justify="left",
        title_style="",
        caption_style="",
    )


def _title(summary: Summary) -> Text:
    title = Text.assemble(
        (printable(summary.run), "bold"),
        " ",
        (summary.outcome, _OUTCOME_STYLES[summary.outcome]),
        f" after {units.duration(summary.wall_s)}",
    )
    for one in summary.diagnoses:
        title.append(f"\n! {printable(one.says)}", style="red")
        title.append(f" See {one.place!r} in the report.", style="dim")
    return title


def _caption(summary: Summary) -> Text:
    lines = [f"{figure.name:<20} {figure.value:>9}   {figure.detail}" for figure in tables.headline(summary)]
    text = Text("\n".join(lines))
    if summary.alone:
        text.append(
            "\nalone: the whole run's cost if this provider alone had made all rollouts, an estimate", style="dim"
        )
    for words in tables.warnings(summary):
        text.append("\n! " + printable(words), style="yellow")
    return text


def _markdown_table(table: Table) -> str:
    rule = [":--" if i == 0 else "--:" for i in range(len(table.header))]
    rows = [[_escaped(cell) for cell in row] for row in (table.header, *table.rows)]
    return "\n".join(map(_line, [rows[0], rule, *rows[1:]]))


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _escaped(words: str) -> str:
    return _MARKDOWN_SPECIAL.sub(r"\\\1", printable(words))
