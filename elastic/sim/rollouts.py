"""Simulated environment loops: trajectories of random numbers of turns, turns of random lengths."""

from collections.abc import Iterable
from dataclasses import dataclass
from random import Random
from typing import Protocol

from elastic.core import events as e
from elastic.core.types import NS_PER_S, TrajectoryId, TurnId
from elastic.sim.faults import Mishaps, Tally
from elastic.sim.loop import EventLoop
from elastic.sim.settings import WorldSettings

PROMPT_TOKENS = 20
LATE_REWARD_NS = 3 * NS_PER_S
HELPFUL_RETRIES = 0.8
"""The share of failures after which a repeat may go better."""


@dataclass(slots=True)
class Episode:
    trajectory: TrajectoryId
    turns: int
    done: int = 0
    over: bool = False
    reward: float = 0.0


class EpisodeWorld(Protocol):
    """What environment loops see of their world."""

    loop: EventLoop
    seed: int
    settings: WorldSettings
    tally: Tally
    rewards_down_until_ns: int

    @property
    def mishaps(self) -> Mishaps: ...

    def feed(self, event: e.Event) -> None: ...


class SimulatedRollouts:
    """One episode per trajectory, each with chance of its own: what it does does not depend on when it is asked."""

    def __init__(self, world: EpisodeWorld) -> None:
        self._world = world
        self._episodes: dict[TrajectoryId, Episode] = {}
        self._chance: dict[TrajectoryId, Random] = {}
        self._dropped: set[TrajectoryId] = set()

    def start(self, trajectory: TrajectoryId) -> None:
        chance = self._chance[trajectory] = Random(f"{self._world.seed}/{trajectory}")
        self._episodes[trajectory] = Episode(trajectory, chance.randint(1, self._world.settings.max_turns))
        self._think(trajectory)

    def turn_length(self, turn: TurnId) -> int:
        """A long tail: most turns are short, some use all that they may."""
        longest = self._world.settings.max_new_tokens
        return min(longest, 1 + int(Random(f"{self._world.seed}/{turn}").expovariate(3 / longest)))

    def finish_turn(self, turn: TurnId) -> None:
        episode = self._episodes[turn.partition("#")[0]]
        if not episode.over:
            episode.done += 1
            self._think(episode.trajectory)

    def fail(self, trajectory: TrajectoryId, cause: str) -> None:
        episode = self._episodes[trajectory]
        if not episode.over:
            episode.over = True
            failed = e.TrajectoryFailed(trajectory=trajectory, cause=cause)
            self._world.loop.after(0, lambda: self._world.feed(failed))

    def cancel(self, trajectory: TrajectoryId) -> None:
        self._episodes[trajectory].over = True

    def drop(self, trajectories: Iterable[TrajectoryId]) -> None:
        """Their group is not trained on: nobody keeps what they have come to."""
        self._dropped.update(trajectories)

    def _think(self, trajectory: TrajectoryId) -> None:
        delay_ns = self._chance[trajectory].randrange(self._world.settings.think_ns)
        self._world.loop.after(delay_ns, lambda: self._go_on(trajectory))

    def _go_on(self, trajectory: TrajectoryId) -> None:
        episode, chance, mishaps = self._episodes[trajectory], self._chance[trajectory], self._world.mishaps
        if episode.over:
            return
        if self._world.tally.befalls(chance, mishaps.environment_failed):
            self.fail(trajectory, "the environment broke")
        elif episode.done < episode.turns:
            self._world.feed(
                e.TurnRequested(
                    turn=f"{trajectory}#{episode.done}",
                    trajectory=trajectory,
                    prompt_tokens=PROMPT_TOKENS,
                    max_new_tokens=self._world.settings.max_new_tokens,
                )
            )
        else:
            episode.over = True
            undefined = self._world.tally.befalls(chance, mishaps.reward_undefined)
            episode.reward = float("nan") if undefined else float(chance.randint(0, 1))
            if self._world.settings.rewards_on_functions:
                self._world.feed(e.RewardRequested(trajectory=trajectory, tokens=1))
            else:
                self._world.feed(e.TrajectoryFinished(trajectory=trajectory, reward=episode.reward, tokens=1))

    def score(self, trajectory: TrajectoryId, attempt: int) -> None:
        """The function answers in its own time: late, not at all, or that it cannot, where the plan wants it."""
        assert trajectory not in self._dropped, f"{trajectory} is to be scored, and its group is dropped"
        world, chance = self._world, Random(f"{self._world.seed}/{trajectory}/{attempt}")
        if world.tally.befalls(chance, world.mishaps.reward_lost):
            return
        down = world.loop.now_ns < world.rewards_down_until_ns
        if down or world.tally.befalls(chance, world.mishaps.reward_refused):
            helps = chance.random() < HELPFUL_RETRIES
            answer = e.RewardFailed(trajectory=trajectory, attempt=attempt, cause="no process", retry_helps=helps)
        else:
            answer = e.RewardScored(trajectory=trajectory, attempt=attempt, reward=self._episodes[trajectory].reward)
        late_ns = LATE_REWARD_NS if world.tally.befalls(chance, world.mishaps.reward_late) else 0
        world.loop.after(chance.randrange(world.settings.reward_ns) + late_ns, lambda: world.feed(answer))
