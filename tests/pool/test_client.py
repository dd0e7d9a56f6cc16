"""What a job says to its pool, and what it takes itself to have: whatever is lost on the way, both agree in the end."""

import asyncio
from collections import Counter, deque

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from elastic.pool import messages as w
from elastic.pool.client import JobPart, News, PoolClient, PoolMembership, PoolUnavailable
from elastic.pool.connection import FromDialler, PoolLink
from elastic.protocol.connection import ConnectionLost
from elastic.protocol.endpoint import Endpoint
from tests.pool.model import ROLLOUT, TRAIN, JobsPool, listen_as_pool
from tests.seeds import examples

PHASES = st.sampled_from([ROLLOUT, TRAIN])


def ticket(worker: str) -> w.WorkerTicketFrame:
    return w.WorkerTicketFrame("run", worker, f"the token of {worker}", "127.0.0.1:1")


class JobAndPool(RuleBasedStateMachine):
    """What is said is under way until it is delivered, and lost with the connection; the job's process dies, too."""

    def __init__(self) -> None:
        super().__init__()
        self.to_pool: deque[w.FromJob] = deque()
        self.to_job: deque[w.ToJob] = deque()
        self.connected = self.slow = False
        self.pool = JobsPool(lambda message: self.to_job.append(message) if self.connected else None)
        self.part = JobPart("job", self.say)
        self.workers = 0
        self.lent: Counter[str] = Counter()
        self.over: Counter[str] = Counter()
        self.connect()

    def say(self, message: w.FromJob) -> None:
        if self.connected:
            self.to_pool.append(message)

    def news(self, news: list[News]) -> None:
        for one in news:
            if isinstance(one, w.WorkerEnded):
                self.over[one.worker] += 1

    def new_ticket(self) -> w.WorkerTicketFrame:
        self.workers += 1
        self.lent[f"worker-{self.workers}"] += 1
        return ticket(f"worker-{self.workers}")

    # The connection

    @rule()
    def slow_down_or_speed_up(self) -> None:
        self.slow = not self.slow

    @precondition(lambda self: not self.connected)
    @rule()
    def connect(self) -> None:
        self.connected = True
        self.news(self.part.welcomed(self.pool.welcome(), 0))

    @precondition(lambda self: self.connected)
    @rule()
    def lose_connection(self) -> None:
        self.connected = False
        self.to_pool.clear()
        self.to_job.clear()

    @precondition(lambda self: self.to_pool)
    @rule()
    def pool_hears(self) -> None:
        self.pool.hear(self.to_pool.popleft())

    @precondition(lambda self: self.to_job)
    @rule()
    def job_hears(self) -> None:
        self.news(self.part.heard(self.to_job.popleft(), 0))

    # The job

    @rule(phase=PHASES)
    def ask(self, phase) -> None:
        self.part.ask(phase)

    @rule(phase=PHASES)
    def withdraw(self, phase) -> None:
        self.part.withdraw(phase)

    @precondition(lambda self: len(self.part.workers) < 4)
    @rule()
    def offer(self) -> None:
        self.part.offer(self.new_ticket())

    @rule(which=st.integers(0, 3), ends=st.sampled_from(["", "it lied"]))
    def give_back(self, which: int, ends: str) -> None:
        workers = list(self.part.workers)
        if workers:
            self.part.give_back(workers[which % len(workers)], ends)

    @rule(which=st.integers(0, 3), finished=st.booleans())
    def leave(self, which: int, finished: bool) -> None:
        empty = [permit for permit in self.part.permits if not self.part.working(permit)]
        if empty:
            self.part.leave(empty[which % len(empty)], finished=finished)

    @precondition(lambda self: self.part.trainer is None)
    @rule()
    def start_trainer(self) -> None:
        self.part.start_trainer(self.new_ticket())

    @rule()
    def end_trainer(self) -> None:
        self.part.end_trainer()

    @rule(step=st.integers(0, 3), done=st.integers(0, 8))
    def progress(self, step: int, done: int) -> None:
        self.part.report_steps(step)
        self.part.report_progress(done, 8)

    @rule()
    def die(self) -> None:
        """Another process takes the run up: it knows nothing but what it is told as it begins."""
        self.lose_connection()
        self.part = JobPart("job", self.say)
        self.connect()

    # The pool

    @rule(phase=PHASES)
    def grant(self, phase) -> None:
        if phase in self.pool.asked and not self.pool.permits:
            self.pool.grant(phase)

    @rule()
    def recall(self) -> None:
        for permit in self.pool.permits:
            self.pool.recall(permit)

    @rule()
    def take(self) -> None:
        for permit in list(self.pool.permits):
            self.pool.take(permit)

    @rule(node=st.sampled_from(["node-1", "node-2"]), cause=st.sampled_from(["", "it died"]))
    def worker_ends(self, node: str, cause: str) -> None:
        self.pool.park(node, cause)

    @precondition(lambda self: self.pool.trainer)
    @rule()
    def trainer_dies(self) -> None:
        self.pool.lose_trainer("it died")

    def deliver_all(self) -> None:
        while self.to_pool or self.to_job:
            while self.to_pool:
                self.pool_hears()
            while self.to_job:
                self.job_hears()

    # What holds

    @invariant()
    def all_arrives_while_the_connection_is_fast(self) -> None:
        if not self.slow:
            self.deliver_all()

    @invariant()
    def nobody_ends_twice(self) -> None:
        assert all(self.over[worker] <= self.lent[worker] for worker in self.over)

    @invariant()
    def workers_wait_or_are_of_permits(self) -> None:
        for worker in self.part.workers.values():
            assert worker.permit in self.part.permits if worker.permit else worker.ticket is not None

    def teardown(self) -> None:
        if not self.connected:
            self.connect()
        self.deliver_all()
        part, pool = self.part, self.pool
        assert part.permits.keys() == pool.permits.keys()
        for permit, held in pool.permits.items():
            mine = part.permits[permit]
            assert (mine.phase, mine.nodes, mine.recalled) == (held.phase, held.nodes, held.recalled)
        working = {one.node: one.worker for one in part.workers.values() if one.permit}
        assert working == pool.slices
        assert {one.worker for one in part.workers.values() if not one.permit} == pool.offered.keys()
        assert not any(one.ending for one in part.workers.values())
        assert ("" if part.trainer is None else part.trainer.worker) == pool.trainer
        assert {phase for phase in part.wanted if part.permit_of(phase) is None} <= pool.asked
        living = {*part.workers} | ({part.trainer.worker} if part.trainer else set())
        assert not any(self.over[worker] for worker in living)


TestJobAndPool = JobAndPool.TestCase
TestJobAndPool.settings = settings(max_examples=examples(25, 120), stateful_step_count=40, deadline=None)


def membership(address: str) -> PoolMembership:
    return PoolMembership(endpoint=Endpoint(address), job="job", placement=3, token="secret")


def test_the_environment_says_whether_a_pool_has_started_the_process():
    variables = membership("127.0.0.1:7").variables()
    assert PoolMembership.of({}) is None
    assert PoolMembership.of(variables) == membership("127.0.0.1:7")
    for missing in ("ELASTIC_POOL_JOB", "ELASTIC_POOL_PLACEMENT", "ELASTIC_POOL_TOKEN"):
        with pytest.raises(PoolUnavailable, match=f"and {missing} is not"):
            PoolMembership.of({**variables, missing: ""})
    with pytest.raises(PoolUnavailable, match="found 'x'; allowed: a number"):
        PoolMembership.of({**variables, "ELASTIC_POOL_PLACEMENT": "x"})


class Server:
    """A pool's process that can go away and come back at the same address."""

    def __init__(self) -> None:
        self.link: PoolLink[FromDialler] | None = None
        self.pool = JobsPool(lambda message: self.link.send(message) if self.link else None)
        self.connected: asyncio.Queue[PoolLink[FromDialler]] = asyncio.Queue()
        self.address = ""
        self.refuses: w.RefusedFrame | None = None
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        port = int(self.address.rpartition(":")[2] or 0)
        self._server = await listen_as_pool(self._accept, port)  # type: ignore[assignment]
        assert self._server is not None
        self.address = "{}:{}".format(*self._server.sockets[0].getsockname()[:2])

    def _accept(self, link: PoolLink[FromDialler]) -> None:
        task = asyncio.create_task(self._serve(link))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, link: PoolLink[FromDialler]) -> None:
        try:
            hello = await link.receive()
            assert hello == w.JobHello(w.POOL_PROTOCOL_VERSION, "job", "secret", 3)
            if self.refuses is not None:
                link.send(self.refuses)
                return
            self.link = link
            link.send(self.pool.welcome())
            self.connected.put_nowait(link)
            while True:
                self.pool.hear(await link.receive())  # type: ignore[arg-type]
        except ConnectionLost:
            pass
        finally:
            if self.link is link:
                self.link = None

    def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        if self.link is not None:
            self.link.abort()


async def until(condition) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - of another end of a socket, which cannot tell us
            await asyncio.sleep(0.005)


async def test_what_is_ordered_while_the_pool_is_away_is_done_once_it_is_back():
    server, heard = Server(), []
    await server.start()
    client = PoolClient(membership(server.address))
    client.on_slices(heard.append)
    assert (await client.open(10.0)).rollout_nodes == ("node-1", "node-2")
    client.part.ask(ROLLOUT)
    await until(lambda: ROLLOUT in server.pool.asked)
    server.stop()
    server.link = None
    server.pool.asked.clear()
    permit = server.pool.grant(ROLLOUT)
    client.part.ask(TRAIN)
    await server.start()
    await until(lambda: permit in client.part.permits and TRAIN in server.pool.asked)
    assert 500 < client.left_s(permit) <= 600
    client.part.offer(ticket("worker-1"))
    await until(lambda: server.pool.slices == {"node-1": "worker-1"})
    await until(lambda: client.part.working(permit))
    client.part.give_back("worker-1")
    await until(lambda: any(isinstance(one, w.WorkerEnded) for one in heard))
    client.part.leave(permit, finished=True)
    await client.aclose()
    await until(lambda: not server.pool.permits)
    assert [type(one).__name__ for one in heard] == ["Granted", "Granted", "WorkerEnded"]
    server.stop()


async def test_who_is_turned_away_has_nothing_any_more_and_says_why():
    server, heard, reasons = Server(), [], []
    await server.start()
    client = PoolClient(membership(server.address))
    client.on_slices(heard.append)
    client.turned_away = reasons.append
    await client.open(10.0)
    client.part.offer(ticket("worker-1"))
    client.part.ask(ROLLOUT)
    await until(lambda: ROLLOUT in server.pool.asked)
    permit = server.pool.grant(ROLLOUT)
    await until(lambda: client.part.working(permit))
    server.refuses = w.RefusedFrame("placement 4 is the present one", retry=False)
    server.stop()
    await server.start()
    await until(lambda: reasons)
    assert "placement 4 is the present one" in reasons[0]
    assert [type(one).__name__ for one in heard] == ["Granted", "WorkerEnded", "PermitOver"]
    assert not client.part.permits
    await client.aclose()
    server.stop()


async def test_no_pool_at_that_address_is_said_at_once_or_after_the_wait():
    server = Server()
    await server.start()
    server.refuses = w.RefusedFrame("no such job", retry=False)
    with pytest.raises(PoolUnavailable, match="no such job"):
        await PoolClient(membership(server.address)).open(10.0)
    server.stop()
    with pytest.raises(PoolUnavailable, match="cannot be reached"):
        await PoolClient(membership(server.address)).open(0.2)
