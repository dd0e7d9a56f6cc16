"""The loggers that there are, by name. Their libraries are imported by the process that writes to them, alone."""

import importlib
import importlib.util
import netrc
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

from elastic.report.tracking.delivery import Logger, TrackedRun


class LoggerKind(NamedTuple):
    """Where a logger's adapter is, and which module of which package it needs."""

    adapter: str
    needs: str
    package: str


LOGGERS: Mapping[str, LoggerKind] = {
    "trackio": LoggerKind("to_trackio:TrackioLogger", "trackio", "trackio"),
    "tensorboard": LoggerKind("to_tensorboard:TensorboardLogger", "tensorboard", "tensorboard"),
    "wandb": LoggerKind("to_wandb:WandbLogger", "wandb", "wandb"),
    "mlflow": LoggerKind("to_mlflow:MlflowLogger", "mlflow", "mlflow-skinny"),
}
WANDB_KEY, WANDB_MODE = "WANDB_API_KEY", "WANDB_MODE"
WANDB_HOST = "api.wandb.ai"


def logger_named(name: str, run: TrackedRun) -> Logger:
    """The logger of this name for a run, with a folder of its own; imports its library."""
    module, _, kind = LOGGERS[name].adapter.partition(":")
    own = msgspec.structs.replace(run, directory=run.directory / name)
    return getattr(importlib.import_module(f"{__package__}.{module}"), kind)(own)


def check_loggers(names: Collection[str], environment: Mapping[str, str]) -> str:
    """Why one of these loggers could not be written to by a process with this environment; empty where all could.

    Nothing is imported, and nobody is asked.
    """
    for name in names:
        kind = LOGGERS[name]
        if importlib.util.find_spec(kind.needs) is None:
            return (
                f"found {name!r}, whose package is not installed; allowed: `pip install {kind.package}` (all loggers: "
                "`pip install -e '.[track]'`)"
            )
    if "wandb" in names and environment.get(WANDB_MODE) != "offline" and not _wandb_key(environment):
        given = WANDB_KEY in os.environ
        how = f'`run.pass_env = ["{WANDB_KEY}"]`, which passes it on' if given else f"{WANDB_KEY}, `wandb login`"
        return f"found 'wandb' without a key; allowed: {how}, or {WANDB_MODE}=offline"
    return ""


def _wandb_key(environment: Mapping[str, str]) -> bool:
    """Whether there is a key: in the environment, or where `wandb login` has put it."""
    if environment.get(WANDB_KEY, "").strip():
        return True
    try:
        return netrc.netrc(str(Path("~/.netrc").expanduser())).authenticators(WANDB_HOST) is not None
    except (OSError, netrc.NetrcParseError, RuntimeError):
        return False
