"""Log files that are read while they grow: whole lines, each with the place behind it."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from elastic.protocol.api import LogLine

READ_BYTES = 256 * 1024
LINE_BYTES_MAX = 64 * 1024
"""A longer line is told in pieces."""
TAIL_BYTES_MAX = 64 * 2**20
"""What is looked through for the last lines: a file without any may be of any size, and take no room."""


class LogGone(Exception):
    """The place is of another file, or of one that was replaced."""


def log_files(directory: Path) -> list[str]:
    """The names of the logs in a directory, without what they end in."""
    return sorted(path.stem for path in directory.glob("*.log"))


class LogFollower:
    """Reads the file that `open_file` opens from a place on; one that is not there yet (`FileNotFoundError`) is
    empty."""

    def __init__(self, name: str, open_file: Callable[[], BinaryIO]) -> None:
        self.name = name
        self._open = open_file
        self._offset = 0

    def seek(self, after: str, tail: int | None) -> None:
        """Begin behind the line with this id, or else with the last `tail` lines, or the first. Raises `LogGone`."""
        size = self.size()
        if after:
            name, _, offset = after.rpartition(":")
            if name != self.name or not offset.isdecimal() or len(offset) > 18 or int(offset) > size:
                raise LogGone(after)
            self._offset = int(offset)
        elif tail is not None:
            self._offset = self._begin_of_last(tail, size)

    def at_end(self) -> bool:
        return self._offset >= self.size()

    def read(self, *, over: bool = False) -> list[LogLine]:
        """Lines that are there now, up to a bound; of the last one only when it has its end, is too long, or nothing
        follows because all is `over`. A file that has become shorter is another one, or was cut: it is read anew."""
        try:
            with self._open() as file:
                if os.fstat(file.fileno()).st_size < self._offset:
                    self._offset = 0
                file.seek(self._offset)
                data = file.read(READ_BYTES)
        except FileNotFoundError:
            return []
        lines = list(self._lines(data))
        if over and data and not lines:
            self._offset += len(data)
            lines = [self._line(data)]
        return lines

    def _line(self, data: bytes) -> LogLine:
        return LogLine(id=f"{self.name}:{self._offset}", line=data.decode(errors="replace").rstrip("\r"))

    def _lines(self, data: bytes) -> Iterator[LogLine]:
        begin = 0
        while begin < len(data):
            end = data.find(b"\n", begin, begin + LINE_BYTES_MAX)
            if end < 0 and len(data) - begin < LINE_BYTES_MAX:
                return
            stop = end + 1 if end >= 0 else begin + LINE_BYTES_MAX
            self._offset += stop - begin
            yield self._line(data[begin : end if end >= 0 else stop])
            begin = stop

    def size(self) -> int:
        """Return the file's size in bytes."""
        try:
            with self._open() as file:
                return os.fstat(file.fileno()).st_size
        except FileNotFoundError:
            return 0

    def _begin_of_last(self, lines: int, size: int) -> int:
        """Return where the last `lines` whole lines begin, or what is looked through for them."""
        if not size or not lines:
            return size
        found, end, first = 0, size, max(0, size - TAIL_BYTES_MAX)
        with self._open() as file:
            while end > first:
                begin = max(first, end - READ_BYTES)
                file.seek(begin)
                data = file.read(end - begin)
                place = len(data)
                while (place := data.rfind(b"\n", 0, place)) >= 0:
                    found += 1
                    if found > lines:  # The last of them only ends the last line.
                        return begin + place + 1
                end = begin
        return first
