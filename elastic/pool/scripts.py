"""Scripts: jobs that compute in a process of their own, on the first of their training nodes.

A script computes as soon as it is told of a permit, and parks by itself, so that no node agent can tell whether it has
left a rollout node. What it was given counts as used until it yields, says at a dial that it holds nothing, or is dead.
"""

from collections.abc import Collection, Mapping

import msgspec

from elastic.core.cluster.types import JobId, NodeId
from elastic.pool import messages as w
from elastic.pool.holdings import PoolHoldings, PoolRoom


class ScriptUse(msgspec.Struct, kw_only=True):
    """What a script has.

    `uses`: the nodes that it was given and has not left. `presumed`: the node on which its process is believed to be
    until its node agent has joined. `ends`: why the process is to end then.
    """

    uses: set[NodeId] = set()
    presumed: NodeId = ""
    ends: str = ""


class PoolScripts(PoolRoom):
    """The processes of scripts, and the nodes that they use."""

    def __init__(self, pool: PoolHoldings) -> None:
        super().__init__(pool)
        self._jobs = pool.records(ScriptUse)

    def use(self, job: JobId, name: NodeId) -> None:
        self._jobs[job].uses.add(name)

    def keep(self, job: JobId, nodes: Collection[NodeId]) -> None:
        """Note that the job has left all nodes but these."""
        self._jobs[job].uses &= {*nodes}

    def presumed_on(self, name: NodeId) -> list[JobId]:
        """Return the scripts whose processes are believed to be on this node."""
        return [job for job, script in self._jobs.items() if script.presumed == name]

    def presume(self, node_agents: Mapping[NodeId, bool]) -> None:
        """Take scripts to live wherever their node's agent does, and to use all their nodes, until they are
        heard."""
        for job, record in self._cluster.jobs.items():
            if record.seat is None or not self._pool.is_script(job):
                continue
            train = self._cluster.groups[record.seat.group].train
            if node_agents.get(train[0]):
                self._pool.jobs[job].process = record.placement
                self._jobs[job] = ScriptUse(uses={*record.seat.rollout, *train}, presumed=train[0])

    def adopted(self, job: JobId) -> None:
        """Note that the node agent of its node has it. It has to dial soon."""
        script = self._jobs[job]
        script.presumed = ""
        self._pool.jobs[job].told_stop = False
        self._pool.wait("script", job, self._times.node_agent_start_ns)
        if script.ends:
            self.end(job, script.ends, 0.0)

    def never_was(self, job: JobId) -> None:
        """Note that there is no process of this script."""
        self._pool.jobs[job].process_ended()
        self._jobs[job] = ScriptUse()

    def gone(self, job: JobId) -> None:
        self._jobs[job] = ScriptUse()
        self._timers.clear("script", job)

    def lost(self, node: NodeId) -> None:
        """Note that the node's agent has not come back, and no script that it might have had."""
        for job in self.presumed_on(node):
            self.never_was(job)

    def joined(self, hello: w.JobHello) -> None:
        """Take in what a script that has dialled says it holds. It is ended where that permit counts no more."""
        permit = self._cluster.permits.get(hello.held)
        self._timers.clear("script", hello.job)
        if not hello.held or permit is not None:
            self.keep(hello.job, () if permit is None else permit.nodes)
        else:
            self.end(hello.job, f"permit {hello.held} counts no more, and it has not parked", 0.0)

    def overdue(self, job: JobId) -> None:
        """End a script that has not dialled a process of the pool that has come back: nobody knows what it holds."""
        if not self._pool.jobs[job].connected:
            self.end(job, "it did not come back to the pool", 0.0)

    def end(self, job: JobId, reason: str, grace_s: float) -> None:
        """Have the script's process killed; with `grace_s` seconds it is asked to end before."""
        script = self._jobs[job]
        if script.presumed and not grace_s:
            script.ends = reason or "it is to end"
        for name, node in self._nodes.items():
            resident = node.residents.get(job)
            if resident is not None and (not resident.ending or not grace_s):
                resident.ending = not grace_s
                self._ports.send_to_node_agent(name, w.EndResident(job, reason or "it is to end", grace_s))

    def are_on(self, name: NodeId, but: JobId) -> bool:
        """Return whether another job's script uses this node."""
        scripts, live = self._jobs.items(), self._pool.jobs
        return any(name in script.uses and live[job].process is not None for job, script in scripts if job != but)

    def must_wait(self, name: NodeId, job: JobId) -> bool:
        """Return whether any other job has this node's device still, so that the script may not compute there."""
        node = self._nodes.get(name)
        residents = {} if node is None else node.residents
        return self.are_on(name, job) or any(one.permit for other, one in residents.items() if other != job)
