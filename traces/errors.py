"""Errors in traces."""

import contextlib
import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path

from elastic.given import OtherEncoding, check_encoding


class TraceError(ValueError):
    """A trace cannot be used; the message names the file, the line, what was found and what is allowed."""


def at_line(path: Path, line: int, found: str, allowed: str) -> TraceError:
    return TraceError(f"{path}:{line}: found {found}; allowed: {allowed}")


@contextlib.contextmanager
def numbered_lines(path: Path) -> Iterator[Iterator[tuple[int, str]]]:
    """Lines with their numbers, from 1 and without their ends; `.gz` is unpacked.

    Raises `TraceError` when the file cannot be read or is not text in UTF-8, with a byte-order mark or without. Empty
    lines at its end count as its end.
    """
    opened = gzip.open if path.suffix == ".gz" else open
    try:
        with opened(path, "rb") as file:
            check_encoding(file.read(4))
        with opened(path, "rt", encoding="utf-8-sig") as file:
            yield _without_last_empty(enumerate(file, start=1))
    except (OSError, EOFError, zlib.error) as error:
        raise TraceError(f"{path}: cannot be read ({error})") from error
    except UnicodeDecodeError as error:
        raise TraceError(f"{path}: not text in UTF-8 ({error.reason})") from error
    except OtherEncoding as error:
        raise TraceError(f"{path}: {error}") from error


def _without_last_empty(lines: Iterator[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    empty: list[int] = []
    for number, line in lines:
        if not line.strip():
            empty.append(number)
            continue
        yield from ((number, "") for number in empty)
        empty.clear()
        yield number, line.rstrip("\r\n")
