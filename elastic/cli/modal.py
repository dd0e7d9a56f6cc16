"""`elastic modal`: what runs call on Modal."""

from typing import Annotated

import typer

from elastic.cli import deferred
from elastic.cli.hosted import AsJson
from elastic.cli.whole_help import WholeHelp
from elastic.system.modal import APP

_MODAL_HELP = """Deploy what runs call on Modal.

Example: elastic modal deploy --environment main
"""

modal = typer.Typer(cls=WholeHelp, name="modal", help=_MODAL_HELP, no_args_is_help=True, rich_markup_mode=None)
AppName = Annotated[str, typer.Option("--app", metavar="NAME", help="What the app is called on Modal.")]
EnvironmentName = Annotated[
    str, typer.Option("--environment", metavar="NAME", help="Modal's environment; else the profile's.")
]


@modal.command()
def deploy(
    app: AppName = APP,
    environment: EnvironmentName = "",
    package: Annotated[
        list[str] | None,
        typer.Option(metavar="REQUIREMENT", help="Install this in the image, too; as pip takes it."),
    ] = None,
    module: Annotated[
        list[str] | None,
        typer.Option(metavar="MODULE", help="Put this module or package into the image, such as a reward's."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Deploy reward functions and rollout workers, as this machine has Elastic; once, and after each upgrade.

    Example: elastic modal deploy --package "transformers>=5" --module my_rewards
    """
    deferred.modal_deployment.deploy_command(app, environment, package or [], module or [], as_json=as_json)
