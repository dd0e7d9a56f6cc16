"""The pool's shell: turns what happens into events, gives them to the cluster, makes those that it takes durable, and
carries out the results through ports.

- The shell never assumes that something was carried out. After every event it compares residents, devices and processes
  with the cluster's state, so that a pool's process that is killed after any event can go on.
- Node agents ensure that no job has a device under an older permit.
- Everything here is synchronous, reads no clock and does no I/O. Worlds on virtual time drive it unchanged.
- Node agents, residents, slices, the workers in them, jobs' processes and their profiles have a room each. The shell
  hears what happens, and calls the rooms in order.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType

from elastic.core.cluster import Cluster
from elastic.core.cluster import commands as c
from elastic.core.cluster import events as e
from elastic.core.cluster.history import ClusterEntry, encode
from elastic.core.cluster.types import BeyondQuota, JobId, KindName, Nanoseconds, NodeId, PhaseKind, PhasePlan
from elastic.pool import messages as w
from elastic.pool.devices import DeviceAllotment
from elastic.pool.holdings import HOLDING, NS_PER_S, PoolHoldings, PoolNode, PoolRoom, nanoseconds
from elastic.pool.job_lives import JobLives
from elastic.pool.job_profiles import JobProfiles
from elastic.pool.machines import JoinRules
from elastic.pool.node_agents import NodeAgents, NodeMarket
from elastic.pool.ports import DoneCommand, ForgottenJob, JobEnding, JobEntry, PoolPorts, PoolTimes
from elastic.pool.residents import NodeResidents
from elastic.pool.scripts import PoolScripts
from elastic.pool.slice_workers import SliceWorkers
from elastic.pool.slices import PoolSlices
from elastic.system.devices import DeviceName

_TRAIN = PhaseKind.TRAIN
OVER_KEPT = 100
"""Jobs that are over and stay in the cluster's state; older ones are in the journal alone."""


class PoolShell(PoolRoom):
    """The shell of one pool. Call `begin` first. `after` is called with the cluster after every event.

    Nodes of the kinds in `markets` come and go with the instances there, those of the kinds in `joins` with machines
    that join by those rules. Each node on this machine has its own of the `devices`.
    """

    def __init__(
        self,
        cluster: Cluster,
        ports: PoolPorts,
        times: PoolTimes,
        entries: Iterable[JobEntry] = (),
        after: Callable[[e.ClusterEvent], None] = lambda event: None,
        markets: Mapping[KindName, NodeMarket] = MappingProxyType({}),
        over_kept: int = OVER_KEPT,
        devices: DeviceAllotment | None = None,
        joins: Mapping[KindName, JoinRules] = MappingProxyType({}),
    ) -> None:
        pool = PoolHoldings(cluster, ports, times, entries, devices or DeviceAllotment())
        super().__init__(pool)
        self.events = 0
        self._after = after
        self._at_work = False
        self._over_kept = over_kept
        self._at_rest: set[JobId] = set()
        """Jobs that are over, without a process, and were compared since."""
        self._workers = SliceWorkers(pool)
        self._scripts = PoolScripts(pool)
        self._slices = PoolSlices(pool, self._workers, self._scripts)
        self._profiles = JobProfiles(pool)
        self._lives = JobLives(pool, self._workers, self._slices, self._scripts)
        self._residents = NodeResidents(pool, self._workers, self._slices, self._lives, self._scripts)
        rooms = self._workers, self._slices, self._residents, self._scripts
        self._node_agents = NodeAgents(pool, *rooms, markets, joins)
        self._due: Mapping[str, Callable[[str], object]] = {
            "node_agent": self._node_agents.unheard,
            "new node agent": self._node_agents.start_anew,
            "market": self._node_agents.market_changed,
            "instance": self._node_agents.instance_taken,
            "up": lambda key: self._residents.overdue(*key.split("/", 1)),
            "warm": self._slices.overdue,
            "returned": self._slices.overdue,
            "script": self._scripts.overdue,
        }

    def begin(
        self,
        node_agents: Mapping[NodeId, bool],
        jobs: Mapping[JobId, tuple[int, int]],
        *,
        anew: bool,
        devices: Mapping[NodeId, Sequence[DeviceName]] = MappingProxyType({}),
        elsewhere: Collection[NodeId] = (),
    ) -> None:
        """Take over what exists: `node_agents` by node (True if alive, False if gone), the `devices` of living ones,
        and jobs' processes with their placement and number of restarts. Node agents `elsewhere` have joined before,
        and may dial.

        With `anew` nothing was left running on purpose, and every node gets a node agent under its old name.
        """
        if not anew:
            away_s = (self._ports.now_ns() - self._cluster.now_ns) / NS_PER_S
            self._ports.died(
                "", "", f"the pool's process died; another one went on {away_s:.1f} s after the last event"
            )
        for name in (*self._cluster.state.nodes, *node_agents):
            self._node_agents.count(name)
        for job, (placement, restarts) in jobs.items():
            self._pool.jobs[job].process, self._pool.jobs[job].restarts = placement, restarts
        self._scripts.presume({**node_agents, **dict.fromkeys(elsewhere, True)})
        for name, lives in node_agents.items():
            if lives and name in self._cluster.state.nodes:
                self._pool.devices.adopt(name, devices.get(name, ()))
            elif lives:
                self._ports.end_node_agent(name)
        for name, node in list(self._cluster.state.nodes.items()):
            self._nodes[name] = PoolNode(phase=node.phase)
            if self._node_agents.by_itself(node.kind):
                if name in elsewhere:
                    self._node_agents.expect(name, self._times.silence_ns)
                else:
                    self._node_agents.lose(name, "", renewed=False)
            elif node_agents.get(name):
                self._node_agents.expect(name, self._times.silence_ns)
            elif anew or name not in node_agents:
                self._node_agents.start_again(name)
            else:
                # Nodes that are missing are counted below.
                died = "its node agent died while the pool's process was away; another node takes its place"
                self._node_agents.lose(name, died, renewed=False)
        self._node_agents.take_instances()
        self._node_agents.fill()
        self._slices.begin()
        self._drain()

    def stop(self, *, now: bool = False) -> None:
        """Stop jobs at their step's end, or at once; then node agents. `over` tells when all have ended."""
        self._pool.stopping = True
        for job, live in self._pool.jobs.items():
            if live.process is not None:
                self._lives.stop(job, "the pool stops", now=now)
        self._profiles.end_all()
        self._drain()

    @property
    def over(self) -> bool:
        """Whether a stopped pool has nothing left but its node agents."""
        return self._pool.stopping and all(live.process is None for live in self._pool.jobs.values())

    @property
    def cluster(self) -> Cluster:
        return self._cluster

    @property
    def entries(self) -> Mapping[JobId, JobEntry]:
        return self._entries

    @property
    def nodes(self) -> Mapping[NodeId, PoolNode]:
        return self._nodes

    @property
    def devices(self) -> DeviceAllotment:
        return self._pool.devices

    @property
    def stopping(self) -> bool:
        return self._pool.stopping

    def last_of(self, job: JobId) -> ForgottenJob:
        """Return all that is known of a job of the cluster."""
        return ForgottenJob(
            entry=self._entries.get(job),
            record=self._cluster.jobs[job],
            restarts=self._pool.jobs[job].restarts,
            host_bytes=self._residents.host_bytes(job),
        )

    def _carry_out(self, command: c.ClusterCommand) -> None:
        """Do what a comparison with the cluster's state does not show."""
        match command:
            case c.StartJob(job=job):
                self._lives.placed(job)
                self._residents.placed(job)
            case c.GrantPermit(permit=permit):
                self._slices.granted(permit.number)
            case c.RecallPermit(permit=permit) | c.MoveTail(permit=permit):
                self._slices.tell(permit)
            case c.KillResident(job=job, node=node, reason=reason):
                self._residents.end(job, node, reason)
            case c.ReleaseNode(node=node):
                self._node_agents.released(node)
            case _:
                pass

    def now_ns(self) -> Nanoseconds:
        return self._ports.now_ns()

    def next_wakeup_ns(self) -> Nanoseconds | None:
        """When to call `pass_time` if nothing else happens before."""
        times = [at for at in (self._cluster.next_wakeup_ns(), self._timers.next_ns()) if at is not None]
        return min(times, default=None)

    def pass_time(self) -> None:
        self._sleep_through()
        now_ns = self._ports.now_ns()
        for what, key in self._timers.pop_due(now_ns):
            with self._ports.attempting(f"{what} {key}") as attempt:
                if what in self._due:  # Others only end a wait, after which things are compared.
                    self._due[what](key)
            if attempt.fault:
                self._timers.set(what, key, now_ns, self._times.retry_max_ns)
        wakeup_ns = self._cluster.next_wakeup_ns()
        if wakeup_ns is not None and wakeup_ns <= now_ns:
            self._pool.feed(e.TimePassed())
        self._drain()

    def submit(
        self,
        request: e.JobRequest,
        entry: JobEntry,
        command: DoneCommand | None = None,
        quota: BeyondQuota | None = None,
    ) -> None:
        self._pool.feed(e.JobSubmitted(request=request, quota=quota), entry, command)
        self._drain()

    def set_quota(self, job: JobId, quota: BeyondQuota | None, command: DoneCommand | None = None) -> None:
        """Say that a job which is queued beyond its quota is within it now, or beyond it for another reason."""
        self._pool.feed(e.QuotaChanged(job=job, quota=quota), None, command)
        self._drain()

    def cancel(self, job: JobId, command: DoneCommand | None = None) -> None:
        self._pool.feed(e.CancelRequested(job=job), None, command)
        self._drain()

    def resubmit(
        self,
        job: JobId,
        command: DoneCommand | None = None,
        forgotten: ForgottenJob | None = None,
        quota: BeyondQuota | None = None,
    ) -> None:
        """Have a failed job go on. `forgotten` is what the journal has of it if it has left the cluster."""
        entry = None if forgotten is None else forgotten.entry
        event = e.ResubmitRequested(job=job, quota=quota)
        if forgotten is not None:
            event = e.ResubmitRequested.of_forgotten(forgotten.record, quota)
        self._pool.feed(event, entry, command)
        self._drain()

    def put_back(self, device: DeviceName) -> bool:
        """Let nodes have a device again that was set aside; returns whether it was."""
        found = self._node_agents.put_back(device)
        self._drain()
        return found

    def drain(self, name: NodeId, command: DoneCommand | None = None) -> None:
        """Have a node's jobs go on elsewhere from their step's end, and let the node go."""
        self._pool.feed(e.NodeDrained(node=name), None, command)
        self._drain()

    def held_by_other(self, hello: w.NodeAgentHello) -> str:
        """Return which other node agent is connected as this node, or an empty string."""
        return self._node_agents.held_by_other(hello)

    def refuses_machine(self, hello: w.NodeAgentHello) -> str:
        """Return why a node agent on another machine would not be taken in, or an empty string."""
        return self._node_agents.refuses_machine(hello)

    def node_agent_joined(self, hello: w.NodeAgentHello) -> str:
        """Take in a node agent and what it reports to hold; returns why it is refused, or an empty string."""
        refused = self._node_agents.joined(hello)
        if not refused:
            self._drain()
        return refused

    def node_agent_left(self, name: NodeId) -> None:
        """Note that the node agent's connection is gone. It may come back."""
        self._node_agents.left(name)
        self._drain()

    def node_agent_gone(self, name: NodeId) -> None:
        """Note that the node agent's process has ended."""
        self._node_agents.gone(name, "died")
        self._drain()

    def requested_node_lost(self, name: NodeId, how: str) -> None:
        """Note that a node which was asked of a cluster is gone there, joined or not."""
        self._node_agents.requested_lost(name, how)
        self._drain()

    def node_agent_heard(self, name: NodeId, message: w.FromNodeAgent) -> None:
        node = self._nodes.get(name)
        if node is None:
            return
        match message:
            case w.ResidentUp(job=job, placement=placement):
                self._residents.came_up(name, job, placement)
            case w.RanksAwaited():
                self._residents.awaits_ranks(name, message)
            case w.ResidentGone(job=job, cause=cause):
                resident = node.residents.get(job)
                if resident is not None and resident.placement == message.placement:
                    del node.residents[job]
                    self._residents.gone(name, job, resident, cause, message.code, message.fault)
                    self._node_agents.check_residents(name)
            case w.DeviceFreed(job=job):
                self._residents.freed(name, node.residents.get(job), message)
            case w.WorkerLeft():
                self._workers.left(name, message)
            case w.HostMemory(job=job, host_bytes=host_bytes):
                self._residents.measured(name, job, host_bytes)
            case w.NodeNotice(reason=reason):
                self._node_agents.noticed(name, reason)
            case w.SiteServed():
                self._node_agents.site_served(name, message)
            case _:
                pass
        self._drain()

    def job_joined(self, hello: w.JobHello) -> w.JobWelcome | w.RefusedFrame:
        """Take in a job with the token of its placement; returns its welcome. `settle` is called next."""
        return self._lives.welcome(hello)

    def settle(self) -> None:
        """Send what follows from a peer's welcome."""
        self._drain()

    def job_left(self, job: JobId) -> None:
        """Note that the job's connection is gone. It may come back."""
        live = self._pool.jobs.get(job)
        if live is not None:
            live.connected = False

    def job_heard(self, job: JobId, message: w.FromJob) -> None:
        record = self._cluster.jobs.get(job)
        if record is None or record.state not in HOLDING:
            return
        match message:
            case w.AskPhase(both=both):
                self._slices.want(job, _TRAIN if both else message.phase, both=both)
            case w.WithdrawPhase(both=both):
                self._slices.withdraw(job, _TRAIN if both else message.phase)
            case w.OfferWorker(ticket=ticket):
                self._workers.offer(job, ticket)
            case w.EndWorker(worker=worker, ends=ends):
                node = self._workers.end(job, worker)
                if ends and node is not None:
                    self._residents.end(job, node, ends)
            case w.StartTrainer(ticket=ticket):
                self._workers.start_trainer(job, ticket)
            case w.YieldPhase(permit=number):
                permit = self._cluster.permits.get(number)
                if permit is not None and permit.job == job:
                    self._scripts.keep(job, ())
                    self._slices.end(permit, message.finished, nanoseconds(message.switch_s))
            case w.TailLeft(permit=number):
                permit = self._cluster.permits.get(number)
                if permit is not None and permit.job == job:
                    self._scripts.keep(job, permit.tail_nodes)
                    self._slices.leave_for_tail(permit)
            case w.PhaseProgress():
                self._slices.progressed(job, message)
            case w.StepsDone(steps=steps):
                if steps > record.steps_done:
                    self._pool.jobs[job].restarts = 0  # They are counted from the last progress.
                    self._pool.feed(e.JobProgressed(job=job, steps_done=steps))
            case _:
                pass
        self._drain()

    def job_ended(self, job: JobId, placement: int, ending: JobEnding) -> None:
        """Note that the job's process of this placement has ended."""
        self._lives.ended(job, placement, ending)
        self._drain()

    def entry_of(self, job: JobId, placement: int) -> JobEntry | None:
        """Return what is kept of a job whose present start, or last one, this is."""
        record = self._cluster.jobs.get(job)
        return self._entries.get(job) if record is not None and record.placement == placement else None

    def phase_of(self, node: NodeId) -> PhaseKind | None:
        return self._nodes[node].phase if node in self._nodes else None

    def returns(self, job: JobId, *, goes_on: bool) -> None:
        """Note whether a checkpoint of the job's trainer is on its way: in its turn the trainer waits for it."""
        self._slices.returns(job, goes_on=goes_on)
        self._drain()

    def job_unfit(self, job: JobId, placement: int, cause: str) -> None:
        """Note that a start of a job can come to nothing, wherever."""
        record = self._cluster.jobs.get(job)
        if record is not None and record.placement == placement and record.state in HOLDING:
            self._pool.feed(e.JobFailed(job=job, cause=cause, placement=placement))
            self._drain()

    def profiled(self, job: JobId, plan: PhasePlan) -> None:
        self._profiles.profiled(job, plan)
        self._drain()

    def not_profiled(self, job: JobId, cause: str) -> None:
        self._profiles.not_profiled(job, cause)
        self._drain()

    def _sleep_through(self) -> None:
        """Put off what is waited for by the time in which nobody could be heard. The market's times are its own."""
        if slept_ns := self._ports.slept_ns():
            self._timers.put_off(slept_ns, ("market", "instance"))
            self._pool.news.appendleft((e.PoolSuspended(for_ns=slept_ns), None, None))

    def _drain(self) -> None:
        """Give all pending events to the cluster, and bring the world to the new state.

        An event that the cluster cannot take has no effect and is not in the journal; what was unexpected is raised.
        """
        if self._at_work:
            return
        self._at_work = True
        try:
            self._sleep_through()
            while True:
                while self._pool.news:
                    event, entry, command = self._pool.news.popleft()
                    now_ns = self._ports.now_ns()
                    leaving = event.jobs if isinstance(event, e.JobsForgotten) else ()
                    forgotten = [self.last_of(job) for job in leaving]
                    commands = self._take(event, now_ns)
                    self._ports.append(encode(ClusterEntry(now_ns, event)), entry, command, forgotten)
                    if entry is not None:
                        self._entries[entry.job] = entry
                    for job in leaving:
                        self._pool.forget(job)
                        self._at_rest.discard(job)
                    self.events += 1
                    self._after(event)
                    for order in commands:
                        self._carry_out(order)
                self._compare()
                if not self._pool.news:
                    self._forget()
                if not self._pool.news:
                    break
        finally:
            self._at_work = False
        self._ports.settled()

    def _take(self, event: e.ClusterEvent, now_ns: Nanoseconds) -> list[c.ClusterCommand]:
        """Give one event to the cluster, which is as it was before if it raises."""
        cluster = self._cluster
        try:
            return cluster.handle(event, now_ns)
        except Exception:
            before = self._ports.replayed(cluster.policies)
            cluster.take_over(before.state, before.waits)
            raise

    def _forget(self) -> None:
        """Have the oldest jobs that are over leave the cluster, so that no event costs more for those that there
        were."""
        over = self._cluster.state.over
        if len(over) <= 1.2 * self._over_kept:
            return
        leaving = [job for job in over if self._pool.jobs[job].process is None][: len(over) - self._over_kept]
        if leaving:
            self._pool.feed(e.JobsForgotten(jobs=tuple(leaving)))

    def _compare(self) -> None:
        """Bring the world to the cluster's state."""
        over = self._cluster.state.over
        for job in list(self._cluster.jobs):
            if job not in self._at_rest or job not in over:
                self._attempt(job, partial(self._compare_job, job))
        for name, node in self._nodes.items():
            if node.connected:
                self._attempt(name, partial(self._residents.compare, name, node))
        for permit in self._cluster.permits.values():
            self._attempt(f"permit {permit.number}", partial(self._slices.give_devices, permit))

    def _compare_job(self, job: JobId) -> None:
        self._slices.compare(job)
        self._profiles.compare(job)
        self._lives.compare(job)
        self._slices.ask(job)
        if job in self._cluster.state.over and self._pool.jobs[job].process is None:
            self._at_rest.add(job)
        else:
            self._at_rest.discard(job)

    def _attempt(self, item: str, work: Callable[[], None]) -> None:
        """Work on a job, node or permit. After an unexpected exception it is looked at again in a while."""
        if self._timers.waiting("again", item):
            return
        with self._ports.attempting(item) as attempt:
            work()
        if attempt.fault:
            self._pool.wait("again", item, self._times.retry_max_ns)
