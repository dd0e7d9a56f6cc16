"""The agent beside an engine: dials the orchestrator, boots the engine, and serves until it is told to leave."""

import asyncio
import contextlib
import logging
import os
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias, TypeVar

import msgspec
import structlog

from elastic.config import EngineConfig, validate
from elastic.core.types import Nanoseconds
from elastic.engine import create_engine
from elastic.engine.base import DeviceShare, RolloutEngine
from elastic.engine.model.stored import CheckpointError
from elastic.protocol import wire
from elastic.protocol.connection import ConnectionLost, SessionRefused
from elastic.system.host import here
from elastic.system.processes import end_own_kin
from elastic.system.signals import TERMINATION, act_on
from elastic.worker.accounts import DeviceAccounts, process_start_ns
from elastic.worker.connection import OrchestratorLink, Ticket, dial
from elastic.worker.device_permit import DevicePermit
from elastic.worker.service import USUAL, AgentExit, Intervals, Service
from elastic.worker.threads import DaemonThread

__all__ = ["AgentExit", "BuildEngine", "Ticket", "build_engine", "leave_process", "on_termination", "run_agent"]

if TYPE_CHECKING:
    from elastic.worker.trainer_host import TrainerHost

log = structlog.get_logger(__name__)

BUILD_TIMEOUT_S = 600.0
"""Limit for the engine to start. The orchestrator's limit is shorter; this one applies when the orchestrator is
gone."""

BuildEngine: TypeAlias = Callable[[wire.Welcome], RolloutEngine]
_Booted: TypeAlias = tuple[Ticket, wire.Welcome, OrchestratorLink, RolloutEngine, Nanoseconds]
"""With the time at which it was welcomed."""
T = TypeVar("T")


def build_engine(welcome: wire.Welcome, share: DeviceShare | None = None) -> RolloutEngine:
    """Build the engine that the orchestrator asks for, without weights, on an own or a borrowed device. Blocks."""
    settings = validate(EngineConfig, welcome.engine, "the orchestrator's welcome")
    return create_engine(welcome.model, settings, share)


async def run_agent(
    ticket: Ticket,
    build_engine: BuildEngine = build_engine,
    *,
    share: DeviceShare | None = None,
    trainer: "TrainerHost | None" = None,
    permit: DevicePermit | None = None,
    accounts: DeviceAccounts | None = None,
    leave: asyncio.Event | None = None,
    intervals: Intervals = USUAL,
) -> AgentExit:
    """Be the ticket's worker until drained (code 0), or refused, cut off or failed (code 1).

    SIGTERM and SIGINT drain in a hurry, or `leave` does, where there is one (then, and with a `share`, the process is
    its host's, and so are its signals). A `share` bounds what the engine may use of a device that
    it shares; a `trainer` takes the orders of the trainer's worker, and is parked where its `permit` is a node agent's.
    `accounts` begin with the process where there are none.
    Raises `ValueError` where the ticket names no address to join.
    """
    accounts = accounts or DeviceAccounts(process_start_ns())
    permit = permit or DevicePermit()
    device = DaemonThread("device")
    hosted = share is not None or leave is not None
    leave = leave or asyncio.Event()
    end = AgentExit(1, "cut short")
    try:
        with contextlib.nullcontext() if hosted else on_termination(leave.set):
            async with _kept(permit, trainer, device, accounts):
                booted = await _unless(leave, _boot(ticket, build_engine, device, permit))
                if booted is None:
                    end = AgentExit(0, "terminated before it was ready")
                else:
                    ticket, welcome, connection, engine, granted_ns = booted
                    service = Service(ticket, welcome, connection, engine, device, share, trainer, permit, intervals)
                    # Before that the device was its owner's: it waited for a lease.
                    end = await service.run(DeviceAccounts(granted_ns) if ticket.ticket else accounts, leave)
    except (ConnectionLost, SessionRefused, _NotBuilt) as error:
        end = AgentExit(1, str(error))
    except _NotKept as error:
        log.exception("the device cannot be shared")
        end = AgentExit(1, f"{type(error.__cause__).__name__}: {error}")
    finally:
        device.stop()
    log.log(logging.ERROR if end.code else logging.INFO, "worker ended", worker=ticket.worker, reason=end.reason)
    return end


def leave_process(end: AgentExit) -> NoReturn:
    """End a worker's process and whatever it has started, at once. For its main thread, after `run_agent`.

    Threads inside torch's C++ code cannot be unwound when the interpreter shuts down (it aborts the process
    then), and whatever they still compute belongs to a lease that is over.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    end_own_kin()
    os._exit(end.code)


@contextlib.asynccontextmanager
async def _kept(
    permit: DevicePermit, trainer: "TrainerHost | None", device: DaemonThread, accounts: DeviceAccounts
) -> AsyncIterator[None]:
    """A context: obey the node agent meanwhile, if there is one. Raises `_NotKept` if the node agent is gone."""
    if not permit.shared:
        yield
        return
    assert trainer is not None, "what is parked by a node agent is a trainer"

    async def obey() -> None:
        try:
            await permit.obey(trainer, device, accounts, trainer.timeout_s)
        except Exception as error:
            raise _NotKept(str(error)) from error

    try:
        async with asyncio.TaskGroup() as tasks:
            obeying = tasks.create_task(obey(), name="node_agent")
            yield
            obeying.cancel()
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from errors.exceptions[0].__cause__


async def _boot(ticket: Ticket, build_engine: BuildEngine, device: DaemonThread, permit: DevicePermit) -> _Booted:
    connection, welcome = await dial(ticket, "", ticket.wait_s)
    granted_ns = here().monotonic_ns()
    if welcome.worker:
        ticket = msgspec.structs.replace(ticket, worker=welcome.worker)
    try:
        await permit.granted()
        engine = await device.run(BUILD_TIMEOUT_S, build_engine, welcome)
        return ticket, welcome, connection, engine, granted_ns
    except BaseException as error:
        connection.abort()
        if isinstance(error, Exception):
            reason = f"{type(error).__name__}: {error}"
            log.error("engine not built", reason=reason, exc_info=not isinstance(error, CheckpointError))
            raise _NotBuilt(f"the engine could not be built: {reason}") from error
        raise


class _NotBuilt(Exception):
    pass


class _NotKept(Exception):
    """The node agent is gone, or the device cannot be left or taken."""


async def _unless(event: asyncio.Event, work: Coroutine[Any, Any, T]) -> T | None:
    """The result of `work`, or None when `event` comes first."""
    task, happened = asyncio.create_task(work), asyncio.create_task(event.wait())
    try:
        await asyncio.wait({task, happened}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        task.cancel()
        happened.cancel()
        await asyncio.gather(task, happened, return_exceptions=True)


@contextlib.contextmanager
def on_termination(act: Callable[[], None]) -> Iterator[None]:
    """Call `act` on signals that ask the process to end, if handlers are possible (on the main thread)."""
    end = act_on(TERMINATION, act)
    try:
        yield
    finally:
        end()
