"""The control socket of a live run: requests come in here, and become events of its core."""

import asyncio
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from elastic.core import events as e
from elastic.core.scheduler import Phase, Scheduler
from elastic.protocol.control_socket import LineSocket
from elastic.protocol.run_control import (
    Acknowledged,
    Answer,
    AskStatus,
    CapProvider,
    Refused,
    Request,
    RunStatusReply,
    SetBudget,
    StopRun,
)
from elastic.runtime.status import RunStatus

_decode_request = msgspec.json.Decoder(Request).decode


class CommandManager:
    """Turns requests into events of the core. `durable` calls back once all events fed so far are durable;
    `providers` are the providers that may be capped."""

    def __init__(
        self,
        scheduler: Scheduler,
        feed: Callable[[e.Event], None],
        durable: Callable[[Callable[[], None]], None],
        providers: Callable[[], Sequence[str]],
        status: Callable[[], RunStatus],
    ) -> None:
        self._scheduler = scheduler
        self._feed = feed
        self._durable = durable
        self._providers = providers
        self._status = status

    async def answer(self, request: Request) -> Answer:
        if isinstance(request, AskStatus):
            status = self._status()
            return RunStatusReply(run=status.run, pid=os.getpid(), status=msgspec.to_builtins(status))
        event = event_of(request)
        done = self._scheduler.controls.commands.get(request.id)
        if done is None:
            if (refused := self._refused(request)) is not None:
                return refused
            self._feed(event)
        elif done != event.words:
            return Refused(kind="conflict", message=f"command {request.id} was another one: {done}")
        settled: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def settle() -> None:
            if not settled.done():
                settled.set_result(None)

        self._durable(settle)
        await settled
        return Acknowledged(id=request.id, repeated=done is not None)

    def _refused(self, request: StopRun | CapProvider | SetBudget) -> Refused | None:
        core = self._scheduler
        if core.phase in (Phase.STOPPING, Phase.ENDED):
            why = core.failed or core.stopped or "all of its steps are done"
            return Refused(kind="ending", message=f"the run is ending already: {why}")
        if isinstance(request, CapProvider):
            known = self._providers()
            if request.provider == core.plan.trainer_provider:
                own = "the trainer's device is the run's own and cannot be capped; stop the run instead"
                return Refused(kind="unknown_provider", message=own)
            if request.provider not in known:
                found = f"the run has no provider {request.provider!r}; allowed: {', '.join(known) or 'none'}"
                return Refused(kind="unknown_provider", message=found)
        return None


def event_of(request: StopRun | CapProvider | SetBudget) -> e.StopCommanded | e.CapSet | e.BudgetSet:
    match request:
        case StopRun(id=command, reason=reason):
            return e.StopCommanded(command=command, reason=reason)
        case CapProvider(id=command, provider=provider, gpus=gpus):
            return e.CapSet(command=command, provider=provider, gpus=gpus)
        case SetBudget(id=command, usd=usd):
            return e.BudgetSet(command=command, usd=usd)


class ControlSocket(LineSocket):
    """Serves `command_manager` in the run's directory while it is open."""

    def __init__(self, run_dir: Path, command_manager: CommandManager) -> None:
        async def answer(line: bytes) -> Answer:
            return await command_manager.answer(_decode_request(line))

        super().__init__(run_dir, answer, lambda message: Refused(kind="invalid", message=message))
