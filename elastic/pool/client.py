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

from elastic.core.cluster.types import PhaseKind
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

News: TypeAlias = w.Granted | w.Recalled | w.TailMove | w.PermitOver | w.SliceParked | w.TrainerEnded
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
class HeldTurn:
    """A permit of the job. Times are in seconds, on the clock of the caller of `JobPart`."""

    permit: int
    phase: PhaseKind
    nodes: tuple[str, ...]
    until_s: float
    both: bool = False
    """Whether its nodes are those of both phases."""
    recalled: bool = False
    tail: tuple[str, ...] = ()
    """The nodes that the phase's last responses are to move to; empty before that."""
    tail_left: bool = False

    @property
    def usable(self) -> tuple[str, ...]:
        """The nodes on which new work may begin."""
        return () if self.recalled else self.tail or self.nodes


@dataclass(slots=True)
class LentSlice:
    """A worker on a rollout node. `ticket` is None if an earlier process of the run borrowed the node."""

    permit: int
    node: str
    worker: str
    ticket: w.WorkerTicketFrame | None
    returning: bool = False
    ends: str = ""


@dataclass(slots=True)
class StartedTrainer:
    worker: str
    ticket: w.WorkerTicketFrame | None
    ending: bool = False


class JobPart:
    """The pure state of a job. Every method that changes it returns the messages for the pool.

    The pool ignores requests for a phase whose permit the job holds. They are sent once the permit is over.
    """

    def __init__(self) -> None:
        self.wanted: dict[PhaseKind, bool] = {}
        """Whether a phase is wanted with the nodes of both."""
        self.permits: dict[int, HeldTurn] = {}
        self.slices: dict[str, LentSlice] = {}
        """By node."""
        self.trainer: StartedTrainer | None = None
        self.progress: tuple[int, int] | None = None
        """Of the present rollout: how many of its responses are done, of how many."""
        self._steps: int | None = None
        self._yields: dict[int, w.YieldPhase] = {}
        """Those that the pool may not have heard of."""
        self._welcomed = False

    def permit_of(self, phase: PhaseKind) -> HeldTurn | None:
        """Return the newest permit for this phase."""
        return max((x for x in self.permits.values() if x.phase is phase), key=lambda x: x.permit, default=None)

    # What the job does

    def ask(self, phase: PhaseKind, *, both: bool = False) -> list[w.FromJob]:
        if self.wanted.get(phase) == both:
            return []
        self.wanted[phase] = both
        return self._wants(phase)

    def withdraw(self, phase: PhaseKind) -> list[w.FromJob]:
        both = self.wanted.pop(phase, None)
        return [] if both is None else [w.WithdrawPhase(phase, both)]

    def lend(self, permit: int, node: str, ticket: w.WorkerTicketFrame) -> list[w.FromJob]:
        """Start a worker on an idle node of a permit that the job holds."""
        assert node in self.permits[permit].usable
        assert node not in self.slices
        self.slices[node] = LentSlice(permit, node, ticket.worker, ticket)
        return [w.LendSlice(permit, node, ticket)]

    def give_back(self, node: str, ends: str = "") -> list[w.FromJob]:
        """End the node's worker. With `ends`, also end its resident, for that reason."""
        lent = self.slices.get(node)
        if lent is None or (lent.returning and lent.ends == (ends or lent.ends)):
            return []
        lent.returning, lent.ends = True, ends or lent.ends
        return [w.ReturnSlice(lent.permit, node, lent.ends)]

    def start_trainer(self, ticket: w.WorkerTicketFrame) -> list[w.FromJob]:
        assert self.trainer is None
        self.trainer = StartedTrainer(ticket.worker, ticket)
        return [w.StartTrainer(ticket)]

    def end_trainer(self) -> list[w.FromJob]:
        if self.trainer is None or self.trainer.ending:
            return []
        self.trainer.ending = True
        return [w.EndTrainer(self.trainer.worker)]

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
        held.nodes, held.tail_left = held.tail, True
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

    def welcomed(self, welcome: w.JobWelcome, now_s: float) -> tuple[list[News], list[w.FromJob]]:
        """Note that the pool's process is there; returns what has changed meanwhile, and the messages to send
        (again)."""
        news: list[News] = []
        say: list[w.FromJob] = []
        told = {held.permit: held for held in welcome.permits}
        self._yields = {permit: said for permit, said in self._yields.items() if permit in told}
        for permit in [permit for permit in self.permits if permit not in told]:
            news += self._over(permit, f"it was taken back {AWAY}")
        for found in welcome.permits:
            if found.permit in self._yields:
                say.append(self._yields[found.permit])
            else:
                news += self._granted(found, now_s)
                if found.recalled:
                    news += self._recalled(w.Recalled(found.permit, found.left_s), now_s)
        for node, worker in welcome.slices.items():
            if node not in self.slices:
                permit = next((x.permit for x in self.permits.values() if node in x.nodes), 0)
                self.slices[node] = LentSlice(permit, node, worker, None, returning=self._welcomed)
        for lent in list(self.slices.values()):
            if welcome.slices.get(lent.node) == lent.worker:
                say += [w.ReturnSlice(lent.permit, lent.node, lent.ends)] if lent.returning else []
            elif lent.returning or lent.ticket is None:
                news += self._parked(w.SliceParked(lent.permit, lent.node, lent.worker, cause=f"it ended {AWAY}"))
            else:
                say.append(w.LendSlice(lent.permit, lent.node, lent.ticket))
        news += self._found_trainer(welcome.trainer, say)
        for held in self.permits.values():
            if held.tail_left:
                say.append(w.TailLeft(held.permit))
        for phase in self.wanted:
            say += self._wants(phase)
        say += [] if self._steps is None else [w.StepsDone(self._steps)]
        self._welcomed = True
        return news, say + self._progress()

    def heard(self, message: w.ToJob, now_s: float) -> tuple[list[News], list[w.FromJob]]:
        """Return what is new in a message, and the messages to send. Repetitions and messages on past permits give
        nothing."""
        if isinstance(message, w.PermitOver) and (held := self.permits.get(message.permit)) is not None:
            return self._over(message.permit, message.cause), self._wants(held.phase)
        return self._news(message, now_s), []

    def _news(self, message: w.ToJob, now_s: float) -> list[News]:
        match message:
            case w.Granted():
                return self._granted(message, now_s)
            case w.Recalled():
                return self._recalled(message, now_s)
            case w.TailMove():
                held = self.permits.get(message.permit)
                nodes = tuple(node for node in message.nodes if held is not None and node in held.nodes)
                if held is None or held.tail or not nodes:
                    return []
                held.tail = nodes
                return [message]
            case w.SliceParked():
                return self._parked(message)
            case w.TrainerEnded():
                return self._trainer_ended(message)
            case w.PermitOver() | w.JobWelcome() | w.RefusedFrame() | w.StillHere():
                return []

    def forsaken(self, why: str) -> list[News]:
        """End everything that the process held, because the pool has dismissed it."""
        news: list[News] = []
        for permit in list(self.permits):
            news += self._over(permit, why)
        for lent in list(self.slices.values()):
            news += self._parked(w.SliceParked(lent.permit, lent.node, lent.worker, cause=why))
        if self.trainer is not None:
            news += self._trainer_ended(w.TrainerEnded(self.trainer.worker, why))
        self.wanted.clear()
        self._yields.clear()
        return news

    def _granted(self, message: w.Granted, now_s: float) -> list[News]:
        if message.permit in self._yields:
            return []
        held = self.permits.get(message.permit)
        until_s = now_s + message.left_s
        if held is None:
            held = HeldTurn(message.permit, message.phase, message.nodes, until_s, message.both)
            self.permits[message.permit] = held
            if self.wanted.get(message.phase) == message.both:
                del self.wanted[message.phase]
            return [message]
        more = [node for node in message.nodes if node not in held.nodes]
        held.until_s = until_s
        if not more or held.tail:
            return []
        held.nodes = message.nodes
        return [message]

    def _recalled(self, message: w.Recalled, now_s: float) -> list[News]:
        held = self.permits.get(message.permit)
        if held is None or held.recalled:
            return []
        held.recalled, held.until_s = True, now_s + message.left_s
        return [message]

    def _over(self, permit: int, cause: str) -> list[News]:
        if self.permits.pop(permit, None) is None:
            return []
        news: list[News] = []
        for lent in [lent for lent in self.slices.values() if lent.permit == permit]:
            news += self._parked(w.SliceParked(permit, lent.node, lent.worker, cause=cause))
        return [*news, w.PermitOver(permit, cause)]

    def _parked(self, message: w.SliceParked) -> list[News]:
        lent = self.slices.get(message.node)
        if lent is None or lent.worker != message.worker:
            return []
        del self.slices[message.node]
        return [message]

    def _trainer_ended(self, message: w.TrainerEnded) -> list[News]:
        if self.trainer is None or self.trainer.worker != message.worker:
            return []
        self.trainer = None
        return [message]

    def _found_trainer(self, worker: str, say: list[w.FromJob]) -> list[News]:
        ours = self.trainer
        if ours is None:
            if worker:
                self.trainer = StartedTrainer(worker, None, ending=self._welcomed)
                say += [w.EndTrainer(worker)] if self._welcomed else []
            return []
        if worker == ours.worker:
            say += [w.EndTrainer(worker)] if ours.ending else []
            return []
        if ours.ending or ours.ticket is None:
            return self._trainer_ended(w.TrainerEnded(ours.worker, f"it ended {AWAY}"))
        say.append(w.StartTrainer(ours.ticket))
        return []

    def _wants(self, phase: PhaseKind) -> list[w.FromJob]:
        wanted = phase in self.wanted and self.permit_of(phase) is None
        return [w.AskPhase(phase, self.wanted[phase])] if wanted else []

    def _progress(self) -> list[w.FromJob]:
        held = next((x for x in self.permits.values() if x.phase is PhaseKind.ROLLOUT or x.both), None)
        return [] if held is None or self.progress is None else [w.PhaseProgress(held.permit, *self.progress)]


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
        self.part = JobPart()
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
        return max(0.0, self.part.permits[permit].until_s - self._now_s())

    # Orders

    def ask(self, phase: PhaseKind, *, both: bool = False) -> None:
        self._say(self.part.ask(phase, both=both))

    def withdraw(self, phase: PhaseKind) -> None:
        self._say(self.part.withdraw(phase))

    def lend(self, permit: int, node: str, ticket: w.WorkerTicketFrame) -> None:
        self._say(self.part.lend(permit, node, ticket))

    def give_back(self, node: str, ends: str = "") -> None:
        self._say(self.part.give_back(node, ends))

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

    def _now_s(self) -> float:
        return asyncio.get_running_loop().time()

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
        news, say = self.part.welcomed(self.welcome, self._now_s())
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
                        news, say = self.part.heard(message, self._now_s())
                        self._say(say)
                        self._tell(news)
                except (ConnectionLost, SessionRefused) as error:
                    why = _final(error)
                    self._link = None
                    self.heard_of(str(error))
                    link.abort()
                gone_s = self._now_s()
                while self._link is None and not why:
                    try:
                        link = await self._join(min(REDIAL_S, self._away_s))
                    except (ConnectionLost, SessionRefused) as error:
                        why = str(error) if self._now_s() - gone_s >= self._away_s else _final(error)
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
                case w.TrainerEnded():
                    hears = (self._trainer,)
                case w.SliceParked() | w.TailMove():
                    hears = (self._rollouts,)
                case w.Granted():
                    hears = (self._rollouts if one.phase is PhaseKind.ROLLOUT else self._permits,)
                case w.Recalled() | w.PermitOver():
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
