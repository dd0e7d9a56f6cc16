"""`elastic config`: what the keys of a configuration mean.

`python -m elastic.cli.configuration > docs/configuration.md` makes the page.
"""

import sys
from itertools import groupby
from typing import Annotated

import typer

from elastic.cli.options import AsJson, group
from elastic.cli.output import console, emit
from elastic.compose.reference import KeyMeaning, explained, key_meanings

HEAD = """# Configuration

Every key of a run's TOML file, with its unit and default, as the models of settings say: those of all runs first, then
those of the providers, engines, environments and pools of functions that come with Elastic, then those of a pool of
nodes that jobs share (POOL.toml; what a job asks of it is in the run's own `[job]`). `elastic config explain
KEY` prints the same of one key or section, also of what others have installed, and `elastic run CONFIG --dry-run` what
a configuration changes. `--set KEY=VALUE` overrides any of them.

<!-- Made by `python -m elastic.cli.configuration > docs/configuration.md`. -->
"""


config = group(
    "config", "Say what the keys of a configuration mean.\n\nExample: elastic config explain trainer.learning_rate"
)


@config.command("explain")
def explain(
    key: Annotated[
        str, typer.Argument(metavar="KEY", help="A key, such as rollout.groups, or a section: trainer, providers.ec2.")
    ],
    as_json: AsJson = False,
) -> None:
    """Explain a key, or all of a section: what it means, its unit, default and bounds.

    Example: elastic config explain trainer.learning_rate
    """
    found = explained(key)
    if as_json:
        emit({"keys": found})
        return
    shown = console()
    for one in found:
        shown.print(one.line(), soft_wrap=True, highlight=False)
        shown.print(f"  {one.meaning}", soft_wrap=True, highlight=False)


def reference() -> str:
    """The page in Markdown."""
    parts = [HEAD]
    for (section, applies), keys in groupby(key_meanings(), lambda one: (one.section, one.applies)):
        parts.append(f"## {section or 'Top'}{f', {applies}' if applies else ''}\n")
        parts.append("| key | what | default | unit | meaning |\n| --- | --- | --- | --- | --- |")
        parts.append("\n".join(map(_row, keys)) + "\n")
    return "\n".join(parts)


def _row(one: KeyMeaning) -> str:
    name = one.key.removeprefix(f"{one.section}.")
    cells = (f"`{name}`", one.kind, f"`{one.default}`" if one.default else "required", one.unit, one.meaning)
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


if __name__ == "__main__":
    sys.stdout.write(reference())
