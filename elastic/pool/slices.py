"""Who has the devices. A device is given under a permit's number, and taken back before the cluster hears that the
permit was yielded.

A job has at most one permit. Its requests go to the cluster one phase at a time, training first.
"""

from elastic.core.cluster import commands as c
from elastic.core.cluster import events as e
from elastic.core.cluster.types import JobId, JobState, Nanoseconds, NodeId, Permit, PhaseKind
from elastic.pool import messages as w
from elastic.pool.holdings import NS_PER_S, PoolHoldings, Yielding
from elastic.pool.scripts import PoolScripts
from elastic.pool.slice_workers import SliceWorkers

PROGRESS_NEWS = 0.02
"""Share of a rollout's responses between two progress events."""
_ROLLOUT, _TRAIN = PhaseKind.ROLLOUT, PhaseKind.TRAIN


class PoolSlices:
    """The permits of a pool's jobs, and their devices."""

    def __init__(self, pool: PoolHoldings, workers: SliceWorkers, scripts: PoolScripts) -> None:
        self._pool, self._workers, self._scripts = pool, workers, scripts

    def compare(self, job: JobId) -> None:
        """Tell the job of permits that are over, and forget what was being taken back of them."""
        live = self._pool.job(job)
        for number in [number for number in live.known if number not in self._pool.cluster.permits]:
            live.known.discard(number)
            self._take_over(job, number)
            self._pool.ports.tell_job(job, w.PermitOver(number, "it was taken, or its nodes are gone"))
        permits = self._pool.cluster.permits
        if live.yielding is not None and live.yielding.permit not in permits:
            live.yielding = None
        if live.leaving is not None and live.leaving.permit not in permits:
            live.leaving = None

    def _take_over(self, job: JobId, permit: int) -> None:
        """Take the devices of a permit that the cluster has ended: no later resident computes under it."""
        for name, node in self._pool.nodes.items():
            if node.given == permit:
                self.take_device(name, job, permit)

    def granted(self, command: c.GrantPermit) -> None:
        live = self._pool.job(command.job)
        permit = self._pool.cluster.permits.get(command.permit)
        if permit is None:
            return
        if live.yielding is not None and live.yielding.permit == permit.number:
            return  # It has got more nodes while it was leaving; they are given to nobody.
        if permit.number not in live.known:
            if live.wants.get(command.phase) is not command.both:
                self._pool.feed(e.PermitYielded(job=command.job, permit=permit.number, finished=False))
                return
            del live.wants[command.phase]
            live.known.add(permit.number)
            live.overdue = False
        if not self._pool.is_script(command.job):
            self._tell_granted(permit)

    def _tell_granted(self, permit: Permit) -> None:
        left_s = self._pool.ends_s(permit.deadline_ns)
        self._pool.job(permit.job).told = (permit.number, permit.nodes)
        granted = w.Granted(permit.number, permit.phase, permit.nodes, left_s, permit.both)
        self._pool.ports.tell_job(permit.job, granted)

    def give_devices(self, permit: Permit) -> None:
        """Make sure that the permit's job has the permit's devices, once scripts that were killed have left them.

        A script is told of its permit once nobody else has any of the devices.
        """
        live, script = self._pool.job(permit.job), self._pool.is_script(permit.job)
        if permit.number not in live.known or (live.yielding is not None and live.yielding.permit == permit.number):
            return
        if script and any(self._scripts.must_wait(name, permit.job) for name in permit.nodes):
            return
        left_s, given = self._pool.ends_s(permit.deadline_ns), True
        for name in permit.nodes:
            node = self._pool.nodes.get(name)
            if node is not None and node.given >= permit.number:
                continue
            if node is None or not node.connected or self._scripts.are_on(name, permit.job):
                given = False
                continue
            node.given = permit.number
            if permit.job in node.residents:
                node.residents[permit.job].permit = permit.number
            if script:
                live.uses.add(name)
            self._pool.ports.tell_keeper(name, w.GiveDevice(permit.number, permit.job, left_s))
        if script and given and live.told != (permit.number, permit.nodes):
            self._tell_granted(permit)

    def recalled(self, command: c.RecallPermit) -> None:
        self._pool.ports.tell_job(command.job, w.Recalled(command.permit, self._pool.left_s(command.until_ns)))

    def tell_tail(self, job: JobId, permit: int, nodes: tuple[NodeId, ...]) -> None:
        self._pool.ports.tell_job(job, w.TailMove(permit, nodes))

    def take_back(self, permit: Permit) -> None:
        """Take a permit's devices without the job's word. The phase goes on in a further slice."""
        self.end(permit, False, 0)

    def end(self, permit: Permit, finished: bool, switch_ns: Nanoseconds) -> None:
        live = self._pool.job(permit.job)
        if live.yielding is not None and live.yielding.permit == permit.number:
            return
        live.leaving = None
        live.yielding = Yielding(
            permit=permit.number, finished=finished, switch_ns=switch_ns, waiting=set(permit.nodes)
        )
        for name in permit.nodes:
            self.take_device(name, permit.job, permit.number)
        self._settle(permit.job)

    def leave_for_tail(self, permit: Permit) -> None:
        """Take the devices of the nodes that the job has left for its tail, before other jobs get them."""
        live = self._pool.job(permit.job)
        if live.leaving is not None or live.yielding is not None or not permit.tail_nodes:
            return
        left = [name for name in permit.nodes if name not in permit.tail_nodes]
        live.leaving = Yielding(permit=permit.number, waiting=set(left))
        for name in left:
            self.take_device(name, permit.job, permit.number)
        self._settle(permit.job)

    def take_device(self, name: NodeId, job: JobId, permit: int) -> None:
        """Take a node's device. Without a keeper the device counts as free: a keeper that comes back reports what it
        holds."""
        node = self._pool.nodes.get(name)
        if node is None or (node.connected and node.given < permit):
            self.freed(name, job, permit, 0)
        elif node.connected:
            self._pool.ports.tell_keeper(name, w.TakeDevice(permit, job, self._pool.times.park_ns / NS_PER_S))

    def freed(self, name: NodeId, job: JobId, permit: int | None, switch_ns: Nanoseconds) -> None:
        live = self._pool.job(job)
        for taking in (live.yielding, live.leaving):
            if taking is not None and taking.permit == permit and name in taking.waiting:
                taking.waiting.discard(name)
                taking.switch_ns = max(taking.switch_ns, switch_ns)
        lent = live.lent.get(name)
        if lent is not None and live.yielding is not None and live.yielding.permit == permit:
            del live.lent[name]
            live.tickets.pop(name, None)
            self._workers.tell_parked(job, name, lent, 0.0, "its slice is over", permit or 0)
        self._settle(job)

    def _settle(self, job: JobId) -> None:
        live = self._pool.job(job)
        taking = live.yielding
        if taking is not None and not taking.waiting:
            live.yielding = None
            live.known.discard(taking.permit)
            self._pool.feed(
                e.PermitYielded(
                    job=job, permit=taking.permit, finished=taking.finished, switch_ns=max(0, taking.switch_ns)
                )
            )
        leaving = live.leaving
        if leaving is not None and not leaving.waiting:
            live.leaving = None
            self._pool.feed(e.TailMoved(job=job, permit=leaving.permit))

    def ask(self, job: JobId) -> None:
        """Give the cluster the job's next request, training first."""
        record, live = self._pool.cluster.jobs[job], self._pool.job(job)
        if self._pool.stopping or record.state is not JobState.RUNNING or record.permit is not None or not live.wants:
            self._pool.timers.clear("warm", job)
            return
        phase = _TRAIN if _TRAIN in live.wants else _ROLLOUT
        both = live.wants[phase]
        if record.asked is phase and record.asked_both == both:
            return
        if self._warm(job, phase) or live.overdue:
            self._pool.timers.clear("warm", job)
            self._pool.feed(e.PhaseAsked(job=job, phase=phase, placement=record.placement, both=both))
        elif not self._pool.timers.waiting("warm", job):
            within_ns = self._pool.times.silence_ns if live.trainer_died else record.request.limit_ns
            self._pool.timers.set("warm", job, self._pool.ports.now_ns(), within_ns)

    def overdue(self, job: JobId) -> None:
        """Have a job whose resident does not come up start it within a turn of its own."""
        self._pool.job(job).overdue = True

    def _warm(self, job: JobId, phase: PhaseKind) -> bool:
        """Return whether a resident of the job is up for this phase: a process that starts needs no device yet."""
        record, entry = self._pool.cluster.jobs[job], self._pool.entries.get(job)
        if record.seat is None or entry is None or entry.script:
            return True
        if phase is _TRAIN and self._pool.job(job).trainer is None:
            return not self._pool.job(job).trainer_died
        nodes = record.seat.rollout if phase is _ROLLOUT else self._pool.cluster.groups[record.seat.group].train[:1]
        found = [node.residents.get(job) for name in nodes if (node := self._pool.nodes.get(name)) is not None]
        return any(resident is not None and resident.up and not resident.ending for resident in found)

    def holds(self, job: JobId, phase: PhaseKind) -> bool:
        """Return whether the job has a permit for this phase that it was told of."""
        number = self._pool.cluster.jobs[job].permit
        if number is None or number not in self._pool.job(job).known:
            return False
        return self._pool.cluster.permits[number].phase is phase

    def progressed(self, job: JobId, message: w.PhaseProgress) -> None:
        """Record a rollout's progress, if it has several nodes. Only then its tail can move together."""
        permit, live = self._pool.cluster.permits.get(message.permit), self._pool.job(job)
        if permit is None or permit.job != job or len(permit.nodes) < 2 or permit.tail_nodes or not message.of:
            return
        known = live.progress
        if known[0] != message.permit or message.done - known[1] >= PROGRESS_NEWS * message.of:
            live.progress = (message.permit, message.done, message.of)
            self._pool.feed(e.RolloutProgressed(job=job, permit=message.permit, done=message.done, of=message.of))
