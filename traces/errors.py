"""Errors in traces."""

import contextlib
import gzip
import itertools
import zlib
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import IO

from elastic.system.given import OtherEncoding, check_encoding


class TraceError(ValueError):
    """A trace cannot be used; the message names the file, the line, what was found and what is allowed."""


FOUND_CHARACTERS, LINE_CHARACTERS = 200, 1_000_000
UNTRUSTED_BYTES = 32 * 2**20
"""Bytes of an unpacked trace that are read of who is not trusted."""
LINE_BYTES = 32
"""What a line costs, besides its characters."""
_untrusted: ContextVar[bool] = ContextVar("untrusted", default=False)


@contextlib.contextmanager
def untrusted() -> Iterator[None]:
    """A context in which files are those of somebody else: errors quote nothing of them, and large ones are refused."""
    token = _untrusted.set(True)
    try:
        yield
    finally:
        _untrusted.reset(token)


def at_line(path: Path, line: int, found: str, allowed: str) -> TraceError:
    if _untrusted.get():
        return TraceError(f"{path}:{line}: is not as it must be; allowed: {allowed}")
    shown = found if len(found) <= FOUND_CHARACTERS else f"{found[:FOUND_CHARACTERS]}…"
    return TraceError(f"{path}:{line}: found {shown}; allowed: {allowed}")


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
            yield _without_last_empty(_bounded(path, file))
    except (OSError, EOFError, zlib.error) as error:
        raise TraceError(f"{path}: cannot be read ({error})") from error
    except UnicodeDecodeError as error:
        raise TraceError(f"{path}: not text in UTF-8 ({error.reason})") from error
    except OtherEncoding as error:
        raise TraceError(f"{path}: {error}") from error


def _bounded(path: Path, file: IO[str]) -> Iterator[tuple[int, str]]:
    """Number lines, none of which is longer than any trace's. Raises `TraceError`."""
    read = 0
    for number in itertools.count(1):
        line = file.readline(LINE_CHARACTERS)
        if not line:
            return
        read += len(line) + LINE_BYTES
        if len(line) == LINE_CHARACTERS:
            raise at_line(path, number, "a longer line", f"at most {LINE_CHARACTERS} characters")
        if _untrusted.get() and read > UNTRUSTED_BYTES:
            raise TraceError(f"{path}: larger than {UNTRUSTED_BYTES} bytes, unpacked; allowed: as many")
        yield number, line


def _without_last_empty(lines: Iterator[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    empty: list[int] = []
    for number, line in lines:
        if not line.strip():
            empty.append(number)
            continue
        yield from ((number, "") for number in empty)
        empty.clear()
        yield number, line.rstrip("\r\n")
