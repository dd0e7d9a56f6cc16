"""Rewards that functions compute: asked for, asked again where that can help, and given up in the end.

What no function could score is unavailable, with its cause; it is never a score (invariant 11).
Source: docs/design.md, `Reward`; RollArt, mechanism 3.
"""

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from elastic.core import commands as c
from elastic.core import events as e
from elastic.core.run_state import Deadlines, Handlers, RunState
from elastic.core.transitions import Story, take_transition
from elastic.core.types import InfrastructureCause, ScoringState, TrajectoryId


@dataclass(slots=True)
class Scoring:
    """One trajectory on its way to a reward. `attempt` is the fencing number: only its answer counts."""

    trajectory: TrajectoryId
    state: ScoringState = ScoringState.QUEUED
    attempt: int = 0
    story: Story = field(default_factory=Story)


class Scored(NamedTuple):
    """What scoring a trajectory has come to: its reward, or why it has none. `infrastructure` is set where another
    attempt could have helped."""

    trajectory: TrajectoryId
    outcome: float | str
    infrastructure: InfrastructureCause | None = None


class RewardManager:
    """Runs at most `Limits.scorings_max` scoring attempts at once. Further attempts are queued."""

    def __init__(self, run: RunState) -> None:
        self._run = run
        self._queue: deque[TrajectoryId] = deque()
        self._running = 0
        self._outcomes: list[Scored] = []
        self.scorings: dict[TrajectoryId, Scoring] = {}
        self.handlers: Handlers = {
            e.RewardScored: self._on_scored,
            e.RewardFailed: self._on_failed,
        }
        self.due: Deadlines = {
            "score": self._score_due,
            "score again": self._score_again_due,
        }

    def request(self, trajectory: TrajectoryId) -> None:
        """Score a trajectory. Asking twice is asking once."""
        if trajectory not in self.scorings:
            self.scorings[trajectory] = Scoring(trajectory)
            self._queue.append(trajectory)
            self._fill()

    def take_outcomes(self) -> list[Scored]:
        """Return the results since the last call."""
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def forget(self, trajectories: Iterable[TrajectoryId]) -> None:
        """The trajectories are over: whatever may still be said of their rewards comes too late.

        None of them is asked for any more when the place of another becomes free.
        """
        for trajectory in trajectories:
            scoring = self.scorings.get(trajectory)
            if scoring is not None:
                self._close(scoring, ScoringState.UNAVAILABLE, "the trajectory ended")
        self._fill()

    def forget_all(self) -> None:
        self.forget(list(self.scorings))

    def _fill(self) -> None:
        run = self._run
        while self._queue and self._running < run.limits.scorings_max:
            scoring = self.scorings[self._queue.popleft()]
            self._move(scoring, ScoringState.RUNNING, "its turn has come")
            self._running += 1
            scoring.attempt += 1
            run.wait("score", scoring.trajectory, run.limits.score_timeout_ns)
            run.out.append(c.ScoreTrajectory(trajectory=scoring.trajectory, attempt=scoring.attempt))

    def _answered(self, event: e.RewardScored | e.RewardFailed) -> Scoring | None:
        """The scoring, if this answers the attempt that runs."""
        scoring = self.scorings.get(event.trajectory)
        if scoring is None or scoring.state is not ScoringState.RUNNING or scoring.attempt != event.attempt:
            return None
        return scoring

    def _on_scored(self, event: e.RewardScored) -> None:
        scoring = self._answered(event)
        if scoring is None:
            return
        if math.isfinite(event.reward):
            self._conclude(scoring, ScoringState.SCORED, float(event.reward))
        else:
            self._give_up(scoring, f"the reward was {event.reward}", None)

    def _on_failed(self, event: e.RewardFailed) -> None:
        scoring = self._answered(event)
        if scoring is not None:
            self._failed(scoring, event.cause or "unknown cause", retry_helps=event.retry_helps)

    def _score_due(self, trajectory: str) -> None:
        self._failed(self.scorings[trajectory], "no answer in time", retry_helps=True)

    def _failed(self, scoring: Scoring, cause: str, *, retry_helps: bool) -> None:
        limits = self._run.limits
        if not retry_helps or scoring.attempt >= limits.score_attempts_max:
            self._give_up(scoring, cause, InfrastructureCause.REWARD if retry_helps else None)
            return
        self._move(scoring, ScoringState.BACKING_OFF, cause)
        delay_ns = min(limits.score_retry_ns << (scoring.attempt - 1), limits.retry_max_ns)
        self._run.wait("score again", scoring.trajectory, delay_ns)
        self._fill()

    def _score_again_due(self, trajectory: str) -> None:
        self._move(self.scorings[trajectory], ScoringState.QUEUED, "tried again")
        self._queue.append(trajectory)
        self._fill()

    def _give_up(self, scoring: Scoring, cause: str, infrastructure: InfrastructureCause | None) -> None:
        attempts = f"{scoring.attempt} attempt{'s' if scoring.attempt > 1 else ''}"
        told = f"{InfrastructureCause.REWARD} after {attempts}: {cause}"
        self._conclude(scoring, ScoringState.UNAVAILABLE, told, infrastructure)

    def _conclude(
        self,
        scoring: Scoring,
        state: ScoringState,
        outcome: float | str,
        infrastructure: InfrastructureCause | None = None,
    ) -> None:
        trajectory, cause = scoring.trajectory, outcome if isinstance(outcome, str) else ""
        reward = outcome if isinstance(outcome, float) else None
        self._close(scoring, state, cause or "scored")
        self._fill()
        self._outcomes.append(Scored(trajectory, outcome, infrastructure))
        self._run.out.append(c.RecordReward(trajectory=trajectory, reward=reward, cause=cause))

    def _close(self, scoring: Scoring, state: ScoringState, cause: str) -> None:
        if scoring.state is ScoringState.QUEUED and scoring.trajectory in self._queue:
            self._queue.remove(scoring.trajectory)
        self._move(scoring, state, cause)
        del self.scorings[scoring.trajectory]

    def _move(self, scoring: Scoring, state: ScoringState, cause: str) -> None:
        run = self._run
        name = f"reward of {scoring.trajectory}"
        at = f"attempt {scoring.attempt}"
        take_transition(name, scoring.state, state, scoring.story, run.now_ns, cause, at)
        self._running -= scoring.state is ScoringState.RUNNING
        scoring.state = state
        run.timers.clear("score", scoring.trajectory)
        run.timers.clear("score again", scoring.trajectory)
