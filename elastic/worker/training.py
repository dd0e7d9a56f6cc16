"""The trainer's orders, carried out one after the other on the device that its worker's engine generates on."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Protocol, TypeAlias

import msgspec
import structlog

from elastic import wire
from elastic.core.types import Account
from elastic.engine.base import RolloutEngine
from elastic.worker.accounts import DeviceAccounts
from elastic.worker.connection import Connection
from elastic.worker.device_permit import DevicePermit
from elastic.worker.threads import DaemonThread, run_in_thread

log = structlog.get_logger(__name__)

TrainerOrder: TypeAlias = wire.TrainGroupFrame | wire.SkipGroup | wire.UpdateFrame
TrainerReply: TypeAlias = wire.Trained | wire.Stepped | None


class Standing(msgspec.Struct, frozen=True):
    """Where a trainer stands: at which version, and what it was given in the step that leads to the next."""

    version: int
    groups: tuple[str, ...] = ()
    slots: frozenset[int] = frozenset()


class Trainer(Protocol):
    """Takes the orders of the trainer's worker; see `elastic.worker.trainer_host`."""

    timeout_s: float
    publisher: str
    """The public key that its versions are signed with, once there is an engine."""

    def load_policy(self, engine: RolloutEngine) -> None:
        """Before the worker is ready: bring the trainer's current weights into its engine. Blocks."""
        ...

    def wake(self) -> None:
        """Have the engine generate, at once or as soon as the device is there."""
        ...

    def standing(self) -> Standing:
        """Any thread may ask, once there is an engine."""
        ...

    def has(self, order: TrainerOrder) -> bool:
        """Whether the order was carried out before. Then it is only answered again, and needs no device."""
        ...

    def carry_out(self, order: TrainerOrder) -> TrainerReply:
        """Blocks. The engine sleeps meanwhile, but for a `SkipGroup`: the device belongs to the trainer alone."""
        ...

    def follow(self, welcome: wire.Welcome) -> None:
        """An orchestrator has come back, and its relay may be elsewhere."""
        ...

    def checkpoint(self) -> None:
        """Saves what was trained before the device is given back, unless it is saved or a step is under way.

        Blocks; raises what failed.
        """
        ...

    def published(self) -> wire.PublishedFrame:
        """Waits until the last step's version is on the relay, and returns what that took. Raises what failed."""
        ...


class Training:
    """Runs a trainer's orders. Messages of its own go through `send`; the caller owns its tasks."""

    def __init__(
        self,
        trainer: Trainer,
        engine: RolloutEngine,
        device: DaemonThread,
        permit: DevicePermit,
        accounts: DeviceAccounts,
        send: Callable[[wire.FromWorker], None],
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
    ) -> None:
        self._trainer = trainer
        self._engine = engine
        self._device = device
        self._permit = permit
        self._accounts = accounts
        self._send = send
        self._spawn = spawn
        self._publishing: asyncio.Task[None] | None = None
        self._failed: wire.TrainerFailedFrame | None = None

    async def begin(self) -> None:
        """Loads the policy in the trainer and in its engine, once the device may be used."""
        await self._permit.granted()
        await self._device.run(self._trainer.timeout_s, self._trainer.load_policy, self._engine)

    def ready(self) -> wire.Ready:
        stands, key = self._trainer.standing(), self._trainer.publisher
        return wire.Ready(self._engine.capabilities, stands.version, key, list(stands.groups), sorted(stands.slots))

    def wake(self) -> None:
        """On the device's thread."""
        self._trainer.wake()

    def resumed(self, welcome: wire.Welcome) -> None:
        """Repeats the last announcements on a new connection: they may have been lost with the old one."""
        self._trainer.follow(welcome)
        if self._publishing is not None:
            self._tell_of_publication()

    async def obey(self, order: TrainerOrder, asked: Connection) -> None:
        """Answered where it was `asked`: on another connection it is asked again if its answer was not heard.

        Where the device is not to be had any more, it is not carried out.
        """
        if self._failed is not None:
            asked.send(self._failed)
            return
        again = self._trainer.has(order)
        if isinstance(order, wire.UpdateFrame) and not again:
            await self.published()
        if not (again or isinstance(order, wire.SkipGroup) or await self._permit.granted()):
            return
        work = self._trainer.carry_out if again else self._carry_out
        try:
            reply = await self._device.run(self._trainer.timeout_s, work, order)
        except TimeoutError:
            self._fail(f"{type(order).__name__} took longer than {self._trainer.timeout_s} s")
        except Exception as error:
            log.exception("training failed", order=type(order).__name__)
            self._fail(f"{type(error).__name__}: {error}")
        else:
            if reply is not None:
                asked.send(reply)
            if isinstance(reply, wire.Stepped):
                self._tell_of_publication()

    async def published(self) -> None:
        """Once the version before is on the relay, or never will be: the next one waits for that."""
        if self._publishing is not None:
            await asyncio.wait({self._publishing})

    async def checkpointed(self) -> None:
        """Has the trainer save its step so far; without that its successor trains those groups once more."""
        try:
            await self._device.run(self._trainer.timeout_s, self._trainer.checkpoint)
        except TimeoutError:
            raise
        except Exception as error:
            log.warning("no checkpoint before the device is given back", error=repr(error))

    def _carry_out(self, order: TrainerOrder) -> TrainerReply:
        """On the device's thread: train while the engine sleeps, which the orchestrator has seen to as a rule.

        A group that is skipped takes no device; turns may be running.
        """
        if isinstance(order, wire.SkipGroup):
            return self._trainer.carry_out(order)
        awake = not self._engine.statistics().asleep
        if awake:
            self._engine.sleep()
        self._accounts.devote(Account.TRAINING, instead_of=Account.ASLEEP)
        try:
            return self._trainer.carry_out(order)
        finally:
            self._accounts.leave_to_engine()
            if awake:
                self._engine.wake()

    def _tell_of_publication(self) -> None:
        """Of the last version's, also where it was told before."""
        if self._publishing is None or self._publishing.done():
            self._publishing = self._spawn(self._publish())

    async def _publish(self) -> None:
        """Say what it took to put the version on the relay once it is there, while turns run already."""
        version, timeout_s = self._trainer.standing().version, self._trainer.timeout_s
        try:
            self._send(await run_in_thread(timeout_s, self._trainer.published))
        except TimeoutError:
            self._fail(f"version {version} was not published within {timeout_s} s")
        except Exception as error:
            log.exception("weights not published", version=version)
            self._fail(f"version {version} not published: {type(error).__name__}: {error}")

    def _fail(self, cause: str) -> None:
        """Nothing can be relied on any more; whoever asks for more is told so."""
        self._failed = wire.TrainerFailedFrame(wire.clipped(cause))
        self._send(self._failed)
