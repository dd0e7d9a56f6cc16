"""What agents and their fronts have asked for, and what they were given: the truth by which a world is checked."""

from dataclasses import dataclass, field
from typing import NamedTuple

from elastic.core.types import TrajectoryId, TurnId
from elastic.protocol.front_messages import AgentCall


class AgentAnswer(NamedTuple):
    """What was sampled in a turn behind its context."""

    turn: TurnId
    context: tuple[int, ...]
    token_ids: tuple[int, ...]


@dataclass(slots=True)
class CallAttempt:
    """A call that was given turns, by choice. It is `repeated` if it equals a call that was delivered whole before, as
    the run had heard, and does not say that it is the same. It may be `delivered` whole itself later."""

    trajectory: TrajectoryId
    call: AgentCall
    turns: dict[int, TurnId]
    repeated: bool
    delivered: bool = False


@dataclass(slots=True)
class AgentRecord:
    """By trajectory: answers that fronts have asked to be settled, those that agents were given whole, and rewards that
    were confirmed."""

    settled: dict[TrajectoryId, set[AgentAnswer]] = field(default_factory=dict[TrajectoryId, set[AgentAnswer]])
    given: dict[TrajectoryId, set[AgentAnswer]] = field(default_factory=dict[TrajectoryId, set[AgentAnswer]])
    rewards: dict[TrajectoryId, float] = field(default_factory=dict[TrajectoryId, float])
    policy_rewards: dict[tuple[TrajectoryId, str], float] = field(default_factory=dict[tuple[TrajectoryId, str], float])
    """Those of policies that were confirmed."""
    attempts: list[CallAttempt] = field(default_factory=list[CallAttempt])
    begun: dict[str, TrajectoryId] = field(default_factory=dict[str, TrajectoryId])
    """By idempotency key."""
    unknown: list[str] = field(default_factory=list[str])
    """What a run has said of trajectories that it does not know, which it had given."""
    delivered: dict[tuple[str, str, bytes], object] = field(default_factory=dict[tuple[str, str, bytes], object])
    """By trajectory, route and body, who was told that the last such call was delivered whole."""
    seeds: dict[TurnId, int] = field(default_factory=dict[TurnId, int])
    """The seeds of turns whose client has asked for one."""
