"""`elastic serve` and `elastic runner`: the API and the runner, in one process or in two."""

import asyncio
import socket
import threading
import time
from collections.abc import Callable

import sqlalchemy as sa
import structlog

from elastic.protocol.api import AccessRole
from elastic.protocol.http_server import serving
from elastic.protocol.sockets import address_of, listening_socket
from elastic.server.api.app import create_app, peer_limits
from elastic.server.api.job_limits import WaitingJobs
from elastic.server.history import apart
from elastic.server.identity.sign_ins import SignInChecks
from elastic.server.intake import checking
from elastic.server.intake.upload_files import UploadStorage
from elastic.server.pools import PoolSupervisors
from elastic.server.runner import RunnerLoop
from elastic.server.settings import ServerSettings
from elastic.server.store import Store, StoreError, migrate, people, uploads
from elastic.server.store.tables import server
from elastic.server.webhooks import DeliveryLoop
from elastic.system.isolation import LoopFaults
from elastic.system.machine import raise_descriptor_limit
from elastic.system.signals import TERMINATION_OR_HANGUP, act_on

log = structlog.get_logger(__name__)

LAG_S = 10.0
"""A runner that has not looked at its runs for so long is not ready."""
HOME = "home"
THROUGH = 0o711
"""Mode of directories that projects' users may traverse. The server's own files are readable by its user alone."""


def open_store(settings: ServerSettings) -> Store:
    """Open the store with this version's tables. Raises `StoreError` if it belongs to another server, or `home` cannot
    be one."""
    try:
        for directory in (settings.home, settings.runs, settings.projects, settings.all_uploads):
            directory.mkdir(parents=True, exist_ok=True)
            directory.chmod(THROUGH)
    except OSError as error:
        raise StoreError(f"--home: {settings.home} cannot be a server's home ({error.strerror})") from error
    store = Store(settings.database_url)
    try:
        migrate(store)
        _claim(store, str(settings.home.resolve()))
    except BaseException:
        store.close()
        raise
    return store


def _claim(store: Store, home: str) -> None:
    with store.writing() as tx:
        found = tx.execute(sa.select(server.c.value).where(server.c.key == HOME)).scalar()
        if found is None:
            tx.execute(sa.insert(server).values(key=HOME, value=home))
        elif found != home:
            raise StoreError(f"--home: found {home}; the runs of this database are in {found}")


def first_key(store: Store) -> str | None:
    """On a fresh store, make the first project and an admin's key of no project; returns the key's secret."""
    with store.writing() as tx:
        if people.any_key(tx):
            return None
        if people.project(tx, people.DEFAULT_PROJECT) is None:
            people.new_project(tx, people.DEFAULT_PROJECT, None)
        _, secret = people.new_key(
            tx, project=None, name="first-admin", role=AccessRole.ADMIN, scopes=[], expires_us=None
        )
    return secret


async def serve(
    store: Store,
    settings: ServerSettings,
    listener: socket.socket,
    *,
    with_runner: bool,
    on_ready: Callable[[str], None] = lambda _: None,
) -> None:
    """Serve the API, and look after runs if `with_runner`, until a signal comes. Runs go on without the server.

    Raises `RunnerBusy` if another process looks after these runs.
    """
    faults = LoopFaults()
    runner = RunnerLoop(store, settings, faults) if with_runner else None

    def lags() -> list[str]:
        if runner is None or time.monotonic() - runner.ticked_s < LAG_S:
            return []
        return [f"the runner has not looked at its runs for {time.monotonic() - runner.ticked_s:.0f} s"]

    raise_descriptor_limit()
    with store.reading() as connection:
        UploadStorage(settings).sweep(uploads.all_of(connection))
    deliveries = DeliveryLoop(store, settings, faults)

    def wake() -> None:
        deliveries.wake()
        if runner is not None:
            runner.wake()

    app = create_app(store, settings, wake, lags, faults)
    provider = app.state.server.provider
    checks = None if provider is None else SignInChecks(store, settings, provider, faults)
    for warm in (apart.warm, checking.warm):
        threading.Thread(target=warm, name="processes beside", daemon=True).start()
    stopped = _signalled()
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(runner.run(), name="runner") if runner else None
        looking = tasks.create_task(checks.run(), name="sign-ins") if checks else None
        keeping = tasks.create_task(PoolSupervisors(store, settings, faults).run(), name="pools")
        admitting = tasks.create_task(WaitingJobs(store, settings, faults).run(), name="jobs beyond quotas")
        telling = tasks.create_task(deliveries.run(), name="webhooks")
        async with serving(app, listener, peer_limits(settings), drained=app.state.server.streams.end) as url:
            on_ready(url)
            waiting = tasks.create_task(stopped.wait(), name="signals")
            await asyncio.wait([waiting, *([running] if running else [])], return_when=asyncio.FIRST_COMPLETED)
        for task in (waiting, running, telling, looking, keeping, admitting):
            if task is not None:
                task.cancel()


async def run_runner(store: Store, settings: ServerSettings) -> None:
    """Look after runs until a signal comes. Raises `RunnerBusy`."""
    stopped = _signalled()
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(RunnerLoop(store, settings).run(), name="runner")
        waiting = tasks.create_task(stopped.wait(), name="signals")
        await asyncio.wait([waiting, running], return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        running.cancel()


def _signalled() -> asyncio.Event:
    """Return an event that is set when the process is told to end."""
    event = asyncio.Event()
    act_on(TERMINATION_OR_HANGUP, event.set)
    return event


def listen(host: str, port: int) -> socket.socket:
    """Listen on host and port. Raises `OSError`."""
    listener = listening_socket(host, port, 512)
    log.info("listening", at=str(address_of(listener)))
    return listener
