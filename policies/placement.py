"""Which group a job joins, on which nodes, and which running jobs move: compositions of small rules.

`PlacementRules` is all of them. Its fields tell what a group must keep (saturation, SLOs), how long a group's cycle
lasts, which of the possible places is chosen, and whether jobs move. Its subclasses are the compositions, from Weave's
Algorithm 1 to the baselines of the papers, of which "can accommodate" is taken to mean host memory alone.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from elastic.core.cluster.cycle import cycle_ns, whole_jobs_ns
from elastic.core.cluster.groups import CycleModel, JobGroup, PlannedMember, planned
from elastic.core.cluster.policy import PlacementChoice, PlacementRefusal, PoolView, Relocation
from elastic.core.cluster.types import GroupName, JobRequest, Nanoseconds, NodeId, NodeKind, PhaseKind, price_of
from elastic.core.types import NS_PER_S
from policies.regrouping import GrowingView, Newcomer, brought_together
from policies.repartitioning import formed_anew

ChooserName: TypeAlias = Literal["first_cheapest", "tightest", "drawn", "idlest"]
Chooser: TypeAlias = Callable[[Iterator[PlacementChoice], PoolView, JobRequest], PlacementChoice | None]


def first_cheapest(choices: Iterator[PlacementChoice], pool: PoolView, request: JobRequest) -> PlacementChoice | None:
    """Return the choice of least marginal cost; the first among equals, as in Algorithm 1."""
    best: PlacementChoice | None = None
    for choice in choices:
        if best is None or choice.marginal_nano_usd_per_hour < best.marginal_nano_usd_per_hour:
            best = choice
            if best.marginal_nano_usd_per_hour == 0:
                break
    return best


def tightest(choices: Iterator[PlacementChoice], pool: PoolView, request: JobRequest) -> PlacementChoice | None:
    """Return the choice of least marginal cost; among equals the group that lives longest anyway, then the least
    slack."""
    best: PlacementChoice | None = None
    best_key: tuple[int, int, int] | None = None
    for choice in choices:
        if best_key is not None and choice.marginal_nano_usd_per_hour > best_key[0]:
            continue
        key = (choice.marginal_nano_usd_per_hour, *_extension_and_slack(choice, pool, request))
        if best_key is None or key < best_key:
            best, best_key = choice, key
    return best


def _extension_and_slack(choice: PlacementChoice, pool: PoolView, request: JobRequest) -> tuple[int, int]:
    if choice.group is None:
        return 0, 0
    group = pool.groups[choice.group]
    lasts_ns = max(pool.remaining_ns(job) for job in group.members)
    own_ns = request.steps * choice.cycle_ns
    return max(0, own_ns - lasts_ns), group.limit_ns - choice.cycle_ns


def drawn(choices: Iterator[PlacementChoice], pool: PoolView, request: JobRequest) -> PlacementChoice | None:
    """Return a pseudo-random choice, determined by the number of arrivals."""
    possible = list(choices)
    if not possible:
        return None
    by_group: dict[str, list[PlacementChoice]] = {}
    for choice in possible:
        by_group.setdefault(choice.group or "", []).append(choice)
    groups = list(by_group.values())
    draw = scrambled(pool.arrivals)
    return (places := groups[draw % len(groups)])[scrambled(draw) % len(places)]


def idlest(choices: Iterator[PlacementChoice], pool: PoolView, request: JobRequest) -> PlacementChoice | None:
    """Return the group with the largest share of idle time, with its idlest nodes; a new group if there is no other."""

    def busy(choice: PlacementChoice) -> tuple[float, int]:
        if choice.group is None:
            return 2.0, 0
        group = pool.groups[choice.group]
        nodes = len(group.rollout) + len(group.train)
        used_ns = sum(group.rollout_ns.values()) + group.train_ns * len(group.train)
        return used_ns / (nodes * group.cycle_ns), sum(group.rollout_ns[node] for node in choice.rollout)

    return min(choices, key=busy, default=None)


CHOOSERS: Mapping[ChooserName, Chooser] = {
    "first_cheapest": first_cheapest,
    "tightest": tightest,
    "drawn": drawn,
    "idlest": idlest,
}


def scrambled(number: int) -> int:
    """Return a pseudo-random number for an integer (splitmix64)."""
    number = (number + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return number ^ (number >> 31)


@dataclass(frozen=True, slots=True)
class PlacementRules:
    """A placement policy.

    - `choose`: which of the possible places a job gets.
    - `whole_jobs`: jobs take turns by whole steps, so a group's cycle is the sum of its members' steps.
    - `shares`: jobs may join other jobs. `saturation`: no saturated group takes another job (Weave §4.2).
    - `keeps_slos`: no planned cycle exceeds what a member accepts. `scales`: a group may grow by rollout nodes.
    - `fullest_first`: of a group's rollout nodes the fullest sufficient one is tried first, else the first one.
    - `moves`: running jobs are brought together, if that pays within their remaining time.
    """

    choose: ChooserName = "first_cheapest"
    whole_jobs: bool = False
    shares: bool = True
    saturation: bool = False
    keeps_slos: bool = True
    scales: bool = True
    fullest_first: bool = False
    moves: bool = False

    @property
    def cycle(self) -> CycleModel:
        return whole_jobs_ns if self.whole_jobs else cycle_ns

    def place(self, request: JobRequest, pool: PoolView) -> PlacementChoice | None:
        return CHOOSERS[self.choose](self._choices(request, pool), pool, request)

    def refusals(self, request: JobRequest, pool: PoolView) -> list[PlacementRefusal]:
        newcomer = Newcomer(request)
        return [
            self._refusal(request, group, pool)
            for group in pool.groups.values()
            if not self.shares or next(self.ways_into(group, newcomer, pool), None) is None
        ]

    def relocations(self, pool: PoolView, changed: Sequence[GroupName]) -> Sequence[Relocation]:
        if not self.moves:
            return ()
        return formed_anew(self, pool, changed) or brought_together(self, pool, changed)

    def _choices(self, request: JobRequest, pool: PoolView) -> Iterator[PlacementChoice]:
        if self.shares:
            newcomer = Newcomer(request)
            for group in pool.groups.values():
                yield from self.ways_into(group, newcomer, pool)
        alone = self.alone(request, pool)
        if alone is not None:
            yield alone

    def alone(self, request: JobRequest, pool: PoolView) -> PlacementChoice | None:
        found = pool.spec.alone(request, pool.free)
        if found is None:
            return None
        rollout, train = found
        return PlacementChoice(
            group=None,
            new=_names(rollout),
            train=_names(train),
            marginal_nano_usd_per_hour=price_of((*rollout, *train)),
            cycle_ns=request.alone_ns,
        )

    def ways_into(self, group: JobGroup, newcomer: Newcomer, pool: GrowingView) -> Iterator[PlacementChoice]:
        """Yield placements in the group that keep the rules: direct packing, else with the fewest new nodes."""
        if not group.members or (self.keeps_slos and group.cycle_ns > newcomer.limit_ns):
            return
        train = pool.kind(group.train[0])
        member, alone_ns = newcomer.planned(len(group.train), train)
        bound_ns = _bound_ns(group, newcomer, pool)
        if self.keeps_slos and (group.train_ns + member.train_ns > bound_ns or alone_ns > bound_ns):
            return
        if group.train_bytes + member.train_bytes > train.memory_bytes or not newcomer.request.fits(
            train, PhaseKind.TRAIN
        ):
            return
        if self.saturation and group.saturated:
            return
        if group.single and newcomer.rollout_nodes == 1 and not member.sync_ns and self.cycle is cycle_ns:
            yield from self._single(group, member, newcomer.request, pool, bound_ns)
        else:
            yield from self._several(group, member, newcomer.request, pool, bound_ns)

    def _single(
        self, group: JobGroup, member: PlannedMember, request: JobRequest, pool: GrowingView, bound_ns: Nanoseconds
    ) -> Iterator[PlacementChoice]:
        """Yield placements with one rollout node per member: the cycle is the largest of a few sums."""
        least_ns = max(group.cycle_ns, member.alone_ns, group.train_ns + member.train_ns)
        found = False
        for node in self._nodes(group):
            lasts_ns = max(least_ns, group.rollout_ns[node] + member.rollout_ns)
            if _holds(group, node, request, pool) and (lasts_ns <= bound_ns or not self.keeps_slos):
                found = True
                yield PlacementChoice(group=group.name, rollout=(node,), cycle_ns=lasts_ns)
        if self.scales and (not found or not self.keeps_slos):
            new = pool.spec.new_rollout(request, 1, pool.free, pool.kind(group.train[0]).site)
            if new is not None:
                yield PlacementChoice(
                    group=group.name,
                    new=_names(new),
                    marginal_nano_usd_per_hour=price_of(new),
                    cycle_ns=least_ns,
                )

    def _several(
        self, group: JobGroup, member: PlannedMember, request: JobRequest, pool: GrowingView, bound_ns: Nanoseconds
    ) -> Iterator[PlacementChoice]:
        """Yield placements on the idlest nodes with enough memory, and with as few new nodes as suffice."""
        with_memory = [node for node in group.rollout if _holds(group, node, request, pool)]
        with_memory.sort(key=lambda node: group.rollout_ns[node])
        wanted, site = request.rollout_nodes, pool.kind(group.train[0]).site
        for count in range(max(0, wanted - len(with_memory)), wanted + 1 if self.scales else 1):
            new = pool.spec.new_rollout(request, count, pool.free, site)
            if new is None:
                return
            kept = tuple(with_memory[: wanted - count])
            member.nodes = (*kept, *(f"new-{i}" for i in range(count)))
            lasts_ns = self.cycle([*group.members.values(), member])
            if lasts_ns <= bound_ns or not self.keeps_slos:
                yield PlacementChoice(
                    group=group.name,
                    rollout=kept,
                    new=_names(new),
                    marginal_nano_usd_per_hour=price_of(new),
                    cycle_ns=lasts_ns,
                )
                return

    def _nodes(self, group: JobGroup) -> Sequence[NodeId]:
        if not self.fullest_first or len(group.rollout) == 1:
            return group.rollout
        return sorted(group.rollout, key=lambda node: -group.rollout_ns[node])

    def _refusal(self, request: JobRequest, group: JobGroup, pool: PoolView) -> PlacementRefusal:
        """Return the first obstacle."""
        train = pool.kind(group.train[0])
        member = planned(request, len(group.train), train)
        trains_ns, bound_ns = group.train_ns + member.train_ns, min(group.limit_ns, request.limit_ns)
        started_ns = bound_ns - _bound_ns(group, Newcomer(request), pool)
        emptiest = max(group.rollout, key=lambda node: pool.kind(node).memory_bytes - group.rollout_bytes[node])
        tests = (
            ("it is saturated: load, s", group.load_ns / NS_PER_S, group.longest_ns / NS_PER_S, self.saturation),
            (
                "host memory of a training node, bytes",
                group.train_bytes + member.train_bytes,
                train.memory_bytes,
                True,
            ),
            (
                "its cycle is longer than the job bears, s",
                group.cycle_ns / NS_PER_S,
                request.limit_ns / NS_PER_S,
                self.keeps_slos,
            ),
            (
                "the job's own step is longer than a member bears, s",
                member.alone_ns / NS_PER_S,
                group.limit_ns / NS_PER_S,
                self.keeps_slos,
            ),
            (
                "training in a cycle, s",
                trains_ns / NS_PER_S,
                bound_ns / NS_PER_S,
                self.keeps_slos,
            ),
            (
                "a cycle, with the job's cold start spread over a member's steps, s",
                (max(group.cycle_ns, member.alone_ns, trains_ns) + started_ns) / NS_PER_S,
                bound_ns / NS_PER_S,
                self.keeps_slos and request.first_ns > 0,
            ),
            (
                "GPUs of its largest rollout node",
                request.rollout_gpus,
                max(pool.kind(node).gpus for node in group.rollout),
                not self.scales,
            ),
            (
                "host memory of its emptiest rollout node, bytes",
                group.rollout_bytes[emptiest] + member.rollout_bytes,
                pool.kind(emptiest).memory_bytes,
                not self.scales,
            ),
        )
        for reason, needed, allowed, counts in tests:
            if counts and (needed >= allowed if "saturated" in reason else needed > allowed):
                return PlacementRefusal(group.name, reason, needed, allowed)
        if not self.shares:
            return PlacementRefusal(group.name, "jobs share nothing, members", len(group.members) + 1, 1)
        return PlacementRefusal(
            group.name,
            "rollout nodes, with the free ones",
            request.rollout_nodes,
            sum(pool.free(kind.name) for kind in pool.spec.rollout if request.fits(kind, PhaseKind.ROLLOUT)),
        )


def _bound_ns(group: JobGroup, newcomer: Newcomer, pool: GrowingView) -> Nanoseconds:
    """Return the longest cycle that all bear with the newcomer. The members also wait for its cold start, which is
    spread over the steps that they have left."""
    bound_ns, first_ns = min(group.limit_ns, newcomer.limit_ns), newcomer.request.first_ns
    if not first_ns:
        return bound_ns
    waited_ns = (member.limit_ns - -(-first_ns // pool.steps_left(job)) for job, member in group.members.items())
    return min(bound_ns, *waited_ns)


def _names(kinds: Sequence[NodeKind]) -> tuple[str, ...]:
    return tuple(kind.name for kind in kinds)


def _holds(group: JobGroup, node: NodeId, request: JobRequest, pool: GrowingView) -> bool:
    """Whether a rollout node of the group has the GPUs of the job's worker, and host memory for its state."""
    kind = pool.kind(node)
    return request.rollout_gpus <= kind.gpus and group.rollout_bytes[node] + request.rollout_bytes <= kind.memory_bytes


@dataclass(frozen=True, slots=True)
class Solo(PlacementRules):
    """Places each job alone."""

    shares: bool = False


@dataclass(frozen=True, slots=True)
class Gavel(PlacementRules):
    """Has jobs take turns by whole steps."""

    whole_jobs: bool = True
    scales: bool = False


@dataclass(frozen=True, slots=True)
class Naive(PlacementRules):
    """Places a job in the first group that has the memory, without a plan."""

    keeps_slos: bool = False
    scales: bool = False


@dataclass(frozen=True, slots=True)
class Random(PlacementRules):
    """Places a job at random, wherever there is the memory."""

    choose: ChooserName = "drawn"
    keeps_slos: bool = False


@dataclass(frozen=True, slots=True)
class MostIdle(PlacementRules):
    """Places a job in the group with the largest share of idle time that has the memory."""

    choose: ChooserName = "idlest"
    keeps_slos: bool = False


@dataclass(frozen=True, slots=True)
class Weave(PlacementRules):
    """Places jobs by Weave's Algorithm 1, as printed."""

    saturation: bool = True


@dataclass(frozen=True, slots=True)
class Tightest(PlacementRules):
    """Chooses the fullest of the cheapest places that let a group end no later, and brings jobs together when others
    leave, where that pays for the restart. It has no saturation test."""

    choose: ChooserName = "tightest"
    fullest_first: bool = True
    moves: bool = True


@dataclass(frozen=True, slots=True)
class TightestWithoutMoves(Tightest):
    """As `Tightest`, but a job stays where it was placed."""

    moves: bool = False


PLACEMENTS: Mapping[str, PlacementRules] = {
    "solo": Solo(),
    "gavel": Gavel(),
    "naive": Naive(),
    "random": Random(),
    "most_idle": MostIdle(),
    "weave": Weave(),
    "ours": Tightest(),
    "ours_without_moves": TightestWithoutMoves(),
}
