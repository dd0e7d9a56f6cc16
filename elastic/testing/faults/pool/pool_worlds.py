"""Worlds of faults for a pool's shell on virtual time: the production shell and the real cluster, with modelled
node agents, residents and jobs.

Messages travel in order on a connection and are lost with it. Connections break; node agents, residents, jobs and the
pool's own process die at any point: that one also right before and after an event became durable, and in the middle of
what follows from it. Phases hang, residents do not park, everything may be said twice. In some worlds rollout nodes are
spot instances, which come and go by a recorded trace; in some people let nodes go. Some jobs are scripts, which compute
in their own process, and some train with the nodes of both pools. In some worlds jobs are adrift: a script gets a
permit while it is away, takes it up as it comes back, and hangs until it is killed. In some worlds there is a job that
code fails at in a way that nobody expects: the policy as it places the job, or what starts its residents. After every
event all invariants of the cluster are checked, and at every device that one job has it, under a permit that is newer
than all before.
"""

import contextlib
import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from random import Random

import msgspec

import traces
from elastic.core.cluster import Cluster, ClusterPolicies, JobRequest, NodeKind, PhasePlan, PoolSpec, WaitLimits
from elastic.core.cluster import events as e
from elastic.core.cluster.cluster import NO_ROOM
from elastic.core.cluster.history import ClusterOpening, cluster_digest, encode, replay, restore, save
from elastic.core.cluster.invariants import check
from elastic.core.cluster.policy import PlacementChoice, PlacementPolicy, PoolView
from elastic.core.cluster.state import JobRecord
from elastic.core.cluster.types import BeyondQuota, JobId, JobState, Nanoseconds, NodeId, PhaseKind
from elastic.pool import messages as w
from elastic.pool.devices import DeviceAllotment
from elastic.pool.ports import DoneCommand, ForgottenJob, JobEnding, JobEntry, PoolTimes
from elastic.pool.shell import PoolShell
from elastic.simulation.loop import EventLoop
from elastic.system.devices import DeviceName
from elastic.system.isolation import ItemAttempt
from elastic.system.plain_values import told
from elastic.testing.faults.kinds import FaultKind
from elastic.testing.faults.outcome import Lived, WorldFailed
from elastic.testing.faults.pool.pool_processes import JobDraw, ModelJob, ModelNodeAgent
from policies.clusters import CLUSTER_POLICIES
from providers.markets import SpotMarket, SpotSettings
from traces.spot import read_spot_trace

S = 1_000_000_000
_ROLLOUT, _TRAIN = PhaseKind.ROLLOUT, PhaseKind.TRAIN
KEEP_SLOS = "ours", "ours_without_moves", "weave", "solo"
LOOP_MAX = 400_000
TAILS_SHARE = 1 / 12
STRIKES = (
    FaultKind.KILL_RESIDENT,
    FaultKind.KILL_RESIDENT,
    FaultKind.KILL_NODE_AGENT,
    FaultKind.KILL_ORCHESTRATOR,
    FaultKind.CUT_POOL,
    FaultKind.CUT_POOL,
    FaultKind.KILL_POOL,
    FaultKind.HOLD_RESIDENT,
    FaultKind.HOLD_NODE_AGENT,
    FaultKind.MEMORY,
    FaultKind.CANCEL,
)
NEVER_NS = 2**62
BRIEFLY_NS = 300 * S
"""A job that cannot be started for so long can be, and is, within the time that it has to start."""
BRIEF_SHARE = 1 / 4
"""Share of worlds with scripts of which one cannot be started for a moment."""
ADRIFT_SHARE = 1 / 8
"""Share of worlds in which all jobs are adrift, and scripts where they can be."""
QUOTAS_SHARE = 0.2
"""Worlds in which jobs wait for a quota."""
DRAINS_SHARE = 1 / 4
"""Share of worlds in which people let rollout nodes go, several times."""
KINDS_SHARE = 0.25
"""Share of worlds without a market whose nodes are of several kinds, if there are enough."""
WIDE_SHARE = 0.5
"""Share of worlds with several kinds of rollout nodes in which one has fewer GPUs, and some workers take more."""
RANKS_SHARE = 0.25
"""Share of worlds with two training nodes or more in which trainers have ranks on several."""
PROGRESS_NS = 3 * 3600 * S
"""Once faults have ended, some job finishes a step, or ends, at least so often."""


class Unexpected(Exception):
    """What code raises for a poisoned job."""


class _PoolDies(BaseException):
    """The pool's process is killed here: nothing that would have followed does."""


class PoolFaults(msgspec.Struct, frozen=True, kw_only=True):
    """How likely faults are: `inject` after an event, `dies` at each thing that the pool's process does, and `repeats`
    of each message. No fault begins after `until_ns`."""

    inject: float = 0.03
    dies: float = 0.002
    repeats: float = 0.03
    until_ns: Nanoseconds = 3600 * S


FAULTS = PoolFaults(), PoolFaults(inject=0.1)
"""What worlds draw from: in half of them faults follow closely upon each other."""


class PoisonedPlacement:
    """A placement policy that fails at one job as long as `fails` says so."""

    def __init__(self, placement: PlacementPolicy, job: JobId, fails: Callable[[], bool]) -> None:
        self._placement, self._job, self._fails = placement, job, fails
        self.cycle = placement.cycle
        self.refusals, self.relocations = placement.refusals, placement.relocations

    def place(self, request: JobRequest, pool: PoolView) -> PlacementChoice | None:
        if request.id == self._job and self._fails():
            raise Unexpected(f"placing {request.id}")
        return self._placement.place(request, pool)


class PoolSetting(msgspec.Struct, frozen=True, kw_only=True):
    """A pool, its jobs, and what goes wrong. `spot`: its rollout nodes are instances of that market.

    Before faults end, placing `unplaceable` fails in a way that nobody expects, or starting residents of
    `unstartable` does, from the first attempt on for `unstartable_ns`. Jobs that are `adrift` often lose their
    connection as they ask for a phase, so that they are let in with its permit, and often hang in a phase.
    """

    seed: int
    policy: str
    spec: PoolSpec
    jobs: tuple[JobDraw, ...]
    faults: PoolFaults = PoolFaults()
    spot: SpotSettings | None = None
    unplaceable: JobId = ""
    unstartable: JobId = ""
    unstartable_ns: Nanoseconds = NEVER_NS
    adrift: bool = False


def draw_pool(seed: int, faults: PoolFaults | None = None) -> PoolSetting:
    """Draw a small pool, and its faults where they are not given. Every fourth one has a job that code fails at, every
    fifth one is of spot instances; in every eighth one jobs are adrift."""
    rng = Random(seed)
    if faults is None:
        faults = Random(f"{seed}/strikes").choice(FAULTS)
    kind = NodeKind(gpus=8, memory_bytes=rng.randrange(2, 5), nano_usd_per_hour=rng.randrange(1, 20) * 10**9)
    counts = {"rollout_nodes": rng.randrange(1, 5), "train_nodes": rng.randrange(1, 4)}
    spec = PoolSpec.uniform(rollout=kind, train=kind, **counts)
    jobs = tuple(_draw_job(rng, number, spec) for number in range(rng.randrange(1, 6)))
    if spec.train[0].nodes > 1 and (across := Random(f"{seed}/broad")).random() < RANKS_SHARE:
        ranks = [across.choice((1, kind.gpus + 1, 2 * kind.gpus)) for _ in jobs]
        jobs = tuple(_with_ranks(job, count) for job, count in zip(jobs, ranks, strict=True))
    planned, poisoned, spot = [job.request.id for job in jobs if job.request.plan is not None], ["", ""], None
    if faults.until_ns and planned and rng.random() < 0.25:
        poisoned[rng.randrange(2)] = rng.choice(planned)
    scripts, briefly = [job.request.id for job in jobs if job.script], Random(f"{seed}/briefly")
    brief = bool(faults.until_ns and scripts and briefly.random() < BRIEF_SHARE)
    if brief:
        poisoned[1] = briefly.choice(scripts)
    if faults.until_ns and rng.random() < 0.2:
        trace = rng.choice(("rlboost-a", "rlboost-b"))
        speed = read_spot_trace(traces.find(trace)).end_s * S / faults.until_ns  # All are there once faults end.
        played = {"trace": trace, "speed": speed, "max_workers": spec.rollout[0].nodes, "usd_per_gpu_hour": 1.0}
        played["notice_s"] = Random(f"{seed}/notice").choice((0.0, 120.0))
        spot = SpotSettings.model_validate(played)
    plan = PoolSetting(
        seed=seed,
        policy=rng.choice(sorted(CLUSTER_POLICIES)),
        spec=spec,
        jobs=jobs,
        faults=faults,
        spot=spot,
        unplaceable=poisoned[0],
        unstartable=poisoned[1],
        unstartable_ns=BRIEFLY_NS if brief else NEVER_NS,
    )
    if Random(f"{seed}/tails").random() < TAILS_SHARE:
        return with_tails(plan)
    if spot is None and Random(f"{seed}/kinds").random() < KINDS_SHARE:
        plan = _of_several_kinds(plan)
    return _adrift(plan) if faults.until_ns and Random(f"{seed}/adrift").random() < ADRIFT_SHARE else plan


def with_tails(plan: PoolSetting) -> PoolSetting:
    """Return a pool whose jobs roll out for long on the same two nodes, so that tails move."""
    long = PhasePlan(rollout_ns=300 * S, train_ns=40 * S)
    jobs = [
        msgspec.structs.replace(
            job,
            request=msgspec.structs.replace(job.request, plan=long, slo=3.0, rollout_nodes=2, train_nodes=1),
            profile=long,
        )
        for job in plan.jobs
    ]
    rollout = tuple(msgspec.structs.replace(kind, nodes=2) for kind in plan.spec.rollout)
    spec = msgspec.structs.replace(plan.spec, rollout=rollout)
    return msgspec.structs.replace(plan, jobs=tuple(jobs), spec=spec, policy="ours", spot=None)


def _with_ranks(job: JobDraw, ranks: int) -> JobDraw:
    return (
        job
        if job.script
        else msgspec.structs.replace(job, request=msgspec.structs.replace(job.request, train_gpus=ranks))
    )


def _of_several_kinds(plan: PoolSetting) -> PoolSetting:
    """Return the pool with its last node of each phase, where there are enough, at another site and twice the price."""

    def split(kinds: Sequence[NodeKind], least: int) -> tuple[NodeKind, ...]:
        (kind,) = kinds
        if kind.nodes < least:
            return (kind,)
        price = 2 * kind.nano_usd_per_hour
        far = msgspec.structs.replace(kind, name=f"far-{kind.name}", site="far", nodes=1, nano_usd_per_hour=price)
        return msgspec.structs.replace(kind, nodes=kind.nodes - 1), far

    spec = PoolSpec(rollout=split(plan.spec.rollout, 2), train=split(plan.spec.train, 3))
    plan = msgspec.structs.replace(plan, spec=spec)
    wide = Random(f"{plan.seed}/wide")
    if len(spec.rollout) < 2 or wide.random() >= WIDE_SHARE:
        return plan
    near, far = spec.rollout
    narrow = msgspec.structs.replace(far, gpus=1, nano_usd_per_hour=near.nano_usd_per_hour // 2)
    spec = PoolSpec(rollout=(near, narrow), train=spec.train)
    jobs = [
        msgspec.structs.replace(job, request=msgspec.structs.replace(job.request, rollout_gpus=wide.choice((1, 2))))
        for job in plan.jobs
    ]
    return msgspec.structs.replace(plan, spec=spec, jobs=tuple(jobs))


def _adrift(plan: PoolSetting) -> PoolSetting:
    """Return a pool whose jobs are adrift, and scripts where they can be: those that need no measurement."""
    jobs = [msgspec.structs.replace(job, script=job.request.plan is not None) for job in plan.jobs]
    return msgspec.structs.replace(plan, jobs=tuple(jobs), adrift=True)


def _draw_job(rng: Random, number: int, spec: PoolSpec) -> JobDraw:
    switch_ns = rng.choice((0, S))
    plan = PhasePlan(
        rollout_ns=rng.randrange(20 * S, 300 * S),
        train_ns=rng.randrange(20 * S, 300 * S),
        sync_ns=rng.choice((0, 5 * S)),
        rollout_switch_ns=switch_ns,
        train_switch_ns=switch_ns,
    )
    request = JobRequest(
        id=f"job-{number}",
        slo=rng.choice((1.05, 1.2, 1.5, 2.0, 3.0)),
        plan=None if rng.random() < 0.15 else plan,
        steps=rng.randrange(2, 10),
        rollout_nodes=rng.randrange(1, min(3, spec.rollout[0].nodes + 1)),
        train_nodes=min(rng.choice((1, 1, 1, 2)), spec.train[0].nodes),
        rollout_bytes=1,
        train_bytes=1,
        restart_ns=rng.choice((0, 30 * S)),
        max_resubmissions=rng.randrange(3),
    )
    return JobDraw(
        request=request,
        profile=plan,
        at_ns=rng.randrange(1800 * S),
        max_restarts=rng.randrange(4),
        script=request.plan is not None and rng.random() < 0.25,
        both=rng.random() < 0.25,
    )


class PoolWorld:
    """One world; it is the shell's ports, too. `run` lives through it. `watch` hears of every event. `policies` decide
    in place of those that the plan names."""

    def __init__(
        self,
        plan: PoolSetting,
        watch: Callable[[e.ClusterEvent], None] | None = None,
        policies: ClusterPolicies | None = None,
    ) -> None:
        self.plan, self.faults, self._watch = plan, plan.faults, watch
        self.rng = Random(f"{plan.seed}/faults")
        self.policies = policies or CLUSTER_POLICIES[plan.policy]
        if plan.unplaceable:
            placement = PoisonedPlacement(self.policies.placement, plan.unplaceable, lambda: self.faulty)
            self.policies = msgspec.structs.replace(self.policies, placement=placement)
        self.loop = EventLoop()
        self.limits = WaitLimits(queue_ns=100 * 3600 * S, start_ns=900 * S, stop_ns=120 * S)
        self.journal: list[bytes] = [encode(ClusterOpening(0, plan.spec, self.limits))]
        self.entries: dict[JobId, JobEntry] = {}
        self.forgotten: dict[JobId, JobRecord] = {}
        """Jobs that have left the cluster."""
        self.node_agents: dict[NodeId, ModelNodeAgent] = {}
        self._set_aside: dict[DeviceName, str] = {}
        self.jobs = {shape.request.id: ModelJob(self, shape) for shape in plan.jobs}
        self.ended: list[tuple[JobId, int, JobEnding]] = []
        """The ends of processes that no shell has heard of."""
        self.shell: PoolShell | None = None
        self.events = 0
        self.appended_ns = 0
        """When the journal's last event happened."""
        self.incarnations = 0
        self.faults_seen: Counter[FaultKind] = Counter()
        self.progress_ns = 0
        """When a job has last finished a step."""
        self.returned_ns = 0
        self.excused = 0
        """The last permit whose phase may have been disturbed."""
        self.cancelled: set[JobId] = set()
        self.starts_ns: dict[tuple[NodeId, JobId], Nanoseconds] = {}
        """How long the next start of a resident takes, where that is not drawn."""
        self._startable_ns: Nanoseconds = 0
        """From when on the job can be started that could not be."""
        self._state_before = ""
        self._times = PoolTimes(silence_ns=10 * S, park_ns=10 * S, node_agent_start_ns=60 * S)
        self._market: SpotMarket | None = None
        for job in self.jobs.values():
            self.loop.after(job.shape.at_ns, partial(self._submit, job.shape))
        quotas = Random(f"{plan.seed}/quotas")
        self._beyond = {job for job in self.jobs if quotas.random() < 0.5} if quotas.random() < QUOTAS_SHARE else set()
        """Jobs that come beyond their quota, and are within it later."""
        for job in sorted(self._beyond):
            self.loop.after(self.jobs[job].shape.at_ns + quotas.randrange(3600 * S), partial(self._let_in, job))
        self._drains = Random(f"{plan.seed}/drains")
        if plan.faults.until_ns and self._drains.random() < DRAINS_SHARE:
            for _ in range(3):
                self.loop.after(self._drains.randrange(plan.faults.until_ns), self._drain)
        self._begin(Cluster(plan.spec, self.policies, self.limits, 0))

    def _was_unstartable(self, record: JobRecord) -> bool:
        """Whether the job was placed for the last time while its residents could not be started."""
        placed_ns = max((chapter.at_ns for chapter in record.story if chapter.state is JobState.PLACED), default=0)
        long = self.plan.unstartable_ns > self.limits.start_ns
        return long and record.request.id == self.plan.unstartable and placed_ns < self.faults.until_ns

    def _submit(self, shape: JobDraw) -> None:
        """Submit a job, until it is taken. If the cluster cannot take it, that has left nothing behind."""
        shell, job, command = self.shell, shape.request.id, ("script",) if shape.script else ()
        if job in self.entries:
            return
        if shell is None:
            self.loop.after(5 * S, partial(self._submit, shape))
            return
        entry = JobEntry(job=job, directory="", max_restarts=shape.max_restarts, script=command)
        quota = BeyondQuota("a project", "it has enough") if job in self._beyond else None
        self._commanded(lambda shell: shell.submit(shape.request, entry, quota=quota))
        self.loop.after(60 * S, partial(self._submit, shape))

    def _commanded(self, act: Callable[[PoolShell], object]) -> None:
        """Have the shell do what somebody asks for, who is told if it is at a job that code fails at."""
        try:
            self.to_shell(act)
        except Unexpected:
            self.faults_seen[FaultKind.UNEXPECTED] += 1
            shell = self.shell
            if shell is not None and cluster_digest(shell.cluster) != cluster_digest(self.replayed(self.policies)):
                self.fail("an event that the cluster could not take has changed it")

    def _let_in(self, job: JobId) -> None:
        """Say that a job is within its quota, until the pool has noted that."""
        record = self.records().get(job)
        if record is None or record.quota is not None:
            self._commanded(lambda shell: shell.set_quota(job, None))
            self.loop.after(60 * S, partial(self._let_in, job))

    def _drain(self) -> None:
        nodes = [
            name for name, node_agent in self.node_agents.items() if node_agent.phase is _ROLLOUT and node_agent.alive
        ]
        if self.shell is not None and nodes:
            self.faults_seen[FaultKind.DRAIN_NODE] += 1
            name = self._drains.choice(nodes)
            self.to_shell(lambda shell: shell.drain(name))

    def cancel(self, job: JobId) -> None:
        self.cancelled.add(job)
        self.to_shell(lambda shell: shell.cancel(job))

    # The pool's process.

    def _begin(self, cluster: Cluster) -> None:
        self.incarnations += 1
        self.appended_ns = cluster.now_ns
        self.returned_ns = self.loop.now_ns
        self._market = None if self.plan.spot is None else SpotMarket("rollout", self.plan.spot)
        entries = [entry for job, entry in self.entries.items() if job not in self.forgotten]
        spec, living = cluster.spec, {name: one.devices for name, one in self.node_agents.items() if one.alive}
        needed = sum(kind.nodes * kind.gpus for kind in spec.kinds.values())
        devices = DeviceAllotment([f"cpu:{number}" for number in range(needed)], self._set_aside)
        over_kept = self.plan.seed % 3
        markets = {} if self._market is None else {"rollout": self._market}
        shell = PoolShell(cluster, self, self._times, entries, self._check, markets, over_kept, devices)
        self.shell = shell
        node_agents = {name: node_agent.alive for name, node_agent in self.node_agents.items()}
        jobs = {
            name: (job.placement, job.restarts) for name, job in self.jobs.items() if job.alive and not job.shape.script
        }
        ended, self.ended = self.ended, []
        for name, placement, _ in ended:
            jobs.setdefault(name, (placement, self.jobs[name].restarts))
        self.within(lambda: shell.begin(node_agents, jobs, anew=self.incarnations == 1, devices=living))
        for number, (name, placement, ending) in enumerate(ended):
            if self.shell is not shell:
                self.ended += ended[number:]
                return
            self.within(lambda one=(name, placement, ending): shell.job_ended(*one))

    def kill_pool(self) -> None:
        """SIGKILL: every connection is cut, nothing else happens until a new process replays the journal."""
        if self.shell is None:
            return
        self.faults_seen[FaultKind.KILL_POOL] += 1
        self.shell = None
        for peer in (*self.node_agents.values(), *self.jobs.values()):
            peer.cut()
        self.loop.after(self.rng.randrange(S, 20 * S), self._return)

    def _return(self) -> None:
        cluster = replay(self.journal, self.policies)
        again = cluster_digest(replay(self.journal, self.policies))
        if cluster_digest(cluster) != again:
            self.fail("two replays came to two states")
        if self._state_before and len(self.journal) == self._journal_then and again != self._state_before:
            self.fail("the process that came back is in another state")
        restored = restore(save(cluster), self.policies)
        if cluster_digest(restored) != again:
            self.fail("a snapshot leads to another state")
        self._begin(restored)

    def within(self, act: Callable[[], object]) -> object:
        """Have the shell do something, and die where it is killed."""
        shell = self.shell
        if shell is None:
            return None
        try:
            found = act()
        except _PoolDies:
            self.kill_pool()
            return None
        self._state_before, self._journal_then = cluster_digest(shell.cluster), len(self.journal)
        return found

    def to_shell(self, act: Callable[[PoolShell], object]) -> None:
        shell = self.shell
        if shell is not None:
            self.within(lambda: act(shell))
            self._check_nodes()

    def _check_nodes(self) -> None:
        """There is an instance for each rollout node, or was within its notice for one that is drained."""
        if self.shell is None or (spot := self.plan.spot) is None:
            return
        trace, now_s = (
            read_spot_trace(traces.find(spot.trace)),
            self.loop.now_ns / S - 1e-6,
        )  # It rounds to nanoseconds.
        there = trace.available(max(0.0, now_s * spot.speed))
        since_s = max(0.0, (now_s - spot.notice_s) * spot.speed)
        came = (event.instance for event in trace.events if since_s < event.time_s <= now_s * spot.speed)
        lately = {*trace.available(since_s), *came, *there}
        nodes = [node for node in self.shell.cluster.state.nodes.values() if node.phase is _ROLLOUT]
        staying = sum(not node.draining for node in nodes)
        if staying > len(there) or len(nodes) > len(lately):
            self.fail(
                f"{len(nodes)} rollout nodes, {staying} of them to stay, on {len(there)} of {len(lately)} instances"
            )

    def _acts(self) -> None:
        """The shell does something: what that follows from is in the journal."""
        if self.shell is not None and self.shell.cluster.now_ns > self.appended_ns:
            self.fail("something is done that follows from an event that is not in the journal yet")
        self._perhaps_die()

    def _perhaps_die(self) -> None:
        if self.faulty and self.rng.random() < self.faults.dies:
            raise _PoolDies

    def _check(self, event: e.ClusterEvent) -> None:
        assert self.shell is not None
        if self.faulty:
            self.excused = max((self.excused, *self.shell.cluster.permits))
        try:
            check(self.shell.cluster, slos=self.plan.policy in KEEP_SLOS)
        except AssertionError as error:
            self.fail(f"after {event}: {error}")
        if self._watch is not None:
            self._watch(event)

    def fail(self, what: str) -> None:
        other = "" if self.faults in FAULTS else f" (with {self.faults})"
        found = f"after {self.events} events at {self.loop.now_ns / S:.3f} s{other}: {what}"
        raise WorldFailed("pool-shell", self.plan.seed, found)

    def see_alone(self, job: JobId, nodes: tuple[NodeId, ...]) -> None:
        """Check that a job that begins to compute is alone on these nodes."""
        for node in nodes:
            node_agent = self.node_agents[node]
            there = [
                one.job for one in node_agent.residents.values() if one.permit and not one.script and node_agent.alive
            ]
            there += [other.request.id for other in self.jobs.values() if node in other.computes_on]
            if others := [one for one in there if one != job]:
                self.fail(f"{job} computes on {node} while {', '.join(others)} does")

    def seat_of(self, job: JobId) -> tuple[NodeId, ...]:
        """The nodes of both pools that the job has, as far as the pool's process is there."""
        seat = None if self.shell is None else self.shell.cluster.jobs[job].seat
        if self.shell is None or seat is None:
            return ()
        return (*seat.rollout, *self.shell.cluster.groups[seat.group].train)

    # The ports.

    def now_ns(self) -> Nanoseconds:
        return self.loop.now_ns

    def slept_ns(self) -> Nanoseconds:
        return 0

    def append(
        self,
        record: bytes,
        entry: JobEntry | None = None,
        command: DoneCommand | None = None,
        forgotten: Sequence[ForgottenJob] = (),
    ) -> None:
        self._perhaps_die()
        self.journal.append(record)
        self.events += 1
        self.appended_ns = self.loop.now_ns
        if entry is not None:
            self.entries[entry.job] = entry
            self.forgotten.pop(entry.job, None)
        for job in forgotten:
            self.forgotten[job.record.request.id] = job.record
        if self.faulty and self.rng.random() < self.faults.inject:
            self.soon(30 * S, self._inject)
        self._perhaps_die()

    def replayed(self, policies: ClusterPolicies) -> Cluster:
        return replay(self.journal, policies)

    def died(self, node: NodeId, job: JobId, what: str) -> None:
        pass

    def settled(self) -> None:
        pass

    def start_node_agent(self, node: NodeId, phase: PhaseKind, devices: Sequence[DeviceName]) -> None:
        self._acts()
        for other in self.node_agents.values():
            if other.alive and set(other.devices) & set(devices):
                self.fail(f"{node} gets a device that is {other.node}'s: {', '.join(devices)}")
        former = self.node_agents.get(node)
        if former is not None and former.alive:
            self.fail(f"a second node agent for {node}")
        node_agent = self.node_agents[node] = ModelNodeAgent(self, node, phase, devices)
        self.soon(5 * S, node_agent.dial)

    def note_set_aside(self, devices: Mapping[DeviceName, str]) -> None:
        self._set_aside = dict(devices)

    def end_node_agent(self, node: NodeId) -> None:
        if node in self.node_agents:
            self.node_agents[node].die()

    def send_to_node_agent(self, node: NodeId, message: w.ToNodeAgent) -> None:
        self._acts()
        node_agent = self.node_agents.get(node)
        if node_agent is not None and node_agent.wire is not None and node_agent.wire.open:
            node_agent.wire.carry(False, lambda: node_agent.hear(message))

    def send_to_job(self, job: JobId, message: w.ToJob) -> None:
        self._acts()
        one = self.jobs[job]
        if one.wire is not None and one.wire.open:
            one.wire.carry(False, lambda: one.hear(message))

    def cut_job(self, job: JobId) -> None:
        one = self.jobs[job]
        if one.wire is not None:
            one.wire.open, one.wire = False, None
            one.later(3 * S, one.dial)

    def resident(
        self,
        entry: JobEntry,
        placement: int,
        node: NodeId,
        phase: PhaseKind,
        ticket: w.WorkerTicketFrame | None,
        ranks: w.RankPlaces | None = None,
    ) -> w.StartResidentFrame:
        if entry.job == self.plan.unstartable and self.faulty:
            self._startable_ns = self._startable_ns or self.loop.now_ns + self.plan.unstartable_ns
            if self.loop.now_ns < self._startable_ns:
                self.faults_seen[FaultKind.UNEXPECTED] += 1
                raise Unexpected(f"starting {entry.job}")
        environment = {} if ticket is None else {"ELASTIC_WORKER": ticket.worker}
        script = bool(entry.script)
        return w.StartResidentFrame(entry.job, placement, phase, ("x",), environment, "", "", script, ranks=ranks)

    def start_job(self, entry: JobEntry, placement: int, restarts: int) -> None:
        self._acts()
        self.jobs[entry.job].start(placement, restarts)

    @contextlib.contextmanager
    def attempting(self, item: str) -> Iterator[ItemAttempt]:
        attempt = ItemAttempt()
        try:
            yield attempt
        except Unexpected as error:  # Anything else ends the world.
            attempt.fault = told(error)

    def stop_job(self, job: JobId, reason: str) -> None:
        one = self.jobs[job]
        one.later(self.rng.randrange(3 * S), one.stop)

    def kill_job(self, job: JobId) -> None:
        self._acts()
        one = self.jobs[job]
        placement = one.placement
        self.soon(S, lambda: one.die("died") if one.alive and one.placement == placement else None)

    def profile(self, entry: JobEntry) -> None:
        plan = self.jobs[entry.job].shape.profile
        self.loop.after(plan.solo_ns, lambda: self.to_shell(lambda shell: shell.profiled(entry.job, plan)))

    def end_profile(self, job: JobId) -> None:
        pass

    # Faults.

    @property
    def faulty(self) -> bool:
        return self.loop.now_ns < self.faults.until_ns

    @property
    def adrift(self) -> bool:
        return self.plan.adrift and self.faulty

    def soon(self, within_ns: Nanoseconds, act: Callable[[], object]) -> None:
        self.loop.after(self.rng.randrange(within_ns), act)

    def copies(self) -> int:
        return 2 if self.rng.random() < self.faults.repeats and self.faulty else 1

    def latency_ns(self) -> Nanoseconds:
        late = self.faulty and self.rng.random() < 0.02
        return self.rng.randrange(5 * S) if late else self.rng.randrange(S // 100)

    def job_over(self, job: JobId, placement: int, ending: JobEnding) -> None:
        shell = self.shell

        def tell() -> None:
            if shell is None or self.shell is not shell:
                self.ended.append((job, placement, ending))
            else:
                self.to_shell(lambda shell: shell.job_ended(job, placement, ending))

        self.loop.after(1, tell)

    def _inject(self) -> None:
        rng, kind = self.rng, self.rng.choice(STRIKES)
        node_agents = [node_agent for node_agent in self.node_agents.values() if node_agent.alive]
        jobs = [job for job in self.jobs.values() if job.alive]
        residents = [(node_agent, one) for node_agent in node_agents for one in node_agent.residents.values()]
        self.faults_seen[kind] += 1
        match kind:
            case FaultKind.KILL_POOL:
                self.kill_pool()
            case FaultKind.KILL_NODE_AGENT if node_agents:
                for node_agent in node_agents if rng.random() < 0.05 else [rng.choice(node_agents)]:
                    self.kill_node_agent(node_agent)
            case FaultKind.HOLD_NODE_AGENT if node_agents:
                node_agent = rng.choice(node_agents)
                node_agent.silent = True
                node_agent.cut()
            case FaultKind.CUT_POOL if node_agents or jobs:
                rng.choice([*node_agents, *jobs]).cut()
            case FaultKind.KILL_ORCHESTRATOR if jobs:
                rng.choice(jobs).die("died")
            case FaultKind.CANCEL if rng.random() < 0.1:
                self.cancel(rng.choice(list(self.jobs)))
            case FaultKind.KILL_RESIDENT | FaultKind.HOLD_RESIDENT | FaultKind.MEMORY if residents:
                node_agent, one = rng.choice(residents)
                if kind is FaultKind.KILL_RESIDENT:
                    node_agent.kill(one.job)
                elif kind is FaultKind.MEMORY:
                    node_agent.swell(one)
                else:
                    one.stuck = True
            case _:
                pass

    def kill_node_agent(self, node_agent: ModelNodeAgent) -> None:
        node_agent.die()
        self.soon(2 * S, lambda: self.to_shell(lambda shell: self._tell_gone(shell, node_agent)))

    def _tell_gone(self, shell: PoolShell, node_agent: ModelNodeAgent) -> None:
        if self.node_agents[node_agent.node] is node_agent:
            shell.node_agent_gone(node_agent.node)

    # The world's life.

    def run(self) -> Lived:
        """Until all jobs have ended. Raises `WorldFailed`."""
        try:
            self._live()
        except Unexpected as error:
            self.fail(f"what is wrong with one job ends the loop of all: {error}")
        self._check_result()
        history = hashlib.blake2b(b"".join(self.journal), digest_size=16).hexdigest()
        return Lived(events=self.events, faults=self.faults_seen.total(), history=history)

    def _live(self) -> None:
        for _ in range(LOOP_MAX):
            if self._is_over():
                break
            if self.loop.now_ns > max(self.progress_ns, self.faults.until_ns) + PROGRESS_NS:
                break
            shell = self.shell
            wakeup_ns = None if shell is None else shell.next_wakeup_ns()
            at_ns = self.loop.next_ns()
            if wakeup_ns is not None and (at_ns is None or wakeup_ns <= at_ns):
                self.loop.pass_to(wakeup_ns)
                self.to_shell(lambda shell: shell.pass_time())
            elif at_ns is not None:
                self.loop.step()
            else:
                break

    def _is_over(self) -> bool:
        shell = self.shell
        records = self.records()
        if shell is None or len(records) < len(self.jobs) or not all(record.over for record in records.values()):
            return False
        residents = any(node_agent.residents for node_agent in self.node_agents.values() if node_agent.alive)
        return not residents and not any(job.alive for job in self.jobs.values())

    def records(self) -> dict[JobId, JobRecord]:
        """What is known of every job, also of those that have left the cluster."""
        return {**self.forgotten, **({} if self.shell is None else self.shell.cluster.jobs)}

    def _check_result(self) -> None:
        shell = self.shell
        if shell is None or not self._is_over():
            cluster = None if shell is None else shell.cluster
            states = {job: record.state.value for job, record in self.records().items()}
            alive = [job.request.id for job in self.jobs.values() if job.alive]
            held = {
                name: list(node_agent.residents) for name, node_agent in self.node_agents.items() if node_agent.alive
            }
            waits = [] if cluster is None else [*cluster.waits][:5]
            self.fail(f"not over: {states}; processes {alive}, residents {held}, waits {waits}")
            return
        if shell.cluster.permits or shell.cluster.groups:
            self.fail("all jobs have ended, and not everything was given back")
        for job, record in self.records().items():
            if record.state is JobState.FINISHED and self.jobs[job].steps < record.request.steps:
                self.fail(f"{job} is finished after {self.jobs[job].steps} of its steps")
            excused = self.jobs[job].deaths or self._was_unstartable(record) or record.reason.startswith(NO_ROOM)
            if record.state is JobState.FAILED and not excused:
                self.fail(f"{job} has failed, and nothing has happened to it: {record.reason}")
            if record.state is JobState.CANCELLED and job not in self.cancelled:
                self.fail(f"{job} is cancelled, and nobody wanted that")
        if cluster_digest(replay(self.journal, self.policies)) != cluster_digest(shell.cluster):
            self.fail("the journal leads to another state")
