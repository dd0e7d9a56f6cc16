"""`elastic pool`: a pool's start and its supervisor, how it stands, its end."""

import asyncio
import contextlib
import os
import select
import subprocess
import sys
import time
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar

import msgspec
import typer
from rich.console import Group
from rich.live import Live
from rich.text import Text

from elastic.cli.options import AsJson, JobCommandIdOption, PoolsDirectory, given_name, group
from elastic.cli.output import EXIT_BAD_INPUT, EXIT_FAILED, EXIT_INTERRUPTED, console, duration, emit, program, say
from elastic.cli.tables import FittedListing, listing
from elastic.cli.ticket_files import check_output, hand_out
from elastic.cli.upkeep import Standby, keep_up
from elastic.compose.pool_config import POOL_CONFIG, PoolConfig, check_interfaces, load_pool, pool_devices, save_pool
from elastic.compose.runs import CLAIM, claimant, claimed, is_claimed, private
from elastic.config import ConfigError, given_path
from elastic.core.cluster.types import DeviceAccount, JobState, PhaseKind
from elastic.pool.control_messages import OtherPoolVersion, PoolControl, PoolStatusReply
from elastic.pool.machines import read_node_ticket
from elastic.pool.status import JobStatus, NodeStatus
from elastic.protocol.run_control import CommandRefused, ControlError, RunNotFound, RunSilent, new_command_id
from elastic.protocol.tickets import TicketRefused
from elastic.system.supervision import start_detached

T = TypeVar("T")

POLL_S = 0.1
TICKET_VARIABLE = "ELASTIC_TICKET"
SETTLED_S = 5.0
"""A pool's process that has lived so long did not die of how it began: the next one gets ready, and begins at once.
All jobs wait for it."""
SUPERVISOR = "supervisor.lock"
"""The file that the supervisor of a pool's process holds."""
JOURNAL = "journal.sqlite"
BAD_INPUT = ("invalid", "unknown_job", "unknown_node", "conflict", "rejected", "version")
"""What a pool refuses because of how it was asked."""


pool = group(
    "pool",
    "Start and look after a pool: GPUs that many jobs share, phase by phase (docs/jobs.md).\n\n"
    "Example: elastic pool start examples/pool.toml",
)
GIVEN_UP_S = 20.0
"""How long a pool that did not come up in time is waited for to end."""
PoolName = Annotated[
    str,
    typer.Argument(
        metavar="POOL",
        help="A pool's name, directory or POOL.toml; else the only one there is.",
        callback=given_name,
    ),
]


@pool.command("start")
@private()
def start_pool(
    config: Annotated[Path, typer.Argument(metavar="POOL.toml", help="The pool's file.", show_default=False)],
    foreground: Annotated[
        bool, typer.Option("--foreground", help="Stay here: the pool stops with this command, by Ctrl-C or SIGTERM.")
    ] = False,
    max_restarts: Annotated[
        int, typer.Option(min=0, help="How often the pool's process is restarted within its first minute.")
    ] = 10,
    wait_s: Annotated[float, typer.Option(min=0.1, help="How long to wait until it is up.")] = 60.0,
    as_json: AsJson = False,
) -> int:
    """Start a pool: its process, started again whenever it dies, and a node agent on each node. Jobs and the pool
    outlive the terminal.

    Example: elastic pool start examples/pool.toml
    """
    wanted = load_pool(config)
    directory = wanted.path
    if is_claimed(directory):
        raise ConfigError(f"pool {wanted.pool.name} in {directory} is running already; {program()} pool status")
    prepared_pool(config)
    if foreground:
        say(f"pool {wanted.pool.name} in {directory}; Ctrl-C stops it")
        return supervise_pool(directory, max_restarts)
    command = [sys.executable, "-m", "elastic.cli", "pool-run", str(directory), "--supervise", str(max_restarts)]
    log = directory / "logs" / "supervisor.log"
    with log.open("ab") as output:
        supervisor = start_detached(command, os.environ, output)
    reply = _up(directory, supervisor, wait_s)
    if reply is None:
        if supervisor.poll() is None:
            processes = _LastProcesses(directory)
            supervisor.terminate()
            ended = processes.await_end(time.monotonic() + GIVEN_UP_S)
            goes_on = f"it was told to end, and process {supervisor.pid} goes on"
            what = "it is given up" if ended else f"{goes_on}; {program()} pool stop {directory} --now"
            say(f"error: pool {wanted.pool.name} is not up after {wait_s:g} s; {what}")
        else:
            say(f"error: pool {wanted.pool.name} could not be started")
        _show_end_of(log)
        say(f"hint: logs are in {directory / 'logs'}")
        return EXIT_BAD_INPUT if supervisor.poll() == EXIT_BAD_INPUT else EXIT_FAILED
    if as_json:
        emit({"pool": wanted.pool.name, "directory": str(directory), "pid": reply.pid, "supervisor": supervisor.pid})
    spec, joins = wanted.spec(), wanted.joins
    most = "up to " if joins or wanted.markets else ""
    rollout, train = (sum(kind.nodes for kind in kinds) for kinds in (spec.rollout, spec.train))
    say(
        f"pool {wanted.pool.name} is up: {most}{rollout} rollout and {train} training nodes, in {directory}; "
        f"{program()} jobs submit CONFIG brings it work, {program()} pool stop ends it"
    )
    for name, ray in wanted.clusters.items():
        say(f"its nodes {name} are asked of the Ray cluster at {ray.address}; {program()} pool status")
    for kind in spec.rollout:
        if kind.gpus > 1:
            say(
                f"one worker has all {kind.gpus} GPUs of a node {kind.name}, and a tail keeps or leaves them together; "
                "where a worker takes one GPU, a node of one is enough"
            )
    for kind in wanted.pool.train:
        if kind.trains_across:
            name = kind.node_kind(PhaseKind.TRAIN).name
            reached = (
                f"network interface {kind.interface}" if kind.interface else "network by which they reach the pool"
            )
            say(
                f"warning: a trainer's ranks on several of the nodes {name} open ports to each other (gloo, NCCL) that "
                f"let in whoever reaches them: the {reached} must be private"
            )
    if by_ticket := [name for name in joins if name not in wanted.clusters]:
        say(f"{program()} pool ticket lets other machines join as its nodes: {', '.join(by_ticket)}")
    return 0


@pool.command("status")
def pool_status(
    name: PoolName = "",
    watch: Annotated[bool, typer.Option("--watch", help="Show it again and again, until Ctrl-C.")] = False,
    every_s: Annotated[float, typer.Option(min=0.1, help="With --watch.")] = 1.0,
    as_json: AsJson = False,
    directory: PoolsDirectory = Path("pools"),
) -> int:
    """Show a pool's nodes, groups and jobs: who computes where, who waits for what, what it costs.

    With --watch and --json one object a line.

    Example: elastic pool status --watch
    """
    path = find_pool(name, directory)
    control = PoolControl(path)
    reply = asked(control.status())
    if not watch:
        _show(reply, path, as_json=as_json)
        return 0
    try:
        if as_json:
            while True:
                _show(reply, path, as_json=True)
                time.sleep(every_s)
                reply = _again(control, reply)
        with Live(pool_tables(reply, path), console=console(), auto_refresh=False) as live:
            while True:
                time.sleep(every_s)
                reply = _again(control, reply)
                live.update(pool_tables(reply, path), refresh=True)
    except KeyboardInterrupt:
        return 0


@pool.command("stop")
def stop_pool(
    name: PoolName = "",
    now: Annotated[bool, typer.Option("--now", help="End everything at once, without checkpoints.")] = False,
    wait_s: Annotated[float, typer.Option(min=0, help="How long to wait until it has ended.")] = 600.0,
    command_id: JobCommandIdOption = "",
    as_json: AsJson = False,
    directory: PoolsDirectory = Path("pools"),
) -> int:
    """Stop a pool: its jobs stop at their step's end and keep their checkpoints; then everything of it ends.

    Example: elastic pool stop
    """
    path = find_pool(name, directory)
    command_id = command_id or new_command_id()
    processes = _LastProcesses(path)
    answer = asked(PoolControl(path).stop(now=now, command=command_id), command_id)
    if wait_s and not now:
        say(f"pool {path.name} stops: its jobs come to their step's end")
    ended = processes.await_end(time.monotonic() + wait_s)
    if as_json:
        emit({"pool": path.name, "command": "stop", "id": answer.id, "repeated": answer.repeated, "ended": ended})
    if ended:
        say(f"pool {path.name} has ended; {program()} pool start POOL.toml goes on with it")
    elif wait_s:
        say(f"error: pool {path.name} has not ended within {wait_s:g} s; it goes on stopping")
        return EXIT_FAILED
    return 0


@pool.command("put-back")
def put_back_device(
    device: Annotated[
        str,
        typer.Argument(
            metavar="DEVICE",
            help="As `elastic pool status` names it, such as cuda:1; or a drained node of Ray's.",
        ),
    ],
    name: PoolName = "",
    command_id: JobCommandIdOption = "",
    as_json: AsJson = False,
    directory: PoolsDirectory = Path("pools"),
) -> int:
    """Let a pool's nodes have a device again that was set aside because residents died there as they started, or have
    the pool ask its Ray cluster again for a node that was drained.

    Example: elastic pool put-back cuda:1
    """
    path = find_pool(name, directory)
    command_id = command_id or new_command_id()
    answer = asked(PoolControl(path).put_back(device, command_id), command_id)
    if as_json:
        emit({"pool": path.name, "command": "put-back", "id": answer.id, "repeated": answer.repeated})
    say(f"{device} is the pool's again{' (as it was told before)' if answer.repeated else ''}")
    return 0


@pool.command("ticket")
@private()
def mint_node_ticket(
    name: PoolName = "",
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write the ticket here; else it is printed.")
    ] = None,
    kind: Annotated[
        str, typer.Option(metavar="NAME", help="Which nodes of POOL.toml it becomes one of, if several kinds join.")
    ] = "",
    nodes: Annotated[
        int, typer.Option(min=1, help="As how many nodes the machine joins, each with devices of its own.")
    ] = 1,
    label: Annotated[str, typer.Option(help="Whose machine it is for.")] = "",
    minutes: Annotated[float, typer.Option(min=0.1, max=10_080, help="Until when it must be used.")] = 60.0,
    command_id: JobCommandIdOption = "",
    as_json: AsJson = False,
    directory: PoolsDirectory = Path("pools"),
) -> int:
    """Mint a ticket with which one machine joins a pool as a node, or as several. It is shown once.

    Example: elastic pool ticket -o machine.ticket --nodes 8 --label "the lab's eight GPUs"
    """
    path = find_pool(name, directory)
    check_output(output)
    command_id = command_id or new_command_id()
    ticket = asked(PoolControl(path).ticket(label, minutes * 60, command_id, kind, nodes), command_id)
    names = [one.node for one in ticket.nodes]
    told = {"pool": path.name, "node": ticket.node, "nodes": names, "id": command_id}
    hand_out(ticket, output, told if as_json else None)
    whose = f"node{'s' if nodes > 1 else ''} {', '.join(names)}"
    say(f"the ticket for {whose} is good for one machine within {minutes:g} min; it is not shown again")
    say(f"there: elastic pool join --ticket-file {output or 'FILE'}")
    if not ticket.fingerprint:
        say(f"only this machine can dial {ticket.join}; others could with pool.host and pool.advertise")
    return 0


@pool.command("join")
@private()
def join_pool(
    join: Annotated[
        str, typer.Argument(metavar="[HOST:PORT]", help="Where to dial, if elsewhere than the ticket says.")
    ] = "",
    ticket_file: Annotated[
        Path | None,
        typer.Option("--ticket-file", metavar="FILE", help="Of `elastic pool ticket`; else ELASTIC_TICKET holds one."),
    ] = None,
    devices: Annotated[
        str, typer.Option(metavar="NAMES", help="Which of this machine, such as cuda:2,cuda:3; else the first.")
    ] = "",
    nodes: Annotated[Path, typer.Option("--directory", help="Where this machine's nodes keep their files.")] = Path(
        "nodes"
    ),
    site: Annotated[
        str,
        typer.Option(
            metavar="NAME", help="This machine's site, if the pool does not say. A site shares copies of weights."
        ),
    ] = "",
    files_gb: Annotated[
        float, typer.Option(min=0.001, max=1e6, help="What files of jobs may take of the disk; the oldest make room.")
    ] = 200.0,
) -> int:
    """Be a pool's node on another machine, or its nodes, until the pool lets them go, or Ctrl-C.

    With the same ticket and directory they come back, also once the machine has started anew.

    Example: elastic pool join --ticket-file machine.ticket
    """
    from elastic.compose.joined_node import run_joined_nodes

    where = str(ticket_file or TICKET_VARIABLE)
    try:
        content = ticket_file.read_bytes() if ticket_file else os.environ.pop(TICKET_VARIABLE, "").encode()
        if not content:
            raise ConfigError(f"elastic pool join: give --ticket-file FILE, or {TICKET_VARIABLE} with a ticket")
        ticket = read_node_ticket(content)
    except OSError as error:
        raise ConfigError(f"elastic pool join: --ticket-file {where}: cannot be read ({error.strerror})") from error
    except TicketRefused as error:
        raise ConfigError(f"elastic pool join: {where}: {error}") from error
    named = [one.strip() for one in devices.split(",") if one.strip()]
    return run_joined_nodes(ticket, join, named, nodes, site, files_gb)


@pool.command("drain")
def drain_node(
    node: Annotated[str, typer.Argument(metavar="NODE", help="As `elastic pool status` names it, such as rollout-2.")],
    name: PoolName = "",
    wait_s: Annotated[float, typer.Option(min=0, help="How long to wait until it has gone.")] = 600.0,
    command_id: JobCommandIdOption = "",
    as_json: AsJson = False,
    directory: PoolsDirectory = Path("pools"),
) -> int:
    """Let a node of another machine go: its jobs go on elsewhere from their step's end. A ticket that nobody has used
    is void. A node of a Ray cluster is given back to it, and not asked for again until `elastic pool put-back NODE`.

    Example: elastic pool drain rollout-2
    """
    path, control = (found := find_pool(name, directory)), PoolControl(found)
    command_id = command_id or new_command_id()
    answer = asked(control.drain(node, command_id), command_id)
    deadline, reply = time.monotonic() + wait_s, asked(control.status())
    while there := any(one.name == node for one in reply.status.nodes):
        if time.monotonic() > deadline:
            break
        time.sleep(POLL_S)
        reply = _again(control, reply)
    if as_json:
        emit({"pool": path.name, "command": "drain", "id": answer.id, "repeated": answer.repeated, "gone": not there})
    if not there:
        say(f"node {node} is no node of pool {path.name} any more")
    elif wait_s:
        say(f"error: node {node} has not gone within {wait_s:g} s; it goes once its jobs are at their step's end")
        return EXIT_FAILED
    return 0


class _LastProcesses:
    """The process of a pool and its supervisor, which end after all that they have started, held from now on."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._held: dict[str, int] = {}
        self._hold()

    def await_end(self, deadline_s: float) -> bool:
        """Wait until both have ended; returns whether they have. `deadline_s` is as of `time.monotonic`."""
        while True:
            claims = self._hold()
            ended, _, _ = select.select([*self._held.values()], (), (), POLL_S)
            for claim in [claim for claim, descriptor in self._held.items() if descriptor in ended]:
                os.close(self._held.pop(claim))
            if not self._held and not claims:
                return True
            if time.monotonic() > deadline_s:
                return False

    def _hold(self) -> Sequence[str]:
        """Hold those that have come, too; returns the claims that there are."""
        claims = [claim for claim in (CLAIM, SUPERVISOR) if is_claimed(self._directory, claim)]
        for claim in claims:
            if claim not in self._held and (descriptor := claimant(self._directory, claim)) is not None:
                self._held[claim] = descriptor
        return claims


def find_pool(name: str, directory: Path) -> Path:
    """The directory of the pool with this name, path or POOL.toml; of the only one, or only one that runs, without a
    name. Raises `ConfigError`.
    """
    if name:
        if (given := given_path(name)).is_file():
            path = load_pool(given).path
            if (path / POOL_CONFIG).is_file():
                return path
            raise ConfigError(f"no pool of {name} has been started; {program()} pool start {name}")
        for candidate in (directory / name, given):
            if (candidate / POOL_CONFIG).is_file():
                return candidate
    there = sorted(path.parent for path in directory.glob(f"*/{POOL_CONFIG}"))
    if not name:
        running = [path for path in there if is_claimed(path)]
        if len(there) == 1 or len(running) == 1:
            return (running or there)[0]
    named = ", ".join(path.name for path in there) or "none"
    if name:
        raise ConfigError(f"no pool {name!r} in {directory}; there are: {named}")
    if not there:
        raise ConfigError(f"no pool in {directory}; {program()} pool start POOL.toml starts one")
    raise ConfigError(f"several pools are in {directory}; name one of: {named}")


def asked(question: Coroutine[Any, Any, T], command_id: str = "") -> T:
    """What the pool answers. Ends the program with a message where it does not, or says no."""
    try:
        return asyncio.run(question)
    except ControlError as error:
        refused(error, command_id)


def refused(error: ControlError, command_id: str = "") -> NoReturn:
    """End the program because the pool did not do what it was asked."""
    say(f"error: {error}")
    if isinstance(error, RunNotFound):
        say(f"hint: {program()} pool start POOL.toml starts a pool, or goes on with one")
    if isinstance(error, RunSilent) and command_id:
        say(f"hint: it may have been done; repeat it with --id {command_id}, and it is done once")
    of_input = isinstance(error, (RunNotFound, OtherPoolVersion)) or (
        isinstance(error, CommandRefused) and error.kind in BAD_INPUT
    )
    raise SystemExit(EXIT_BAD_INPUT if of_input else EXIT_FAILED) from error


def prepared_pool(path: Path) -> Path:
    """The directory of the pool with this POOL.toml, with its configuration in it. Raises `ConfigError`."""
    config = load_pool(path)
    _check_former(config, path)
    pool_devices(config)
    check_interfaces(config)
    directory = save_pool(config)
    (directory / "logs").mkdir(mode=0o700, exist_ok=True)
    return directory.resolve()


def _check_former(config: PoolConfig, path: Path) -> None:
    """A pool that goes on has the nodes, prices and limits that its journal begins with. Raises `ConfigError`."""
    directory = config.path
    if not (directory / JOURNAL).exists() or not (directory / POOL_CONFIG).exists():
        return
    former = load_pool(directory / POOL_CONFIG)
    for what, was, now in (
        ("pool.rollout and pool.train", former.spec(), config.spec()),
        ("pool.rollout.kind", [one.kind for one in former.pool.rollout], [one.kind for one in config.pool.rollout]),
        ("pool.train.kind", [one.kind for one in former.pool.train], [one.kind for one in config.pool.train]),
        ("pool.policy, placement, tail, drift and charging", former.policy_names, config.policy_names),
        ("limits", former.wait_limits(), config.wait_limits()),
    ):
        if was != now:
            raise ConfigError(
                f"{path}: {what}: pool {directory} was begun with others, and goes on with those; allowed: as in "
                f"{directory / POOL_CONFIG}, or a pool of another name"
            )


def _up(directory: Path, supervisor: "subprocess.Popen[bytes]", wait_s: float) -> PoolStatusReply | None:
    """How the pool stands once it answers; None where its supervisor has ended or time is up."""
    control, deadline = PoolControl(directory, timeout_s=wait_s), time.monotonic() + wait_s
    while time.monotonic() < deadline and supervisor.poll() is None:
        try:
            return asyncio.run(control.status())
        except (RunNotFound, RunSilent):
            time.sleep(POLL_S)
    return None


def _show_end_of(log: Path) -> None:
    from elastic.report.log_files import LogFollower

    follower = LogFollower("supervisor", lambda: log.open("rb"))
    follower.seek("", 5)
    for one in follower.read():
        say(one.line)


def supervise_pool(directory: Path, restarts_max: int) -> int:
    """Keep the pool's process up until it has been stopped; returns the exit code of its last process."""
    command = [sys.executable, "-m", "elastic.cli", "pool-run", str(directory)]
    ends = (0, EXIT_BAD_INPUT, EXIT_INTERRUPTED)
    what = "the pool's process"
    with claimed(directory, SUPERVISOR), contextlib.closing(Standby("--standby")) as standby:
        return keep_up(
            command,
            lambda status: status not in ends,
            restarts_max,
            what,
            settled_s=SETTLED_S,
            forgives=True,
            start=standby.start,
            settles=lambda: standby.prepare(command),
        )


def _again(control: PoolControl, last: PoolStatusReply) -> PoolStatusReply:
    """How the pool stands now; as last, while its process is away and may come back."""
    try:
        return asyncio.run(control.status())
    except (RunNotFound, RunSilent):
        return last


def _show(reply: PoolStatusReply, path: Path, *, as_json: bool) -> None:
    if as_json:
        status = msgspec.to_builtins(reply.status)
        emit({"pool": reply.pool, "directory": str(path), "pid": reply.pid, **status})
    else:
        console().print(pool_tables(reply, path), crop=False)


def pool_tables(reply: PoolStatusReply, path: Path) -> Group:
    """Return tables of a pool: which job computes where, and what each job waits for."""
    status = reply.status
    head = Text(
        f"pool {reply.pool} in {path}, up {duration(status.now_s)}: ${status.usd:.4f} so far, "
        f"${status.usd_unbilled:.4f} of it for idle nodes, which no job pays; "
        f"${status.usd_per_hour:.2f} an hour for its groups"
    )
    columns = ("node", "site", "$/GPU-hour", "devices", "group", "account", "job", "busy", "idle", "down")
    nodes = FittedListing(
        columns, map(_node_row, status.nodes), spare=("devices", "$/GPU-hour", "site", "down", "group", "busy", "idle")
    )
    groups = [
        (
            group.name,
            f"{group.cycle_s:.1f} s",
            f"{group.limit_s:.1f} s",
            f"{group.usd_per_hour:.2f}",
            ", ".join(group.members),
        )
        for group in status.groups
    ]
    parts: list[Any] = [head, nodes]
    if groups:
        parts += [Text(), listing(("group", "cycle", "bears", "$/h", "members, in their order"), groups)]
    parts += [
        Text(f"{device} is set aside: {reason}; {program()} pool put-back {device}")
        for device, reason in status.set_aside.items()
    ]
    going_on = [job for job in status.jobs if not job.over]
    parts += [Text(f"{node} is asked for: {words}") for node, words in status.asked_for.items()]
    parts += [Text(), jobs_table(going_on) if going_on else Text("no job goes on")]
    if status.jobs_left_out:
        parts.append(Text(f"{status.jobs_left_out} more wait: {program()} jobs list"))
    if status.jobs_over:
        parts.append(Text(f"{status.jobs_over} over: {program()} jobs list --all"))
    return Group(*parts)


def _node_row(node: NodeStatus) -> Sequence[str]:
    slice_s, switching_s, idle_s, down_s = (node.accounts_s.get(account, 0.0) for account in DeviceAccount)
    whole_s = sum(node.accounts_s.values()) or 1.0
    parts = (slice_s + switching_s, idle_s, down_s)
    where = ", ".join(node.devices) or "all"
    if node.machine is not None:
        where = f"{where} ({node.machine.device} of {node.machine.host})"
    account = "draining" if node.draining else node.account
    site = node.site or (node.machine.site if node.machine is not None else "") or "–"
    names = (node.name, site, f"{node.usd_per_gpu_hour:.2f}", where, node.group or "–", account, node.job or "–")
    return (*names, *(f"{part / whole_s:.0%}" for part in parts))


def jobs_table(rows: Sequence[JobStatus]) -> FittedListing:
    columns = ("job", "state", "group", "now", "steps", "SLO", "planned", "$")
    return FittedListing(columns, map(_job_row, rows), spare=("SLO", "planned", "group", "$", "state"))


def _job_row(job: JobStatus) -> Sequence[str]:
    return (
        job.name,
        job.state,
        job.group or "–",
        doing(job),
        f"{job.steps_done}/{job.steps}",
        f"{job.slo:.2f}",
        f"{job.planned_slowdown:.2f} ×" if job.planned_slowdown else "–",
        f"{job.usd:.4f}",
    )


def doing(job: JobStatus) -> str:
    """What a job does now, or what it waits for."""
    if job.permit is not None:
        return "has its turn"
    if job.asked is not None:
        return f"waits for {job.asked}"
    if job.queue_place is not None:
        return f"number {job.queue_place} in the queue: {job.reason}"
    return "between phases" if job.state is JobState.RUNNING else job.reason
