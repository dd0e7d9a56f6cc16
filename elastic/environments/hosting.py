"""An env worker that plays token-level episodes: of an environment that a third party has installed.

The run says what to do, frame by frame, and each order of an episode has one answer. Episodes are independent of each
other: while one awaits something, others go on. An environment that raises, takes longer than it may, or answers what
its contract does not allow fails its own episode. An environment that computes for long holds up this process, of which
the run hears nothing then.
"""

import asyncio
import sys
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import structlog
from pydantic import BaseModel

from elastic.environments.answers import Answers, BadAnswer
from elastic.environments.base import Environment
from elastic.environments.calling import ends_caller
from elastic.environments.limits import end_with_input
from elastic.environments.run_link import EnvRunLink, serve_run
from elastic.protocol import front_messages as m
from elastic.protocol.frames import WireError
from elastic.protocol.sampled import ids_of, pack_ids
from elastic.system.installed import installed, is_ours, load_point, package_of
from elastic.system.named_code import CodeUnusable, where
from elastic.system.plain_values import told, whole

log = structlog.get_logger(__name__)

GROUP = "elastic.environments"
"""The entry points of environments."""
AT_ONCE_MAX = 64
"""Orders that begin in one round of the event loop, if those of the round before took no longer than `QUICK_S`.
Answers leave, and signs of life, between two rounds."""
QUICK_S = 0.002
TRACE_CHARACTERS = 4000


@dataclass(frozen=True, kw_only=True)
class HostWork:
    """What such an env worker is to do: for which run, with which environment. `limit_s` bounds each answer; `away_s`
    is how long it goes on without a process at the run."""

    run_dir: Path
    key: str
    kind: type[Environment]
    settings: BaseModel
    limit_s: float
    away_s: float
    inside: bool = False
    """Whether it is in a container."""
    loaded: Callable[[], None] = lambda: None
    """Called once the run has let it in."""
    named: str = "the environment"
    """What messages call it."""


def load_kind(name: str) -> type[Environment]:
    """Import the environment that is installed under this name. Raises `CodeUnusable`."""
    points = installed(GROUP)
    if name not in points:
        there = ", ".join(sorted(points)) or "none"
        raise CodeUnusable(f"environment.kind: found {name!r}; installed for {sys.executable}: {there}")
    try:
        kind = load_point(points[name])
    except CodeUnusable as error:
        raise CodeUnusable(f"environment.kind: {error}") from error
    settings = getattr(kind, "Settings", None)
    if not (isinstance(settings, type) and issubclass(settings, BaseModel)):
        raise CodeUnusable(f"environment.kind: found {name!r}, whose Settings are no pydantic.BaseModel")
    return kind


def words_for(name: str) -> str:
    """What messages call the environment that is installed under this name: another package's has its own."""
    point = installed(GROUP)[name]
    return "the environment" if is_ours(point) else f"the environment {name!r} of the package {package_of(point)}"


def facts(kind: type[Environment]) -> m.EpisodesHosted:
    """What the run has to know of an environment. Raises `CodeUnusable`."""
    try:
        ends = [whole(one) for one in kind.stop_token_ids]
        words = len(kind.vocabulary)
    except Exception as error:
        raise CodeUnusable(
            f"{kind.__name__}: its stop_token_ids and vocabulary: {told(error)}{where(error)}"
        ) from error
    if not all(end is not None and end >= 0 for end in ends):
        found = f"found {kind.stop_token_ids!r}"
        raise CodeUnusable(f"{kind.__name__}.stop_token_ids: {found}; allowed: integers from 0 on")
    return m.EpisodesHosted(tuple(cast("list[int]", ends)), words)


async def serve_episodes(work: HostWork) -> None:
    """Play episodes until the run is over, or a signal. Raises `CodeUnusable`."""
    if work.inside:
        end_with_input()
    hosted = facts(work.kind)
    host = EpisodeHost(lambda: work.kind(work.settings), work.limit_s, lambda said: link.send(said), work.named)

    def welcomed() -> None:
        work.loaded()
        host.begin_anew()
        link.send(hosted)

    link = EnvRunLink(work.run_dir, work.key, work.away_s, host.hear, welcomed)
    await serve_run(link, ())


@dataclass(slots=True)
class _HostedEpisode:
    vocab_size: int
    environment: Environment | None = None
    playing: asyncio.Task[None] | None = None
    over: bool = False
    """It has failed: nothing more is said of it."""


class EpisodeHost:
    """Plays episodes as ordered. `make` makes the environment of one, which messages call `named`; `say` tells the run
    an answer."""

    def __init__(
        self,
        make: Callable[[], Environment],
        limit_s: float,
        say: Callable[[m.FromFront], None],
        named: str = HostWork.named,
    ) -> None:
        self._named = named
        self._make = make
        self._limit_s = limit_s
        self._say = say
        self._episodes: dict[int, _HostedEpisode] = {}
        self._due = deque[m.EpisodeOrder]()
        self._at_once, self._round_s = 1, 0.0
        self._closing = set[asyncio.Task[None]]()

    def begin_anew(self) -> None:
        """Forget all episodes: the run gives numbers anew on each connection."""
        self._due.clear()
        for number in list(self._episodes):
            self._close(number)

    def hear(self, order: m.FromRun) -> None:
        """Take an order. Raises `WireError` for what is none."""
        if not isinstance(order, m.EpisodeOrder):
            raise WireError(f"{type(order).__name__} is nothing for an env worker")
        if not self._due:
            loop = asyncio.get_running_loop()
            self._round_s = loop.time()
            loop.call_soon(self._carry_out)
        self._due.append(order)

    def _carry_out(self) -> None:
        """Begin some of the orders that are due, fewer where those of the last round have computed for long."""
        loop = asyncio.get_running_loop()
        quick = loop.time() - self._round_s < QUICK_S
        self._at_once = min(2 * self._at_once, AT_ONCE_MAX) if quick else max(1, self._at_once // 4)
        self._round_s = loop.time()
        for _ in range(min(self._at_once, len(self._due))):
            self._begin(self._due.popleft())
        if self._due:
            loop.call_soon(self._carry_out)

    def _begin(self, order: m.EpisodeOrder) -> None:
        if isinstance(order, m.CloseEpisode):
            self._close(order.episode)
            return
        if isinstance(order, m.ResetEpisode):
            self._episodes[order.episode] = _HostedEpisode(order.vocab_size)
        episode = self._episodes.get(order.episode)
        if episode is not None and not episode.over:
            episode.playing = asyncio.get_running_loop().create_task(self._play(order, episode))

    async def _play(self, order: m.EpisodeOrder, episode: _HostedEpisode) -> None:
        """Carry out an order and say what came of it."""
        number = order.episode
        answer: m.FromFront
        timer = asyncio.get_running_loop().call_later(self._limit_s, self._give_up, number, episode)
        try:
            answer = await self._answer(order, episode)
        except BadAnswer as error:
            answer = m.EpisodeFailed(number, str(error)[: m.CAUSE_MAX])
        except BaseException as error:
            if ends_caller(error):
                raise
            trace = "".join(traceback.format_exception(error))[-TRACE_CHARACTERS:]  # Without values, as of functions.
            log.warning("the environment raised", trace=trace)
            answer = m.EpisodeFailed(number, f"{self._named} raised {told(error)}"[: m.CAUSE_MAX])
        finally:
            timer.cancel()
        if not episode.over:
            episode.over = isinstance(answer, m.EpisodeFailed)
            self._say(answer)

    def _give_up(self, number: int, episode: _HostedEpisode) -> None:
        episode.over = True
        if episode.playing is not None:
            episode.playing.cancel()
        self._say(m.EpisodeFailed(number, f"{self._named} did not answer within {self._limit_s:g} s"))

    async def _answer(self, order: m.EpisodeOrder, episode: _HostedEpisode) -> m.EpisodeAnswered:
        """Raises `BadAnswer`, and whatever the environment raises."""
        if isinstance(order, m.ResetEpisode):
            episode.environment = self._make()
        environment = episode.environment
        assert environment is not None, "an episode is reset before anything else is asked of it"
        answers = Answers(type(environment).__name__, episode.vocab_size)
        match order:
            case m.ResetEpisode():
                prompt = answers.prompt(await environment.reset(order.seed))
                tag = answers.tag(getattr(environment, "tag", ""))
                return m.EpisodeAnswered(order.episode, pack_ids(prompt), tag=tag)
            case m.StepEpisode():
                result = answers.step(await environment.step(ids_of(order.token_ids)))
                return m.EpisodeAnswered(order.episode, pack_ids(result.token_ids), result.done, result.reward)
            case _:
                reward = answers.reward("truncate", await environment.truncate())
                return m.EpisodeAnswered(order.episode, done=True, reward=reward)

    def _close(self, number: int) -> None:
        episode = self._episodes.pop(number, None)
        if episode is None:
            return
        episode.over = True
        if episode.playing is not None:
            episode.playing.cancel()
        if episode.environment is not None:
            closing = asyncio.get_running_loop().create_task(self._aclose(episode.environment))
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    async def _aclose(self, environment: Environment) -> None:
        try:
            async with asyncio.timeout(self._limit_s):
                await environment.aclose()
        except BaseException as error:  # What the episode came to stands.
            if ends_caller(error):
                raise
            log.warning("environment not closed", error=told(error))
