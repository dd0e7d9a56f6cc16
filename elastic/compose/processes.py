"""Entry points of a run's other processes, and the event loop that each runs on."""

import asyncio
import contextlib
import logging
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import msgspec
import structlog

from elastic.config import Config, ConfigError, EnvironmentConfig, validate
from elastic.pool.messages import NODE_AGENT_VARIABLE, QUIET_VARIABLE, RANKS_VARIABLE, UNFIT_STATUS, RankPlaces
from elastic.protocol.endpoint import Address, Endpoint
from elastic.protocol.tickets import TicketRefused, read_ticket
from elastic.system.devices import mismatch, named_devices
from elastic.system.imports import importing
from elastic.system.last_words import RUN_KEY
from elastic.system.logs import STANDARD_ERROR, log_to
from elastic.system.machine import collect_between_decisions, defer_full_collections, quietly
from elastic.system.named_code import CodeUnusable, keyed, where
from elastic.system.plain_values import told
from elastic.system.processes import end_own_kin

if TYPE_CHECKING:
    from elastic.environments.run_link import EnvWorkerKeys
    from elastic.worker.agent import AgentExit, Ticket
    from providers.serving_messages import LendOrder

T = TypeVar("T")

log = structlog.get_logger(__name__)

PATIENCE_VARIABLE = "ELASTIC_ORCHESTRATOR_TIMEOUT_S"
TICKET_VARIABLE = "ELASTIC_TICKET"
FINGERPRINT_VARIABLE = "ELASTIC_JOIN_FINGERPRINT"
NICENESS = 10
"""The niceness of env workers: their code computes while no process of the run has to."""
SAID_AFTER = 0.5
"""The share of an env worker's time to dial after which it says what it is doing."""
ENVIRONMENT_VARIABLES = ("ELASTIC_JOIN", "ELASTIC_RUN", "ELASTIC_WORKER", "ELASTIC_JOIN_TOKEN")


def run_worker(
    join: str | None, ticket_file: Path | None, trainer_run_dir: Path | None, *, resume: bool, pace: bool
) -> NoReturn:
    """Be a worker (or, with `trainer_run_dir`, the trainer of that run) until the lease ends. A trainer with a
    node agent uses its device when the node agent says so (`elastic.pool.messages.NODE_AGENT_VARIABLE`).

    Where the trainer's first rank is on another node, be its resident here. A worker with a ticket logs to somebody's
    terminal: how its pace holds only with `pace`."""
    if trainer_run_dir is not None and (places := _rank_places()) is not None and places.place:
        _be_rank_node(places, trainer_run_dir)
    with importing():
        from elastic.worker.agent import leave_process, run_agent

    joining = joining_ticket(join, ticket_file)
    ticket = joining or worker_ticket(join)
    if pace or joining is None:
        _log_pace()
    if trainer_run_dir is None:
        leave_process(run_loop(run_agent(ticket)))
    _check_devices(counted=False)
    _load(lambda: import_module("elastic.worker.trainer_host"))
    from elastic.worker.device_permit import DevicePermit, node_agent_socket
    from elastic.worker.trainer_host import run_trainer_host

    _check_devices(counted=True)
    run_dir, permit = trainer_run_dir.resolve(), DevicePermit(node_agent_socket())
    config = _trainer_config(run_dir)
    leave_process(run_loop(run_trainer_host(ticket, config, run_dir, resume, permit)))


def _trainer_config(run_dir: Path) -> Config:
    """Return a trainer's configuration, with the files that were sent to this machine."""
    from elastic.compose.job_files import local_places, trainer_overrides
    from elastic.compose.runs import load_run_config

    config = load_run_config(run_dir)
    if places := local_places():
        config = load_run_config(run_dir, trainer_overrides(config, places))
    return config


def _rank_places() -> RankPlaces | None:
    told_places = os.environ.get(RANKS_VARIABLE, "")
    return msgspec.json.decode(told_places, type=RankPlaces) if told_places else None


def _be_rank_node(places: RankPlaces, run_dir: Path) -> NoReturn:
    """Be a trainer's resident on another node than its first rank's. Raises `ConfigError`."""
    _check_devices(counted=False)
    _load(lambda: import_module("torch"))
    _check_devices(counted=True)
    from elastic.worker.agent import leave_process
    from elastic.worker.device_permit import node_agent_socket
    from elastic.worker.trainer.transformers.rank_node import be_rank_node

    node_agent = node_agent_socket()
    if node_agent is None:
        raise ConfigError(f"{NODE_AGENT_VARIABLE} not set, which a pool's node agent hands to residents")
    end = run_loop(be_rank_node(places, _trainer_config(run_dir.resolve()), node_agent))
    log.info("the ranks of this node end", reason=end.reason)
    leave_process(end)


def _log_pace() -> None:
    """What models a device's speed logs now and then how that holds, at level debug."""
    log_to(STANDARD_ERROR, logging.DEBUG)


def run_serving_host() -> int:
    """Be a serving host until a signal, with the settings that its provider put into the environment."""
    with importing():
        from elastic.compose.device_sharing import sharing_policies
        from elastic.worker import serving_host
        from elastic.worker.accounts import DeviceAccounts
        from elastic.worker.agent import run_agent
        from elastic.worker.connection import JOIN_TIMEOUT_S, Ticket
        from elastic.worker.warmup import warm_up

    async def start_agent(order: "LendOrder", share: serving_host.HostShare) -> None:
        wait_s = settings.orchestrator_timeout_s or JOIN_TIMEOUT_S
        endpoint = Endpoint(order.join, fingerprint=order.fingerprint)
        ticket = Ticket(endpoint=endpoint, run=order.run, worker=order.worker, token=order.token, wait_s=wait_s)
        end = await run_agent(ticket, share.build_engine, share=share, accounts=DeviceAccounts(time.monotonic_ns()))
        if end.code != 0:
            raise RuntimeError(end.reason)

    settings = serving_host.parse_settings(os.environ.get(serving_host.HOST_VARIABLE, ""))
    executor, named = settings.executor, (serving_host.HOST_VARIABLE, "executor")
    sharing = None if executor is None else sharing_policies(executor, *named)
    _log_pace()
    # Before anything is offered: from the order to lend on, every second of it would be the run's.
    warm_up()
    try:
        run_loop(serving_host.serve_host(settings, start_agent, sharing))
    finally:
        end_own_kin()
    return 0


def run_pool_resident() -> NoReturn:
    """Be a job's resident on a rollout node until its node agent is gone, or a signal. Raises `ConfigError`."""
    from elastic.worker.device_permit import node_agent_socket

    node_agent = node_agent_socket()
    if node_agent is None:
        raise ConfigError(
            f"elastic pool-resident: {NODE_AGENT_VARIABLE} not set, which a pool's node agent hands to residents"
        )
    _log_pace()
    _check_devices(counted=False)
    _load(_load_resident)
    _check_devices(counted=True)
    from elastic.compose.job_files import engine_here
    from elastic.worker.agent import leave_process, on_termination
    from elastic.worker.rollout_resident import RolloutResident

    async def obey() -> "AgentExit":
        leave = asyncio.Event()
        with on_termination(leave.set):
            return await RolloutResident(engine_here).run(node_agent, leave)

    leave_process(run_loop(obey()))


def run_front(run_dir: Path, descriptor: int) -> None:
    """Be a front of the run in this directory, on an inherited socket, until the run is over or a signal."""
    with importing():
        from elastic.front.process import serve_front

    run_loop(serve_front(run_dir, descriptor))


def run_env_worker(run_dir: Path, environment: str) -> None:
    """Be an env worker of the run in this directory, until the run is over or a signal.

    Raises `ConfigError` for another environment than the run's, and for code that cannot be loaded.
    """
    from elastic.compose.runs import is_claimed, load_run_config
    from elastic.config import OUTSIDE, PLAYED
    from elastic.environments.container import INSIDE_VARIABLE
    from elastic.environments.limits import ProcessLimits, end_once_abandoned, say_where_it_stands
    from elastic.environments.log_keeper import keep_output
    from elastic.environments.rows import BadData
    from elastic.environments.run_link import report_unusable, take_keys

    config = load_run_config(run_dir)
    played = {one.name: (number, one) for number, one in enumerate(config.mixture) if one.kind != OUTSIDE}
    if environment not in played:
        known = ", ".join(map(repr, played)) or "none with env workers"
        raise ConfigError(f"--environment: found {environment!r}; the run has {known}")
    number, own = played[environment]
    inside = bool(os.environ.pop(INSIDE_VARIABLE, ""))
    if not inside:  # A container's output goes through the process that has started it.
        keep_output(RUN_KEY.pattern)
    if own.container and not inside:
        from elastic.compose.containers import container_order, keep_container

        sys.exit(run_loop(keep_container(run_dir, container_order(run_dir, config, number))))
    os.nice(NICENESS)
    keys = take_keys()  # Before any code of users' is loaded: what that starts inherits none.
    limits, section = own.limits, (*config.environment_section(number), "settings")
    ProcessLimits(limits.memory_gb, limits.cpu_s, limits.files).hold()
    if not inside:  # There its input ends with the run.
        end_once_abandoned(lambda: is_claimed(run_dir), 2 * config.run.orchestrator_timeout_s)
    loaded = threading.Event()
    say_where_it_stands(
        SAID_AFTER * own.start_timeout_s, loaded, lambda at: log.warning("its code is still being loaded", at=at)
    )
    try:
        work = _kinds_work if own.kind in PLAYED else _hosts_work
        run_loop(work(config, own, run_dir, keys, section, inside=inside, loaded=loaded.set))
    except (CodeUnusable, BadData, ConfigError, KeyboardInterrupt) as error:
        problem = keyed(str(error), own.settings, section)
        if isinstance(error, KeyboardInterrupt):
            if loaded.is_set():
                raise
            problem = f"{'.'.join(section)}: cannot be loaded by {sys.executable}: {told(error)}{where(error)}"
        loaded.set()
        run_loop(report_unusable(run_dir, keys.run, problem))
        raise ConfigError(problem) from error


def _kinds_work(
    config: Config,
    own: EnvironmentConfig,
    run_dir: Path,
    keys: "EnvWorkerKeys",
    section: tuple[str, ...],
    *,
    inside: bool,
    loaded: Callable[[], None],
) -> Coroutine[Any, Any, None]:
    """Play episodes of a kind that calls fronts."""
    from elastic.compose.data import data_source, episode_seed
    from elastic.compose.evaluation import held_out
    from elastic.environments.env_worker import PLAYED_SETTINGS, EnvWork, serve_env_worker

    work = EnvWork(
        run_dir=run_dir,
        keys=keys,
        settings=validate(PLAYED_SETTINGS[own.kind], own.settings, str(run_dir), *section),
        model=config.served_name,
        checkpoint=config.model.checkpoint,
        seed=episode_seed(config, own.name),
        away_s=config.run.orchestrator_timeout_s,
        data=data_source(own, config.run.seed),
        held_out=held_out(config, own.name),
        inside=inside,
        loaded=loaded,
    )
    return serve_env_worker(work)


def _hosts_work(
    config: Config,
    own: EnvironmentConfig,
    run_dir: Path,
    keys: "EnvWorkerKeys",
    section: tuple[str, ...],
    *,
    inside: bool,
    loaded: Callable[[], None],
) -> Coroutine[Any, Any, None]:
    """Play episodes in token ids."""
    from elastic.environments.hosting import HostWork, load_kind, serve_episodes, words_for

    kind = load_kind(own.kind)
    work = HostWork(
        run_dir=run_dir,
        key=keys.run,
        kind=kind,
        settings=validate(kind.Settings, own.settings, str(run_dir), *section),
        limit_s=own.step_timeout_s,
        away_s=config.run.orchestrator_timeout_s,
        inside=inside,
        loaded=loaded,
        named=words_for(own.kind),
    )
    return serve_episodes(work)


def _load_resident() -> None:
    import_module("elastic.worker.rollout_resident")
    from elastic.worker.warmup import warm_up

    warm_up("cpu")  # The device is another job's.


def _load(work: Callable[[], object]) -> None:
    """Do a resident's imports; while other jobs may compute on its node, at the lowest priority."""
    with importing():
        if not os.environ.pop(QUIET_VARIABLE, ""):
            work()
            return
        import numpy  # noqa: F401  # It starts threads that compute later on, too.

        quietly(work)


def _check_devices(*, counted: bool) -> None:
    """End a process that sees other devices than its node has: as its environment says, which is known before anything
    heavy is imported, or also counted. Nothing is taken of a device yet."""
    if not named_devices():
        return
    gpus = None
    if counted:
        import torch

        gpus = torch.cuda.device_count()
    if differs := mismatch(os.environ, gpus):
        log.error("the process sees other devices than its node has", what=differs)
        raise SystemExit(UNFIT_STATUS)


def run_loop(work: Coroutine[Any, Any, T]) -> T:
    """Like `asyncio.run`, on the fastest event loop there is, which no full garbage collection holds up unasked."""
    defer_full_collections()
    with asyncio.Runner(loop_factory=event_loop) as runner:
        return runner.run(_collecting(work))


async def _collecting(work: Coroutine[Any, Any, T]) -> T:
    collecting = asyncio.create_task(collect_between_decisions(), name="garbage collector")
    try:
        return await work
    finally:
        collecting.cancel()


def event_loop() -> asyncio.AbstractEventLoop:
    """uvloop's, where there is one."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


def joining_ticket(join: str | None, ticket_file: Path | None) -> "Ticket | None":
    """A ticket that `elastic ticket` has minted, from a file or the environment; None where there is neither.

    `join` is where to dial, if elsewhere than the ticket says.
    """
    from elastic.worker.connection import Ticket

    where = str(ticket_file or TICKET_VARIABLE)
    try:
        content = ticket_file.read_bytes() if ticket_file else os.environ.get(TICKET_VARIABLE, "").encode()
        if not content:
            return None
        found = read_ticket(content)
    except OSError as error:
        raise ConfigError(f"elastic worker: --ticket-file {where}: cannot be read ({error.strerror})") from error
    except TicketRefused as error:
        raise ConfigError(f"elastic worker: {where}: {error}") from error
    endpoint = _checked(Endpoint(join or found.join, fingerprint=found.fingerprint))
    return Ticket(endpoint=endpoint, run=found.run, worker="", token=found.token, ticket=found.ticket)


def worker_ticket(join: str | None) -> "Ticket":
    """Return the address and the credentials of a worker, from the environment that a provider sets."""
    from elastic.worker.connection import JOIN_TIMEOUT_S, Ticket

    found = {name: os.environ.get(name, "") for name in ENVIRONMENT_VARIABLES}
    if join:
        found["ELASTIC_JOIN"] = join
    missing = [name for name, value in found.items() if not value]
    if missing:
        raise ConfigError(
            f"elastic worker: {', '.join(missing)} not set, which a provider hands to its workers; to join a run "
            "from elsewhere, give the ticket that `elastic ticket RUN -o FILE` has minted there (--ticket-file FILE)"
        )
    address, run, worker, token = found.values()
    endpoint = _checked(Endpoint(address, fingerprint=os.environ.get(FINGERPRINT_VARIABLE, "")))
    wait_s = os.environ.get(PATIENCE_VARIABLE, str(JOIN_TIMEOUT_S))
    with contextlib.suppress(ValueError):
        if 0 < float(wait_s) < math.inf:
            return Ticket(endpoint=endpoint, run=run, worker=worker, token=token, wait_s=float(wait_s))
    raise ConfigError(f"elastic worker: {PATIENCE_VARIABLE} takes seconds (found {wait_s!r})")


def _checked(endpoint: Endpoint) -> Endpoint:
    try:
        Address.to_dial(endpoint.address)
    except ValueError:
        raise ConfigError(f"elastic worker: --join takes HOST:PORT (found {endpoint.address!r})") from None
    return endpoint
