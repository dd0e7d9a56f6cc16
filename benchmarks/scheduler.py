"""What a decision costs: `Scheduler.handle` end to end, on a state that keeps changing, at the size of a large run.

10,000 turns are in flight on 1,000 workers of as many leases. Events come in the mix of a live run (frames of
tokens, turns that finish and are followed by the next, heartbeats) with far more trouble than one would have, about
a hundred workers lost a second: broken connections that resume, preempted leases that are replaced, notices. Every
call is timed from the event to the list of commands, by the wall clock (`decision_us_…`) and by the CPU time of its
thread (`cpu_us_…`), which other processes do not lengthen; commands are answered as the world would.
Limits and policies are those of a default configuration (continuous balancing, adaptive seeding, hardware affinity),
workers are of three kinds of hardware, and garbage is collected as in a run, within the time of a decision. The events'
own clock is virtual, so nothing waits; the scheduler is woken when it asked to be.
"""

import time
from collections.abc import Callable
from random import Random

from benchmarks._common import Arguments, Figures, benchmark
from benchmarks._configurations import configuration
from elastic.compose.scheduling import limits, policies
from elastic.core import commands as c
from elastic.core import events as e
from elastic.core.invariants import check
from elastic.core.scheduler import Scheduler, TrainerMode
from elastic.core.types import (
    NS_PER_S,
    Account,
    Capabilities,
    Chunk,
    Chunks,
    EndCause,
    FinishReason,
    Offer,
    Plan,
    WorkerRole,
    WorkerState,
)
from elastic.system.machine import YOUNG_COLLECTION_INTERVAL_S, collect_young, defer_full_collections

TURNS = 10_000
WORKERS = 1_000
CREDIT = 16
GROUP_SIZE = 8
EVENTS = 400_000
QUICK_EVENTS = 100_000
EVENT_NS = 50_000
"""Virtual time between events: 20,000 a second, a thousand workers that flush every 50 ms."""

COLLECTION_NS = round(YOUNG_COLLECTION_INTERVAL_S * NS_PER_S)
TOKENS = 3
TURN_ENDS = 0.03
TRAJECTORY_ENDS = 0.1
HARDWARE = {"H100": (989.0, 3350.0), "H800": (989.0, 3350.0), "H20": (148.0, 4000.0)}
"""Dense bf16 TFLOP/s and GB/s of memory, as their makers state them."""
CAPABILITIES = [
    Capabilities(
        engine="none",
        replayable_sampling=True,
        max_context_tokens=32_768,
        device=device,
        tflops=tflops,
        memory_gb_per_s=memory_gb_per_s,
        max_batch=CREDIT - 4,
    )
    for device, (tflops, memory_gb_per_s) in HARDWARE.items()
]


def hash_of(worker: str) -> int:
    """The same in every process."""
    return sum(worker.encode())


class DrivenScheduler:
    """Feeds events, times each call, and answers what the scheduler orders."""

    def __init__(self, seed: int) -> None:
        self.rng = Random(seed)
        self.now_ns = 0
        self.times_ns: list[int] = []
        self.cpu_ns: list[int] = []
        groups = 4 * TURNS // GROUP_SIZE
        plan = Plan(steps=1, groups=groups, group_size=GROUP_SIZE)
        config = configuration("decided", policy=".")
        self.scheduler = Scheduler(plan, limits(config), policies(config), 0)
        self.waiting: list[str] = []
        self.answers: list[e.Event] = []
        self.turns_of: dict[str, int] = {}
        self.workers: list[str] = []
        self.asked: list[c.AcquireLease] = []
        self.progress = 0
        self._reactions: dict[type[c.Command], Callable[..., None]] = {
            c.StartGroup: lambda k: self.waiting.extend(k.trajectories),
            c.FinishTurn: self._turn_finished,
            c.AcquireLease: self._lease_asked,
            c.ReleaseLease: lambda k: self.answers.append(e.LeaseEnded(lease=k.lease, cause=EndCause.RELEASED)),
            c.SleepWorker: lambda k: self.answers.append(e.WorkerSlept(worker=k.worker, epoch=k.epoch)),
            c.TrainGroup: lambda k: self.answers.append(e.GroupTrained(worker="trainer", epoch=1, group=k.group)),
            c.AbortTurn: self._turn_aborted,
        }

    def tell(self, event: e.Event) -> None:
        """One timed event, and then whatever it leads to."""
        self.answers.append(event)
        while self.answers:
            self.now_ns += EVENT_NS
            due_ns, at_ns = self.scheduler.next_wakeup_ns(), self.now_ns
            event = self.answers.pop() if due_ns is None or due_ns > at_ns else e.Tick()
            began_ns, began_cpu_ns = time.perf_counter_ns(), time.thread_time_ns()
            if at_ns % COLLECTION_NS == 0:
                collect_young()
            commands = self.scheduler.handle(event, at_ns)
            cpu_ns = time.thread_time_ns() - began_cpu_ns
            self.times_ns.append(time.perf_counter_ns() - began_ns)
            self.cpu_ns.append(cpu_ns)
            for command in commands:
                react = self._reactions.get(type(command))
                if react is not None:
                    react(command)

    def set_up(self) -> None:
        self._offer("trainer", WorkerRole.TRAINER, 1)
        self._offer("spot", WorkerRole.ELASTIC, WORKERS)
        self._offer("spot", WorkerRole.ELASTIC, 0)
        while len(self.scheduler.turns.live) < TURNS:
            self._next_trajectory()
            self._frame(self.rng.choice(self.workers))
        assert self.scheduler.trainer_mode is TrainerMode.ASLEEP

    def anything(self) -> None:
        worker, choice = self.rng.choice(self.workers), self.rng.random()
        if choice < 0.75:
            self._frame(worker)
        elif choice < 0.99:
            self._beat(worker)
        elif choice < 0.995:
            self._reconnect(worker)
        elif choice < 0.998:
            self._preempt(worker)
        else:
            self._notice(worker)

    # What happens

    def _frame(self, worker: str) -> None:
        record = self.scheduler.fleet.workers.get(worker)
        turns = [self.scheduler.turns.live[turn] for turn in record.turns] if record else []
        if record is None or not turns:
            return
        chunks = Chunks.of(
            Chunk(
                turn.slot,
                turn.accepted,
                TOKENS,
                0,
                FinishReason.STOP if self.rng.random() < TURN_ENDS else None,
            )
            for turn in turns
        )
        self.tell(e.TokensReceived(worker=worker, epoch=record.epoch, chunks=chunks))

    def _beat(self, worker: str) -> None:
        record = self.scheduler.fleet.workers.get(worker)
        if record is None:
            return
        self.progress += 1
        self.tell(
            e.WorkerReported(
                worker=worker,
                epoch=record.epoch,
                capacity_turns=self.rng.randint(CREDIT - 2, CREDIT),
                pending=0,
                executing=record.outstanding,
                progress=self.progress,
                accounts_ns={Account.DECODE: self.now_ns // 2, Account.PREFILL: self.now_ns // 4},
                decoded_tokens=self.progress,
            )
        )

    def _reconnect(self, worker: str) -> None:
        record = self.scheduler.fleet.workers.get(worker)
        if record is None or record.state is not WorkerState.READY:
            return
        self.tell(e.WorkerDisconnected(worker=worker, epoch=record.epoch))
        self._join(worker, record.epoch + 1)

    def _join(self, worker: str, epoch: int) -> None:
        self.tell(
            e.WorkerJoined(
                worker=worker,
                epoch=epoch,
                capabilities=CAPABILITIES[hash_of(worker) % len(CAPABILITIES)],
                weights_version=0,
            )
        )
        self._beat(worker)

    def _preempt(self, worker: str) -> None:
        self.tell(e.LeaseEnded(lease=worker, cause=EndCause.PREEMPTED))
        self._replace(worker)

    def _notice(self, worker: str) -> None:
        self.tell(e.LeaseNotice(lease=worker, deadline_ns=self.now_ns + NS_PER_S, reason="preemption"))
        self._preempt(worker)

    def _offer(self, provider: str, role: WorkerRole, available: int) -> None:
        offer = Offer(provider=provider, role=role, available=available, usd_per_gpu_hour=1.0)
        self.tell(e.OfferChanged(offer=offer))
        self._admit()

    def _replace(self, worker: str) -> None:
        self.workers = [w for w in self.workers if w != worker]
        self._offer("spot", WorkerRole.ELASTIC, 1)
        self._offer("spot", WorkerRole.ELASTIC, 0)

    # What the scheduler orders

    def _lease_asked(self, command: c.AcquireLease) -> None:
        self.asked.append(command)

    def _admit(self) -> None:
        """Grant what has been asked for; its worker has the lease's id."""
        while self.asked:
            command = self.asked.pop()
            self.tell(e.LeaseGranted(lease=command.lease, workers=(command.lease,)))
            self._join(command.lease, 1)
            if command.provider != "trainer":
                self.workers.append(command.lease)

    def _turn_finished(self, command: c.FinishTurn) -> None:
        trajectory = command.turn.partition("#")[0]
        if self.rng.random() < TRAJECTORY_ENDS and self.waiting:
            reward = float(self.rng.random() < 1 / 2)
            self.answers.append(self._request(self.waiting.pop()))
            self.answers.append(e.TrajectoryFinished(trajectory=trajectory, reward=reward, tokens=100))
        else:
            self.answers.append(self._request(trajectory))

    def _turn_aborted(self, command: c.AbortTurn) -> None:
        turn = self.scheduler.turns.live.get(command.turn)
        if turn is not None and turn.attempt == command.attempt:
            last = Chunk(turn.slot, turn.accepted, 1, 0, FinishReason.ABORTED)
            self.answers.append(e.TokensReceived(worker=command.worker, epoch=command.epoch, chunks=Chunks.of([last])))

    def _next_trajectory(self) -> None:
        self.tell(self._request(self.waiting.pop()))

    def _request(self, trajectory: str) -> e.TurnRequested:
        number = self.turns_of[trajectory] = self.turns_of.get(trajectory, 0) + 1
        return e.TurnRequested(
            turn=f"{trajectory}#{number}", trajectory=trajectory, prompt_tokens=100, max_new_tokens=1 << 20
        )


def main(arguments: Arguments) -> Figures:
    load = DrivenScheduler(seed=0)
    load.set_up()
    load.times_ns.clear()
    load.cpu_ns.clear()
    defer_full_collections()
    events = QUICK_EVENTS if arguments.quick else EVENTS
    while len(load.times_ns) < events:
        load.anything()
    check(load.scheduler)
    return {
        **spread("decision_us", load.times_ns),
        **spread("cpu_us", load.cpu_ns),
        "turns": len(load.scheduler.turns.live),
        "workers": len(load.scheduler.fleet.workers),
        "events": len(load.times_ns),
    }


def spread(name: str, times_ns: list[int]) -> dict[str, float]:
    times_us = sorted(ns / 1e3 for ns in times_ns)
    return {
        f"{name}_p50": times_us[len(times_us) // 2],
        f"{name}_p99": times_us[len(times_us) * 99 // 100],
        f"{name}_max": times_us[-1],
    }


if __name__ == "__main__":
    benchmark(__doc__, main)
