"""Rows of a data set: a file of JSON lines, or of Parquet, of which a group's number picks one."""

import importlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, cast

from elastic.system.plain_values import told
from policies.curriculum import CURRICULA

Row: TypeAlias = Mapping[str, Any]
JSON_LINES, PARQUET = ".jsonl", ".parquet"


class BadData(Exception):
    """A data set cannot be used. The message names it, and has what was found and what is allowed."""


@dataclass(frozen=True, kw_only=True)
class DataSource:
    """Where rows are, how their columns are called, and in which order they come. A column may be dotted: it is looked
    up in what the first part is. An empty `answer` is none."""

    source: Path
    prompt: str
    answer: str
    order: str
    seed: int


@dataclass(frozen=True)
class Rows:
    """All rows of a source, each checked to have the columns."""

    source: DataSource
    rows: Sequence[Row]

    def of_group(self, number: int) -> Row:
        """The row that the group with this number is about."""
        source = self.source
        return self.rows[CURRICULA[source.order](number, len(self.rows), source.seed)]

    def prompt(self, row: Row) -> Any:
        return column(row, self.source.prompt)

    def answer(self, row: Row) -> Any:
        return column(row, self.source.answer) if self.source.answer else None


def read_rows(source: DataSource) -> Rows:
    """Read all rows. Raises `BadData`."""
    rows = list(_checked(source))
    if not rows:
        raise BadData(f"{source.source}: has no rows; allowed: at least one")
    return Rows(source, rows)


def check_first_row(source: DataSource) -> None:
    """Raises `BadData` for what can be told of the file by its beginning."""
    if next(_checked(source), None) is None:
        raise BadData(f"{source.source}: has no rows; allowed: at least one")


def column(row: Row, name: str) -> Any:
    """What stands in a column. Raises `KeyError`."""
    found: Any = row
    if name in row:
        return row[name]
    for part in name.split("."):
        if not isinstance(found, Mapping):
            raise KeyError(part)
        found = cast("Row", found)[part]
    return found


def _checked(source: DataSource) -> Iterator[Row]:
    read = _READERS.get(source.source.suffix)
    if read is None:
        allowed = ", ".join(f"FILE{suffix}" for suffix in _READERS)
        raise BadData(f"{source.source}: found {source.source.suffix or 'no suffix'!r}; allowed: {allowed}")
    names = [name for name in (source.prompt, source.answer) if name]
    try:
        for number, row in enumerate(read(source.source)):
            for name in names:
                try:
                    column(row, name)
                except KeyError:
                    there = ", ".join(map(str, row)) or "none"
                    raise BadData(f"{source.source}: row {number} has no column {name!r}; it has {there}") from None
            yield row
    except OSError as error:
        raise BadData(f"{source.source}: cannot be read ({error.strerror or error})") from error


def _json_lines(path: Path) -> Iterator[Row]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines):
            if not line.strip():
                continue
            try:
                row: Any = json.loads(line)
            except ValueError as error:
                raise BadData(f"{path}: line {number + 1} is no JSON: {error}") from error
            if not isinstance(row, dict):
                raise BadData(f"{path}: line {number + 1}: found {type(row).__name__}; allowed: an object of columns")
            yield cast("Row", row)


def _parquet(path: Path) -> Iterator[Row]:
    try:
        parquet = importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise BadData(
            f"{path}: {told(error)}; allowed: `pip install -e '.[parquet]'` in a clone of elastic, or FILE{JSON_LINES}"
        ) from error
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches():
                yield from batch.to_pylist()
    except OSError:
        raise
    except Exception as error:
        raise BadData(f"{path}: is no Parquet file: {told(error)}") from error


_READERS: Mapping[str, Callable[[Path], Iterator[Row]]] = {JSON_LINES: _json_lines, PARQUET: _parquet}
