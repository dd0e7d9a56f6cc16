"""Every loop that serves all, with an item that fails in a way that nobody expects: it holds up that item alone."""

import asyncio
import ipaddress
import signal
import subprocess
import time
import tomllib
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sqlalchemy as sa
from fastapi import Request
from fastapi.responses import StreamingResponse

from elastic.core.cluster.types import PhaseKind
from elastic.pool import messages as w
from elastic.pool.job_processes import ProcessLaunch
from elastic.pool.live import LivePorts
from elastic.pool.node_agent import NodeAgent, NodeAgentTicket
from elastic.pool.ports import JobEnding, JobEntry
from elastic.protocol.api import AccessRole, RunPhase
from elastic.server.api.streams import OpenStreams
from elastic.server.history.feeds import Feeds
from elastic.server.identity.oidc import SignedIn
from elastic.server.identity.sign_ins import SignInChecks, admitted
from elastic.server.permissions import Action
from elastic.server.pools import PoolSupervisors
from elastic.server.retention import records
from elastic.server.runner import RunnerLoop
from elastic.server.settings import ClaimMapping, OidcSettings
from elastic.server.store import people, tables, webhooks
from elastic.server.store.runs import HostedRunRow
from elastic.server.store.vault import Vault
from elastic.server.webhooks import DeliveryLoop
from elastic.system.isolation import IsolatedLoop, LoopFaults
from elastic.system.outages import backoff
from tests.pool.test_link import served
from tests.server.conftest import CONFIG, Site, make_site

# A loop that is gone leaves its processes behind, as it should.
pytestmark = pytest.mark.filterwarnings("ignore:subprocess .* is still running:ResourceWarning")

WAIT_S = 30.0
BASE_S = 0.05
POISONED = "poisoned"


@dataclass
class PoisonedLoop:
    """A loop that runs with an item that fails as long as it has not been healed."""

    running: "asyncio.Task[Any]"
    other: Callable[[], Callable[[], object]]
    """Brings another item; what that returns holds once the item is done."""
    heal: Callable[[], object]
    healed: Callable[[], object]
    """Holds once what had failed is done after all."""
    shown: Callable[[], object] = lambda: True
    """Holds once whoever the item belongs to can see what is wrong, where there is such a place."""
    base_s: float = 0.0
    """How long the loop waits at least after the first failure, where it is the loop that comes back to the item."""


@dataclass
class Lived:
    """What came of it."""

    faults: int
    last: str
    shown: bool
    others: int
    ended: bool
    healed: bool
    waited_s: float
    owed_s: float
    """How long so many tries have to take at least."""


async def until(holds: Callable[[], object]) -> bool:
    """Whether it holds in time; whatever has a life of its own is waited for."""
    deadline_s = time.monotonic() + WAIT_S
    while not (found := holds()) and time.monotonic() < deadline_s:  # noqa: ASYNC110 - so are threads and processes
        await asyncio.sleep(0.01)
    return bool(found)


@asynccontextmanager
async def going(work: Coroutine[Any, Any, Any]) -> "AsyncIterator[asyncio.Task[Any]]":
    task = asyncio.create_task(work)
    try:
        yield task
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


@asynccontextmanager
async def site_at(path: Path) -> AsyncIterator[Site]:
    site = make_site(path, f"sqlite:///{path / 'server.sqlite'}")
    site.settings = replace(
        site.settings, tick_s=0.02, housekeeping_s=0.02, restart_base_s=BASE_S, restart_max_s=1.0, webhook_tick_s=0.02
    )
    yield site
    site.store.close()


def run_in(site: Site, **columns: Any) -> str:
    """A submitted run, whose row is then as told."""
    answer = site.client().post("/v1/runs", json={"config": tomllib.loads(CONFIG), "providers": ["spot"]})
    run = answer.json()["id"]
    (site.settings.run_dir(run) / "logs").mkdir(parents=True)
    change(site, run, **columns)
    return run


def change(site: Site, run: str, **columns: Any) -> None:
    with site.store.writing() as tx:
        tx.execute(sa.update(tables.runs).where(tables.runs.c.id == run).values(**columns))


def column(site: Site, run: str, name: str) -> Any:
    with site.store.reading() as connection:
        return connection.execute(sa.select(tables.runs.c[name]).where(tables.runs.c.id == run)).scalar_one()


@asynccontextmanager
async def runner(path: Path, faults: LoopFaults) -> AsyncIterator[PoisonedLoop]:
    """A run's process cannot be begun."""
    fails = [True]

    def begin(_: object, run: HostedRunRow, *__: object) -> "tuple[subprocess.Popen[bytes], int]":
        if run.name == POISONED and fails:
            raise RuntimeError("nobody expects this")
        return subprocess.Popen(["true"]), 0

    async with site_at(path) as site:
        run = run_in(site, name=POISONED)

        def other() -> Callable[[], object]:
            one = run_in(site, name="other")
            return lambda: column(site, one, "phase") == RunPhase.FINISHED.value

        async with going(RunnerLoop(site.store, site.settings, faults, begin).run()) as running:
            yield PoisonedLoop(
                running,
                other,
                heal=fails.clear,
                healed=lambda: column(site, run, "phase") == RunPhase.FINISHED.value,
                shown=lambda: "RuntimeError" in str(column(site, run, "conditions")),
                base_s=BASE_S,
            )


@asynccontextmanager
async def retention(path: Path, faults: LoopFaults) -> AsyncIterator[PoisonedLoop]:
    """A run's row cannot be read that has something which is kept no longer."""
    over = {"phase": RunPhase.STOPPED.value, "managed": False, "ended_us": 1}
    async with site_at(path) as site, going(RunnerLoop(site.store, site.settings, faults).run()) as running:
        with site.store.writing() as tx:
            records.change(tx, records.SERVER, {"logs_days": 1})
        run = run_in(site, **over, figures={"steps": "many"})

        def other() -> Callable[[], object]:
            one = run_in(site, **over)
            return lambda: column(site, one, "retired") == {"logs": "removed"}

        yield PoisonedLoop(
            running,
            other,
            heal=lambda: change(site, run, figures={"steps": 2}),
            healed=lambda: column(site, run, "retired") == {"logs": "removed"},
        )


@asynccontextmanager
async def deliveries(path: Path, faults: LoopFaults) -> AsyncIterator[PoisonedLoop]:
    """A webhook's secret is none. Nobody answers at the addresses, which is no fault."""
    async with site_at(path) as site:
        vault = Vault(site.settings.home)
        settings = replace(site.settings, webhook_networks=(ipaddress.ip_network("127.0.0.0/8"),))

        def announced(secret: str) -> str:
            with site.store.writing() as tx:
                made = webhooks.insert(
                    tx, site.projects["ours"], "http://127.0.0.1:1/", ["run.finished"], vault.sealed(secret)
                )
                return webhooks.enqueue(tx, made["id"], "run.finished", {})["id"]

        def answer(delivery: str) -> str:
            wanted = sa.select(tables.deliveries.c.answer).where(tables.deliveries.c.id == delivery)
            with site.store.reading() as connection:
                return connection.execute(wanted).scalar_one() or ""

        def other() -> Callable[[], object]:
            one = announced("whsec_AAAA")
            return lambda: answer(one).startswith("not delivered")

        def heal() -> None:
            with site.store.writing() as tx:
                tx.execute(sa.update(tables.webhooks).values(secret=vault.sealed("whsec_AAAA"), claimed_until_us=0))
                tx.execute(sa.update(tables.deliveries).values(not_before_us=0))

        async with going(DeliveryLoop(site.store, settings, faults).run()) as running:
            delivery = announced("é")
            yield PoisonedLoop(
                running,
                other,
                heal,
                healed=lambda: answer(delivery).startswith("not delivered"),
                shown=lambda: "unexpected ValueError" in answer(delivery),
            )


class Issuer:
    """An identity provider that says the same of everybody, and fails at one."""

    def __init__(self) -> None:
        mapping = ClaimMapping(claim="groups", value="rl", project="ours", role=AccessRole.VIEWER)
        self.settings = OidcSettings(issuer="https://issuer", client_id="c", mappings=(mapping,), recheck_s=0.05)
        self.fails, self.asked = True, set[str]()

    def again(self, token: str, subject: str) -> SignedIn:
        if subject == POISONED and self.fails:
            raise RuntimeError("nobody expects this")
        self.asked.add(subject)
        return self.signed_in(subject)

    def signed_in(self, subject: str) -> SignedIn:
        return SignedIn(subject, None, subject, {"groups": ["rl"]}, "token")


@asynccontextmanager
async def sign_ins(path: Path, faults: LoopFaults) -> AsyncIterator[PoisonedLoop]:
    issuer: Any = Issuer()
    async with site_at(path) as site, going(SignInChecks(site.store, site.settings, issuer, faults).run()) as running:

        def signs_in(subject: str) -> None:
            with site.store.writing() as tx:
                person = admitted(tx, issuer.settings, Vault(site.settings.home), issuer.signed_in(subject))
                member = tx.execute(sa.select(tables.members.c.id).where(tables.members.c.user == person)).scalar_one()
                project, role = site.projects["ours"], AccessRole.VIEWER
                key = {"name": subject, "role": role, "scopes": [], "expires_us": None}
                people.new_key(tx, project=project, member=member, **key)

        def other() -> Callable[[], object]:
            subject = f"other-{time.monotonic_ns()}"
            signs_in(subject)
            return lambda: subject in issuer.asked

        signs_in(POISONED)
        yield PoisonedLoop(
            running,
            other,
            heal=lambda: setattr(issuer, "fails", False),
            healed=lambda: POISONED in issuer.asked,
            base_s=1.0,
        )


@asynccontextmanager
async def streams(path: Path, faults: LoopFaults) -> AsyncIterator[PoisonedLoop]:
    """Whether a caller may have its stream cannot be found out; others may have theirs no more."""
    fails = [True]

    def admits(_: object, request: Request, action: Action, project: str) -> bool:
        if project == POISONED and fails:
            raise RuntimeError("nobody expects this")
        return False

    async def body() -> AsyncIterator[bytes]:
        await asyncio.Event().wait()
        yield b""

    async with site_at(path) as site, asyncio.TaskGroup() as tasks:
        made: list[asyncio.Task[None]] = []
        opened = OpenStreams(site.store, admits, faults, look_s=0.02)

        def stream(project: str) -> "asyncio.Task[None]":
            async def receive() -> dict[str, str]:
                await asyncio.Event().wait()
                return {}

            async def send(_: object) -> None: ...

            async def follow() -> None:
                scope = {"type": "http"}
                whole = StreamingResponse(body())
                await opened.while_admitted(Request(scope), "key", Action.RUNS_READ, project, whole)(
                    scope, receive, send
                )

            made.append(tasks.create_task(follow()))
            return made[-1]

        poisoned = stream(POISONED)
        yield PoisonedLoop(
            poisoned,
            other=lambda: stream(f"other-{time.monotonic_ns()}").done,
            heal=fails.clear,
            healed=poisoned.done,
            base_s=1.0,
        )
        for task in made:
            task.cancel()


@asynccontextmanager
async def feeds(path: Path, faults: LoopFaults) -> AsyncIterator[PoisonedLoop]:
    """Whether a run is over cannot be found out; others are."""
    fails, over = [True], set[str]()
    fed = Feeds(0.01, faults)

    async def follow(run: str) -> None:
        async def ended() -> bool:
            if run == POISONED and fails:
                raise RuntimeError("nobody expects this")
            return True

        (path / run).mkdir()
        async with fed.following(run, path / run, ended, asyncio.to_thread) as feed:
            await until(lambda: feed.over)
            over.add(run)

    async with asyncio.TaskGroup() as tasks:

        def other() -> Callable[[], object]:
            run = f"other-{time.monotonic_ns()}"
            tasks.create_task(follow(run))
            return lambda: run in over

        running = tasks.create_task(follow(POISONED))
        yield PoisonedLoop(running, other, heal=fails.clear, healed=lambda: POISONED in over, base_s=1.0)
        running.cancel()


@asynccontextmanager
async def supervisors(path: Path, faults: LoopFaults) -> AsyncIterator[PoisonedLoop]:
    """A pool's directory has a file where its logs go."""
    poisoned, good = path / POISONED, path / "good"
    for pool in (poisoned, good):
        pool.mkdir()
    (poisoned / "logs").write_text("in the way")

    def started(pool: Path) -> int:
        with suppress(OSError):
            return (pool / "logs" / "supervisor.log").read_text().count("started")
        return 0

    def other() -> Callable[[], object]:
        before = started(good)
        return lambda: started(good) > before

    async with site_at(path) as site:
        settings = replace(site.settings, pools=(poisoned, good))
        supervised = PoolSupervisors(site.store, settings, faults, ("sh", "-c", "echo started"))
        async with going(supervised.run()) as running:
            yield PoisonedLoop(
                running, other, heal=(poisoned / "logs").unlink, healed=lambda: started(poisoned), base_s=1.0
            )


class Shell:
    """What a pool's ports tell their shell."""

    over, entries = False, dict[str, JobEntry]()

    def __init__(self) -> None:
        self.ends: dict[str, JobEnding] = {}

    def begin(self, *_: object, **__: object) -> None: ...

    def next_wakeup_ns(self) -> None: ...

    def pass_time(self) -> None: ...

    def job_ended(self, job: str, placement: int, ending: JobEnding) -> None:
        self.ends[job] = ending


@asynccontextmanager
async def pool(path: Path, faults: LoopFaults) -> AsyncIterator[PoisonedLoop]:
    """What a job's process is to run cannot be told. The shell decides when to ask again."""
    fails = [True]
    shell: Any = Shell()

    def launch(entry: JobEntry, placement: int) -> ProcessLaunch:
        if entry.job == POISONED and fails:
            raise RuntimeError("nobody expects this")
        return ProcessLaunch(command=("true",), environment={}, log=path / "log")

    def ended(entry: JobEntry, kept: object, status: int | None) -> JobEnding:
        return JobEnding("finished", f"status {status}")

    programs: Any = SimpleNamespace(job=launch, ended=ended)
    gateway: Any = SimpleNamespace(serve=lambda shell, programs: None)
    journal: Any = SimpleNamespace(node_agents=list, joined=dict)
    clock = asyncio.get_running_loop().time
    ports = LivePorts(path, "lab", journal, gateway, programs, lambda: 0, IsolatedLoop("pool", faults, clock=clock))

    def start(job: str) -> Callable[[], object]:
        shell.entries[job] = entry = JobEntry(job=job, directory=str(path))
        shell.ends.pop(job, None)
        ports.start_job(entry, 1, 0)
        return lambda: job in shell.ends and shell.ends[job].how == "finished"

    async with going(ports.run(shell, anew=True, stop="")) as running:
        await asyncio.sleep(0)
        again = start(POISONED)
        yield PoisonedLoop(
            running,
            other=lambda: start(f"other-{time.monotonic_ns()}"),
            heal=lambda: (fails.clear(), start(POISONED)),
            healed=again,
            shown=lambda: POISONED in shell.ends and "RuntimeError" in shell.ends[POISONED].cause,
        )
    await ports.aclose()


@asynccontextmanager
async def node_agent(path: Path, faults: LoopFaults) -> AsyncIterator[PoisonedLoop]:
    """A resident has no command at all. The pool decides when to have it started again."""
    gone: dict[str, w.ResidentGone] = {}

    async with served() as (endpoint, connected):
        ticket = NodeAgentTicket(endpoint=endpoint, pool="lab", node="node", token="t", records=path / "records")
        async with going(NodeAgent(ticket, faults=faults).run()) as running:
            link = await connected.get()
            assert isinstance(await link.receive(), w.NodeAgentHello)
            link.send(w.NodeAgentWelcome("session", 60.0, 60.0, 60.0))

            async def listen() -> None:
                while True:
                    if isinstance(message := await link.receive(), w.ResidentGone):
                        gone[message.job] = message

            def start(job: str, placement: int, *command: str) -> Callable[[], object]:
                log = str(path / "log")
                order = w.StartResidentFrame(
                    job, placement, PhaseKind.ROLLOUT, command, {}, str(path), log, script=True
                )
                link.send(order)
                return lambda: job in gone and gone[job].placement == placement and gone[job].code == 0

            def dies() -> Callable[[], object]:
                job = f"other-{time.monotonic_ns()}"
                start(job, 1, "sh", "-c", f"kill -{int(signal.SIGRTMIN + 5)} $$")
                return lambda: job in gone and gone[job].cause == "it was killed by SIGRTMIN+5"

            async with going(listen()):
                start(POISONED, 1)
                yield PoisonedLoop(
                    running,
                    other=dies,
                    heal=lambda: start(POISONED, 2, "true"),
                    healed=lambda: POISONED in gone and gone[POISONED].code == 0,
                    shown=lambda: POISONED in gone and "TypeError" in gone[POISONED].cause,
                )
            connected.put_nowait(link)


LOOPS: Iterable[Callable[[Path, LoopFaults], AbstractAsyncContextManager[PoisonedLoop]]] = (
    *(runner, retention, deliveries, sign_ins, streams, feeds, supervisors),
    *(pool, node_agent),
)


@pytest.fixture(scope="module", params=LOOPS, ids=lambda loop: loop.__name__)
def lived(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Lived:
    return asyncio.run(live(request.param, tmp_path_factory.mktemp("loop")))


async def live(loop: Callable[[Path, LoopFaults], AbstractAsyncContextManager[PoisonedLoop]], path: Path) -> Lived:
    faults, began_s = LoopFaults(), time.monotonic()
    async with loop(path, faults) as it:
        await until(faults.counts)
        shown, last = await until(it.shown), faults.last
        others = sum([await until(it.other()) for _ in range(2)])
        count, waited_s = sum(faults.counts().values()), time.monotonic() - began_s
        ended = it.running.done()
        it.heal()
        healed = await until(it.healed)
    owed_s = sum(backoff(number, it.base_s, 60.0) for number in range(count - 1))
    return Lived(count, last, shown, others, ended, healed, waited_s, min(owed_s, WAIT_S))


def test_a_poisoned_item_ends_no_loop(lived: Lived) -> None:
    assert not lived.ended


def test_it_is_counted_and_shown(lived: Lived) -> None:
    assert lived.faults
    assert lived.shown
    assert "Error" in lived.last


def test_other_items_are_done_meanwhile(lived: Lived) -> None:
    assert lived.others == 2


def test_it_is_tried_later_and_later_until_it_can_be_done(lived: Lived) -> None:
    assert lived.healed
    assert lived.waited_s >= lived.owed_s
