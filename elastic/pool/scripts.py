"""Scripts: jobs that compute in a process of their own, on the first of their training nodes.

A script computes as soon as it is told of a permit, and parks by itself, so that no keeper can tell whether it has left
a rollout node. What it was given counts as used until it yields, says at a dial that it holds nothing, or is dead.
"""

from collections.abc import Mapping

from elastic.core.cluster.types import JobId, NodeId
from elastic.pool import messages as w
from elastic.pool.holdings import LiveJob, PoolHoldings


class PoolScripts:
    """The processes of scripts, and the nodes that they use."""

    def __init__(self, pool: PoolHoldings) -> None:
        self._pool = pool

    def presume(self, keepers: Mapping[NodeId, bool]) -> None:
        """Take scripts to live wherever their node's keeper does, and to use all their nodes, until they are heard."""
        for job, record in self._pool.cluster.jobs.items():
            if record.seat is None or not self._pool.is_script(job):
                continue
            train = self._pool.cluster.groups[record.seat.group].train
            if keepers.get(train[0]):
                live = self._pool.job(job)
                live.process, live.presumed, live.uses = record.placement, train[0], {*record.seat.rollout, *train}

    def adopted(self, job: JobId) -> None:
        """Note that the keeper of its node has it. It has to dial soon."""
        live = self._pool.job(job)
        live.told_stop = False
        self._pool.timers.set("script", job, self._pool.ports.now_ns(), self._pool.times.keeper_start_ns)
        if live.ends:
            self.end(job, live.ends, 0.0)

    def never_was(self, live: LiveJob) -> None:
        """Note that there is no process of this script."""
        live.process_ended()
        live.presumed, live.ends = "", ""
        live.uses.clear()

    def gone(self, job: JobId) -> None:
        live = self._pool.job(job)
        live.ends = ""
        live.uses.clear()
        self._pool.timers.clear("script", job)

    def lost(self, node: NodeId) -> None:
        """Note that the node's keeper has not come back, and no script that it might have had."""
        for live in self._pool.jobs.values():
            if live.presumed == node:
                self.never_was(live)

    def joined(self, hello: w.JobHello) -> None:
        """Take in what a script that has dialled says it holds. It is ended where that permit counts no more."""
        live, permit = self._pool.job(hello.job), self._pool.cluster.permits.get(hello.held)
        self._pool.timers.clear("script", hello.job)
        if not hello.held or permit is not None:
            live.uses &= {*permit.nodes} if permit is not None else set()
        else:
            self.end(hello.job, f"permit {hello.held} counts no more, and it has not parked", 0.0)

    def overdue(self, job: JobId) -> None:
        """End a script that has not dialled a process of the pool that has come back: nobody knows what it holds."""
        if not self._pool.job(job).connected:
            self.end(job, "it did not come back to the pool", 0.0)

    def end(self, job: JobId, reason: str, grace_s: float) -> None:
        """Have the script's process killed; with `grace_s` seconds it is asked to end before."""
        live = self._pool.job(job)
        if live.presumed and not grace_s:
            live.ends = reason or "it is to end"
        for name, node in self._pool.nodes.items():
            resident = node.residents.get(job)
            if resident is not None and (not resident.ending or not grace_s):
                resident.ending = not grace_s
                self._pool.ports.tell_keeper(name, w.EndResident(job, reason or "it is to end", grace_s))

    def are_on(self, name: NodeId, but: JobId) -> bool:
        """Return whether another job's script uses this node."""
        jobs = self._pool.jobs.items()
        return any(name in live.uses and live.process is not None for job, live in jobs if job != but)

    def must_wait(self, name: NodeId, job: JobId) -> bool:
        """Return whether any other job has this node's device still, so that the script may not compute there."""
        node = self._pool.nodes.get(name)
        residents = {} if node is None else node.residents
        return self.are_on(name, job) or any(one.permit for other, one in residents.items() if other != job)
