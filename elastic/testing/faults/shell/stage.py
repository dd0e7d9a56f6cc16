"""What all processes of a world share: its time, its network, and whose step comes next."""

import asyncio
import contextlib
import heapq
import itertools
import shutil
import tempfile
from collections.abc import Callable, Coroutine, Iterator, MutableMapping
from functools import partial
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import structlog

from elastic.core.types import NS_PER_S, Nanoseconds
from elastic.testing.faults.kinds import Fault, FaultKind
from elastic.testing.faults.outcome import Lived, WorldFailed
from elastic.testing.faults.shell.answers import governs
from elastic.testing.faults.shell.loops import Machine, WorldClock
from elastic.testing.faults.shell.models import ModelDevice
from elastic.testing.faults.shell.network import Network, NetworkLoop
from elastic.testing.faults.shell.process import Process

if TYPE_CHECKING:
    from elastic.testing.faults.shell.simulate import DrivenWorld

STEPS_MAX = 4_000_000
WORK_NS = 2_000
"""Shortest time of a process's step: no work is instantaneous."""

Tell = Callable[[str], None]


class Stage:
    """`tell` gets what the processes log, and the faults. Violations go to `found`."""

    def __init__(self, seed: int, tell: Tell | None = None) -> None:
        self.clock = WorldClock()
        self.network = Network(Random(f"{seed}/network"))
        self.processes: list[Process] = []
        self.alive: list[Process] = []
        self.found: list[AssertionError] = []
        self.struck = 0
        self.numbers = itertools.count()
        memory = Path("/dev/shm")
        self.directory = Path(tempfile.mkdtemp(prefix="elastic-chaos-", dir=memory if memory.is_dir() else None))
        self._tell = tell
        self._later: list[tuple[Nanoseconds, int, Callable[[], None]]] = []

    def until_ns(self, duration_s: float) -> Nanoseconds:
        return self.clock.now_ns + round(duration_s * NS_PER_S)

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        """Schedule an action of the world itself, in no process."""
        heapq.heappush(self._later, (self.until_ns(delay_s), next(self.numbers), action))

    def begin_process(
        self,
        name: str,
        machine: Machine,
        work: Callable[[], Coroutine[Any, Any, Any]],
        device: ModelDevice | None = None,
    ) -> Process:
        device = device or ModelDevice(lambda: self.clock.now_ns)
        process = Process(name, NetworkLoop(self.clock, machine, self.network), work, device)
        self.processes.append(process)
        self.alive.append(process)
        return process

    def kill(self, process: Process, *, noticed: bool) -> None:
        process.loop.kill(noticed)
        self.alive.remove(process)

    def injected(self, fault: Fault, done: bool) -> None:
        """Record that a fault has come, and whether it was `done` to a target."""
        self.struck += done
        if done:
            self.tell(f"*** {fault}")

    def tell(self, what: str) -> None:
        if self._tell is not None:
            self._tell(f"{self.clock.now_ns / NS_PER_S:9.3f} {what}")

    @contextlib.contextmanager
    def opened(self, seed: int) -> Iterator[None]:
        """A context: production code gets this world's answers, and everything is taken apart at its end."""

        def log(_: Any, level: str, event: MutableMapping[str, Any]) -> Any:
            if self._tell is not None:
                what = event.pop("event")
                self.tell(" ".join((level, what, *(f"{key}={value}" for key, value in event.items()))))
            raise structlog.DropEvent

        former = structlog.get_config()
        structlog.configure(processors=[log])
        try:
            with governs(self.clock, self.network, f"{seed}/code"):
                try:
                    yield
                finally:
                    self._bury()
        finally:
            structlog.configure(**former)
            shutil.rmtree(self.directory, ignore_errors=True)

    def _bury(self) -> None:
        """Take killed processes apart, now that nothing in their `finally` blocks can matter."""
        for process in self.processes:
            process.loop.alive = False
            for task in asyncio.all_tasks(process.loop):
                task.cancel()
            process.loop.bury()

    def step(self, until_ns: Nanoseconds) -> tuple[Process | None, bool]:
        """Take the next step, in whichever process it is, or of the world's own; returns the process, and whether
        anything was due. Raises what was found."""
        now_ns = self.clock.now_ns
        due_ns: float = self._later[0][0] if self._later else until_ns + 1
        chosen: Process | None = None
        for process in self.alive:
            next_ns = process.loop.next_ns()
            if next_ns is not None:
                if next_ns < process.frozen_until_ns:
                    next_ns = process.frozen_until_ns
                if next_ns < due_ns:
                    due_ns, chosen = next_ns, process
                    if next_ns <= now_ns:
                        break
        if due_ns > until_ns:
            return None, False
        self.clock.now_ns = max(now_ns, int(due_ns))
        if chosen is None:
            heapq.heappop(self._later)[2]()
        else:
            chosen.step()
            self.clock.now_ns += WORK_NS
            if chosen.loop.failures:
                raise AssertionError(f"{chosen.name}: {chosen.loop.failures[0]}")
        if self.found:
            raise self.found[0]
        return chosen, True


def live_on_stage(world: "DrivenWorld", drawn: tuple[Fault, ...]) -> Lived:
    """Live through a world until it is over and no process is left, and check it. `drawn` are the faults
    of its seed. Raises `WorldFailed`, also if it takes much too long."""
    stage, plan = world.stage, world.plan
    with stage.opened(plan.seed):
        try:
            world.begin()
            for fault in plan.faults:
                stage.after(fault.at_s, partial(_inject, world, fault))
            _go_on(world)
            world.check()
            return world.outcome()
        except Exception as error:
            found = f"at {stage.clock.now_ns / NS_PER_S:.3f} s: {type(error).__name__}: {error}"
            raise WorldFailed(plan.world, plan.seed, found, options_of(plan.only, plan.faults, drawn)) from error


def _inject(world: "DrivenWorld", fault: Fault) -> None:
    world.stage.injected(fault, world.inject(fault))


def _go_on(world: "DrivenWorld") -> None:
    stage, until_ns = world.stage, round(world.limit_s * NS_PER_S)
    for _ in range(STEPS_MAX):
        if world.is_over() and not stage.alive:
            return
        process, goes_on = stage.step(until_ns)
        if process is not None and process.alive and process.main.done():
            world.ended(process)
        if not goes_on:
            break
    raise AssertionError(f"no end: {world.status()}, alive {[process.name for process in stage.alive]}")


def options_of(only: tuple[FaultKind, ...], faults: tuple[Fault, ...], drawn: tuple[Fault, ...]) -> str:
    """Return the options of `elastic simulate --faults` besides world and seed that give these faults."""
    told = f" --only {','.join(only)}" if only else ""
    if faults != drawn:
        told += f" --keep {','.join(str(drawn.index(fault)) for fault in faults) or 'none'}"
    return told
