"""`elastic stop`, `elastic cap` and `elastic budget`: commands to a run's process, on the machine where it is."""

import asyncio
import math
from collections.abc import Callable, Coroutine
from typing import Any

from elastic.cli.output import EXIT_BAD_INPUT, EXIT_FAILED, emit, program, say
from elastic.config import ConfigError
from elastic.protocol.run_control import (
    GPUS_MAX,
    USD_MAX,
    Acknowledged,
    CommandRefused,
    ControlError,
    RunControl,
    RunNotFound,
    RunSilent,
    new_command_id,
)
from elastic.runtime.journal import RunDirectory

NONE = "none"
"""The word that lifts a cap or a budget."""
_BAD_INPUT = ("invalid", "unknown_provider", "conflict")
"""Codes of refusals that are the caller's mistakes."""


def disk_stop_command(run: RunDirectory, reason: str, command_id: str, *, as_json: bool) -> int:
    return _done(
        run,
        command_id,
        lambda control, command: control.stop(reason, command),
        {"command": "stop", "reason": reason},
        f"run {run.name} stops: it hands over what it has and gives everything back; go on with: "
        f"{program()} run --resume {run.path}",
        as_json=as_json,
    )


def cap_of(cap: str) -> tuple[str, int | None]:
    """Return a provider and its cap; None lifts the cap. Raises `ConfigError`."""
    provider, equals, said = cap.partition("=")
    gpus = None if said == NONE else int(said) if said.isdecimal() and said.isascii() else -1
    if not provider or not equals or (gpus is not None and not 0 <= gpus <= GPUS_MAX):
        raise ConfigError(f"elastic cap: found {cap!r}; allowed: PROVIDER=GPUS with a whole number or {NONE}: spot=8")
    return provider, gpus


def cap_words(gpus: int | None) -> str:
    return f"at most {gpus} GPUs" if gpus is not None else "as many GPUs as its section allows"


def cap_command(run: RunDirectory, cap: str, command_id: str, *, as_json: bool) -> int:
    provider, gpus = cap_of(cap)
    return _done(
        run,
        command_id,
        lambda control, command: control.cap(provider, gpus, command),
        {"command": "cap", "provider": provider, "gpus": gpus},
        f"run {run.name} holds {cap_words(gpus)} of {provider}; what exceeds that drains",
        as_json=as_json,
    )


def budget_command(run: RunDirectory, budget: str, command_id: str, *, as_json: bool) -> int:
    usd = None if budget == NONE else dollars(budget)
    words = f"never costs more than ${usd:.2f} in all" if usd is not None else "may cost any amount"
    return _done(
        run,
        command_id,
        lambda control, command: control.budget(usd, command),
        {"command": "budget", "usd": usd},
        f"run {run.name} {words}",
        as_json=as_json,
    )


def dollars(said: str) -> float:
    """Return an amount in USD. Raises `ConfigError` if it is no budget."""
    try:
        usd = float(said.removeprefix("$"))
    except ValueError:
        usd = math.nan
    if not 0 <= usd <= USD_MAX:
        raise ConfigError(f"elastic budget: found {said!r}; allowed: dollars such as 12.50, or {NONE}")
    return usd


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
