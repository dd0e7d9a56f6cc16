"""Carries out the trainer's orders one after the other, on the device on which its worker's engine generates."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec
import structlog

from elastic.core.types import Account
from elastic.engine.base import RolloutEngine
from elastic.protocol import wire
from elastic.worker.accounts import DeviceAccounts
from elastic.worker.connection import OrchestratorLink
from elastic.worker.device_permit import DevicePermit
from elastic.worker.threads import DaemonThread, run_in_thread

if TYPE_CHECKING:
    from elastic.worker.trainer_host import TrainerHost

log = structlog.get_logger(__name__)

TrainerOrder: TypeAlias = wire.TrainGroupFrame | wire.SkipGroup | wire.UpdateFrame
TrainerReply: TypeAlias = wire.Trained | wire.Stepped | wire.UpdateRefused | None


class TrainerStatus(msgspec.Struct, frozen=True):
    """The progress of a trainer: its version, with what proves that and the `source` of weights that others trained,
    and the groups that it has got in the step to the next version."""

    version: int
    groups: tuple[str, ...] = ()
    slots: frozenset[int] = frozenset()
    proof: list[float] = []
    source: str = ""


class Training:
    """Runs a trainer's orders. It sends its messages through `send`; the caller owns its tasks."""

    def __init__(
        self,
        trainer: "TrainerHost",
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
        """Load the policy into the trainer and its engine, once the device may be used."""
        await self._permit.granted()
        await self._device.run(self._trainer.timeout_s, self._trainer.load_policy, self._engine)

    def ready(self) -> wire.Ready:
        stands, key = self._trainer.status(), self._trainer.publisher
        groups, slots = list(stands.groups), sorted(stands.slots)
        return wire.Ready(self._engine.capabilities, stands.version, key, groups, slots, stands.proof, stands.source)

    def resumed(self, welcome: wire.Welcome) -> None:
        """Repeat the last announcements on a new connection, since they may have been lost."""
        self._trainer.follow(welcome)
        if self._publishing is not None:
            self._tell_of_publication()

    async def obey(self, order: TrainerOrder, asked: OrchestratorLink) -> None:
        """Carry out an order and answer on the connection where it was `asked`. On another connection it is asked
        again.

        If the device cannot be had any more, the order is not carried out.
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
        """Wait until the version before is on the relay, or never will be, and the run has its checkpoint. The next
        version waits for this."""
        if self._publishing is not None:
            await asyncio.wait({self._publishing})
        await self._returned()

    async def checkpointed(self) -> None:
        """Save the step so far. Without this, the trainer's successor trains these groups again."""
        try:
            await self._device.run(self._trainer.timeout_s, self._trainer.checkpoint)
        except TimeoutError:
            raise
        except Exception as error:
            log.warning("no checkpoint before the device is given back", error=repr(error))

        await self._returned()

    async def _returned(self) -> None:
        """Wait until the run has the checkpoints. Without one its successor begins at an earlier one."""
        try:
            await run_in_thread(self._trainer.timeout_s, self._trainer.returned)
        except TimeoutError as error:
            log.warning("a checkpoint is here alone", reason=str(error))

    def _carry_out(self, order: TrainerOrder) -> TrainerReply:
        """Train while the engine sleeps. Called on the device's thread.

        Skipping a group needs no device; turns may be running.
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
                self._trainer.wake()

    def _tell_of_publication(self) -> None:
        """Report the last version's publication, also if that was reported before."""
        if self._publishing is None or self._publishing.done():
            self._publishing = self._spawn(self._publish())

    async def _publish(self) -> None:
        """Report how long the publication took once the version is on the relay. Turns run meanwhile."""
        version, timeout_s = self._trainer.status().version, self._trainer.timeout_s
        try:
            self._send(await run_in_thread(timeout_s, self._trainer.published))
        except TimeoutError:
            self._fail(f"version {version} was not published within {timeout_s} s")
        except Exception as error:
            log.exception("weights not published", version=version)
            self._fail(f"version {version} not published: {type(error).__name__}: {error}")

    def _fail(self, cause: str) -> None:
        """Record the failure. Every later order is answered with it."""
        self._failed = wire.TrainerFailedFrame(wire.clipped(cause))
        self._send(self._failed)
