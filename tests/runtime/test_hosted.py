"""Token-level environments in env workers, from the run's side: episodes outlive the env workers that play them."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any, ClassVar, cast

import pytest
from pydantic import BaseModel

from elastic.core import commands as c
from elastic.core import events as e
from elastic.core.types import Chunk, SamplingParameters
from elastic.environments.base import Environment, StepResult
from elastic.environments.hosting import EpisodeHost
from elastic.protocol import front_messages as m
from elastic.protocol import wire
from elastic.protocol.connection import over_socket
from elastic.protocol.frames import RefusedFrame
from elastic.protocol.run_secrets import RunSecrets
from elastic.protocol.sampled import pack_ids, pack_logprobs
from elastic.runtime.agents import Doorkeeper, notes
from elastic.runtime.blame import ALONE_MAX, TOGETHER_MAX
from elastic.runtime.episodes import RolloutLimits, RolloutTrajectory
from elastic.runtime.hosted import ANSWER_SLACK_S, EpisodeHosts, EpisodeLost
from elastic.runtime.rollout import Rollouts
from elastic.runtime.status import LostPlays

SECRETS = RunSecrets(b"0" * 32)
WORDS = 64


async def until(holds: Callable[[], bool]) -> None:
    while not holds():  # noqa: ASYNC110
        await asyncio.sleep(0.001)


class Adding:
    """Each turn is answered by the sum of all that was said, and the seed; the third one ends the episode."""

    class Settings(BaseModel):
        pass

    vocabulary: ClassVar[tuple[str, ...]] = tuple(map(str, range(WORDS)))
    stop_token_ids: ClassVar[tuple[int, ...]] = (9,)
    drift: ClassVar[int] = 0
    """What instances of another env worker answer besides."""

    def __init__(self) -> None:
        self._said: list[int] = []
        self._turns = 0

    async def reset(self, seed: int) -> list[int]:
        self._said = [seed]
        return [seed % WORDS]

    async def step(self, token_ids: list[int]) -> StepResult:
        if 13 in token_ids:
            raise ValueError("no thirteen")
        self._turns += 1
        self._said += token_ids
        total = (sum(self._said) + self.drift) % WORDS
        return StepResult([total], self._turns == 3, float(total))

    async def truncate(self) -> float:
        return -1.0

    async def aclose(self) -> None:
        pass


class Hanging(Adding):
    async def step(self, token_ids: list[int]) -> StepResult:
        await asyncio.Event().wait()
        raise AssertionError


def hear_all(host: EpisodeHost, said: list[m.FromRun]) -> None:
    for one in said:
        host.hear(one)


class Workers:
    """Env workers on this loop, each on a connection of its own."""

    def __init__(self) -> None:
        self.failed: list[str] = []
        self.hosts = EpisodeHosts(("theirs",), WORDS, self.fail)
        self.doorkeeper = Doorkeeper("run", SECRETS, lambda: False, self.hosts)
        self.ends: list[Any] = []

    def fail(self, cause: str, *, bad_input: bool = False) -> None:
        assert bad_input
        self.failed.append(cause)

    async def begin(
        self, driver: str = "theirs_0", kind: type[Adding] = Adding, words: int = WORDS
    ) -> Callable[[], None]:
        """Returns what cuts its connection off."""
        here, there = socket.socketpair()
        near = await over_socket(here, m.RUN_SIDE, "an env worker")
        far = await over_socket(there, m.FRONT_SIDE, "the run")
        far.send(m.DriverHello(m.FRONT_VERSION, SECRETS.driver_key(driver)))
        await self.doorkeeper.welcome(near)
        assert isinstance(await far.receive(), m.FrontWelcome)
        host = EpisodeHost(
            lambda: cast(Environment, kind()), 0.2, far.send, "the environment 'adding' of the package sums 1"
        )
        far.take_over("the run", lambda said: hear_all(host, said))
        far.send(m.EpisodesHosted(kind.stop_token_ids, words))
        self.ends.append(far)
        return far.abort


@pytest.fixture
async def workers() -> AsyncIterator[Workers]:
    made = Workers()
    async with asyncio.timeout(20):
        yield made
    for end in made.ends:
        end.abort()
    made.hosts.close()


async def test_an_episode_goes_on_elsewhere_as_if_nothing_were(workers: Workers) -> None:
    undisturbed = await Adding().reset(5)
    cut = await workers.begin()
    environment = workers.hosts.make("theirs")
    assert await environment.reset(5) == undisturbed
    assert environment.stop_token_ids == (9,)
    assert (await environment.step([1])).token_ids == [6]
    cut()
    going_on = asyncio.create_task(environment.step([2]))
    await asyncio.sleep(0)
    assert not going_on.done(), "nobody plays"
    await workers.begin("theirs_1")
    assert (await going_on).token_ids == [8]
    last = await environment.step([3])
    assert (last.done, last.reward) == (True, 11.0)
    assert (workers.hosts.done("theirs_0"), workers.hosts.done("theirs_1")) == (1, 3)


@pytest.mark.parametrize(
    "hello",
    [
        m.FrontHello(m.FRONT_VERSION, 1),
        m.DriverHello(m.FRONT_VERSION - 1, SECRETS.driver_key("theirs_0")),
        m.DriverHello(m.FRONT_VERSION, SECRETS.driver_key("another_0")),
        m.DriverHello(m.FRONT_VERSION, SECRETS.viewer_key("judge")),
        m.DriverHello(m.FRONT_VERSION, "no key"),
    ],
    ids=["a front, where none is served", "another version", "another environment", "a viewer", "no key"],
)
async def test_who_has_no_business_here_is_not_let_in(hello: m.FromFront, workers: Workers) -> None:
    here, there = socket.socketpair()
    near, far = await over_socket(here, m.RUN_SIDE, "it"), await over_socket(there, m.FRONT_SIDE, "the run")
    far.send(hello)
    await workers.doorkeeper.welcome(near)
    assert isinstance(refused := await far.receive(), RefusedFrame)
    assert (refused.retry, workers.hosts.connections) == (False, 0)
    far.abort()


async def test_an_episode_is_given_to_who_plays_fewest(workers: Workers) -> None:
    await workers.begin("theirs_0")
    await workers.begin("theirs_1")
    made = [workers.hosts.make("theirs") for _ in range(4)]
    for environment in made:
        await environment.reset(1)
    of_each = [len(host.episodes) for host in workers.hosts.connected.values()]
    assert of_each == [2, 2]
    for environment in made:
        await environment.aclose()
    assert not any(host.episodes for host in workers.hosts.connected.values())


async def test_what_the_environment_does_wrong_is_its_episodes_end(workers: Workers) -> None:
    await workers.begin()
    environment = workers.hosts.make("theirs")
    await environment.reset(5)
    with pytest.raises(
        EpisodeLost, match="the environment 'adding' of the package sums 1 raised ValueError: no thirteen"
    ):
        await environment.step([13])


async def test_a_call_that_waits_for_ever_is_given_up(workers: Workers) -> None:
    await workers.begin(kind=Hanging)
    environment = workers.hosts.make("theirs")
    await environment.reset(5)
    with pytest.raises(EpisodeLost, match=r"did not answer within 0\.2 s"):
        await environment.step([1])


async def test_an_episode_whose_env_workers_keep_dying_has_failed(workers: Workers) -> None:
    cut = await workers.begin(kind=Hanging)
    environment = workers.hosts.make("theirs")
    await environment.reset(5)
    stepping = asyncio.create_task(environment.step([1]))
    for left in reversed(range(TOGETHER_MAX + ALONE_MAX)):
        await until(lambda: any(host.owes for host in workers.hosts.connected.values()))
        cut()
        await until(lambda: not workers.hosts.connected)
        if left:
            cut = await workers.begin(kind=Hanging)
    with pytest.raises(
        EpisodeLost,
        match="4 env workers in a row died of it, the last 2 while nothing else ran: its env worker is gone",
    ):
        await stepping


async def test_a_checkpoint_that_lacks_words_ends_the_run(workers: Workers) -> None:
    await workers.begin(words=WORDS + 1)
    await until(lambda: bool(workers.failed))
    assert "has a vocabulary of 64 tokens; environment 'theirs' needs at least 65" in workers.failed[0]


async def test_who_owes_an_answer_for_too_long_counts_as_silent(workers: Workers) -> None:
    await workers.begin()
    host = workers.hosts.connected["theirs_0"]
    asking = asyncio.create_task(host.ask(m.StepEpisode(7, b"")))  # No episode of its: nothing will answer.
    await until(lambda: host.owes and host.facts is not None)
    assert (workers.hosts.heard_s("theirs_0") or 0) < host.progress_s + ANSWER_SLACK_S
    host.progress_s -= 2 * ANSWER_SLACK_S
    assert workers.hosts.heard_s("theirs_0") == host.progress_s + ANSWER_SLACK_S
    asking.cancel()


class Policy:
    """Generates what it is asked for: turns of one token, their own numbers. It is the core, too."""

    def __init__(self, workers: Workers) -> None:
        self.noted: list[notes.AgentNote] = []
        self.asked: list[e.TurnRequested] = []
        self.over: asyncio.Future[tuple[e.Event, RolloutTrajectory]] = asyncio.get_running_loop().create_future()
        self.held = ""
        """The turn that waits until `hold` is set."""
        self.hold = asyncio.Event()
        self._tasks: set[asyncio.Task[Any]] = set()
        limits = RolloutLimits(4, 100, None, SamplingParameters(max_new_tokens=4, noise_seed=0), WORDS)
        make = cast("Callable[[], Environment]", lambda: workers.hosts.make("theirs"))
        self.rollouts = Rollouts(7, limits, make, self.feed, lambda: 0, self._spawn)

    def _spawn(self, work: Any, name: str) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        return task

    def feed(self, event: e.Event, payload: Any = None) -> None:
        match event:
            case e.TurnRequested():
                self.asked.append(event)
                self._spawn(self._generate(event), event.turn)
            case e.AgentNoted():
                self.noted.append(notes.decode_note(event.note))
            case _:
                self.over.set_result((event, payload))

    async def _generate(self, event: e.TurnRequested) -> None:
        if event.turn == self.held:
            await self.hold.wait()
        turn = self.rollouts.prompt(event.turn)
        assert turn is not None
        assert turn.sampling is not None
        assert turn.sampling.stop_token_ids == (9,)
        turn.accept(pack_ids([1 + int(event.turn[-1])]), pack_logprobs([-1.0]), 0, "worker")
        self.rollouts.finish_turn(event.turn)


class Drifting(Adding):
    drift = 1


async def test_a_replay_that_differs_begins_the_trajectory_again(workers: Workers) -> None:
    """With turns of higher numbers; what it had sampled is lost, and neither trained nor mixed with what follows."""
    policy = Policy(workers)
    policy.held = "0/0/0/1"
    cut = await workers.begin()
    policy.rollouts.start(c.StartGroup(step=0, group="0/0", index=0, trajectories=("0/0/0",)))
    await until(lambda: len(policy.asked) == 2)
    cut()
    await until(lambda: not workers.hosts.connected)
    await workers.begin("theirs_1", kind=Drifting)
    policy.hold.set()
    event, episode = await policy.over
    assert isinstance(event, e.TrajectoryFinished)
    assert [one.turn for one in policy.asked] == [f"0/0/0/{number}" for number in range(5)]
    (again,) = policy.noted
    assert again == notes.BegunAgain(
        "0/0/0", "the environment did not repeat itself: its answer to turn 1 was another one", 2
    )
    assert policy.rollouts.lost == LostPlays(times=1, tokens=2)
    assert (event.tokens, episode.turns, episode.sampled.tokens) == (3, 3, 3)
    assert episode.sampled.reward == event.reward == float((episode.seed + 3 + 4 + 5 + 1) % WORDS)


async def test_a_trajectory_that_has_begun_again_is_recalled_as_it_stands(workers: Workers) -> None:
    """Another process of the run goes on with the turns since then, and asks for none of them twice."""
    policy = Policy(workers)
    rollouts = policy.rollouts
    rollouts.recalled(e.Tick(), c.StartGroup(step=0, group="0/0", index=0, trajectories=("0/0/0",)))
    for number, of in ((0, 0), (1, 2), (2, 0)):
        if number == 2:
            note = notes.BegunAgain("0/0/0", "it did not repeat itself", 2)
            rollouts.recalled(e.AgentNoted(note=notes.encode_note(note)), None)
        prompt = 1 + of
        turn = f"0/0/0/{number}"
        rollouts.recalled(e.TurnRequested(turn=turn, trajectory="0/0/0", prompt_tokens=prompt, max_new_tokens=4), None)
        frame = wire.Tokens.of([(Chunk(0, 0, 1, 0), [1 + number], [-1.0])])
        event = e.TokensReceived(worker="worker", epoch=0, chunks=frame.chunks)
        rollouts.accept(event, c.AcceptTokens(chunks=(0,), turns=(turn,)), frame)
        rollouts.recalled(e.Tick(), c.FinishTurn(turn=turn))
    rollouts.restore(cast(Any, rollouts.saved()))
    await workers.begin()
    rollouts.resume()
    event, episode = await policy.over
    assert isinstance(event, e.TrajectoryFinished)
    assert [one.turn for one in policy.asked] == ["0/0/0/3", "0/0/0/4"]
    assert (episode.turns, rollouts.lost) == (3, LostPlays(times=1, tokens=2))
