"""`elastic config` and `elastic policies`: what the keys of a configuration mean, and which policies it may name.

`python -m elastic.cli.configuration > docs/configuration.md` makes the page.
"""

import sys
from itertools import groupby
from typing import Annotated

import typer

from elastic.cli.options import AsJson, group
from elastic.cli.output import console, emit
from elastic.cli.tables import show_listing
from elastic.compose.reference import POLICIES, KeyMeaning, explained, installed_policies, key_meanings
from elastic.config import ConfigError
from elastic.core.decisions import DECISIONS

HEAD = """# Configuration

Look up what a key of a TOML file means, its unit, default and bounds:

```
elastic config explain trainer.learning_rate     # also policies' settings, and keys of what others have installed
elastic policies                                 # the policies that a configuration may name
elastic run CONFIG --dry-run                     # what a configuration changes, and what it would acquire
```

Below are the keys of all runs, then those of the providers, engines, environments and pools of functions that come with
Elastic, then those of a pool of nodes that jobs share (POOL.toml; what a job asks of it is in the run's own `[job]`),
as the models of settings have them. `--set KEY=VALUE` overrides any of them.

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


def policies(
    decision: Annotated[
        str, typer.Argument(metavar="DECISION", help="Only those that make this decision, such as routing.")
    ] = "",
    as_json: AsJson = False,
) -> None:
    """List the policies that are installed, by the decision that each makes, with their settings.

    Example: elastic policies placement
    """
    if decision and decision not in DECISIONS:
        raise ConfigError(f"elastic policies: found {decision!r}; allowed: {', '.join(DECISIONS)}")
    found = [one for one in installed_policies() if decision in ("", one.decision)]
    if as_json:
        emit({"policies": found})
        return
    rows = [
        [one.decision, one.policy, one.fault or one.meaning, ", ".join(one.settings) or "none", one.code]
        for one in found
    ]
    show_listing(["decision", "policy", "what it does", "settings", "code"], rows)


def reference() -> str:
    """The page in Markdown."""
    parts = [HEAD]
    shown = [one for one in key_meanings() if not one.applies.startswith(POLICIES)]
    for (section, applies), keys in groupby(shown, lambda one: (one.section, one.applies)):
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
