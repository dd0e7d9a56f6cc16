"""An env worker: a process of a run that plays its episodes by users' code.

It dials the run, asks for trajectories, as many as it may play at once, has the function of each play it, and says what
came of it. Model calls go to the run's fronts by HTTP. What the function raises, or returns that is no outcome, fails
its trajectory; what holds up this process the run notices, since it hears nothing more.
"""

import asyncio
import importlib
import inspect
import random
import traceback
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeAlias, cast

import httpx
import structlog

from elastic.core.ids import agent_id, is_evaluated, parse_trajectory
from elastic.environments.agent import (
    AgentSettings,
    BadOutcome,
    EpisodeTask,
    Outcome,
    PlayedTrajectory,
    Rollout,
    outcome_of,
)
from elastic.environments.calling import ends_caller
from elastic.environments.chat import RowChatSettings, load_chat
from elastic.environments.doors import loopback
from elastic.environments.from_gymnasium import GymnasiumSettings, load_gymnasium
from elastic.environments.from_openenv import OpenEnvSettings, load_openenv
from elastic.environments.from_reasoning_gym import ReasoningGymSettings, load_reasoning_gym
from elastic.environments.from_verifiers import VerifiersSettings, load_verifiers
from elastic.environments.kinds import KindMeans, KindSettings
from elastic.environments.limits import end_with_input
from elastic.environments.rows import DataSource, Rows, check_held_out, check_tasks, prompts_of, read_rows
from elastic.environments.run_link import NO_KEYS, EnvRunLink, EnvWorkerKeys, serve_run
from elastic.protocol.front_messages import (
    AgentCaller,
    BeginTrajectory,
    BindSession,
    Declined,
    EndTrajectory,
    GiveReward,
    TrajectoryBegun,
)
from elastic.protocol.http_clients import async_client
from elastic.system.last_words import REMOVED, RUN_KEY
from elastic.system.named_code import CodeUnusable, load
from elastic.system.plain_values import printable, told

log = structlog.get_logger(__name__)

PlayedSettings: TypeAlias = AgentSettings | RowChatSettings | KindSettings
PLAYED_SETTINGS: Mapping[str, type[PlayedSettings]] = {
    "agent": AgentSettings,
    "chat": RowChatSettings,
    "gymnasium": GymnasiumSettings,
    "openenv": OpenEnvSettings,
    "reasoning-gym": ReasoningGymSettings,
    "verifiers": VerifiersSettings,
}
"""By the names of the environments."""
CAUSE_CHARACTERS = 2000
TRACE_CHARACTERS = 4000
REFUSED_WAIT_S = 1.0

MakeClient: TypeAlias = Callable[[PlayedTrajectory], Any]


@dataclass(frozen=True, kw_only=True)
class HeldOutRows:
    """Rows of which the first so many, or all, are the tasks of the split `name`, which is evaluated and never trained
    on. `trained` has what environments train on, of which none of these may be."""

    name: str
    tasks: int | None
    trained: Mapping[str, DataSource]

    def check(self, rows: Rows) -> None:
        """Raises `BadData`."""
        if self.tasks is not None:
            check_tasks(rows, self.tasks)
        trained = {name: set(prompts_of(read_rows(source))) for name, source in self.trained.items()}
        check_held_out(self.name, prompts_of(rows)[: self.tasks], trained)


@dataclass(frozen=True, kw_only=True)
class EnvWork:
    """What an env worker is to do: for which run, with which settings, on which data. `checkpoint` has the policy's
    tokenizer. `away_s` is how long it goes on without a process at the run."""

    run_dir: Path
    keys: EnvWorkerKeys = NO_KEYS
    settings: PlayedSettings
    model: str
    checkpoint: Path = Path()
    seed: int
    away_s: float
    data: DataSource | None = None
    held_out: HeldOutRows | None = None
    """What these rows have to be, where that is not known yet."""
    inside: bool = False
    """Whether it is in a container, where `run_dir` has the doors to the run."""
    loaded: Callable[[], None] = lambda: None
    """Called once the run has let it in."""


async def serve_env_worker(work: EnvWork) -> None:
    """Play episodes until the run is over, or a signal. Raises `CodeUnusable` for a function that cannot be loaded, and
    `BadData`."""
    async with AsyncExitStack() as lasting:
        await _serve(work, lasting)


async def _serve(work: EnvWork, lasting: AsyncExitStack) -> None:
    keys = work.keys
    link = EnvRunLink(work.run_dir, keys.run, work.away_s, welcomed=work.loaded)
    http = async_client(timeout=None, limits=httpx.Limits(max_connections=None))
    lasting.push_async_callback(http.aclose)
    means = KindMeans(
        http=http,
        model=work.model,
        checkpoint=work.checkpoint,
        seed=work.seed,
        key=keys.run,
        bind=partial(_bind, link),
        lasting=lasting,
    )
    base_url = ""
    if work.inside:
        end_with_input()
        base_url = f"http://127.0.0.1:{await lasting.enter_async_context(loopback(work.run_dir))}/v1"
    rollout, make_client = await load_episode(work.settings, means)
    rows = None if work.data is None else read_rows(work.data)
    if rows is not None and work.held_out is not None:
        work.held_out.check(rows)
    player = FunctionPlayer(link, rollout, make_client, work, rows, keys.chat, base_url)
    await serve_run(link, [player.play_on() for _ in range(work.settings.concurrency)])


async def load_episode(settings: PlayedSettings, means: KindMeans) -> tuple[Rollout, MakeClient]:
    """What plays an episode, and what makes its client. Raises `CodeUnusable`."""
    match settings:
        case AgentSettings():
            return load_rollout(settings.rollout), load_client(settings)
        case RowChatSettings():
            return load_chat(settings, means.http), _no_client
        case GymnasiumSettings():
            return await load_gymnasium(settings, means), _no_client
        case OpenEnvSettings():
            return await load_openenv(settings, means), _no_client
        case ReasoningGymSettings():
            return await load_reasoning_gym(settings, means), _no_client
        case VerifiersSettings():
            return await load_verifiers(settings, means), _no_client
        case _:
            raise TypeError(f"{type(settings).__name__} is of no kind that env workers play")


async def _bind(link: EnvRunLink, trajectory: PlayedTrajectory, session: str) -> None:
    """Calls with this session are of the trajectory from now on. Raises `BadOutcome` where the run declines that."""
    caller = AgentCaller(named=trajectory.id)
    answer = await link.ask(lambda n: BindSession(n, caller, session))
    if isinstance(answer, Declined):
        raise BadOutcome(f"session {session!r} cannot be bound: {answer.message}")


def _no_client(_: PlayedTrajectory) -> None:
    return None


def load_rollout(named: str) -> Rollout:
    """Raises `CodeUnusable`."""
    found = load(named)
    if not callable(found):
        raise CodeUnusable(
            f"{named}: found {type(found).__name__}; allowed: an async function of a task, a client and a trajectory"
        )
    return cast("Rollout", found)


def load_client(settings: AgentSettings) -> MakeClient:
    """What makes the client of a trajectory. Raises `CodeUnusable` where the package is not installed."""
    if settings.client == "none":
        return _no_client
    try:
        openai = importlib.import_module("openai")
    except ImportError as error:
        there = "`pip install -e '.[agents]'` in a clone of elastic"
        problem = f"found 'openai', but {told(error)}; allowed: {there}, or 'none'"
        raise CodeUnusable(f"environment.settings.client: {problem}") from error
    shared: dict[str, Any] = {}

    def make(trajectory: PlayedTrajectory) -> Any:
        # Connections are shared; what differs is the key.
        if trajectory.base_url not in shared:
            shared[trajectory.base_url] = openai.AsyncOpenAI(api_key="none", base_url=trajectory.base_url)
        return shared[trajectory.base_url].with_options(api_key=trajectory.key)

    return make


class FunctionPlayer:
    """Plays one trajectory after the other in each of its slots."""

    def __init__(
        self,
        link: EnvRunLink,
        rollout: Rollout,
        make_client: MakeClient,
        work: EnvWork,
        rows: Rows | None = None,
        chat_key: str = "",
        base_url: str = "",
    ) -> None:
        """`base_url` is where calls go, if elsewhere than the run says."""
        self._link = link
        self._rollout = rollout
        self._make_client = make_client
        self._work = work
        self._rows = rows
        self._chat_key = chat_key
        self._base_url = base_url

    async def play_on(self) -> NoReturn:
        while True:
            begun = await self._link.ask(lambda n: BeginTrajectory(n, AgentCaller(), b"null", ""))
            if not isinstance(begun, TrajectoryBegun):
                why = begun.message if isinstance(begun, Declined) else type(begun).__name__
                log.warning("the run has given no trajectory; it is asked again", reason=why)
                await asyncio.sleep(REFUSED_WAIT_S)
                continue
            try:
                outcome = await self._played(begun)
                await self._report_outcome(begun, outcome)
            finally:
                self._link.holds.discard(begun.trajectory)

    async def _played(self, begun: TrajectoryBegun) -> Outcome:
        task = self._task(begun)
        trajectory = PlayedTrajectory(
            id=agent_id(begun.trajectory),
            base_url=self._base_url or begun.base_url,
            key=begun.key,
            model=self._work.model,
            member=parse_trajectory(begun.trajectory).member,
            chat_key=self._chat_key,
        )
        try:
            answer = self._rollout(task, self._make_client(trajectory), trajectory)
            return outcome_of(await answer if inspect.isawaitable(answer) else answer)
        except BadOutcome as error:
            return Outcome(failed=f"the environment is at fault: {error}")
        except (Exception, SystemExit, KeyboardInterrupt, asyncio.CancelledError) as error:
            if ends_caller(error):
                raise
            trace = RUN_KEY.sub(REMOVED, "".join(traceback.format_exception(error)))[-TRACE_CHARACTERS:]
            log.warning("the environment raised", trajectory=trajectory.id, trace=trace)
            return Outcome(failed=f"the environment raised {told(error)}")

    def _task(self, begun: TrajectoryBegun) -> EpisodeTask:
        number = begun.number
        # Tasks of evaluations are none of those that groups have, and the same each time.
        of = "evaluation/" if is_evaluated(begun.trajectory) else ""
        seed = random.Random(f"{self._work.seed}/{of}{number}").getrandbits(63)
        if (rows := self._rows) is None:
            return EpisodeTask(number=number, seed=seed, place=begun.place)
        row = rows.of_group(begun.place, begun.row)
        prompt, answer = rows.prompt(row), rows.answer(row)
        return EpisodeTask(number=number, seed=seed, place=begun.place, row=row, prompt=prompt, answer=answer)

    async def _report_outcome(self, begun: TrajectoryBegun, outcome: Outcome) -> None:
        """Say what a trajectory has come to. One that is over already, or is played elsewhere, is let be."""
        caller = AgentCaller(named=agent_id(begun.trajectory))
        cause = printable(RUN_KEY.sub(REMOVED, outcome.failed)[:CAUSE_CHARACTERS])
        if not cause:
            given: Mapping[str, float] = outcome.rewards
            given = given if outcome.reward is None else {"": outcome.reward, **given}
            for policy, reward in given.items():
                answer = await self._link.ask(lambda n, r=reward, p=policy: GiveReward(n, caller, r, p))
                if isinstance(answer, Declined):
                    cause = f"its reward was refused: {answer.message}"
                    break
        truncated, metrics = outcome.truncated and not cause, dict(outcome.metrics)
        await self._link.ask(lambda n: EndTrajectory(n, caller, cause, truncated, metrics))
