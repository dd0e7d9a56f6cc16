"""Every command of `elastic` by its name, and what its errors mean for who called it.

The module of a command is imported when the command is asked for, so that `--help` and each command are quick.
"""

import errno
import functools
import importlib
import importlib.metadata
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.main import get_command, get_group

from elastic.cli.output import EXIT_BAD_INPUT, EXIT_FAILED, bad_input, prepare_streams, say, whole_output
from elastic.cli.whole_help import WholeHelp
from elastic.system.imports import importing
from elastic.system.logs import STANDARD_ERROR, log_to

OURS = ("elastic.", "functions.", "policies.", "providers.", "traces.")
PANELS = {
    "Run": {
        "prepare": ("run", "Make an example's base policy by a short supervised warm-up, once."),
        "run": ("run", "Train a policy, with rollouts on borrowed and preemptible capacity."),
        "serve-rollouts": (
            "serve_rollouts",
            "Generate rollouts for other people's trainers, whose weights come as directories.",
        ),
        "evaluate": (
            "evaluate",
            "Evaluate a policy on the tasks of [evaluation], with the providers of a run and without training.",
        ),
        "stop": ("control", "Stop a run: it makes a checkpoint, gives everything back and ends; it can be resumed."),
        "cap": (
            "control",
            "Limit how many GPUs of a provider a run holds from now on: what exceeds that drains, and no token is "
            "lost.",
        ),
        "budget": ("control", "Set what a run may cost in all: it stops in time, and can be resumed with more."),
        "agents": ("agents", "Show where agents reach a run, and the keys that they need."),
        "environments": ("environments", "Write what the environments of a run need, such as a Dockerfile."),
        "export": ("export", "Write a run's policy as a Hugging Face directory, with its tokenizer and a model card."),
    },
    "Look": {
        "runs": ("runs", "List the runs there are, oldest first; with --remote those on the server."),
        "top": ("top", "Watch what goes on: all living runs, one run, or a pool; with --remote those of the server."),
        "logs": ("logs", "Print a run's log."),
        "report": (
            "report",
            "Write a run's report: what went wrong, what it cost and gained, where every GPU-second went.",
        ),
        "track": ("track", "Send each step of a run's journal to loggers, while the run goes on or afterwards."),
        "chat": (
            "chat",
            "Talk with a run's policy: while the run goes on by its spare credit, later by an engine here.",
        ),
    },
    "Simulate and plan": {
        "simulate": (
            "simulate",
            "Simulate a run: what it would cost and how fast it would be, by the same scheduler on virtual time.",
        ),
        "profile": (
            "profile",
            "Measure a machine, as a profile to simulate runs with: its engine, everything around it in a live run, "
            "or both.",
        ),
        "config": ("configuration", "Say what the keys of a configuration mean."),
        "policies": (
            "configuration",
            "List the policies that are installed, by the decision that each makes, with their settings.",
        ),
        "doctor": (
            "doctor",
            "Check this machine and its pools; with CONFIG also what its providers' clouds say: credentials, quotas, "
            "reach.",
        ),
    },
    "Serve": {
        "serve": ("serve", "Serve the control API, for many runs and many people."),
        "runner": ("serve", "Look after a server's runs in a process of its own, beside `elastic serve --no-runner`."),
        "support-bundle": (
            "serve",
            "Collect what helps to find a server's fault: versions, health, states of runs and logs, without secrets.",
        ),
        "api": ("login", "Log in to a server."),
        "projects": ("projects", "List, make and share projects on a server."),
        "keys": ("access", "Make, list and revoke keys of a server."),
        "secrets": ("access", "Set secret variables of a project's runs; their values cannot be read again."),
        "webhooks": ("access", "Name the URLs that get messages about a project's runs."),
        "uploads": ("uploads", "Keep checkpoints and data in a project's storage on a server."),
        "audit": ("access", "List who did what on a server, and what it refused, the newest first."),
    },
    "Pool": {
        "pool": ("pool", "Start and look after a pool: GPUs that many jobs share, phase by phase (docs/jobs.md)."),
        "jobs": ("jobs", "Submit jobs to a pool and look after them."),
    },
    "Capacity": {
        "providers": ("providers", "List the kinds of providers on the server, and what its runs have of each."),
        "ticket": ("ticket", "Make a ticket, with which one worker joins a living run from any machine."),
        "worker": ("worker", "Serve rollout turns to a run: dial its orchestrator and generate until the lease ends."),
        "modal": ("modal", "Deploy on Modal the app that runs call."),
    },
}
"""The commands by panel. Of each: its module in this package, which has a function or a group by the command's name,
and the first sentence of its help."""
FOR_PROGRAMS = {
    "pool-run": ("pool_process", ""),
    "pool-host": ("pool_process", ""),
    "serving-host": ("worker", ""),
    "pool-resident": ("worker", ""),
    "pool-site": ("pool_process", ""),
    "front": ("worker", ""),
    "env-worker": ("worker", ""),
}
"""Commands that no list shows."""
COMMANDS = {name: command for commands in (*PANELS.values(), FOR_PROGRAMS) for name, command in commands.items()}


class Commands(Mapping[str, Any]):
    """The commands, each of which is imported when it is looked up."""

    def __getitem__(self, name: str) -> Any:
        if name not in COMMANDS:
            raise KeyError(name)
        return _imported(name)

    def __iter__(self) -> Iterator[str]:
        return iter(COMMANDS)

    def __len__(self) -> int:
        return len(COMMANDS)


@functools.cache
def _imported(name: str) -> Any:
    place, words = COMMANDS[name]
    with importing():
        found = getattr(importlib.import_module(f"elastic.cli.{place}"), name.replace("-", "_"))
    if isinstance(found, typer.Typer):
        _settle(found)
        return get_group(found)
    alone = typer.Typer(add_completion=False, rich_markup_mode=None)
    alone.command(name, hidden=not words)(found)
    _settle(alone)
    return get_command(alone)


class Elastic(WholeHelp):
    """The group of all commands, whose list imports none of them."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands: Any = Commands()

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def panels(self, ctx: Any) -> Mapping[str, Sequence[tuple[str, str]]]:
        return {title: [(name, words) for name, (_, words) in panel.items()] for title, panel in PANELS.items()}


app = typer.Typer(
    name="elastic",
    cls=Elastic,
    help="Train agentic RL policies on GPUs that come and go.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point: bad input ends with one message and exit code 2, never with a traceback.

    Without `arguments` they are this process's.
    """
    prepare_streams()
    log_to(STANDARD_ERROR)
    try:
        with whole_output():
            app(arguments, prog_name="elastic")
    except (SystemExit, KeyboardInterrupt):
        raise
    except BrokenPipeError:
        sys.exit(EXIT_FAILED)
    except _of_input() as error:
        bad_input(str(error))
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        say(f"error: {where}{error.strerror or str(error) or _origin(error)}")
        sys.exit(EXIT_BAD_INPUT if error.errno == errno.ENAMETOOLONG else EXIT_FAILED)


def _of_input() -> tuple[type[Exception], ...]:
    """The errors that say what was wrong with what the program was given; they are known where one can be raised."""
    from elastic.config import ConfigError
    from elastic.core.types import PolicyFault
    from elastic.protocol.proxies import HttpSettingsError
    from elastic.runtime.journal import JournalError

    return ConfigError, JournalError, HttpSettingsError, PolicyFault


def _origin(error: OSError) -> str:
    """Describe an error without a message, such as a timeout: its type, and the function that was waiting."""
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    ours = [frame.f_code.co_qualname for frame in frames if frame.f_globals.get("__name__", "").startswith(OURS)]
    return " in ".join([type(error).__name__, *ours[-1:]])


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"elastic {importlib.metadata.version('elastic-rl')}")
        raise typer.Exit


@app.callback()
def elastic(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """Train agentic RL policies on GPUs that come and go."""


def _settle(commands: typer.Typer) -> None:
    """Have every command get its paths with `~` expanded, which shells leave where it follows a `=`, and end the
    program with what it returns."""
    for command in (*commands.registered_commands, commands.registered_callback):
        if command is not None and command.callback is not None:
            command.callback = _settled(command.callback)
    for group in commands.registered_groups:
        if group.typer_instance is not None:
            _settle(group.typer_instance)


def _settled(callback: Callable[..., int | None]) -> Callable[..., None]:
    from elastic.config import given_path

    def expanded(value: Any) -> Any:
        if isinstance(value, list):
            return [expanded(one) for one in value]
        return given_path(str(value)) if isinstance(value, Path) else value

    @functools.wraps(callback)
    def called(*arguments: Any, **named: Any) -> None:
        if code := callback(*map(expanded, arguments), **{name: expanded(value) for name, value in named.items()}):
            raise typer.Exit(code)

    return called
