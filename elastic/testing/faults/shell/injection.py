"""Applies each kind of fault to a world."""

import signal
from collections.abc import Callable
from functools import partial

import msgspec

from elastic.compose.plan import TRAINER_PROVIDER
from elastic.core.types import NS_PER_S, EndCause, Nanoseconds, WorkerRole
from elastic.protocol import wire
from elastic.protocol.run_control import CapProvider, SetBudget, StopRun
from elastic.testing.faults.core.lies import KINDS, ByzantineWorker
from elastic.testing.faults.kinds import OF_RANKS, Fault, FaultKind
from elastic.testing.faults.shell.loops import Machine
from elastic.testing.faults.shell.models import Impostor
from elastic.testing.faults.shell.network import Weather
from elastic.testing.faults.shell.oracle import ALL, CLOCKS, CONNECTIONS, WEIGHTS
from elastic.testing.faults.shell.process import Process
from elastic.testing.faults.shell.relay import OF_THE_BYTES, OF_THE_LINK, SILENCE_S, RelayTrouble
from elastic.testing.faults.shell.unauthenticated import flood
from elastic.testing.faults.shell.world import ELASTIC, ORCHESTRATOR_TIMEOUT_S, STOPPED, World

CALLBACKS_MAX = 60
"""Callbacks that a process still runs before it is killed, so that it can die between any two of them."""
AT_A_STEP, STEP_S = 1 / 2, 0.02
"""Share of stops that come while the trainer takes a step, and how long that is: few others would hit that moment."""
ENOUGH_USD = 1000.0
LIMITED = 0.9
"""Share of cap commands that set a cap; the others lift one."""
LEAP_S = 10_000.0
LIES = 12
UNAUTHENTICATED_MIN, UNAUTHENTICATED_MAX = 270, 3000
"""More connections than may wait to be let in; seldom many more."""
SLOWNESS_MAX = 10.0
ENDS_WITHIN_S = 2.0
"""Longest from a rank's death to the end of them all."""
LOOK_S = 0.25
"""Between two looks at whether an order takes too long."""
SLOW_COMMIT_S = 0.5
STILLBORN_S = 4.0
"""Shortest time in which nobody can start: enough for two starts."""
NEARLY_LATE = 0.8
"""The share of a token's time limit after which it is nearly late."""
SPAM, SPAM_S = 20, 0.05
FLAP_S = 0.3
LONG_SUSPENSION_S = 30.0
"""Added to some suspensions: longer than workers wait for the orchestrator."""
FOR_EVER_S = 1e6
"""Duration of weather that no other weather ends, in worlds with only some of the drawn faults."""


def inject(world: World, fault: Fault) -> bool:
    """Apply the fault to its target; returns whether there was a target."""
    until_ns = world.until_ns(fault.duration_s)
    if _inject_all(world, fault, until_ns):
        return True
    if fault.kind in _OF_THE_RUN:
        if world.orchestrator is None or world.result is not None:
            return False
        return _inject_run(world, world.orchestrator, fault, until_ns)
    picked = _picked(world, fault)
    if picked is None:
        return False
    world.oracle.ails(picked.name, fault.duration_s)
    if _trains(picked):
        world.oracle.ails(WEIGHTS, fault.duration_s)
    return _inject_one(world, picked, fault, until_ns)


_OF_THE_RUN = frozenset(
    {FaultKind.COMMAND, FaultKind.KILL_COMMANDED, FaultKind.KILL_ORCHESTRATOR, FaultKind.KILL_BOTH, FaultKind.PORT}
    | {FaultKind.POWER, FaultKind.STOP, FaultKind.HOLD_UP, FaultKind.SUSPEND}
)
_OF_TRAINERS_TOO = frozenset({FaultKind.FREEZE, FaultKind.CUT, FaultKind.STALL, FaultKind.REPEAT, FaultKind.TERMINATE})


def _picked(world: World, fault: Fault) -> Process | None:
    """Return the fault's target. The trainer's worker gets broken connections and pauses only."""
    workers = world.workers()
    trainers = [worker for worker in workers if _trains(worker)]
    if fault.kind is FaultKind.KILL_TRAINER or fault.kind in OF_RANKS:
        return trainers[0] if trainers else None
    if fault.kind not in _OF_TRAINERS_TOO:
        workers = [worker for worker in workers if not _trains(worker)]
    return workers[int(fault.target * len(workers))] if workers else None


def _trains(worker: Process) -> bool:
    return worker.name.startswith(TRAINER_PROVIDER)


def _inject_one(world: World, worker: Process, fault: Fault, until_ns: Nanoseconds) -> bool:
    device, mild = worker.device, fault.chance < 1 / 2
    match fault.kind:
        case FaultKind.KILL_WORKER | FaultKind.KILL_TRAINER:
            noticed = mild or _trains(worker)
            worker.end_after(_callbacks(fault.duration_s), partial(_end, world, worker, noticed=noticed))
        case FaultKind.KILL_RANK | FaultKind.HANG_RANK:
            return _inject_rank(world, worker, fault, until_ns)
        case FaultKind.FREEZE:
            worker.freeze(until_ns)
            if fault.chance < 1 / 3:
                worker.loop.machine.suspend(round(fault.duration_s * NS_PER_S))
        case FaultKind.CUT:
            worker.cut()
        case FaultKind.STALL:
            worker.loop.stall(until_ns)
        case FaultKind.REPEAT:
            worker.loop.repeats_until_ns = until_ns
        case FaultKind.PREEMPT | FaultKind.TAKE:
            return _take(world, worker, fault)
        case FaultKind.HANG:
            device.hangs_until_ns = until_ns
        case FaultKind.SLOW:
            device.slow_until_ns, device.slowness = until_ns, 1 + fault.chance * SLOWNESS_MAX
            world.oracle.ails(worker.name, fault.duration_s + device.slowness * world.plan.token_s)
        case FaultKind.FAIL:
            device.fails, device.fails_after_s = RuntimeError if mild else TimeoutError, fault.duration_s
            world.oracle.ails(worker.name, FOR_EVER_S)
        case FaultKind.ROT:
            device.rots = True
        case FaultKind.TERMINATE:
            handler = worker.loop.signal_handlers.get(signal.SIGTERM)
            if handler is None:
                return False
            worker.loop.call_soon(handler)
        case FaultKind.DECLINE:
            device.held_until_ns, device.honest = until_ns, mild
        case FaultKind.LIE:
            return _lie(world, worker)
        case FaultKind.IMPOSTOR:
            device.serves = list(Impostor)[int(fault.chance * len(Impostor))]
            world.oracle.impostor(worker.name)
        case _:
            return _last(world, worker, fault)
    return True


def _callbacks(share: float) -> int:
    return int(share * CALLBACKS_MAX) % CALLBACKS_MAX


def _end(world: World, worker: Process, *, noticed: bool) -> None:
    world.oracle.doomed(worker.name)
    if _trains(worker):
        world.oracle.ails(WEIGHTS)
    world.kill(worker, noticed=noticed)
    if _trains(worker) and (halves := world.half_checkpoints()):
        world.oracle.found.append(AssertionError(f"half checkpoints: {halves}"))


def _inject_rank(world: World, worker: Process, fault: Fault, until_ns: Nanoseconds) -> bool:
    """Have a rank do nothing any more, or for a while. The first one's process notices when another one is gone, or
    when all take too long for an order of the run, and ends."""
    ranks = world.ranks_of(worker.name)
    if ranks is None:
        return False
    end = partial(_end, world, worker, noticed=True)
    if fault.kind is FaultKind.KILL_RANK:
        world.oracle.ails(worker.name, ENDS_WITHIN_S)
        world.oracle.ails(WEIGHTS, ENDS_WITHIN_S)
        ranks.stop(1 + int(fault.target * (ranks.size - 1)), world.until_ns(FOR_EVER_S))
        world.after(fault.chance * ENDS_WITHIN_S, end)
        return True

    def look() -> None:
        if worker.alive and ranks.waited_s() > timeout_s:
            end()
        elif worker.alive and not ranks.are_well:
            world.after(LOOK_S, look)

    timeout_s = world.config.trainer.step_timeout_s
    if fault.chance < 1 / 3:
        world.oracle.doomed(worker.name)
        until_ns = world.until_ns(FOR_EVER_S)
    world.oracle.ails(WEIGHTS, timeout_s)
    ranks.stop(int(fault.target * ranks.size), until_ns)
    look()
    return True


def _take(world: World, worker: Process, fault: Fault) -> bool:
    for cloud in world.clouds.values():
        if (lease := cloud.lease_of(worker.name)) is not None:
            if fault.kind is FaultKind.TAKE:
                cloud.end(lease, EndCause.PREEMPTED)
            else:
                cloud.warn(lease, fault.duration_s)
            return True
    return False


def _lie(world: World, worker: Process) -> bool:
    """Let the worker send frames that no truthful worker sends, between its own."""
    core = world.oracle.core
    if core is None or not worker.loop.transports:
        return False
    world.oracle.lies(worker.name)
    byzantine = ByzantineWorker(world.chance, lambda: [*core.turns.live, worker.name, "group", "x"])
    for transport in list(worker.loop.transports):
        for _ in range(world.chance.randint(1, LIES)):
            body = byzantine.frame(world.chance.choice(KINDS))
            transport.write(len(body).to_bytes(4, "big") + body)
    return True


def _last(world: World, worker: Process, fault: Fault) -> bool:
    """Let the worker lie from now on, beside one that does not."""
    others = [other for other in world.workers() if other is not worker and not _trains(other)]
    if world.oracle.lasting or not others:
        return False
    match fault.kind:
        case FaultKind.HOLD:
            worker.device.holds = True
        case FaultKind.BADSTART:
            worker.device.begins_elsewhere = True
        case FaultKind.TRICKLE:
            token_s = NEARLY_LATE * world.config.scheduler.turn_stall_timeout_s
            worker.device.brings_every = round(token_s / world.plan.token_s)
        case FaultKind.SPAM:
            worker.loop.call_soon(_again_and_again, worker, _spam, SPAM_S)
        case _:
            worker.loop.call_soon(_again_and_again, worker, Process.cut, FLAP_S)
    world.oracle.lies_on(worker.name)
    return True


def _again_and_again(worker: Process, act: Callable[[Process], None], pause_s: float) -> None:
    act(worker)
    if not worker.main.done():
        worker.loop.call_later(pause_s, _again_and_again, worker, act, pause_s)


def _spam(worker: Process) -> None:
    for transport in list(worker.loop.transports):
        for progress in range(SPAM):
            transport.write(wire.encode(wire.Heartbeat(1, 0, 0, progress, {}, 0, 0.0, 0, 0)))


def _inject_run(world: World, orchestrator: Process, fault: Fault, until_ns: Nanoseconds) -> bool:
    crash = partial(world.crash_orchestrator, fault.duration_s)
    match fault.kind:
        case FaultKind.KILL_ORCHESTRATOR | FaultKind.KILL_BOTH:
            if fault.kind is FaultKind.KILL_BOTH:
                _end_trainers(world)
            orchestrator.end_after(_callbacks(fault.target), crash)
        case FaultKind.PORT:
            # Its workers dial in vain, and leave.
            if world.address:
                world.network.take(world.address)
                for worker in world.workers():
                    world.oracle.doomed(worker.name)
            crash()
            world.oracle.ails(ALL, fault.duration_s + world.config.resume_timeout_s + ORCHESTRATOR_TIMEOUT_S)
        case FaultKind.POWER:
            if fault.chance < 1 / 3:
                _end_trainers(world)
            crash()
            world.disk.lose_power()
            world.machine.reboot()
            world.oracle.held.clear()
        case FaultKind.STOP:
            return _stop(world, fault)
        case FaultKind.COMMAND:
            return _command(world, fault)
        case FaultKind.KILL_COMMANDED:
            # While it receives a command, commits it, or just after it has acknowledged it.
            command = _stop_now if fault.target < 1 / 4 else _command
            if not command(world, msgspec.structs.replace(fault, chance=fault.chance / 2)):
                return False
            orchestrator.end_after(_callbacks(fault.duration_s), crash)
        case FaultKind.HOLD_UP:
            # This excuses no fence, since no worker was silent; it may excuse lost connections.
            world.oracle.ails(CONNECTIONS, fault.duration_s)
            world.oracle.ails(WEIGHTS, fault.duration_s)
            world.oracle.ails(CLOCKS, 2 * fault.duration_s)
            orchestrator.freeze(until_ns)
        case _:
            _suspend(world, fault)
    return True


def _end_trainers(world: World) -> None:
    for worker in filter(_trains, world.workers()):
        _end(world, worker, noticed=True)


def _stop(world: World, fault: Fault) -> bool:
    """Stop the run: at once, or while its trainer next takes a step."""
    if fault.target >= AT_A_STEP:
        return _stop_now(world, fault)
    now = msgspec.structs.replace(fault, target=1.0)
    delay_s = fault.target / AT_A_STEP * STEP_S
    world.oracle.at_steps.append(lambda: world.after(delay_s, lambda: world.stage.injected(now, inject(world, now))))
    return False


def _stop_now(world: World, fault: Fault) -> bool:
    if fault.chance < 1 / 2:
        return world.command(lambda name: StopRun(id=name, reason=STOPPED))
    if world.shell is not None:
        world.shell.stop(STOPPED)
    return world.shell is not None


def _command(world: World, fault: Fault) -> bool:
    usd = fault.duration_s * ENOUGH_USD if fault.target < 3 / 4 else None
    gpus = int(fault.target * (world.plan.places + 1)) if fault.chance < LIMITED else None
    if gpus is not None and world.plan.ranks > 1:
        gpus = max(1, gpus)  # Nobody else generates.
    if fault.chance < 1 / 3:
        return world.command(lambda name: SetBudget(id=name, usd=usd))
    return world.command(lambda name: CapProvider(id=name, provider=ELASTIC, gpus=gpus))


def _suspend(world: World, fault: Fault) -> None:
    """Suspend the orchestrator's machine. As with `HOLD_UP`; only workers elsewhere may give it up."""
    duration_s = fault.duration_s + (LONG_SUSPENSION_S if fault.chance < 1 / 4 else 0.0)
    world.oracle.ails(CONNECTIONS, duration_s)
    world.oracle.ails(WEIGHTS, duration_s)
    machines = [world.machine]
    if not world.plan.far:
        machines += [worker.loop.machine for worker in world.workers()]
    elif duration_s >= ORCHESTRATOR_TIMEOUT_S:
        world.oracle.ails(ALL, duration_s)
    for machine in machines:
        machine.suspend(round(duration_s * NS_PER_S))


def _inject_all(world: World, fault: Fault, until_ns: Nanoseconds) -> bool:
    """Apply a fault that has no one target; returns whether it is one."""
    match fault.kind:
        case FaultKind.WEATHER:
            _change_weather(world, fault)
        case FaultKind.FLOOD:
            _flood(world, fault)
        case FaultKind.DESCRIPTORS:
            # The orchestrator's machine has none, or some workers'.
            world.oracle.ails(ALL, fault.duration_s)
            machines = [worker.loop.machine for worker in world.workers() if world.chance.random() < fault.chance]
            for machine in machines if fault.target < 1 / 2 else [world.machine]:
                machine.no_descriptors_until_ns = until_ns
        case FaultKind.RELAY:
            trouble = OF_THE_LINK[int(fault.chance * len(OF_THE_LINK))]
            # A request at the end of a silence waits for its answer that long.
            world.oracle.ails(ALL, fault.duration_s + (SILENCE_S if trouble is RelayTrouble.SILENT else 0.0))
            world.relay.ails(trouble, fault.duration_s)
        case FaultKind.TAMPER:
            world.oracle.ails(ALL, fault.duration_s)
            world.relay.ails(OF_THE_BYTES[int(fault.chance * len(OF_THE_BYTES))], fault.duration_s)
        case FaultKind.STILLBORN:
            _stillborn(world, fault)
        case FaultKind.CALENDAR:
            world.machine.ahead_ns += round((fault.chance - 1 / 2) * LEAP_S * NS_PER_S)
        case FaultKind.SLOW_DISK:
            world.disk.slow_until_ns, world.disk.slow_s = until_ns, fault.chance * SLOW_COMMIT_S
        case FaultKind.FULL_DISK:
            world.disk.full_until_ns = until_ns
        case FaultKind.KILL_FRONT:
            return world.agents is not None and world.agents.fronts.kill(fault.target, fault.duration_s)
        case FaultKind.KILL_ENVIRONMENT | FaultKind.HANG_ENVIRONMENT:
            return _inject_host(world, fault, until_ns)
        case FaultKind.ENVIRONMENT | FaultKind.FUNCTIONS:
            world.down_until_ns[fault.kind] = until_ns
        case _:
            return False
    return True


def _inject_host(world: World, fault: Fault, until_ns: Nanoseconds) -> bool:
    """End an env worker, or have it do nothing for a while or for ever."""
    alive = [host.process for host in world.hosts.values() if host.process is not None and host.process.alive]
    if not alive:
        return False
    process = alive[int(fault.target * len(alive))]
    if fault.kind is FaultKind.KILL_ENVIRONMENT:
        process.end_after(_callbacks(fault.duration_s), partial(world.kill, process, noticed=True))
    else:
        process.freeze(world.until_ns(FOR_EVER_S) if fault.chance < 1 / 3 else until_ns)
    return True


def _change_weather(world: World, fault: Fault) -> None:
    was_bad, bad = world.network.weather.bad, fault.chance
    split, slow_s = fault.target / 2, 2.5 * fault.target
    world.network.weather = Weather(split=split, slow=bad / 50, slow_s=slow_s, refused=bad / 4)
    if was_bad or world.network.weather.bad:
        following = [f.at_s for f in world.plan.faults if f.kind is FaultKind.WEATHER and f.at_s > fault.at_s]
        world.oracle.ails(ALL, min(following, default=fault.at_s + FOR_EVER_S) - fault.at_s)


def _flood(world: World, fault: Fault) -> None:
    count = UNAUTHENTICATED_MIN + int(fault.chance**6 * (UNAUTHENTICATED_MAX - UNAUTHENTICATED_MIN))
    target = next((worker.name for worker in world.workers()), "nobody")
    silent = fault.target < 1 / 2
    coming = partial(flood, world.chance, count, world.address, world.config.run.name, target, silent)
    if world.address:
        world.begin_process("unauthenticated peers", Machine(world.clock), coming)


def _stillborn(world: World, fault: Fault) -> None:
    """Replace the trainer or a worker of the cloud; nobody starts there before the fault is over."""
    nobody_else = world.plan.ranks > 1  # A provider that is given up would leave nobody who generates.
    cloud = world.clouds[TRAINER_PROVIDER if nobody_else or fault.target < 1 / 3 else ELASTIC]
    until_ns = world.until_ns(STILLBORN_S + fault.duration_s)
    cloud.stillborn = lambda: world.clock.now_ns < until_ns
    if cloud.role is WorkerRole.TRAINER:
        world.oracle.ails(WEIGHTS, STILLBORN_S + fault.duration_s)
    for lease in [*cloud.leases][:1]:
        cloud.end(lease, EndCause.PREEMPTED)
