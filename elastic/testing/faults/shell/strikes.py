"""Applies each kind of fault to a world."""

import signal
from collections.abc import Callable, Mapping
from functools import partial

import msgspec

from elastic.compose.plan import TRAINER_PROVIDER
from elastic.core.types import NS_PER_S, EndCause, WorkerRole
from elastic.protocol import wire
from elastic.protocol.run_control import CapProvider, SetBudget, StopRun
from elastic.testing.faults.core.lies import KINDS, Liar
from elastic.testing.faults.shell.faults import LASTING, Fault, FaultKind
from elastic.testing.faults.shell.loops import Machine
from elastic.testing.faults.shell.models import Impostor
from elastic.testing.faults.shell.process import Process
from elastic.testing.faults.shell.relay import OF_THE_BYTES, OF_THE_LINK, SILENCE_S, RelayTrouble
from elastic.testing.faults.shell.strangers import flood
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
STRANGERS_MIN, STRANGERS_MAX = 270, 3000
"""More connections than may wait to be let in; seldom many more."""
SLOWNESS_MAX = 10.0
SLOW_COMMIT_S = 0.5
STILLBORN_S = 4.0
"""Shortest time in which nobody can start: enough for two starts."""
NEARLY_LATE = 0.8
"""Of the time that a token may take."""
SPAM, SPAM_S = 20, 0.05
FLAP_S = 0.3
LONG_SUSPENSION_S = 30.0
"""Added to some suspensions: longer than workers wait for the orchestrator."""
FOR_EVER_S = 1e6
"""Duration of weather that no other weather ends, in worlds with only some of the drawn faults."""


def strike(world: World, fault: Fault) -> bool:
    """Apply the fault to its target; returns whether there was a target."""
    if fault.kind in _OF_THE_RUN:
        if world.orchestrator is None or world.result is not None:
            return False
        return _OF_THE_RUN[fault.kind](world, world.orchestrator, fault) is not False
    if fault.kind in _OF_ALL:
        _OF_ALL[fault.kind](world, fault)
        return True
    picked = _picked(world, fault)
    if picked is None:
        return False
    world.witness.ails(picked.name, fault.duration_s)
    if _trains(picked):
        world.witness.weights_ail(fault.duration_s)
    return _OF_ONE[fault.kind](world, picked, fault)


def _picked(world: World, fault: Fault) -> Process | None:
    """Return the fault's target. The trainer's worker gets broken connections and pauses only."""
    workers = world.workers()
    trainers = [worker for worker in workers if _trains(worker)]
    if fault.kind is FaultKind.KILL_TRAINER:
        return trainers[0] if trainers else None
    if fault.kind not in _OF_TRAINERS_TOO:
        workers = [worker for worker in workers if not _trains(worker)]
    return workers[int(fault.target * len(workers))] if workers else None


def _trains(worker: Process) -> bool:
    return worker.name.startswith(TRAINER_PROVIDER)


def _kill(world: World, worker: Process, fault: Fault) -> bool:
    noticed = fault.chance < 1 / 2 or _trains(worker)
    callbacks = int(fault.duration_s * CALLBACKS_MAX) % CALLBACKS_MAX

    worker.end_after(callbacks, partial(_end, world, worker, noticed=noticed))
    return True


def _end(world: World, worker: Process, *, noticed: bool) -> None:
    world.witness.doomed(worker.name)
    if _trains(worker):
        world.witness.weights_ail()
    world.kill(worker, noticed=noticed)


def _freeze(world: World, worker: Process, fault: Fault) -> bool:
    worker.frozen_until_ns = max(worker.frozen_until_ns, world.until_ns(fault.duration_s))
    if fault.chance < 1 / 3:
        worker.loop.machine.suspend(round(fault.duration_s * NS_PER_S))
    return True


def _cut(world: World, worker: Process, fault: Fault) -> bool:
    for transport in list(worker.loop.transports):
        transport.abort()
    return True


def _stall(world: World, worker: Process, fault: Fault) -> bool:
    worker.loop.stall(world.until_ns(fault.duration_s))
    return True


def _repeat(world: World, worker: Process, fault: Fault) -> bool:
    worker.loop.repeats_until_ns = world.until_ns(fault.duration_s)
    return True


def _preempt(world: World, worker: Process, fault: Fault) -> bool:
    for cloud in world.clouds.values():
        if (lease := cloud.lease_of(worker.name)) is not None:
            cloud.warn(lease, fault.duration_s)
            return True
    return False


def _take(world: World, worker: Process, fault: Fault) -> bool:
    for cloud in world.clouds.values():
        if (lease := cloud.lease_of(worker.name)) is not None:
            cloud.end(lease, EndCause.PREEMPTED)
            return True
    return False


def _hang(world: World, worker: Process, fault: Fault) -> bool:
    worker.device.hangs_until_ns = world.until_ns(fault.duration_s)
    return True


def _slow(world: World, worker: Process, fault: Fault) -> bool:
    worker.device.slow_until_ns = world.until_ns(fault.duration_s)
    worker.device.slowness = 1 + fault.chance * SLOWNESS_MAX
    world.witness.ails(worker.name, fault.duration_s + worker.device.slowness * world.plan.token_s)
    return True


def _fail(world: World, worker: Process, fault: Fault) -> bool:
    worker.device.fails = RuntimeError if fault.chance < 1 / 2 else TimeoutError
    worker.device.fails_after_s = fault.duration_s
    world.witness.ails(worker.name, FOR_EVER_S)
    return True


def _rot(world: World, worker: Process, fault: Fault) -> bool:
    worker.device.rots = True
    return True


def _terminate(world: World, worker: Process, fault: Fault) -> bool:
    handler = worker.loop.signal_handlers.get(signal.SIGTERM)
    if handler is None:
        return False
    worker.loop.call_soon(handler)
    return True


def _decline(world: World, worker: Process, fault: Fault) -> bool:
    worker.device.held_until_ns = world.until_ns(fault.duration_s)
    worker.device.honest = fault.chance < 1 / 2
    return True


def _lie(world: World, worker: Process, fault: Fault) -> bool:
    """Let the worker send frames that no truthful worker sends, between its own."""
    core = world.witness.core
    if core is None or not worker.loop.transports:
        return False
    world.witness.lies(worker.name)
    liar = Liar(world.chance, lambda: [*core.turns.live, worker.name, "group", "x"])
    for transport in list(worker.loop.transports):
        for _ in range(world.chance.randint(1, LIES)):
            body = liar.frame(world.chance.choice(KINDS))
            transport.write(len(body).to_bytes(4, "big") + body)
    return True


def _impersonate(world: World, worker: Process, fault: Fault) -> bool:
    worker.device.serves = list(Impostor)[int(fault.chance * len(Impostor))]
    world.witness.impostor(worker.name)
    return True


def _last(world: World, worker: Process, fault: Fault) -> bool:
    """Let the worker lie from now on, beside one that does not."""
    others = [other for other in world.workers() if other is not worker and not _trains(other)]
    if world.witness.lasting or not others:
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
            worker.loop.call_soon(_spam, worker)
        case _:
            worker.loop.call_soon(_flap, worker)
    world.witness.lies_on(worker.name)
    return True


def _spam(worker: Process) -> None:
    for transport in list(worker.loop.transports):
        for progress in range(SPAM):
            transport.write(wire.encode(wire.Heartbeat(1, 0, 0, progress, {}, 0, 0.0, 0, 0)))
    if not worker.main.done():
        worker.loop.call_later(SPAM_S, _spam, worker)


def _flap(worker: Process) -> None:
    for transport in list(worker.loop.transports):
        transport.abort()
    if not worker.main.done():
        worker.loop.call_later(FLAP_S, _flap, worker)


def _kill_orchestrator(world: World, orchestrator: Process, fault: Fault) -> None:
    callbacks = int(fault.target * CALLBACKS_MAX)
    orchestrator.end_after(callbacks, partial(world.crash_orchestrator, fault.duration_s))


def _kill_both(world: World, orchestrator: Process, fault: Fault) -> None:
    for worker in filter(_trains, world.workers()):
        _end(world, worker, noticed=True)
    _kill_orchestrator(world, orchestrator, fault)


def _take_port(world: World, orchestrator: Process, fault: Fault) -> None:
    """Kill the orchestrator and give its port away. Its workers dial in vain, and leave."""
    if world.address:
        world.network.take(world.address)
        for worker in world.workers():
            world.witness.doomed(worker.name)
    world.crash_orchestrator(fault.duration_s)
    world.witness.all_ail(fault.duration_s + world.config.resume_timeout_s + ORCHESTRATOR_TIMEOUT_S)


def _lose_power(world: World, orchestrator: Process, fault: Fault) -> None:
    if fault.chance < 1 / 3:
        for worker in filter(_trains, world.workers()):
            _end(world, worker, noticed=True)
    world.crash_orchestrator(fault.duration_s)
    world.disk.lose_power()
    world.machine.reboot()
    world.witness.held.clear()


def _stop(world: World, orchestrator: Process, fault: Fault) -> bool:
    """Stop the run: at once, or while its trainer next takes a step."""
    if fault.target < AT_A_STEP:
        now = msgspec.structs.replace(fault, target=1.0)
        delay_s = fault.target / AT_A_STEP * STEP_S
        world.witness.at_steps.append(lambda: world.after(delay_s, lambda: world.befalls(now, strike(world, now))))
        return False
    if fault.chance < 1 / 2:
        return world.command(lambda name: StopRun(id=name, reason=STOPPED))
    if world.shell is not None:
        world.shell.stop(STOPPED)
    return world.shell is not None


def _command(world: World, orchestrator: Process, fault: Fault) -> bool:
    usd = fault.duration_s * ENOUGH_USD if fault.target < 3 / 4 else None
    gpus = int(fault.target * (world.plan.places + 1)) if fault.chance < LIMITED else None
    if fault.chance < 1 / 3:
        return world.command(lambda name: SetBudget(id=name, usd=usd))
    return world.command(lambda name: CapProvider(id=name, provider=ELASTIC, gpus=gpus))


def _kill_commanded(world: World, orchestrator: Process, fault: Fault) -> bool:
    """Kill the orchestrator while it receives a command, commits it, or just after it has acknowledged it."""
    command = _stop if fault.target < 1 / 4 else _command
    if not command(world, orchestrator, msgspec.structs.replace(fault, chance=fault.chance / 2)):
        return False
    callbacks = int(fault.duration_s * CALLBACKS_MAX) % CALLBACKS_MAX
    orchestrator.end_after(callbacks, partial(world.crash_orchestrator, fault.duration_s))
    return True


def _hold_up(world: World, orchestrator: Process, fault: Fault) -> None:
    """Hold up the orchestrator. This excuses no fence, since no worker was silent; it may excuse lost connections."""
    world.witness.connections_ail(fault.duration_s)
    world.witness.weights_ail(fault.duration_s)
    world.witness.lags(2 * fault.duration_s)
    orchestrator.frozen_until_ns = world.until_ns(fault.duration_s)


def _suspend(world: World, orchestrator: Process, fault: Fault) -> None:
    """Suspend the orchestrator's machine. As with `_hold_up`; only workers elsewhere may give it up."""
    duration_s = fault.duration_s + (LONG_SUSPENSION_S if fault.chance < 1 / 4 else 0.0)
    world.witness.connections_ail(duration_s)
    world.witness.weights_ail(duration_s)
    machines = [world.machine]
    if not world.plan.far:
        machines += [worker.loop.machine for worker in world.workers()]
    elif duration_s >= ORCHESTRATOR_TIMEOUT_S:
        world.witness.all_ail(duration_s)
    for machine in machines:
        machine.suspend(round(duration_s * NS_PER_S))


def _weather(world: World, fault: Fault) -> None:
    was_bad = world.network.weather.bad
    world.network.weather = fault.weather()
    if was_bad or world.network.weather.bad:
        following = [f.at_s for f in world.plan.faults if f.kind is FaultKind.WEATHER and f.at_s > fault.at_s]
        world.witness.all_ail(min(following, default=fault.at_s + FOR_EVER_S) - fault.at_s)


def _flood(world: World, fault: Fault) -> None:
    count = STRANGERS_MIN + int(fault.chance**6 * (STRANGERS_MAX - STRANGERS_MIN))
    target = next((worker.name for worker in world.workers()), "nobody")
    silent = fault.target < 1 / 2
    coming = partial(flood, world.chance, count, world.address, world.config.run.name, target, silent)
    if world.address:
        world.begin("strangers", Machine(world.clock), coming)


def _descriptors(world: World, fault: Fault) -> None:
    """Exhaust the descriptors of the orchestrator's machine, or of some workers'."""
    world.witness.all_ail(fault.duration_s)
    machines = [worker.loop.machine for worker in world.workers() if world.chance.random() < fault.chance]
    for machine in machines if fault.target < 1 / 2 else [world.machine]:
        machine.no_descriptors_until_ns = world.until_ns(fault.duration_s)


def _relay(world: World, fault: Fault) -> None:
    trouble = OF_THE_LINK[int(fault.chance * len(OF_THE_LINK))]
    # A request at the end of a silence waits for its answer that long.
    world.witness.all_ail(fault.duration_s + (SILENCE_S if trouble is RelayTrouble.SILENT else 0.0))
    world.relay.ails(trouble, fault.duration_s)


def _tamper(world: World, fault: Fault) -> None:
    world.witness.all_ail(fault.duration_s)
    world.relay.ails(OF_THE_BYTES[int(fault.chance * len(OF_THE_BYTES))], fault.duration_s)


def _stillborn(world: World, fault: Fault) -> None:
    """Replace the trainer or a worker of the cloud; nobody starts there before the fault is over."""
    cloud = world.clouds[TRAINER_PROVIDER if fault.target < 1 / 3 else ELASTIC]
    until_ns = world.until_ns(STILLBORN_S + fault.duration_s)
    cloud.stillborn = lambda: world.clock.now_ns < until_ns
    if cloud.role is WorkerRole.TRAINER:
        world.witness.weights_ail(STILLBORN_S + fault.duration_s)
    for lease in [*cloud.leases][:1]:
        cloud.end(lease, EndCause.PREEMPTED)


def _calendar(world: World, fault: Fault) -> None:
    world.machine.ahead_ns += round((fault.chance - 1 / 2) * LEAP_S * NS_PER_S)


def _slow_disk(world: World, fault: Fault) -> None:
    world.disk.slow_until_ns = world.until_ns(fault.duration_s)
    world.disk.slow_s = fault.chance * SLOW_COMMIT_S


def _full_disk(world: World, fault: Fault) -> None:
    world.disk.full_until_ns = world.until_ns(fault.duration_s)


def _environment(world: World, fault: Fault) -> None:
    world.environments_down_until_ns = world.until_ns(fault.duration_s)


def _functions(world: World, fault: Fault) -> None:
    world.functions_down_until_ns = world.until_ns(fault.duration_s)


_OF_TRAINERS_TOO = frozenset({FaultKind.FREEZE, FaultKind.CUT, FaultKind.STALL, FaultKind.REPEAT, FaultKind.TERMINATE})
_OF_ONE: Mapping[FaultKind, Callable[[World, Process, Fault], bool]] = {
    FaultKind.KILL_WORKER: _kill,
    FaultKind.KILL_TRAINER: _kill,
    FaultKind.FREEZE: _freeze,
    FaultKind.CUT: _cut,
    FaultKind.STALL: _stall,
    FaultKind.REPEAT: _repeat,
    FaultKind.PREEMPT: _preempt,
    FaultKind.TAKE: _take,
    FaultKind.HANG: _hang,
    FaultKind.SLOW: _slow,
    FaultKind.FAIL: _fail,
    FaultKind.ROT: _rot,
    FaultKind.TERMINATE: _terminate,
    FaultKind.DECLINE: _decline,
    FaultKind.LIE: _lie,
    **dict.fromkeys(LASTING, _last),
    FaultKind.IMPOSTOR: _impersonate,
}
_OF_THE_RUN: Mapping[FaultKind, Callable[[World, Process, Fault], bool | None]] = {
    FaultKind.COMMAND: _command,
    FaultKind.KILL_COMMANDED: _kill_commanded,
    FaultKind.KILL_ORCHESTRATOR: _kill_orchestrator,
    FaultKind.KILL_BOTH: _kill_both,
    FaultKind.PORT: _take_port,
    FaultKind.POWER: _lose_power,
    FaultKind.STOP: _stop,
    FaultKind.HOLD_UP: _hold_up,
    FaultKind.SUSPEND: _suspend,
}
_OF_ALL: Mapping[FaultKind, Callable[[World, Fault], None]] = {
    FaultKind.WEATHER: _weather,
    FaultKind.FLOOD: _flood,
    FaultKind.DESCRIPTORS: _descriptors,
    FaultKind.RELAY: _relay,
    FaultKind.TAMPER: _tamper,
    FaultKind.STILLBORN: _stillborn,
    FaultKind.CALENDAR: _calendar,
    FaultKind.SLOW_DISK: _slow_disk,
    FaultKind.FULL_DISK: _full_disk,
    FaultKind.ENVIRONMENT: _environment,
    FaultKind.FUNCTIONS: _functions,
}
