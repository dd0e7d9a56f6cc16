"""What a command tells its caller: lines, one JSON object, an exit code.

Terminals are closed, disks fill and the readers of pipes leave while a run goes on: what is said then is lost, and
nothing else. A program whose standard output was lost says so at its end, in its exit code, too.
"""

import errno
import io
import json
import os
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NoReturn, TextIO, cast

import msgspec
import typer

if TYPE_CHECKING:
    from pydantic import BaseModel
    from rich.console import Console

EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_STOPPED = 3
EXIT_INTERRUPTED = 130
UNCUT_COLUMNS = 10_000
_PADDING = re.compile(r" +(?=\n)")
_lost: list[OSError] = []
"""Why standard output could not be written, each time since `prepare_streams`."""


def say(text: str) -> None:
    """A line on standard error."""
    with _unfailing(sys.stderr):
        typer.echo(text, err=True)


def prepare_streams() -> None:
    """Have standard input, output and error, whatever this program was started with.

    A closed one leads nowhere: what opens files later would get its number, and libraries abort. What a terminal has no
    characters for is a question mark.
    """
    _lost.clear()
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # The lowest number that is free: this one.
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115 - it stays open
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="replace")
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout is sys.__stdout__:
        told = {"encoding": sys.stdout.encoding, "errors": sys.stdout.errors, "line_buffering": True}
        sys.stdout = io.TextIOWrapper(io.BufferedWriter(_StandardOutput(1, "w", closefd=False)), **told)


@contextmanager
def whole_output() -> Iterator[None]:
    """Around a program: where standard output could not be written, it says so and ends with another code than 0. To
    readers of a pipe who have left nothing is said."""
    try:
        yield
    except (SystemExit, OSError) as ended:
        with _unfailing(sys.stdout):
            sys.stdout.flush()
        if not _lost:
            raise
        if _lost[0].errno != errno.EPIPE:
            say(f"error: standard output: {_lost[0].strerror}")
        raise SystemExit((ended.code if isinstance(ended, SystemExit) else 0) or EXIT_FAILED) from ended


def emit(body: Any) -> None:
    """Print one JSON object on standard output, in ASCII where that is not UTF-8."""
    text = msgspec.json.encode(body).decode()
    is_utf8 = (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
    typer.echo(text if is_utf8 or text.isascii() else json.dumps(json.loads(text)))


def tell(resource: "BaseModel", words: str, *, as_json: bool) -> None:
    """Print a resource of the API as JSON, or these words about it."""
    if as_json:
        emit(resource.model_dump(mode="json"))
    else:
        say(words)


def bad_input(message: str) -> NoReturn:
    """End the program because of what it was given."""
    say(f"error: {message}")
    raise SystemExit(EXIT_BAD_INPUT)


def failed(message: str) -> NoReturn:
    """End the program because something did not come about."""
    say(f"error: {message}")
    raise SystemExit(EXIT_FAILED)


def program() -> str:
    """What to type for this program: its name where a shell finds it, else its path."""
    return "elastic" if shutil.which("elastic") else str(Path(sys.executable).with_name("elastic"))


def console(*, stderr: bool = False) -> "Console":
    """On standard output, or on standard error. In pipes and files no line is cut or padded; brackets are what they
    are."""
    from rich.console import Console  # Most commands that programs start show nothing.

    stream = sys.stderr if stderr else sys.stdout
    return Console(file=cast(IO[str], _Unfailing(stream)), stderr=stderr, width=_width(stream), markup=False)


def _width(stream: TextIO) -> int | None:
    """What a program reads is not cut; for people a line has as many columns as their terminal."""
    return None if stream.isatty() or "COLUMNS" in os.environ else UNCUT_COLUMNS


class _StandardOutput(io.FileIO):
    """What cannot be written is noted."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            _lost.append(error)
            raise


class _Unfailing:
    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with _unfailing(self._stream):
            self._stream.write(text if self._stream.isatty() else _PADDING.sub("", text))
        return len(text)

    def flush(self) -> None:
        with _unfailing(self._stream):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def _unfailing(stream: TextIO) -> Iterator[None]:
    """A stream that cannot be written leads nowhere from then on, with what it still holds."""
    try:
        yield
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def duration(seconds: float) -> str:
    """Such as 3 d 4 h, 12 min or 40 s."""
    if seconds < 59.5:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    days, hours = divmod(minutes // 60, 24)
    if days:
        return f"{days} d {hours} h"
    return f"{hours} h {minutes % 60} min" if hours else f"{minutes} min"
