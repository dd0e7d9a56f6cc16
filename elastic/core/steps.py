"""The state of a training step: its groups and trajectories, from launch to trained or dropped."""

from dataclasses import dataclass, field

from elastic.core.step_meter import StepMeter
from elastic.core.transitions import Story, take_transition
from elastic.core.types import GroupState, Nanoseconds, TrajectoryId


@dataclass(slots=True)
class Group:
    """Trajectories from one start. A member's entry is its reward, the cause of its failure, or None yet."""

    id: str
    step: int
    index: int
    members: dict[TrajectoryId, float | str | None]
    state: GroupState = GroupState.RUNNING
    drop_reason: str = ""
    story: Story = field(default_factory=Story)

    @property
    def unfinished(self) -> list[TrajectoryId]:
        return [t for t, outcome in self.members.items() if outcome is None]

    @property
    def finished(self) -> dict[TrajectoryId, float]:
        """Members that ended with a reward."""
        return {t: outcome for t, outcome in self.members.items() if isinstance(outcome, float)}

    @property
    def failures(self) -> list[str]:
        """Why members ended without a reward, each cause once."""
        return sorted({outcome for outcome in self.members.values() if isinstance(outcome, str)})


def trajectory_id(step: int, group: int, member: int) -> TrajectoryId:
    return f"{step}/{group}/{member}"


class Step:
    """One training step of a run, in synchronous training the only one alive."""

    def __init__(self, number: int, version: int, groups: int, group_size: int, now_ns: Nanoseconds) -> None:
        self.number = number
        self.version = version
        self.started_ns = now_ns
        self.seeding_ended_ns: Nanoseconds | None = None
        self.rollout_ended_ns: Nanoseconds | None = None
        self.updating = False
        self.meter = StepMeter(now_ns)
        self.groups = {
            f"{number}/{g}": Group(
                f"{number}/{g}", number, g, {trajectory_id(number, g, m): None for m in range(group_size)}
            )
            for g in range(groups)
        }
        self._group_of = {t: group for group in self.groups.values() for t in group.members}
        self._in_state: dict[GroupState, dict[str, Group]] = {state: {} for state in GroupState}
        self._in_state[GroupState.RUNNING] |= self.groups

    def group_of(self, trajectory: TrajectoryId) -> Group | None:
        return self._group_of.get(trajectory)

    def move(self, group: Group, state: GroupState, now_ns: Nanoseconds, cause: str) -> None:
        """Change a group's state; raises `IllegalTransition` where the table forbids it."""
        take_transition(f"group {group.id}", group.state, state, group.story, now_ns, cause)
        del self._in_state[group.state][group.id]
        self._in_state[state][group.id] = group
        group.state = state

    def drop(self, group: Group, now_ns: Nanoseconds, reason: str) -> None:
        self.move(group, GroupState.DROPPED, now_ns, reason)
        group.drop_reason = reason

    def in_state(self, state: GroupState) -> list[Group]:
        """Groups in a state, in the order in which they came to it."""
        return list(self._in_state[state].values())

    def first(self, state: GroupState) -> Group | None:
        return next(iter(self._in_state[state].values()), None)

    def count(self, state: GroupState) -> int:
        return len(self._in_state[state])

    @property
    def rollouts_done(self) -> bool:
        return not self._in_state[GroupState.RUNNING]

    @property
    def settled(self) -> bool:
        return self.count(GroupState.TRAINED) + self.count(GroupState.DROPPED) == len(self.groups)
