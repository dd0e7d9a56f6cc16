"""The reference page of the command line, as `--help` says it: `python -m elastic.cli.reference > docs/cli.md`."""

import sys
from collections.abc import Iterator
from typing import Any

import typer
from typer.main import get_command

from elastic.cli.app import app

WIDTH = 100
HEAD = """# Command line

Find a command and its options, what it prints and how it exits:

```
elastic --help                # the commands by what they are for
elastic run --help            # one of them
elastic doctor --json         # one JSON object instead of a table
```

Every command takes `--help`. Bad input ends with exit code 2 and one message; a run that failed with 1; one
that was stopped, by `elastic stop` or for its budget, with 3; an interrupted one with 130. `elastic run --resume RUN`
goes on. With `--json`, standard output has one JSON object and nothing else; progress and messages go to standard
error.

`elastic stop`, `cap` and `budget` speak to the run's process through the socket in its directory (`control.sock`),
which only the run's user can open. They return once the run's journal has the command, so that it also holds for the
next process that takes the run up; where no answer came, a command can be repeated under its id and is done once.

<!-- Made by `python -m elastic.cli.reference > docs/cli.md`. -->
"""


def reference() -> str:
    """The page in Markdown."""
    group = get_command(app)
    top = typer.Context(group, info_name="elastic", terminal_width=WIDTH)
    sections = [HEAD, _block(group.get_help(top))]
    for name in group.list_commands(top):  # type: ignore[attr-defined]
        sections += _sections(group.get_command(top, name), name, top)  # type: ignore[attr-defined]
    return "\n".join(sections)


def _sections(command: Any, name: str, above: typer.Context) -> Iterator[str]:
    """A command, and those below it."""
    if command.hidden:
        return
    context = typer.Context(command, info_name=name, parent=above, terminal_width=WIDTH)
    yield f"## {context.command_path}\n\n{_block(command.get_help(context))}"
    for inner, below in getattr(command, "commands", {}).items():
        yield from _sections(below, inner, context)


def _block(text: str) -> str:
    lines = "\n".join(line.rstrip() for line in text.strip().splitlines())
    return f"```text\n{lines}\n```\n"


if __name__ == "__main__":
    sys.stdout.write(reference())
