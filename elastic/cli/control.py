"""`elastic stop`, `elastic cap` and `elastic budget`: commands to a run's process, on the machine where it is, or by
its server."""

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Annotated, Any

import typer

from elastic.cli.account import run_on_disk
from elastic.cli.options import AnyRunName, AsJson, CommandIdOption, Remote, RunName, RunsDirectory, dollars_of, gpus_of
from elastic.cli.output import EXIT_BAD_INPUT, EXIT_FAILED, emit, program, say, tell
from elastic.cli.remote import is_hosted, latest, server
from elastic.config import ConfigError
from elastic.protocol.api import RunChange
from elastic.protocol.run_control import (
    Acknowledged,
    CommandRefused,
    ControlError,
    RunControl,
    RunNotFound,
    RunSilent,
    new_command_id,
)
from elastic.runtime.journal import RunDirectory

_BAD_INPUT = ("invalid", "unknown_provider", "conflict")
"""Codes of refusals that are the caller's mistakes."""


def stop(
    name: AnyRunName,
    force: Annotated[
        bool, typer.Option("--force", help="On a server: kill the run's processes, without a checkpoint.")
    ] = False,
    reason: Annotated[
        str, typer.Option(help="For a run on disk: the reason, which the report shows.")
    ] = "stopped from the command line",
    command_id: CommandIdOption = "",
    remote: Remote = False,
    as_json: AsJson = False,
    directory: RunsDirectory = Path("runs"),
) -> int:
    """Stop a run: it makes a checkpoint, gives everything back and ends; it can be resumed.

    Example: elastic stop latest --reason "the GPUs are needed"
    """
    if remote or is_hosted(name):
        with server() as client:
            stopped = client.stop(latest(client, name), force=force)
        tell(stopped, f"{stopped.id} is stopping; go on with: elastic runs resume {stopped.id}", as_json=as_json)
        return 0
    if force:
        raise ConfigError("elastic stop: --force is for runs on a server")
    run = run_on_disk(directory, name)
    return _done(
        run,
        command_id,
        lambda control, command: control.stop(reason, command),
        {"command": "stop", "reason": reason},
        f"run {run.name} stops: it hands over what it has and gives everything back; go on with: "
        f"{program()} run --resume {run.path}",
        as_json=as_json,
    )


def cap(
    name: RunName,
    wanted: Annotated[
        str, typer.Argument(metavar="PROVIDER=GPUS", help="Such as spot=8, or spot=none to lift the cap.")
    ],
    command_id: CommandIdOption = "",
    remote: Remote = False,
    as_json: AsJson = False,
    directory: RunsDirectory = Path("runs"),
) -> int:
    """Limit how many GPUs of a provider a run holds from now on: what exceeds that drains, and no token is lost.

    Example: elastic cap latest spot=8
    """
    provider, gpus = gpus_of("elastic cap", wanted, "PROVIDER=GPUS", "spot=8")
    words = f"at most {gpus} GPUs" if gpus is not None else "as many GPUs as its section allows"
    if remote or is_hosted(name):
        with server() as client:
            hosted = client.run(latest(client, name))
            kept = {key: most for key, most in hosted.caps.items() if key != provider}
            caps = kept if gpus is None else {**kept, provider: gpus}
            changed = client.change(hosted.id, RunChange(caps=caps))
        tell(changed, f"run {changed.id} holds {words} of {provider}; what exceeds that drains", as_json=as_json)
        return 0
    run = run_on_disk(directory, name)
    return _done(
        run,
        command_id,
        lambda control, command: control.cap(provider, gpus, command),
        {"command": "cap", "provider": provider, "gpus": gpus},
        f"run {run.name} holds {words} of {provider}; what exceeds that drains",
        as_json=as_json,
    )


def budget(
    name: RunName,
    amount: Annotated[
        str, typer.Argument(metavar="USD", help="In dollars, all that the run has cost included; `none` for no limit.")
    ],
    command_id: CommandIdOption = "",
    remote: Remote = False,
    as_json: AsJson = False,
    directory: RunsDirectory = Path("runs"),
) -> int:
    """Set what a run may cost in all: it stops in time, and can be resumed with more.

    Example: elastic budget latest 25
    """
    usd = dollars_of("elastic budget", amount)
    words = f"never costs more than ${usd:.2f} in all" if usd is not None else "may cost any amount"
    if remote or is_hosted(name):
        if not usd:
            raise ConfigError(f"elastic budget: found {amount!r}; allowed on a server: more than 0 dollars")
        with server() as client:
            changed = client.change(latest(client, name), RunChange(budget_usd=usd))
        tell(changed, f"run {changed.id} {words}", as_json=as_json)
        return 0
    run = run_on_disk(directory, name)
    return _done(
        run,
        command_id,
        lambda control, command: control.budget(usd, command),
        {"command": "budget", "usd": usd},
        f"run {run.name} {words}",
        as_json=as_json,
    )


def _done(
    run: RunDirectory,
    command_id: str,
    ask: Callable[[RunControl, str], Coroutine[Any, Any, Acknowledged]],
    told: dict[str, Any],
    words: str,
    *,
    as_json: bool,
) -> int:
    """Send a command to the run, print the outcome, and return the exit code."""
    command_id = command_id or new_command_id()
    try:
        answer = asyncio.run(ask(RunControl(run.path), command_id))
    except CommandRefused as error:
        say(f"error: run {run.name}: {error}")
        return EXIT_BAD_INPUT if error.kind in _BAD_INPUT else EXIT_FAILED
    except ControlError as error:
        say(f"error: {error}")
        if isinstance(error, RunNotFound):
            say(f"hint: only a run that goes on takes commands; go on with: {program()} run --resume {run.path}")
        if isinstance(error, RunSilent):
            say(f"hint: it may have been done; repeat it with --id {command_id}, and it is done once")
        return EXIT_FAILED
    if as_json:
        emit({"run": run.name, **told, "id": answer.id, "repeated": answer.repeated})
    say(f"{words}{' (as it was told before)' if answer.repeated else ''}")
    return 0
