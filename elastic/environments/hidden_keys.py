"""Keys that nobody is to read in what an env worker prints: whoever has one speaks as a trajectory, or as its driver.

What users' code prints in this process is looked through, however it is cut into pieces, as long as it goes through
`sys.stdout` or `sys.stderr`. What a process that it starts prints is not.
"""

import contextlib
import io
import sys
import threading
from collections.abc import Iterator
from typing import Any, BinaryIO, TextIO

from elastic.protocol.run_secrets import AGENT, DRIVER, VIEWER

HIDDEN = "[key]"
LINE_BYTES_MAX = 64 * 1024
"""Of a line that is kept until it is whole."""
_BEGINNINGS = tuple(f"{kind}." for kind in (AGENT, DRIVER, VIEWER))


class HiddenKeys:
    """Starts with those that are hidden as long as the process lasts; an empty one is none."""

    def __init__(self, *keys: str) -> None:
        self._keys = {key for key in keys if key}

    @contextlib.contextmanager
    def one(self, key: str) -> Iterator[None]:
        """Hide another key while the context lasts."""
        self._keys.add(key)
        try:
            yield
        finally:
            self._keys.discard(key)

    def masked(self, text: str) -> str:
        if any(beginning in text for beginning in _BEGINNINGS):
            for key in tuple(self._keys):  # Other threads print while keys come and go.
                text = text.replace(key, HIDDEN)
        return text

    def masked_bytes(self, said: bytes) -> bytes:
        if any(beginning.encode() in said for beginning in _BEGINNINGS):
            for key in tuple(self._keys):  # Other threads print while keys come and go.
                said = said.replace(key.encode(), HIDDEN.encode())
        return said

    @contextlib.contextmanager
    def in_output(self) -> Iterator[None]:
        """Hide them in what is printed while the context lasts."""
        before = sys.stdout, sys.stderr
        sys.stdout, sys.stderr = (self._looking_through(stream) for stream in before)
        try:
            yield
        finally:
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(OSError, ValueError):
                    stream.flush()
            sys.stdout, sys.stderr = before

    def _looking_through(self, stream: TextIO) -> TextIO:
        buffer: BinaryIO | None = getattr(stream, "buffer", None)
        return stream if buffer is None else _MaskedText(_MaskedLines(buffer, self))


class _MaskedText(io.TextIOWrapper):
    """Leaves what it writes to open as it ends: that is another's."""

    def __init__(self, lines: "_MaskedLines") -> None:
        super().__init__(lines, encoding="utf-8", errors="backslashreplace", line_buffering=True)  # type: ignore[arg-type]

    def close(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            self.flush()


class _MaskedLines(io.BufferedIOBase):
    """Writes whole lines to another stream. The last one is kept until it is whole, flushed, or too long."""

    def __init__(self, stream: BinaryIO, keys: HiddenKeys) -> None:
        self._stream = stream
        self._keys = keys
        self._kept = b""
        self._writing = threading.RLock()

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._stream.fileno()

    def isatty(self) -> bool:
        return self._stream.isatty()

    def write(self, data: Any, /) -> int:
        given = bytes(data)
        with self._writing:
            said = self._kept + given
            whole = said.rfind(b"\n") + 1
            if len(said) - whole > LINE_BYTES_MAX:
                whole = len(said)
            self._say(said[:whole])
            self._kept = said[whole:]
        return len(given)

    def flush(self) -> None:
        with self._writing:
            self._say(self._kept)
            self._kept = b""
            self._stream.flush()

    def _say(self, said: bytes) -> None:
        if said:
            self._stream.write(self._keys.masked_bytes(said))
