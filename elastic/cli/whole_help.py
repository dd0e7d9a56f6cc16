"""Help in which the first sentence of each command stands whole, over as many lines as it takes."""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from typer.core import TyperGroup


class WholeHelp(TyperGroup):
    """A group of commands whose list cuts nothing."""

    def panels(self, ctx: Any) -> Mapping[str, Sequence[tuple[str, str]]]:
        """Return the commands that help lists under each title, with their first sentences."""
        commands = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        return {
            "Commands": [
                (name, one.get_short_help_str(sys.maxsize)) for name, one in commands if one and not one.hidden
            ]
        }

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        for title, rows in self.panels(ctx).items():
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)
