"""Which job no longer fits where it was placed."""

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from elastic.core.cluster.cycle import cycle_ns
from elastic.core.cluster.groups import JobGroup, PlannedMember
from elastic.core.cluster.types import JobId, Nanoseconds


@dataclass(frozen=True, slots=True)
class NoDrift:
    """No job moves for drift."""

    def strays(self, group: JobGroup, measured: Mapping[JobId, tuple[Nanoseconds, Nanoseconds]]) -> JobId | None:
        return None


@dataclass(frozen=True, slots=True)
class SloAtStake:
    """Moves a member if the group's cycle, at the measured phases, is longer than a member accepts.

    The member whose phases have grown most moves. A member without measurements counts as planned. Source: Weave §5.3.
    """

    def strays(self, group: JobGroup, measured: Mapping[JobId, tuple[Nanoseconds, Nanoseconds]]) -> JobId | None:
        if len(group.members) < 2:
            return None
        as_measured = [_as_measured(member, measured.get(member.job)) for member in group.members.values()]
        if cycle_ns(as_measured) <= group.limit_ns:
            return None
        grown = {now.job: now.alone_ns - group.members[now.job].alone_ns for now in as_measured}
        job = max(grown, key=lambda job: grown[job])
        return job if grown[job] > 0 else None


def _as_measured(member: PlannedMember, phases: tuple[Nanoseconds, Nanoseconds] | None) -> PlannedMember:
    if phases is None:
        return member
    rollout_ns, train_ns = phases
    return msgspec.structs.replace(member, rollout_ns=rollout_ns, train_ns=train_ns)
