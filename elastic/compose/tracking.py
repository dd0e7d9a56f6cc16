"""The process that brings a run's rows to loggers: beside the run, found again after a crash, ended with it."""

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path

import structlog

from elastic.config import Config
from elastic.system.outages import backoff
from elastic.system.processes import inherited
from elastic.system.supervision import KeptProcesses, how_ended

log = structlog.get_logger(__name__)

TRACKER = "tracker"
"""Its owner in a run's records, its name there, and that of its log."""
CATCH_UP_S = 30.0
"""At the run's end: for the tracker to bring what is left, and for loggers to end in order."""
BACK_OFF_S, BACK_OFF_MAX_S = 1.0, 60.0


def tracker_environment(config: Config) -> Mapping[str, str]:
    """What the tracker inherits: its loggers' settings, and of secrets those alone that `run.pass_env` names."""
    return inherited(*config.run.pass_env, *(f"{name.upper()}_*" for name in config.logging.to))


@contextlib.asynccontextmanager
async def tracked(config: Config, run_dir: Path) -> AsyncIterator[None]:
    """Within it the run has its tracker, if it has loggers; one that an earlier process has left goes on, or is ended.

    Afterwards the tracker brings what is left, if that takes no longer than `CATCH_UP_S`. Nothing that happens to it
    reaches the run.
    """
    processes = KeptProcesses(run_dir, TRACKER)
    await processes.take_over([TRACKER] if config.logging.to else [])
    if not config.logging.to:
        yield
        return
    command = (
        sys.executable,
        "-m",
        "elastic.cli",
        "track",
        str(run_dir),
        "--follow",
        "--to",
        ",".join(config.logging.to),
    )
    keeping = asyncio.create_task(_keep(processes, command, tracker_environment(config)), name=TRACKER)
    try:
        yield
    finally:
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)
        last = processes.get(TRACKER)
        await processes.aclose(CATCH_UP_S)
        if last is not None and (not last.over or last.status not in (0, None)):
            log.warning("loggers may lack rows of this run; `elastic track RUN` brings them", run=run_dir.name)


async def _keep(processes: KeptProcesses, command: Sequence[str], environment: Mapping[str, str]) -> None:
    """Keep the tracker going: it is started again where it dies."""
    failures = 0
    while True:
        try:
            watched = processes.get(TRACKER) or processes.start(TRACKER, command, environment)
            status = await watched.wait()
            log.warning("the tracker of loggers has ended; another one is started", how=how_ended(status))
            await processes.forget(TRACKER)
        except OSError as error:
            log.warning("the tracker of loggers does not start", error=str(error))
        await asyncio.sleep(backoff(failures, BACK_OFF_S, BACK_OFF_MAX_S))
        failures += 1
