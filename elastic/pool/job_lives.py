"""Jobs' processes: started, stopped, killed, judged at their end; scripts through their residents."""

from collections.abc import Sequence

from elastic.core.cluster import events as e
from elastic.core.cluster.state import JobRecord
from elastic.core.cluster.types import JobId, JobState, NodeId, PhaseKind, price_of
from elastic.pool import messages as w
from elastic.pool.holdings import HOLDING, NS_PER_S, LiveJob, PoolHoldings, PoolRoom
from elastic.pool.ports import JobEnding
from elastic.pool.scripts import PoolScripts
from elastic.pool.slice_workers import SliceWorkers
from elastic.pool.slices import PoolSlices
from elastic.protocol.frames import SECONDS_MAX


class JobLives(PoolRoom):
    """What becomes of each job's process."""

    def __init__(self, pool: PoolHoldings, workers: SliceWorkers, slices: PoolSlices, scripts: PoolScripts) -> None:
        super().__init__(pool)
        self._workers, self._slices, self._scripts = workers, slices, scripts

    def placed(self, job: JobId) -> None:
        """The cluster has given it a place: nothing of an earlier one counts."""
        self._pool.jobs[job].restarts = 0
        self._timers.clear("restart", job)
        self._slices.forget(job)

    def welcome(self, hello: w.JobHello) -> w.JobWelcome | w.RefusedFrame:
        """A job has dialled with the token of this placement; what it is told to hold."""
        pool = self._pool
        job, record = hello.job, pool.cluster.jobs.get(hello.job)
        if record is None or record.placement != hello.placement or record.state not in HOLDING or record.seat is None:
            return w.RefusedFrame("the pool has no such start of this job any more", retry=False)
        train = pool.cluster.groups[record.seat.group].train
        away = [node for node in (*record.seat.rollout, *train) if not pool.is_connected(node)]
        if away:
            return w.RefusedFrame(f"node agents are not there yet: {', '.join(away)}", retry=True)
        pool.jobs[job].connected = True
        if hello.script:
            self._scripts.joined(hello)
        self._workers.take_offers_back(job)
        permits, trainer = self._slices.joined(job), self._workers.trainer(job)
        for name in {name for permit in permits for name in permit.nodes} if hello.script else ():
            self._scripts.use(job, name)  # It takes what it is welcomed with, whatever it held before.
        notice_ns = pool.cluster.limits.notice_ns
        rollout_usd, rollout_gpus = self._terms(record.seat.rollout)
        train_usd, train_gpus = self._terms(train)
        return w.JobWelcome(
            rollout_nodes=record.seat.rollout,
            train_nodes=train,
            trains_elsewhere=any(self._nodes[name].hello is not None for name in train),
            rollout_usd_per_gpu_hour=rollout_usd,
            train_usd_per_gpu_hour=train_usd,
            gpus_per_rollout_node=rollout_gpus,
            gpus_per_train_node=train_gpus,
            grant_within_s=min(SECONDS_MAX, (3 * record.request.limit_ns + 20 * notice_ns) / NS_PER_S),
            permits=tuple(self._slices.grant_of(permit) for permit in permits),
            trainer=trainer.worker if trainer is not None else "",
            silence_s=pool.times.silence_ns / NS_PER_S,
        )

    def _terms(self, nodes: Sequence[NodeId]) -> tuple[float, int]:
        """Return the mean price of a GPU of these nodes, in dollars an hour, and the GPUs that each has at least."""
        kinds = [self._cluster.kind(node) for node in nodes]
        gpus = min(kind.gpus for kind in kinds)
        return price_of(kinds) / len(kinds) / gpus / 1e9, gpus

    def _conclude(self, job: JobId, record: JobRecord, live: LiveJob, ending: JobEnding, *, killed: bool) -> None:
        if ending.how == "finished":
            if record.state is JobState.PLACED:
                self._pool.feed(e.JobStarted(job=job, placement=record.placement))
            self._pool.feed(e.JobFinished(job=job))
        elif self._pool.stopping:
            pass  # Its checkpoint is where it goes on once the pool does.
        elif record.stopping:
            self._pool.feed(e.JobStopped(job=job, steps_done=record.steps_done))
        elif ending.how == "stopped":
            self._pool.feed(e.CancelRequested(job=job))
        elif ending.how == "failed":
            self._pool.feed(e.JobFailed(job=job, cause=ending.cause, placement=record.placement))
        elif live.restarts >= self._entries[job].max_restarts and not killed:
            cause = f"{ending.cause}; it had been started again {live.restarts} times"
            cause = cause if live.restarts else ending.cause
            self._pool.feed(e.JobFailed(job=job, cause=cause, placement=record.placement))
        else:
            delay_ns = self._times.retry_ns(live.restarts)
            times = f"{live.restarts + 1} of at most {self._entries[job].max_restarts} times"
            again = f"it starts again after {delay_ns / NS_PER_S:g} s, {times}"
            self._ports.died("", job, f"{ending.cause or 'its process died'}; {again}")
            live.restarts += 1
            self._pool.wait("restart", job, delay_ns)
            if record.permit is not None:
                self._slices.take_back(self._cluster.permits[record.permit])

    def _start(self, job: JobId, record: JobRecord, live: LiveJob) -> None:
        entry = self._entries.get(job)
        if entry is None:
            self._pool.feed(e.JobFailed(job=job, cause="nothing is known of its directory", placement=record.placement))
        elif not entry.script:
            live.process = record.placement
            self._ports.start_job(entry, record.placement, live.restarts)

    def stop(self, job: JobId, reason: str, *, now: bool) -> None:
        live = self._pool.jobs[job]
        if now:
            self._kill(job)
        elif not live.told_stop:
            live.told_stop = True
            if self._pool.is_script(job):
                self._scripts.end(job, reason, self._cluster.limits.notice_ns / NS_PER_S)
            else:
                self._ports.stop_job(job, reason)

    def _kill(self, job: JobId) -> None:
        live = self._pool.jobs[job]
        if live.told_kill:
            return
        live.told_kill = True
        self._ports.cut_job(job)
        live.connected = False
        if self._pool.is_script(job):
            self._scripts.end(job, "its process is to end", 0.0)
        else:
            self._ports.kill_job(job)

    def _say_started(self, job: JobId, record: JobRecord, live: LiveJob) -> None:
        if record.state is not JobState.PLACED or live.process != record.placement or not live.connected:
            return
        assert record.seat is not None
        needed = () if self._pool.is_script(job) else record.seat.rollout
        for name in needed:
            node = self._nodes.get(name)
            resident = None if node is None else node.residents.get(job)
            if resident is None or not resident.up or resident.placement != record.placement:
                return
        self._pool.feed(e.JobStarted(job=job, placement=record.placement))

    def ended(self, job: JobId, placement: int, ending: JobEnding) -> None:
        """Note that the job's process of this placement has ended."""
        live, record = self._pool.jobs[job], self._cluster.jobs.get(job)
        if live.process != placement:
            return
        killed = live.told_kill
        live.process_ended()
        self._slices.withdraw(job, *PhaseKind)
        self._workers.take_offers_back(job)
        self._ports.cut_job(job)
        if record is not None and record.placement == placement and record.state in HOLDING:
            self._conclude(job, record, live, ending, killed=killed)

    def compare(self, job: JobId) -> None:
        """Start, stop or kill its process, as the cluster wants it."""
        record, live = self._cluster.jobs[job], self._pool.jobs[job]
        holding = record.state in HOLDING
        if live.process is not None and (not holding or live.process != record.placement):
            self._kill(job)
        elif not holding:
            self._slices.forget(job)
        elif live.process is None:
            if not self._pool.stopping and not record.stopping and not self._timers.waiting("restart", job):
                self._start(job, record, live)
        elif record.stopping:
            self.stop(job, "it goes on in another place", now=False)
        if holding and not self._pool.stopping:
            self._say_started(job, record, live)
        if holding and record.stopping and live.process is None and not self._pool.stopping:
            self._pool.feed(e.JobStopped(job=job, steps_done=record.steps_done))
