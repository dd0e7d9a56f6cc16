"""The trajectories of a run whose environments are played in several ways (`elastic.runtime.ports.Trajectories`)."""

import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, TypeAlias

from elastic.core import commands as c
from elastic.core import events as e
from elastic.core.ids import group_of
from elastic.core.types import TrajectoryId, TurnId
from elastic.runtime.agents.rollouts import AgentRollouts
from elastic.runtime.rollout import Rollouts

Played: TypeAlias = Rollouts | AgentRollouts


class MixedRollouts:
    """`parts` say who plays an environment's trajectories, by its name; the same one may play those of several."""

    def __init__(self, parts: Mapping[str, Played]) -> None:
        self.players: Sequence[Played] = list(dict.fromkeys(parts.values()))
        self._parts = parts
        self._environments: dict[str, str] = {}
        """By group, of those that are neither trained nor dropped."""

    def _of(self, trajectory: TrajectoryId) -> Played:
        """Return the rollouts that play it. What is over and gone is in the journal alone, which all of them can
        ask."""
        environment = self._environments.get(group_of(trajectory))
        return self.players[0] if environment is None else self._parts[environment]

    def start(self, group: c.StartGroup) -> None:
        self._environments[group.group] = group.environment
        self._parts[group.environment].start(group)

    def refill(self, member: c.RefillMember) -> None:
        self._of(member.trajectory).refill(member)

    def recalled(self, event: e.Event, command: c.Command | None) -> None:
        match command:
            case c.StartGroup():
                self._environments[command.group] = command.environment
                self._parts[command.environment].recalled(event, command)
            case c.RefillMember() | c.RecordReward():
                self._of(command.trajectory).recalled(event, command)
            case c.TrainGroup() | c.DropGroup():
                self._of(command.trajectories[0]).recalled(event, command)
                self._environments.pop(command.group, None)
            case None:
                for player in self._heard_by(event):
                    player.recalled(event, None)
            case _:
                for player in self.players:
                    player.recalled(event, command)

    def _heard_by(self, event: e.Event) -> Sequence[Played]:
        trajectory: TrajectoryId | None = getattr(event, "trajectory", None)
        return self.players if trajectory is None else [self._of(trajectory)]

    def resume(self) -> None:
        for player in self.players:
            player.resume()

    def cancel(self, trajectory: TrajectoryId) -> None:
        for player in self.players:  # Its group may be dropped, and forgotten: who does not play it lets it be.
            player.cancel(trajectory)

    def cancel_all(self) -> None:
        for player in self.players:
            player.cancel_all()

    @contextlib.asynccontextmanager
    async def ending(self) -> AsyncIterator[None]:
        """A context, at whose end all loops end."""
        async with contextlib.AsyncExitStack() as endings:
            for player in self.players:
                await endings.enter_async_context(player.ending())
            yield

    def prompt(self, turn: TurnId) -> Any:
        found = (player.prompt(turn) for player in self.players)
        return next((prompt for prompt in found if prompt is not None), None)

    def accept(self, event: e.TokensReceived, accepted: c.AcceptTokens, payload: Any) -> None:
        for player in self.players:
            player.accept(event, accepted, payload)

    def finish_turn(self, turn: TurnId) -> None:
        for player in self.players:
            player.finish_turn(turn)

    def fail_turn(self, turn: TurnId, cause: str) -> None:
        for player in self.players:
            player.fail_turn(turn, cause)

    def finished(self, trajectory: TrajectoryId) -> Any:
        return self._of(trajectory).finished(trajectory)

    def record_reward(self, trajectory: TrajectoryId, reward: float | None, cause: str) -> None:
        self._of(trajectory).record_reward(trajectory, reward, cause)

    def take(self, trajectories: Sequence[TrajectoryId]) -> Any:
        taken = self._of(trajectories[0]).take(trajectories)
        self._forget(trajectories)
        return taken

    def drop(self, trajectories: Sequence[TrajectoryId]) -> Any:
        dropped = self._of(trajectories[0]).drop(trajectories)
        self._forget(trajectories)
        return dropped

    def _forget(self, trajectories: Sequence[TrajectoryId]) -> None:
        for trajectory in trajectories:
            self._environments.pop(group_of(trajectory), None)

    def saved(self) -> object:
        return dict(self._environments), [player.saved() for player in self.players]

    def restore(self, saved: tuple[dict[str, str], list[Any]]) -> None:
        self._environments, players = saved
        for player, its_own in zip(self.players, players, strict=True):
            player.restore(its_own)


def played_by(parts: Mapping[str, Played]) -> "Played | MixedRollouts":
    """The rollouts that play a run's trajectories; `parts` has those of each environment."""
    players = list(dict.fromkeys(parts.values()))
    return players[0] if len(players) == 1 else MixedRollouts(parts)
