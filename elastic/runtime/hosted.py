"""Token-level environments in env workers, as the run has them.

A run's env workers dial in (`elastic.environments.hosting`). Each plays many episodes; an episode is given to the one
with the fewest. An env worker that is gone, or silent, loses its episodes: each goes on in another one, to which its
finished turns are replayed, as environments are functions of seed and actions. Where a replay brings something else
than was seen before, `ReplayDiffers` says so: what the policy has sampled then belongs to no episode any more. An order
that env workers keep dying of is carried out alone, and fails its episode at last (`elastic.runtime.blame`).
"""

import asyncio
import contextlib
import hashlib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from typing import ClassVar, Protocol

import structlog
from pydantic import BaseModel

from elastic.core.ids import environment_of
from elastic.core.types import TrajectoryId
from elastic.environments.base import StepResult
from elastic.protocol import front_messages as m
from elastic.protocol.frames import WireError
from elastic.protocol.run_connection import PeerConnection
from elastic.protocol.sampled import ids_of, pack_ids
from elastic.runtime.blame import NO_DEATHS, Blame, Deaths, Floor

log = structlog.get_logger(__name__)

ANSWER_SLACK_S = 5.0
"""An env worker ends each call that takes too long. Beyond that, one that answers nothing of what it was asked counts
as silent, although it gives signs of life."""
DIGEST_BYTES = 8


class EpisodeLost(Exception):
    """The episode has failed, for a cause that its env worker says, or for want of one that lasts."""


class ReplayDiffers(Exception):
    """An environment, told the same turns once more, has answered something else."""


class HostLost(Exception):
    """The env worker of an episode is gone."""


class FailRun(Protocol):
    """Ends a run that has failed for this cause; `bad_input` if it is what the run was given that has to be mended."""

    def __call__(self, cause: str, *, bad_input: bool = False) -> None: ...


class ConnectedHost:
    """An env worker that is connected. It plays once it has said what its environment is (`facts`)."""

    def __init__(self, driver: str, connection: PeerConnection, vocab_size: int) -> None:
        self.driver = driver
        self.facts: m.EpisodesHosted | None = None
        self.episodes = set[int]()
        self.answered = 0
        """Steps."""
        self.floor = Floor()
        self.progress_s = 0.0
        """When it last answered, or was asked while it owed nothing (the loop's time)."""
        self.connection = connection
        self._vocab_size = vocab_size
        self._asked = dict[int, asyncio.Future[m.EpisodeAnswered]]()
        self._alone: Deaths | None = None
        """Those that the episode has seen that is alone now."""
        self._numbers = 0

    @property
    def open(self) -> bool:
        return self.connection.open

    @property
    def blame(self) -> Blame:
        """Return what would be blamed if the env worker died now."""
        if not self._asked:
            return Blame.WORKERS
        if self._alone is not None and self._alone.one_more(running=True).failed:
            return Blame.EPISODES
        return Blame.ANY

    @property
    def owes(self) -> bool:
        """Whether it has not answered something yet."""
        return bool(self._asked)

    def enter(self) -> int:
        """The number of one more episode."""
        self._numbers += 1
        self.episodes.add(self._numbers)
        return self._numbers

    @contextlib.asynccontextmanager
    async def running(self, deaths: Deaths) -> AsyncIterator[None]:
        """A context in which an episode that has seen these `deaths` may ask; the only one, if it is to be alone."""
        alone = deaths.alone
        await self.floor.take(alone=alone)
        self._alone = deaths if alone else None
        try:
            yield
        finally:
            self._alone = None
            self.floor.give(alone=alone)

    async def reset(self, number: int, seed: int) -> m.EpisodeAnswered:
        """Begin the episode of this number. Raises as `ask` does."""
        return await self.ask(m.ResetEpisode(number, seed, self._vocab_size))

    async def ask(self, order: m.ResetEpisode | m.StepEpisode | m.TruncateEpisode) -> m.EpisodeAnswered:
        """Raises `HostLost`, and `EpisodeLost` where the environment has failed."""
        if not self.open:
            raise HostLost(str(self.connection.cause or "its env worker has left"))
        loop = asyncio.get_running_loop()
        if not self._asked:
            self.progress_s = loop.time()
        asked = self._asked[order.episode] = loop.create_future()
        self.connection.send(order)
        try:
            answer = await asked
        finally:
            self._asked.pop(order.episode, None)
        self.answered += not isinstance(order, m.ResetEpisode)
        return answer

    def leave(self, number: int) -> None:
        """Nothing more is asked of the episode."""
        if number in self.episodes:
            self.episodes.discard(number)
            self.connection.send(m.CloseEpisode(number))

    def hear(self, message: m.EpisodeAnswered | m.EpisodeFailed) -> None:
        self.progress_s = asyncio.get_running_loop().time()
        asked = self._asked.pop(message.episode, None)
        if asked is None or asked.done():
            return  # Nobody waits for it any more.
        if isinstance(message, m.EpisodeFailed):
            asked.set_exception(EpisodeLost(message.cause))
        else:
            asked.set_result(message)

    def lose(self, cause: str) -> None:
        """It is gone, with all that it plays."""
        self.episodes.clear()
        for asked in list(self._asked.values()):
            if not asked.done():
                asked.set_exception(HostLost(cause))
        self._asked.clear()


class EpisodeHosts:
    """The env workers of a run's token-level `environments`. They are `elastic.runtime.agents.env_workers.Drivers`.

    Token ids are below `vocab_size`. `fail` ends the run for a cause.
    """

    def __init__(self, environments: Collection[str], vocab_size: int, fail: FailRun) -> None:
        self.environments = environments
        self._vocab_size = vocab_size
        self._fail = fail
        self.connected: dict[str, ConnectedHost] = {}
        """By driver."""
        self._heard_s: dict[str, float] = {}
        self._answered = Counter[str]()
        self._unusable: dict[str, str] = {}
        """Why env workers cannot play, by driver."""
        self._blames: dict[str, Blame] = {}
        """What the last death of each env worker is blamed on."""
        self._come = asyncio.Event()

    def make(self, environment: str) -> "RemoteEnvironment":
        """An episode's environment of this name."""
        return RemoteEnvironment(self, environment)

    async def free(self, environment: str) -> ConnectedHost:
        """The env worker with the fewest episodes, once there is any: for how long there may be none, the code that
        starts them says."""
        while True:
            there = [
                host
                for driver, host in self.connected.items()
                if environment_of(driver) == environment and host.facts is not None and host.open
            ]
            if there:
                return min(there, key=lambda host: len(host.episodes))
            self._come.clear()
            await self._come.wait()

    # Env workers that dial in (`elastic.runtime.agents.hub`)

    @property
    def connections(self) -> int:
        return len(self.connected)

    def serves(self, driver: str) -> bool:
        return environment_of(driver) in self.environments

    def take(self, connection: PeerConnection, driver: str, holds: list[TrajectoryId]) -> None:
        """Another connection of the same env worker is over."""
        if (former := self.connected.get(driver)) is not None:
            self._lost(former, "its env worker has come anew")
            former.connection.abort()
        host = self.connected[driver] = ConnectedHost(driver, connection, self._vocab_size)
        self._heard_s[driver] = asyncio.get_running_loop().time()
        connection.take_over(
            f"env worker {driver}",
            lambda said: self._hear(host, said),
            lambda cause: self._lost(host, f"its env worker is gone: {cause}"),
        )

    def close(self) -> None:
        for host in list(self.connected.values()):
            host.connection.close()

    def _hear(self, host: ConnectedHost, messages: list[m.FromFront]) -> None:
        self._heard_s[host.driver] = asyncio.get_running_loop().time()
        for message in messages:
            match message:
                case m.EpisodeAnswered() | m.EpisodeFailed():
                    host.hear(message)
                case m.EpisodesHosted():
                    self._introduce(host, message)
                case m.DriverBeat():
                    pass
                case m.EnvironmentUnusable(cause):
                    self._unusable[host.driver] = cause
                    host.connection.close()
                case _:
                    raise WireError(f"{type(message).__name__} is nothing that such an env worker may say")

    def _introduce(self, host: ConnectedHost, facts: m.EpisodesHosted) -> None:
        environment = environment_of(host.driver)
        if facts.words > self._vocab_size:
            self._fail(
                f"model.checkpoint has a vocabulary of {self._vocab_size} tokens; environment {environment!r} needs at "
                f"least {facts.words}",
                bad_input=True,
            )
            return
        host.facts = facts
        self._come.set()

    def _lost(self, host: ConnectedHost, cause: str) -> None:
        if self.connected.get(host.driver) is host:
            del self.connected[host.driver]
        self._answered[host.driver] += host.answered
        host.answered = 0
        self._blames[host.driver] = host.blame
        host.lose(cause)

    # What is known of them

    def heard_s(self, driver: str) -> float | None:
        heard_s, host = self._heard_s.get(driver), self.connected.get(driver)
        if heard_s is None or host is None or not host.owes:
            return heard_s
        return min(heard_s, host.progress_s + ANSWER_SLACK_S)

    def unusable(self, driver: str) -> str:
        return self._unusable.get(driver, "")

    def done(self, driver: str) -> int:
        host = self.connected.get(driver)
        return self._answered[driver] + (0 if host is None else host.answered)

    def lost(self, driver: str, holds: Collection[TrajectoryId], cause: str) -> Blame:
        if (host := self.connected.get(driver)) is not None:
            self._lost(host, cause)
            host.connection.abort()
        return self._blames.pop(driver, Blame.WORKERS)


class _NoSettings(BaseModel):
    pass


class RemoteEnvironment:
    """An episode's environment in an env worker (`elastic.environments.base.Environment`).

    Each method raises `EpisodeLost` and `ReplayDiffers`, and waits for as long as it takes to find an env worker.
    """

    Settings: ClassVar[type[BaseModel]] = _NoSettings
    vocabulary: ClassVar[tuple[str, ...]] = ()
    stop_token_ids: tuple[int, ...] = ()
    """Those that the env worker says, once the episode is reset."""

    def __init__(self, hosts: EpisodeHosts, environment: str) -> None:
        self.tag = ""
        self._hosts = hosts
        self._environment = environment
        self._host: ConnectedHost | None = None
        self._number = 0
        """The episode's number in its env worker."""
        self._seed = 0
        self._turns: list[bytes] = []
        """The finished ones."""
        self._seen: list[bytes] = []
        """Digests of what was answered to the reset and to these."""
        self._stands = False
        """Whether its env worker has the episode as it stands."""
        self._deaths = NO_DEATHS
        """The deaths during the order that is under way."""

    async def reset(self, seed: int) -> list[int]:
        self._seed = seed
        answer = await self._carried_out(self._reset)
        self._seen.append(_digest(answer))
        self.tag = answer.tag
        return ids_of(answer.token_ids)

    async def step(self, token_ids: list[int]) -> StepResult:
        turn = pack_ids(token_ids)
        answer = await self._carried_out(lambda host: host.ask(m.StepEpisode(self._number, turn)))
        self._turns.append(turn)
        self._seen.append(_digest(answer))
        return StepResult(ids_of(answer.token_ids), answer.done, answer.reward)

    async def truncate(self) -> float:
        answer = await self._carried_out(lambda host: host.ask(m.TruncateEpisode(self._number)))
        return answer.reward

    async def aclose(self) -> None:
        if self._host is not None:
            self._host.leave(self._number)
            self._host = None

    async def _reset(self, host: ConnectedHost) -> m.EpisodeAnswered:
        return await host.reset(self._number, self._seed)

    async def _carried_out(self, order: Callable[[ConnectedHost], Awaitable[m.EpisodeAnswered]]) -> m.EpisodeAnswered:
        """What an env worker answers, whichever it is."""
        while True:
            host = self._host if self._host is not None and self._host.open else await self._found()
            runs = False
            try:
                async with host.running(self._deaths):
                    runs = host.open  # It may have gone while others were running.
                    if not self._stands:
                        await self._replay(host)
                    answer = await order(host)
            except HostLost as lost:
                self._host = None
                if runs:
                    self._deaths = self._deaths.one_more(running=True)
                alone = self._deaths.alone
                log.info("an episode goes on elsewhere", environment=self._environment, alone=alone, cause=str(lost))
                if self._deaths.failed:
                    raise EpisodeLost(self._deaths.told(str(lost))) from lost
            else:
                self._stands, self._deaths = True, NO_DEATHS
                return answer

    async def _found(self) -> ConnectedHost:
        """An env worker that knows nothing of the episode yet."""
        host = self._host = await self._hosts.free(self._environment)
        assert host.facts is not None
        self._number, self._stands, self.stop_token_ids = host.enter(), False, host.facts.stop_token_ids
        return host

    async def _replay(self, host: ConnectedHost) -> None:
        """Have it begin, and say the finished turns again. Raises `HostLost`, and `ReplayDiffers`."""
        orders = [self._reset, *map(self._again, self._turns)] if self._seen else []
        for number, (order, seen) in enumerate(zip(orders, self._seen, strict=True)):
            if _digest(await order(host)) != seen:
                said = f"turn {number}" if number else "its reset"
                raise ReplayDiffers(f"the environment did not repeat itself: its answer to {said} was another one")

    def _again(self, turn: bytes) -> Callable[[ConnectedHost], Awaitable[m.EpisodeAnswered]]:
        return lambda host: host.ask(m.StepEpisode(self._number, turn))


def _digest(answer: m.EpisodeAnswered) -> bytes:
    return hashlib.blake2b(answer.token_ids, digest_size=DIGEST_BYTES, key=b"%d" % answer.done).digest()
