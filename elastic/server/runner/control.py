"""Commands from the runner to a run's process, through the socket in the run's directory.

Each has an id that is made of the run and the generation that it came with: however often it is repeated, by whatever
runner, it is done once.
"""

from pathlib import Path

import structlog

from elastic.control import CommandRefused, ControlError, RunControl
from elastic.server.store.runs import HostedRunRow

log = structlog.get_logger(__name__)

TIMEOUT_S = 5.0
STOPPED_BY_SERVER = "stopped through the server"


async def told_to_stop(run_dir: Path, run: HostedRunRow) -> bool:
    """Whether the run's process has it in its journal that it is to stop."""
    try:
        await RunControl(run_dir, TIMEOUT_S).stop(STOPPED_BY_SERVER, f"{run.id}:{run.generation}:stop")
    except CommandRefused:
        return True  # It is ending already.
    except ControlError as error:
        log.info("the run cannot be told to stop; it is sent a signal", run=run.id, error=str(error))
        return False
    return True


async def told_its_limits(run_dir: Path, run: HostedRunRow) -> bool:
    """Whether the run's process has its caps and its budget in its journal. One that it does not know is left out."""
    control, prefix = RunControl(run_dir, TIMEOUT_S), f"{run.id}:{run.generation}"
    try:
        for provider in run.providers:
            await control.cap(provider, run.caps.get(provider), f"{prefix}:cap:{provider}")
        await control.budget(run.budget_usd, f"{prefix}:budget")
    except CommandRefused as error:
        log.warning("the run does not take its limits", run=run.id, error=str(error))
    except ControlError:
        return False
    return True
