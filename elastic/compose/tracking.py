"""The process that brings a run's rows to loggers: beside the run, found again after a crash, ended with it."""

import asyncio
import contextlib
import signal
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path

import structlog

from elastic.config import Config
from elastic.system.outages import backoff
from elastic.system.processes import inherited
from elastic.system.supervision import RecordedProcesses, WatchedProcess, how_ended, records

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
    watched = await _left_over(run_dir, wanted=bool(config.logging.to))
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
    tracker = _Tracker(run_dir, command, tracker_environment(config), watched)
    keeping = asyncio.create_task(tracker.keep(), name=TRACKER)
    try:
        yield
    finally:
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)
        await tracker.end()


async def _left_over(run_dir: Path, *, wanted: bool) -> tuple[RecordedProcesses, WatchedProcess] | None:
    """The tracker of an earlier process of the run that still lives; others' remains are ended."""
    kept = None
    for recorded in RecordedProcesses.found(records(run_dir), run_dir.name, TRACKER):
        living = [one for one in recorded.adopted().values() if not one.over]
        if wanted and living and kept is None:
            kept = recorded, living[0]
        else:
            await recorded.end()
    return kept


class _Tracker:
    """The process, started again where it dies."""

    def __init__(
        self,
        run_dir: Path,
        command: Sequence[str],
        environment: Mapping[str, str],
        watched: tuple[RecordedProcesses, WatchedProcess] | None,
    ) -> None:
        self._run_dir = run_dir
        self._command = command
        self._environment = environment
        self._now = watched

    async def keep(self) -> None:
        failures = 0
        while True:
            try:
                recorded, watched = self._now = self._now or self._start()
                status = await watched.wait()
                log.warning("the tracker of loggers has ended; another one is started", how=how_ended(status))
                await recorded.end()
                self._now = None
            except OSError as error:
                log.warning("the tracker of loggers does not start", error=str(error))
            await asyncio.sleep(backoff(failures, BACK_OFF_S, BACK_OFF_MAX_S))
            failures += 1

    def _start(self) -> tuple[RecordedProcesses, WatchedProcess]:
        recorded = RecordedProcesses(records(self._run_dir), self._run_dir.name, TRACKER, TRACKER)
        with (self._run_dir / "logs" / f"{TRACKER}.log").open("ab") as output:
            return recorded, recorded.start(TRACKER, self._command, self._environment, output)

    async def end(self) -> None:
        if self._now is None:
            return
        recorded, watched = self._now
        watched.send(signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CATCH_UP_S):
                await watched.wait()
        if not watched.over or watched.status not in (0, None):
            log.warning("loggers may lack rows of this run; `elastic track RUN` brings them", run=self._run_dir.name)
        watched.close()
        await recorded.end()
