"""Env workers in containers: the process that starts one, keeps its doors to the run, and ends with it."""

import asyncio
import contextlib
import json
import os
import shutil
from pathlib import Path
from typing import NamedTuple

from elastic.compose.data import episode_seed
from elastic.compose.plan import RunPlan
from elastic.compose.runs import save_run_config
from elastic.config import AGENT, CHAT, Config, ConfigError, ConfigProblem, EnvironmentConfig
from elastic.environments.container import (
    FOLDER,
    IMPORTS,
    INSIDE_VARIABLE,
    ContainerOrder,
    ContainerUnusable,
    asked,
    check_image,
    code_folders,
    container_command,
    dockerfile_lines,
    find_engine,
    remove,
)
from elastic.environments.doors import Streams, dial_socket, doors
from elastic.environments.limits import ProcessLimits
from elastic.environments.run_link import CHAT_KEY_VARIABLE, KEY_VARIABLE
from elastic.protocol.endpoint import Address, is_loopback
from elastic.protocol.front_messages import SOCKET
from elastic.protocol.run_secrets import RunSecrets
from elastic.runtime.journal import AGENTS, JournalError, RunDirectory
from elastic.system.processes import inherited, named
from elastic.system.signals import TERMINATION, act_on

__all__ = ["check_env_workers", "container_order", "container_words", "dockerfile_lines", "keep_container"]

DOORS, NOTHING = "doors", "+nothing"
"""In the run's directory: a folder for each container; and an empty one among these, whose name is no container's."""
END_S = 5.0
"""For a container to end once it is told to."""


class ContainerWords(NamedTuple):
    """What `--dry-run` says of an environment in a container."""

    environment: str
    image: str
    network: str

    def __str__(self) -> str:
        reach = "with this machine's network: what runs there reaches whatever this machine does"
        reach = reach if self.network == "host" else "without network: what runs there reaches the model and no more"
        return f"environment {self.environment!r} runs in containers of {self.image}, {reach}"


def container_words(config: Config) -> list[str]:
    return [str(ContainerWords(one.name, one.container, one.network)) for one in config.mixture if one.container]


def check_env_workers(plan: RunPlan) -> None:
    """Raises `ConfigError` where an environment's interpreter or containers cannot be started."""
    config = plan.config
    for number, one in enumerate(plan.environments):
        environment, section = one.config, config.environment_section(number)
        if not environment.container:
            _check_interpreter(config, environment.python, *section, "python")
            continue
        if one.kind is not None and not one.in_workers:
            problem = f"found {environment.container!r}, and env workers play no episodes of kind {environment.kind!r}"
            raise ConfigError(ConfigProblem(problem, (*section, "container")))
        if config.front is not None and not is_loopback(config.front.host):
            problem = f"found {config.front.host}; allowed with environments in containers: an address of loopback"
            raise ConfigError(ConfigProblem(problem, ("front", "host")))
        if _hidden(config, environment) and (lost := _within_runs(config, environment)):
            problem = (
                f"found {config.run.directory}, of which containers of environment {environment.name!r} see nothing, "
                f"as keys of runs are there; allowed: a directory without {lost[0]}, which the environment reads"
            )
            raise ConfigError(ConfigProblem(problem, ("run", "directory")))
        try:
            check_image(find_engine(), environment.container, _python(environment))
        except ContainerUnusable as error:
            raise ConfigError(ConfigProblem(str(error), (*section, "container"))) from error


def _check_interpreter(config: Config, python: Path | None, *key: str) -> None:
    if python is None:
        return
    if shutil.which(python) is None:
        problem = f"found {str(python)!r}, and there is no such program; allowed: an interpreter that has Elastic"
        raise ConfigError(ConfigProblem(problem, key))
    status, said = asked(str(python), "-c", IMPORTS, variables=inherited(*config.run.pass_env))
    if status:
        problem = (
            f"found {str(python)!r}, which cannot import Elastic: {said}; allowed: an interpreter that has Elastic"
        )
        raise ConfigError(ConfigProblem(problem, key))


def _python(environment: EnvironmentConfig) -> str:
    return str(environment.python or "python")


def container_order(run_dir: Path, config: Config, number: int) -> ContainerOrder:
    """The container of this env worker, of the environment with this number; what it sees of the run is there then."""
    environment = config.mixture[number]
    caller = RunSecrets.of(run_dir).caller_of(os.environ.get(KEY_VARIABLE, ""))
    driver = environment.name if caller is None else caller.driver
    folder = run_dir.absolute() / DOORS / driver
    folder.mkdir(parents=True, exist_ok=True)
    save_run_config(folder, _own(config, environment))
    nothing = folder.with_name(NOTHING)
    nothing.mkdir(exist_ok=True)
    passed = named(*config.run.pass_env).keys()
    limits = environment.limits
    return ContainerOrder(
        name=f"{RunSecrets.of(run_dir).tag('elastic')}-{driver}",
        image=environment.container,
        network=environment.network,
        folder=folder,
        files=_files(config, environment),
        hidden=_hidden(config, environment),
        nothing=nothing,
        variables=(KEY_VARIABLE, CHAT_KEY_VARIABLE, *sorted(passed)),
        limits=ProcessLimits(limits.memory_gb, limits.cpu_s, limits.files),
        command=(
            *(_python(environment), "-m", "elastic.cli", "env-worker", FOLDER),
            *("--environment", environment.name),
        ),
    )


async def keep_container(run_dir: Path, order: ContainerOrder) -> int:
    """Have a container for as long as it lasts, or until a signal; returns its status. Raises `ConfigError` where there
    is no engine."""
    try:
        engine = find_engine()
    except ContainerUnusable as error:
        raise ConfigError(str(error)) from error
    ended = asyncio.Event()
    heed_no_more = act_on(TERMINATION, ended.set)
    await asyncio.to_thread(remove, engine, order.name)  # One that a former process has left.
    try:
        async with doors(order.folder, lambda: dial_socket(run_dir, SOCKET), _WayToFronts(run_dir)):
            return await _watched(container_command(engine, order), ended)
    finally:
        heed_no_more()
        await asyncio.to_thread(remove, engine, order.name)


async def _watched(command: list[str], ended: asyncio.Event) -> int:
    """Run an engine's command until it ends, or `ended` is set. Its standard input stays open for as long as this
    process lives."""
    environment = {**os.environ, INSIDE_VARIABLE: "1"}
    process = await asyncio.create_subprocess_exec(*command, stdin=asyncio.subprocess.PIPE, env=environment)
    over, told = asyncio.create_task(process.wait()), asyncio.create_task(ended.wait())
    try:
        await asyncio.wait({over, told}, return_when=asyncio.FIRST_COMPLETED)
        if not over.done():
            process.terminate()
            await asyncio.wait({over}, timeout=END_S)
    finally:
        for task in (over, told):
            task.cancel()
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    return process.returncode or 0


class _WayToFronts:
    """Dials the run's fronts where its journal says that they are; once more where they have moved."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._served = ""

    async def __call__(self) -> Streams:
        """Raises `OSError`."""
        if self._served:
            with contextlib.suppress(OSError):
                return await self._dial()
        self._served = await asyncio.to_thread(self._look)
        return await self._dial()

    async def _dial(self) -> Streams:
        address = Address.parse(self._served).here()
        return await asyncio.open_connection(address.host, address.port)

    def _look(self) -> str:
        try:
            with RunDirectory(self._run_dir).newest_journal() as journal:
                served = journal.meta().get(AGENTS, "")
        except JournalError as error:
            raise ConnectionRefusedError(str(error)) from error
        if not served:
            raise ConnectionRefusedError("the run has no fronts yet")
        return served


def _own(config: Config, environment: EnvironmentConfig) -> Config:
    """The configuration as a container sees it: of its own environment alone, with paths in full."""
    data = environment.data
    if data is not None and isinstance(data.source, Path):
        rows = data.model_copy(update={"source": data.source.absolute()})
        environment = environment.model_copy(update={"data": rows})
    model = config.model.model_copy(update={"checkpoint": config.model.checkpoint.absolute()})
    seed = episode_seed(config, environment.name)
    run = config.run.model_copy(update={"certificate": None, "certificate_key": None, "seed": seed})
    own = {"run": run, "model": model, "environment": environment, "environments": (), "providers": {}}
    return config.model_copy(update={**own, "evaluation": None})


def _files(config: Config, environment: EnvironmentConfig) -> list[Path]:
    """What the environment reads. None is within another."""
    wanted = _wanted(config, environment)
    return sorted(one for one in wanted if not any(other in one.parents for other in wanted))


def _hidden(config: Config, environment: EnvironmentConfig) -> list[Path]:
    """Where a container would see the runs, whose keys are there."""
    runs = config.run.directory.resolve()
    seen = [(one, one.resolve()) for one in _files(config, environment)]
    return [one / runs.relative_to(place) for one, place in seen if runs.is_relative_to(place)]


def _within_runs(config: Config, environment: EnvironmentConfig) -> list[Path]:
    runs = config.run.directory.resolve()
    return sorted(one for one in _wanted(config, environment) if one.resolve().is_relative_to(runs))


def _wanted(config: Config, environment: EnvironmentConfig) -> set[Path]:
    """The folders of the environment's code, its rows and, for kinds that make tokens, the policy's checkpoint."""
    wanted = {*code_folders(json.loads(environment.model_dump_json())["settings"])}
    if environment.data is not None and isinstance(environment.data.source, Path):
        wanted.add(environment.data.source.absolute())
    if environment.kind not in (AGENT, CHAT):
        wanted.add(config.model.checkpoint.absolute())
    return wanted
