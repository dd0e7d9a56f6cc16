"""A report's parts in the order in which they are read, and the page of them: it opens offline, follows the reader's
colour scheme and prints on paper.

What is not `Markup` is text: pages are well-formed XML, whatever a run, a provider or an error calls itself.
"""

import re
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

import msgspec
from jinja2 import Environment, FunctionLoader, StrictUndefined, Template
from markupsafe import Markup

from elastic.report.samples import Samples
from elastic.report.svg import Picture, text_width
from elastic.system.plain_values import printable

HALF_CHARACTERS = 60
"""What half of the page's width holds in a table's type."""
FIRST_CHARACTERS, GAP_CHARACTERS = 16, 1.5
"""What of that a table's first column takes at the least, whose words wrap, and the space before each other one."""
_NO_NAME = re.compile(r"[^a-z0-9]+")


class Concern(NamedTuple):
    """Something that a reader looks for first, with what to do about it; `place` is the title of the chart or of the
    table that shows it."""

    says: str
    advice: str
    place: str


class Figure(NamedTuple):
    """One headline number with its label and its explanation."""

    name: str
    value: str
    detail: str = ""


class Chart(msgspec.Struct, frozen=True, kw_only=True):
    """A picture, None where there was nothing to draw; a `wide` one takes the page's whole width."""

    title: str
    picture: Picture | None
    caption: str
    wide: bool = False


class Table(msgspec.Struct, frozen=True, kw_only=True):
    """Rows of text under `header`; every column but the first is numeric. `note` says how to read it."""

    title: str
    header: list[str]
    rows: list[list[str]]
    note: str = ""

    @property
    def wide(self) -> bool:
        """Whether it takes the page's whole width."""
        _, *others = zip(self.header, *self.rows, strict=True)
        taken = sum(max(map(len, column)) + GAP_CHARACTERS for column in others)
        return FIRST_CHARACTERS + taken > HALF_CHARACTERS


class LinkedFile(NamedTuple):
    """What it is called, and the address of a file beside the page."""

    words: str
    address: str


class Page(msgspec.Struct, frozen=True, kw_only=True):
    """A whole report; `title` is the window's."""

    title: str
    heading: str
    outcome: str = ""
    subtitle: str = ""
    concerns: list[Concern] = []
    warnings: list[str] = []
    headline: list[Figure]
    charts: list[Chart]
    tables: list[Table]
    samples: Samples | None = None
    inspect_links: list[LinkedFile] = []

    def address(self, title: str) -> str:
        """Where the chart of this title is in the page, else the table; empty where there is neither."""
        shown = {chart.title for chart in self.charts}
        if title in shown:
            return f"#{anchor('chart', title)}"
        return f"#{anchor('table', title)}" if any(table.title == title for table in self.tables) else ""


def anchor(kind: str, title: str) -> str:
    """The name of a place in a page, the same in every report."""
    return f"{kind}-{_NO_NAME.sub('-', title.lower()).strip('-')}"


def as_html(page: Page) -> str:
    return _template().render(page=page, style=Markup(colours() + _part("report.css")))


def colours() -> str:
    """The colours of reports, which the server's pages share, as a style sheet."""
    return _part("colours.css")


@cache
def _template() -> Template:
    loader = FunctionLoader(_part)
    pages = Environment(
        loader=loader,
        autoescape=True,
        finalize=_written,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    offered: dict[str, Any] = pages.globals
    offered |= {"text_width": text_width, "anchor": anchor}
    pages.filters["lines"] = _lines
    return pages.get_template("page.html.j2")


def _part(name: str) -> str:
    return files("elastic.report").joinpath(name).read_text(encoding="utf-8")


def _lines(text: str) -> Markup:
    """A text of several lines, each as `_written` has it."""
    return Markup("\n").join(printable(line) for line in text.split("\n"))


def _written(value: Any) -> Any:
    """A value as it stands in a page: coordinates with two digits, words on one line, markup as it is."""
    if isinstance(value, Markup):
        return value
    return f"{value:.2f}" if isinstance(value, float) else printable(str(value))
