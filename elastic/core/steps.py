"""The state of a training step: its groups and trajectories, from launch to trained or dropped."""

from dataclasses import dataclass, field

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
    def complete(self) -> bool:
        return all(outcome is not None for outcome in self.members.values())

    @property
    def finished(self) -> dict[TrajectoryId, float]:
        """Members that ended with a reward."""
        return {t: outcome for t, outcome in self.members.items() if isinstance(outcome, float)}


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
        self.groups = {
            f"{number}/{g}": Group(
                f"{number}/{g}", number, g, {trajectory_id(number, g, m): None for m in range(group_size)}
            )
            for g in range(groups)
        }
        self._group_of = {t: group for group in self.groups.values() for t in group.members}

    def group_of(self, trajectory: TrajectoryId) -> Group | None:
        return self._group_of.get(trajectory)

    def move(self, group: Group, state: GroupState, now_ns: Nanoseconds, cause: str) -> None:
        """Change a group's state; raises `IllegalTransition` where the table forbids it."""
        take_transition(f"group {group.id}", group.state, state, group.story, now_ns, cause)
        group.state = state

    def in_state(self, state: GroupState) -> list[Group]:
        return [group for group in self.groups.values() if group.state is state]

    @property
    def rollouts_done(self) -> bool:
        return not any(group.state is GroupState.RUNNING for group in self.groups.values())

    @property
    def settled(self) -> bool:
        return all(group.state in (GroupState.TRAINED, GroupState.DROPPED) for group in self.groups.values())
