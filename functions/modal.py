"""A function pool on Modal: each call is an input of the deployed app's function, in containers that come when called
for and go when idle.

- A call is spawned and, where nobody wants its answer any more, cancelled with its container: Modal's client cancels
  nothing by itself.
- What a call needs beyond Modal's limits of a message (8 KiB) its client sends by way of blobs.
- A container costs with every second of its life: its start, its calls, and the time that it is kept without one, which
  is billed to the calls before and after it. Each container's last idle time is billed with its first call.
"""

import asyncio
import contextlib
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import structlog
from pydantic import BaseModel, ConfigDict, Field

from elastic.system import modal as modal_platform
from elastic.system.modal import ModalUnusable
from elastic.system.outages import Outage
from elastic.system.plain_values import told
from functions.base import (
    Call,
    CallOutcome,
    FunctionError,
    FunctionMissing,
    FunctionTimedOut,
    FunctionUnavailable,
    Meter,
)
from functions.keyed import UNDECODABLE, KeyedPool, value_of
from functions.local import Prices
from functions.modal_calls import RemoteAnswer, RemoteCall

log = structlog.get_logger(__name__)

FUNCTION, BATCH = "function", "batch"
"""The names of the deployed app's functions."""
IDLE_S_MIN, IDLE_S_MAX = 2, 3600
"""Modal's bounds on the time that a container idles before it ends."""
CALL_TIMEOUT_S = 600
"""Modal's own limit of a call; a pool's calls end before it."""
START_TIMEOUT_S = 300.0
"""How long the first start may take, with a container's."""
END_TIMEOUT_S = 30.0
"""How long a cancelled call and its containers may take to end."""
CONTAINERS_REMEMBERED = 10_000

_decode_answer = msgspec.msgpack.Decoder(RemoteAnswer).decode


class ModalPoolSettings(BaseModel):
    """The keys of `rewards.pool_settings` for this pool."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    app: str = Field(modal_platform.APP, min_length=1, description="as it was deployed")
    environment: str = Field("", description="Modal's environment of the app; else the profile's")
    cores: float = Field(0.125, ge=0.125, le=64, description="physical CPU cores of a container")
    memory_mb: int = Field(512, ge=128, le=2**20, description="memory of a container, in MiB")
    batch: int = Field(1, ge=1, le=1000, description="most waiting calls that a container takes at once")
    batch_wait_s: float = Field(0.02, ge=0, le=600, description="how long it waits for more of them")


class _Silent(FunctionMissing, Outage):
    """Modal does not answer now."""


class _Charged(NamedTuple):
    """What of a container's life calls have been billed for: until `until_s`, and its last idle time if `parted`.

    `until_s` is by the container's clock, `heard_s` by ours: when it answered last.
    """

    until_s: float
    parted: bool
    heard_s: float


class ModalFunctionPool(KeyedPool):
    """`functions.base.FunctionPool` on Modal; at most `concurrency` calls at once.

    A container ends after `idle_s` without a call. Without a price of a second in `prices` it is Modal's for the
    reservation. `pass_env` names environment variables that go to containers, as a secret.
    """

    Settings = ModalPoolSettings

    def __init__(
        self,
        function: str,
        *,
        concurrency: int = 4,
        idle_s: float = 30.0,
        prices: Prices = Prices(),  # noqa: B008 - an immutable default
        log: Path | None = None,
        meter: Meter = lambda _: None,
        run: str = "",
        records: Path | None = None,
        pass_env: Sequence[str] = (),
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(function, meter)
        self.settings = ModalPoolSettings.model_validate(settings or {})
        self.usd_per_s = prices.usd_per_s or modal_platform.usd_per_s(self.settings.cores, self.settings.memory_mb)
        self._prices = prices
        self._idle_s = max(IDLE_S_MIN, min(IDLE_S_MAX, round(idle_s)))
        self._concurrency = concurrency
        self._places = asyncio.Semaphore(concurrency)
        self._environment = {name: os.environ[name] for name in pass_env if name in os.environ}
        self._remote: Any = None
        self._containers: dict[str, _Charged] = {}

    async def start(self) -> None:
        await self._look_up()
        order = RemoteCall(function=self.function, load_only=True)
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                found = await self._answered(await self._spawned(order))
        except TimeoutError:
            raise FunctionTimedOut(f"{self.function}: not loaded on Modal within {START_TIMEOUT_S:g} s") from None
        self._note(found.container, _Charged(found.born_s, False, time.monotonic()))
        value_of(self.function, found.answer)

    def most_usd(self, timeout_s: float) -> float:
        """Return a call's greatest cost in USD, with a container's start and the idle time around the call."""
        return self._prices.usd_per_call + self.usd_per_s * (timeout_s + 2 * self._idle_s)

    async def aclose(self) -> None:
        """Idle containers are stopped, and waited for; what that saves of their idle time stays on the bill."""
        await self._end_calls()
        now_s = time.monotonic()
        idle = [name for name, one in self._containers.items() if one.heard_s + self._idle_s >= now_s]
        await asyncio.gather(*(_stopped(container) for container in idle), return_exceptions=True)
        self._containers.clear()

    async def _call(self, key: str, payload: bytes, timeout_s: float) -> Any:
        times = _Asked()
        outcome = CallOutcome.UNAVAILABLE
        call: Any = None
        found: RemoteAnswer | None = None
        try:
            async with asyncio.timeout(timeout_s), self._places:
                if self._remote is None:
                    await self._look_up()
                call = await self._spawned(
                    RemoteCall(function=self.function, payload=msgspec.Raw(payload), pacing_s=self._prices.pacing_s)
                )
                found = await self._answered(call)
            result = value_of(self.function, found.answer)
            outcome = CallOutcome.OK
            return result
        except TimeoutError:
            outcome = CallOutcome.TIMED_OUT
            raise self._timed_out(timeout_s) from None
        except FunctionError as error:
            outcome = error.outcome
            raise
        finally:
            if found is not None:
                self._meter(self._billed(key, outcome, times, found))
            else:
                await asyncio.shield(self._own(self._give_up(key, outcome, times, call), f"end {key}"))

    async def _look_up(self) -> None:
        """Find the function in an app that fits. Raises `FunctionMissing`."""
        settings = self.settings
        try:
            await modal_platform.check_deployment(settings.app, settings.environment, START_TIMEOUT_S)
        except ModalUnusable as error:
            kind = _Silent if isinstance(error, Outage) else FunctionMissing
            raise kind(f"{self.function}: {error}") from error
        name = BATCH if settings.batch > 1 else FUNCTION
        found = modal_platform.modal().Function.from_name(
            settings.app, name, environment_name=settings.environment or None
        )
        options: dict[str, Any] = {"env": self._environment} if self._environment else {}
        remote = found.with_options(
            cpu=settings.cores,
            memory=settings.memory_mb,
            max_containers=self._concurrency,
            scaledown_window=self._idle_s,
            timeout=CALL_TIMEOUT_S,
            **options,
        )
        if settings.batch > 1:
            remote = remote.with_batching(max_batch_size=settings.batch, wait_ms=round(settings.batch_wait_s * 1000))
        self._remote = remote

    async def _spawned(self, order: RemoteCall) -> Any:
        """Spawn a call on Modal. Raises `FunctionUnavailable`. If cancelled, it cancels what it may have spawned."""
        spawning = asyncio.create_task(self._spawn(order))
        try:
            return await asyncio.shield(spawning)
        except asyncio.CancelledError:
            self._own(_cancel_spawned(spawning), f"end of a call of {self.function} that nobody waits for")
            raise

    async def _spawn(self, order: RemoteCall) -> Any:
        try:
            return await self._remote.spawn.aio(msgspec.msgpack.encode(order))
        except Exception as error:
            raise FunctionUnavailable(f"{self.function}: Modal did not take the call: {told(error)}") from error

    async def _answered(self, call: Any) -> RemoteAnswer:
        exceptions = modal_platform.modal().exception
        try:
            encoded = await call.get.aio()
        except exceptions.FunctionTimeoutError as error:
            raise FunctionTimedOut(f"{self.function}: Modal ended the call: {told(error)}") from error
        except Exception as error:
            raise FunctionUnavailable(f"{self.function}: {told(error)}") from error
        try:
            return _decode_answer(encoded)
        except (*UNDECODABLE, TypeError) as error:
            raise FunctionUnavailable(f"{self.function}: its container answered nonsense: {error}") from error

    async def _give_up(self, key: str, outcome: CallOutcome, times: "_Asked", call: Any) -> None:
        """End a call without an answer, and bill what Modal says of its container."""
        lives: dict[str, modal_platform.Life] = {}
        if call is not None:
            try:
                async with asyncio.timeout(END_TIMEOUT_S):
                    containers = await modal_platform.containers_of(call)
                    await call.cancel.aio(terminate_containers=True)
                    lives = {name: await modal_platform.gone(name, END_TIMEOUT_S) for name in containers}
            except Exception as error:
                log.warning("a call on Modal may go on until its time limit", key=key, error=told(error))
        billed_s = 0.0
        for name, life in lives.items():
            known = self._containers.pop(name, None)
            paid_s = known.until_s + (self._idle_s if known.parted else 0.0) if known is not None else life.started_s
            billed_s += max(0.0, life.finished_s - paid_s)
        usd = billed_s * self.usd_per_s + (self._prices.usd_per_call if lives else 0.0)
        self._meter(
            Call(
                function=self.function,
                key=key,
                outcome=outcome,
                queued_s=max(0.0, times.passed_s() - billed_s),
                cold_start_s=0.0,
                duration_s=billed_s,
                usd=usd,
            )
        )

    def _billed(self, key: str, outcome: CallOutcome, times: "_Asked", found: RemoteAnswer) -> Call:
        """Return the bill of an answered call, which has all of the container's time since the answer before."""
        known = self._containers.get(found.container)
        cold_start_s = max(0.0, found.begun_s - found.born_s) if known is None else 0.0
        since_s = found.born_s if known is None else known.until_s
        lived_s = max(0.0, found.ended_s - since_s)
        duration_s = min(found.ended_s - found.begun_s, lived_s)
        idle_s = max(0.0, lived_s - duration_s - cold_start_s)
        if known is None or not known.parted:
            idle_s += self._idle_s
        self._note(found.container, _Charged(max(found.ended_s, since_s), True, time.monotonic()))
        billed_s = cold_start_s + duration_s + idle_s
        return Call(
            function=self.function,
            key=key,
            outcome=outcome,
            queued_s=max(0.0, times.passed_s() - (found.ended_s - found.begun_s) - cold_start_s),
            cold_start_s=cold_start_s,
            duration_s=duration_s,
            usd=billed_s * self.usd_per_s + self._prices.usd_per_call,
            idle_s=idle_s,
        )

    def _note(self, container: str, billed: _Charged) -> None:
        self._containers.pop(container, None)
        self._containers[container] = billed
        if len(self._containers) > CONTAINERS_REMEMBERED:
            del self._containers[next(iter(self._containers))]


class _Asked:
    def __init__(self) -> None:
        self._asked_s = time.monotonic()

    def passed_s(self) -> float:
        return time.monotonic() - self._asked_s


async def _cancel_spawned(spawning: "asyncio.Task[Any]") -> None:
    with contextlib.suppress(Exception):
        call = await spawning
        await call.cancel.aio(terminate_containers=True)


async def _stopped(container: str) -> None:
    """Returns once an idle container is gone. Raises `TimeoutError`, or what Modal says."""
    async with asyncio.timeout(END_TIMEOUT_S):
        await modal_platform.stop_container(container)
        await modal_platform.gone(container, END_TIMEOUT_S)
