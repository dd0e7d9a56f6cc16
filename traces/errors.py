"""Errors in traces."""

import contextlib
import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path


class TraceError(ValueError):
    """A trace cannot be used; the message names the file, the line, what was found and what is allowed."""


def at_line(path: Path, line: int, found: str, allowed: str) -> TraceError:
    return TraceError(f"{path}:{line}: found {found}; allowed: {allowed}")


@contextlib.contextmanager
def numbered_lines(path: Path) -> Iterator[Iterator[tuple[int, str]]]:
    """Lines with their numbers, from 1 and without their ends; `.gz` is unpacked.

    Raises `TraceError` when the file cannot be read or is not text.
    """
    try:
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as file:
            yield ((number, line.rstrip("\r\n")) for number, line in enumerate(file, start=1))
    except (OSError, EOFError, zlib.error) as error:
        raise TraceError(f"{path}: cannot be read ({error})") from error
    except UnicodeDecodeError as error:
        raise TraceError(f"{path}: not text in UTF-8 ({error.reason})") from error
