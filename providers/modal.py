"""Workers in Modal's containers. A lease is one call of the deployed app's class, which ends by its timeout.

- A call starts when it is spawned, and its lease is granted once its container says that it has begun; from there on it
  lives `lease_s`. Modal's own time limit stands somewhat beyond that, and holds where nobody ends the call.
- Modal starts a preempted call again, in another container. That container asks for a ticket: its former lease ends as
  preempted, unless the run has given that up before, and the next lease that the run wants goes to it.
- A lease's bill is its containers' lives by Modal's own record.
- The run's calls are those of its own variant of the class, which Modal lists; what belongs to no lease is cancelled,
  at the start, at the end and every `reconcile_s`.
"""

import asyncio
import contextlib
import hashlib
import math
import os
import time
from collections import deque
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any, ClassVar
from urllib.parse import urlsplit

import msgspec
import structlog
from pydantic import Field, model_validator

from elastic.core.events import StraysBilled
from elastic.core.types import NS_PER_S, EndCause, LeaseId, Nanoseconds
from elastic.protocol.endpoint import is_loopback
from elastic.system import compiled
from elastic.system import modal as modal_platform
from elastic.system.modal import ModalUnusable
from elastic.system.outages import Outage
from elastic.system.plain_values import told
from elastic.system.supervision import RecordedProcesses, how_ended, records
from providers.base import (
    CapacityNow,
    Emit,
    Examination,
    KnownLease,
    LeaseRequest,
    ProviderContext,
    ProviderSettings,
    ProviderSilent,
    ProviderUnavailable,
    VendorFinding,
    worker_environment,
)
from providers.base_provider import RETRY_S, Found, LeaseHandle
from providers.markets import CapacityUnavailable, LeaseEnding, ServerlessMarket, ServerlessSettings
from providers.modal_messages import ContainerSays, NewTicket, RolloutEnd, RolloutOrder
from providers.vendor_provider import SETTLING_S, VendorProvider

log = structlog.get_logger(__name__)

CLASS, METHOD = "Rollout", "work"
"""What the deployed app calls them."""
CALL = "call"
"""What is kept of a lease: its call, once Modal has told it."""
LISTEN_S, MESSAGES_MAX = 30.0, 100
RESTART_S_MIN = 60.0
"""How long a call that starts again is waited for at the least."""
SITE_VARIABLE = "ELASTIC_SITE"

_decode_says = msgspec.msgpack.Decoder(ContainerSays).decode
_decode_end = msgspec.msgpack.Decoder(RolloutEnd).decode


class ModalSettings(ServerlessSettings):
    app: str = Field(modal_platform.APP, min_length=1, description="as it was deployed")
    environment: str = Field("", description="Modal's environment of the app; else the profile's")
    gpu: str = Field(
        "", description="Modal's name of the GPU, such as H100, of which a worker has gpus_per_worker; empty: no GPU"
    )
    cores: float = Field(2.0, ge=0.125, le=64, description="physical CPU cores of a container")
    memory_mb: int = Field(8192, ge=128, le=2**21, description="memory of a container, in MiB")
    region: str = Field("", description="where containers run; else anywhere, which is the cheapest")
    lease_s: float = Field(3600.0, gt=0, le=85000, description="time limit of a call; then it is ended")
    cold_start_s: float = Field(30.0, ge=0, allow_inf_nan=False, description="what a container's start takes, roughly")
    usd_per_gpu_hour: float = Field(
        0.0,
        ge=0,
        allow_inf_nan=False,
        description="price of one GPU for an hour; else Modal's, CPU and memory included",
    )
    volume: str = Field(
        "", description="a Modal volume that keeps weights and compiled code near the containers; empty: none"
    )
    volume_path: str = Field("/weights", pattern="^/", description="where it is mounted")
    ask_s: float = Field(30.0, gt=0, description="how long a restarted container waits for another lease")
    reconcile_s: float = Field(120.0, gt=0, description="time between two looks for calls that belong to no lease")
    answer_timeout_s: float = Field(60.0, gt=0, description="longest time that Modal may take to answer")

    @model_validator(mode="before")
    @classmethod
    def _priced(cls, values: Any) -> Any:
        """Without a price it is Modal's for what a container reserves."""
        if not isinstance(values, dict) or values.get("usd_per_gpu_hour") is not None:
            return values
        given = {name: values.get(name, cls.model_fields[name].default) for name in ("cores", "memory_mb", "gpu")}
        gpus = values.get("gpus_per_worker", 1)
        try:
            usd = modal_platform.usd_per_s(gpus=gpus, **given) * 3600 / gpus
        except ModalUnusable as error:
            raise ValueError(f"gpu: {error} (usd_per_gpu_hour)") from error
        except (TypeError, ZeroDivisionError):  # What is wrong with the values, their own checks say.
            usd = 0.0
        return {**values, "usd_per_gpu_hour": usd}


class _RolloutCall:
    """A call on Modal: which lease has it, and which containers of it that lease has had."""

    def __init__(self, call_id: str, call: Any, lease: LeaseId) -> None:
        self.id = call_id
        self.call = call
        self.lease = lease
        self.containers: list[str] = []
        self.began = asyncio.Event()
        self.since_s = time.monotonic()
        self.starts_again = False
        """Modal has taken its container back, the lease is over, and no other has it."""
        self.asks = asyncio.Event()
        """Its container waits for another lease's ticket."""


class _CallHandle:
    """A lease's `LeaseHandle`: its call until that is over, or the call's container was preempted."""

    def __init__(self, provider: "ModalProvider", rollout: _RolloutCall, recorded: RecordedProcesses) -> None:
        self._provider = provider
        self._rollout = rollout
        self._recorded = recorded
        self.containers = rollout.containers
        self.preempted: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def keep(self) -> LeaseEnding:
        over = asyncio.create_task(self._provider.over(self._rollout))
        try:
            await asyncio.wait({over, self.preempted}, return_when=asyncio.FIRST_COMPLETED)
            if self.preempted.done():
                return LeaseEnding(EndCause.PREEMPTED, "Modal took its container back, and started the call again")
            return over.result()
        finally:
            over.cancel()
            await asyncio.gather(over, return_exceptions=True)

    async def give_back(self) -> Nanoseconds | None:
        if not self.preempted.done() and not await self._provider.starts_again(self._rollout, self):
            await self._provider.cancel(self._rollout)
        charged_s = await self._provider.charged_s(self.containers)
        await self._recorded.end()
        self._provider.settle(self)
        return round(charged_s * NS_PER_S)


class ModalProvider(VendorProvider[Any]):
    """Leases one worker each, of which none outlives `lease_s`."""

    Settings: ClassVar[type[ModalSettings]] = ModalSettings
    settings: ModalSettings

    @classmethod
    def elsewhere(cls, settings: ProviderSettings) -> bool:
        """A stand-in for Modal on this machine has its containers here."""
        return not is_loopback(urlsplit(os.environ.get("MODAL_SERVER_URL", "")).hostname or "")

    def __init__(self, name: str, settings: ModalSettings, context: ProviderContext) -> None:
        super().__init__(ServerlessMarket(name, settings), context)
        self.vendor, self.answer_s = "Modal", settings.answer_timeout_s
        self._run_name = f"{context.tag(f'modal {name}')}/{name}"
        self._queue_name = f"elastic-{hashlib.blake2b(self._run_name.encode(), digest_size=12).hexdigest()}"
        self._queue: Any = None
        self._work: Any = None
        self._rollouts: dict[str, _RolloutCall] = {}
        """Calls that are a lease's, or wait for one, by their ids."""
        self._handles: dict[LeaseId, _CallHandle] = {}
        self._spare: deque[_RolloutCall] = deque()
        """Calls that Modal starts again, and that no lease has: their containers ask for a ticket, or will."""
        self._heard: dict[LeaseId, ContainerSays] = {}
        """What was said of leases that nothing is known of yet."""
        self._spawning = 0
        self._unsettled_until_s = -math.inf
        """Until when (monotonic) a call may show whose order had no answer."""

    @classmethod
    def examine(cls, name: str, settings: ModalSettings) -> Examination:
        """Whether the app is there, lets us in and fits, and what a worker costs. Blocks."""
        fault = ""
        try:
            asyncio.run(modal_platform.check_deployment(settings.app, settings.environment, settings.answer_timeout_s))
        except ModalUnusable as error:
            fault = str(error)
        found = fault.partition(": ")[0] if fault else "deployed, of this version"
        place = f"{settings.gpu or 'CPU'}{f' in {settings.region}' if settings.region else ''}"
        return Examination(
            findings=(
                VendorFinding(
                    what=f"{name}: Modal's app {settings.app}",
                    ok=not fault,
                    found=found,
                    mend=fault.partition(": ")[2],
                ),
            ),
            capacity=(
                CapacityNow(
                    place=place,
                    usd_per_gpu_hour=settings.usd_per_gpu_hour,
                    gpus_per_worker=settings.gpus_per_worker,
                    usable=not fault,
                    why=found if fault else "",
                ),
            ),
        )

    # What the contract asks for

    async def start(self, emit: Emit) -> None:
        await self._connect()
        await super().start(emit)
        self.run_in_background(self._listen(), "listen")
        self.run_in_background(self.watch(self.settings.reconcile_s), "reconcile")

    async def launch(self, request: LeaseRequest, place: str) -> LeaseHandle:
        environment = self._worker_environment(request)
        if self._spare:
            rollout = next((one for one in self._spare if one.asks.is_set()), self._spare[0])
            self._spare.remove(rollout)
            rollout.lease = request.lease
            recorded = self._record(request.lease, rollout.id)
            try:
                await self._happened(rollout, rollout.asks)
                rollout.asks.clear()
                rollout.starts_again = False
                await self._answer(rollout, NewTicket(lease=request.lease, environment=environment))
            except BaseException:
                await asyncio.shield(self._withdraw(rollout, recorded))
                raise
            return self._held(rollout, recorded)
        order = RolloutOrder(
            lease=request.lease,
            queue=self._queue_name,
            command=tuple(self.context.worker_command[1:]),
            environment=environment,
            ask_s=self.settings.ask_s,
        )
        recorded = self._record(request.lease, "")
        rollout: _RolloutCall | None = None
        try:
            rollout = await self._spawned(request.lease, order)
            recorded = self._record(request.lease, rollout.id)
            await self._happened(rollout, rollout.began)
        except BaseException as error:
            await asyncio.shield(self._withdraw(rollout, recorded))
            if isinstance(error, TimeoutError | asyncio.CancelledError) and rollout is not None:
                log.warning("a call on Modal did not begin in time", provider=self.name, lease=request.lease)
            raise
        return self._held(rollout, recorded)

    async def find(self, known: Mapping[LeaseId, KnownLease]) -> Mapping[LeaseId, Found]:
        await self._connect()
        pending = await self._pending()
        while await self._hear(block=False):
            pass
        recorded = {
            one.name: one for one in RecordedProcesses.found(records(self.context.run_dir), self.context.run, self.name)
        }
        found: dict[LeaseId, Found] = {}
        for lease_id in known:
            record, heard = recorded.pop(lease_id, None), self._heard.get(lease_id)
            call_id = (record.kept.get(CALL, "") if record else "") or (heard.call if heard else "")
            if not call_id or (call_id not in pending and not known[lease_id].granted):
                if record is not None:
                    await record.end()
                continue
            rollout = _RolloutCall(call_id, self._call_of(call_id), lease_id)
            rollout.containers += await modal_platform.containers_of(rollout.call)
            self._rollouts[call_id] = rollout
            found[lease_id] = Found(self._held(rollout, self._record(lease_id, call_id)))
        for record in recorded.values():
            await record.end()
        self._heard.clear()
        await self._cancel_unknown(pending)
        return found

    @property
    def remains(self) -> str:
        return f"its calls end after {self.settings.lease_s:g} s; `modal container list` shows their containers"

    async def clear_up(self) -> None:
        await modal_platform.modal().Queue.objects.delete.aio(
            self._queue_name, allow_missing=True, environment_name=self.settings.environment or None
        )

    # What a lease's handle asks for

    async def over(self, rollout: _RolloutCall) -> LeaseEnding:
        """How the call ended, once it has."""
        exceptions = modal_platform.modal().exception
        while True:
            try:
                end = _decode_end(await rollout.call.get.aio())
            except exceptions.FunctionTimeoutError:
                return LeaseEnding(EndCause.EXPIRED, f"Modal ended call {rollout.id}: its time was over")
            except (exceptions.RemoteError, exceptions.InternalFailure, exceptions.OutputExpiredError) as error:
                said = told(error)
                return LeaseEnding(EndCause.LOST, f"call {rollout.id} on Modal ended: {said}", said)
            except (msgspec.DecodeError, TypeError) as error:
                return LeaseEnding(EndCause.LOST, f"call {rollout.id} on Modal answered nonsense: {error}")
            except exceptions.NotFoundError as error:
                return LeaseEnding(EndCause.LOST, f"Modal knows call {rollout.id} no more: {told(error)}")
            except (exceptions.Error, OSError) as error:
                log.warning("a call on Modal cannot be asked after", call=rollout.id, error=told(error))
                await asyncio.sleep(RETRY_S)
                continue
            if end.status == 0:
                return LeaseEnding(EndCause.RELEASED, "the worker ended")
            how = how_ended(end.status)
            return LeaseEnding(
                EndCause.LOST,
                f"the worker of call {rollout.id} {how}; `modal app logs {self.settings.app}` has its log",
                f"its worker {how}" if end.status > 0 else "",
            )

    async def cancel(self, rollout: _RolloutCall) -> None:
        """End a call and its containers. Raises what Modal says, unless it knows the call no more: a new one it may not
        know yet."""
        async with asyncio.timeout(self.answer_s):
            try:
                await rollout.call.cancel.aio(terminate_containers=True)
                for container in await modal_platform.containers_of(rollout.call):
                    if container not in rollout.containers:
                        rollout.containers.append(container)
            except modal_platform.modal().exception.NotFoundError as error:
                if time.monotonic() - rollout.since_s < SETTLING_S:
                    raise
                log.warning("Modal knows a call no more", call=rollout.id, error=told(error))
        self._rollouts.pop(rollout.id, None)

    async def starts_again(self, rollout: _RolloutCall, handle: _CallHandle) -> bool:
        """Whether the lease's container is gone and Modal starts another one for its call, which is the next lease's.

        The run hears that a worker is lost before that container can ask.
        """
        if self._closing or not rollout.containers:
            return False
        first = rollout.containers[0]
        try:
            async with asyncio.timeout(self.answer_s):
                life = await modal_platform.life_of(first)
                if not life.finished_s or rollout.id not in await self._pending():
                    return False
        except Exception as error:
            log.warning("Modal does not say whether a call starts again", call=rollout.id, error=told(error))
            return False
        if not handle.preempted.done():  # Else it has asked meanwhile.
            handle.containers = [first]
            self._spared(rollout, rollout.containers[1:])
            patience_s = max(RESTART_S_MIN, 2 * self.settings.cold_start_s)
            self.run_in_background(self._end_if_unwanted(rollout, patience_s), f"patience with {rollout.id}")
        return True

    def _spared(self, rollout: _RolloutCall, containers: list[str]) -> None:
        """The lease that had it keeps the containers of before; these are the next lease's, or nobody's before long."""
        rollout.containers, rollout.lease, rollout.starts_again = containers, "", True
        self._spare.append(rollout)

    async def charged_s(self, containers: list[str]) -> float:
        """What Modal charges for these containers, once all are gone. Raises `TimeoutError`."""
        charged_s = 0.0
        for container in containers:
            life = await modal_platform.gone(container, self.answer_s)
            charged_s += max(0.0, life.finished_s - life.started_s) if life.started_s else 0.0
        return charged_s

    def settle(self, handle: _CallHandle) -> None:
        """Its lease is over."""
        self._handles = {lease: one for lease, one in self._handles.items() if one is not handle}

    async def _end_stray(self, rollout: _RolloutCall) -> None:
        """End a call that is no lease's, and tell the run what Modal charges for it: before, since its next process
        finds living ones only, and once they are gone."""
        told_s = 0.0
        with contextlib.suppress(Exception):  # What Modal does not say now, it says once they are gone.
            lives = [await modal_platform.life_of(container) for container in rollout.containers]
            told_s = sum(time.time() - life.started_s for life in lives if life.started_s and not life.finished_s)
        self._tell_strays(told_s)
        await self.cancel(rollout)
        self._tell_strays(await self.charged_s(rollout.containers) - told_s)

    def _tell_strays(self, charged_s: float) -> None:
        if charged_s:
            settings = self.settings
            usd = charged_s / 3600 * settings.usd_per_gpu_hour * settings.gpus_per_worker
            self._emit(StraysBilled(provider=self.name, usd=usd))

    # Calls

    async def _spawned(self, lease: LeaseId, order: RolloutOrder) -> _RolloutCall:
        """A call that Modal has; cut short, what may have been spawned is cancelled."""
        spawning = asyncio.create_task(self._spawn(lease, order))
        try:
            return await asyncio.shield(spawning)
        except asyncio.CancelledError:
            with contextlib.suppress(Exception):
                await self.cancel(await spawning)
            raise

    async def _spawn(self, lease: LeaseId, order: RolloutOrder) -> _RolloutCall:
        self._spawning += 1
        try:
            async with asyncio.timeout(self.answer_s):
                call = await self._work.spawn.aio(msgspec.msgpack.encode(order))
            rollout = _RolloutCall(call.object_id, call, lease)
            self._rollouts[rollout.id] = rollout
        except modal_platform.modal().exception.Error as error:
            self._unsettled_until_s = time.monotonic() + SETTLING_S
            raise CapacityUnavailable(f"Modal did not take the call: {told(error)}") from error
        except BaseException:
            self._unsettled_until_s = time.monotonic() + SETTLING_S
            raise
        finally:
            self._spawning -= 1
        if (heard := self._heard.pop(lease, None)) is not None:
            self._hear_of(rollout, heard)
        return rollout

    async def _happened(self, rollout: _RolloutCall, event: asyncio.Event) -> None:
        """Returns once a container of the call has begun, or asks. Raises `CapacityUnavailable` if none ever does."""
        over, happened = asyncio.create_task(self.over(rollout)), asyncio.create_task(event.wait())
        try:
            await asyncio.wait({over, happened}, return_when=asyncio.FIRST_COMPLETED)
            if not event.is_set():
                raise CapacityUnavailable(over.result().detail)
        finally:
            for task in (over, happened):
                task.cancel()
            await asyncio.gather(over, happened, return_exceptions=True)

    async def _withdraw(self, rollout: _RolloutCall | None, recorded: RecordedProcesses) -> None:
        """A call that was not to be a lease. What cannot be ended now belongs to no lease: the next look ends it."""
        with contextlib.suppress(Exception):
            if rollout is not None:
                await self._end_stray(rollout)
        await recorded.end()

    def _held(self, rollout: _RolloutCall, recorded: RecordedProcesses) -> _CallHandle:
        handle = self._handles[rollout.lease] = _CallHandle(self, rollout, recorded)
        return handle

    def _record(self, lease: LeaseId, call: str) -> RecordedProcesses:
        record = RecordedProcesses(records(self.context.run_dir), self.context.run, self.name, lease, {CALL: call})
        record.write()
        return record

    def _worker_environment(self, request: LeaseRequest) -> Mapping[str, str]:
        (ticket,) = request.tickets
        settings = self.settings
        environment = {**worker_environment(self.context, ticket)}
        if settings.volume:
            environment[SITE_VARIABLE] = settings.volume_path
            # On a volume, so that not every container spends its first 20 CPU seconds on them.
            environment[compiled.VARIABLE] = str(PurePosixPath(settings.volume_path, compiled.FOLDER))
        return environment

    # What containers say

    async def _listen(self) -> None:
        while True:
            try:
                await self._hear(block=True)
            except Exception as error:
                log.warning("Modal's queue cannot be read", provider=self.name, error=told(error))
                await asyncio.sleep(RETRY_S)

    async def _hear(self, *, block: bool) -> bool:
        """Hear what the run's queue has, and return whether it had anything; it may have more."""
        timeout_s = LISTEN_S if block else None
        messages = await self._queue.get_many.aio(MESSAGES_MAX, block=block, timeout=timeout_s) or ()
        for message in messages:
            try:
                says = _decode_says(message)
            except (msgspec.DecodeError, TypeError) as error:
                log.warning("nonsense in the run's queue on Modal", provider=self.name, error=str(error))
                continue
            rollout = self._rollouts.get(says.call)
            if rollout is None:
                self._heard[says.lease] = says
            else:
                self._hear_of(rollout, says)
        return bool(messages)

    def _hear_of(self, rollout: _RolloutCall, says: ContainerSays) -> None:
        if says.container not in rollout.containers:
            rollout.containers.append(says.container)
        rollout.began.set()
        if not says.asks:
            return
        handle = self._handles.get(rollout.lease)
        if not rollout.starts_again:
            former = says.lease != rollout.lease
            if handle is None or handle.preempted.done() or former or says.container == rollout.containers[0]:
                self.run_in_background(self._answer(rollout, NewTicket()), f"answer to {says.container}")
                return
            handle.containers = [name for name in handle.containers if name != says.container]
            handle.preempted.set_result(None)
            self._spared(rollout, [says.container])
        rollout.asks.set()
        patience_s = self.settings.ask_s / 2
        self.run_in_background(self._end_if_unwanted(rollout, patience_s), f"patience with {rollout.id}")

    async def _end_if_unwanted(self, rollout: _RolloutCall, after_s: float) -> None:
        await asyncio.sleep(after_s)
        if rollout in self._spare:
            self._spare.remove(rollout)
            await self._end_stray(rollout)

    async def _answer(self, rollout: _RolloutCall, ticket: NewTicket) -> None:
        async with asyncio.timeout(self.answer_s):
            await self._queue.put.aio(msgspec.msgpack.encode(ticket), partition=rollout.containers[-1])

    # Order

    async def _connect(self) -> None:
        """Raises `ProviderUnavailable`."""
        if self._work is not None:
            return
        settings = self.settings
        environment = settings.environment or None
        try:
            await modal_platform.check_deployment(settings.app, settings.environment, settings.answer_timeout_s)
            modal = modal_platform.modal()
            queue = modal.Queue.from_name(self._queue_name, create_if_missing=True, environment_name=environment)
            found = modal.Cls.from_name(settings.app, CLASS, environment_name=environment)
            work = getattr(found.with_options(**self._options(modal))(run=self._run_name), METHOD)
            async with asyncio.timeout(settings.answer_timeout_s):
                await queue.hydrate.aio()
                await work.hydrate.aio()
        except ModalUnusable as error:
            kind = ProviderSilent if isinstance(error, Outage) else ProviderUnavailable
            raise kind(f"{self.name}: {error}") from error
        except Exception as error:
            kind = ProviderSilent if isinstance(error, (OSError, TimeoutError)) else ProviderUnavailable
            raise kind(f"{self.name}: Modal does not give what its section asks for: {told(error)}") from error
        self._queue, self._work, self.used = queue, work, True

    def _options(self, modal: Any) -> dict[str, Any]:
        settings = self.settings
        options: dict[str, Any] = {
            "cpu": settings.cores,
            "memory": settings.memory_mb,
            # Beyond a lease's own end: that of the run's comes first, unless the run is gone.
            "timeout": math.ceil(settings.lease_s + settings.ask_s),
        }
        if settings.gpu:
            options["gpu"] = f"{settings.gpu}:{settings.gpus_per_worker}"
        if settings.region:
            options["region"] = settings.region
        if settings.volume:
            volume = modal.Volume.from_name(
                settings.volume, create_if_missing=True, environment_name=settings.environment or None
            )
            options["volumes"] = {settings.volume_path: volume}
        return options

    async def _pending(self) -> set[str]:
        """Return the run's calls that are not over, by their ids."""
        async with asyncio.timeout(self.answer_s):
            return {call for call, left in (await modal_platform.calls_of(self._work.object_id)).items() if left}

    def _call_of(self, call_id: str) -> Any:
        return modal_platform.modal().FunctionCall.from_id(call_id)

    async def look(self) -> None:
        pending = await self._pending()
        if not self._spawning:
            await self._cancel_unknown(pending)

    async def sweep(self) -> bool:
        while self._spare:
            await self._end_stray(self._spare.popleft())
        settled = time.monotonic() > self._unsettled_until_s
        pending = await self._pending()
        await self._cancel_unknown(pending)
        return settled and not pending

    async def _cancel_unknown(self, pending: set[str]) -> None:
        for call_id in sorted(pending - self._rollouts.keys()):
            log.warning("a call on Modal that belongs to no lease is cancelled", provider=self.name, call=call_id)
            await self._end_stray(_RolloutCall(call_id, self._call_of(call_id), ""))
