"""`elastic environments`: what environments of a run need."""

from typing import Annotated

import typer

from elastic.cli.options import group
from elastic.compose.containers import dockerfile_lines

environments = group(
    "environments",
    "Write what the environments of a run need, such as a Dockerfile.\n\n"
    "Example: elastic environments dockerfile calculator",
)


@environments.command()
def dockerfile(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The environment that runs in the image.")] = "agent",
) -> None:
    """Print the lines that make an image one in which an environment can run (`environment.container`).

    Example: elastic environments dockerfile agent >> Dockerfile
    """
    typer.echo(f"# Environment {name}:")
    typer.echo(dockerfile_lines(), nl=False)
