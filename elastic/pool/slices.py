"""The jobs that have the devices. A device is given under a permit's number, and taken back before the cluster hears
that the permit was yielded.

A job has at most one permit. Its requests go to the cluster one phase at a time, training first.
"""

from collections.abc import Iterator

import msgspec

from elastic.core.cluster import events as e
from elastic.core.cluster.types import JobId, JobState, Nanoseconds, NodeId, Permit, PhaseKind
from elastic.pool import messages as w
from elastic.pool.holdings import NS_PER_S, PoolHoldings, PoolRoom
from elastic.pool.scripts import PoolScripts
from elastic.pool.slice_workers import SliceWorkers

PROGRESS_NEWS = 0.02
"""Share of a rollout's responses between two progress events."""
_ROLLOUT, _TRAIN = PhaseKind.ROLLOUT, PhaseKind.TRAIN


class Yielding(msgspec.Struct, kw_only=True):
    """A permit whose devices are being taken back; `waiting` has the nodes that have not freed theirs."""

    permit: int
    finished: bool = False
    switch_ns: int = 0
    cold_ns: int = 0
    waiting: set[NodeId] = set()


class JobPermits(msgspec.Struct, kw_only=True):
    """A job's requests and permits.

    - `wants`: the phases that it has asked for and was not granted since; for each, whether with both pools' nodes.
    - `known`: permits that the job was told of and has not yielded. `told`: the permit and nodes last told to it.
    - `overdue`: it has waited too long for a resident to come up, and takes its next time slice without one.
    - `returning`: a checkpoint of its trainer's is on its way to the pool, and its training is not asked for before it
      has come.
    - `progress`: of a rollout's permit, the responses that are done, as the cluster was told last.
    """

    wants: dict[PhaseKind, bool] = {}
    known: set[int] = set()
    told: tuple[int, tuple[NodeId, ...]] = (0, ())
    yielding: Yielding | None = None
    leaving: Yielding | None = None
    overdue: bool = False
    returning: bool = False
    progress: tuple[int, int] = (0, 0)

    def yields(self, permit: int) -> bool:
        return self.yielding is not None and self.yielding.permit == permit


class PoolSlices(PoolRoom):
    """The permits of a pool's jobs, and their devices."""

    def __init__(self, pool: PoolHoldings, workers: SliceWorkers, scripts: PoolScripts) -> None:
        super().__init__(pool)
        self._workers, self._scripts = workers, scripts
        self._jobs = pool.records(JobPermits)

    def begin(self) -> None:
        """Take over requests and permits from the cluster; those of jobs without a process are taken back."""
        for job, record in self._cluster.jobs.items():
            if record.asked is not None and self._pool.jobs[job].process is not None:
                self._jobs[job].wants[record.asked] = record.asked_both  # It says so again, or yields what it gets.
        for permit in list(self._cluster.permits.values()):
            job_permits = self._jobs[permit.job]
            job_permits.known.add(permit.number)
            job_permits.told = (permit.number, permit.nodes)
            if self._pool.jobs[permit.job].process is None:
                self.take_back(permit)

    def want(self, job: JobId, phase: PhaseKind, *, both: bool) -> None:
        job_permits = self._jobs[job]
        if job_permits.yielding is not None or not self.holds(job, phase):
            job_permits.wants[phase] = both

    def withdraw(self, job: JobId, *phases: PhaseKind) -> None:
        for phase in phases:
            self._jobs[job].wants.pop(phase, None)

    def forget(self, job: JobId) -> None:
        """Forget what the job wants, and its workers."""
        self.withdraw(job, *PhaseKind)
        self._jobs[job].overdue = False
        self._workers.forget(job)

    def joined(self, job: JobId) -> list[Permit]:
        """Return the permits that a job which has dialled holds. It counts as told of these."""
        job_permits = self._jobs[job]
        permits = [
            permit
            for permit in self._cluster.permits.values()
            if permit.job == job and not job_permits.yields(permit.number)
        ]
        if self._pool.is_script(job):
            permits = [permit for permit in permits if permit.number == job_permits.told[0]]
        else:
            job_permits.told = next(((permit.number, permit.nodes) for permit in permits), job_permits.told)
        job_permits.known.update(permit.number for permit in permits)
        self.withdraw(job, *(permit.phase for permit in permits))
        return permits

    def taken_from(self, name: NodeId) -> Iterator[tuple[JobId, int]]:
        """Return the permits, with their jobs, that wait for this node's device to be free."""
        for job, job_permits in list(self._jobs.items()):
            for taking in (job_permits.yielding, job_permits.leaving):
                if taking is not None and name in taking.waiting:
                    yield job, taking.permit

    def compare(self, job: JobId) -> None:
        """Tell the job of permits that are over, and forget what was being taken back of them."""
        job_permits = self._jobs[job]
        for number in [number for number in job_permits.known if number not in self._cluster.permits]:
            job_permits.known.discard(number)
            self._workers.over(job, number)
            self._take_over(job, number)
            self._ports.send_to_job(job, w.PermitOver(number, "it was taken, or its nodes are gone"))
        permits = self._cluster.permits
        if job_permits.yielding is not None and job_permits.yielding.permit not in permits:
            job_permits.yielding = None
        if job_permits.leaving is not None and job_permits.leaving.permit not in permits:
            job_permits.leaving = None

    def _take_over(self, job: JobId, permit: int) -> None:
        """Take the devices of a permit that the cluster has ended: no later resident computes under it."""
        for name, node in self._nodes.items():
            if node.given == permit:
                self.take_device(name, job, permit)

    def granted(self, number: int) -> None:
        """Tell the job of a permit that has just begun or got more nodes, unless it does not want it any more."""
        permit = self._cluster.permits.get(number)
        if permit is None:
            return
        job_permits = self._jobs[permit.job]
        if job_permits.yields(permit.number):
            return  # It has got more nodes while it was leaving; they are given to nobody.
        if permit.number not in job_permits.known:
            if job_permits.wants.get(permit.phase) is not permit.both:
                self._pool.feed(e.PermitYielded(job=permit.job, permit=permit.number, finished=False))
                return
            del job_permits.wants[permit.phase]
            job_permits.known.add(permit.number)
            job_permits.overdue = False
        if not self._pool.is_script(permit.job):
            self._workers.place(permit)
            self.tell(permit)

    def tell(self, permit: Permit) -> None:
        """Tell the job of its permit as it stands. A script knows nothing of devices that it has not got."""
        job_permits = self._jobs[permit.job]
        if permit.number not in job_permits.known or job_permits.yields(permit.number):
            return
        if not self._pool.is_script(permit.job):
            job_permits.told = (permit.number, permit.nodes)
        if job_permits.told[0] == permit.number:
            self._ports.send_to_job(permit.job, self.grant_of(permit))

    def grant_of(self, permit: Permit) -> w.Granted:
        """Return what the job is told of its permit."""
        nodes = tuple(name for name in permit.nodes if name in self._jobs[permit.job].told[1])
        left_s, workers = self._pool.ends_s(permit.deadline_ns), self._workers.of(permit)
        return w.Granted.of(msgspec.structs.replace(permit, nodes=nodes), left_s, workers)

    def give_devices(self, permit: Permit) -> None:
        """Make sure that the permit's job has the permit's devices, once scripts that were killed have left them, and
        that its residents there work for it.

        A script is told of its permit once nobody else has any of the devices.
        """
        job_permits, script = self._jobs[permit.job], self._pool.is_script(permit.job)
        if permit.number not in job_permits.known or job_permits.yields(permit.number):
            return
        if script and any(self._scripts.must_wait(name, permit.job) for name in permit.nodes):
            return
        if self._workers.place(permit):
            self.tell(permit)
        left_s, given = self._pool.ends_s(permit.deadline_ns), True
        for name in permit.nodes:
            node = self._nodes.get(name)
            if node is None or not node.connected:
                given = False
                continue
            resident, has = node.residents.get(permit.job), node.given >= permit.number
            if not has and self._scripts.are_on(name, permit.job):
                given = False
                continue
            works = resident is not None and not resident.ending and not script
            ticket = self._workers.take_ticket(permit, name) if works else None
            if has and ticket is None:
                continue
            node.given = permit.number
            if resident is not None:
                resident.permit, resident.worker = permit.number, ticket.worker if ticket else resident.worker
            if script:
                self._scripts.use(permit.job, name)
            self._ports.send_to_node_agent(name, w.GiveDevice(permit.number, permit.job, left_s, ticket))
        if script and given and job_permits.told != (permit.number, permit.nodes):
            job_permits.told = (permit.number, permit.nodes)
            self.tell(permit)

    def take_back(self, permit: Permit) -> None:
        """Take a permit's devices without the job's word. The phase goes on in a further slice."""
        self.end(permit, False, 0)

    def end(self, permit: Permit, finished: bool, switch_ns: Nanoseconds) -> None:
        job_permits = self._jobs[permit.job]
        if job_permits.yields(permit.number):
            return
        job_permits.leaving = None
        job_permits.yielding = Yielding(
            permit=permit.number, finished=finished, switch_ns=switch_ns, waiting=set(permit.nodes)
        )
        for name in permit.nodes:
            self.take_device(name, permit.job, permit.number)
        self._settle(permit.job)

    def leave_for_tail(self, permit: Permit) -> None:
        """Take the devices of the nodes that the job has left for its tail, before other jobs get them."""
        job_permits = self._jobs[permit.job]
        if job_permits.leaving is not None or job_permits.yielding is not None or not permit.tail_nodes:
            return
        left = [name for name in permit.nodes if name not in permit.tail_nodes]
        job_permits.leaving = Yielding(permit=permit.number, waiting=set(left))
        for name in left:
            self.take_device(name, permit.job, permit.number)
        self._settle(permit.job)

    def take_device(self, name: NodeId, job: JobId, permit: int) -> None:
        """Take a node's device. Without a node agent the device counts as free: a node agent that comes back reports
        what it holds."""
        node = self._nodes.get(name)
        if node is None or (node.connected and node.given < permit):
            self.freed(name, job, permit, 0)
        elif node.connected:
            self._ports.send_to_node_agent(name, w.TakeDevice(permit, job, self._times.park_ns / NS_PER_S))

    def freed(
        self, name: NodeId, job: JobId, permit: int | None, switch_ns: Nanoseconds, cold_ns: Nanoseconds = 0
    ) -> None:
        job_permits = self._jobs[job]
        for taking in (job_permits.yielding, job_permits.leaving):
            if taking is not None and taking.permit == permit and name in taking.waiting:
                taking.waiting.discard(name)
                taking.switch_ns, taking.cold_ns = max(taking.switch_ns, switch_ns), max(taking.cold_ns, cold_ns)
        if permit is not None and job_permits.yields(permit):
            self._workers.ended(job, name, "its slice is over")
        self._settle(job)

    def _settle(self, job: JobId) -> None:
        job_permits = self._jobs[job]
        taking = job_permits.yielding
        if taking is not None and not taking.waiting:
            job_permits.yielding = None
            job_permits.known.discard(taking.permit)
            self._pool.feed(
                e.PermitYielded(
                    job=job,
                    permit=taking.permit,
                    finished=taking.finished,
                    switch_ns=max(0, taking.switch_ns),
                    cold_ns=taking.cold_ns,
                )
            )
        leaving = job_permits.leaving
        if leaving is not None and not leaving.waiting:
            job_permits.leaving = None
            self._pool.feed(e.TailMoved(job=job, permit=leaving.permit))

    def ask(self, job: JobId) -> None:
        """Give the cluster the job's next request, training first."""
        record, job_permits = self._cluster.jobs[job], self._jobs[job]
        if (
            self._pool.stopping
            or record.state is not JobState.RUNNING
            or record.permit is not None
            or not job_permits.wants
        ):
            self._clear(job)
            return
        phase = _TRAIN if _TRAIN in job_permits.wants else _ROLLOUT
        both = job_permits.wants[phase]
        if record.asked is phase and record.asked_both == both:
            return
        waits = "returned" if phase is _TRAIN and job_permits.returning else ""
        waits = waits if self._warm(job, phase) else "warm"
        if not waits or job_permits.overdue:
            self._clear(job)
            self._pool.feed(e.PhaseAsked(job=job, phase=phase, placement=record.placement, both=both))
        elif not self._timers.waiting(waits, job):
            self._clear(job)
            within_ns = self._times.silence_ns if self._workers.trainer_died(job) else record.request.limit_ns
            self._pool.wait(waits, job, within_ns)

    def _clear(self, job: JobId) -> None:
        for waits in ("warm", "returned"):
            self._timers.clear(waits, job)

    def overdue(self, job: JobId) -> None:
        """Have a job that has waited too long go on as it is: one whose resident does not come up starts it within a
        time slice of its own."""
        self._jobs[job].overdue = True

    def returns(self, job: JobId, *, goes_on: bool) -> None:
        """Note whether a checkpoint of the job's trainer is on its way to the pool."""
        if job in self._cluster.jobs:
            self._jobs[job].returning = goes_on

    def _warm(self, job: JobId, phase: PhaseKind) -> bool:
        """Return whether residents of the job are up for this phase, one for rollouts, for training all: a process that
        starts needs no device yet."""
        record, entry = self._cluster.jobs[job], self._entries.get(job)
        if record.seat is None or entry is None or entry.script:
            return True
        if phase is _TRAIN and self._workers.trainer(job) is None:
            return not self._workers.trainer_died(job)
        rolls_out = phase is _ROLLOUT
        nodes = (
            self._nodes.get(name) for name in (record.seat.rollout if rolls_out else self._pool.trainer_nodes(job))
        )
        found = [None if node is None else node.residents.get(job) for node in nodes]
        up = [resident is not None and resident.up and not resident.ending for resident in found]
        return any(up) if rolls_out else all(up)

    def holds(self, job: JobId, phase: PhaseKind) -> bool:
        """Return whether the job has a permit for this phase that it was told of."""
        number = self._cluster.jobs[job].permit
        if number is None or number not in self._jobs[job].known:
            return False
        return self._cluster.permits[number].phase is phase

    def progressed(self, job: JobId, message: w.PhaseProgress) -> None:
        """Record a rollout's progress, if it has several nodes. Only then its tail can move together."""
        permit, job_permits = self._cluster.permits.get(message.permit), self._jobs[job]
        if permit is None or permit.job != job or len(permit.nodes) < 2 or permit.tail_nodes or not message.of:
            return
        known = job_permits.progress
        if known[0] != message.permit or message.done - known[1] >= PROGRESS_NEWS * message.of:
            job_permits.progress = (message.permit, message.done)
            self._pool.feed(e.RolloutProgressed(job=job, permit=message.permit, done=message.done, of=message.of))
