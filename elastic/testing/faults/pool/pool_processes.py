"""What surrounds a pool's shell in a world of faults, without processes: node agents with residents, jobs,
connections."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from elastic.core.cluster import JobRequest, PhasePlan
from elastic.core.cluster.types import JobId, Nanoseconds, NodeId, PhaseKind
from elastic.pool import messages as w
from elastic.pool.client import JobPart, News
from elastic.pool.node_agent_state import (
    BeginResident,
    NodeAgentCommand,
    NodeAgentEvent,
    NodeAgentState,
    PermitRefused,
    RanksListened,
    ResidentEnded,
    ResidentSaid,
    ScriptStarted,
    Signal,
    TellPool,
    TellResident,
    Untaken,
    WakeupDue,
)
from elastic.pool.ports import JobEnding
from elastic.pool.shell import PoolShell
from elastic.system.devices import DeviceName
from elastic.testing.faults.kinds import FaultKind

if TYPE_CHECKING:
    from elastic.testing.faults.pool.pool_worlds import PoolWorld

S = 1_000_000_000
_ROLLOUT, _TRAIN = PhaseKind.ROLLOUT, PhaseKind.TRAIN
_WORK_NS = 5 * S
"""How often a job looks whether it computes."""
_HANGS, _HANGS_ADRIFT = 0.02, 0.3
"""How likely a job hangs in a phase. One that is adrift loses its connection then, for at most `_HUNG_NS`."""
_AWAY = 0.6
"""How likely a job that is adrift loses its connection as it asks, for at most `_AWAY_NS`."""
_AWAY_NS, _HUNG_NS = 200 * S, 900 * S
_ENDED_NS = 60 * S
"""Within so much undisturbed time a resident that holds too much memory is ended, and a yielded permit is over."""


class ModelWire:
    """One connection: messages arrive in order, or not at all once it is cut."""

    def __init__(self, world: "PoolWorld") -> None:
        self.world = world
        self.open = True
        self._free_ns = {True: 0, False: 0}

    def carry(self, upwards: bool, deliver: Callable[[], None]) -> None:
        world = self.world
        for _ in range(world.copies()):
            at_ns = max(world.loop.now_ns + world.latency_ns(), self._free_ns[upwards] + 1)
            self._free_ns[upwards] = at_ns
            world.loop.at(at_ns, lambda: deliver() if self.open else None)


class ModelResident:
    """A resident's processes."""

    def __init__(self, order: w.StartResidentFrame) -> None:
        self.job, self.placement, self.script = order.job, order.placement, order.script
        self.worker = order.environment.get("ELASTIC_WORKER", "")
        self.permit = 0
        """Under which it computes, or may."""
        self.stuck = False
        self.host_bytes = 0
        self.alive = True


class ModelNodeAgent:
    """A node agent's process: the production's decisions, and modelled residents."""

    def __init__(self, world: "PoolWorld", node: NodeId, phase: PhaseKind, devices: Sequence[DeviceName]) -> None:
        self.world, self.node, self.phase, self.devices = world, node, phase, tuple(devices)
        self.alive = True
        self.wire: ModelWire | None = None
        self.residents: dict[JobId, ModelResident] = {}
        self.silent = False
        self.cut_ns = 0
        self._state = NodeAgentState()
        self._due_s: float | None = None

    def dial(self) -> None:
        if not self.alive or self.silent or self.wire is not None:
            return
        shell = self.world.shell
        if shell is None:
            self.world.loop.after(2 * S, self.dial)
            return
        self.wire = ModelWire(self.world)
        refused = self.world.within(lambda: shell.node_agent_joined(self._state.hello(self.node, "", 1, self.devices)))
        if refused:
            self.die()

    def cut(self) -> None:
        self.cut_ns = self.world.loop.now_ns
        if self.wire is not None:
            self.wire.open, self.wire = False, None
            self.world.to_shell(lambda shell: shell.node_agent_left(self.node))
            self.world.soon(5 * S, self.dial)

    def die(self) -> None:
        """With all residents."""
        if self.alive:
            self.alive = False
            if self.wire is not None:
                self.wire.open = False
            for one in self.residents.values():
                one.alive = False
                self.world.jobs[one.job].bereft_ns = self.world.loop.now_ns
                if one.script:
                    self.world.jobs[one.job].end()

    def hear(self, event: NodeAgentEvent) -> None:
        """Tell the node agent of what has happened: the pool's messages come here, too."""
        if not self.alive:
            return
        for command in self._state.handle(event, self.world.loop.now_ns / S):
            self._carry_out(command)
        if (due_s := self._state.next_wakeup_s()) != self._due_s:
            self._due_s = due_s
            if due_s is not None:
                self.world.loop.at(int(due_s * S) + 1000, lambda: self._wake(due_s))

    def _wake(self, due_s: float) -> None:
        if self._due_s == due_s:
            self._due_s = None
            self.hear(WakeupDue())

    def _carry_out(self, command: NodeAgentCommand) -> None:
        match command:
            case TellPool(message=message):
                wire = self.wire
                if wire is not None and wire.open:
                    wire.carry(
                        True, lambda: self.world.to_shell(lambda shell: shell.node_agent_heard(self.node, message))
                    )
            case BeginResident(order=order):
                self._launch(order)
            case TellResident(job=job, message=message):
                self._hear_node_agent(self.residents[job], message)
            case Signal(job=job, cause=cause, kill=kill):
                one = self.residents[job]
                if kill:
                    self._check_end(one, cause)
                    self.world.soon(S // 10, lambda: self._end(one))
                else:
                    self.world.stop_job(job, cause)
            case Untaken(permit=permit, former=former):
                self.world.fail(f"{self.node} is given by permit {permit}, and {former} was not taken back")
            case PermitRefused():
                pass

    def _check_end(self, one: ModelResident, reason: str) -> None:
        world = self.world
        if "bytes of host memory" in reason and not one.host_bytes:
            world.fail(f"{one.job} is ended on {self.node} for what another one holds: {reason}")
        record = None if world.shell is None else world.shell.cluster.jobs.get(one.job)
        placed = record is not None and record.placement == one.placement and record.seat is not None
        if placed and one.permit > world.excused and "no place or permit" in reason:
            world.fail(f"{one.job} has just been at work on {self.node} by permit {one.permit}, and is ended: {reason}")
        fenced = "counts no more" in reason and not one.script
        if fenced or (reason.startswith("permit ") and int(reason.split()[1]) > world.excused):
            world.fail(f"{one.job} is killed on {self.node}, and nothing was wrong with it: {reason}")

    def swell(self, one: ModelResident) -> None:
        """From here on the resident holds more than was declared, and that is measured."""
        one.host_bytes = 9  # Of fewer ranks than it asks for each may hold more.
        began_ns = self.world.loop.now_ns

        def measure() -> None:
            if not one.alive or not self.alive:
                return
            quiet_ns = self.world.loop.now_ns - max(began_ns, self.cut_ns, self.world.returned_ns)
            if self.wire is not None and self.world.shell is not None and quiet_ns > _ENDED_NS:
                self.world.fail(f"{one.job} holds more on {self.node} than it has declared, and goes on")
            self._carry_out(TellPool(w.HostMemory(one.job, one.host_bytes)))
            self.world.loop.after(5 * S, measure)

        measure()

    def computes(self, job: JobId, permit: int, worker: str) -> bool:
        one = self.residents.get(job)
        return self.alive and one is not None and one.permit == permit and one.worker == worker

    def _launch(self, order: w.StartResidentFrame) -> None:
        one = self.residents[order.job] = ModelResident(order)
        if order.script:
            self.world.loop.after(1, lambda: self._begin_script(one))
            return
        if (ranks := order.ranks) is not None and not ranks.alone:
            if ranks.place and not ranks.at:
                self.world.fail(f"ranks of {order.job} start on {self.node}, and know of no first one")
            if not ranks.place:
                self.world.loop.after(1, lambda: self._listen(one))
        start_ns = self.world.rng.randrange(S // 2, 8 * S)
        start_ns = self.world.starts_ns.pop((self.node, order.job), start_ns)
        self.world.loop.after(start_ns, lambda: self._say(one, w.Warm()))

    def _listen(self, one: ModelResident) -> None:
        if one.alive and self.alive:
            self.hear(RanksListened(one.job, f"{self.node}:1"))

    def _begin_script(self, one: ModelResident) -> None:
        if one.alive and self.alive:
            self.hear(ScriptStarted(one.job))
            self.world.jobs[one.job].start(one.placement, 0, self)

    def _hear_node_agent(self, one: ModelResident, message: w.ToResident) -> None:
        """A resident is told something."""
        match message:
            case w.Resume(permit=permit):
                one.permit = permit
                if not one.script:
                    self.world.see_alone(one.job, (self.node,))
            case w.WorkAs(ticket=ticket):
                one.worker = ticket.worker
            case w.Leave():
                self.world.soon(S // 10, lambda: self._leave(one))
            case w.Park(permit=permit) if not (one.stuck and self.world.faulty):
                self.world.soon(S, lambda: self._park(one, permit))
            case _:
                pass

    def _leave(self, one: ModelResident) -> None:
        worker, one.worker = one.worker, ""
        self._say(one, w.Left(worker))

    def _park(self, one: ModelResident, permit: int) -> None:
        if one.worker and self.phase is not _TRAIN:
            self._leave(one)
        one.permit = 0
        self._say(one, w.Parked(permit, 0.5))

    def _say(self, one: ModelResident, message: w.FromResident) -> None:
        if one.alive:
            self.hear(ResidentSaid(one.job, message))

    def _end(self, one: ModelResident) -> None:
        if one.alive and self.alive:
            self.kill(one.job)

    def kill(self, job: JobId) -> None:
        if self.residents[job].script:
            self.world.jobs[job].end()
        self.gone(job, "killed", None)

    def gone(self, job: JobId, cause: str, code: int | None) -> None:
        """The processes of a resident have ended."""
        one = self.residents.pop(job)
        one.alive = False
        self.world.jobs[job].bereft_ns = self.world.loop.now_ns
        self.hear(ResidentEnded(job, cause, code))
        for other in self.world.node_agents.values() if self.phase is _TRAIN and not one.script else ():
            rank = other.residents.get(job)
            if other.phase is _TRAIN and rank is not None and rank.worker == one.worker:
                self.world.soon(S, partial(other._end, rank))


class JobDraw(msgspec.Struct, frozen=True, kw_only=True):
    """A job, when it is submitted, and what its phases last as `profile` says. A `script` computes in its own process.
    With `both` it trains with the nodes of both pools. A `steady` one never thinks better of what it has asked for."""

    request: JobRequest
    profile: PhasePlan
    at_ns: Nanoseconds = 1
    max_restarts: int = 3
    script: bool = False
    both: bool = False
    steady: bool = False


class ModelJob:
    """A job's directory, and its process while there is one. It speaks with the pool by the production's `JobPart`."""

    def __init__(self, world: "PoolWorld", shape: JobDraw) -> None:
        self.world, self.shape, self.request = world, shape, shape.request
        self.node_agent: ModelNodeAgent | None = None
        self.part = JobPart(shape.request.id, self._say)
        self.computes_on: tuple[NodeId, ...] = ()
        """The nodes on which a script computes."""
        self.steps = 0
        self.life = 0
        self.placement = 0
        self.restarts = 0
        self.alive = False
        self.wire: ModelWire | None = None
        self.phase = _ROLLOUT
        self.left_ns: Nanoseconds | None = None
        self.granted = 0
        """The permit under which it works."""
        self.highest = 0
        """The highest permit that its processes were granted."""
        self.older = (0, 0)
        """The count of processes that have died, and the pool's incarnation at that time."""
        self.deaths = 0
        self.bereft_ns = 0
        """When a resident of it has last ended."""
        self.hangs = False
        self.workers = 0
        self.told = 0
        """The permit of which it has told how far it is."""
        self.ending: bool | None = None
        """Whether the phase that ends has been finished."""
        self.syncing = False
        self.stopping = False

    # Its process.

    def start(self, placement: int, restarts: int, node_agent: ModelNodeAgent | None = None) -> None:
        self.node_agent = node_agent
        if self.alive:
            self.world.fail(f"{self.request.id} was started while a process of it lived")
        self.life += 1
        if restarts > self.shape.max_restarts:
            self.world.fail(f"{self.request.id} was started again {restarts} times")
        self.alive, self.placement, self.restarts = True, placement, restarts
        self.phase, self.left_ns, self.granted, self.ending = _ROLLOUT, None, 0, None
        self.hangs = self.syncing = self.stopping = False
        self.part = JobPart(self.request.id, self._say)
        self.later(self.world.rng.randrange(S, 10 * S), self.dial)

    def end(self, *, died: bool = True) -> None:
        """Nothing of it goes on."""
        self.alive = False
        self.deaths += died
        self.older = (self.highest, self.world.incarnations)
        self.life += 1
        self.computes_on = ()
        if self.wire is not None:
            self.wire.open, self.wire = False, None

    def die(self, how: str, cause: str = "killed") -> None:
        if not self.alive:
            return
        self.end(died=how == "died")
        if self.node_agent is not None:
            self.node_agent.gone(self.request.id, cause, 0 if how == "finished" else 1)
            return
        ending, placement = JobEnding(how, cause), self.placement  # type: ignore[arg-type]
        self.world.job_over(self.request.id, placement, ending)

    def later(self, after_ns: Nanoseconds, act: Callable[[], object]) -> None:
        life = self.life
        self.world.loop.after(after_ns, lambda: act() if self.life == life else None)

    # Its connection.

    def dial(self) -> None:
        if not self.alive or self.wire is not None:
            return
        shell, script = self.world.shell, self.shape.script
        if shell is None:
            self.later(2 * S, self.dial)
            return
        held = self.granted if script else 0
        hello = w.JobHello(w.POOL_PROTOCOL_VERSION, self.request.id, "", self.placement, script, held)
        answer = self.world.within(lambda: shell.job_joined(hello))
        if not isinstance(answer, w.JobWelcome):
            if isinstance(answer, w.RefusedFrame) and not answer.retry:
                self.die("died", "it was not let in")
            else:
                self.later(2 * S, self.dial)
            return
        self._see_permits(shell, answer)
        self.wire = ModelWire(self.world)
        self.wire.carry(False, lambda: self._welcomed(answer))
        self.world.within(shell.settle)

    def _see_permits(self, shell: PoolShell, welcome: w.JobWelcome) -> None:
        """A job that works by a permit is let in with it, unless the pool has just taken it back from residents that
        died."""
        told = {found.permit for found in welcome.permits}
        lost = self.granted in shell.cluster.permits and self.granted not in told
        if lost and not self.shape.script and self.world.loop.now_ns - self.bereft_ns > _ENDED_NS:
            self.world.fail(f"{self.request.id} works by permit {self.granted}, and is let in without it")

    def cut(self, away_ns: Nanoseconds = 5 * S) -> None:
        """It is back within `away_ns`."""
        if self.wire is not None:
            self.wire.open, self.wire = False, None
            self.world.to_shell(lambda shell: shell.job_left(self.request.id))
            self.later(self.world.rng.randrange(away_ns), self.dial)

    def _say(self, message: w.FromJob) -> None:
        if self.wire is not None and self.wire.open:
            self.wire.carry(True, lambda: self.world.to_shell(lambda shell: self._told(shell, message)))

    def _told(self, shell: PoolShell, message: w.FromJob) -> None:
        shell.job_heard(self.request.id, message)
        if isinstance(message, w.YieldPhase):
            self.world.loop.after(_ENDED_NS, lambda: self._see_yielded(shell, message.permit))

    def _see_yielded(self, shell: PoolShell, permit: int) -> None:
        if self.world.shell is shell and permit in shell.cluster.permits:
            self.world.fail(f"permit {permit} of {self.request.id} was yielded, and its devices are not taken")

    def _welcomed(self, welcome: w.JobWelcome) -> None:
        held = [one.permit for one in welcome.permits]
        number, incarnation = self.older
        if not self.shape.script and incarnation == self.world.incarnations and min(held, default=number + 1) <= number:
            self.world.fail(f"{self.request.id} has died, and its permits {held} are not taken back")
        self._take_in(self.part.welcomed(welcome, self.world.loop.now_ns))
        self._work_on()

    def hear(self, message: w.ToJob) -> None:
        self._take_in(self.part.heard(message, self.world.loop.now_ns))

    def _take_in(self, news: list[News]) -> None:
        for one in news:
            match one:
                case w.Granted():
                    self._granted(one)
                case w.PermitOver(permit=permit):
                    if permit == self.granted:
                        self.granted, self.ending, self.computes_on, self.hangs = 0, None, (), False
                        self._ask()
                case w.WorkerEnded():
                    self.later(5 * S, self._work_on)
        self._settle()

    # Its steps.

    def _ask(self) -> None:
        """Now and then it thinks better of it, for a while."""
        if not self.alive or self.granted or self.syncing:
            return
        if self.phase is _ROLLOUT and not self.shape.script:
            self._offer(self.request.rollout_nodes)
        self.part.ask(self.phase, both=self.shape.both and self.phase is _TRAIN)
        if self.world.adrift and self.world.rng.random() < _AWAY:
            self.later(self.world.rng.randrange(S), lambda: self.cut(_AWAY_NS))
        if not self.shape.steady and self.world.rng.random() < 0.1:
            phase = self.phase
            self.later(self.world.rng.randrange(20 * S), lambda: self._withdraw(phase))

    def _withdraw(self, phase: PhaseKind) -> None:
        if self.phase is phase and not self.granted:
            for worker in list(self.part.workers):
                self.part.give_back(worker)
            self.part.withdraw(phase)
            self.later(10 * S, lambda: self._ask() if self.phase is phase else None)

    def _granted(self, grant: w.Granted) -> None:
        world, plan, permit = self.world, self.shape.profile, grant.permit
        if permit == self.granted:
            if grant.recalled and not self.hangs:
                self._end_phase(finished=False)
            elif grant.tail and self.ending is None:
                self.computes_on = grant.tail if self.shape.script else ()
                for worker in [one for one in self.part.workers.values() if one.node not in grant.tail]:
                    self.part.give_back(worker.worker)
            else:
                self._work_on()
            return
        if self.granted or grant.phase is not self.phase or self.syncing:
            self.part.leave(permit, finished=False)
            return
        self.granted, self.highest, self.ending = permit, max(self.highest, permit), None
        if self.left_ns is None:
            planned_ns = plan.rollout_ns if self.phase is _ROLLOUT else plan.train_ns
            self.left_ns = max(1, int(planned_ns * (0.3 + 0.9 * world.rng.random())))
            self.hangs = world.faulty and world.rng.random() < (_HANGS_ADRIFT if world.adrift else _HANGS)
            if self.hangs:  # The pool's process may have died as it gave the permit, before anybody noted that.
                world.excused = max(world.excused, permit)
        if grant.both != (self.shape.both and self.phase is _TRAIN):
            world.fail(f"{self.request.id} wants {'both' if self.shape.both else 'one'} and gets {grant}")
        if grant.both and not {*grant.nodes} >= set(world.seat_of(self.request.id)):
            world.fail(f"{self.request.id} gets {grant.nodes} and needs both pools")
        self._work_on()
        if self.hangs:
            world.faults_seen[FaultKind.HANG] += 1
            if world.adrift:
                self.cut(_HUNG_NS)
        else:
            self._work(permit, computed=False)

    def _work(self, permit: int, *, computed: bool) -> None:
        """The phase gets on while its residents compute."""
        if self.granted != permit or self.ending is not None:
            return
        assert self.left_ns is not None
        computes = self._computes()
        if computed and computes:
            self.left_ns -= min(_WORK_NS, self.left_ns)
        if not self.left_ns:
            self._end_phase(finished=True)
            return
        late = self.left_ns < self.shape.profile.rollout_ns // 5
        if self.phase is _ROLLOUT and late and self.told != permit:
            self.told = permit
            self.part.report_progress(92, 100)
        self.later(max(S, min(_WORK_NS, self.left_ns)), lambda: self._work(permit, computed=computes))

    def _computes(self) -> bool:
        """A rollout computes on any of its nodes, training on all that have ranks of its trainer."""
        node_agents, job, part = self.world.node_agents, self.request.id, self.part
        if self.shape.script:
            return bool(self.computes_on)
        if self.phase is _ROLLOUT:
            return any(
                node_agents[one.node].computes(job, one.permit, one.worker) for one in part.working(self.granted)
            )
        trainer = "" if part.trainer is None else part.trainer.worker
        nodes = part.permits[self.granted].nodes
        nodes = [node for node in nodes if node_agents[node].phase is _TRAIN]
        ranks = self.request.ranks_on(len(nodes), self.world.plan.spec.train[0])
        return all(node_agents[node].computes(job, self.granted, trainer) for node in nodes[: len(ranks)])

    def _work_on(self) -> None:
        """See to it that it has what it needs: a permit, and workers where its residents compute."""
        held = self.part.permits.get(self.granted)
        if held is None:
            self._ask()
        elif self.ending is None and self.shape.script:
            self.computes_on = held.tail_nodes or held.nodes
            self.world.see_alone(self.request.id, self.computes_on)
        elif self.ending is None and self.phase is _ROLLOUT:
            self._offer(len(held.usable))
        elif self.ending is None and self.part.trainer is None:
            self.part.start_trainer(self._ticket(f"trainer.{self.request.id}.{self.life}"))

    def _offer(self, wanted: int) -> None:
        """Have so many workers, or wait for nodes for them."""
        for _ in range(wanted - len(self.part.workers)):
            self.part.offer(self._ticket(f"{self.request.id}.{self.life}"))

    def _ticket(self, name: str) -> w.WorkerTicketFrame:
        self.workers += 1
        return w.WorkerTicketFrame("run", f"{name}.{self.workers}", "t", "a:1")

    def _end_phase(self, *, finished: bool) -> None:
        if self.ending is None and self.granted:
            self.ending = finished
            for worker in list(self.part.workers):
                self.part.give_back(worker)
            self._settle()

    def _settle(self) -> None:
        """Once its slices have ended, nodes are left for a tail, or the phase is yielded."""
        held = self.part.permits.get(self.granted)
        if held is None or not self.alive:
            return
        working = self.part.working(held.number)
        if held.tail_nodes and not held.tail_moved and {one.node for one in working} <= {*held.tail_nodes}:
            self.part.leave_for_tail(held.number)
        if self.ending is None or working:
            return
        finished, self.ending, self.granted, self.computes_on = self.ending, None, 0, ()
        self.part.leave(held.number, finished=finished)
        if finished:
            self.left_ns = None
        if finished and self.phase is _TRAIN:
            self.syncing = True
            self.later(self.shape.profile.sync_ns + 1, self._end_step)
            return
        self.phase = _TRAIN if finished else self.phase
        self._ask()

    def _end_step(self) -> None:
        self.steps += 1
        self.world.progress_ns = self.world.loop.now_ns
        self.phase, self.syncing = _ROLLOUT, False
        self.part.report_steps(self.steps)
        if self.steps >= self.request.steps:
            self.die("finished")
        elif self.stopping:
            self.die("stopped")
        else:
            self._ask()

    def stop(self) -> None:
        self.stopping = True
        if self.shape.script:
            self.die("stopped")  # It was told by a signal, and knows of no steps.
        elif not self.granted and self.phase is _ROLLOUT and self.left_ns is None:
            self.die("stopped")
