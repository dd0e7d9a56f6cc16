"""Residents: one process of a job on each of its nodes, started, ended and measured as the cluster wants it."""

from collections.abc import Iterator, Mapping

import msgspec

from elastic.core.cluster import events as e
from elastic.core.cluster.state import JobRecord
from elastic.core.cluster.types import JobId, NodeId, PhaseKind
from elastic.pool import messages as w
from elastic.pool.devices import KILLED, StartDeath
from elastic.pool.holdings import HOLDING, PoolHoldings, PoolNode, PoolRoom, Resident, nanoseconds
from elastic.pool.job_lives import JobLives
from elastic.pool.ports import HowEnded, JobEnding
from elastic.pool.scripts import PoolScripts
from elastic.pool.slice_workers import SliceWorkers
from elastic.pool.slices import PoolSlices

MEMORY_NEWS = 1.1
"""Growth of host memory that is reported to the cluster, besides growth beyond the declared size."""
SCRIPT_ENDS: Mapping[int | None, HowEnded] = {0: "finished", 2: "failed", w.UNFIT_STATUS: "failed"}
"""What exit statuses of scripts mean. Bad input, and other devices than the node has, would end another start in the
same way."""
_ROLLOUT, _TRAIN = PhaseKind.ROLLOUT, PhaseKind.TRAIN


class JobResidents(msgspec.Struct, kw_only=True):
    """By node, the deaths of a job's resident in a row, and the largest host memory measured of it."""

    deaths: dict[NodeId, int] = {}
    host_bytes: dict[NodeId, int] = {}


class NodeResidents(PoolRoom):
    """The residents of a pool's nodes."""

    def __init__(
        self,
        pool: PoolHoldings,
        workers: SliceWorkers,
        slices: PoolSlices,
        lives: JobLives,
        scripts: PoolScripts,
    ) -> None:
        super().__init__(pool)
        self._workers, self._slices = workers, slices
        self._lives, self._scripts = lives, scripts
        self._jobs = pool.records(JobResidents)

    def host_bytes(self, job: JobId) -> dict[NodeId, int]:
        """Return the largest host memory measured of the job's residents, by node."""
        return dict(self._jobs[job].host_bytes)

    def placed(self, job: JobId) -> None:
        self._jobs[job].deaths.clear()

    def freed(self, name: NodeId, resident: Resident | None, message: w.DeviceFreed) -> None:
        """Note that a node's device is free of a job."""
        if resident is not None and resident.permit == message.permit:
            resident.permit = 0
            self._jobs[message.job].deaths.pop(name, None)
        switch_ns, cold_ns = nanoseconds(message.switch_s), nanoseconds(message.cold_s)
        self._slices.freed(name, message.job, message.permit, switch_ns, cold_ns)

    def _wanted(self, name: NodeId, node: PoolNode) -> Iterator[tuple[JobId, JobRecord, w.WorkerTicketFrame | None]]:
        """Return the jobs whose residents belong on this node."""
        cluster_node = self._cluster.state.nodes.get(name)
        for job in cluster_node.residents if cluster_node is not None else ():
            record, entry = self._cluster.jobs[job], self._entries.get(job)
            if record.state not in HOLDING or record.seat is None or entry is None:
                continue
            if node.phase is _ROLLOUT:
                if not entry.script and name in record.seat.rollout:
                    yield job, record, None
            elif name in self._pool.trainer_nodes(job):
                trainer = self._workers.trainer(job)
                if entry.script or trainer is not None:
                    yield job, record, trainer

    def compare(self, name: NodeId, node: PoolNode) -> None:
        wanted = {job: (record, ticket) for job, record, ticket in self._wanted(name, node)}
        for job, resident in list(node.residents.items()):
            found = wanted.get(job)
            stale = found is None or found[0].placement != resident.placement
            trainer = found[1] if found is not None and node.phase is _TRAIN else None
            stale = stale or (trainer is not None and trainer.worker != resident.worker)
            stale = stale or bool(resident.permit and resident.permit not in self._cluster.permits)
            if stale and not resident.ending:
                resident.ending = True
                self._ports.send_to_node_agent(name, w.EndResident(job, "the job has no place or permit here any more"))
        for job, (record, ticket) in wanted.items():
            if job not in node.residents:
                with self._ports.attempting(f"resident of {job} on {name}") as attempt:
                    self._start(name, node, job, record, ticket)
                if attempt.fault:
                    wait_ns = self._times.retry_max_ns
                    self._pool.wait("resident", f"{name}/{job}", wait_ns)
            self._bound(f"{name}/{job}", node.residents.get(job))

    def _start(
        self, name: NodeId, node: PoolNode, job: JobId, record: JobRecord, ticket: w.WorkerTicketFrame | None
    ) -> None:
        live, entry = self._pool.jobs[job], self._entries[job]
        if self._pool.stopping or self._timers.waiting("resident", f"{name}/{job}"):
            return
        if entry.script and (record.stopping or self._timers.waiting("restart", job) or live.process is not None):
            return
        ranks = self._ranks(name, job, record, ticket)
        if ranks is not None and ranks.place:
            if not ranks.at:
                return  # The first rank is not there yet.
        elif ticket is not None and not ticket.token:
            return  # It went on under an earlier process, whose ticket is not known here; `gone` clears it.
        frame = self._ports.resident(entry, record.placement, name, node.phase, ticket, ranks)
        if entry.script:
            live.process = record.placement
        permit = node.given if record.permit == node.given else 0
        worker = ticket.worker if ticket else ""
        node.residents[job] = Resident(placement=record.placement, worker=worker, permit=permit)
        self._ports.send_to_node_agent(name, frame)

    def _ranks(
        self, name: NodeId, job: JobId, record: JobRecord, ticket: w.WorkerTicketFrame | None
    ) -> w.RankPlaces | None:
        """Return where the ranks of a trainer are that this node has a part of; None if they are all here, as many as
        the job asks for."""
        nodes = self._pool.trainer_nodes(job)
        if ticket is None or name not in nodes or [*nodes.values()] == [record.request.train_gpus]:
            return None
        first = self._nodes.get(next(iter(nodes)))
        its = None if first is None else first.residents.get(job)
        at = its.ranks_at if its is not None and its.worker == ticket.worker and not its.ending else ""
        return w.RankPlaces(counts=tuple(nodes.values()), place=[*nodes].index(name), at=at)

    def awaits_ranks(self, name: NodeId, message: w.RanksAwaited) -> None:
        """Note where a trainer's first rank is reached: those on other nodes are started now."""
        resident = self._nodes[name].residents.get(message.job)
        if resident is not None and resident.placement == message.placement:
            resident.ranks_at = message.at

    def _bound(self, key: str, resident: Resident | None) -> None:
        """A resident has to come up within the time that a job has to start."""
        starts = resident is not None and not resident.up and not resident.ending
        if not starts:
            self._timers.clear("up", key)
        elif not self._timers.waiting("up", key):
            self._pool.wait("up", key, self._cluster.limits.start_ns)

    def overdue(self, name: NodeId, job: JobId) -> None:
        """End a resident that has not come up in time; another one is started."""
        node = self._nodes.get(name)
        resident = None if node is None else node.residents.get(job)
        if resident is not None and not resident.up:
            self.end(job, name, f"it was not up within {self._cluster.limits.start_ns / 1e9:g} s")

    def end(self, job: JobId, name: NodeId, reason: str) -> None:
        if self._pool.is_script(job):
            self._scripts.end(job, reason, 0.0)
            return
        node = self._nodes.get(name)
        resident = None if node is None else node.residents.get(job)
        if resident is not None:
            resident.ending = True
            self._ports.send_to_node_agent(name, w.EndResident(job, reason))

    def came_up(self, name: NodeId, job: JobId, placement: int) -> None:
        node = self._nodes[name]
        resident = node.residents.get(job)
        if resident is not None and resident.placement == placement:
            resident.up = True
            node.start_deaths.clear()

    def gone(self, name: NodeId, job: JobId, resident: Resident, cause: str, code: int | None, fault: str = "") -> None:
        """Note that a resident's processes have ended, wanted or not. `fault` is what is wrong with the devices."""
        record, node = self._cluster.jobs.get(job), self._nodes[name]
        permit = record.permit if record is not None else None
        if not resident.up and not resident.ending and code is not None and code not in KILLED:
            fault = fault or (cause if code == w.UNFIT_STATUS else "")
            node.start_deaths.append(StartDeath(job, cause, fault))
        if self._pool.is_script(job) and node.phase is _TRAIN:
            self._scripts.gone(job)
            self._lives.ended(job, resident.placement, JobEnding(SCRIPT_ENDS.get(code, "died"), cause))
            permit = None
        elif node.phase is _TRAIN:
            trainer = self._workers.trainer(job)
            self._workers.trainer_ended(job, resident.worker, cause, died=not resident.ending)
            # A late one of a former trainer's takes nothing from the present one.
            is_last = trainer is None or trainer.worker == resident.worker
            if permit is not None and is_last and self._slices.holds(job, _TRAIN):
                self._take_back(job, permit, cause)
        else:
            self._workers.ended(job, name, cause)
            if record is not None and record.placement == resident.placement:
                deaths = self._jobs[job].deaths
                died = deaths[name] = deaths.get(name, 0) + 1
                if died > 1:
                    delay_ns = self._times.retry_ns(died - 2)
                    self._pool.wait("resident", f"{name}/{job}", delay_ns)
            if permit is not None and not resident.ending and self._slices.holds(job, _ROLLOUT):
                there = [self._nodes.get(each) for each in self._cluster.permits[permit].nodes]
                if not any(node is not None and job in node.residents for node in there):
                    self._take_back(job, permit, cause)
        self._slices.freed(name, job, permit, 0)
        if not resident.ending:
            self._pool.feed(e.ResidentLost(job=job, node=name, cause=cause))

    def _take_back(self, job: JobId, permit: int, cause: str) -> None:
        """Nothing computes under this permit any more, and the job may take long to yield it."""
        self._ports.send_to_job(job, w.PermitOver(permit, cause))
        self._slices.take_back(self._cluster.permits[permit])

    def measured(self, name: NodeId, job: JobId, host_bytes: int) -> None:
        record, node = self._cluster.jobs.get(job), self._nodes[name]
        if record is None or job not in node.residents or node.residents[job].ending:
            return
        declared = self._cluster.declared_bytes(record, node.phase)
        known = self._jobs[job].host_bytes
        if host_bytes > declared or host_bytes > MEMORY_NEWS * known.get(name, 0):
            known[name] = host_bytes
            self._pool.feed(e.ResidencyMeasured(job=job, node=name, host_bytes=host_bytes))
