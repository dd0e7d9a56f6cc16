"""Tickets as commands hand them out: in a file, or on standard output."""

import tempfile
from pathlib import Path
from typing import Any

import msgspec
import typer

from elastic.cli.output import emit
from elastic.config import ConfigError
from elastic.system.files import write_whole


def check_output(output: Path | None) -> None:
    """Raise `ConfigError` for a file that cannot be written: a ticket that has been minted is not shown again."""
    if output is None:
        return
    try:
        if output.is_dir():
            raise ConfigError(f"--output: {output}: is a directory; allowed: a file")
        output.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=output.parent):
            pass
    except OSError as error:
        raise ConfigError(f"--output: {output}: cannot be written ({error.strerror})") from error


def hand_out(ticket: msgspec.Struct, output: Path | None, told: dict[str, Any] | None) -> None:
    """Write a ticket to its file, or print it: as it is, or as JSON with what is `told` of it."""
    content = msgspec.json.format(msgspec.json.encode(ticket)) + b"\n"
    if output is not None:
        write_whole(output, content)
    elif told is None:
        typer.echo(content.decode(), nl=False)
    if told is not None:
        emit(told | {"file": output and str(output)} | ({} if output else {"content": ticket}))
