"""The workers that residents are during a job's slices, and its trainer: lent, ended, and told to the job."""

from elastic.core.cluster.types import JobId, NodeId, PhaseKind
from elastic.pool import messages as w
from elastic.pool.holdings import LiveJob, PoolHoldings, PoolNode

_ROLLOUT, _TRAIN = PhaseKind.ROLLOUT, PhaseKind.TRAIN


class SliceWorkers:
    """Which worker each resident works as."""

    def __init__(self, pool: PoolHoldings) -> None:
        self._pool = pool

    def compare(self, name: NodeId, node: PoolNode, state: w.ResidentState) -> None:
        """End a slice that ended while the pool's process was away. Adopt a slice that this process does not know."""
        live = self._pool.job(state.job)
        if node.phase is _TRAIN:
            if live.trainer is None and state.worker:
                live.trainer = w.WorkerTicketFrame("", state.worker, "", "")
            return
        lent = live.lent.get(name, "")
        if state.worker:
            live.lent[name] = state.worker
            live.tickets.pop(name, None)
            if name in live.returning:
                self._pool.ports.tell_keeper(name, w.EndWorker(state.permit, state.job, state.worker))
        elif lent and name not in live.tickets:
            del live.lent[name]
            self.tell_parked(state.job, name, lent, 0.0, "it ended while its keeper was not heard")

    def lend(self, job: JobId, message: w.LendSlice) -> None:
        live, permit = self._pool.job(job), self._pool.cluster.permits.get(message.permit)
        name, worker = message.node, message.ticket.worker
        if live.lent.get(name) == worker:
            return
        why = ""
        if permit is None or permit.job != job or permit.number not in live.known or name not in permit.nodes:
            why = "the permit does not count here any more"
        elif live.yielding is not None or (permit.phase is not _ROLLOUT and not permit.both):
            why = "the permit is being yielded" if live.yielding is not None else "the permit is for training"
        elif name in live.lent:
            why = f"its resident works as {live.lent[name]}"
        if why:
            self.tell_parked(job, name, worker, 0.0, why, message.permit)
            return
        live.lent[name], live.tickets[name] = worker, message.ticket

    def give_back(self, job: JobId, permit: int, name: NodeId) -> None:
        live = self._pool.job(job)
        worker = live.lent.get(name, "")
        if not worker or name in live.tickets:
            live.lent.pop(name, None)
            live.tickets.pop(name, None)
            self.tell_parked(job, name, worker, 0.0, "", permit)
        else:
            live.returning.add(name)
            self._pool.ports.tell_keeper(name, w.EndWorker(permit, job, worker))

    def tell_parked(self, job: JobId, name: NodeId, worker: str, switch_s: float, cause: str, permit: int = 0) -> None:
        record = self._pool.cluster.jobs.get(job)
        permit = permit or (record.permit if record is not None and record.permit is not None else 0)
        self._pool.job(job).returning.discard(name)
        self._pool.ports.tell_job(job, w.SliceParked(permit, name, worker, switch_s, cause))

    def end_trainer(self, job: JobId, worker: str) -> None:
        live = self._pool.job(job)
        if live.trainer is not None and live.trainer.worker == worker:
            live.trainer = None
        for node in self._pool.nodes.values():
            resident = node.residents.get(job)
            if node.phase is _TRAIN and resident is not None and resident.worker == worker:
                return  # It is ended because nobody wants it any more; `TrainerEnded` follows.
        self._pool.ports.tell_job(job, w.TrainerEnded(worker, ""))

    def forget(self, live: LiveJob) -> None:
        live.lent.clear()
        live.tickets.clear()
        live.trainer, live.trainer_died, live.overdue = None, False, False
        live.wants.clear()
