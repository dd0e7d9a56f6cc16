"""Commands from the runner to a run's process, through the socket in the run's directory.

A command's id is made of the run and the number of the request: every repetition, by any runner, is carried out once.
"""

import structlog

from elastic.protocol.run_control import CommandRefused, ControlError
from elastic.server.runner.decisions import QUOTA_LOWERED
from elastic.server.runner.launching import NO_LIMITS, control_of
from elastic.server.settings import ServerSettings
from elastic.server.store import runs
from elastic.server.store.runs import HostedRunRow

log = structlog.get_logger(__name__)

TIMEOUT_S = 5.0
STOPPED_BY_SERVER = "stopped through the server"


async def told_to_stop(settings: ServerSettings, run: HostedRunRow) -> bool:
    """Tell the run's process to stop; returns whether its journal has the command."""
    reason, command = STOPPED_BY_SERVER, f"{run.id}:{run.generation}:stop"
    if run.wanted == runs.RUN:
        reason, command = f"{QUOTA_LOWERED}: {run.waits.message if run.waits else ''}", f"{run.id}:{run.attempt}:pause"
    try:
        await control_of(settings, run, TIMEOUT_S).stop(reason, command)
    except CommandRefused:
        return True  # It is ending already.
    except ControlError as error:
        log.info("the run cannot be told to stop; it is sent a signal", run=run.id, error=str(error))
        return False
    return True


async def told_its_limits(settings: ServerSettings, run: HostedRunRow) -> bool:
    """Tell the run's process its caps and budget; returns whether its journal has them. Limits that it has are not
    repeated, and unknown ones are omitted."""
    control, prefix = control_of(settings, run, TIMEOUT_S), f"{run.id}:limits:{run.limits_number}"
    limits, told = run.limits or NO_LIMITS, run.told
    try:
        for provider in run.providers:
            cap = limits.caps.get(provider)
            if told is None or told.caps.get(provider) != cap:
                await control.cap(provider, cap, f"{prefix}:cap:{provider}")
        if told is None or told.budget_usd != limits.budget_usd:
            await control.budget(limits.budget_usd, f"{prefix}:budget")
    except CommandRefused as error:
        log.warning("the run does not take its limits", run=run.id, error=str(error))
    except ControlError:
        return False
    return True
