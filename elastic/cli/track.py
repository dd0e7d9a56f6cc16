"""`elastic track`: a run's curves in other people's loggers."""

import contextlib
import fcntl
import os
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from elastic.cli.account import run_on_disk
from elastic.cli.options import RunName, RunsDirectory
from elastic.cli.output import EXIT_FAILED, bad_input, say
from elastic.compose.runs import is_claimed, load_run_config, private
from elastic.compose.tracking import tracker_environment
from elastic.config import Config, ConfigError, ConfigProblem
from elastic.runtime.journal import RUNNING, RunDirectory
from elastic.system.signals import TERMINATION, handled

if TYPE_CHECKING:
    from elastic.report.tracking import Tracking

TRACKING = "tracking"
"""The folder of a run in which loggers keep what they keep on this machine."""
NICENESS = 10
KEY = ("logging", "to")


def track(
    name: RunName = "latest",
    to: Annotated[
        list[str] | None,
        typer.Option(
            "--to",
            metavar="NAMES",
            help="trackio, tensorboard, wandb, mlflow; comma-separated. As [logging] to unless given.",
        ),
    ] = None,
    project: Annotated[
        str, typer.Option(metavar="NAME", help="The loggers' project; by default that of [logging].")
    ] = "",
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Wait for more until the run ends; Ctrl-C detaches.")
    ] = False,
    directory: RunsDirectory = Path("runs"),
) -> int:
    """Send each step of a run's journal to loggers, while the run goes on or afterwards.

    Each step is one row, and no row comes twice, however often this is begun and killed. The run notices nothing.

    Example: elastic track latest --to tensorboard
    """
    from elastic.report.tracking import LOGGERS, check_loggers

    run = run_on_disk(directory, name)
    config = load_run_config(run.path)
    given = [one.strip() for names in to or () for one in names.split(",") if one.strip()]
    names = list(dict.fromkeys(given or config.logging.to))
    allowed = ", ".join(LOGGERS)
    if not names:
        bad_input(f"--to: found nothing, and logging.to of run {run.name} is empty; allowed: {allowed}")
    for one in names:
        if one not in LOGGERS:
            bad_input(f"--to: found {one!r}; allowed: {allowed}")
    if project:
        logging = config.logging.model_dump() | {"project": project}
        config = Config.model_validate(config.model_dump() | {"logging": logging})
    if problem := check_loggers(names, os.environ):
        bad_input(f"--to: {problem}")
    with contextlib.ExitStack() as locks:
        for one in names:
            locks.enter_context(_alone(run.path / TRACKING, one))
        return _track(run, config, names, follow=follow)


def check_logging(config: Config) -> None:
    """Raises `ConfigError` where a logger of a run could not be written to."""
    from elastic.report.tracking import check_loggers

    if problem := check_loggers(config.logging.to, tracker_environment(config)):
        raise ConfigError(ConfigProblem(problem, KEY))


@contextlib.contextmanager
def _alone(directory: Path, logger: str) -> Iterator[None]:
    """One process writes to a logger for a run. Raises `ConfigError` while another one does."""
    directory.mkdir(mode=0o700, exist_ok=True)
    with (directory / f"{logger}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(f"--to: another process brings this run to {logger} now: end it first") from error
        yield


@private()
def _track(run: RunDirectory, config: Config, names: list[str], *, follow: bool) -> int:
    stop = threading.Event()
    os.nice(NICENESS)
    with handled(TERMINATION, lambda *_: stop.set()):
        tracking = _bring(run, config, names, stop, follow=follow)
    for one, count in tracking.written.items():
        say(f"{one}: {count} rows")
    for one, count in tracking.left.items():
        say(f"error: {one} may lack {count} rows of {run.name}; go on with: elastic track {run.path} --to {one}")
    return EXIT_FAILED if tracking.left else 0


def _bring(run: RunDirectory, config: Config, names: list[str], stop: threading.Event, *, follow: bool) -> "Tracking":
    from elastic.report.texts import Reading, with_texts
    from elastic.report.tracking import SampleBounds, StepSource, TrackedRun, Tracking, logger_named
    from elastic.report.tracking import follow as follow_run

    reading = Reading.of(config.model_dump(include={"model", "front"}))
    logging, state = config.logging, _RunState(run, config.run.orchestrator_timeout_s)
    source = StepSource(
        run,
        SampleBounds(trajectories=logging.samples, bytes=logging.sample_bytes),
        partial(with_texts, reading=reading),
    )
    tracked = TrackedRun(
        name=run.name, project=logging.project, directory=run.path / TRACKING, settings=_settings(config)
    )
    loggers = {one: logger_named(one, tracked) for one in names}
    tracking = Tracking(source, loggers, say, time.monotonic)
    follow_run(tracking, state.over, state.ended if follow else lambda: True, stop, logging.every_s)
    return tracking


class _RunState:
    """Whether a run writes no more, and whether it has ended: nobody has taken it up for `patience_s` then."""

    def __init__(self, run: RunDirectory, patience_s: float) -> None:
        self._run = run
        self._patience_s = patience_s
        self._claimed_s = time.monotonic()
        """When somebody was at it last."""

    def over(self) -> bool:
        return not is_claimed(self._run.path) or self._concluded()

    def ended(self) -> bool:
        if is_claimed(self._run.path):
            self._claimed_s = time.monotonic()
            return False
        return self._concluded() or time.monotonic() - self._claimed_s > self._patience_s

    def _concluded(self) -> bool:
        if not self._run.journal_paths():
            return False
        with self._run.newest_journal() as journal:
            return journal.meta().get("status", RUNNING) != RUNNING


def _settings(config: Config) -> dict[str, str | int | float]:
    """What is shown beside the curves: how it was trained, and nothing of where."""
    return {
        "seed": config.run.seed,
        "steps": config.run.steps,
        "model": config.model.checkpoint.name,
        "environment": ", ".join(one.name for one in config.mixture),
        "trainer": config.trainer.kind,
        "groups": config.rollout.groups,
        "group_size": config.rollout.group_size,
        "temperature": config.rollout.temperature,
        "staleness_bound": config.rollout.staleness_bound,
        "learning_rate": config.trainer.learning_rate,
        "updates_per_step": config.trainer.updates_per_step,
    }
