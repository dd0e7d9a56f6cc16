"""Environment loops and reward functions of a simulated run: episodes whose turns take modelled time."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from elastic.core import commands as c
from elastic.core import events as e
from elastic.core.ids import group_of, turn_id
from elastic.core.types import NS_PER_S, Nanoseconds, TrajectoryId, TurnId
from elastic.runtime.ports import Feed, OneIncarnation
from elastic.simulation.loop import EventLoop
from elastic.simulation.performance.engine import Job
from elastic.simulation.performance.episodes import Episode, Episodes
from elastic.simulation.performance.profile import Profile
from functions.base import Call, CallOutcome, Meter


@dataclass(slots=True)
class Trajectory:
    """The progress of one trajectory in its episode."""

    id: TrajectoryId
    episode: Episode
    group: str
    started_ns: Nanoseconds
    turns: int = 0
    context: int = 0
    policy_tokens: int = 0
    truncated: bool = False

    @property
    def token_ids(self) -> bytes:
        """Always empty: performance worlds count tokens and have no ids."""
        return b""

    @property
    def sampled(self) -> None:
        return None

    @property
    def branches(self) -> tuple[()]:
        return ()

    @property
    def task(self) -> bytes:
        return b""

    @property
    def metrics(self) -> Mapping[str, float]:
        return {}


@dataclass(slots=True)
class ModelledTurn:
    id: TurnId
    of: Trajectory
    prompt: int
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentSettings:
    """Limits of turns, and the reward function, if any.

    With `take_time` environments take the time that the profile gives, in addition to the latencies of their turns.
    """

    max_tokens_per_turn: int
    scored_by_function: bool = False
    reward_s: float = 0.0
    reward_usd: float = 0.0
    take_time: bool = True


class Environments(OneIncarnation):
    """The trajectories and rewards of a run (`elastic.runtime.ports`). `busy` is told until when an environment
    works."""

    def __init__(
        self,
        loop: EventLoop,
        settings: EnvironmentSettings,
        profile: Profile,
        episodes: Episodes,
        feed: Feed,
        meter: Meter,
        busy: Callable[[Nanoseconds], None],
    ) -> None:
        self.episodes = episodes
        self._loop = loop
        self._settings = settings
        self._reset_ns, self._step_ns = (
            round(time_s * NS_PER_S) if settings.take_time else 0 for time_s in (profile.reset_s, profile.step_s)
        )
        self._serial = bool(profile.environment_serial)
        self._feed = feed
        self._meter = meter
        self._busy = busy
        self._turns: dict[TurnId, ModelledTurn] = {}
        self._running: dict[TrajectoryId, Trajectory] = {}
        self._finished: dict[TrajectoryId, Trajectory] = {}
        self._free_ns: Nanoseconds = 0

    def job(self, command: c.StartTurn) -> Job | None:
        """Return the engine's job for a worker that gets this command now; None if the turn has ended."""
        turn = self._turns.get(command.turn)
        if turn is None:
            return None
        return Job(
            turn.id,
            command.attempt,
            turn.of.id,
            turn.of.group,
            turn.prompt + command.start,
            command.start,
            turn.length,
            self._settings.max_tokens_per_turn,
            turn.of.episode.turns[0].observation_tokens,
            command.recompute,
            command.slot,
        )

    # Trajectories

    def start(self, group: c.StartGroup) -> None:
        for name in group.trajectories:
            self._begin(name)

    def refill(self, member: c.RefillMember) -> None:
        self._begin(member.trajectory)

    def _begin(self, name: TrajectoryId) -> None:
        self._running[name] = Trajectory(name, self.episodes.episode(name), group_of(name), self._loop.now_ns)
        self._work(self._reset_ns, name)

    def cancel(self, trajectory: TrajectoryId) -> None:
        running = self._running.pop(trajectory, None)
        if running is not None:
            self._turns.pop(turn_id(trajectory, running.turns), None)

    def prompt(self, turn: TurnId) -> ModelledTurn | None:
        return self._turns.get(turn)

    def accept(self, event: e.TokensReceived, accepted: c.AcceptTokens, payload: None) -> None:
        if any(event.chunks.counts[place] for place in accepted.chunks):
            self._busy(self._loop.now_ns)

    def finish_turn(self, turn: TurnId) -> None:
        done = self._turns.pop(turn, None)
        if done is not None and (running := self._running.get(done.of.id)) is not None:
            running.turns += 1
            running.context += done.length
            running.policy_tokens += done.length
            self._work(self._step_ns, running.id)

    def fail_turn(self, turn: TurnId, cause: str) -> None:
        failed = self._turns.pop(turn, None)
        running = self._running.pop(failed.of.id, None) if failed is not None else None
        if running is not None:
            self._feed(e.TrajectoryFailed(trajectory=running.id, cause=cause), running)

    def finished(self, trajectory: TrajectoryId) -> Trajectory:
        return self._finished[trajectory]

    def record_reward(self, trajectory: TrajectoryId, reward: float | None, cause: str) -> None:
        pass

    def take(self, trajectories: Sequence[TrajectoryId]) -> list[Trajectory]:
        return [self._finished.pop(trajectory) for trajectory in trajectories]

    def drop(self, trajectories: Sequence[TrajectoryId]) -> None:
        for trajectory in trajectories:
            self._finished.pop(trajectory, None)

    def _work(self, work_ns: Nanoseconds, trajectory: TrajectoryId) -> None:
        """Let the environment work and the turn's own latency pass, and then request the next turn."""
        begin_ns = self._loop.now_ns
        if self._serial:
            begin_ns = max(begin_ns, self._free_ns)
            self._free_ns = begin_ns + work_ns
        running = self._running[trajectory]
        turns = running.episode.turns
        latency_s = turns[running.turns].latency_s if running.turns < len(turns) else 0.0
        at_ns = begin_ns + work_ns + round(latency_s * NS_PER_S)
        self._busy(at_ns)
        self._loop.at(at_ns, partial(self._go_on, trajectory))

    def _go_on(self, trajectory: TrajectoryId) -> None:
        running = self._running.get(trajectory)
        if running is None:
            return
        turns = running.episode.turns
        if running.turns >= len(turns):
            self._end(running)
            return
        shape = turns[running.turns]
        running.context += shape.observation_tokens
        turn = turn_id(trajectory, running.turns)
        self._turns[turn] = ModelledTurn(turn, running, running.context, shape.tokens)
        self._feed(
            e.TurnRequested(
                turn=turn,
                trajectory=trajectory,
                prompt_tokens=running.context,
                max_new_tokens=self._settings.max_tokens_per_turn,
                tag=running.episode.tag,
            )
        )

    def _end(self, running: Trajectory) -> None:
        name, tokens = running.id, running.policy_tokens
        del self._running[name]
        self._finished[name] = running
        if self._settings.scored_by_function:
            self._feed(e.RewardRequested(trajectory=name, tokens=tokens), running)
        else:
            reward = running.episode.reward
            self._feed(e.TrajectoryFinished(trajectory=name, reward=reward, tokens=tokens), running)

    # Rewards

    def score(self, order: c.ScoreTrajectory, finished: Trajectory) -> None:
        took_s, usd = self._settings.reward_s, self._settings.reward_usd
        reward = finished.episode.reward

        def answered() -> None:
            self._meter(
                Call(
                    function="reward",
                    key=order.trajectory,
                    outcome=CallOutcome.OK,
                    queued_s=0.0,
                    cold_start_s=0.0,
                    duration_s=took_s,
                    usd=usd,
                )
            )
            self._feed(e.RewardScored(trajectory=order.trajectory, attempt=order.attempt, reward=reward))

        self._loop.after(round(took_s * NS_PER_S), answered)
