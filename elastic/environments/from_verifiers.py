"""The kind `verifiers`: environments of packages for verifiers, played by verifiers itself in the env worker.

- Of verifiers 0.4, an episode is a slot of the environment. Its agents call the policy through verifiers' own client
  for training, which sends tokens and has one configuration for all episodes. A trace is bound to its trajectory by
  its id, which travels with each of its calls.
- Of verifiers before 0.4, an episode is a group of one, which calls the policy by OpenAI's chat completions with the
  trajectory's key.

A package is of one generation, and so is what is installed.
"""

import asyncio
import importlib
import logging
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, Field

from elastic.environments.agent import EpisodeTask, Outcome, PlayedTrajectory, Rollout, finite
from elastic.environments.kinds import KindMeans, KindSettings, generation, package, unusable
from elastic.environments.outside import Outside
from elastic.system.named_code import NAMES_CODE, CodeUnusable, in_file
from elastic.system.plain_values import shown
from policies.curriculum import CURRICULA

NEW = (0, 4)
"""The first version of the second generation."""
OLD_LEAST = (0, 1)
KEY_HEADER, NO_VARIABLE = "x-api-key", "ELASTIC_SETS_NO_API_KEY"
"""The key goes in a header: of a variable that verifiers would read it from, an environment's code would know it."""
TOO_LONG = "prompt_too_long"
"""Why an episode of before 0.4 has ended that had no room for more."""
NOT_SCORED = "Error calling reward function"
"""How that begins which verifiers of before 0.4 logs of a reward function that raises. It scores 0 then."""
RETRIES = 10
"""The retries of a call that fails, as many as verifiers makes by itself."""


class VerifiersSettings(KindSettings):
    id: str = Field(
        min_length=1,
        description="the package: a taskset's of verifiers 0.4, an environment's of before; or FILE.py:NAME",
        json_schema_extra=NAMES_CODE,
    )
    config: dict[str, Any] = Field(
        default_factory=dict,
        description="further keys of verifiers' `EnvConfig` (0.4), or arguments of `load_environment` (before)",
    )
    renderer: dict[str, Any] | None = Field(
        None,
        description="of messages, as verifiers' client for training takes it (0.4); else by the model",
    )
    tasks_most: int = Field(100_000, ge=1, description="of its tasks, from the first on, that are played")
    order: Literal["shuffled", "in_order"] = Field(
        "shuffled", description="order of the tasks; each pass has every task once"
    )


class Verifiers(Outside):
    """Stands for the episodes, which env workers play."""

    Settings: ClassVar[type[BaseModel]] = VerifiersSettings
    in_workers: ClassVar[bool] = True


async def load_verifiers(settings: VerifiersSettings, means: KindMeans) -> Rollout:
    """What plays an episode. Raises `CodeUnusable` for a package that cannot be loaded, or is of the generation that is
    not installed."""
    found = generation("verifiers")
    if found and found < OLD_LEAST:
        raise CodeUnusable(f"verifiers {_version(found)} is installed for {sys.executable}; allowed: 0.1 and later")
    package("verifiers", "verifiers", "pip install verifiers")
    settings = settings.model_copy(update={"id": _found(settings.id)})
    if found >= NEW:
        return await _load_new(settings, means)
    return _load_old(settings, means)


async def _load_new(settings: VerifiersSettings, means: KindMeans) -> Rollout:
    vf: Any = package("verifiers.v1", "verifiers", "pip install 'verifiers>=0.4'")
    loaders: Any = package("verifiers.v1.utils.loaders", "verifiers", "pip install 'verifiers>=0.4'")
    try:
        taskset = {**settings.config.get("taskset", {}), "id": settings.id}
        environment = loaders.load_environment(loaders.resolve_env_config({**settings.config, "taskset": taskset}))
        tasks = list(islice(environment.taskset, settings.tasks_most))
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        if _is_old(settings.id, error):
            raise _other(settings.id, "before 0.4", "pip install 'verifiers<0.4'") from error
        raise unusable("id", settings.id, error, _installed()) from error
    _check_tasks(settings, tasks)
    await means.lasting.enter_async_context(environment.serving())
    contexts: dict[str, Any] = {}

    def context_of(base_url: str) -> Any:
        """One for all episodes: each configuration has connections of its own in verifiers."""
        if base_url not in contexts:
            client = vf.TrainClientConfig.model_validate(
                {
                    "base_url": base_url,
                    "api_key_var": NO_VARIABLE,
                    "headers": {KEY_HEADER: means.key},
                    "renderer": settings.renderer,
                    "renderer_model_name": str(means.checkpoint.resolve()),
                }
            )
            contexts[base_url] = vf.ModelContext(means.model, client=client)
        return contexts[base_url]

    async def play(task: EpisodeTask, client: Any, trajectory: PlayedTrajectory) -> Outcome:
        binding: list[asyncio.Task[None]] = []

        def bind(trace: Any) -> None:
            # The run is told before the trace's agent is even started, on a connection that keeps its order.
            binding.append(asyncio.ensure_future(means.bind(trajectory, trace.id)))

        (slot,) = environment.slots(_task(settings, means, tasks, task.place), 1)
        try:
            episode = await environment.run_slot(slot, context_of(trajectory.base_url), on_trace=bind)
            await asyncio.gather(*binding)
        finally:
            for one in binding:
                one.cancel()
        return _outcome(episode)

    return play


def _outcome(episode: Any) -> Outcome:
    """What an episode has come to. Where several agents have traces, it is worth the mean of these."""
    traces: Sequence[Any] = episode.traces
    if not episode.ok or not traces:
        errors = [*episode.errors, *(error for trace in traces for error in trace.errors)]
        said = "; ".join(dict.fromkeys(f"{error.type}: {error.message}" for error in errors))
        return Outcome(failed=f"verifiers: {said or 'the episode is not ok'}")
    rewards = [finite("a trace's reward", trace.reward) for trace in traces]
    truncated = any(trace.is_truncated or trace.is_timeout for trace in traces)
    return Outcome(reward=sum(rewards) / len(rewards), truncated=truncated)


def _load_old(settings: VerifiersSettings, means: KindMeans) -> Rollout:
    vf: Any = package("verifiers", "verifiers", "pip install 'verifiers<0.4'")
    clients: Any = package("verifiers.clients", "verifiers", "pip install 'verifiers<0.4'")
    openai: Any = package("openai", "openai", "pip install 'verifiers<0.4'")
    shared: dict[str, Any] = {}
    logging.getLogger("verifiers").addHandler(_Overhearing(logging.ERROR))
    try:
        environment = vf.load_environment(settings.id, **settings.config)
        tasks = list(islice(environment.get_dataset(), settings.tasks_most))
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        if _is_new(settings.id):
            raise _other(settings.id, "0.4", "pip install 'verifiers>=0.4'") from error
        raise unusable("id", settings.id, error, _installed()) from error
    _check_tasks(settings, tasks)
    if environment.requires_group_rollouts:
        raise CodeUnusable(
            f"environment.settings.id: {settings.id} scores the members of a group together; allowed: an environment "
            "that scores each alone"
        )

    async def play(task: EpisodeTask, client: Any, trajectory: PlayedTrajectory) -> Outcome:
        # Connections are shared; what differs is the key.
        url = trajectory.base_url
        if url not in shared:
            shared[url] = openai.AsyncOpenAI(api_key="none", base_url=url, max_retries=RETRIES, timeout=None)
        calls = clients.OpenAIChatCompletionsClient(shared[url].with_options(api_key=trajectory.key))
        given = _task(settings, means, tasks, task.place)
        _overheard.set(raised := [])
        (output,) = await environment.run_group([given], client=calls, model=means.model, sampling_args={})
        return Outcome(failed=f"verifiers: {'; '.join(raised)}") if raised else _old_outcome(output)

    return play


_overheard: ContextVar[list[str]] = ContextVar("what verifiers has logged of reward functions in this episode")


class _Overhearing(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        said, heard = record.getMessage(), _overheard.get(None)
        if said.startswith(NOT_SCORED) and heard is not None:
            heard.append(said)


def _old_outcome(output: Mapping[str, Any]) -> Outcome:
    if (error := output.get("error")) is not None:
        return Outcome(failed=f"verifiers: {error if isinstance(error, str) else shown(error)}")
    too_long = output.get("stop_condition") == TOO_LONG
    if too_long and not output.get("completion"):
        return Outcome(failed="verifiers: the task's prompt does not fit in the context")  # It is scored 0 there.
    reward = finite("the reward", output["reward"])
    return Outcome(reward=reward, truncated=too_long or bool(output.get("is_truncated")))


def _task(settings: VerifiersSettings, means: KindMeans, tasks: Sequence[Any], place: int) -> Any:
    """The task of the group that has this place among those of its environment, by the run's seed."""
    return tasks[CURRICULA[settings.order](place, len(tasks), means.seed)]


def _check_tasks(settings: VerifiersSettings, tasks: Sequence[Any]) -> None:
    if not tasks:
        raise CodeUnusable(f"environment.settings.id: {settings.id} has no tasks; allowed: at least one")


def _found(id: str) -> str:
    """The package's name. A file of one's own is a module of its name, which verifiers then finds."""
    if (code := in_file(id)) is None:
        return id
    file = Path(code.place).absolute()
    sys.path.append(str(file.parent))  # Last: no file beside it stands in for an installed package.
    return file.stem


def _module_name(id: str) -> str:
    """Where verifiers looks for a package, whose name may have an owner and a version."""
    return id.rsplit("/", 1)[-1].split("@", 1)[0].replace("-", "_").lower()


def _is_old(id: str, error: BaseException) -> bool:
    """Whether a package that 0.4 cannot load is one for verifiers of before."""
    with suppress(ImportError):
        return hasattr(importlib.import_module(_module_name(id)), "load_environment")
    return isinstance(error, ImportError) and (error.name or "").partition(".")[0] == "verifiers"


def _is_new(id: str) -> bool:
    """Whether a package that verifiers of before 0.4 cannot load is one for 0.4."""
    try:
        return not hasattr(importlib.import_module(_module_name(id)), "load_environment")
    except ImportError as error:
        return (error.name or "").partition(".")[0] == "verifiers"


def _other(id: str, of: str, allowed: str) -> CodeUnusable:
    installed = _version(generation("verifiers"))
    return CodeUnusable(
        f"environment.settings.id: {id} is a package for verifiers {of}, and {sys.executable} has {installed}; "
        f"allowed: an environment.python with `{allowed}`"
    )


def _version(found: Sequence[int]) -> str:
    return ".".join(map(str, found)) or "none"


def _installed() -> list[str]:
    """Packages that ask for verifiers, by the names that configurations give them."""
    from importlib.metadata import distributions

    found = [one for one in distributions() if any(need.startswith("verifiers") for need in one.requires or ())]
    return [one.name.replace("_", "-") for one in found]
