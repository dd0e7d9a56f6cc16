"""Help in which the first sentence of each command stands whole, over as many lines as it takes."""

import sys
from typing import Any

from typer.core import TyperGroup


class WholeHelp(TyperGroup):
    """A group of commands whose list cuts nothing."""

    def listed(self, ctx: Any) -> list[tuple[str, str]]:
        """Return the commands that help lists, with their first sentences."""
        commands = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        return [(name, one.get_short_help_str(sys.maxsize)) for name, one in commands if one and not one.hidden]

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        if rows := self.listed(ctx):
            with formatter.section("Commands"):
                formatter.write_dl(rows)
