"""`elastic environments`: what environments of a run need."""

from typing import Annotated

import typer

from elastic.cli.options import group
from elastic.compose.containers import dockerfile_lines
from elastic.compose.reference import ENVIRONMENTS
from elastic.config import ConfigError
from elastic.system.installed import installed

environments = group(
    "environments",
    "Write what the environments of a run need, such as a Dockerfile.\n\n"
    "Example: elastic environments dockerfile verifiers",
)


@environments.command()
def dockerfile(
    kind: Annotated[
        str, typer.Argument(metavar="KIND", help="The kind of environment that runs in the image.")
    ] = "agent",
) -> None:
    """Print the lines that make an image one in which a kind of environment can run (`environment.container`).

    Example: elastic environments dockerfile agent >> Dockerfile
    """
    if kind not in (kinds := installed(ENVIRONMENTS)):
        raise ConfigError(f"elastic environments dockerfile: found {kind!r}; allowed: {', '.join(sorted(kinds))}")
    typer.echo(f"# Environments of kind {kind}:")
    typer.echo(dockerfile_lines(kind), nl=False)
