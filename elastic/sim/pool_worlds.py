"""Worlds of faults for a pool's shell on virtual time: the production shell and the real cluster, with modelled
keepers, residents and jobs.

Messages travel in order on a connection and are lost with it. Connections break; keepers, residents, jobs and the
pool's own process die at any point: that one also right before and after an event became durable, and in the middle
of what follows from it. Phases hang, residents do not park, everything may be said twice. In some worlds rollout
nodes are spot instances, which come and go by a recorded trace. Some jobs are scripts, which compute in their own
process, and some train with the nodes of both pools. After every event all invariants of the cluster are checked, and
at every device that one job has it, under a permit that is newer than all before.
"""

import argparse
from collections import Counter
from collections.abc import Callable, Mapping
from random import Random

import msgspec

import traces
from elastic import pool_wire as w
from elastic.cluster import Cluster, ClusterPolicies, JobRequest, NodeKind, PhasePlan, PoolSpec, WaitLimits
from elastic.cluster import events as e
from elastic.cluster.history import ClusterOpening, cluster_digest, encode, replay
from elastic.cluster.invariants import check
from elastic.cluster.types import JobId, JobState, Nanoseconds, NodeId, PhaseKind
from elastic.pool.ports import DoneCommand, JobEnding, JobEntry, PoolTimes
from elastic.pool.shell import PoolShell
from elastic.sim.loop import EventLoop
from providers.markets import SpotMarket, SpotSettings
from traces.spot import read_spot_trace

S = 1_000_000_000
_ROLLOUT, _TRAIN = PhaseKind.ROLLOUT, PhaseKind.TRAIN
LOOP_MAX = 400_000
STRIKES = (
    "resident",
    "resident",
    "keeper",
    "keeper link",
    "job",
    "job link",
    "pool",
    "stuck",
    "silent",
    "memory",
    "cancel",
)
WORK_NS = 5 * S
"""How often a job looks whether it computes."""
PROGRESS_NS = 3 * 3600 * S
"""Once faults have ended, some job finishes a step, or ends, at least so often."""
ENDED_NS = 60 * S
"""Within so much undisturbed time a resident that holds too much memory is ended."""


class PoolWorldFailed(AssertionError):
    """Something that must hold did not; the message begins with the seed."""


class _PoolDies(BaseException):
    """The pool's process is killed here: nothing that would have followed does."""


class PoolFaults(msgspec.Struct, frozen=True, kw_only=True):
    """How likely faults are: `strike` after an event, `dies` at each thing that the pool's process does, and `repeats`
    of each message. No fault begins after `until_ns`."""

    strike: float = 0.03
    dies: float = 0.002
    repeats: float = 0.03
    until_ns: Nanoseconds = 3600 * S


class _Wire:
    """One connection: messages arrive in order, or not at all once it is cut."""

    def __init__(self, world: "PoolWorld") -> None:
        self.world = world
        self.open = True
        self._free_ns = {True: 0, False: 0}

    def carry(self, upwards: bool, deliver: Callable[[], None]) -> None:
        world = self.world
        copies = 2 if world.rng.random() < world.faults.repeats and world.faulty else 1
        for _ in range(copies):
            at_ns = max(world.loop.now_ns + world.latency_ns(), self._free_ns[upwards] + 1)
            self._free_ns[upwards] = at_ns
            world.loop.at(at_ns, lambda: deliver() if self.open else None)


class _ModelResident:
    def __init__(self, placement: int, job: JobId, *, trainer: str, script: bool) -> None:
        self.placement, self.job, self.worker, self.script = placement, job, trainer, script
        self.up = script
        self.permit = 0
        self.stuck = False
        self.host_bytes = 0
        self.alive = True


class _ModelKeeper:
    """As `elastic.pool.keeper`, without processes."""

    def __init__(self, world: "PoolWorld", node: NodeId, phase: PhaseKind) -> None:
        self.world, self.node, self.phase = world, node, phase
        self.alive = True
        self.wire: _Wire | None = None
        self.residents: dict[JobId, _ModelResident] = {}
        self.device: tuple[int, JobId] | None = None
        self.bound: int | None = None
        """The placement to which the device's permit belongs."""
        self.taking = False
        self.last = 0
        self.resumed_under = 0
        self.over: dict[JobId, w.ResidentGone] = {}
        self.silent = False
        self.cut_ns = 0

    def dial(self) -> None:
        if not self.alive or self.silent or self.wire is not None:
            return
        shell = self.world.shell
        if shell is None:
            self.world.loop.after(2 * S, self.dial)
            return
        self.wire = self.world.keeper_wires[self.node] = _Wire(self.world)
        states = tuple(
            w.ResidentState(job, one.placement, one.worker, one.permit, one.up) for job, one in self.residents.items()
        )
        gone, device = tuple(self.over.values()), self.device or (0, "")
        hello = w.KeeperHello(w.POOL_PROTOCOL_VERSION, self.node, "", 1, "", self.last, states, gone, *device)
        refused = self.world.within(lambda: shell.keeper_joined(hello))
        if refused:
            self.die()

    def say(self, message: w.FromKeeper) -> None:
        wire = self.wire
        if wire is not None and wire.open:
            wire.carry(True, lambda: self.world.to_shell(lambda shell: shell.keeper_heard(self.node, message)))

    def cut(self) -> None:
        self.cut_ns = self.world.loop.now_ns
        if self.wire is not None:
            self.wire.open = False
            self.wire = None
            self.world.keeper_wires.pop(self.node, None)
            self.world.loop.after(self.world.rng.randrange(5 * S), self.dial)

    def die(self) -> None:
        """With all residents."""
        if self.alive:
            self.alive = False
            if self.wire is not None:
                self.wire.open = False
            self.world.keeper_wires.pop(self.node, None)
            for one in self.residents.values():
                one.alive = False
                if one.script:
                    self.world.jobs[one.job].end()

    def hear(self, message: msgspec.Struct) -> None:
        match message:
            case w.StartResidentFrame(job=job, placement=placement):
                self._start(job, placement, message)
            case w.GiveDevice(permit=permit, job=job, left_s=left_s):
                self._give(permit, job, left_s)
            case w.LendWorker(permit=permit, job=job, ticket=ticket):
                one = self.residents.get(job)
                if one is not None and one.worker == ticket.worker:
                    return
                if one is None or self.device != (permit, job):
                    self.say(w.WorkerLeft(permit, job, ticket.worker, 0.0, "too late"))
                    return
                one.worker = ticket.worker
            case w.EndWorker(permit=permit, job=job, worker=worker):
                one = self.residents.get(job)
                if one is not None and one.worker == worker:
                    one.worker = ""
                self.say(w.WorkerLeft(permit, job, worker, 0.0))
            case w.TakeDevice(permit=permit, job=job, left_s=left_s):
                self._take(permit, job, left_s)
            case w.EndResident(job=job, reason=reason, grace_s=grace_s):
                if job in self.residents and grace_s:
                    self.world.stop_job(job, reason)
                elif job in self.residents:
                    self._judge_end(self.residents[job], reason)
                    self.kill(job, reason)
            case _:
                pass

    def _judge_end(self, one: _ModelResident, reason: str) -> None:
        world = self.world
        if "bytes of host memory" in reason and not one.host_bytes:
            world.fail(f"{one.job} is ended on {self.node} for what another one holds: {reason}")
        record = None if world.shell is None else world.shell.cluster.jobs.get(one.job)
        placed = record is not None and record.placement == one.placement and record.seat is not None
        if placed and one.permit > world.excused and "no place or permit" in reason:
            world.fail(f"{one.job} has just been at work on {self.node} by permit {one.permit}, and is ended: {reason}")
        if reason.startswith("permit ") and int(reason.split()[1]) > world.excused:
            world.fail(f"{one.job} is killed on {self.node}, and nothing was wrong with it: {reason}")

    def swell(self, one: _ModelResident) -> None:
        """From here on the resident holds more than was declared, and that is measured."""
        one.host_bytes = 2
        began_ns = self.world.loop.now_ns

        def measure() -> None:
            if not one.alive or not self.alive:
                return
            quiet_ns = self.world.loop.now_ns - max(began_ns, self.cut_ns, self.world.returned_ns)
            if self.wire is not None and self.world.shell is not None and quiet_ns > ENDED_NS:
                self.world.fail(f"{one.job} holds more on {self.node} than it has declared, and goes on")
            self.say(w.HostMemory(one.job, one.host_bytes))
            self.world.loop.after(5 * S, measure)

        measure()

    def computes(self, job: JobId, permit: int, worker: str) -> bool:
        one = self.residents.get(job)
        return self.alive and one is not None and one.permit == permit and one.worker == worker

    def _start(self, job: JobId, placement: int, frame: w.StartResidentFrame) -> None:
        former = self.residents.get(job)
        if former is not None and former.placement == placement:
            if former.up:
                self.say(w.ResidentUp(job, placement))
            return
        if former is not None:
            self.kill(job, "another one takes its place")
        if self.device is not None and self.device[1] == job:
            self.bound = placement if self.bound is None else self.bound
            if self.bound != placement:
                self.device, self.taking = None, False
        worker = frame.environment.get("ELASTIC_WORKER", "")
        one = self.residents[job] = _ModelResident(placement, job, trainer=worker, script=frame.script)
        self.over.pop(job, None)
        if frame.script:
            self.say(w.ResidentUp(job, placement))
            self._resume()
            self.world.jobs[job].start(placement, 0, self)
            return

        def up() -> None:
            if one.alive and self.alive and self.residents.get(job) is one:
                one.up = True
                self.say(w.ResidentUp(job, placement))
                self._resume()

        start_ns = self.world.rng.randrange(S // 2, 8 * S)
        self.world.loop.after(self.world.starts_ns.pop((self.node, job), start_ns), up)

    def _give(self, permit: int, job: JobId, left_s: float) -> None:
        if permit < self.last or (permit == self.last and self.device != (permit, job)):
            return
        if self.device != (permit, job):
            self.last = permit
            for other in [*self.residents.values()]:
                if other.permit and other.script:
                    self.kill(other.job, "its permit counts no more")
                elif other.permit:
                    self.world.fail(
                        f"{self.node} is given to {job} by permit {permit}, while {other.job} has it by {other.permit}"
                    )
            self.device, self.taking = (permit, job), False
            self.bound = self.residents[job].placement if job in self.residents else None
            self.world.loop.after(round(left_s * S), lambda: self._overdue(permit))
        self._resume()

    def _resume(self) -> None:
        one = None if self.device is None else self.residents.get(self.device[1])
        if one is None or self.device is None or self.taking or not one.up or one.permit:
            return
        if any(other.permit for other in self.residents.values()):
            return
        if self.device[0] < self.resumed_under:
            self.world.fail(f"{self.node} computes under permit {self.device[0]} after {self.resumed_under}")
        one.permit = self.resumed_under = self.device[0]
        if not one.script:
            self.world.see_alone(one.job, (self.node,))

    def _take(self, permit: int, job: JobId, left_s: float) -> None:
        one = self.residents.get(job)
        if self.device != (permit, job):
            if one is None or one.permit != permit:
                self.say(w.DeviceFreed(permit, job, 0.0, 0.0, 0, 0))
            return
        if self.taking:
            return
        if one is not None and one.script:
            one.permit = 0
        if one is None or not one.permit:
            self.device = None
            self.say(w.DeviceFreed(permit, job, 0.0, 0.0, 0, 0))
            return
        self.taking = True
        self.world.loop.after(round(left_s * S), lambda: self._overdue(permit))
        if one.stuck and self.world.faulty:
            return

        def parked() -> None:
            if one.alive and self.alive and one.permit == permit:
                one.permit, one.worker = 0, one.worker if self.phase is _TRAIN else ""
                self.device, self.taking = None, False
                self.say(w.DeviceFreed(permit, job, 0.5, 0.5, 10, 1, one.worker))
                self._resume()

        self.world.loop.after(self.world.rng.randrange(S), parked)

    def _overdue(self, permit: int) -> None:
        if not self.alive or self.device is None or self.device[0] != permit:
            return
        one = self.residents.get(self.device[1])
        if one is not None and one.permit == permit:
            self.kill(one.job, "it held the device beyond its time")
        else:
            job = self.device[1]
            self.device, self.taking = None, False
            self.say(w.DeviceFreed(permit, job, 0.0, 0.0, 0, 0))

    def kill(self, job: JobId, cause: str) -> None:
        if self.residents[job].script:
            self.world.jobs[job].end()
        self.gone(job, cause, None)

    def gone(self, job: JobId, cause: str, code: int | None) -> None:
        one = self.residents.pop(job)
        one.alive = False
        permit, one.permit = one.permit, 0
        if self.device is not None and self.device[1] == job and self.taking:
            self.device, self.taking = None, False
        gone = w.ResidentGone(job, one.placement, cause, permit, one.worker, code)
        if one.script:
            self.over[job] = gone
        self.say(gone)
        self._resume()


class _ModelJob:
    """A job's directory, and its process while there is one."""

    def __init__(
        self, world: "PoolWorld", request: JobRequest, profile: PhasePlan, *, script: bool, both: bool
    ) -> None:
        self.world, self.request, self.profile, self.script, self.both = world, request, profile, script, both
        self.keeper: _ModelKeeper | None = None
        self.computes_on: tuple[NodeId, ...] = ()
        """Of a script."""
        self.steps = 0
        self.life = 0
        self.placement = 0
        self.restarts = 0
        self.alive = False
        self.wire: _Wire | None = None
        self.phase = _ROLLOUT
        self.left_ns: Nanoseconds | None = None
        self.granted = 0
        self.nodes: tuple[NodeId, ...] = ()
        self.highest = 0
        """The highest permit that its processes were granted."""
        self.older = (0, 0)
        """That of processes that have died, and the pool's incarnation then."""
        self.told_tail = False
        self.deaths = 0
        self.hangs = False
        self.trainer = ""
        self.workers = 0
        self.out: dict[NodeId, str] = {}
        self.yielding: w.YieldPhase | None = None
        self.ending_phase: bool | None = None
        self.stopping = False

    # Its process.

    def start(self, placement: int, restarts: int, keeper: _ModelKeeper | None = None) -> None:
        self.keeper = keeper
        if self.alive:
            self.world.fail(f"{self.request.id} was started while a process of it lived")
        self.life += 1
        if restarts > self.world.entries[self.request.id].max_restarts:
            self.world.fail(f"{self.request.id} was started again {restarts} times")
        self.alive, self.placement, self.restarts = True, placement, restarts
        self.phase, self.left_ns, self.granted, self.hangs, self.stopping = _ROLLOUT, None, 0, False, False
        self.trainer, self.out, self.yielding, self.ending_phase = "", {}, None, None
        self._later(self.world.rng.randrange(S, 10 * S), self.dial)

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
        if self.keeper is not None:
            self.keeper.gone(self.request.id, cause, 0 if how == "finished" else 1)
            return
        ending, placement = JobEnding(how, cause), self.placement  # type: ignore[arg-type]
        self.world.job_over(self.request.id, placement, ending)

    def _later(self, after_ns: Nanoseconds, act: Callable[[], object]) -> None:
        life = self.life
        self.world.loop.after(after_ns, lambda: act() if self.life == life else None)

    # Its connection.

    def dial(self) -> None:
        if not self.alive or self.wire is not None:
            return
        shell = self.world.shell
        if shell is None:
            self._later(2 * S, self.dial)
            return
        held = self.granted if self.script else 0
        hello = w.JobHello(w.POOL_PROTOCOL_VERSION, self.request.id, "", self.placement, self.script, held)
        answer = self.world.within(lambda: shell.job_joined(hello))
        if not isinstance(answer, w.JobWelcome):
            if isinstance(answer, w.PoolRefused) and not answer.retry:
                self.die("died", "it was not let in")
            else:
                self._later(2 * S, self.dial)
            return
        self.wire = _Wire(self.world)
        self.wire.carry(False, lambda: self._welcomed(answer))
        self.world.within(shell.settle)

    def cut(self) -> None:
        if self.wire is not None:
            self.wire.open, self.wire = False, None
            self.world.to_shell(lambda shell: shell.job_left(self.request.id))
            self._later(self.world.rng.randrange(5 * S), self.dial)

    def say(self, message: w.FromJob) -> None:
        wire = self.wire
        if wire is not None and wire.open:
            wire.carry(True, lambda: self.world.to_shell(lambda shell: self._heard(shell, message)))

    def _heard(self, shell: PoolShell, message: w.FromJob) -> None:
        shell.job_heard(self.request.id, message)
        if isinstance(message, w.YieldPhase):
            self.world.loop.after(ENDED_NS, lambda: self._see_yielded(shell, message.permit))

    def _see_yielded(self, shell: PoolShell, permit: int) -> None:
        if self.world.shell is shell and permit in shell.cluster.permits:
            self.world.fail(f"permit {permit} of {self.request.id} was yielded, and its devices are not taken")

    def _welcomed(self, welcome: w.JobWelcome) -> None:
        held = {one.permit: one for one in welcome.permits}
        number, incarnation = self.older
        if not self.script and incarnation == self.world.incarnations and any(permit <= number for permit in held):
            self.world.fail(f"{self.request.id} has died, and its permits {[*held]} are not taken back")
        self.trainer = welcome.trainer
        if self.granted and self.granted not in held:
            self._lost()
        for node, worker in list(self.out.items()):
            if welcome.slices.get(node) != worker:
                self._parked(node, worker)
        yielded = self.yielding
        for number, one in held.items():
            if yielded is not None and yielded.permit == number:
                self.say(yielded)
            elif self.granted != number:
                self._granted(w.Granted(number, one.phase, one.nodes, one.left_s, one.both))
            if one.recalled and self.granted == number:
                self._recalled()
        if self.ending_phase is not None:
            for node in self.out:
                self.say(w.ReturnSlice(self.granted, node))
            self._settle()
        elif self.granted and self.phase is _ROLLOUT and not self.script:
            self._lend()
        elif self.granted and not self.trainer and not self.script:
            self._start_trainer()
        if not self.granted:
            self._ask()

    def hear(self, message: msgspec.Struct) -> None:
        match message:
            case w.Granted():
                self._granted(message)
            case w.Recalled(permit=permit):
                if permit == self.granted:
                    self._recalled()
            case w.TailMove(permit=permit, nodes=nodes):
                if permit == self.granted and self.ending_phase is None:
                    self.nodes = nodes
                    self.computes_on = nodes if self.script else ()
                    for node in [node for node in self.out if node not in nodes]:
                        self.say(w.ReturnSlice(permit, node))
                        del self.out[node]
                    self.say(w.TailLeft(permit))
            case w.PermitOver(permit=permit):
                if permit == self.granted:
                    self._lost()
                    self._ask()
            case w.SliceParked(node=node, worker=worker):
                self._parked(node, worker)
            case w.TrainerEnded(worker=worker):
                if worker == self.trainer:
                    self.trainer = ""
                    if self.phase is _TRAIN and self.granted:
                        self._start_trainer()
            case _:
                pass

    # Its steps.

    def _ask(self) -> None:
        """Now and then it thinks better of it, for a while."""
        if not self.alive or self.granted:
            return
        self.say(w.AskPhase(self.phase, self.both and self.phase is _TRAIN))
        if self.world.rng.random() < 0.1:
            phase = self.phase
            self._later(self.world.rng.randrange(20 * S), lambda: self._withdraw(phase))

    def _withdraw(self, phase: PhaseKind) -> None:
        if self.phase is phase and not self.granted:
            self.say(w.WithdrawPhase(phase))
            self._later(10 * S, lambda: self._ask() if self.phase is phase else None)

    def _recalled(self) -> None:
        if not self.hangs:
            self._end_phase(finished=False)

    def _granted(self, grant: w.Granted) -> None:
        if grant.permit == self.granted:
            self.nodes = grant.nodes
            self._compute()
            return
        if self.granted or grant.phase is not self.phase or (self.yielding and grant.permit <= self.yielding.permit):
            if self.yielding is None or grant.permit != self.yielding.permit:
                self.say(w.YieldPhase(grant.permit, finished=False))
            return
        rng, plan, permit = self.world.rng, self.profile, grant.permit
        self.granted, self.nodes, self.highest = permit, grant.nodes, max(self.highest, permit)
        self.ending_phase, self.told_tail = None, False
        if self.left_ns is None:
            planned_ns = plan.rollout_ns if self.phase is _ROLLOUT else plan.train_ns
            self.left_ns = max(1, int(planned_ns * (0.3 + 0.9 * rng.random())))
            self.hangs = self.world.faulty and rng.random() < 0.02
        if grant.both != (self.both and self.phase is _TRAIN):
            self.world.fail(f"{self.request.id} wants {'both' if self.both else 'one'} and gets {grant}")
        if grant.both and not {*grant.nodes} >= set(self.world.seat_of(self.request.id)):
            self.world.fail(f"{self.request.id} gets {grant.nodes} and needs both pools")
        self._compute()
        if self.phase is _TRAIN and not self.trainer and not self.script:
            self._start_trainer()
        if self.hangs:
            self.world.faults_seen["hang"] += 1
            return
        self._work(permit, computed=False)

    def _work(self, permit: int, *, computed: bool) -> None:
        """The phase gets on while its residents compute."""
        if self.granted != permit or self.ending_phase is not None:
            return
        assert self.left_ns is not None
        computes = self._computes()
        if computed and computes:
            self.left_ns -= min(WORK_NS, self.left_ns)
        if not self.left_ns:
            self._end_phase(finished=True)
            return
        if self.phase is _ROLLOUT and not self.told_tail and self.left_ns < self.profile.rollout_ns // 5:
            self.told_tail = True
            self.say(w.PhaseProgress(permit, 85, 100))
        self._later(max(S, min(WORK_NS, self.left_ns)), lambda: self._work(permit, computed=computes))

    def _computes(self) -> bool:
        """A rollout computes on any of its nodes, training on that of its trainer."""
        keepers, job = self.world.keepers, self.request.id
        if self.script:
            return bool(self.computes_on)
        if self.phase is _TRAIN:
            return any(keepers[node].computes(job, self.granted, self.trainer) for node in self.nodes)
        return any(keepers[node].computes(job, self.granted, worker) for node, worker in self.out.items())

    def _compute(self) -> None:
        """A script computes as soon as it may; for a run its residents do."""
        if self.script:
            self.computes_on = self.nodes
            self.world.see_alone(self.request.id, self.nodes)
        elif self.phase is _ROLLOUT:
            self._lend()

    def _lend(self) -> None:
        for node in self.nodes:
            if node not in self.out and self.ending_phase is None:
                self.workers += 1
                self.out[node] = f"{node}.{self.workers}"
                self.say(w.LendSlice(self.granted, node, w.WorkerTicketFrame("run", self.out[node], "t", "a:1")))

    def _start_trainer(self) -> None:
        self.workers += 1
        self.trainer = f"trainer.{self.request.id}.{self.life}.{self.workers}"
        self.say(w.StartTrainer(w.WorkerTicketFrame("run", self.trainer, "t", "a:1")))

    def _parked(self, node: NodeId, worker: str) -> None:
        if self.out.get(node) == worker:
            del self.out[node]
            if self.granted and self.ending_phase is None and self.phase is _ROLLOUT:
                permit = self.granted
                self._later(5 * S, lambda: self._lend() if self.granted == permit else None)
        self._settle()

    def _end_phase(self, *, finished: bool) -> None:
        if self.ending_phase is not None or not self.granted:
            return
        self.ending_phase = finished
        for node in self.out:
            self.say(w.ReturnSlice(self.granted, node))
        self._settle()

    def _settle(self) -> None:
        """Once all its slices have ended, the phase is yielded."""
        if self.ending_phase is None or self.out or not self.granted:
            return
        finished, self.out, self.computes_on = self.ending_phase, {}, ()
        self.yielding = w.YieldPhase(self.granted, finished)
        self.granted, self.ending_phase = 0, None
        self.say(self.yielding)
        if not finished:
            self._ask()
            return
        self.left_ns = None
        if self.phase is _ROLLOUT:
            self.phase = _TRAIN
            self._ask()
            return
        self._later(self.profile.sync_ns + 1, self._end_step)

    def _end_step(self) -> None:
        self.steps += 1
        self.world.progress_ns = self.world.loop.now_ns
        self.phase = _ROLLOUT
        self.say(w.StepsDone(self.steps))
        if self.steps >= self.request.steps:
            self.die("finished")
        elif self.stopping:
            self.die("stopped")
        else:
            self._ask()

    def _lost(self) -> None:
        self.granted, self.ending_phase, self.out, self.computes_on, self.hangs = 0, None, {}, (), False
        if self.left_ns is not None:
            self.left_ns = max(1, self.left_ns)

    def stop(self) -> None:
        self.stopping = True
        if self.script:
            self.die("stopped")  # It was told by a signal, and knows of no steps.
        elif not self.granted and self.phase is _ROLLOUT and self.left_ns is None:
            self.die("stopped")


class PoolWorld:
    """One world; it is the shell's ports, too. `run` lives through it."""

    def __init__(self, policies: Mapping[str, ClusterPolicies], seed: int, faults: PoolFaults | None = None) -> None:
        rng = self.rng = Random(seed)
        self.seed, self.faults = seed, faults or PoolFaults()
        names = [name for name in ("ours", "weave", "naive", "solo") if name in policies]
        self.policy = names[rng.randrange(len(names))]
        self._policies = policies[self.policy]
        self._keeps_slos = self.policy in ("ours", "weave", "solo")
        kind = NodeKind(gpus=8, memory_bytes=rng.randrange(2, 5), nano_usd_per_hour=rng.randrange(1, 20) * 10**9)
        spec = PoolSpec(rollout=kind, train=kind, rollout_nodes=rng.randrange(1, 5), train_nodes=rng.randrange(1, 4))
        self.loop = EventLoop()
        self.limits = WaitLimits(queue_ns=100 * 3600 * S, start_ns=900 * S, stop_ns=120 * S)
        self.journal: list[bytes] = [encode(ClusterOpening(0, spec, self.limits))]
        self.entries: dict[JobId, JobEntry] = {}
        self.keepers: dict[NodeId, _ModelKeeper] = {}
        self.keeper_wires: dict[NodeId, _Wire] = {}
        self.jobs: dict[JobId, _ModelJob] = {}
        self.ended: list[tuple[JobId, int, JobEnding]] = []
        """Of processes that ended while there was nobody to hear of it."""
        self.shell: PoolShell | None = None
        self.events = 0
        self.appended_ns = 0
        """When the journal's last event happened."""
        self.incarnations = 0
        self.faults_seen: Counter[str] = Counter()
        self.progress_ns = 0
        self.returned_ns = 0
        self.excused = 0
        """The last permit whose phase may have been disturbed."""
        self.died_of: list[tuple[NodeId, JobId, str]] = []
        self.cancelled: set[JobId] = set()
        self.starts_ns: dict[tuple[NodeId, JobId], Nanoseconds] = {}
        """How long the next start of a resident takes, where that is not drawn."""
        self._state_before = ""
        times = PoolTimes(silence_ns=10 * S, park_ns=10 * S, keeper_start_ns=60 * S)
        self._times = times
        self._began = False
        self._spot = self._drawn_spot(spec.rollout_nodes)
        self._market: SpotMarket | None = None
        for number in range(rng.randrange(1, 6)):
            self._draw_job(number, spec)
        self._begin(Cluster(spec, self._policies, self.limits, 0))

    def _drawn_spot(self, nodes: int) -> SpotSettings | None:
        """In every fifth world rollout nodes are spot instances. All of them are there once faults end."""
        rng = Random(9_000_011 * self.seed)
        if self.faults.until_ns == 0 or rng.random() >= 0.2:
            return None
        trace = rng.choice(("rlboost-a", "rlboost-b"))
        self._trace = read_spot_trace(traces.find(trace))
        speed = self._trace.end_s * S / self.faults.until_ns
        played = {"trace": trace, "speed": speed, "max_workers": nodes, "usd_per_gpu_hour": 1.0}
        return SpotSettings.model_validate(played)

    def _draw_job(self, number: int, spec: PoolSpec) -> None:
        rng = self.rng
        switch_ns = rng.choice((0, S))
        plan = PhasePlan(
            rollout_ns=rng.randrange(20 * S, 300 * S),
            train_ns=rng.randrange(20 * S, 300 * S),
            sync_ns=rng.choice((0, 5 * S)),
            rollout_switch_ns=switch_ns,
            train_switch_ns=switch_ns,
        )
        request = JobRequest(
            id=f"job-{number}",
            slo=rng.choice((1.2, 1.5, 2.0, 3.0)),
            plan=None if rng.random() < 0.15 else plan,
            steps=rng.randrange(2, 10),
            rollout_nodes=rng.randrange(1, min(3, spec.rollout_nodes + 1)),
            train_nodes=1,
            rollout_bytes=1,
            train_bytes=1,
            restart_ns=rng.choice((0, 30 * S)),
            max_resubmissions=rng.randrange(3),
        )
        kinds = Random(1_000_003 * self.seed + number)
        script = request.plan is not None and kinds.random() < 0.25
        self.jobs[request.id] = _ModelJob(self, request, plan, script=script, both=kinds.random() < 0.25)
        command = ("script",) if script else ()
        entry = JobEntry(job=request.id, directory="", max_restarts=rng.randrange(4), script=command)

        def submit() -> None:
            if self.shell is None:
                self.loop.after(5 * S, submit)
            elif request.id not in self.shell.cluster.jobs:
                self.within(lambda: self.shell and self.shell.submit(request, entry))
                if request.id not in self.entries:
                    self.loop.after(5 * S, submit)

        self.loop.after(rng.randrange(1800 * S), submit)

    # The pool's process.

    def _begin(self, cluster: Cluster) -> None:
        self.incarnations += 1
        self.appended_ns = cluster.now_ns
        self.returned_ns = self.loop.now_ns
        self._market = None if self._spot is None else SpotMarket("rollout", self._spot)
        shell = PoolShell(cluster, self, self._times, self.entries.values(), self._check, self._market)
        self.shell = shell
        keepers = {name: keeper.alive for name, keeper in self.keepers.items()}
        jobs = {name: (job.placement, job.restarts) for name, job in self.jobs.items() if job.alive and not job.script}
        ended, self.ended = self.ended, []
        for name, placement, _ in ended:
            jobs.setdefault(name, (placement, self.jobs[name].restarts))
        anew, self._began = not self._began, True
        self.within(lambda: shell.begin(keepers, jobs, anew=anew))
        for number, (name, placement, ending) in enumerate(ended):
            if self.shell is not shell:
                self.ended += ended[number:]
                return
            self.within(lambda one=(name, placement, ending): shell.job_ended(*one))

    def kill_pool(self) -> None:
        """SIGKILL: every connection is cut, nothing else happens until a new process replays the journal."""
        if self.shell is None:
            return
        self.faults_seen["pool"] += 1
        self.shell = None
        for keeper in self.keepers.values():
            keeper.cut()
        for job in self.jobs.values():
            if job.wire is not None:
                job.wire.open, job.wire = False, None
                job._later(self.rng.randrange(5 * S), job.dial)
        self.loop.after(self.rng.randrange(S, 20 * S), self._return)

    def _return(self) -> None:
        cluster = replay(self.journal, self._policies)
        again = cluster_digest(replay(self.journal, self._policies))
        if cluster_digest(cluster) != again:
            self.fail("two replays came to two states")
        if self._state_before and len(self.journal) == self._journal_then and again != self._state_before:
            self.fail("the process that came back is in another state")
        self._begin(cluster)

    def within(self, act: Callable[[], object]) -> object:
        """Have the shell do something, and die where it is killed."""
        shell = self.shell
        if shell is None:
            return None
        try:
            found = act()
        except _PoolDies:
            self.kill_pool()
            return None
        self._state_before, self._journal_then = cluster_digest(shell.cluster), len(self.journal)
        return found

    def to_shell(self, act: Callable[[PoolShell], object]) -> None:
        shell = self.shell
        if shell is not None:
            self.within(lambda: act(shell))
            self._judge_nodes()

    def _judge_nodes(self) -> None:
        """There is an instance for each rollout node."""
        if self.shell is None or self._spot is None:
            return
        now_s = (self.loop.now_ns - 1000) / S * self._spot.speed  # The market rounds to nanoseconds.
        there = len(self._trace.available(max(0.0, now_s)))
        nodes = sum(node.phase is _ROLLOUT for node in self.shell.cluster.state.nodes.values())
        if nodes > there:
            self.fail(f"{nodes} rollout nodes on {there} instances")

    def _acts(self) -> None:
        """The shell does something: what that follows from is in the journal."""
        if self.shell is not None and self.shell.cluster.now_ns > self.appended_ns:
            self.fail("something is done that follows from an event that is not in the journal yet")
        self._perhaps_die()

    def _perhaps_die(self) -> None:
        if self.faulty and self.rng.random() < self.faults.dies:
            raise _PoolDies

    def _check(self, event: e.ClusterEvent) -> None:
        assert self.shell is not None
        if self.faulty:
            self.excused = max((self.excused, *self.shell.cluster.permits))
        try:
            check(self.shell.cluster, slos=self._keeps_slos)
        except AssertionError as error:
            self.fail(f"after {event}: {error}")

    def fail(self, what: str) -> None:
        faults = self.faults
        again = f"python -m elastic.sim.pool_worlds {self.seed} --dies {faults.dies} --until-s {faults.until_ns // S}"
        raise PoolWorldFailed(
            f"seed {self.seed}: after {self.events} events at {self.loop.now_ns / S:.3f} s: {what}; again: {again}"
        )

    def see_alone(self, job: JobId, nodes: tuple[NodeId, ...]) -> None:
        """Who begins to compute is alone on these nodes."""
        for node in nodes:
            keeper = self.keepers[node]
            there = [one.job for one in keeper.residents.values() if one.permit and not one.script and keeper.alive]
            there += [other.request.id for other in self.jobs.values() if node in other.computes_on]
            if others := [one for one in there if one != job]:
                self.fail(f"{job} computes on {node} while {', '.join(others)} does")

    def seat_of(self, job: JobId) -> tuple[NodeId, ...]:
        """The nodes of both pools that the job has, as far as the pool's process is there."""
        seat = None if self.shell is None else self.shell.cluster.jobs[job].seat
        if self.shell is None or seat is None:
            return ()
        return (*seat.rollout, *self.shell.cluster.groups[seat.group].train)

    # The ports.

    def now_ns(self) -> Nanoseconds:
        return self.loop.now_ns

    def append(self, record: bytes, entry: JobEntry | None = None, command: DoneCommand | None = None) -> None:
        self._perhaps_die()
        self.journal.append(record)
        self.events += 1
        self.appended_ns = self.loop.now_ns
        if entry is not None:
            self.entries[entry.job] = entry
        if self.faulty and self.rng.random() < self.faults.strike:
            self.loop.after(self.rng.randrange(30 * S), self._strike)
        self._perhaps_die()

    def died(self, node: NodeId, job: JobId, what: str) -> None:
        self.died_of.append((node, job, what))

    def settled(self) -> None:
        pass

    def start_keeper(self, node: NodeId, phase: PhaseKind) -> None:
        self._acts()
        former = self.keepers.get(node)
        if former is not None and former.alive:
            self.fail(f"a second keeper for {node}")
        keeper = self.keepers[node] = _ModelKeeper(self, node, phase)
        self.loop.after(self.rng.randrange(5 * S), keeper.dial)

    def end_keeper(self, node: NodeId) -> None:
        if node in self.keepers:
            self.keepers[node].die()

    def tell_keeper(self, node: NodeId, message: msgspec.Struct) -> None:
        self._acts()
        wire, keeper = self.keeper_wires.get(node), self.keepers.get(node)
        if wire is not None and wire.open and keeper is not None:
            wire.carry(False, lambda: keeper.hear(message) if keeper.alive else None)

    def tell_job(self, job: JobId, message: msgspec.Struct) -> None:
        self._acts()
        one = self.jobs[job]
        if one.wire is not None and one.wire.open:
            one.wire.carry(False, lambda: one.hear(message))

    def cut_job(self, job: JobId) -> None:
        one = self.jobs[job]
        if one.wire is not None:
            one.wire.open, one.wire = False, None
            one._later(3 * S, one.dial)

    def resident(
        self, entry: JobEntry, placement: int, node: NodeId, phase: PhaseKind, ticket: w.WorkerTicketFrame | None
    ) -> w.StartResidentFrame:
        environment = {} if ticket is None else {"ELASTIC_WORKER": ticket.worker}
        return w.StartResidentFrame(entry.job, placement, phase, ("x",), environment, "", "", bool(entry.script))

    def start_job(self, entry: JobEntry, placement: int, restarts: int) -> None:
        self._acts()
        self.jobs[entry.job].start(placement, restarts)

    def stop_job(self, job: JobId, reason: str) -> None:
        one = self.jobs[job]
        one._later(self.rng.randrange(3 * S), one.stop)

    def kill_job(self, job: JobId) -> None:
        self._acts()
        one = self.jobs[job]
        placement = one.placement
        self.loop.after(
            self.rng.randrange(S), lambda: one.die("died") if one.alive and one.placement == placement else None
        )

    def profile(self, entry: JobEntry) -> None:
        plan = self.jobs[entry.job].profile
        self.loop.after(plan.solo_ns, lambda: self.to_shell(lambda shell: shell.profiled(entry.job, plan)))

    def end_profile(self, job: JobId) -> None:
        pass

    # Faults.

    @property
    def faulty(self) -> bool:
        return self.loop.now_ns < self.faults.until_ns

    def latency_ns(self) -> Nanoseconds:
        late = self.faulty and self.rng.random() < 0.02
        return self.rng.randrange(5 * S) if late else self.rng.randrange(S // 100)

    def job_over(self, job: JobId, placement: int, ending: JobEnding) -> None:
        shell = self.shell

        def tell() -> None:
            if shell is None or self.shell is not shell:
                self.ended.append((job, placement, ending))
            else:
                self.to_shell(lambda shell: shell.job_ended(job, placement, ending))

        self.loop.after(1, tell)

    def _strike(self) -> None:
        rng = self.rng
        kind = rng.choice(STRIKES)
        keepers = [keeper for keeper in self.keepers.values() if keeper.alive]
        jobs = [job for job in self.jobs.values() if job.alive]
        self.faults_seen[kind] += 1
        if kind == "pool":
            self.kill_pool()
        elif kind == "keeper" and keepers:
            for keeper in keepers if rng.random() < 0.05 else [rng.choice(keepers)]:
                self._kill_keeper(keeper)
        elif kind in ("keeper link", "resident", "stuck", "silent", "memory") and keepers:
            keeper = rng.choice(keepers)
            if kind == "silent":
                keeper.silent = True
                keeper.cut()
                self.to_shell(lambda shell: shell.keeper_left(keeper.node))
            elif kind == "keeper link":
                keeper.cut()
                self.to_shell(lambda shell: shell.keeper_left(keeper.node))
            elif keeper.residents:
                one = rng.choice(list(keeper.residents.values()))
                if kind == "stuck":
                    one.stuck = True
                elif kind == "memory":
                    keeper.swell(one)
                else:
                    keeper.kill(one.job, "killed")
        elif kind == "job" and jobs:
            rng.choice(jobs).die("died")
        elif kind == "job link" and jobs:
            rng.choice(jobs).cut()
        elif kind == "cancel" and rng.random() < 0.1:
            job = rng.choice(list(self.jobs))
            self.cancelled.add(job)
            self.to_shell(lambda shell: shell.cancel(job))

    def _kill_keeper(self, keeper: _ModelKeeper) -> None:
        keeper.die()
        self.loop.after(self.rng.randrange(2 * S), lambda: self.to_shell(lambda shell: self._tell_gone(shell, keeper)))

    def _tell_gone(self, shell: PoolShell, keeper: _ModelKeeper) -> None:
        if self.keepers[keeper.node] is keeper:
            shell.keeper_gone(keeper.node)

    # The world's life.

    def run(self) -> None:
        """Until all jobs have ended. Raises `PoolWorldFailed`."""
        for _ in range(LOOP_MAX):
            if self._is_over():
                break
            if self.loop.now_ns > max(self.progress_ns, self.faults.until_ns) + PROGRESS_NS:
                break
            shell = self.shell
            wakeup_ns = None if shell is None else shell.next_wakeup_ns()
            at_ns = self.loop.next_ns()
            if wakeup_ns is not None and (at_ns is None or wakeup_ns <= at_ns):
                self.loop.pass_to(wakeup_ns)
                self.to_shell(lambda shell: shell.pass_time())
            elif at_ns is not None:
                self.loop.step()
            else:
                break
        self._judge()

    def _is_over(self) -> bool:
        shell = self.shell
        if shell is None or len(shell.cluster.jobs) < len(self.jobs):
            return False
        if any(not (record.ended or record.state is JobState.FAILED) for record in shell.cluster.jobs.values()):
            return False
        residents = any(keeper.residents for keeper in self.keepers.values() if keeper.alive)
        return not residents and not any(job.alive for job in self.jobs.values())

    def _judge(self) -> None:
        shell = self.shell
        if shell is None or not self._is_over():
            cluster = None if shell is None else shell.cluster
            states = {} if cluster is None else {job: record.state.value for job, record in cluster.jobs.items()}
            alive = [job.request.id for job in self.jobs.values() if job.alive]
            held = {name: list(keeper.residents) for name, keeper in self.keepers.items() if keeper.alive}
            waits = [] if cluster is None else [*cluster.waits][:5]
            self.fail(f"not over: {states}; processes {alive}, residents {held}, waits {waits}")
            return
        if shell.cluster.permits or shell.cluster.groups:
            self.fail("all jobs have ended, and not everything was given back")
        for job, record in shell.cluster.jobs.items():
            if record.state is JobState.FINISHED and self.jobs[job].steps < record.request.steps:
                self.fail(f"{job} is finished after {self.jobs[job].steps} of its steps")
            if record.state is JobState.FAILED and not self.jobs[job].deaths:
                self.fail(f"{job} has failed, and nothing has happened to it: {record.reason}")
            if record.state is JobState.CANCELLED and job not in self.cancelled:
                self.fail(f"{job} is cancelled, and nobody wanted that")
        if cluster_digest(replay(self.journal, self._policies)) != cluster_digest(shell.cluster):
            self.fail("the journal leads to another state")


def main() -> None:
    """Live through the world of one seed again."""
    from policies.clusters import CLUSTER_POLICIES

    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("seed", type=int)
    parser.add_argument("--dies", type=float, default=PoolFaults().dies)
    parser.add_argument("--until-s", type=int, default=PoolFaults().until_ns // S)
    given = parser.parse_args()
    world = PoolWorld(CLUSTER_POLICIES, given.seed, PoolFaults(dies=given.dies, until_ns=given.until_s * S))
    world.run()
    print(f"{world.events} events, faults: {dict(world.faults_seen)}")


if __name__ == "__main__":
    main()
