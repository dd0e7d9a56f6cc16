"""The pool's shell: turns what happens into events, makes them durable, gives them to the cluster, and carries out the
results through ports.

- The shell never assumes that something was carried out. After every event it compares residents, devices and processes
  with the cluster's state, so that a pool's process that is killed after any event can go on.
- A device is given under a permit's number, and taken back before the cluster hears that the permit was yielded.
  Keepers ensure that no job has a device under an older permit.
- A job has at most one permit. Its requests go to the cluster one phase at a time, training first.
- Everything here is synchronous, reads no clock and does no I/O. Worlds on virtual time drive it unchanged.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from elastic import pool_wire as w
from elastic.cluster import Cluster
from elastic.cluster import commands as c
from elastic.cluster import events as e
from elastic.cluster.history import ClusterEntry, encode
from elastic.cluster.state import JobRecord
from elastic.cluster.types import JobId, JobState, Nanoseconds, NodeId, Permit, PhaseKind, PhasePlan
from elastic.core.timers import Timers
from elastic.frames import SECONDS_MAX
from elastic.pool.holdings import LiveJob, PoolNode, Resident, Yielding
from elastic.pool.ports import DoneCommand, JobEnding, JobEntry, PoolPorts, PoolTimes

NS_PER_S = 1_000_000_000
HOLDING = (JobState.PLACED, JobState.RUNNING)
MEMORY_NEWS = 1.1
"""Growth of host memory that is reported to the cluster, besides growth beyond the declared size."""
PROGRESS_NEWS = 0.02
"""Share of a rollout's responses between two progress events."""
_ROLLOUT, _TRAIN = PhaseKind.ROLLOUT, PhaseKind.TRAIN


class PoolShell:
    """The shell of one pool. Call `begin` first. `after` is called with the cluster after every event."""

    def __init__(
        self,
        cluster: Cluster,
        ports: PoolPorts,
        times: PoolTimes,
        entries: Iterable[JobEntry] = (),
        after: Callable[[e.ClusterEvent], None] = lambda event: None,
    ) -> None:
        self.cluster = cluster
        self.entries: dict[JobId, JobEntry] = {entry.job: entry for entry in entries}
        self.nodes: dict[NodeId, PoolNode] = {}
        self.joining: dict[NodeId, PhaseKind] = {}
        """Nodes whose keepers were started, and that are not the cluster's yet."""
        self.jobs: dict[JobId, LiveJob] = {}
        self.stopping = False
        self.events = 0
        self._profiling: set[JobId] = set()
        self._ports, self._times, self._after = ports, times, after
        self._timers = Timers()
        self._queue: deque[tuple[e.ClusterEvent, JobEntry | None, DoneCommand | None]] = deque()
        self._at_work = False
        self._numbers = dict.fromkeys(PhaseKind, 0)
        self._keeper_deaths = dict.fromkeys(PhaseKind, 0)
        self._due: Mapping[str, Callable[[str], object]] = {
            "keeper": self._keeper_overdue,
            "new keeper": self._start_keeper_anew,
            "restart": lambda job: None,
            "resident": lambda key: None,
        }
        self._carriers: Mapping[type[c.ClusterCommand], Callable[[Any], object]] = {
            c.ProfileJob: lambda command: None,
            c.StartJob: self._job_placed,
            c.StopJob: lambda command: None,
            c.EndJob: lambda command: None,
            c.RejectJob: lambda command: None,
            c.GrantPermit: self._granted,
            c.RecallPermit: self._recalled,
            c.MoveTail: lambda command: self._tell_tail(command.job, command.permit, command.nodes),
            c.KillResident: lambda command: self._end_resident(command.job, command.node, command.reason),
            c.StartResident: lambda command: None,
        }

    # The beginning and the end.

    def begin(self, keepers: Mapping[NodeId, bool], jobs: Mapping[JobId, tuple[int, int]], *, anew: bool) -> None:
        """Take over what exists: `keepers` by node (True if alive, False if gone), and jobs' processes with their
        placement and number of restarts.

        With `anew` nothing was left running on purpose, and every node gets a keeper under its old name.
        """
        for name in (*self.cluster.state.nodes, *keepers):
            self._count(name)
        for job, (placement, restarts) in jobs.items():
            self._job(job).process, self._job(job).restarts = placement, restarts
        for name, node in list(self.cluster.state.nodes.items()):
            self.nodes[name] = PoolNode(phase=node.phase)
            if keepers.get(name):
                self._await_keeper(name, self._times.silence_ns)
            elif anew or name not in keepers:
                self._start_keeper(name, node.phase)
            else:
                self._lose(name)
        for name, lives in keepers.items():
            if lives and name not in self.cluster.state.nodes:
                self._ports.end_keeper(name)
        wanted = self.cluster.spec
        for phase, count in ((_ROLLOUT, wanted.rollout_nodes), (_TRAIN, wanted.train_nodes)):
            there = sum(node.phase is phase for node in self.nodes.values())
            there += sum(kind is phase for kind in self.joining.values())
            for _ in range(count - there):
                self._start_keeper_anew(phase.value)
        for job, record in self.cluster.jobs.items():
            if record.asked is not None and self._job(job).process is not None:
                self._job(job).wants.add(record.asked)  # It says so again, or yields what it gets.
        for permit in list(self.cluster.permits.values()):
            self._job(permit.job).known.add(permit.number)
            if self._job(permit.job).process is None:
                self._take_back(permit)
        self._drain()

    def stop(self, *, now: bool = False) -> None:
        """Stop jobs at their step's end, or at once; then keepers. `over` tells when all have ended."""
        self.stopping = True
        for job, live in self.jobs.items():
            if live.process is not None:
                self._stop_process(job, "the pool stops", now=now)
        for job in tuple(self._profiling):
            self._ports.end_profile(job)
            self._profiling.discard(job)
        self._drain()

    @property
    def over(self) -> bool:
        """Whether a stopped pool has nothing left but its keepers."""
        return self.stopping and all(live.process is None for live in self.jobs.values())

    # Time.

    def now_ns(self) -> Nanoseconds:
        return self._ports.now_ns()

    def next_wakeup_ns(self) -> Nanoseconds | None:
        """When to call `pass_time` if nothing else happens before."""
        times = [at for at in (self.cluster.next_wakeup_ns(), self._timers.next_ns()) if at is not None]
        return min(times, default=None)

    def pass_time(self) -> None:
        now_ns = self._ports.now_ns()
        for what, key in self._timers.pop_due(now_ns):
            self._due[what](key)
        wakeup_ns = self.cluster.next_wakeup_ns()
        if wakeup_ns is not None and wakeup_ns <= now_ns:
            self._feed(e.TimePassed())
        self._drain()

    # Commands of people.

    def submit(self, request: e.JobRequest, entry: JobEntry, command: DoneCommand | None = None) -> None:
        self.entries[entry.job] = entry
        self._feed(e.JobSubmitted(request=request), entry, command)
        self._drain()

    def cancel(self, job: JobId, command: DoneCommand | None = None) -> None:
        self._feed(e.CancelRequested(job=job), None, command)
        self._drain()

    def resubmit(self, job: JobId, command: DoneCommand | None = None) -> None:
        self._feed(e.ResubmitRequested(job=job), None, command)
        self._drain()

    # Keepers.

    def keeper_joined(self, hello: w.KeeperHello) -> str:
        """Take in a keeper and what it reports to hold; returns why it is refused, or an empty string."""
        name = hello.node
        if name in self.joining:
            self.nodes[name] = PoolNode(phase=self.joining.pop(name))
            self._keeper_deaths[self.nodes[name].phase] = 0
            self._feed(e.NodeJoined(node=name, phase=self.nodes[name].phase))
        node = self.nodes.get(name)
        if node is None:
            return "this node is not the pool's any more"
        self._timers.clear("keeper", name)
        node.connected, node.pid, node.given = True, hello.pid, hello.last_permit
        before, node.residents = node.residents, {}
        for state in hello.residents:
            former = before.pop(state.job, None)
            known = former is not None and former.placement == state.placement
            node.residents[state.job] = Resident(
                placement=state.placement,
                up=state.up,
                permit=state.permit,
                worker=state.worker,
                ending=known and former is not None and former.ending,
            )
            self._compare_worker(name, node, state)
        for job, former in before.items():
            self._resident_gone(name, job, former, "it ended while its keeper was not heard", None)
        for job, live in list(self.jobs.items()):
            for taking in (live.yielding, live.leaving):
                if taking is not None and name in taking.waiting:
                    resident = node.residents.get(job)
                    if resident is None or not resident.permit:
                        self._freed(name, job, taking.permit, 0)
                    else:
                        self._take_device(name, job, taking.permit)
        for job, resident in node.residents.items():
            if resident.ending:
                self._ports.tell_keeper(name, w.EndResident(job, "as it was told before"))
        self._drain()
        return ""

    def _compare_worker(self, name: NodeId, node: PoolNode, state: w.ResidentState) -> None:
        """End a slice that ended while the pool's process was away. Adopt a slice that this process does not know."""
        live = self._job(state.job)
        if node.phase is _TRAIN:
            if live.trainer is None and state.worker:
                live.trainer = w.WorkerTicketFrame("", state.worker, "", "")
            return
        lent = live.lent.get(name, "")
        if state.worker:
            live.lent[name] = state.worker
            live.tickets.pop(name, None)
            if name in live.returning:
                self._ports.tell_keeper(name, w.EndWorker(state.permit, state.job, state.worker))
        elif lent and name not in live.tickets:
            del live.lent[name]
            self._tell_parked(state.job, name, lent, 0.0, "it ended while its keeper was not heard")

    def keeper_left(self, name: NodeId) -> None:
        """Note that the keeper's connection is gone. It may come back."""
        node = self.nodes.get(name)
        if node is not None and node.connected:
            node.connected = False
            self._await_keeper(name, self._times.silence_ns)
            self._drain()

    def keeper_gone(self, name: NodeId) -> None:
        """Note that the keeper's process has ended."""
        if name in self.joining:
            self._failed_to_join(name)
        elif name in self.nodes:
            self._lose(name)
        self._drain()

    def keeper_heard(self, name: NodeId, message: w.FromKeeper) -> None:
        node = self.nodes.get(name)
        if node is None:
            return
        match message:
            case w.ResidentUp(job=job, placement=placement):
                resident = node.residents.get(job)
                if resident is not None and resident.placement == placement:
                    resident.up = True
            case w.ResidentGone(job=job, cause=cause):
                resident = node.residents.get(job)
                if resident is not None and resident.placement == message.placement:
                    del node.residents[job]
                    self._resident_gone(name, job, resident, cause, message.code)
            case w.DeviceFreed(permit=permit, job=job):
                resident = node.residents.get(job)
                if resident is not None and resident.permit == permit:
                    resident.permit = 0
                self._job(job).deaths.pop(name, None)
                self._freed(name, job, permit, _ns(message.resume_s + message.park_s))
            case w.WorkerLeft(job=job, worker=worker):
                live = self._job(job)
                if live.lent.get(name) == worker and name not in live.tickets:
                    del live.lent[name]
                    self._tell_parked(job, name, worker, message.switch_s, message.cause, message.permit)
            case w.HostMemory(job=job, host_bytes=host_bytes):
                self._measured(name, job, host_bytes)
            case _:
                pass
        self._drain()

    # Jobs.

    def job_joined(self, hello: w.JobHello) -> w.JobWelcome | w.PoolRefused:
        """Take in a job with the token of its placement; returns its welcome. `settle` is called next."""
        job, record = hello.job, self.cluster.jobs.get(hello.job)
        if record is None or record.placement != hello.placement or record.state not in HOLDING or record.seat is None:
            return w.PoolRefused("the pool has no such start of this job any more", retry=False)
        train = self.cluster.groups[record.seat.group].train
        away = [node for node in (*record.seat.rollout, *train) if not self._is_connected(node)]
        if away:
            return w.PoolRefused(f"keepers are not there yet: {', '.join(away)}", retry=True)
        live = self._job(job)
        live.connected = True
        permits = [
            permit
            for permit in self.cluster.permits.values()
            if permit.job == job and (live.yielding is None or live.yielding.permit != permit.number)
        ]
        live.known.update(permit.number for permit in permits)
        for permit in permits:
            live.wants.discard(permit.phase)
        spec, notice_ns = self.cluster.spec, self.cluster.limits.notice_ns
        return w.JobWelcome(
            rollout_nodes=record.seat.rollout,
            train_nodes=train,
            rollout_usd_per_gpu_hour=spec.rollout.nano_usd_per_hour / spec.rollout.gpus / 1e9,
            train_usd_per_gpu_hour=spec.train.nano_usd_per_hour / spec.train.gpus / 1e9,
            gpus_per_rollout_node=spec.rollout.gpus,
            gpus_per_train_node=spec.train.gpus,
            grant_within_s=min(SECONDS_MAX, (3 * record.request.limit_ns + 20 * notice_ns) / NS_PER_S),
            permits=tuple(
                w.HeldPermit(
                    permit.number, job, permit.phase, permit.nodes, self._ends_s(permit.deadline_ns), permit.recalled
                )
                for permit in permits
            ),
            trainer=live.trainer.worker if live.trainer is not None else "",
            slices=dict(live.lent),
            silence_s=self._times.silence_ns / NS_PER_S,
        )

    def settle(self) -> None:
        """Send what follows from a peer's welcome."""
        for permit in self.cluster.permits.values():
            if permit.tail_nodes and permit.nodes != permit.tail_nodes:
                self._tell_tail(permit.job, permit.number, permit.tail_nodes)
        self._drain()

    def job_left(self, job: JobId) -> None:
        """Note that the job's connection is gone. It may come back."""
        self._job(job).connected = False

    def job_heard(self, job: JobId, message: w.FromJob) -> None:
        record, live = self.cluster.jobs.get(job), self._job(job)
        if record is None or record.state not in HOLDING:
            return
        match message:
            case w.AskPhase(phase=phase):
                if live.yielding is not None or not self._holds(job, phase):
                    live.wants.add(phase)
            case w.WithdrawPhase(phase=phase):
                live.wants.discard(phase)
            case w.LendSlice():
                self._lend(job, message)
            case w.ReturnSlice(permit=permit, node=node):
                if message.ends:
                    self._end_resident(job, node, message.ends)
                else:
                    self._return(job, permit, node)
            case w.StartTrainer(ticket=ticket):
                live.trainer = ticket
            case w.EndTrainer(worker=worker):
                self._end_trainer(job, worker)
            case w.YieldPhase(permit=number):
                permit = self.cluster.permits.get(number)
                if permit is not None and permit.job == job:
                    self._yield(permit, message.finished, _ns(message.switch_s))
            case w.TailLeft(permit=number):
                permit = self.cluster.permits.get(number)
                if permit is not None and permit.job == job:
                    self._leave_for_tail(permit)
            case w.PhaseProgress():
                self._progressed(job, message)
            case w.StepsDone(steps=steps):
                if steps > record.steps_done:
                    self._feed(e.JobProgressed(job=job, steps_done=steps))
            case _:
                pass
        self._drain()

    def job_ended(self, job: JobId, placement: int, ending: JobEnding) -> None:
        """Note that the job's process of this placement has ended."""
        live, record = self._job(job), self.cluster.jobs.get(job)
        if live.process != placement:
            return
        killed = live.told_kill
        live.process, live.connected, live.told_stop, live.told_kill = None, False, False, False
        live.wants.clear()
        self._ports.cut_job(job)
        if record is not None and record.placement == placement and record.state in HOLDING:
            self._judge(job, record, live, ending, killed=killed)
        self._drain()

    def _judge(self, job: JobId, record: JobRecord, live: LiveJob, ending: JobEnding, *, killed: bool) -> None:
        if ending.how == "finished":
            if record.state is JobState.PLACED:
                self._feed(e.JobStarted(job=job, placement=record.placement))
            self._feed(e.JobFinished(job=job))
        elif self.stopping:
            pass  # Its checkpoint is where it goes on once the pool does.
        elif record.stopping:
            self._feed(e.JobStopped(job=job, steps_done=record.steps_done))
        elif ending.how == "stopped":
            self._feed(e.CancelRequested(job=job))
        elif ending.how == "failed":
            self._feed(e.JobFailed(job=job, cause=ending.cause, placement=record.placement))
        elif live.restarts >= self.entries[job].max_restarts and not killed:
            cause = f"{ending.cause}; it had been started again {live.restarts} times"
            self._feed(e.JobFailed(job=job, cause=cause if live.restarts else ending.cause, placement=record.placement))
        else:
            delay_ns = min(self._times.retry_base_ns * 2**live.restarts, self._times.retry_max_ns)
            live.restarts += 1
            self._timers.set("restart", job, self._ports.now_ns(), delay_ns)
            if record.permit is not None:
                self._take_back(self.cluster.permits[record.permit])

    def profiled(self, job: JobId, plan: PhasePlan) -> None:
        self._profiling.discard(job)
        self._feed(e.JobProfiled(job=job, plan=plan))
        self._drain()

    def not_profiled(self, job: JobId, cause: str) -> None:
        self._profiling.discard(job)
        record = self.cluster.jobs.get(job)
        if record is not None and record.state is JobState.PROFILING and not self.stopping:
            self._feed(e.JobFailed(job=job, cause=cause))
        self._drain()

    # Events, and what follows from them.

    def _feed(self, event: e.ClusterEvent, entry: JobEntry | None = None, command: DoneCommand | None = None) -> None:
        self._queue.append((event, entry, command))

    def _drain(self) -> None:
        """Give all pending events to the cluster, and bring the world to the new state."""
        if self._at_work:
            return
        self._at_work = True
        try:
            while True:
                while self._queue:
                    event, entry, command = self._queue.popleft()
                    now_ns = self._ports.now_ns()
                    self._ports.append(encode(ClusterEntry(now_ns, event)), entry, command)
                    commands = self.cluster.handle(event, now_ns)
                    self.events += 1
                    self._after(event)
                    for order in commands:
                        self._carriers[type(order)](order)
                self._compare()
                if not self._queue:
                    break
        finally:
            self._at_work = False
        self._ports.settled()

    def _compare(self) -> None:
        """Bring the world to the cluster's state."""
        for job in list(self.cluster.jobs):
            self._compare_job(job)
        for name, node in self.nodes.items():
            if node.connected:
                self._compare_residents(name, node)
        for permit in self.cluster.permits.values():
            self._compare_permit(permit)

    def _compare_job(self, job: JobId) -> None:
        record, live = self.cluster.jobs[job], self._job(job)
        for number in [number for number in live.known if number not in self.cluster.permits]:
            live.known.discard(number)
            self._ports.tell_job(job, w.PermitOver(number, "it was taken, or its nodes are gone"))
        for taking in (live.yielding, live.leaving):
            if taking is not None and taking.permit not in self.cluster.permits:
                live.yielding = None if taking is live.yielding else live.yielding
                live.leaving = None if taking is live.leaving else live.leaving
        profiles = record.state is JobState.PROFILING and not self.stopping
        if profiles and job not in self._profiling:
            self._profiling.add(job)
            self._ports.profile(self.entries[job])
        elif not profiles and job in self._profiling:
            self._profiling.discard(job)
            self._ports.end_profile(job)
        holding = record.state in HOLDING
        if live.process is not None and (not holding or live.process != record.placement):
            if not live.told_kill:
                self._kill_process(job)
        elif not holding:
            self._forget_slices(live)
        elif live.process is None:
            if not self.stopping and not record.stopping and not self._timers.waiting("restart", job):
                self._start_process(job, record, live)
        elif record.stopping:
            self._stop_process(job, record.reason, now=False)
        if holding and not self.stopping:
            self._say_started(job, record, live)
            self._ask(job, record, live)
        if holding and record.stopping and live.process is None and not self.stopping:
            self._feed(e.JobStopped(job=job, steps_done=record.steps_done))

    def _forget_slices(self, live: LiveJob) -> None:
        live.lent.clear()
        live.tickets.clear()
        live.trainer = None
        live.wants.clear()

    def _start_process(self, job: JobId, record: JobRecord, live: LiveJob) -> None:
        entry = self.entries.get(job)
        if entry is None:
            self._feed(e.JobFailed(job=job, cause="nothing is known of its directory", placement=record.placement))
        elif not entry.script:
            live.process = record.placement
            self._ports.start_job(entry, record.placement, live.restarts)

    def _stop_process(self, job: JobId, reason: str, *, now: bool) -> None:
        live = self._job(job)
        entry = self.entries.get(job)
        if now:
            if not live.told_kill:
                self._kill_process(job)
        elif not live.told_stop:
            live.told_stop = True
            if entry is not None and entry.script:
                self._end_script(job, reason, self.cluster.limits.notice_ns / NS_PER_S)
            else:
                self._ports.stop_job(job, reason)

    def _kill_process(self, job: JobId) -> None:
        live = self._job(job)
        live.told_kill = True
        entry = self.entries.get(job)
        self._ports.cut_job(job)
        live.connected = False
        if entry is not None and entry.script:
            self._end_script(job, "its process is to end", 0.0)
        else:
            self._ports.kill_job(job)

    def _end_script(self, job: JobId, reason: str, grace_s: float) -> None:
        for name, node in self.nodes.items():
            resident = node.residents.get(job)
            if resident is not None and (not resident.ending or not grace_s):
                resident.ending = not grace_s
                self._ports.tell_keeper(name, w.EndResident(job, reason or "it is to end", grace_s))

    def _say_started(self, job: JobId, record: JobRecord, live: LiveJob) -> None:
        if record.state is not JobState.PLACED or live.process != record.placement or not live.connected:
            return
        assert record.seat is not None
        needed = () if self.entries[job].script else record.seat.rollout
        for name in needed:
            node = self.nodes.get(name)
            resident = None if node is None else node.residents.get(job)
            if resident is None or not resident.up or resident.placement != record.placement:
                return
        self._feed(e.JobStarted(job=job, placement=record.placement))

    def _ask(self, job: JobId, record: JobRecord, live: LiveJob) -> None:
        """Give the cluster the job's next request, training first."""
        if record.state is not JobState.RUNNING or record.permit is not None or not live.wants:
            return
        phase = _TRAIN if _TRAIN in live.wants else _ROLLOUT
        if record.asked is not phase:
            self._feed(e.PhaseAsked(job=job, phase=phase, placement=record.placement))

    # Residents.

    def _wanted(self, name: NodeId, node: PoolNode) -> Iterator[tuple[JobId, JobRecord, w.WorkerTicketFrame | None]]:
        """Return the jobs whose residents belong on this node."""
        cluster_node = self.cluster.state.nodes.get(name)
        for job in cluster_node.residents if cluster_node is not None else ():
            record, entry = self.cluster.jobs[job], self.entries.get(job)
            if record.state not in HOLDING or record.seat is None or entry is None:
                continue
            train = self.cluster.groups[record.seat.group].train
            if node.phase is _ROLLOUT:
                if not entry.script and name in record.seat.rollout:
                    yield job, record, None
            elif name in train[:1] and (entry.script or self._job(job).trainer is not None):
                yield job, record, self._job(job).trainer

    def _compare_residents(self, name: NodeId, node: PoolNode) -> None:
        wanted = {job: (record, ticket) for job, record, ticket in self._wanted(name, node)}
        for job, resident in list(node.residents.items()):
            found = wanted.get(job)
            stale = found is None or found[0].placement != resident.placement
            trainer = found[1] if found is not None and node.phase is _TRAIN else None
            stale = stale or (trainer is not None and trainer.worker != resident.worker)
            stale = stale or bool(resident.permit and resident.permit not in self.cluster.permits)
            if stale and not resident.ending:
                resident.ending = True
                self._ports.tell_keeper(name, w.EndResident(job, "the job has no place or permit here any more"))
        for job, (record, ticket) in wanted.items():
            if job not in node.residents:
                self._start_resident(name, node, job, record, ticket)
        for job in wanted:
            live = self._job(job)
            if name in live.tickets and job in node.residents and not node.residents[job].ending:
                resident, permit = node.residents[job], self.cluster.jobs[job].permit
                if permit is not None and permit == node.given:
                    lent = live.tickets.pop(name)
                    resident.worker = lent.worker
                    self._ports.tell_keeper(name, w.LendWorker(permit, job, lent))

    def _start_resident(
        self, name: NodeId, node: PoolNode, job: JobId, record: JobRecord, ticket: w.WorkerTicketFrame | None
    ) -> None:
        live, entry = self._job(job), self.entries[job]
        holder = self.cluster.state.nodes[name].user
        busy = holder not in (None, job) and bool(live.deaths.get(name)) and node.phase is _ROLLOUT
        if self.stopping or busy or self._timers.waiting("resident", f"{name}/{job}"):
            return
        if entry.script:
            if record.stopping or self._timers.waiting("restart", job) or live.process is not None:
                return
            live.process = record.placement
        elif ticket is not None and not ticket.token:
            return  # It went on under an earlier process, whose ticket is not known here; `_resident_gone` clears it.
        frame = self._ports.resident(entry, record.placement, name, node.phase, ticket)
        node.residents[job] = Resident(placement=record.placement, worker=ticket.worker if ticket else "")
        self._ports.tell_keeper(name, frame)

    def _end_resident(self, job: JobId, name: NodeId, reason: str) -> None:
        entry = self.entries.get(job)
        if entry is not None and entry.script:
            self._end_script(job, reason, 0.0)
            return
        node = self.nodes.get(name)
        resident = None if node is None else node.residents.get(job)
        if resident is not None:
            resident.ending = True
            self._ports.tell_keeper(name, w.EndResident(job, reason))

    def _resident_gone(self, name: NodeId, job: JobId, resident: Resident, cause: str, code: int | None) -> None:
        """Note that a resident's processes have ended, wanted or not."""
        live, node, entry = self._job(job), self.nodes[name], self.entries.get(job)
        record = self.cluster.jobs.get(job)
        permit = record.permit if record is not None else None
        if entry is not None and entry.script and node.phase is _TRAIN:
            how = "finished" if code == 0 else "died"
            self.job_ended(job, resident.placement, JobEnding(how, cause))
            permit = None
        elif node.phase is _TRAIN:
            if live.trainer is not None and live.trainer.worker == resident.worker:
                live.trainer = None
            self._ports.tell_job(job, w.TrainerEnded(resident.worker, cause))
        else:
            worker = live.lent.pop(name, "")
            live.tickets.pop(name, None)
            if worker:
                self._tell_parked(job, name, worker, 0.0, cause, permit or 0)
            if record is not None and record.placement == resident.placement:
                died = live.deaths[name] = live.deaths.get(name, 0) + 1
                if died > 1:
                    delay_ns = min(self._times.retry_base_ns * 2 ** min(died - 2, 16), self._times.retry_max_ns)
                    self._timers.set("resident", f"{name}/{job}", self._ports.now_ns(), delay_ns)
        self._freed(name, job, permit, 0)
        if not resident.ending:
            self._feed(e.ResidentLost(job=job, node=name, cause=cause))

    def _measured(self, name: NodeId, job: JobId, host_bytes: int) -> None:
        record, live, node = self.cluster.jobs.get(job), self._job(job), self.nodes[name]
        if record is None or job not in node.residents or node.residents[job].ending:
            return
        declared = record.request.rollout_bytes if node.phase is _ROLLOUT else record.request.train_bytes
        if host_bytes > declared or host_bytes > MEMORY_NEWS * live.memory.get(name, 0):
            live.memory[name] = host_bytes
            self._feed(e.ResidencyMeasured(job=job, node=name, host_bytes=host_bytes))

    # Slices.

    def _job_placed(self, command: c.StartJob) -> None:
        live = self._job(command.job)
        live.restarts = 0
        live.deaths.clear()
        self._timers.clear("restart", command.job)
        self._forget_slices(live)

    def _granted(self, command: c.GrantPermit) -> None:
        live = self._job(command.job)
        permit = self.cluster.permits.get(command.permit)
        if permit is None:
            return
        if live.yielding is not None and live.yielding.permit == permit.number:
            return  # It has got more nodes while it was leaving; they are given to nobody.
        if permit.number not in live.known:
            if command.phase not in live.wants:
                self._feed(e.PermitYielded(job=command.job, permit=permit.number, finished=False))
                return
            live.wants.discard(command.phase)
            live.known.add(permit.number)
        left_s = self._ends_s(command.deadline_ns)
        self._ports.tell_job(command.job, w.Granted(permit.number, command.phase, command.nodes, left_s))

    def _compare_permit(self, permit: Permit) -> None:
        """Make sure that the permit's job has the permit's devices."""
        live = self._job(permit.job)
        if permit.number not in live.known or (live.yielding is not None and live.yielding.permit == permit.number):
            return
        left_s = self._ends_s(permit.deadline_ns)
        for name in permit.nodes:
            node = self.nodes.get(name)
            if node is not None and node.connected and node.given < permit.number:
                node.given = permit.number
                if permit.job in node.residents:
                    node.residents[permit.job].permit = permit.number
                self._ports.tell_keeper(name, w.GiveDevice(permit.number, permit.job, left_s))

    def _recalled(self, command: c.RecallPermit) -> None:
        self._ports.tell_job(command.job, w.Recalled(command.permit, self._left_s(command.until_ns)))

    def _tell_tail(self, job: JobId, permit: int, nodes: tuple[NodeId, ...]) -> None:
        self._ports.tell_job(job, w.TailMove(permit, nodes))

    def _take_back(self, permit: Permit) -> None:
        """Take a permit's devices, because the job is not there to yield it. The phase goes on in a further slice."""
        self._yield(permit, False, 0)

    def _yield(self, permit: Permit, finished: bool, switch_ns: Nanoseconds) -> None:
        live = self._job(permit.job)
        if live.yielding is not None and live.yielding.permit == permit.number:
            return
        live.leaving = None
        live.yielding = Yielding(
            permit=permit.number, finished=finished, switch_ns=switch_ns, waiting=set(permit.nodes)
        )
        for name in permit.nodes:
            self._take_device(name, permit.job, permit.number)
        self._settle_yield(permit.job)

    def _leave_for_tail(self, permit: Permit) -> None:
        """Take the devices of the nodes that the job has left for its tail, before other jobs get them."""
        live = self._job(permit.job)
        if live.leaving is not None or live.yielding is not None or not permit.tail_nodes:
            return
        left = [name for name in permit.nodes if name not in permit.tail_nodes]
        live.leaving = Yielding(permit=permit.number, tail=True, waiting=set(left))
        for name in left:
            self._take_device(name, permit.job, permit.number)
        self._settle_yield(permit.job)

    def _take_device(self, name: NodeId, job: JobId, permit: int) -> None:
        """Take a node's device. Without a keeper the device counts as free: a keeper that comes back reports what it
        holds."""
        node = self.nodes.get(name)
        if node is None or (node.connected and node.given < permit):
            self._freed(name, job, permit, 0)
        elif node.connected:
            self._ports.tell_keeper(name, w.TakeDevice(permit, job, self._times.park_ns / NS_PER_S))

    def _freed(self, name: NodeId, job: JobId, permit: int | None, switch_ns: Nanoseconds) -> None:
        live = self._job(job)
        for taking in (live.yielding, live.leaving):
            if taking is not None and taking.permit == permit and name in taking.waiting:
                taking.waiting.discard(name)
                taking.switch_ns = max(taking.switch_ns, switch_ns)
        lent = live.lent.get(name)
        if lent is not None and live.yielding is not None and live.yielding.permit == permit:
            del live.lent[name]
            live.tickets.pop(name, None)
            self._tell_parked(job, name, lent, 0.0, "its slice is over", permit or 0)
        self._settle_yield(job)

    def _settle_yield(self, job: JobId) -> None:
        live = self._job(job)
        taking = live.yielding
        if taking is not None and not taking.waiting:
            live.yielding = None
            live.known.discard(taking.permit)
            self._feed(
                e.PermitYielded(
                    job=job, permit=taking.permit, finished=taking.finished, switch_ns=max(0, taking.switch_ns)
                )
            )
        leaving = live.leaving
        if leaving is not None and not leaving.waiting:
            live.leaving = None
            self._feed(e.TailMoved(job=job, permit=leaving.permit))

    def _lend(self, job: JobId, message: w.LendSlice) -> None:
        live, permit = self._job(job), self.cluster.permits.get(message.permit)
        name, worker = message.node, message.ticket.worker
        if live.lent.get(name) == worker:
            return
        why = ""
        if permit is None or permit.job != job or permit.number not in live.known or name not in permit.nodes:
            why = "the permit does not count here any more"
        elif live.yielding is not None or permit.phase is not _ROLLOUT:
            why = "the permit is being yielded" if live.yielding is not None else "the permit is for training"
        elif name in live.lent:
            why = f"its resident works as {live.lent[name]}"
        if why:
            self._tell_parked(job, name, worker, 0.0, why, message.permit)
            return
        live.lent[name], live.tickets[name] = worker, message.ticket

    def _return(self, job: JobId, permit: int, name: NodeId) -> None:
        live = self._job(job)
        worker = live.lent.get(name, "")
        if not worker or name in live.tickets:
            live.lent.pop(name, None)
            live.tickets.pop(name, None)
            self._tell_parked(job, name, worker, 0.0, "", permit)
        else:
            live.returning.add(name)
            self._ports.tell_keeper(name, w.EndWorker(permit, job, worker))

    def _tell_parked(self, job: JobId, name: NodeId, worker: str, switch_s: float, cause: str, permit: int = 0) -> None:
        record = self.cluster.jobs.get(job)
        permit = permit or (record.permit if record is not None and record.permit is not None else 0)
        self._job(job).returning.discard(name)
        self._ports.tell_job(job, w.SliceParked(permit, name, worker, switch_s, cause))

    def _end_trainer(self, job: JobId, worker: str) -> None:
        live = self._job(job)
        if live.trainer is not None and live.trainer.worker == worker:
            live.trainer = None
        for node in self.nodes.values():
            resident = node.residents.get(job)
            if node.phase is _TRAIN and resident is not None and resident.worker == worker:
                return  # It is ended because nobody wants it any more; `TrainerEnded` follows.
        self._ports.tell_job(job, w.TrainerEnded(worker, ""))

    def _progressed(self, job: JobId, message: w.PhaseProgress) -> None:
        """Record a rollout's progress, if it has several nodes. Only then its tail can move together."""
        permit, live = self.cluster.permits.get(message.permit), self._job(job)
        if permit is None or permit.job != job or len(permit.nodes) < 2 or permit.tail_nodes or not message.of:
            return
        known = live.progress
        if known[0] != message.permit or message.done - known[1] >= PROGRESS_NEWS * message.of:
            live.progress = (message.permit, message.done, message.of)
            self._feed(e.RolloutProgressed(job=job, permit=message.permit, done=message.done, of=message.of))

    # Nodes.

    def _start_keeper(self, name: NodeId, phase: PhaseKind) -> None:
        self._await_keeper(name, self._times.keeper_start_ns)
        self._ports.start_keeper(name, phase)

    def _await_keeper(self, name: NodeId, within_ns: Nanoseconds) -> None:
        self._timers.set("keeper", name, self._ports.now_ns(), within_ns)

    def _keeper_overdue(self, name: NodeId) -> None:
        """Give up a keeper that has not come or not come back."""
        self.keeper_gone(name)

    def _lose(self, name: NodeId) -> None:
        node = self.nodes.pop(name)
        self._timers.clear("keeper", name)
        self._ports.end_keeper(name)
        self._feed(e.NodeLost(node=name))
        for job, resident in list(node.residents.items()):
            live = self._job(job)
            live.lent.pop(name, None)
            live.tickets.pop(name, None)
            if self.entries.get(job) is not None and self.entries[job].script and live.process == resident.placement:
                live.process, live.connected, live.told_kill, live.told_stop = None, False, False, False
                self._ports.cut_job(job)
        for job, live in list(self.jobs.items()):
            for taking in (live.yielding, live.leaving):
                if taking is not None and name in taking.waiting:
                    self._freed(name, job, taking.permit, 0)
        if not self.stopping:
            self._renew(node.phase)

    def _failed_to_join(self, name: NodeId) -> None:
        phase = self.joining.pop(name)
        self._timers.clear("keeper", name)
        self._ports.end_keeper(name)
        if not self.stopping:
            self._renew(phase)

    def _renew(self, phase: PhaseKind) -> None:
        """Add a node for one that was lost; soon if losses are rare, later if they are frequent."""
        deaths = self._keeper_deaths[phase]
        self._keeper_deaths[phase] = deaths + 1
        delay_ns = 0 if not deaths else min(self._times.retry_base_ns * 2 ** min(deaths, 16), self._times.retry_max_ns)
        key = f"{phase.value}/{self._next_number(phase)}"
        self._timers.set("new keeper", key, self._ports.now_ns(), delay_ns)

    def _start_keeper_anew(self, key: str) -> None:
        kind, _, number = key.partition("/")
        phase = PhaseKind(kind)
        name = f"{phase}-{number or self._next_number(phase)}"
        if not self.stopping:
            self.joining[name] = phase
            self._start_keeper(name, phase)

    def _next_number(self, phase: PhaseKind) -> int:
        self._numbers[phase] += 1
        return self._numbers[phase]

    def _count(self, name: NodeId) -> None:
        kind, _, number = name.rpartition("-")
        if kind in list(PhaseKind) and number.isdecimal():
            self._numbers[PhaseKind(kind)] = max(self._numbers[PhaseKind(kind)], int(number))

    # What is often asked.

    def _job(self, job: JobId) -> LiveJob:
        live = self.jobs.get(job)
        if live is None:
            live = self.jobs[job] = LiveJob()
        return live

    def _is_connected(self, name: NodeId) -> bool:
        node = self.nodes.get(name)
        return node is not None and node.connected

    def _holds(self, job: JobId, phase: PhaseKind) -> bool:
        """Return whether the job has a permit for this phase that it was told of."""
        number = self.cluster.jobs[job].permit
        return number is not None and number in self._job(job).known and self.cluster.permits[number].phase is phase

    def _ends_s(self, deadline_ns: Nanoseconds) -> float:
        """Return the seconds until a permit is invalid. It is recalled at its deadline, and may be yielded for a
        while after that."""
        return self._left_s(deadline_ns + self.cluster.limits.notice_ns)

    def _left_s(self, at_ns: Nanoseconds) -> float:
        return min(SECONDS_MAX, max(0, at_ns - self._ports.now_ns()) / NS_PER_S)


def _ns(seconds: float) -> Nanoseconds:
    return round(seconds * NS_PER_S)
