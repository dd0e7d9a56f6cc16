"""Rollout loops: what an environment does wrong ends its trajectory as failed, and what it did right stands."""

import asyncio
import itertools
from collections.abc import Coroutine, Iterator
from typing import Any, cast

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elastic.core import commands as c
from elastic.core import events as e
from elastic.core.types import InfrastructureCause, SamplingParameters
from elastic.environments.base import StepResult
from elastic.protocol.sampled import ids_of
from elastic.runtime.episodes import RolloutLimits, RolloutTrajectory
from elastic.runtime.journal import TrajectoryRow
from elastic.runtime.rollout import BEGUN_AT_ONCE, Rollouts
from elastic.runtime.status import LostPlays
from tests.standing_clock import StandingClock

LIMITS = RolloutLimits(
    max_turns=4,
    max_context_tokens=64,
    environment_timeout_s=5.0,
    sampling=SamplingParameters(max_new_tokens=8, noise_seed=0),
    vocab_size=8,
)


class OneTurn:
    """An environment whose one turn earns `reward`, and which closes as `aclose` has it."""

    stop_token_ids = ()

    def __init__(self, reward: Any, closing: BaseException | None = None) -> None:
        self._reward = reward
        self._closing = closing

    async def reset(self, seed: int) -> list[int]:
        return [1, 2]

    async def step(self, token_ids: list[int]) -> StepResult:
        return StepResult([], True, reward=self._reward)

    async def truncate(self) -> float:
        raise AssertionError("it was done")

    async def aclose(self) -> None:
        if self._closing is not None:
            raise self._closing


class Endless(OneTurn):
    """Never done; every turn earns `reward` once more."""

    def __init__(self, reward: Any, prompt_tokens: int = 2, observation_tokens: int = 1) -> None:
        super().__init__(reward)
        self._prompt_tokens, self._observation_tokens = prompt_tokens, observation_tokens
        self._turns = 0

    async def reset(self, seed: int) -> list[int]:
        return [1] * self._prompt_tokens

    async def step(self, token_ids: list[int]) -> StepResult:
        self._turns += 1
        return StepResult([3] * self._observation_tokens, False, reward=99.0)

    async def truncate(self) -> float:
        return self._reward * self._turns


def written(episode: RolloutTrajectory) -> TrajectoryRow:
    """As a journal has it."""
    return TrajectoryRow(
        trajectory=episode.trajectory,
        step=0,
        group="0/0",
        started_ns=episode.started_ns,
        ended_ns=0,
        reward=episode.sampled.reward,
        cause="",
        turns=episode.turns,
        policy_tokens=episode.policy_tokens,
        token_ids=bytes(episode.token_ids),
        truncated=episode.truncated,
        sampled=msgspec.msgpack.encode(episode.sampled),
    )


async def play(environment: OneTurn) -> tuple[list[e.Event], list[RolloutTrajectory]]:
    """What the core is told of one trajectory, and the episodes that came with the events that end one."""
    return (await played(environment))[1:]


async def played(environment: OneTurn) -> tuple[Rollouts, list[e.Event], list[RolloutTrajectory]]:
    heard: list[e.Event] = []
    ended: list[RolloutTrajectory] = []

    def feed(event: e.Event, payload: Any = None) -> None:
        if isinstance(event, e.TurnRequested):
            asyncio.get_running_loop().call_soon(rollouts.finish_turn, event.turn)
        else:
            heard.append(event)
            ended.append(payload)

    def make_environment() -> Any:
        return environment

    async with asyncio.TaskGroup() as tasks:
        rollouts = Rollouts(
            1,
            LIMITS,
            make_environment,
            feed,
            lambda: 0,
            lambda work, name: tasks.create_task(work, name=name),
            stored=lambda name: written(next(episode for episode in ended if episode.trajectory == name)),
        )
        rollouts.start(c.StartGroup(step=0, group="0/0", index=0, trajectories=("0/0/0",)))
    return rollouts, heard, ended


@pytest.mark.parametrize(
    "reward", [1, 0.5, -2.0, True, np.float32(0.5), np.int64(2), np.bool_(True), torch.tensor(0.5)]
)
async def test_a_finite_reward_is_the_trajectorys(reward: Any) -> None:
    heard, ended = await play(OneTurn(reward))
    assert heard == [e.TrajectoryFinished(trajectory="0/0/0", reward=float(reward), tokens=0)]
    assert [episode.trajectory for episode in ended] == ["0/0/0"]


async def test_an_order_that_is_given_again_gets_the_same_episodes() -> None:
    """Its trainer may have gone away with the first."""
    rollouts, _, _ = await played(OneTurn(0.5))
    (first,), (again,) = rollouts.take(["0/0/0"]), rollouts.take(["0/0/0"])
    assert again is not first
    assert again.data() == first.data()


@pytest.mark.parametrize(
    "reward", ["1", None, float("nan"), float("inf"), 10**400, 1j, [1.0], np.ones(2), torch.ones(2)]
)
async def test_what_is_no_finite_number_is_never_a_score(reward: Any) -> None:
    heard, ended = await play(OneTurn(reward))
    (failed,) = heard
    assert isinstance(failed, e.TrajectoryFailed)
    assert failed.cause.startswith("OneTurn.step: reward: found ")
    assert type(reward).__name__ in failed.cause
    assert [episode.trajectory for episode in ended] == ["0/0/0"]


@pytest.mark.parametrize(("observation_tokens", "turns"), [(1, LIMITS.max_turns), (20, 3)])
async def test_a_truncated_episode_is_worth_what_its_environment_says(observation_tokens: int, turns: int) -> None:
    """By the limit of turns, and by that of tokens."""
    heard, ended = await play(Endless(0.5, observation_tokens=observation_tokens))
    assert heard == [e.TrajectoryFinished(trajectory="0/0/0", reward=0.5 * turns, tokens=0)]
    assert [(episode.turns, episode.truncated) for episode in ended] == [(turns, True)]


async def test_an_episode_that_is_done_is_not_truncated() -> None:
    _, ended = await play(OneTurn(1.0))
    assert [episode.truncated for episode in ended] == [False]


@pytest.mark.parametrize("reward", ["1", float("nan")])
async def test_a_truncated_episode_without_a_finite_reward_fails(reward: Any) -> None:
    (failed,), _ = await play(Endless(reward))
    assert isinstance(failed, e.TrajectoryFailed)
    assert failed.cause.startswith("Endless.truncate: reward: found ")


async def test_a_prompt_without_room_for_a_turn_is_a_failure() -> None:
    heard, _ = await play(Endless(1.0, prompt_tokens=57))
    (failed,) = heard
    assert isinstance(failed, e.TrajectoryFailed)
    assert failed.cause == "the prompt leaves no room for a turn of 8 tokens in a context of 64"


async def test_an_episode_that_is_over_survives_an_environment_that_does_not_close() -> None:
    heard, _ = await play(OneTurn(1.0, closing=RuntimeError("still locked")))
    assert heard == [e.TrajectoryFinished(trajectory="0/0/0", reward=1.0, tokens=0)]


class Answering(OneTurn):
    """Answers `prompt` to `reset` and `answer` to `step`."""

    def __init__(self, prompt: Any, answer: Any) -> None:
        super().__init__(1.0)
        self._prompt, self._answer = prompt, answer

    async def reset(self, seed: int) -> Any:
        return self._prompt

    async def step(self, token_ids: list[int]) -> Any:
        return self._answer


OVER = StepResult([], True, 1.0)
ids = st.lists(st.integers(0, 7), min_size=1, max_size=6)
no_ids = st.one_of(
    st.sampled_from([None, {}, {1: 2}, "12", b"12", 3, (True,), [True], ["1"], [1.0], [None], [[1]], object()]),
    st.sampled_from([np.ones((2, 2), int), np.ones(2), torch.ones(2), [np.float64(1)], [np.bool_(True)], np.array(3)]),
    st.lists(st.integers(8, 2**70) | st.integers(-(2**70), -1), min_size=1, max_size=4),
)


@given(ids, st.sampled_from([list, tuple, np.array, torch.tensor, lambda ids: [np.int16(i) for i in ids]]))
def test_integers_of_every_library_are_token_ids(told: list[int], make: Any) -> None:
    _, _, (episode,) = asyncio.run(played(Answering(make(told), OVER)))
    assert ids_of(episode.token_ids) == told
    msgspec.msgpack.encode(episode.data())


@given(no_ids, st.booleans())
def test_what_is_no_list_of_token_ids_fails_its_trajectory(answer: Any, at_reset: bool) -> None:
    environment = Answering(answer, OVER) if at_reset else Answering([1], StepResult(answer, False))
    (failed,), (episode,) = asyncio.run(play(environment))
    assert isinstance(failed, e.TrajectoryFailed)
    assert failed.cause.startswith(f"Answering.{'reset' if at_reset else 'step'}: ")
    assert "allowed: " in failed.cause
    assert len(failed.cause) < 300
    msgspec.msgpack.encode(episode.data())


@pytest.mark.parametrize(
    "answer",
    [None, ([], True, 1.0), {"done": True}, 3, *(StepResult([], cast(bool, done)) for done in ("yes", 1))],
)
async def test_what_is_no_result_of_a_step_fails_its_trajectory(answer: Any) -> None:
    (failed,), _ = await play(Answering([1], answer))
    assert isinstance(failed, e.TrajectoryFailed)
    assert failed.cause.startswith("Answering.step: ")


@pytest.mark.parametrize("done", [True, np.bool_(True), torch.tensor(True)])
async def test_switches_of_every_library_end_an_episode(done: Any) -> None:
    heard, _ = await play(Answering([1], StepResult([], done, 1.0)))
    assert heard == [e.TrajectoryFinished(trajectory="0/0/0", reward=1.0, tokens=0)]


class Raising(OneTurn):
    def __init__(self, error: BaseException | None, where: str) -> None:
        super().__init__(1.0)
        self._error, self._where = error, where

    def _perhaps(self, where: str) -> None:
        if where != self._where:
            return
        if self._error is None:
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
        else:
            raise self._error

    async def reset(self, seed: int) -> list[int]:
        self._perhaps("reset")
        await asyncio.sleep(0)
        return [1]

    async def step(self, token_ids: list[int]) -> StepResult:
        self._perhaps("step")
        await asyncio.sleep(0)
        return OVER

    async def aclose(self) -> None:
        self._perhaps("aclose")


ENDINGS = [asyncio.CancelledError(), SystemExit(0), KeyboardInterrupt(), GeneratorExit(), BaseException("odd"), None]


@pytest.mark.parametrize("where", ["reset", "step"])
@pytest.mark.parametrize("error", ENDINGS, ids=repr)
async def test_however_an_environment_ends_a_loop_the_core_hears_of_it(error: BaseException | None, where: str) -> None:
    (failed,), _ = await play(Raising(error, where))
    assert isinstance(failed, e.TrajectoryFailed)
    assert failed.cause.startswith(f"the environment raised {type(error or asyncio.CancelledError()).__name__}")


@pytest.mark.parametrize("error", [one for one in ENDINGS if one is not None], ids=repr)
async def test_however_an_environment_closes_its_episode_stands(error: BaseException) -> None:
    heard, _ = await play(Raising(error, "aclose"))
    assert heard == [e.TrajectoryFinished(trajectory="0/0/0", reward=1.0, tokens=0)]


async def test_who_is_told_to_end_says_nothing() -> None:
    heard: list[e.Event] = []
    begun = asyncio.Event()

    class Waiting(OneTurn):
        async def reset(self, seed: int) -> list[int]:
            begun.set()
            return await asyncio.get_running_loop().create_future()

        async def aclose(self) -> None:
            raise RuntimeError("it does not like to be told")

    for at_once in (False, True):
        begun.clear()
        async with asyncio.TaskGroup() as tasks:
            rollouts = Rollouts(
                *(
                    1,
                    LIMITS,
                    cast(Any, lambda: Waiting(1.0)),
                    lambda event, payload=None: heard.append(event),
                    lambda: 0,
                ),
                lambda work, name: tasks.create_task(work, name=name),
            )
            rollouts.start(c.StartGroup(step=0, group="0/0", index=0, trajectories=("0/0/0",)))
            await begun.wait()
            if at_once:
                rollouts.cancel_all()
            else:
                rollouts.cancel("0/0/0")
    assert heard == []


async def test_of_many_trajectories_few_begin_before_the_loop_comes_to_others() -> None:
    """One that is cancelled before its turn never begins, and nothing is known of it any more."""
    made: list[OneTurn] = []

    def make_environment() -> Any:
        made.append(OneTurn(1.0))
        return made[-1]

    names = tuple(f"0/0/{member}" for member in range(4 * BEGUN_AT_ONCE))
    async with asyncio.TaskGroup() as tasks:
        rollouts = Rollouts(
            *(1, LIMITS, make_environment, lambda event, payload=None: None, lambda: 0),
            lambda work, name: tasks.create_task(work, name=name),
        )
        rollouts.start(c.StartGroup(step=0, group="0/0", index=0, trajectories=names))
        rollouts.cancel(names[-1])
        while len(made) < len(names) - 1:
            before = len(made)
            await asyncio.sleep(0)
            assert len(made) - before <= BEGUN_AT_ONCE
        await asyncio.sleep(0)
        rollouts.cancel_all()
    assert len(made) == len(names) - 1
    assert rollouts.saved() == ({}, [], {}, LostPlays())


@pytest.mark.parametrize("recalled", [False, True])
async def test_a_further_member_begins_where_its_group_did_and_samples_with_noise_of_its_own(recalled: bool) -> None:
    seeds: list[int] = []
    asked: dict[str, int] = {}

    class Seeded(OneTurn):
        async def reset(self, seed: int) -> list[int]:
            seeds.append(seed)
            return await super().reset(seed)

    def feed(event: e.Event, payload: Any = None) -> None:
        if isinstance(event, e.TurnRequested):
            turn = rollouts.prompt(event.turn)
            assert turn is not None
            assert turn.sampling is not None
            asked[event.trajectory] = turn.sampling.noise_seed
            asyncio.get_running_loop().call_soon(rollouts.finish_turn, event.turn)

    group = c.StartGroup(step=0, group="0/0", index=0, trajectories=("0/0/0",))
    further = c.RefillMember(trajectory="0/0/1", replaces="0/0/0", cause=InfrastructureCause.ENGINE)
    async with asyncio.TaskGroup() as tasks:
        rollouts = Rollouts(
            *(1, LIMITS, cast(Any, lambda: Seeded(1.0)), feed, lambda: 0),
            lambda work, name: tasks.create_task(work, name=name),
        )
        if recalled:
            for command in (group, further):
                rollouts.recalled(e.Tick(), command)
            rollouts.resume()
        else:
            rollouts.start(group)
            rollouts.refill(further)
    assert len(seeds) == 2
    assert len(set(seeds)) == 1
    assert len(set(asked.values())) == len(asked) == 2


class Unspeakable(Exception):
    """An error that cannot say what it is."""

    def __init__(self, how: type[BaseException]) -> None:
        self._how = how

    def __str__(self) -> str:
        raise self._how("no words")


class Stubborn(OneTurn):
    """An environment whose `reset` catches what tells it to end, so often."""

    def __init__(self, times: int) -> None:
        super().__init__(1.0)
        self._times = times
        self.caught = 0

    async def reset(self, seed: int) -> list[int]:
        while self.caught < self._times:
            try:
                await asyncio.sleep(3600.0)
            except asyncio.CancelledError:
                self.caught += 1
        return [1, 2]


@pytest.mark.parametrize(
    "error",
    [
        Unspeakable(ValueError),
        Unspeakable(SystemExit),
        OSError(2, "none", "a\udcff.json"),
        ValueError("[/red]\x1b[31m\x00\n" * 10),
        ValueError("x" * 10_000_000),
        TimeoutError("its own"),
    ],
    ids=["unspeakable", "ends", "surrogate", "controls", "long", "timeout"],
)
async def test_whatever_an_error_says_its_cause_is_one_line_that_a_journal_can_hold(error: BaseException) -> None:
    class Raises(OneTurn):
        async def reset(self, seed: int) -> list[int]:
            raise error

    (failed,), _ = await play(Raises(1.0))
    assert isinstance(failed, e.TrajectoryFailed)
    assert failed.cause.startswith(f"the environment raised {type(error).__name__}: ")
    assert failed.cause.isprintable()
    assert len(failed.cause) < 2100
    assert failed.cause.encode()


@pytest.mark.parametrize("tag", ["a\udcff", "a\x1b[31m", "x" * 201], ids=ascii)
async def test_a_tag_that_no_journal_or_terminal_can_hold_is_no_answer(tag: str) -> None:
    class Tagged(OneTurn):
        pass

    Tagged.tag = tag  # type: ignore[attr-defined]
    (failed,), _ = await play(Tagged(1.0))
    assert isinstance(failed, e.TrajectoryFailed)
    assert "a text of at most 200 printable characters" in failed.cause


class Unending(list[int]):
    """It says that it has three."""

    def __iter__(self) -> Iterator[int]:
        return itertools.repeat(1)


async def test_a_prompt_without_token_ids_is_no_answer() -> None:
    (failed,), _ = await play(Endless(1.0, prompt_tokens=0))
    assert isinstance(failed, e.TrajectoryFailed)
    assert failed.cause == "Endless.reset: found no token ids; allowed: at least one"


async def test_ids_that_never_end_are_cut() -> None:
    class Answers(OneTurn):
        async def reset(self, seed: int) -> list[int]:
            return Unending([1, 2, 3])

    (failed,), _ = await play(Answers(1.0))
    assert isinstance(failed, e.TrajectoryFailed)
    assert "leaves no room" in failed.cause


def stubborn(environment: Any, until_s: float) -> tuple[list[e.Event], float]:
    """Return what the core is told until the run ends at `until_s`, and how long that end takes, in seconds."""
    heard: list[e.Event] = []

    async def run() -> float:
        loop = asyncio.get_running_loop()

        def spawn(work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
            return loop.create_task(work, name=name)

        def feed(event: e.Event, payload: Any = None) -> None:
            heard.append(event)

        rollouts = Rollouts(1, LIMITS, lambda: environment, feed, lambda: round(loop.time() * 1e9), spawn)
        async with rollouts.ending():
            rollouts.start(c.StartGroup(step=0, group="0/0", index=0, trajectories=("0/0/0",)))
            await asyncio.sleep(until_s)
            ended_s = loop.time()
        return loop.time() - ended_s

    with asyncio.Runner(loop_factory=StandingClock) as runner:
        return heard, runner.run(run())


@pytest.mark.parametrize("times", [2, 10**9])
def test_an_environment_that_does_not_end_fails_its_trajectory_once(times: int) -> None:
    heard, _ = stubborn(Stubborn(times), until_s=60.0)
    (failed,) = heard
    assert isinstance(failed, e.TrajectoryFailed)
    assert failed.cause == "the environment did not answer within 5 s, and does not end"


@pytest.mark.parametrize(("times", "longest_s"), [(2, 6.0), (10**9, 12.0)])
def test_an_environment_that_does_not_end_holds_up_no_end(times: int, longest_s: float) -> None:
    environment = Stubborn(times)
    heard, took_s = stubborn(environment, until_s=1.0)
    assert heard == []
    assert environment.caught >= 2
    assert took_s <= longest_s
