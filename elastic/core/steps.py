"""The state of a training step: the groups in play while it lasts, and the batch of them that it takes.

Source: ROSE §6 (dynamic sampling), RollArt mechanism 2 (asynchrony at the level of trajectories).
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum, auto

from elastic.core.ids import group_id, trajectory_id
from elastic.core.step_meter import StepMeter
from elastic.core.transitions import Story, take_transition
from elastic.core.types import GroupState, InfrastructureCause, Nanoseconds, TrajectoryId

CUT_OFF = "cut off: its group has as many as are wanted"
"""What becomes of a member that still runs as its group has enough: no failure, and no result."""


class BatchRule(Enum):
    """Which of the groups in play make a step's batch."""

    ALL = auto()
    """All groups launched for the step, each in its place (synchronous)."""
    AS_READY = auto()
    """Whichever finish, so that a slow one holds nothing up (asynchronous)."""
    FIRST_OF_USE = auto()
    """The first in launch order that are worth training on, so that short ones are not preferred (DAPO)."""


@dataclass(frozen=True, slots=True)
class Refill:
    """A member came in the place of another, which had failed for `cause`."""

    replaces: TrajectoryId
    cause: InfrastructureCause


@dataclass(slots=True)
class Group:
    """Trajectories from one start. `members` maps each to its reward, to the cause of its failure, or to None before
    its end.

    `step` launched the group. Its tokens are of version `version_floor` or later; `oldest_token` is the oldest version
    among the accepted tokens of its ended members. `slot` is its place in the batch of the step that trains on it.
    """

    id: str
    step: int
    index: int
    members: dict[TrajectoryId, float | str | None]
    version_floor: int = 0
    environment: str = ""
    row: int | None = None
    """The row of its environment's data, where a curriculum has chosen one."""
    wanted: int = 0
    """How many members are trained on: those that come to a reward first. 0 means all."""
    oldest_token: int | None = None
    slot: int | None = None
    state: GroupState = GroupState.RUNNING
    drop_reason: str = ""
    story: Story = field(default_factory=Story)
    by_policy: dict[TrajectoryId, dict[str, float]] = field(default_factory=dict[TrajectoryId, dict[str, float]])
    """The rewards of members whose agents name several policies, by policy."""
    newest_tokens: dict[TrajectoryId, int] = field(default_factory=dict[TrajectoryId, int])
    """By ended member, the newest version among its accepted tokens."""
    refills: dict[TrajectoryId, Refill] = field(default_factory=dict[TrajectoryId, Refill])
    """By member, how it came into the place of another one."""

    @property
    def unfinished(self) -> list[TrajectoryId]:
        return [t for t, outcome in self.members.items() if outcome is None]

    @property
    def finished(self) -> dict[TrajectoryId, float]:
        """Members that ended with a reward."""
        return {t: outcome for t, outcome in self.members.items() if isinstance(outcome, float)}

    @property
    def compared(self) -> list[list[float]]:
        """The rewards that are compared with each other: those of all members, or of each policy's members."""
        finished = self.finished
        if not self.by_policy:
            return [list(finished.values())]
        rewards: dict[str, list[float]] = {}
        for member, reward in finished.items():
            for policy, own in self.by_policy.get(member, {"": reward}).items():
                rewards.setdefault(policy, []).append(own)
        return list(rewards.values())

    @property
    def failures(self) -> list[str]:
        """Why members ended without a reward, each cause once."""
        return sorted({outcome for outcome in self.members.values() if isinstance(outcome, str)} - {CUT_OFF})

    @property
    def has_enough(self) -> bool:
        """Whether members that still run are more than are wanted."""
        return bool(self.wanted) and len(self.finished) >= self.wanted

    def times_refilled(self, trajectory: TrajectoryId) -> int:
        """How often the place of this member has been refilled."""
        times = 0
        while (refill := self.refills.get(trajectory)) is not None:
            trajectory, times = refill.replaces, times + 1
        return times

    def note_tokens(self, trajectory: TrajectoryId, oldest: int | None, newest: int | None) -> None:
        """A member has accepted tokens from version `oldest` to `newest`, or none at all."""
        if oldest is not None and newest is not None:
            self.oldest_token = oldest if self.oldest_token is None else min(self.oldest_token, oldest)
            self.newest_tokens[trajectory] = newest

    def overtaken(self, oldest_version: int) -> bool:
        """Whether all tokens of the members that came to a reward are of versions before this one."""
        newest = [self.newest_tokens[member] for member in self.finished if member in self.newest_tokens]
        return bool(newest) and max(newest) < oldest_version


class Step:
    """The training step under way. It has `size` slots; in asynchronous training it inherits groups in play."""

    def __init__(
        self,
        number: int,
        version: int,
        size: int,
        taking: BatchRule,
        minibatches: int,
        now_ns: Nanoseconds,
        inherited: Iterable[Group] = (),
    ) -> None:
        self.number = number
        self.version = version
        self.size = size
        self.taking = taking
        self.started_ns = now_ns
        self.seeding_ended_ns: Nanoseconds | None = None
        self.rollout_ended_ns: Nanoseconds | None = None
        self.updating = False
        self.launched = 0
        self.rejected = 0
        self.spared = 0
        """Groups that were worth training on, but dropped."""
        self.meter = StepMeter(now_ns)
        self.groups: dict[str, Group] = {}
        self.unended = 0
        """Trajectories of the groups that are not dropped, whose end has not come."""
        self._minibatches = minibatches
        self._free = list(range(size))
        self._group_of: dict[TrajectoryId, Group] = {}
        self._in_state: dict[GroupState, dict[str, Group]] = {state: {} for state in GroupState}
        for group in inherited:
            self._add(group)

    def begin_now(self, now_ns: Nanoseconds) -> None:
        """Count the step's time from here: it has waited for something that is no part of it."""
        self.started_ns, self.meter = now_ns, StepMeter(now_ns)

    def launch(
        self, size: int, version_floor: int, environment: str = "", wanted: int = 0, row: int | None = None
    ) -> Group:
        """One more group of this environment. So many members begin, of which as many as are `wanted` are taken."""
        n, index = self.number, self.launched
        members = dict[TrajectoryId, float | str | None].fromkeys(trajectory_id(n, index, m) for m in range(size))
        group = Group(group_id(n, index), n, index, members, version_floor, environment, row, wanted)
        self.launched += 1
        self._add(group)
        return group

    def _add(self, group: Group) -> None:
        self.groups[group.id] = group
        self.unended += len(group.unfinished)
        self._group_of |= dict.fromkeys(group.members, group)
        self._in_state[group.state][group.id] = group

    def group_of(self, trajectory: TrajectoryId) -> Group | None:
        return self._group_of.get(trajectory)

    @property
    def trajectories(self) -> int:
        """The trajectories of all groups that are or were in play."""
        return len(self._group_of)

    def end(self, group: Group, trajectory: TrajectoryId, outcome: float | str) -> None:
        """The trajectory has come to a reward, or has none for this cause."""
        group.members[trajectory] = outcome
        self.unended -= 1

    def refill(self, group: Group, replaces: TrajectoryId, cause: InfrastructureCause) -> TrajectoryId:
        """One more member for the group, in the place of one that has failed for this cause."""
        trajectory = trajectory_id(group.step, group.index, len(group.members))
        group.members[trajectory] = None
        group.refills[trajectory] = Refill(replaces, cause)
        self._group_of[trajectory] = group
        self.unended += 1
        return trajectory

    def move(self, group: Group, state: GroupState, now_ns: Nanoseconds, cause: str) -> None:
        """Change a group's state; raises `IllegalTransition` where the table forbids it."""
        take_transition(f"group {group.id}", group.state, state, group.story, now_ns, cause)
        del self._in_state[group.state][group.id]
        self._in_state[state][group.id] = group
        group.state = state

    def drop(self, group: Group, now_ns: Nanoseconds, reason: str) -> None:
        self.spared += group.state is GroupState.READY
        self.unended -= len(group.unfinished)
        self.move(group, GroupState.DROPPED, now_ns, reason)
        group.drop_reason = reason

    def reject(self, group: Group, now_ns: Nanoseconds, reason: str) -> None:
        """Drop a useless finished group. Its slot stays empty unless another group takes it."""
        self.drop(group, now_ns, reason)
        self.rejected += 1
        if self.taking is BatchRule.ALL:
            self._fill(group, group.index)
        elif self.taking is BatchRule.AS_READY and self._free:
            self._fill(group, self._free[0])

    # The batch

    def next_group(self) -> tuple[Group, int] | None:
        """The group to train on next, and its slot. The result of the step does not depend on which groups finish
        first.

        Gradients of a mini-batch are summed, so its slots are interchangeable; a group is taken as soon as its
        mini-batch is certain.
        """
        ready = self._in_state[GroupState.READY]
        if not ready or not self._free:
            return None
        if self.taking is BatchRule.FIRST_OF_USE:
            return self._first_of_use()
        group = next(iter(ready.values()))
        if self.taking is BatchRule.ALL:
            return group, group.index
        return min(ready.values(), key=lambda g: (g.step, g.index)), self._free[0]

    def _first_of_use(self) -> tuple[Group, int] | None:
        least = most = 0
        for group in self.groups.values():
            if most >= self.size:
                return None
            if group.state is GroupState.READY and self._minibatch(least) == self._minibatch(most):
                return group, next(slot for slot in self._free if self._minibatch(slot) == self._minibatch(least))
            least += group.state not in (GroupState.RUNNING, GroupState.DROPPED)
            most += group.state is not GroupState.DROPPED
        return None

    def _minibatch(self, slot: int) -> int:
        return slot * self._minibatches // self.size

    def take(self, group: Group, slot: int, now_ns: Nanoseconds) -> None:
        self.move(group, GroupState.TRAINING, now_ns, "sent to the trainer")
        self._fill(group, slot)

    def _fill(self, group: Group, slot: int) -> None:
        self._free.remove(slot)
        group.slot = slot

    @property
    def reasons(self) -> dict[str, int]:
        """Why groups were dropped, the commonest reason first."""
        counts = Counter(group.drop_reason for group in self._in_state[GroupState.DROPPED].values())
        return dict(counts.most_common())

    @property
    def next_version(self) -> int | None:
        """The weights version that the trainer was told to publish; None before that."""
        return self.version + 1 if self.updating else None

    @property
    def free_slots(self) -> tuple[int, ...]:
        return tuple(self._free)

    @property
    def finished(self) -> int:
        """Groups that are worth training on: in training, trained, or ready to be."""
        return sum(self.count(s) for s in (GroupState.READY, GroupState.TRAINING, GroupState.TRAINED))

    @property
    def filled(self) -> int:
        """Slots that are taken, by a group or by the lack of one."""
        return self.size - len(self._free)

    @property
    def rollouts_done(self) -> bool:
        """Whether the batch has finished: whatever still runs is not waited for."""
        if not self._in_state[GroupState.RUNNING]:
            return True
        if self.taking is BatchRule.ALL or self.filled + self.count(GroupState.READY) < self.size:
            return False
        return self.taking is BatchRule.AS_READY or all(
            group.state is not GroupState.RUNNING for group in self._alive()[: self.size]
        )

    def surplus(self) -> list[Group]:
        """Return the groups beyond the batch, once the rollouts are done."""
        return [g for g in self._alive()[self.size :] if g.state in (GroupState.RUNNING, GroupState.READY)]

    def _alive(self) -> list[Group]:
        """Groups that are not dropped, in launch order."""
        return [group for group in self.groups.values() if group.state is not GroupState.DROPPED]

    @property
    def settled(self) -> bool:
        """Whether nothing is left to be trained in this step."""
        waiting = self._in_state[GroupState.RUNNING] or self._in_state[GroupState.READY]
        return not self._in_state[GroupState.TRAINING] and not (self._free and waiting)

    def in_play(self) -> list[Group]:
        """Groups that this step has not taken, in launch order."""
        return [g for g in self.groups.values() if g.state in (GroupState.RUNNING, GroupState.READY)]

    def in_state(self, state: GroupState) -> list[Group]:
        """Groups in a state, in the order in which they came to it."""
        return list(self._in_state[state].values())

    def count(self, state: GroupState) -> int:
        return len(self._in_state[state])
