"""What a command tells its caller: lines, one JSON object, an exit code.

Terminals are closed and the readers of pipes leave while a run goes on: what is said then is lost, and nothing else.
"""

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NoReturn, TextIO, cast

import msgspec
import typer
from rich.console import Console

if TYPE_CHECKING:
    from pydantic import BaseModel

EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_STOPPED = 3
EXIT_INTERRUPTED = 130


def say(text: str) -> None:
    """A line on standard error."""
    with _unfailing(sys.stderr):
        typer.echo(text, err=True)


def emit(body: Any) -> None:
    """Print one JSON object on standard output."""
    typer.echo(msgspec.json.encode(body).decode())


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


def program() -> str:
    """What to type for this program: its name where a shell finds it, else its path."""
    return "elastic" if shutil.which("elastic") else str(Path(sys.executable).with_name("elastic"))


def console(*, stderr: bool = False) -> Console:
    """On standard output, or on standard error."""
    stream = sys.stderr if stderr else sys.stdout
    return Console(file=stream and cast(IO[str], _Unfailing(stream)), stderr=stderr)


class _Unfailing:
    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with _unfailing(self._stream):
            self._stream.write(text)
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
    """Such as 3 d 4 h, or 12 min."""
    minutes = round(seconds / 60)
    days, hours = divmod(minutes // 60, 24)
    if days:
        return f"{days} d {hours} h"
    return f"{hours} h {minutes % 60} min" if hours else f"{minutes} min"
