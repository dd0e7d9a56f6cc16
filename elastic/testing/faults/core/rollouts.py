"""Simulated environment loops: trajectories of random numbers of turns, turns of random lengths."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING

from elastic.core import commands as c
from elastic.core import events as e
from elastic.core.ids import is_evaluated, parse_turn, turn_id
from elastic.core.types import NS_PER_S, TrajectoryId, TurnId
from elastic.testing.faults.core.record import RunRecord

if TYPE_CHECKING:
    from elastic.testing.faults.core.world import SimulatedWorld

PROMPT_TOKENS = 20
LATE_REWARD_NS = 3 * NS_PER_S
HELPFUL_RETRIES = 0.8
"""The share of failures after which a repeat may go better."""


def turn_length(seed: int, turn: TurnId, longest: int) -> int:
    """How many tokens a turn has, wherever it is generated: most are short, some use all that they may."""
    return min(longest, 1 + int(Random(f"{seed}/{turn}").expovariate(3 / longest)))


ENDINGS = (e.RewardRequested, e.TrajectoryFinished, e.TrajectoryFailed)


@dataclass(slots=True)
class SimulatedEpisode:
    trajectory: TrajectoryId
    turns: int
    done: int = 0
    over: bool = False
    waits_for: TurnId | None = None


class SimulatedRollouts:
    """One episode per trajectory. Each draws its own chance, so its actions do not depend on when it is asked.

    An environment that died with its process begins again and repeats the `finished` turns from the `record`.
    `prompted` is told of every turn, for the turn may have been requested before.
    """

    def __init__(
        self,
        world: "SimulatedWorld",
        record: RunRecord,
        feed: Callable[[e.Event], None],
        prompted: Callable[[TurnId], None],
    ) -> None:
        self._world = world
        self._record = record
        self._feed = feed
        self._prompted = prompted
        self._episodes: dict[TrajectoryId, SimulatedEpisode] = {}
        self._chance: dict[TrajectoryId, Random] = {}
        self._dropped: set[TrajectoryId] = set()
        self._groups = record.version * world.settings.plan.groups

    def start(self, group: c.StartGroup) -> None:
        self._count(group)
        for trajectory in group.trajectories:
            self._create(trajectory)
            self._think(trajectory)

    def _count(self, group: c.StartGroup) -> None:
        """Whatever dies, groups are numbered without a gap and without a repeat; tasks of evaluations are none."""
        if is_evaluated(group.group):
            return
        assert group.number == self._groups, f"group {group.group} has number {group.number}, not {self._groups}"
        self._groups += 1

    def refill(self, member: c.RefillMember) -> None:
        self._create(member.trajectory)
        self._think(member.trajectory)

    def _create(self, trajectory: TrajectoryId) -> None:
        chance = self._chance[trajectory] = Random(f"{self._world.seed}/{trajectory}")
        self._episodes[trajectory] = SimulatedEpisode(trajectory, chance.randint(1, self._world.settings.max_turns))

    def recalled(self, event: e.Event, command: c.Command | None) -> None:
        match command:
            case c.StartGroup():
                self._count(command)
                for trajectory in command.trajectories:
                    self._create(trajectory)
            case c.RefillMember():
                self._create(command.trajectory)
            case c.CancelTrajectory():
                self.cancel(command.trajectory)
            case c.DropGroup():
                self.drop(command.trajectories)
            case None if isinstance(event, ENDINGS):
                self.cancel(event.trajectory)
            case _:
                pass

    def resume(self) -> None:
        for trajectory, episode in self._episodes.items():
            if trajectory in self._record.failed:
                self._fail(trajectory, self._record.failed[trajectory])
            elif not episode.over:
                self._think(trajectory)

    def saved(self) -> tuple[dict[TrajectoryId, bool], set[TrajectoryId], int]:
        return {name: episode.over for name, episode in self._episodes.items()}, self._dropped, self._groups

    def restore(self, saved: tuple[dict[TrajectoryId, bool], set[TrajectoryId], int]) -> None:
        episodes, self._dropped, self._groups = saved
        for trajectory, over in episodes.items():
            self._create(trajectory)
            self._episodes[trajectory].over = over

    def prompt(self, turn: TurnId) -> TurnId | None:
        episode = self._episodes[parse_turn(turn)[0]]
        return turn if episode.waits_for == turn else None

    def accept(self, event: e.TokensReceived, accepted: c.AcceptTokens, payload: None) -> None:
        """Tokens are counted by the record."""

    def finished(self, trajectory: TrajectoryId) -> None:
        self._require_kept(trajectory)

    def take(self, trajectories: Sequence[TrajectoryId]) -> None:
        for trajectory in trajectories:
            self._require_kept(trajectory)

    def record_reward(self, trajectory: TrajectoryId, reward: float | None, cause: str) -> None:
        pass

    def _require_kept(self, trajectory: TrajectoryId) -> None:
        assert trajectory not in self._dropped, f"{trajectory} is asked for, and its group is dropped"

    def finish_turn(self, turn: TurnId) -> None:
        episode = self._episodes.get(parse_turn(turn)[0])
        if episode is not None and episode.waits_for == turn:
            self._step(episode)

    def _step(self, episode: SimulatedEpisode) -> None:
        episode.waits_for = None
        if not episode.over:
            episode.done += 1
            self._think(episode.trajectory)

    def fail_turn(self, turn: TurnId, cause: str) -> None:
        self._fail(parse_turn(turn)[0], cause)

    def _fail(self, trajectory: TrajectoryId, cause: str) -> None:
        episode = self._episodes.get(trajectory)
        if episode is not None and not episode.over:
            episode.over = True
            failed = e.TrajectoryFailed(trajectory=trajectory, cause=cause)
            self._world.loop.after(0, lambda: self._feed(failed))

    def cancel(self, trajectory: TrajectoryId) -> None:
        if trajectory in self._episodes:
            self._episodes[trajectory].over = True

    def die(self) -> None:
        """Every environment is gone with the process."""
        for episode in self._episodes.values():
            episode.over = True

    def drop(self, trajectories: Sequence[TrajectoryId]) -> None:
        """Notes that these trajectories' group is not trained on. Their results are not kept."""
        self._dropped.update(trajectories)

    def _think(self, trajectory: TrajectoryId) -> None:
        delay_ns = self._chance[trajectory].randrange(self._world.settings.think_ns)
        self._world.loop.after(delay_ns, lambda: self._go_on(trajectory))

    def _go_on(self, trajectory: TrajectoryId) -> None:
        episode, chance, fault_rates = self._episodes[trajectory], self._chance[trajectory], self._world.fault_rates
        if episode.over:
            return
        if self._world.injector.injects(chance, fault_rates.environment_failed):
            self._fail(trajectory, "the environment broke")
        elif episode.done < episode.turns:
            self._ask_for(episode, turn_id(trajectory, episode.done))
        else:
            episode.over = True
            if self._world.settings.rewards_on_functions:
                self._feed(e.RewardRequested(trajectory=trajectory, tokens=1))
            else:
                reward = self._reward(trajectory)
                self._feed(e.TrajectoryFinished(trajectory=trajectory, reward=reward, tokens=1))

    def _ask_for(self, episode: SimulatedEpisode, turn: TurnId) -> None:
        if turn in self._record.finished:
            self._step(episode)
            return
        episode.waits_for = turn
        self._feed(
            e.TurnRequested(
                turn=turn,
                trajectory=episode.trajectory,
                prompt_tokens=PROMPT_TOKENS,
                max_new_tokens=self._world.settings.max_new_tokens,
            )
        )
        self._prompted(turn)

    def _reward(self, trajectory: TrajectoryId) -> float:
        chance = Random(f"{self._world.seed}/{trajectory}/reward")
        undefined = self._world.injector.injects(chance, self._world.fault_rates.reward_undefined)
        return float("nan") if undefined else float(chance.randint(0, 1))

    def score(self, order: c.ScoreTrajectory) -> None:
        """The function answers in its own time: late, not at all, or that it cannot, where the plan wants it."""
        trajectory, attempt = order.trajectory, order.attempt
        world, chance = self._world, Random(f"{self._world.seed}/{trajectory}/{attempt}")
        if world.injector.injects(chance, world.fault_rates.reward_lost):
            return
        down = world.rewards_down()
        if down or world.injector.injects(chance, world.fault_rates.reward_refused):
            helps = chance.random() < HELPFUL_RETRIES
            answer = e.RewardFailed(trajectory=trajectory, attempt=attempt, cause="no process", retry_helps=helps)
        else:
            answer = e.RewardScored(trajectory=trajectory, attempt=attempt, reward=self._reward(trajectory))
        late_ns = LATE_REWARD_NS if world.injector.injects(chance, world.fault_rates.reward_late) else 0
        world.loop.after(chance.randrange(world.settings.reward_ns) + late_ns, lambda: self._feed(answer))
