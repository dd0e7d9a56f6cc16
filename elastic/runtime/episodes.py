"""Episodes: a trajectory's turns while they come, and its outcome, whether an environment or an agent drives it."""

import asyncio
import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from elastic.core.ids import drawn_from, is_evaluated
from elastic.core.types import SamplingParameters, TrajectoryId, TurnId, WorkerId
from elastic.protocol import wire
from elastic.protocol.sampled import TOKEN_BYTES, Sampled, SampledBranch, SampledRun, ids_of, pack_ids
from elastic.runtime.journal import TrajectoryRow
from functions.rewards import FinishedBranch, FinishedTrajectory


@dataclass(slots=True)
class OpenTurn:
    """A turn of a running trajectory: its context and its accepted tokens, packed.

    `ended` is None while the turn is in progress, empty once it is finished, else the cause for which it was given up.
    For a recalled turn, `prompt`, `sampling` and `done` (the future of the waiting environment) are set when its
    environment comes to it.
    """

    id: TurnId
    prompt_tokens: int
    token_ids: bytearray = field(default_factory=bytearray)
    logprobs: bytearray = field(default_factory=bytearray)
    runs: list[SampledRun] = field(default_factory=list[SampledRun])
    ended: str | None = None
    prompt: bytearray = field(default_factory=bytearray)
    sampling: SamplingParameters | None = None
    done: asyncio.Future[None] | None = None

    def accept(self, token_ids: bytes, logprobs: bytes, version: int, worker: WorkerId) -> None:
        self.token_ids += token_ids
        self.logprobs += logprobs
        tokens = len(token_ids) // TOKEN_BYTES
        if self.runs and (last := self.runs[-1]).version == version and last.worker == worker:
            last.tokens += tokens
        else:
            self.runs.append(SampledRun(version, worker, tokens))

    def end(self, cause: str) -> None:
        self.ended = cause
        if self.done is not None and not self.done.done():
            self.done.set_result(None)


@dataclass(slots=True)
class RolloutTrajectory:
    """A trajectory's tokens so far, packed, and which of them the policy sampled."""

    trajectory: TrajectoryId
    started_ns: int
    seed: int
    token_ids: bytearray = field(default_factory=bytearray)
    sampled: Sampled = field(default_factory=Sampled)
    turns: int = 0
    tag: str = ""
    truncated: bool = False
    """A limit of turns or tokens ended it, not its environment."""
    branches: list[SampledBranch] = field(default_factory=list[SampledBranch])
    """Further contexts in which an agent let the policy sample, besides the first."""
    task: bytes = b""
    """What its driver opened it with, as JSON."""
    metrics: dict[str, float] = field(default_factory=dict[str, float])
    """What its driver has told of it besides its reward."""

    @property
    def tokens(self) -> int:
        return len(self.token_ids) // TOKEN_BYTES

    @property
    def policy_tokens(self) -> int:
        return self.sampled.tokens + sum(branch.sampled.tokens for branch in self.branches)

    @property
    def workers(self) -> set[WorkerId]:
        """Those that have sampled any of it."""
        return {worker for one in (self.sampled, *(b.sampled for b in self.branches)) for worker, _ in one.origins}

    def observe(self, token_ids: Iterable[int]) -> None:
        self.token_ids += pack_ids(token_ids)

    def act(self, turn: OpenTurn) -> None:
        self.turns += 1
        self.sampled.take(self.tokens, turn.logprobs, turn.runs)
        self.token_ids += turn.token_ids

    @classmethod
    def of(cls, row: TrajectoryRow) -> "RolloutTrajectory":
        """A finished trajectory as it was journaled; its reward is the environment's until it is scored."""
        sampled = msgspec.msgpack.decode(row.sampled, type=Sampled)
        if row.reward is not None:
            sampled.reward = row.reward
        tokens = bytearray(row.token_ids)
        branches = row.further_branches()
        return cls(
            row.trajectory,
            row.started_ns,
            0,
            tokens,
            sampled,
            turns=row.turns,
            truncated=row.truncated,
            branches=branches,
            task=row.task,
            metrics=row.metrics_by_name,
        )

    def data(self) -> list[wire.TrajectoryData]:
        """The trajectory for the trainer: a row for each of its branches, all with the member's reward."""
        for sampled in (self.sampled, *(branch.sampled for branch in self.branches)):
            sampled.truncated = self.truncated
        first = wire.TrajectoryData(self.trajectory, self.token_ids, self.sampled)
        for branch in self.branches:
            branch.sampled.reward = self.sampled.reward
        return [first, *(wire.TrajectoryData(self.trajectory, b.token_ids, b.sampled, b.branch) for b in self.branches)]


def stable_hash(*parts: int) -> int:
    """64 bits from integers, the same in every process and on every machine."""
    text = ",".join(str(part) for part in parts).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big")


@dataclass(frozen=True, slots=True)
class RolloutLimits:
    """Limits of trajectories. `sampling` holds for each of their turns, except for its noise and where it ends;
    `evaluation` for those that are evaluated, where it is another. Token ids are below `vocab_size`. There is no
    `environment_timeout_s` where an env worker keeps that time."""

    max_turns: int
    max_context_tokens: int
    environment_timeout_s: float | None
    sampling: SamplingParameters
    vocab_size: int
    evaluation: SamplingParameters | None = None

    def sampling_of(self, trajectory: TrajectoryId) -> SamplingParameters:
        """How the trajectory's turns are drawn, their noise aside."""
        return self.sampling if self.evaluation is None or not is_evaluated(trajectory) else self.evaluation


@dataclass(frozen=True, slots=True)
class ScoringSettings:
    """Arguments of a reward function besides the trajectory: settings of its environment, by name, and its own."""

    environments: Mapping[str, dict[str, Any]]
    reward: dict[str, Any]
    checkpoint: str = ""


class FinishedEpisodes:
    """What trajectories have come to that are over, until the trainer has them.

    `stored` reads those that finished in an earlier process. With `scoring` a function gives the rewards.
    """

    def __init__(
        self,
        seed: int,
        scoring: ScoringSettings | None = None,
        stored: Callable[[TrajectoryId], TrajectoryRow] | None = None,
    ) -> None:
        self.scoring = scoring
        self._seed = seed
        self._stored = stored
        self._episodes: dict[TrajectoryId, RolloutTrajectory | None] = {}
        """None for what is in the journal alone."""

    def add(self, trajectory: TrajectoryId, episode: RolloutTrajectory | None) -> None:
        self._episodes[trajectory] = episode

    def forget(self, trajectories: Iterable[TrajectoryId]) -> None:
        for trajectory in trajectories:
            self._episodes.pop(trajectory, None)

    def saved(self) -> list[TrajectoryId]:
        return list(self._episodes)

    def restore(self, saved: Iterable[TrajectoryId]) -> None:
        self._episodes = dict.fromkeys(saved)

    def to_score(self, trajectory: TrajectoryId, environment: str) -> FinishedTrajectory:
        """What a function needs to score the trajectory."""
        assert self.scoring is not None
        episode = self._episode(trajectory)
        step, group, _ = drawn_from(trajectory)
        return FinishedTrajectory(
            trajectory=trajectory,
            token_ids=ids_of(episode.token_ids),
            trained=episode.sampled.trained(episode.tokens).astype(int).tolist(),
            seed=stable_hash(self._seed, step, group),
            environment_settings=self.scoring.environments[environment],
            environment_reward=episode.sampled.reward,
            settings=self.scoring.reward,
            truncated=episode.truncated,
            task=msgspec.json.decode(episode.task) if episode.task else None,
            branches=[
                FinishedBranch(
                    token_ids=ids_of(branch.token_ids),
                    trained=branch.sampled.trained(len(branch.token_ids) // TOKEN_BYTES).astype(int).tolist(),
                    policy=branch.sampled.policy,
                )
                for branch in episode.branches
            ],
            checkpoint=self.scoring.checkpoint,
        )

    def record_reward(self, trajectory: TrajectoryId, reward: float | None) -> None:
        """Record the result of scoring: the reward, or that there is none."""
        if reward is None:
            self.forget((trajectory,))
        else:
            episode = self._episodes[trajectory] = self._episode(trajectory)
            episode.sampled.reward = reward

    def take(self, trajectories: Sequence[TrajectoryId]) -> list[RolloutTrajectory]:
        episodes = [self._episode(trajectory) for trajectory in trajectories]
        self.forget(trajectories)
        return episodes

    def drop(self, trajectories: Sequence[TrajectoryId]) -> list[RolloutTrajectory]:
        """Returns those of them that have finished."""
        return self.take([trajectory for trajectory in trajectories if trajectory in self._episodes])

    def _episode(self, trajectory: TrajectoryId) -> RolloutTrajectory:
        """Return the episode's result; from the journal if another process ran it, or if it was taken before."""
        episode = self._episodes.get(trajectory)
        if episode is None:
            assert self._stored is not None
            episode = RolloutTrajectory.of(self._stored(trajectory))
        return episode
