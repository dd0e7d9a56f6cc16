"""The workers that residents are during a job's slices, and its trainer: lent, ended, and told to the job."""

import msgspec

from elastic.core.cluster.types import JobId, NodeId, PhaseKind
from elastic.pool import messages as w
from elastic.pool.holdings import PoolHoldings, PoolNode

_TRAIN = PhaseKind.TRAIN


class JobWorkers(msgspec.Struct, kw_only=True):
    """A job's workers.

    - `lent`: by node, the worker that the resident works as, or will work as. `tickets`: tickets not yet delivered.
      `returning`: nodes where the worker is to end.
    - `trainer`: the ticket of the trainer that it wants or has. `trainer_died`: the last one died, and there is no
      other yet.
    """

    lent: dict[NodeId, str] = {}
    tickets: dict[NodeId, w.WorkerTicketFrame] = {}
    returning: set[NodeId] = set()
    trainer: w.WorkerTicketFrame | None = None
    trainer_died: bool = False


class SliceWorkers:
    """Which worker each resident works as."""

    def __init__(self, pool: PoolHoldings) -> None:
        self._pool = pool
        self._jobs = pool.records(JobWorkers)

    def lent(self, job: JobId) -> dict[NodeId, str]:
        """Return by node the workers that the job's residents work as."""
        return dict(self._jobs[job].lent)

    def trainer(self, job: JobId) -> w.WorkerTicketFrame | None:
        """Return the ticket of the trainer that the job wants or has."""
        return self._jobs[job].trainer

    def trainer_died(self, job: JobId) -> bool:
        """Return whether the job's last trainer died, and there is no other yet."""
        return self._jobs[job].trainer_died

    def take_ticket(self, job: JobId, name: NodeId) -> w.WorkerTicketFrame | None:
        """Return the ticket for the job's resident on this node, which is delivered now; None if there is none."""
        return self._jobs[job].tickets.pop(name, None)

    def compare(self, name: NodeId, node: PoolNode, state: w.ResidentState) -> None:
        """End a slice that ended while the pool's process was away. Adopt a slice that this process does not know."""
        mine = self._jobs[state.job]
        if node.phase is _TRAIN:
            if mine.trainer is None and state.worker:
                mine.trainer = w.WorkerTicketFrame("", state.worker, "", "")
            return
        lent = mine.lent.get(name, "")
        if state.worker:
            mine.lent[name] = state.worker
            mine.tickets.pop(name, None)
            if name in mine.returning:
                self._pool.ports.tell_keeper(name, w.EndWorker(state.permit, state.job, state.worker))
        elif lent and name not in mine.tickets:
            del mine.lent[name]
            self.tell_parked(state.job, name, lent, 0.0, "it ended while its keeper was not heard")

    def lend(self, job: JobId, message: w.LendSlice, why: str) -> None:
        """Have the resident work as this worker. `why` it may not, if so."""
        mine, name, worker = self._jobs[job], message.node, message.ticket.worker
        former = mine.lent.get(name)
        if former == worker:
            return
        if former is not None:
            why = why or f"its resident works as {former}"
        if why:
            self.tell_parked(job, name, worker, 0.0, why, message.permit)
            return
        mine.lent[name], mine.tickets[name] = worker, message.ticket

    def give_back(self, job: JobId, permit: int, name: NodeId) -> None:
        mine = self._jobs[job]
        worker = mine.lent.get(name, "")
        if not worker or name in mine.tickets:
            self.lost(job, name)
            self.tell_parked(job, name, worker, 0.0, "", permit)
        else:
            mine.returning.add(name)
            self._pool.ports.tell_keeper(name, w.EndWorker(permit, job, worker))

    def lost(self, job: JobId, name: NodeId) -> str:
        """Forget the worker on this node; returns its name, or an empty string."""
        mine = self._jobs[job]
        mine.tickets.pop(name, None)
        return mine.lent.pop(name, "")

    def ended(self, job: JobId, name: NodeId, cause: str, permit: int) -> None:
        """Note that no resident works for the job on this node any more."""
        if worker := self.lost(job, name):
            self.tell_parked(job, name, worker, 0.0, cause, permit)

    def left(self, name: NodeId, message: w.WorkerLeft) -> None:
        """Note that a resident has parked."""
        mine = self._jobs[message.job]
        if mine.lent.get(name) == message.worker and name not in mine.tickets:
            del mine.lent[name]
            self.tell_parked(message.job, name, message.worker, message.switch_s, message.cause, message.permit)

    def tell_parked(self, job: JobId, name: NodeId, worker: str, switch_s: float, cause: str, permit: int = 0) -> None:
        record = self._pool.cluster.jobs.get(job)
        permit = permit or (record.permit if record is not None and record.permit is not None else 0)
        self._jobs[job].returning.discard(name)
        self._pool.ports.tell_job(job, w.SliceParked(permit, name, worker, switch_s, cause))

    def start_trainer(self, job: JobId, ticket: w.WorkerTicketFrame) -> None:
        mine = self._jobs[job]
        mine.trainer, mine.trainer_died = ticket, False

    def trainer_ended(self, job: JobId, worker: str, cause: str, *, died: bool) -> None:
        """Note that the process of a trainer is gone. It has `died` if nobody wanted that."""
        mine = self._jobs[job]
        if mine.trainer is not None and mine.trainer.worker == worker:
            mine.trainer, mine.trainer_died = None, died
        self._pool.ports.tell_job(job, w.TrainerEnded(worker, cause))

    def end_trainer(self, job: JobId, worker: str) -> None:
        mine = self._jobs[job]
        if mine.trainer is not None and mine.trainer.worker == worker:
            mine.trainer = None
        for node in self._pool.nodes.values():
            resident = node.residents.get(job)
            if node.phase is _TRAIN and resident is not None and resident.worker == worker:
                return  # It is ended because nobody wants it any more; `TrainerEnded` follows.
        self._pool.ports.tell_job(job, w.TrainerEnded(worker, ""))

    def forget(self, job: JobId) -> None:
        mine = self._jobs[job]
        mine.lent.clear()
        mine.tickets.clear()
        mine.trainer, mine.trainer_died = None, False
