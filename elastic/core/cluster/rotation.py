"""Time slices of jobs within a group: permits in a fixed cyclic order.

- A phase may begin once its job has asked, all of its nodes are free, and every job before it in the order has had its
  time slice of this cycle on those nodes. Time slices are counted by job and phase; a job has a time slice or lets it
  pass.
- Other jobs wait for a late job until a named deadline, and then skip it once; they skip it at once while a lost
  resident of it starts anew. A job whose resident was lost asks again.
- A time slice in which residents start cold may take as long as a restart of the job, and its engine's, besides. If
  that did not suffice, the next one may take longer by the length of those that failed, as far as the other jobs of the
  group keep their SLOs.
- A phase that overruns its plan is told to give way, and killed if it does not. Its rest goes on in the next time
  slice.
- A phase that needs both pools takes a time slice of training that closes the cycle's rollouts: it begins with all of
  its nodes at once, after every job has rolled out on the shared nodes and before any begins its next rollout there.
  Time slices follow one another, so no two jobs wait for each other.
- A rollout's tail may stay on some of its nodes. The next job begins on the other nodes and gets the rest when the tail
  ends.

Source: Weave §4.3, with a fixed order instead of its FIFO queues (§5.1). In a fixed order a phase that ends early
delays no job.
"""

from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from elastic.core.cluster import commands as c
from elastic.core.cluster import events as e
from elastic.core.cluster.books import Books
from elastic.core.cluster.groups import JobGroup, PlannedMember
from elastic.core.cluster.policy import SliceView, TailPolicy
from elastic.core.cluster.state import ClusterState, JobRecord
from elastic.core.cluster.types import (
    DeviceAccount,
    GroupName,
    JobId,
    Nanoseconds,
    NodeId,
    Permit,
    PhaseKind,
    WaitLimits,
)
from elastic.core.timers import Timers

_ROLLOUT, _TRAIN = PhaseKind.ROLLOUT, PhaseKind.TRAIN


class Rotation:
    def __init__(
        self,
        state: ClusterState,
        books: Books,
        timers: Timers,
        limits: WaitLimits,
        tail: TailPolicy,
        emit: Callable[[c.ClusterCommand], None],
    ) -> None:
        self._state, self._books, self._timers, self._limits = state, books, timers, limits
        self._tail, self._emit = tail, emit

    def join(self, record: JobRecord) -> None:
        """Add the job to the present cycle, at the end of the order."""
        group = self._group(record)
        others = [self._state.jobs[other].slices for other in group.members if self._takes_part(other, group)]
        had = min((min(slices.values()) for slices in others), default=0)
        record.slices = {_ROLLOUT: had, _TRAIN: had}
        record.cold, record.down = [_ROLLOUT, _TRAIN], []
        record.asked, record.asked_both = None, False

    def leave(self, record: JobRecord) -> None:
        """Free everything that the job holds, and stop waiting for it."""
        if record.permit is not None:
            self._end(self._state.permits[record.permit])
        record.slices, record.asked, record.asked_both, record.cold, record.down = {}, None, False, [], []

    def chill(self, record: JobRecord, phase: PhaseKind) -> None:
        """Note that a resident of this phase has to start anew. A time slice of this phase that the job waits for is
        forgotten, so that other jobs go on; the job asks again."""
        if not record.slices:
            return
        if phase not in record.cold:
            record.cold.append(phase)
        if phase not in record.down:
            record.down.append(phase)
        if record.asked is not None and (record.asked_both or record.asked is phase):
            record.asked, record.asked_both = None, False
            self.grant(self._group(record))

    def ask(self, record: JobRecord, phase: PhaseKind, *, both: bool = False) -> None:
        """Queue the job's phase. A job that trains twice in a row skips its rollout, and vice versa: a cycle has one
        of each."""
        if not record.slices or record.permit is not None:
            return
        record.asked, record.asked_both = _TRAIN if both else phase, both
        record.down = [lost for lost in record.down if not both and lost is not phase]
        slices = record.slices
        if record.asked is _ROLLOUT:
            slices[_TRAIN] = max(slices[_TRAIN], slices[_ROLLOUT])
        elif slices[_ROLLOUT] <= slices[_TRAIN]:
            slices[_ROLLOUT] = slices[_TRAIN] + 1
        self._timers.clear("time slice", record.request.id)
        self.grant(self._group(record))

    def yielded(self, permit: Permit, event: e.PermitYielded) -> Nanoseconds:
        """End the slice; returns its length in nanoseconds."""
        length_ns = self._state.now_ns - permit.since_ns
        for name in permit.nodes:
            node = self._state.nodes[name]
            self._books.settle(node)
            self._books.charge_instead(node, DeviceAccount.SWITCHING, min(event.switch_ns, length_ns))
        self._end(permit)
        record = self._state.jobs[permit.job]
        record.slices[permit.phase] += 1
        if event.finished or event.switch_ns:
            record.patience_ns = record.in_vain = 0
        elif record.began_cold:
            self._start_longer(record, permit)
            record.cold.extend(phase for phase in _phases(permit) if phase not in record.cold)
        self.grant(self._group(record))
        return length_ns

    def recall(self, number: str) -> None:
        """Recall a permit whose phase has overrun its plan."""
        now_ns = self._state.now_ns
        permit = self._change(self._state.permits[int(number)], recalled=True, deadline_ns=now_ns)
        self._emit(c.RecallPermit(permit=permit))
        self._timers.set("yield", number, now_ns, self._limits.notice_ns)

    def kill(self, number: str) -> None:
        """End a permit whose phase did not give way. Its residents die, and the cycle goes on."""
        permit = self._state.permits[int(number)]
        for node_id in permit.nodes:
            node = self._state.nodes[node_id]
            self._books.settle(node)
            self._emit(c.KillResident(job=permit.job, node=node_id, reason=f"permit {number} was not yielded in time"))
            self._books.charge_instead(node, DeviceAccount.DOWN, self._limits.notice_ns)
        self._end(permit)
        record = self._state.jobs[permit.job]
        record.slices[permit.phase] += 1
        if record.began_cold:
            self._start_longer(record, permit)
        for phase in _phases(permit):
            self.chill(record, phase)
        for node_id in permit.nodes:
            self._emit(c.StartResident(job=permit.job, node=node_id))
        self.grant(self._group(record))

    def _start_longer(self, record: JobRecord, permit: Permit) -> None:
        """Give the job's next start as long besides as the time slices that did not suffice for one, but no longer than
        other jobs bear within their SLOs, or than a notice takes."""
        now_ns, group = self._state.now_ns, self._group(record)
        longer_ns = record.patience_ns + now_ns - permit.since_ns
        others = (self._state.jobs[job] for job in group.members if job != record.request.id)
        borne_ns = (other.left_ns(now_ns) - other.steps_left * group.cycle_ns for other in others)
        record.patience_ns = max(self._limits.notice_ns, min(longer_ns, self._limits.start_ns, *borne_ns))
        record.in_vain += 1

    def pass_over(self, job: JobId) -> None:
        """Skip one due time slice of a job for which others have waited long enough."""
        record = self._state.jobs[job]
        slices = record.slices
        if slices[_ROLLOUT] > slices[_TRAIN]:
            slices[_TRAIN] += 1
        else:
            slices[_ROLLOUT] += 1
            slices[_TRAIN] += 1
        self.grant(self._group(record))

    def progressed(self, event: e.RolloutProgressed) -> None:
        """Move the rollout's tail to fewer nodes if the rollout has come to its tail and other jobs wait for its
        nodes."""
        permit, job = self._state.permits.get(event.permit), event.job
        if permit is None or permit.job != job or permit.phase is not _ROLLOUT or permit.tail_nodes or permit.recalled:
            return
        record = self._state.jobs[job]
        group = self._group(record)
        waiting = self._first_waiting(group, job, permit.nodes)
        view = SliceView(
            done=event.done,
            of=event.of,
            nodes=permit.nodes,
            wanted=() if waiting is None else tuple(node for node in permit.nodes if node in waiting.nodes),
            waiting_nodes=0 if waiting is None else len(waiting.nodes),
            waiting_ns=0 if waiting is None else waiting.rollout_ns,
            left_ns=max(0, permit.since_ns + group.members[job].rollout_ns - self._state.now_ns),
            planned_ns=group.members[job].rollout_ns,
            shortens_ns=max(0, group.rollout_load_ns(permit.nodes) - max(group.train_ns, group.longest_ns)),
        )
        kept = self._tail.keeps(view)
        if kept and set(kept) < set(permit.nodes):
            self._emit(c.MoveTail(permit=self._change(permit, tail_nodes=kept)))

    def tail_moved(self, event: e.TailMoved) -> None:
        permit = self._state.permits.get(event.permit)
        if permit is None or permit.job != event.job or not permit.tail_nodes or permit.tail_moved:
            return
        for node_id in permit.nodes:
            if node_id not in permit.tail_nodes:
                self._free(node_id)
        self._change(permit, nodes=permit.tail_nodes)
        self.grant(self._group(self._state.jobs[permit.job]))

    def grant(self, group: JobGroup) -> None:
        """Begin every time slice that is due. Set a deadline for a job that others wait for and that has not asked."""
        for job, member in group.members.items():
            record = self._state.jobs[job]
            if record.asked is None or not self._takes_part(job, group):
                continue
            phase, both = record.asked, record.asked_both
            nodes = member.nodes if phase is _ROLLOUT else (*member.nodes, *group.train) if both else group.train
            before = self._before(group, job, phase, nodes)
            if before:
                self._wait_for(group, before)
                continue
            free = tuple(node for node in nodes if self._state.nodes[node].permit is None)
            if len(free) == len(nodes) or (free and not both and self._only_tails(nodes)):
                self._begin(record, member, phase, free)
        self._widen(group)

    def _before(self, group: JobGroup, job: JobId, phase: PhaseKind, nodes: Iterable[NodeId]) -> list[JobId]:
        """Return the members whose time slice on one of these nodes comes before the job's. A tail counts as over."""
        mine, found, passed = self._state.jobs[job], list[JobId](), False
        own, rolled_out, wanted = mine.slices[phase], mine.slices[_ROLLOUT], set(nodes)
        for other, member in group.members.items():
            if other == job:
                passed = True
                continue
            record = self._state.jobs[other]
            shares = not wanted.isdisjoint(member.nodes)
            if not self._takes_part(other, group) or (phase is _ROLLOUT and not shares):
                continue
            had = record.slices[phase]
            if record.permit is not None:
                permit = self._state.permits[record.permit]
                had += int(bool(permit.tail_nodes) and permit.nodes == permit.tail_nodes and permit.phase is phase)
            rolls_out_first = mine.asked_both and shares and record.slices[_ROLLOUT] < rolled_out
            closes_rollouts = phase is _ROLLOUT and record.asked_both and record.slices[_TRAIN] < own
            if had < own or (had == own and not passed) or rolls_out_first or closes_rollouts:
                found.append(other)
        return found

    def _wait_for(self, group: JobGroup, before: Iterable[JobId]) -> None:
        for job in before:
            record = self._state.jobs[job]
            if record.asked is None and record.permit is None and not self._timers.waiting("time slice", job):
                member, slices = group.members[job], record.slices
                due = _TRAIN if slices[_ROLLOUT] > slices[_TRAIN] else _ROLLOUT
                late_ns = 0 if due in record.down else member.sync_ns + int(self._limits.late_share * member.solo_ns)
                self._timers.set("time slice", job, self._state.now_ns, late_ns)

    def _only_tails(self, nodes: Iterable[NodeId]) -> bool:
        held = [permit for node in nodes if (permit := self._state.nodes[node].permit) is not None]
        return all(self._state.permits[number].tail_moved for number in held)

    def _begin(self, record: JobRecord, member: PlannedMember, phase: PhaseKind, nodes: tuple[NodeId, ...]) -> None:
        state, job, now_ns = self._state, record.request.id, self._state.now_ns
        state.permit_numbers += 1
        number, both = state.permit_numbers, record.asked_both
        # A phase with both pools is not planned: it has as long as a step alone, which no cycle is shorter than.
        planned_ns = member.alone_ns if both else member.rollout_ns if phase is _ROLLOUT else member.train_ns
        length_ns = planned_ns + int(self._limits.overrun_share * planned_ns)
        warmed = [cold for cold in record.cold if both or cold is phase]
        record.began_cold = bool(warmed)
        if warmed:
            record.cold = [cold for cold in record.cold if cold not in warmed]
            length_ns += record.request.moving_ns if _ROLLOUT in warmed else record.request.restart_ns
            length_ns += record.patience_ns
        deadline_ns = now_ns + length_ns
        permit = Permit(
            number=number, job=job, phase=phase, nodes=nodes, since_ns=now_ns, deadline_ns=deadline_ns, both=both
        )
        state.permits[number] = permit
        record.permit, record.asked, record.asked_both = number, None, False
        for node in nodes:
            self._hold(node, permit)
        self._timers.set("permit", str(number), now_ns, length_ns)
        self._emit(c.GrantPermit(permit=permit))

    def _widen(self, group: JobGroup) -> None:
        """Give a tail's nodes, once they are free, to the job that began beside the tail."""
        for job, member in group.members.items():
            number = self._state.jobs[job].permit if self._takes_part(job, group) else None
            permit = None if number is None else self._state.permits[number]
            if permit is None or permit.phase is not _ROLLOUT or permit.tail_nodes or permit.recalled:
                continue
            more = [
                node for node in member.nodes if node not in permit.nodes and self._state.nodes[node].permit is None
            ]
            if more:
                nodes = tuple(node for node in member.nodes if node in permit.nodes or node in more)
                for node in more:
                    self._hold(node, permit)
                self._emit(c.GrantPermit(permit=self._change(permit, nodes=nodes)))

    def _change(self, permit: Permit, **changes: Any) -> Permit:
        changed = self._state.permits[permit.number] = msgspec.structs.replace(permit, **changes)
        return changed

    def _hold(self, node_id: NodeId, permit: Permit) -> None:
        node = self._state.nodes[node_id]
        node.permit = permit.number
        self._books.turn_to(node, DeviceAccount.SLICE, permit.job)

    def _free(self, node_id: NodeId) -> None:
        node = self._state.nodes.get(node_id)
        if node is not None:
            node.permit = None
            self._books.turn_to(node, DeviceAccount.IDLE)

    def _end(self, permit: Permit) -> None:
        del self._state.permits[permit.number]
        self._state.jobs[permit.job].permit = None
        for what in ("permit", "yield"):
            self._timers.clear(what, str(permit.number))
        for node in permit.nodes:
            self._free(node)

    def _first_waiting(self, group: JobGroup, job: JobId, nodes: Iterable[NodeId]) -> PlannedMember | None:
        """Return the first member that waits for one of these nodes with its rollout."""
        wanted = set(nodes)
        for other, member in group.members.items():
            if other == job or not self._takes_part(other, group) or wanted.isdisjoint(member.nodes):
                continue
            if self._state.jobs[other].asked is _ROLLOUT:
                return member
        return None

    def _takes_part(self, job: JobId, group: JobGroup) -> bool:
        """Return whether the job runs in this group, not only has a reserved place there."""
        record = self._state.jobs[job]
        return bool(record.slices) and record.seat is not None and record.seat.group == group.name

    def _group(self, record: JobRecord) -> JobGroup:
        assert record.seat is not None
        return self._state.groups[record.seat.group]

    def resume(self, name: GroupName) -> None:
        """Grant time slices that may have become due after a change of the group."""
        if name in self._state.groups:
            self.grant(self._state.groups[name])


def _phases(permit: Permit) -> Iterable[PhaseKind]:
    """Return the phases whose residents compute under this permit."""
    return PhaseKind if permit.both else (permit.phase,)
