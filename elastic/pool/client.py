"""A job's connection to its pool. After every reconnection it tells the pool again what the job wants and holds.

`JobPart` is the pure half: the phases that the job wants, its permits, slices and trainer, and the messages that
follow. `PoolClient` dials the pool's process for as long as the job lasts, and passes messages to their users: of a
run the provider of rollout slices, and the trainer's permits and lease; of a script its thread that waits for a time
slice.

While the pool's process is away, phases under way run to their deadlines, and orders are sent once it is back. Source:
docs/jobs.md; `elastic.pool.messages`.
"""

import asyncio
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import msgspec
import structlog

from elastic.core.cluster.types import Nanoseconds, Permit, PhaseKind
from elastic.core.types import NS_PER_S
from elastic.pool import messages as w
from elastic.pool.connection import POOL, TO_JOB, UNKNOWN_POOL, PoolLink
from elastic.protocol.connection import ConnectionLost, Greeting, SessionRefused, dial
from elastic.protocol.endpoint import Endpoint

log = structlog.get_logger(__name__)

POOL_VARIABLE, FINGERPRINT_VARIABLE = "ELASTIC_POOL", "ELASTIC_POOL_FINGERPRINT"
JOB_VARIABLE, PLACEMENT_VARIABLE, TOKEN_VARIABLE = "ELASTIC_POOL_JOB", "ELASTIC_POOL_PLACEMENT", "ELASTIC_POOL_TOKEN"
TRAINS_VARIABLE = "ELASTIC_POOL_TRAINS_ELSEWHERE"
"""Set for a job's process whose pool has training nodes on other machines: their devices are not this machine's."""
REDIAL_S = 60.0
"""Interval of log entries while the pool stays away."""
NOT_A_JOB = (
    "this run is no pool's job: `elastic pool start POOL.toml` starts a pool, and `elastic jobs submit CONFIG` has it "
    "carry out a run"
)
AWAY = "while the pool's process was away"

News: TypeAlias = w.Granted | w.PermitOver | w.WorkerEnded
Hear: TypeAlias = Callable[[News], None]


class PoolUnavailable(Exception):
    """The pool cannot be reached, or does not accept the run as its job. The message says why."""


class PoolMembership(msgspec.Struct, frozen=True, kw_only=True):
    """The pool, the job and the placement for which a process speaks."""

    endpoint: Endpoint
    job: str
    placement: int
    token: str

    @classmethod
    def of(cls, variables: Mapping[str, str]) -> "PoolMembership | None":
        """Read the membership from a process's environment; None if no pool has started it. Raises
        `PoolUnavailable`."""
        address = variables.get(POOL_VARIABLE, "")
        if not address:
            return None
        names = JOB_VARIABLE, PLACEMENT_VARIABLE, TOKEN_VARIABLE
        if missing := [name for name in names if not variables.get(name)]:
            raise PoolUnavailable(
                f"{POOL_VARIABLE} is set, and {' and '.join(missing)} is not: a pool sets them all for the jobs that "
                "it starts"
            )
        job, placement, token = (variables[name] for name in names)
        if not placement.isdecimal():
            raise PoolUnavailable(f"{PLACEMENT_VARIABLE}: found {placement!r}; allowed: a number")
        endpoint = Endpoint(address, fingerprint=variables.get(FINGERPRINT_VARIABLE, ""))
        return cls(endpoint=endpoint, job=job, placement=int(placement), token=token)

    def variables(self) -> dict[str, str]:
        """Return the variables of which `of` makes the membership."""
        return {
            POOL_VARIABLE: self.endpoint.address,
            FINGERPRINT_VARIABLE: self.endpoint.fingerprint,
            JOB_VARIABLE: self.job,
            PLACEMENT_VARIABLE: str(self.placement),
            TOKEN_VARIABLE: self.token,
        }


@dataclass(slots=True)
class PoolWorker:
    """A worker that the job wants its residents to be: one of its rollout nodes', or its trainer's.

    `permit` and `node` are those under which it works; it waits for a node as long as there is none. `ticket` is None
    if an earlier process of the run has asked for it. `ends`: why its resident is to end with it.
    """

    worker: str
    ticket: w.WorkerTicketFrame | None
    permit: int = 0
    node: str = ""
    ending: bool = False
    ends: str = ""


class JobPart:
    """The pure state of a job. `say` gets the messages for the pool that follow from a change; it may lose them.

    The pool ignores requests for a phase whose permit the job holds. They are sent once the permit is over.
    """

    def __init__(self, job: str, say: Callable[[w.FromJob], None]) -> None:
        self._job, self._say = job, say
        self.wanted: dict[PhaseKind, bool] = {}
        """Whether a phase is wanted with the nodes of both."""
        self.permits: dict[int, Permit] = {}
        self.workers: dict[str, PoolWorker] = {}
        """Those of rollout nodes."""
        self.trainer: PoolWorker | None = None
        self.progress: tuple[int, int] | None = None
        """How many responses of the present rollout are done, and how many it has."""
        self._steps: int | None = None
        self._yields: dict[int, w.YieldPhase] = {}
        """Those that the pool may not have heard of."""
        self._welcomed = False

    def permit_of(self, phase: PhaseKind) -> Permit | None:
        """Return the newest permit for this phase."""
        return max((x for x in self.permits.values() if x.phase is phase), key=lambda x: x.number, default=None)

    def working(self, permit: int) -> list[PoolWorker]:
        """Return the workers that work under the permit."""
        return [worker for worker in self.workers.values() if worker.permit == permit]

    # What the job does

    def ask(self, phase: PhaseKind, *, both: bool = False) -> None:
        if self.wanted.get(phase) != both:
            self.wanted[phase] = both
            self._say_wanted(phase)

    def withdraw(self, phase: PhaseKind) -> None:
        both = self.wanted.pop(phase, None)
        if both is not None:
            self._say(w.WithdrawPhase(phase, both))

    def offer(self, ticket: w.WorkerTicketFrame) -> None:
        """Have a resident work as this worker, as soon as there is one with a device and without a worker."""
        assert ticket.worker not in self.workers
        self.workers[ticket.worker] = PoolWorker(ticket.worker, ticket)
        self._say(w.OfferWorker(ticket))

    def give_back(self, worker: str, ends: str = "") -> None:
        """End the worker, or take back the offer of it. With `ends`, also end its resident, for that reason."""
        found = self.workers.get(worker)
        if found is None or (found.ending and found.ends == (ends or found.ends)):
            return
        found.ends = ends or found.ends
        if not found.permit:
            del self.workers[worker]
        self._end(found)

    def start_trainer(self, ticket: w.WorkerTicketFrame) -> None:
        assert self.trainer is None
        self.trainer = PoolWorker(ticket.worker, ticket)
        self._say(w.StartTrainer(ticket))

    def end_trainer(self) -> None:
        if self.trainer is not None and not self.trainer.ending:
            self._end(self.trainer)

    def leave(self, permit: int, *, finished: bool, switch_s: float = 0.0) -> None:
        """Yield a permit. No worker may be left under it. Does nothing for a permit that is over."""
        held = self.permits.pop(permit, None)
        if held is None:
            return
        if finished and held.phase is PhaseKind.ROLLOUT:
            self.progress = None
        self._yields[permit] = said = w.YieldPhase(permit, finished, switch_s)
        self._say(said)
        self._say_wanted(held.phase)

    def leave_for_tail(self, permit: int) -> None:
        """Give up the permit's nodes on which the tail does not go on. No worker may be left on them."""
        held = self.permits[permit]
        self.permits[permit] = msgspec.structs.replace(held, nodes=held.tail_nodes)
        self._say(w.TailLeft(permit))

    def report_steps(self, steps: int) -> None:
        if self._steps != steps:
            self._steps = steps
            self._say(w.StepsDone(steps))

    def report_progress(self, done: int, of: int) -> None:
        self.progress = (done, of)
        self._say_progress()

    # What the pool does

    def welcomed(self, welcome: w.JobWelcome, now_ns: Nanoseconds) -> list[News]:
        """Note that the pool's process is there; returns what has changed meanwhile. Says (again) what it may not have
        heard."""
        news: list[News] = []
        told = {found.permit: found for found in welcome.permits}
        self._yields = {permit: said for permit, said in self._yields.items() if permit in told}
        for permit in [permit for permit in self.permits if permit not in told]:
            news += self._over(permit, f"it was taken back {AWAY}")
        for found in welcome.permits:
            if found.permit in self._yields:
                self._say(self._yields[found.permit])
            else:
                news += self._told(found, now_ns)
            if found.permit in self.permits and self.permits[found.permit].tail_moved:
                self._say(w.TailLeft(found.permit))
        working = {worker for found in welcome.permits for worker in found.workers.values()}
        for worker in [worker for worker in self.workers.values() if worker.worker not in working]:
            if worker.permit or worker.ticket is None:
                news += self._ended(w.WorkerEnded(worker.worker, f"it ended {AWAY}"))
            else:
                self._say(w.OfferWorker(worker.ticket))
        news += self._found_trainer(welcome.trainer)
        for phase in list(self.wanted):
            self._say_wanted(phase)
        if self._steps is not None:
            self._say(w.StepsDone(self._steps))
        self._welcomed = True
        self._say_progress()
        return news

    def heard(self, message: w.ToJob, now_ns: Nanoseconds) -> list[News]:
        """Return what is new in a message. Repetitions and messages on past permits give nothing."""
        match message:
            case w.Granted():
                return self._told(message, now_ns)
            case w.WorkerEnded():
                return self._ended(message)
            case w.PermitOver(permit=permit) if (held := self.permits.get(permit)) is not None:
                news = self._over(permit, message.cause)
                self._say_wanted(held.phase)
                return news
            case _:
                return []

    def forsaken(self, why: str) -> list[News]:
        """End everything that the process held, because the pool has dismissed it."""
        news: list[News] = []
        for permit in list(self.permits):
            news += self._over(permit, why)
        trainers = () if self.trainer is None else (self.trainer,)
        for worker in (*self.workers.values(), *trainers):
            news += self._ended(w.WorkerEnded(worker.worker, why))
        self.wanted.clear()
        self._yields.clear()
        return news

    def _told(self, message: w.Granted, now_ns: Nanoseconds) -> list[News]:
        """Take in a permit as it stands, and end workers that the run has given back meanwhile."""
        number = message.permit
        if number in self._yields:
            return []
        before, permit = self.permits.get(number), message.held(self._job, now_ns)
        if before is None:
            if self.wanted.get(permit.phase) == permit.both:
                del self.wanted[permit.phase]
        else:
            nodes, tail = (before.nodes, before.tail_nodes) if before.tail_nodes else (permit.nodes, permit.tail_nodes)
            permit = msgspec.structs.replace(permit, since_ns=before.since_ns, nodes=nodes, tail_nodes=tail)
        self.permits[number] = permit
        new = before is None or msgspec.structs.replace(before, deadline_ns=permit.deadline_ns) != permit
        for node, name in message.workers.items():
            worker = self.workers.get(name)
            if worker is None:
                worker = self.workers[name] = PoolWorker(name, None, ending=self._welcomed)
            new = new or not worker.permit
            worker.permit, worker.node = number, node
            if worker.ending:
                self._end(worker)
        return [message] if new else []

    def _end(self, worker: PoolWorker) -> None:
        worker.ending = True
        self._say(w.EndWorker(worker.worker, worker.ends))

    def _over(self, permit: int, cause: str) -> list[News]:
        del self.permits[permit]
        news: list[News] = []
        for worker in self.working(permit):
            news += self._ended(w.WorkerEnded(worker.worker, cause))
        return [*news, w.PermitOver(permit, cause)]

    def _ended(self, message: w.WorkerEnded) -> list[News]:
        if self.trainer is not None and self.trainer.worker == message.worker:
            self.trainer = None
            return [message]
        return [] if self.workers.pop(message.worker, None) is None else [message]

    def _found_trainer(self, worker: str) -> list[News]:
        ours = self.trainer
        if ours is None and worker:
            ours = self.trainer = PoolWorker(worker, None, ending=self._welcomed)
        if ours is None:
            return []
        if worker == ours.worker:
            if ours.ending:
                self._end(ours)
        elif ours.ending or ours.ticket is None:
            return self._ended(w.WorkerEnded(ours.worker, f"it ended {AWAY}"))
        else:
            self._say(w.StartTrainer(ours.ticket))
        return []

    def _say_wanted(self, phase: PhaseKind) -> None:
        if phase in self.wanted and self.permit_of(phase) is None:
            self._say(w.AskPhase(phase, self.wanted[phase]))

    def _say_progress(self) -> None:
        held = next((x for x in self.permits.values() if x.phase is PhaseKind.ROLLOUT or x.both), None)
        if held is not None and self.progress is not None:
            self._say(w.PhaseProgress(held.number, *self.progress))


class PoolClient:
    """The pool connection of one job's process. `hears` gets the news for each user as they come.

    `turned_away` is called with the reason when the pool has dismissed this process, or was away for longer than
    `away_s`. Of a script, `held` tells the permit under which the process itself computes; 0 for none.
    """

    welcome: w.JobWelcome

    def __init__(
        self, membership: PoolMembership, held: Callable[[], int] | None = None, away_s: float = math.inf
    ) -> None:
        self.membership = membership
        self._held, self._away_s = held, away_s
        self.part = JobPart(membership.job, self.say)
        self.heard_of: Callable[[str], None] = self._note
        """Called as the pool's process goes away, with the reason, and with none as it is there."""
        self.turned_away: Callable[[str], None] = lambda reason: None
        self._rollouts: Hear | None = None
        self._permits: Hear | None = None
        self._trainer: Hear | None = None
        self._link: PoolLink[w.ToJob] | None = None
        self._task: asyncio.Task[None] | None = None
        self._opening = asyncio.Lock()

    @property
    def is_there(self) -> bool:
        return self._link is not None

    @property
    def on_this_machine(self) -> bool:
        """Whether the pool runs on this machine: only then the connection has no TLS."""
        return not self.membership.endpoint.fingerprint

    def on_slices(self, hear: Hear) -> None:
        """Register the receiver of news on rollout slices. Raises `PoolUnavailable` if there is one already."""
        if self._rollouts is not None:
            raise PoolUnavailable("one provider of a run can be its pool's, and one is already")
        self._rollouts = hear

    def on_permits(self, hear: Hear) -> None:
        self._permits = hear

    def on_trainer(self, hear: Hear) -> None:
        self._trainer = hear

    async def open(self, within_s: float) -> w.JobWelcome:
        """Wait for the first welcome, and keep the connection from then on. Raises `PoolUnavailable`."""
        async with self._opening:
            if self._task is None:
                try:
                    link = await self._join(within_s)
                except (ConnectionLost, SessionRefused, ValueError) as error:
                    raise PoolUnavailable(f"{self._name}: {error}") from error
                self._task = asyncio.create_task(self._live(link), name="the pool's connection")
        return self.welcome

    async def aclose(self) -> None:
        """Send pending messages and stop receiving."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
        if self._link is not None:
            await self._link.aclose()
            self._link = None

    def left_s(self, permit: int) -> float:
        """Return the seconds until the permit ends."""
        return max(0, self.part.permits[permit].deadline_ns - self._now_ns()) / NS_PER_S

    # The connection

    @property
    def _name(self) -> str:
        return f"the pool of job {self.membership.job}"

    def _now_ns(self) -> Nanoseconds:
        return round(asyncio.get_running_loop().time() * NS_PER_S)

    def _note(self, why: str) -> None:
        told = {"job": self.membership.job}
        log.warning("the pool is not there", **told, reason=why) if why else log.info("the pool is there", **told)

    def say(self, message: w.FromJob) -> None:
        """Send a message of the job's part, if the pool's process is there."""
        if self._link is not None:
            self._link.send(message)

    async def _join(self, within_s: float) -> PoolLink[w.ToJob]:
        mine = self.membership

        def hello() -> msgspec.Struct:
            script, held = self._held is not None, self._held() if self._held else 0
            return w.JobHello(w.POOL_PROTOCOL_VERSION, mine.job, mine.token, mine.placement, script, held)

        peer = UNKNOWN_POOL if self._task is None else POOL
        link, self.welcome = await dial(mine.endpoint, peer, TO_JOB, Greeting(hello, w.JobWelcome), within_s)
        link.watch(self.welcome.silence_s)
        self._link = link
        self.tell(self.part.welcomed(self.welcome, self._now_ns()))
        self.heard_of("")
        return link

    async def _live(self, link: PoolLink[w.ToJob]) -> None:
        why = ""
        try:
            while not why:
                try:
                    while True:
                        message = await link.receive()
                        if isinstance(message, w.RefusedFrame):
                            raise SessionRefused(message.reason, retry=message.retry)
                        self.tell(self.part.heard(message, self._now_ns()))
                except (ConnectionLost, SessionRefused) as error:
                    why = _final(error)
                    self._link = None
                    self.heard_of(str(error))
                    link.abort()
                gone_ns = self._now_ns()
                while self._link is None and not why:
                    try:
                        link = await self._join(min(REDIAL_S, self._away_s))
                    except (ConnectionLost, SessionRefused) as error:
                        why = str(error) if self._now_ns() - gone_ns >= self._away_s * NS_PER_S else _final(error)
                        self.heard_of(str(error))
        except Exception as error:
            log.exception("the pool's connection failed", job=self.membership.job)
            why = f"internal error: {type(error).__name__}: {error}"
        self._link = None
        self.tell(self.part.forsaken(why))
        self.turned_away(f"{self._name} turned this process away: {why}")

    def tell(self, news: list[News]) -> None:
        """Pass what is new to whom it concerns."""
        for one in news:
            match one:
                case w.WorkerEnded():
                    hears = (self._rollouts, self._trainer)
                case w.Granted():
                    hears = (self._rollouts if one.phase is PhaseKind.ROLLOUT else self._permits,)
                case w.PermitOver():
                    hears = (self._rollouts, self._permits)
            for hear in dict.fromkeys(hears):
                if hear is not None:
                    hear(one)


def _final(error: Exception) -> str:
    """Return why dialling again is useless; empty if it may help."""
    return str(error) if isinstance(error, SessionRefused) and not error.retry else ""


def membership_here() -> PoolMembership | None:
    """Return the membership of this process. Raises `PoolUnavailable`."""
    return PoolMembership.of(os.environ)
