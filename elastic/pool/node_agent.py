"""A node's agent: the processes, sockets and timers around `NodeAgentState`, which decides who has the node's
device.

- A resident is one process of one job with everything that it starts. It dies with its node agent: its socket closes,
  and the pool's process ends what is recorded.
- The node agent outlives the pool's process, and dials it again. It ends after a long silence.
"""

import asyncio
import contextlib
import socket
import sys
from collections.abc import Callable, Coroutine, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple, Protocol

import msgspec
import structlog

from elastic.core.cluster.types import JobId, PhaseKind
from elastic.pool import messages as w
from elastic.pool.connection import FROM_RESIDENT, POOL, TO_NODE_AGENT, UNKNOWN_POOL, PoolLink
from elastic.pool.file_exchange import FilesUnavailable
from elastic.pool.node_agent_state import (
    BeginResident,
    NodeAgentCommand,
    NodeAgentEvent,
    NodeAgentState,
    PermitRefused,
    RanksListened,
    ResidentEnded,
    ResidentSaid,
    ScriptStarted,
    Signal,
    TellPool,
    TellResident,
    Untaken,
    WakeupDue,
)
from elastic.pool.node_files import NodeFiles
from elastic.pool.stillness import Silence, Stillness
from elastic.protocol.connection import ConnectionLost, Greeting, SessionRefused, dial, over_socket
from elastic.protocol.endpoint import Address, Endpoint
from elastic.system.devices import DeviceName, faults, visible
from elastic.system.host import here
from elastic.system.interfaces import interface_address, interface_with
from elastic.system.isolation import IsolatedLoop, LoopFaults
from elastic.system.processes import OF_SITE, inherited, is_due, used_ticks
from elastic.system.supervision import RecordedProcesses, how_ended

log = structlog.get_logger(__name__)

RESIDENTS = "residents"
"""Prefix of the owner of a node's resident records; the node's name follows."""


class NodeAgentTicket(msgspec.Struct, frozen=True, kw_only=True):
    """Where a node agent dials, and as whom. `records` is the directory of its process records. Its residents see its
    `devices` alone, or all that there are if it has none of its own. On another machine than the pool's it says which
    one that is, and has a `directory` of its own. The token is never logged."""

    endpoint: Endpoint
    pool: str
    node: str
    token: str
    records: Path | None = None
    devices: tuple[DeviceName, ...] = ()
    wait_s: float = 60.0
    machine: w.NodeMachine | None = None
    directory: Path = Path()


class NodeAgentEnd(msgspec.Struct, frozen=True):
    """Why a node agent has ended, and how: the pool was not heard, did not let it in (`refused`), had given it up with
    what it has (`given_up`; it may come again without that), or has let it go (`dismissed`)."""

    reason: str
    how: Literal["unheard", "refused", "given_up", "dismissed"] = "unheard"


class NodeSite(Protocol):
    """A node's part in its site: the relay that it has for the others, and the one that its workers use."""

    @property
    def variables(self) -> Mapping[str, str]:
        """What workers have in their environment to find the relay."""
        ...

    async def serve(self, order: w.ServeSite, host: str) -> w.SiteServed:
        """Have a relay, which machines of the site reach at `host`."""
        ...

    async def use(self, relay: w.SiteRelay | None) -> None:
        """Have workers use this relay, if it can be reached."""
        ...

    async def aclose(self) -> None: ...


class SilenceLimits(NamedTuple):
    """For how long a resident may say nothing, and while it does nothing either; 0 for ever."""

    stall_s: float = 0.0
    still_s: float = 0.0

    @property
    def beat_s(self) -> float:
        """How often a resident says that it lives; 0 for never."""
        return min(filter(None, self), default=0.0) / w.BEATS


class _OwnResident:
    """The processes of a resident."""

    def __init__(self, launch: BeginResident, recorded: RecordedProcesses, limits: SilenceLimits) -> None:
        self.order, self.quietly, self.limits = launch.order, launch.quietly, limits
        self.recorded = recorded
        self.process: asyncio.subprocess.Process | None = None
        self.link: PoolLink[w.FromResident] | None = None
        self.began = launch.order.script
        """Whether it has come up."""
        self.silent = ""
        """Why its connection is lost."""
        self.hangs = False
        self._told: Signal | None = None
        self.unwanted = asyncio.Event()
        """Set once it is to end."""

    def signal(self, told: Signal | None) -> None:
        """End the process so; one that has not been started is ended once it has."""
        self._told = told
        if told is not None:
            self.unwanted.set()
        if told is not None and self.process is not None and self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self.process.kill() if told.kill else self.process.terminate()

    def started(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.recorded.add("resident", process.pid)
        self.signal(self._told)


class NodeAgent:
    """The node agent of one node. `run` returns when the pool dismisses it or was silent for too long. `let_in` is
    called with the token of its session whenever it has joined. On another machine than the pool's it is of a
    `site`, and has `files` of jobs."""

    def __init__(
        self,
        ticket: NodeAgentTicket,
        memory: Callable[[Iterable[int]], int] | None = None,
        faults: LoopFaults | None = None,
        recorded: Callable[[Path | None, str, str, str], RecordedProcesses] = RecordedProcesses,
        let_in: Callable[[str], None] = lambda session: None,
        site: NodeSite | None = None,
        files: NodeFiles | None = None,
    ) -> None:
        self._ticket = ticket
        self._let_in, self._site, self._files = let_in, site, files
        self._isolated = IsolatedLoop("node_agent", faults or LoopFaults(), clock=_now_s)
        self._memory = memory or held_bytes
        self._recorded = recorded
        self._token = ticket.token
        self._state = NodeAgentState()
        self._limits = SilenceLimits()
        self._residents: dict[JobId, _OwnResident] = {}
        self._wakeup: asyncio.TimerHandle | None = None
        self._link: PoolLink[w.ToNodeAgent] | None = None
        self._unsaid: list[w.FromNodeAgent] = []
        """What has happened since the last hello, and before its welcome."""
        self._own_host = ""
        """By which the pool's machine knows this one."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._notice: tuple[float, str] | None = None
        """When the machine is taken, and why."""

    def notice(self, left_s: float | None, reason: str) -> None:
        """Tell the pool that the machine is taken in `left_s`; what has no time changes nothing."""
        if left_s is not None:
            self._notice = here().monotonic() + left_s, reason
            self._say_notice()

    def _say_notice(self) -> None:
        if self._notice is not None and self._link is not None:
            at_s, reason = self._notice
            self._link.send(w.NodeNotice(max(0.0, at_s - here().monotonic()), reason))

    async def run(self) -> NodeAgentEnd:
        """Work until the end, residents included; returns why it has ended."""
        try:
            return await self._serve()
        finally:
            await self._end_all()

    async def _end_all(self) -> None:
        if self._wakeup is not None:
            self._wakeup.cancel()
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(resident.recorded.end() for resident in self._residents.values()))
        for part in (self._site, self._files):
            if part is not None:
                await part.aclose()

    async def _serve(self) -> NodeAgentEnd:
        peer, within_s, greeting = UNKNOWN_POOL, self._ticket.wait_s, Greeting(self._hello, w.NodeAgentWelcome)
        while True:
            try:
                link, welcome = await dial(self._ticket.endpoint, peer, TO_NODE_AGENT, greeting, within_s)
            except SessionRefused as refusal:
                how = "unheard" if refusal.retry else "refused" if self._state.idle else "given_up"
                return NodeAgentEnd(str(refusal), how)
            except ConnectionLost as loss:
                return NodeAgentEnd(str(loss))
            log.info("joined the pool", pool=self._ticket.pool, node=self._ticket.node)
            self._let_in(welcome.session)
            self._link, self._token, peer, within_s = link, welcome.session, POOL, welcome.orphan_s
            self._own_host = link.own_host
            self._limits = SilenceLimits(welcome.stall_s, welcome.still_s)
            link.watch(welcome.silence_s)
            for message in self._unsaid:
                link.send(message)
            self._unsaid.clear()
            self._say_notice()
            if self._files is not None:
                self._files.joined(link.send, welcome.orphan_s)
            measuring = asyncio.create_task(self._measure(welcome.measure_s), name="memory")
            try:
                while True:
                    message = await link.receive()
                    if isinstance(message, w.RefusedFrame):
                        await self._end_all()  # Before the pool sees the end of the connection.
                        return NodeAgentEnd(message.reason, "dismissed")
                    with self._isolated.attempt(type(message).__name__):
                        if isinstance(message, w.ServeSite | w.UseSite):
                            self._spawn(self._of_site(message, link))
                        elif isinstance(message, w.OfFiles):
                            if self._files is not None:
                                self._files.heard(message)
                        else:
                            self._heed(message)
            except ConnectionLost as loss:
                log.warning("the pool's process is not heard", cause=str(loss))
            finally:
                measuring.cancel()
                self._link = None
                if self._files is not None:
                    self._files.left()
                link.abort()

    async def _of_site(self, order: w.ServeSite | w.UseSite, link: PoolLink[w.ToNodeAgent]) -> None:
        if self._site is None:
            return
        with self._isolated.attempt("relay of the site"):
            if isinstance(order, w.UseSite):
                await self._site.use(order.relay)
            else:
                link.send(await self._site.serve(order, link.own_host))

    @property
    def _on_machine(self) -> str:
        machine = self._ticket.machine
        return "" if machine is None else f" on {machine.host}"

    def _hello(self) -> msgspec.Struct:
        ticket = self._ticket
        self._unsaid.clear()
        return self._state.hello(ticket.node, self._token, here().pid(), ticket.devices, ticket.machine)

    def _say(self, message: w.FromNodeAgent) -> None:
        if self._link is None:
            self._unsaid.append(message)
        else:
            self._link.send(message)

    def _heed(self, event: NodeAgentEvent) -> None:
        """Tell the state what has happened, and do what follows from it."""
        for command in self._state.handle(event, _now_s()):
            self._carry_out(command)
        if self._wakeup is not None:
            self._wakeup.cancel()
        due_s, loop = self._state.next_wakeup_s(), asyncio.get_running_loop()
        self._wakeup = None if due_s is None else loop.call_at(due_s, self._heed, WakeupDue())

    def _carry_out(self, command: NodeAgentCommand) -> None:
        match command:
            case TellPool(message=message):
                self._say(message)
            case TellResident(job=job, message=message):
                link = self._residents[job].link
                if link is not None:
                    link.send(message)
            case BeginResident(order=order):
                name = f"{self._ticket.node}-{order.job}-{order.placement}"
                owner = f"{RESIDENTS} {self._ticket.node}"
                recorded = self._recorded(self._ticket.records, self._ticket.pool, owner, name)
                resident = self._residents[order.job] = _OwnResident(command, recorded, self._limits)
                self._spawn(self._attend(resident))
            case Signal(job=job, cause=cause):
                log.info("resident is ended", job=job, cause=cause, at_once=command.kill)
                self._residents[job].signal(command)
            case PermitRefused(permit=permit):
                log.warning("a permit that counts no more is refused", permit=permit, last=self._state.last_permit)
            case Untaken(permit=permit, former=former):
                with self._isolated.attempt("device"):
                    raise RuntimeError(f"the pool gives the device by permit {permit} and has not taken back {former}")

    async def _attend(self, resident: _OwnResident) -> None:
        """Start a resident, receive its messages, and make sure that all of it is gone at its end."""
        cause, code, job = "it could not be started", None, resident.order.job
        with self._isolated.attempt(f"resident of {job}") as attempt:
            try:
                await self._launch(resident)
                cause, code = await self._hear(resident)
            except (OSError, FilesUnavailable) as error:
                reason = error.strerror if isinstance(error, OSError) else ""
                cause = f"it could not be started{self._on_machine}: {reason or error}"
            finally:
                if resident.link is not None:
                    resident.link.abort()
                with contextlib.suppress(ProcessLookupError):
                    if resident.process is not None and resident.process.returncode is None:
                        resident.process.kill()
        while True:
            with self._isolated.attempt(f"end of {job}") as ending:
                await resident.recorded.end()
            if not ending.fault:
                break
            await asyncio.sleep(self._isolated.wait_s(f"end of {job}"))
        if self._files is not None:
            self._files.over(job)
        wrong = "" if resident.began else await asyncio.to_thread(faults, self._ticket.devices)
        del self._residents[job]
        self._heed(ResidentEnded(job, attempt.fault or cause, code, wrong))

    async def _launch(self, resident: _OwnResident) -> None:
        order, own = resident.order, self._ticket.directory
        of_files = await self._bring_files(resident)
        command = [*order.command]
        if command[:1] == [w.OWN_PYTHON]:
            command[0] = sys.executable
        ours, theirs = here().socketpair()
        listener: socket.socket | None = None
        try:
            of_ranks, listener = self._places(order)
            at = "" if listener is None else str(Address(*listener.getsockname()))
            environment = self._of_node(order) | resident.recorded.marks | order.environment | of_files | of_ranks
            environment |= visible(self._ticket.devices)
            if resident.limits.beat_s:
                environment[w.BEAT_VARIABLE] = str(resident.limits.beat_s)
            if resident.quietly:
                environment[w.QUIET_VARIABLE] = "1"
            resident.recorded.write()
            inherited_too = () if order.script else (theirs, *([] if listener is None else [listener]))
            with _appended(own / order.log) as output:
                process = await asyncio.create_subprocess_exec(
                    *command,
                    env=environment | {w.NODE_AGENT_VARIABLE: str(theirs.fileno())},
                    cwd=own / order.directory,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                    pass_fds=[one.fileno() for one in inherited_too],
                )
            resident.started(process)
            if not order.script:
                resident.link = await over_socket(ours, FROM_RESIDENT, f"the resident of {order.job}")
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
            if listener is not None:
                listener.close()
        if at:
            self._heed(RanksListened(order.job, at))
        if order.script:
            ours.close()
            self._heed(ScriptStarted(order.job))

    def _places(self, order: w.StartResidentFrame) -> tuple[dict[str, str], socket.socket | None]:
        """Return what a trainer's resident has in its environment of where its ranks are, and the socket on which the
        first one listens for those on other nodes, if there are any. Raises `OSError`."""
        ranks = order.ranks
        if ranks is None:
            return {}, None
        listener: socket.socket | None = None
        if not ranks.alone:
            host = interface_address(ranks.interface) if ranks.interface else self._own_host
            ranks = msgspec.structs.replace(ranks, interface=ranks.interface or interface_with(host))
            if not ranks.place:
                listener = socket.create_server((host, 0))
                ranks = msgspec.structs.replace(ranks, descriptor=listener.fileno())
        return {w.RANKS_VARIABLE: msgspec.json.encode(ranks).decode()}, listener

    async def _bring_files(self, resident: _OwnResident) -> dict[str, str]:
        """Have the files of a resident here, unless it is to end before they are. Raises `FilesUnavailable`."""
        order = resident.order
        if not order.files_token:
            return {}
        if self._files is None:
            raise FilesUnavailable("this node takes no files of jobs")
        bringing, unwanted = (
            asyncio.create_task(self._files.bring(order)),
            asyncio.create_task(resident.unwanted.wait()),
        )
        try:
            await asyncio.wait((bringing, unwanted), return_when=asyncio.FIRST_COMPLETED)
            if bringing.done():
                return bringing.result()
            raise FilesUnavailable("its files were not there yet")
        finally:
            for task in (bringing, unwanted):
                task.cancel()
            await asyncio.gather(bringing, unwanted, return_exceptions=True)

    def _of_node(self, order: w.StartResidentFrame) -> dict[str, str]:
        """What a resident has of the node agent's environment; of the node's site a worker alone is told."""
        if order.phase is not PhaseKind.ROLLOUT or order.script:
            return inherited()
        return inherited(*OF_SITE) | ({} if self._site is None else dict(self._site.variables))

    async def _hear(self, resident: _OwnResident) -> tuple[str, int | None]:
        """Receive messages until the resident's process has ended or is useless; returns why, and its exit status."""
        assert resident.process is not None
        waiting = asyncio.create_task(resident.process.wait())
        hearing = asyncio.create_task(self._listen(resident))
        looking = asyncio.create_task(self._look(resident, resident.process.pid))
        try:
            await asyncio.wait((waiting, hearing), return_when=asyncio.FIRST_COMPLETED)
            if not waiting.done() and not resident.order.script and not resident.hangs:
                # Its socket is closed: either it is ending right now, or it is of no use any more.
                await asyncio.wait((waiting,), timeout=0.5)
            if not waiting.done() and resident.order.script:
                await waiting
            status = waiting.result() if waiting.done() else None
        finally:
            for task in (waiting, hearing, looking):
                task.cancel()
        if status is None and resident.hangs:
            return resident.silent, None
        if status is None:
            return f"it does not speak with its node agent any more: {resident.silent}", None
        output = self._ticket.directory / resident.order.log
        where = "" if status < 0 else f"; its output is in {output}{self._on_machine}"
        how = "sees other devices than its node has" if status == w.UNFIT_STATUS else how_ended(status)
        return f"it {how}{where}", status

    async def _listen(self, resident: _OwnResident) -> None:
        link = resident.link
        if link is None:
            await asyncio.Event().wait()
            return
        try:
            while True:
                message = await link.receive()
                if isinstance(message, w.Warm) and not resident.began:
                    resident.began = True
                    if resident.limits.stall_s:
                        link.beat(w.StillHere(), resident.limits.stall_s / w.BEATS)
                with self._isolated.attempt(f"message of {resident.order.job}"):
                    self._heed(ResidentSaid(resident.order.job, message))
        except ConnectionLost as loss:
            resident.silent = resident.silent or str(loss)

    async def _look(self, resident: _OwnResident, pid: int) -> None:
        """Cut a resident off that is up and hangs."""
        link, (stall_s, still_s) = resident.link, resident.limits
        if link is None or not resident.limits.beat_s:
            return
        silence, stillness, heard_s = Silence(stall_s), Stillness(still_s), link.heard_s
        while link.open:
            await asyncio.sleep(resident.limits.beat_s / 2)
            now_s, for_s, what = _now_s(), 0.0, "said nothing"
            if not resident.began:  # It may take long to start, and says nothing meanwhile.
                silence = Silence(stall_s, now_s, now_s)
                continue
            if stall_s:
                for_s = silence.hangs(link.heard_s, now_s)
            if link.heard_s != heard_s:
                heard_s = link.heard_s
                stillness.spoke(now_s)
            elif still_s and not for_s:
                for_s, what = stillness.hangs(used_ticks(pid), partial(is_due, pid), now_s), f"{what} and done nothing"
            if for_s:
                resident.hangs = True
                resident.silent = f"it hangs: for {for_s:.1f} s it has {what}"
                link.abort()

    async def _measure(self, every_s: float) -> None:
        while True:
            await asyncio.sleep(every_s)
            for job, resident in list(self._residents.items()):
                with self._isolated.attempt(f"memory of {job}"):
                    found = await asyncio.to_thread(lambda resident=resident: self._memory(resident.recorded.living()))
                    if found and self._residents.get(job) is resident:
                        self._say(w.HostMemory(job, found))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def held_bytes(pids: Iterable[int]) -> int:
    """Return the memory that these processes use; for pages that they share with others, their part."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    total += int(line.split()[1]) * 1024
    return total


def _appended(path: Path) -> BinaryIO:
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.open("ab")


def _now_s() -> float:
    return asyncio.get_running_loop().time()
