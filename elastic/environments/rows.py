"""Rows of a data set: a file of JSON lines, or of Parquet, of which a group's number picks one."""

import importlib
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, cast

from elastic.environments.hub_rows import HUB, HubSource, HubUnreadable, check_hub, hub_rows
from elastic.system.plain_values import shown, told
from policies.curriculum import CURRICULA

Row: TypeAlias = Mapping[str, Any]
JSON_LINES, PARQUET = ".jsonl", ".parquet"


class BadData(Exception):
    """A data set cannot be used. The message names it, and has what was found and what is allowed."""


@dataclass(frozen=True, kw_only=True)
class DataSource:
    """Where rows are, how their columns are called, and in which order they come. A column may be dotted: it is looked
    up in what the first part is. An empty `answer` is none."""

    source: Path | HubSource
    prompt: str
    answer: str
    order: str
    seed: int
    columns: Sequence[str] = ()
    """Others that rows keep; all where none is named."""
    texts: bool = False
    """Whether prompts have to be texts, or lists of messages."""
    counted: int = 0
    """Rows that a curriculum chooses from; 0 where none chooses."""

    @property
    def named(self) -> list[str]:
        """The columns that every row must have."""
        return [name for name in (self.prompt, self.answer, *self.columns) if name]


@dataclass(frozen=True)
class Rows:
    """All rows of a source, each checked to have the columns."""

    source: DataSource
    rows: Sequence[Row]

    def of_group(self, place: int, chosen: int | None = None) -> Row:
        """The row that a group is about, before which as many came as its place says; the one that was `chosen`, where
        a curriculum has chosen one."""
        source = self.source
        return self.rows[CURRICULA[source.order](place, len(self.rows), source.seed) if chosen is None else chosen]

    def prompt(self, row: Row) -> Any:
        return column(row, self.source.prompt)

    def answer(self, row: Row) -> Any:
        return column(row, self.source.answer) if self.source.answer else None


def read_rows(source: DataSource) -> Rows:
    """Read all rows. Raises `BadData`."""
    rows = list(_checked(source))
    if not rows:
        raise BadData(f"{source.source}: has no rows; allowed: at least one")
    if len(rows) < source.counted:
        allowed = f"at least the {source.counted} that its order counts on (data.rows)"
        raise BadData(f"{source.source}: has {len(rows)} rows; allowed: {allowed}")
    return Rows(source, rows)


def check_first_row(source: DataSource, *, elsewhere: bool = False) -> None:
    """Raises `BadData` for what can be told of a file by its beginning. A data set of the hub is not loaded: it is only
    looked whether it could be, unless that is done `elsewhere`, by another interpreter."""
    if isinstance(source.source, HubSource):
        if not elsewhere:
            try:
                check_hub()
            except HubUnreadable as error:
                raise BadData(f"{source.source}: {error}") from error
        return
    if next(_checked(source), None) is None:
        raise BadData(f"{source.source}: has no rows; allowed: at least one")


def check_tasks(rows: Rows, tasks: int) -> None:
    """Raises `BadData` where there are fewer rows than tasks."""
    if tasks > (there := len(rows.rows)):
        raise BadData(f"found {tasks} tasks, but {rows.source.source} has {there} rows; allowed: up to {there}")


def prompts_of(rows: Rows) -> list[str]:
    """The prompts of all rows, each as a text by which equal ones are known."""
    return [json.dumps(rows.prompt(row), sort_keys=True, default=str) for row in rows.rows]


def check_held_out(name: str, tasks: Sequence[str], trained: Mapping[str, Collection[str]]) -> None:
    """Raises `BadData` where prompts of the tasks of the split `name` are among those that environments train on."""
    for environment, prompts in trained.items():
        if shared := sum(task in prompts for task in tasks):
            raise BadData(
                f"{shared} of the {len(tasks)} tasks of {name!r} have prompts that are trained on, by "
                f"{environment!r}; allowed: others"
            )


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
    try:
        for number, row in enumerate(_read(source.source)):
            for name in source.named:
                try:
                    column(row, name)
                except KeyError:
                    there = ", ".join(map(str, row)) or "none"
                    raise BadData(f"{source.source}: row {number} has no column {name!r}; it has {there}") from None
            prompt = column(row, source.prompt)
            if source.texts and not is_prompt(prompt):
                found = f"row {number}, column {source.prompt!r}: found {shown(prompt)}"
                raise BadData(f"{source.source}: {found}; allowed: a text, or a list of messages")
            yield _kept(row, source)
    except OSError as error:
        raise BadData(f"{source.source}: cannot be read ({error.strerror or error})") from error
    except HubUnreadable as error:
        raise BadData(f"{source.source}: {error}") from error


def _read(source: Path | HubSource) -> Iterator[Row]:
    if isinstance(source, HubSource):
        return hub_rows(source)
    if (read := _READERS.get(source.suffix)) is None:
        allowed = ", ".join([*(f"FILE{suffix}" for suffix in _READERS), f"{HUB}NAME"])
        raise BadData(f"{source}: found {source.suffix or 'no suffix'!r}; allowed: {allowed}")
    return read(source)


def _kept(row: Row, source: DataSource) -> Row:
    """The columns that are named, or what they are looked up in; all where no others are named."""
    if not source.columns:
        return row
    kept = {name if name in row else name.partition(".")[0] for name in source.named}
    return {name: value for name, value in row.items() if name in kept}


def is_prompt(found: Any) -> bool:
    """Whether it is a text, or a list of messages."""
    if isinstance(found, str):
        return True
    many = isinstance(found, Sequence) and len(cast("Sequence[Any]", found)) > 0
    return many and all(isinstance(one, Mapping) for one in cast("Sequence[Any]", found))


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
