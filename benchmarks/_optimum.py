"""The least-cost partition of jobs into groups, proved by a solver, and a lower bound where that is too much.

For jobs that ask for one rollout and one training node each, without synchronisation: a group's cycle is then the
largest of a few sums, and its cost its training node and the fewest rollout nodes into which its rollouts fit.
"""

from collections.abc import Iterable, Mapping, Sequence

import highspy
import msgspec
import numpy as np

from elastic.core.cluster import JobRequest, PoolSpec
from elastic.core.cluster.types import JobId, PhaseKind


class Optimum(msgspec.Struct, frozen=True):
    """What an hour of the best groups costs. Not `proven`: a lower bound, which is never called an optimum."""

    nano_usd_per_hour: int
    proven: bool
    groups: tuple[tuple[JobId, ...], ...] = ()


class Optimiser:
    """Partitions of one workload's jobs. `saturation`: groups only whose cycle is their longest member's own step."""

    def __init__(self, jobs: Mapping[JobId, JobRequest], spec: PoolSpec, *, saturation: bool, jobs_max: int) -> None:
        self._jobs, self._spec, self._saturation, self._jobs_max = jobs, spec, saturation, jobs_max
        self._costs: dict[tuple[JobId, ...], int | None] = {}
        self._known: dict[frozenset[JobId], Optimum] = {}
        for request in jobs.values():
            assert request.rollout_nodes == request.train_nodes == 1
            assert request.plan is not None
            assert not request.plan.sync_ns

    def of(self, active: frozenset[JobId]) -> Optimum:
        found = self._known.get(active)
        if found is None:
            if len(active) > self._jobs_max:
                found = Optimum(self.bound(active), proven=False)
            else:
                found = self._solved(sorted(active))
            self._known[active] = found
        return found

    def cost(self, group: tuple[JobId, ...]) -> int | None:
        """Of an hour of a group with these members; None where a member's SLO or a node's memory forbids it."""
        if group not in self._costs:
            self._costs[group] = self._cost(group)
        return self._costs[group]

    def _cost(self, group: tuple[JobId, ...]) -> int | None:
        requests = [self._jobs[job] for job in group]
        spec = self._spec
        longest_ns = max(request.alone_ns for request in requests)
        limit_ns = min(request.limit_ns for request in requests)
        capacity_ns = longest_ns if self._saturation else limit_ns
        if longest_ns > limit_ns or sum(map(_train_ns, requests)) > capacity_ns:
            return None
        if sum(request.train_bytes for request in requests) > spec.train[0].memory_bytes:
            return None
        items = sorted(((_rollout_ns(request), request.rollout_bytes) for request in requests), reverse=True)
        nodes = fewest_nodes(tuple(items), capacity_ns, spec.rollout[0].memory_bytes)
        return spec.train[0].nano_usd_per_hour + nodes * spec.rollout[0].nano_usd_per_hour

    def groups(self, active: Sequence[JobId]) -> list[tuple[tuple[JobId, ...], int]]:
        """Every group that may be. A group that may not be has no larger one: each job only adds."""
        found: list[tuple[tuple[JobId, ...], int]] = []
        smaller: list[tuple[JobId, ...]] = [()]
        while smaller:
            larger: list[tuple[JobId, ...]] = []
            for group in smaller:
                first = active.index(group[-1]) + 1 if group else 0
                for job in active[first:]:
                    grown = (*group, job)
                    if (cost := self.cost(grown)) is not None:
                        found.append((grown, cost))
                    if cost is not None or self._saturation:
                        larger.append(grown)
            smaller = larger if not smaller[0] or len(smaller[0]) + 1 < self._spec.train[0].memory_bytes else []
        return found

    def _solved(self, active: Sequence[JobId]) -> Optimum:
        if not active:
            return Optimum(0, proven=True)
        groups = self.groups(active)
        solver = highspy.Highs()
        solver.setOptionValue("output_flag", False)
        solver.setOptionValue("mip_rel_gap", 0.0)
        for _, cost in groups:
            solver.addBinary(obj=cost / 1e9)
        for job in active:
            columns = np.array([i for i, (group, _) in enumerate(groups) if job in group], dtype=np.int32)
            solver.addRow(1.0, 1.0, len(columns), columns, np.ones(len(columns)))
        solver.minimize()
        proven = solver.getModelStatus() == highspy.HighsModelStatus.kOptimal
        if not proven:
            return Optimum(self.bound(active), proven=False)
        values = solver.getSolution().col_value
        chosen = [each for value, each in zip(values, groups, strict=True) if value > 0.5]
        return Optimum(sum(cost for _, cost in chosen), proven=True, groups=tuple(group for group, _ in chosen))

    def bound(self, active: Iterable[JobId]) -> int:
        """No partition costs less: a job that keeps its SLO needs so much of a node's time, and nodes are whole."""
        rollout = train = 0.0
        for job in active:
            request = self._jobs[job]
            rollout += _rollout_ns(request) / request.limit_ns
            train += _train_ns(request) / request.limit_ns
        whole = (-int(-share // 1) for share in (rollout - 1e-9, train - 1e-9))
        prices = (self._spec.rollout[0].nano_usd_per_hour, self._spec.train[0].nano_usd_per_hour)
        return sum(max(1, nodes) * price for nodes, price in zip(whole, prices, strict=True))


def fewest_nodes(items: tuple[tuple[int, int], ...], capacity_ns: int, memory_bytes: int) -> int:
    """Nodes into which rollouts fit by time and memory, the longest first; every way of packing them is tried."""

    def packed(at: int, nodes: tuple[tuple[int, int], ...], best: int) -> int:
        if len(nodes) >= best:
            return best
        if at == len(items):
            return len(nodes)
        ns, host_bytes = items[at]
        for i, (used_ns, used_bytes) in enumerate(nodes):
            if nodes[i] not in nodes[:i] and used_ns + ns <= capacity_ns and used_bytes + host_bytes <= memory_bytes:
                grown = (*nodes[:i], (used_ns + ns, used_bytes + host_bytes), *nodes[i + 1 :])
                best = packed(at + 1, grown, best)
        return packed(at + 1, (*nodes, (ns, host_bytes)), best)

    return packed(0, (), len(items) + 1)


def _rollout_ns(request: JobRequest) -> int:
    assert request.plan is not None
    return request.plan.rollout_ns + request.plan.switching_ns(PhaseKind.ROLLOUT)


def _train_ns(request: JobRequest) -> int:
    assert request.plan is not None
    return request.plan.train_ns + request.plan.switching_ns(PhaseKind.TRAIN)
