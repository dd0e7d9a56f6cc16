"""`elastic modal deploy`: what it says."""

from collections.abc import Sequence

from elastic.cli.output import emit, say
from elastic.compose.modal_deployment import deploy


def deploy_command(
    app: str, environment: str, packages: Sequence[str], modules: Sequence[str], *, as_json: bool
) -> None:
    """Raises `ConfigError`."""
    say(f"building and deploying {app}: an image that Modal has not seen takes some minutes")
    deployed = deploy(app, packages, modules, environment)
    if as_json:
        emit(deployed)
    else:
        say(f"deployed {deployed.app}, version {deployed.version}")
