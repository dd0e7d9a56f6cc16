"""`elastic agents`: where agents reach a run that they drive, and which keys they show."""

from pathlib import Path
from typing import Annotated

import typer

from elastic.cli.account import run_on_disk
from elastic.cli.options import AnyRunName, AsJson, Remote, RunsDirectory, group
from elastic.cli.output import bad_input, emit
from elastic.cli.remote import is_hosted, latest, server
from elastic.compose.agents import agents_url
from elastic.compose.runs import is_claimed, load_run_config
from elastic.core.ids import agent_id, parse_agent_id
from elastic.protocol.endpoint import Address
from elastic.protocol.run_secrets import RunSecrets
from elastic.protocol.tls import own_authority
from elastic.runtime.journal import AGENTS, RunDirectory

agents = group(
    "agents",
    "Show where agents reach a run, and the keys that they need.\n\nExample: elastic agents url latest",
)

MAIN = "main"
"""The driver whose key is printed where no other is named."""


@agents.command("url")
def show_url(
    name: AnyRunName = "latest",
    remote: Remote = False,
    as_json: AsJson = False,
    directory: RunsDirectory = Path("runs"),
) -> None:
    """Print the base URL of a run's agents, for OPENAI_BASE_URL. Where the run has made its own certificate, --json
    names the file to trust.

    Example: OPENAI_BASE_URL=$(elastic agents url latest)
    """
    if remote or is_hosted(name):
        with server() as client:
            hosted = client.agents(latest(client, name))
        _print(hosted.base_url, hosted.model_dump(mode="json"), as_json=as_json)
        return
    run = run_on_disk(directory, name)
    url = base_url(run)
    authority = own_authority(run.path) if url.startswith("https:") else None
    told: dict[str, object] = {
        "run": run.name,
        "base_url": url,
        "certificate": None if authority is None else str(authority.resolve()),
    }
    _print(url, told, as_json=as_json)


@agents.command("key")
def show_key(
    name: AnyRunName = "latest",
    driver: Annotated[
        str,
        typer.Option(metavar="NAME", help="Name of a program that opens trajectories; each driver sees only its own."),
    ] = MAIN,
    trajectory: Annotated[
        str, typer.Option(metavar="ID", help="The key of one trajectory's agent, instead of a driver's.")
    ] = "",
    viewer: Annotated[
        bool,
        typer.Option("--viewer", help="A viewer's key, which only chats with the policy, instead of a driver's."),
    ] = False,
    control: Annotated[
        bool,
        typer.Option("--control", help="The key of a trainer outside, which offers weights and asks for rollouts."),
    ] = False,
    requests: Annotated[
        bool, typer.Option("--requests", help="The key of a client that only asks for rollouts of such a run.")
    ] = False,
    remote: Remote = False,
    as_json: AsJson = False,
    directory: RunsDirectory = Path("runs"),
) -> None:
    """Print the key of a driver, an agent or a trainer outside, for OPENAI_API_KEY.

    Example: OPENAI_API_KEY=$(elastic agents key latest)
    """
    if not driver.replace("_", "").isalnum() or not driver.isascii():
        bad_input(f"--driver: found {driver!r}; allowed: letters, digits and _")
    wanted = {"--trajectory": trajectory, "--viewer": viewer, "--control": control, "--requests": requests}
    if len(given := [option for option, value in wanted.items() if value]) > 1:
        bad_input(f"{', '.join(given)}: found {len(given)}; allowed: one of them")
    if remote or is_hosted(name):
        if control or requests:
            bad_input(f"{given[0]} is for runs on disk: a server runs none that somebody else trains")
        if trajectory:
            bad_input("--trajectory is for runs on disk; a server's run gives a trajectory's key as it is opened")
        with server() as client:
            hosted = client.agents(latest(client, name), driver)
        key = hosted.viewer_key if viewer else hosted.key
        if key is None:
            bad_input("the key of this login reads runs alone, and a driver's is for runners; allowed: --viewer")
        _print(key, hosted.model_dump(mode="json"), as_json=as_json)
        return
    run = run_on_disk(directory, name)
    if (control or requests) and load_run_config(run.path).doors is None:
        bad_input(f"run {run.name} trains by itself; {given[0]} is for one of `elastic serve-rollouts`")
    base_url(run)
    secrets = RunSecrets.of(run.path)
    if control or requests:
        key, of = secrets.control_key() if control else secrets.requests_key(), {given[0].removeprefix("--"): True}
    elif trajectory:
        try:
            named = parse_agent_id(trajectory)
        except ValueError:
            bad_input(
                f"--trajectory: found {trajectory!r}; allowed: an id as POST /trajectories gives it, such as 0-3-1"
            )
        key, of = secrets.agent_key(named, 0), dict[str, object](trajectory=agent_id(named))
    elif viewer:
        key, of = secrets.viewer_key(), {"viewer": True}
    else:
        key, of = secrets.driver_key(driver), {"driver": driver}
    _print(key, {"run": run.name, **of, "key": key}, as_json=as_json)


def _print(text: str, told: dict[str, object], *, as_json: bool) -> None:
    if as_json:
        emit(told)
    else:
        typer.echo(text)


def base_url(run: RunDirectory) -> str:
    """The address of a run's fronts, with the prefix that clients of OpenAI's API expect."""
    with run.newest_journal() as journal:
        served = journal.meta().get(AGENTS, "")
    if not served or not is_claimed(run.path):
        what = "does not go on now" if served else 'is not driven by agents: environment.name = "outside" is'
        bad_input(f"run {run.name} {what}")
    return agents_url(load_run_config(run.path), Address.parse(served))
