"""A scheduler at one's fingertips: say what happens, look at what is ordered. Checked after every event."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import msgspec
import pytest

from elastic.core import commands as c
from elastic.core import events as e
from elastic.core.invariants import check
from elastic.core.policy import ProvisioningPolicy, RoutingPolicy, SeedingPolicy
from elastic.core.rows import Curriculum
from elastic.core.scheduler import Scheduler
from elastic.core.types import (
    NS_PER_S,
    Account,
    Capabilities,
    Chunk,
    Chunks,
    EndCause,
    FinishReason,
    LoadPhase,
    Offer,
    Plan,
    WorkerRole,
)
from elastic.testing.faults.core.incarnation import policies
from elastic.testing.faults.core.settings import SMALL_LIMITS, WorldSettings

CAPABILITIES = Capabilities(engine="test", replayable_sampling=True, max_context_tokens=4096, device="none")
K = TypeVar("K", bound=c.Command)
P = TypeVar("P")


def part(scheduler: Scheduler, kind: type[P]) -> P:
    """The scheduler's part of this kind."""
    (found,) = [one for one in scheduler.pieces[1] if isinstance(one, kind)]
    return found


class CoreHarness:
    """Drives one scheduler. Times are seconds since the run began; `out` holds the last event's commands."""

    def __init__(
        self,
        *,
        balancing: bool = False,
        dynamic_most: float = 0.0,
        seeding: SeedingPolicy | None = None,
        provisioning: ProvisioningPolicy | None = None,
        routing: RoutingPolicy | None = None,
        curricula: Mapping[str, Curriculum] | None = None,
        **plan: Any,
    ) -> None:
        told: dict[str, Any] = {"steps": 1, "groups": 1, "group_size": 2} | plan
        settings = WorldSettings(
            plan=Plan(**told),
            balancing=balancing,
            dynamic_most=dynamic_most,
        )
        chosen = policies(settings)
        chosen = chosen if seeding is None else msgspec.structs.replace(chosen, seeding=seeding)
        chosen = chosen if provisioning is None else msgspec.structs.replace(chosen, provisioning=provisioning)
        chosen = chosen if routing is None else msgspec.structs.replace(chosen, routing=routing)
        chosen = chosen if curricula is None else msgspec.structs.replace(chosen, curricula=curricula)
        self.scheduler = Scheduler(settings.plan, SMALL_LIMITS, chosen, 0)
        self.now_s = 0.0
        self.out: list[c.Command] = []

    def tell(self, event: e.Event) -> list[c.Command]:
        self.out = self.scheduler.handle(event, round(self.now_s * NS_PER_S))
        check(self.scheduler)
        return self.out

    def wait(self, seconds: float, beating: tuple[str, ...] = ()) -> list[c.Command]:
        """Let time pass, waking the core whenever it asked for it; the workers `beating` stay alive."""
        end_s, out = self.now_s + seconds, list[c.Command]()
        while self.now_s < end_s:
            at_ns = self.scheduler.next_wakeup_ns()
            self.now_s = min(end_s, self.now_s + 0.5, end_s if at_ns is None else max(self.now_s, at_ns / NS_PER_S))
            out += self.tell(e.Tick())
            for worker in beating:
                out += self.beat(worker)
        self.out = out
        return out

    def sent(self, kind: type[K]) -> list[K]:
        return [command for command in self.out if isinstance(command, kind)]

    def one(self, kind: type[K]) -> K:
        (command,) = self.sent(kind)
        return command

    def offer(self, provider: str, role: WorkerRole = WorkerRole.ELASTIC, available: int = 1) -> list[c.Command]:
        return self.tell(
            e.OfferChanged(offer=Offer(provider=provider, role=role, available=available, usd_per_gpu_hour=2.0))
        )

    def grant(self, lease: str, expires_s: float | None = None, workers: tuple[str, ...] = ()) -> list[c.Command]:
        expires_at_ns = None if expires_s is None else round(expires_s * NS_PER_S)
        return self.tell(e.LeaseGranted(lease=lease, workers=workers or (f"{lease}/w",), expires_at_ns=expires_at_ns))

    def join(self, worker: str, version: int | None = 0, epoch: int = 1) -> list[c.Command]:
        return self.tell(e.WorkerJoined(worker=worker, epoch=epoch, capabilities=CAPABILITIES, weights_version=version))

    def beat(
        self,
        worker: str,
        capacity: int = 4,
        progress: int | None = None,
        executing: int = 0,
        epoch: int = 0,
        pending: int = 0,
        loading: LoadPhase = LoadPhase.NONE,
        load_progress: int = 0,
    ) -> list[c.Command]:
        record = self.scheduler.fleet.workers.get(worker)
        epoch = epoch or (record.epoch if record else 1)
        return self.tell(
            e.WorkerReported(
                worker=worker,
                epoch=epoch,
                capacity_turns=capacity,
                pending=pending,
                executing=executing,
                progress=round(self.now_s * 1000) if progress is None else progress,
                accounts_ns={Account.IDLE: 1},
                decoded_tokens=0,
                loading=loading,
                load_progress=load_progress,
            )
        )

    def tokens(
        self,
        command: c.StartTurn,
        count: int,
        start: int | None = None,
        finish: FinishReason | None = None,
        version: int = 0,
        prefilled: int = 0,
    ) -> list[c.Command]:
        """The worker's frame for one attempt: `count` tokens from `start` (by default where it was to begin)."""
        at = command.start if start is None else start
        chunk = Chunk(command.slot, at, count, version, finish, prefilled=prefilled)
        return self.tell(e.TokensReceived(worker=command.worker, epoch=command.epoch, chunks=Chunks.of([chunk])))

    def request(self, trajectory: str, turn: str = "", max_new_tokens: int = 100) -> list[c.Command]:
        return self.tell(
            e.TurnRequested(
                turn=turn or f"{trajectory}#0",
                trajectory=trajectory,
                prompt_tokens=10,
                max_new_tokens=max_new_tokens,
            )
        )

    def trainer(self, capacity: int = 4, version: int = 0) -> list[c.Command]:
        """The trainer's device comes, with the first step's groups."""
        self.offer("trainer", WorkerRole.TRAINER)
        self.grant("trainer-1", workers=("trainer",))
        out = self.join("trainer", version)
        self.beat("trainer", capacity)
        return out

    def worker(self, provider: str = "spot", capacity: int = 4, expires_s: float | None = None) -> str:
        """An elastic worker comes and is ready for turns."""
        lease = self.offer(provider)[-1]
        assert isinstance(lease, c.AcquireLease)
        self.grant(lease.lease, expires_s)
        self.join(f"{lease.lease}/w")
        self.beat(f"{lease.lease}/w", capacity)
        return f"{lease.lease}/w"

    def end_seeding(self) -> None:
        """Past the seeding window: the trainer's device sleeps."""
        self.wait(1.5, beating=tuple(self.scheduler.fleet.workers))
        self.tell(e.WorkerSlept(worker="trainer", epoch=1))

    def lease_ended(self, lease: str, cause: EndCause = EndCause.PREEMPTED) -> list[c.Command]:
        return self.tell(e.LeaseEnded(lease=lease, cause=cause))


@pytest.fixture
def core() -> CoreHarness:
    return CoreHarness()


@pytest.fixture
def make_core() -> Callable[..., CoreHarness]:
    return CoreHarness
