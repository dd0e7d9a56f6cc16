"""A job's connection to its pool. After every reconnection it tells the pool again what the job wants and holds.

`JobPart` is the pure half: the phases that the job wants, its permits, slices and trainer, and the messages that
follow. `PoolClient` dials the pool's process for as long as the job lasts, and passes messages to their users: of a
run the provider of rollout slices, and the trainer's permits and lease; of a script its thread that waits for a turn.

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
from elastic.pool.connection import TO_JOB, PoolLink, join
from elastic.protocol.connection import ConnectionLost, SessionRefused
from elastic.protocol.endpoint import Endpoint

log = structlog.get_logger(__name__)

POOL_VARIABLE, FINGERPRINT_VARIABLE = "ELASTIC_POOL", "ELASTIC_POOL_FINGERPRINT"
JOB_VARIABLE, PLACEMENT_VARIABLE, TOKEN_VARIABLE = "ELASTIC_POOL_JOB", "ELASTIC_POOL_PLACEMENT", "ELASTIC_POOL_TOKEN"
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

    def end(self) -> w.EndWorker:
        self.ending = True
        return w.EndWorker(self.worker, self.ends)


class JobPart:
    """The pure state of a job. Every method that changes it returns the messages for the pool.

    The pool ignores requests for a phase whose permit the job holds. They are sent once the permit is over.
    """

    def __init__(self, job: str = "") -> None:
        self._job = job
        self.wanted: dict[PhaseKind, bool] = {}
        """Whether a phase is wanted with the nodes of both."""
        self.permits: dict[int, Permit] = {}
        self.workers: dict[str, PoolWorker] = {}
        """Those of rollout nodes."""
        self.trainer: PoolWorker | None = None
        self.progress: tuple[int, int] | None = None
        """Of the present rollout: how many of its responses are done, of how many."""
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

    def ask(self, phase: PhaseKind, *, both: bool = False) -> list[w.FromJob]:
        if self.wanted.get(phase) == both:
            return []
        self.wanted[phase] = both
        return self._wants(phase)

    def withdraw(self, phase: PhaseKind) -> list[w.FromJob]:
        both = self.wanted.pop(phase, None)
        return [] if both is None else [w.WithdrawPhase(phase, both)]

    def offer(self, ticket: w.WorkerTicketFrame) -> list[w.FromJob]:
        """Have a resident work as this worker, as soon as there is one with a device and without a worker."""
        assert ticket.worker not in self.workers
        self.workers[ticket.worker] = PoolWorker(ticket.worker, ticket)
        return [w.OfferWorker(ticket)]

    def give_back(self, worker: str, ends: str = "") -> list[w.FromJob]:
        """End the worker, or take back the offer of it. With `ends`, also end its resident, for that reason."""
        found = self.workers.get(worker)
        if found is None or (found.ending and found.ends == (ends or found.ends)):
            return []
        found.ends = ends or found.ends
        if not found.permit:
            del self.workers[worker]
        return [found.end()]

    def start_trainer(self, ticket: w.WorkerTicketFrame) -> list[w.FromJob]:
        assert self.trainer is None
        self.trainer = PoolWorker(ticket.worker, ticket)
        return [w.StartTrainer(ticket)]

    def end_trainer(self) -> list[w.FromJob]:
        return [] if self.trainer is None or self.trainer.ending else [self.trainer.end()]

    def leave(self, permit: int, *, finished: bool, switch_s: float = 0.0) -> list[w.FromJob]:
        """Yield a permit. No worker may be left under it. Does nothing for a permit that is over."""
        held = self.permits.pop(permit, None)
        if held is None:
            return []
        if finished and held.phase is PhaseKind.ROLLOUT:
            self.progress = None
        self._yields[permit] = said = w.YieldPhase(permit, finished, switch_s)
        return [said, *self._wants(held.phase)]

    def leave_for_tail(self, permit: int) -> list[w.FromJob]:
        """Give up the permit's nodes on which the tail does not go on. No worker may be left on them."""
        held = self.permits[permit]
        self.permits[permit] = msgspec.structs.replace(held, nodes=held.tail_nodes)
        return [w.TailLeft(permit)]

    def tell_steps(self, steps: int) -> list[w.FromJob]:
        if self._steps == steps:
            return []
        self._steps = steps
        return [w.StepsDone(steps)]

    def tell_progress(self, done: int, of: int) -> list[w.FromJob]:
        self.progress = (done, of)
        return self._progress()

    # What the pool does

    def welcomed(self, welcome: w.JobWelcome, now_ns: Nanoseconds) -> tuple[list[News], list[w.FromJob]]:
        """Note that the pool's process is there; returns what has changed meanwhile, and the messages to send
        (again)."""
        news: list[News] = []
        say: list[w.FromJob] = []
        told = {found.permit: found for found in welcome.permits}
        self._yields = {permit: said for permit, said in self._yields.items() if permit in told}
        for permit in [permit for permit in self.permits if permit not in told]:
            news += self._over(permit, f"it was taken back {AWAY}")
        for found in welcome.permits:
            if found.permit in self._yields:
                say.append(self._yields[found.permit])
            else:
                news += self._told(found, now_ns, say)
            if found.permit in self.permits and self.permits[found.permit].tail_moved:
                say.append(w.TailLeft(found.permit))
        working = {worker for found in welcome.permits for worker in found.workers.values()}
        for worker in [worker for worker in self.workers.values() if worker.worker not in working]:
            if worker.permit or worker.ticket is None:
                news += self._ended(w.WorkerEnded(worker.worker, f"it ended {AWAY}"))
            else:
                say.append(w.OfferWorker(worker.ticket))
        news += self._found_trainer(welcome.trainer, say)
        for phase in self.wanted:
            say += self._wants(phase)
        say += [] if self._steps is None else [w.StepsDone(self._steps)]
        self._welcomed = True
        return news, say + self._progress()

    def heard(self, message: w.ToJob, now_ns: Nanoseconds) -> tuple[list[News], list[w.FromJob]]:
        """Return what is new in a message, and the messages to send. Repetitions and messages on past permits give
        nothing."""
        say: list[w.FromJob] = []
        match message:
            case w.Granted():
                return self._told(message, now_ns, say), say
            case w.WorkerEnded():
                return self._ended(message), say
            case w.PermitOver(permit=permit) if (held := self.permits.get(permit)) is not None:
                return self._over(permit, message.cause), self._wants(held.phase)
            case _:
                return [], say

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

    def _told(self, message: w.Granted, now_ns: Nanoseconds, say: list[w.FromJob]) -> list[News]:
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
            say += [worker.end()] if worker.ending else []
        return [message] if new else []

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

    def _found_trainer(self, worker: str, say: list[w.FromJob]) -> list[News]:
        ours = self.trainer
        if ours is None:
            if worker:
                self.trainer = PoolWorker(worker, None)
                say += [self.trainer.end()] if self._welcomed else []
            return []
        if worker == ours.worker:
            say += [ours.end()] if ours.ending else []
            return []
        if ours.ending or ours.ticket is None:
            return self._ended(w.WorkerEnded(ours.worker, f"it ended {AWAY}"))
        say.append(w.StartTrainer(ours.ticket))
        return []

    def _wants(self, phase: PhaseKind) -> list[w.FromJob]:
        wanted = phase in self.wanted and self.permit_of(phase) is None
        return [w.AskPhase(phase, self.wanted[phase])] if wanted else []

    def _progress(self) -> list[w.FromJob]:
        held = next((x for x in self.permits.values() if x.phase is PhaseKind.ROLLOUT or x.both), None)
        return [] if held is None or self.progress is None else [w.PhaseProgress(held.number, *self.progress)]


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
        self.part = JobPart(membership.job)
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

    def hear_slices(self, hear: Hear) -> None:
        """Register the receiver of news on rollout slices. Raises `PoolUnavailable` if there is one already."""
        if self._rollouts is not None:
            raise PoolUnavailable("one provider of a run can be its pool's, and one is already")
        self._rollouts = hear

    def hear_permits(self, hear: Hear) -> None:
        self._permits = hear

    def hear_trainer(self, hear: Hear) -> None:
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

    # Orders

    def ask(self, phase: PhaseKind, *, both: bool = False) -> None:
        self._say(self.part.ask(phase, both=both))

    def withdraw(self, phase: PhaseKind) -> None:
        self._say(self.part.withdraw(phase))

    def offer(self, ticket: w.WorkerTicketFrame) -> None:
        self._say(self.part.offer(ticket))

    def give_back(self, worker: str, ends: str = "") -> None:
        self._say(self.part.give_back(worker, ends))

    def start_trainer(self, ticket: w.WorkerTicketFrame) -> None:
        self._say(self.part.start_trainer(ticket))

    def end_trainer(self) -> None:
        self._say(self.part.end_trainer())

    def leave(self, permit: int, *, finished: bool, switch_s: float = 0.0) -> None:
        self._say(self.part.leave(permit, finished=finished, switch_s=switch_s))

    def leave_for_tail(self, permit: int) -> None:
        self._say(self.part.leave_for_tail(permit))

    def tell_steps(self, steps: int) -> None:
        self._say(self.part.tell_steps(steps))

    def tell_progress(self, done: int, of: int) -> None:
        self._say(self.part.tell_progress(done, of))

    # The connection

    @property
    def _name(self) -> str:
        return f"the pool of job {self.membership.job}"

    def _now_ns(self) -> Nanoseconds:
        return round(asyncio.get_running_loop().time() * NS_PER_S)

    def _note(self, why: str) -> None:
        told = {"job": self.membership.job}
        log.warning("the pool is not there", **told, reason=why) if why else log.info("the pool is there", **told)

    def _say(self, messages: list[w.FromJob]) -> None:
        if self._link is not None:
            for message in messages:
                self._link.send(message)

    async def _join(self, within_s: float) -> PoolLink[w.ToJob]:
        mine = self.membership

        def hello() -> w.JobHello:
            script, held = self._held is not None, self._held() if self._held else 0
            return w.JobHello(w.POOL_PROTOCOL_VERSION, mine.job, mine.token, mine.placement, script, held)

        link, self.welcome = await join(mine.endpoint, TO_JOB, hello, w.JobWelcome, within_s)
        link.watch(self.welcome.silence_s)
        self._link = link
        news, say = self.part.welcomed(self.welcome, self._now_ns())
        self._say(say)
        self._tell(news)
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
                        news, say = self.part.heard(message, self._now_ns())
                        self._say(say)
                        self._tell(news)
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
        self._tell(self.part.forsaken(why))
        self.turned_away(f"{self._name} turned this process away: {why}")

    def _tell(self, news: list[News]) -> None:
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
