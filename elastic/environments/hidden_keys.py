"""Keys that nobody is to read in what an env worker prints: whoever has one speaks as a trajectory, or as its driver.

What users' code prints in this process is looked through. What a process that it starts prints is not.
"""

import contextlib
import io
import sys
from collections.abc import Iterator
from typing import TextIO

from elastic.protocol.run_secrets import AGENT, DRIVER, VIEWER

HIDDEN = "[key]"
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
            for key in self._keys:
                text = text.replace(key, HIDDEN)
        return text

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
        buffer: io.BufferedIOBase | None = getattr(stream, "buffer", None)
        return stream if buffer is None else _MaskedText(buffer, self)


class _MaskedText(io.TextIOWrapper):
    """Writes lines to a buffer that is another's."""

    def __init__(self, buffer: io.BufferedIOBase, keys: HiddenKeys) -> None:
        super().__init__(buffer, encoding="utf-8", errors="backslashreplace", line_buffering=True)  # type: ignore[arg-type]
        self._hidden = keys

    def write(self, text: str, /) -> int:
        super().write(self._hidden.masked(text))
        return len(text)

    def close(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            self.flush()
