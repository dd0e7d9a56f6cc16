"""`elastic modal`: what runs call on Modal."""

from typing import Annotated

import typer

from elastic.cli.options import AsJson, group
from elastic.cli.output import emit, say
from elastic.compose.modal_deployment import deploy as deploy_app
from elastic.system.modal import APP

modal = group("modal", "Deploy on Modal the app that runs call.\n\nExample: elastic modal deploy --environment main")
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
    say(f"building and deploying {app}: an image that Modal has not seen takes some minutes")
    deployed = deploy_app(app, package or [], module or [], environment)
    if as_json:
        emit(deployed)
    else:
        say(f"deployed {deployed.app}, version {deployed.version}")
