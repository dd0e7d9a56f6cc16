"""Rollout loops: one task a trajectory, from its environment's reset to its reward.

A loop asks for a turn and waits; which workers generate it, and how often it moves, it never learns. Its reward is
the environment's, unless a function is to compute it: then its trajectory ends once the core says so. An episode that
a limit of turns or tokens ends is truncated, and its environment says what it is worth so far. What is not the policy's
doing (an environment that raises or hangs, a prompt that leaves no room for a turn, a turn given up) ends the
trajectory as failed, with its cause, and is never scored.
"""

import asyncio
import contextlib
import hashlib
import itertools
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field

import structlog

from elastic import wire
from elastic.core import events as e
from elastic.core.types import TrajectoryId, TurnId
from elastic.envs.base import Environment
from functions.base import BadResult
from functions.rewards import score

log = structlog.get_logger(__name__)


class TurnFailed(Exception):
    """The turn was given up for a cause that is not the policy's."""


class NoRoom(Exception):
    """The context has no room for a single turn after the prompt."""


@dataclass(slots=True)
class OpenTurn:
    """A turn in progress: its context, what is accepted so far, and who waits for it."""

    id: TurnId
    trajectory: TrajectoryId
    prompt: list[int]
    noise_seed: int
    requested_ns: int
    done: asyncio.Future[None]
    token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    versions: list[int] = field(default_factory=list[int])
    first_token_ns: int | None = None
    attempts: int = 0
    cached_tokens: int = 0
    worker: str = ""

    def accept(self, chunk: wire.Chunk, now_ns: int) -> None:
        if self.first_token_ns is None:
            self.first_token_ns = now_ns
        self.token_ids += chunk.token_ids
        self.logprobs += chunk.logprobs
        self.versions += [chunk.weights_version] * len(chunk.token_ids)
        self.cached_tokens += chunk.cached_tokens


@dataclass(slots=True)
class Episode:
    """A trajectory's tokens so far; `trained` marks those that the policy sampled."""

    trajectory: TrajectoryId
    started_ns: int
    seed: int
    token_ids: list[int] = field(default_factory=list[int])
    trained: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    versions: list[int] = field(default_factory=list[int])
    turns: int = 0
    tag: str = ""
    reward: float = 0.0
    truncated: bool = False
    """A limit of turns or tokens ended it, not its environment."""

    def observe(self, token_ids: list[int]) -> None:
        count = len(token_ids)
        self.token_ids += token_ids
        self.trained += [0] * count
        self.logprobs += [0.0] * count
        self.versions += [0] * count

    def act(self, turn: OpenTurn) -> None:
        self.turns += 1
        self.token_ids += turn.token_ids
        self.trained += [1] * len(turn.token_ids)
        self.logprobs += turn.logprobs
        self.versions += turn.versions

    @property
    def policy_tokens(self) -> int:
        return sum(self.trained)

    def policy_versions(self) -> list[int]:
        """The weights version of each token that the policy sampled."""
        return list(itertools.compress(self.versions, self.trained))

    def data(self) -> wire.TrajectoryData:
        return wire.TrajectoryData(
            self.trajectory, self.token_ids, self.trained, self.logprobs, self.versions, self.reward
        )


def stable_hash(*parts: int) -> int:
    """64 bits from integers, the same in every process and on every machine."""
    text = ",".join(str(part) for part in parts).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big")


@dataclass(frozen=True, slots=True)
class RolloutLimits:
    max_turns: int
    max_tokens_per_turn: int
    max_context_tokens: int
    environment_timeout_s: float


class Rollouts:
    """The loops of the trajectories that run now. `feed` takes events to the core; `clock_ns` is the run's time."""

    def __init__(
        self,
        seed: int,
        limits: RolloutLimits,
        make_environment: Callable[[], Environment],
        feed: Callable[[e.Event], None],
        clock_ns: Callable[[], int],
        on_end: Callable[[Episode, str], None],
        *,
        scored_by_function: bool = False,
    ) -> None:
        self.open_turns: dict[TurnId, OpenTurn] = {}
        self.finished: dict[TrajectoryId, Episode] = {}
        self._seed = seed
        self._limits = limits
        self._make_environment = make_environment
        self._feed = feed
        self._clock_ns = clock_ns
        self._on_end = on_end
        self._scored_by_function = scored_by_function
        self._running: dict[TrajectoryId, Episode] = {}
        self._tasks: dict[TrajectoryId, asyncio.Task[None]] = {}

    def start(self, trajectory: TrajectoryId, tasks: asyncio.TaskGroup) -> None:
        task = tasks.create_task(self._run(trajectory), name=f"trajectory {trajectory}")
        self._tasks[trajectory] = task
        task.add_done_callback(lambda _: self._tasks.pop(trajectory, None))

    def cancel(self, trajectory: TrajectoryId) -> None:
        task = self._tasks.get(trajectory)
        if task is not None:
            task.cancel()

    def cancel_all(self) -> None:
        for task in list(self._tasks.values()):
            task.cancel()

    def episodes_of(self, trajectories: Iterable[TrajectoryId]) -> list[Episode]:
        """Those that run, as far as they have come, and those that have finished and are not taken yet."""
        known = (self._running.get(trajectory) or self.finished.get(trajectory) for trajectory in trajectories)
        return [episode for episode in known if episode is not None]

    def finish_turn(self, turn: TurnId) -> OpenTurn | None:
        """Hand the turn's tokens to its loop."""
        record = self.open_turns.pop(turn, None)
        if record is not None and not record.done.done():
            record.done.set_result(None)
        return record

    def fail_turn(self, turn: TurnId, cause: str) -> None:
        record = self.open_turns.pop(turn, None)
        if record is not None and not record.done.done():
            record.done.set_exception(TurnFailed(cause))

    async def _run(self, trajectory: TrajectoryId) -> None:
        step, group, _ = (int(part) for part in trajectory.split("/"))
        episode = Episode(trajectory, self._clock_ns(), stable_hash(self._seed, step, group))
        self._running[trajectory] = episode
        try:
            async with self._environment() as environment:
                await self._play(episode, environment)
        except (TurnFailed, NoRoom, BadResult) as failure:
            self._failed(episode, str(failure))
        except TimeoutError:
            limit_s = self._limits.environment_timeout_s
            self._failed(episode, f"the environment did not answer within {limit_s:g} s")
        except Exception as error:
            self._failed(episode, f"the environment raised {type(error).__name__}: {error}")
        else:
            self._over(episode)
        finally:
            self._running.pop(trajectory, None)
            self.open_turns.pop(f"{trajectory}/{episode.turns}", None)

    @contextlib.asynccontextmanager
    async def _environment(self) -> AsyncIterator[Environment]:
        environment = self._make_environment()
        try:
            yield environment
        finally:
            try:
                async with asyncio.timeout(self._limits.environment_timeout_s):
                    await environment.aclose()
            except Exception as error:  # what the episode came to stands
                log.warning("environment not closed", error=repr(error))

    def _over(self, episode: Episode) -> None:
        self.finished[episode.trajectory] = episode
        tokens = episode.policy_tokens
        if self._scored_by_function:
            self._feed(e.RewardRequested(trajectory=episode.trajectory, tokens=tokens))
        else:
            self._on_end(episode, "")
            self._feed(e.TrajectoryFinished(trajectory=episode.trajectory, reward=episode.reward, tokens=tokens))

    def record_reward(self, trajectory: TrajectoryId, reward: float | None, cause: str) -> None:
        """What came of scoring it: its reward, or why it has none."""
        if reward is None:
            self._on_end(self.finished.pop(trajectory), cause)
        else:
            episode = self.finished[trajectory]
            episode.reward = reward
            self._on_end(episode, "")

    def _failed(self, episode: Episode, cause: str) -> None:
        self._on_end(episode, cause)
        self._feed(e.TrajectoryFailed(trajectory=episode.trajectory, cause=cause))

    async def _play(self, episode: Episode, environment: Environment) -> None:
        limits = self._limits
        step, group, member = (int(part) for part in episode.trajectory.split("/"))
        async with asyncio.timeout(limits.environment_timeout_s):
            episode.observe(await environment.reset(episode.seed))
        episode.tag = getattr(environment, "tag", "")
        if not self._has_room(episode):
            raise NoRoom(
                f"the prompt leaves no room for a turn of {limits.max_tokens_per_turn} tokens "
                f"in a context of {limits.max_context_tokens}"
            )
        while episode.turns < limits.max_turns and self._has_room(episode):
            noise_seed = stable_hash(self._seed, step, group, member, episode.turns)
            turn = await self._generate(episode, noise_seed)
            episode.act(turn)
            async with asyncio.timeout(limits.environment_timeout_s):
                result = await environment.step(turn.token_ids)
            if result.done:
                episode.reward = score(result.reward)
                return
            episode.observe(result.token_ids)
        episode.truncated = True
        async with asyncio.timeout(limits.environment_timeout_s):
            episode.reward = score(await environment.truncate())

    def _has_room(self, episode: Episode) -> bool:
        return len(episode.token_ids) + self._limits.max_tokens_per_turn <= self._limits.max_context_tokens

    async def _generate(self, episode: Episode, noise_seed: int) -> OpenTurn:
        turn_id = f"{episode.trajectory}/{episode.turns}"
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        turn = OpenTurn(turn_id, episode.trajectory, list(episode.token_ids), noise_seed, self._clock_ns(), done)
        self.open_turns[turn_id] = turn
        self._feed(
            e.TurnRequested(
                turn=turn_id,
                trajectory=episode.trajectory,
                prompt_tokens=len(turn.prompt),
                max_new_tokens=self._limits.max_tokens_per_turn,
                tag=episode.tag,
            )
        )
        await done
        return turn
