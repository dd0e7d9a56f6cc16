"""The workers that residents are during a job's slices, and its trainer: offered by the job, placed under its permits,
ended, and told to the job."""

import msgspec

from elastic.core.cluster.types import JobId, NodeId, Permit, PhaseKind
from elastic.pool import messages as w
from elastic.pool.holdings import PoolHoldings, PoolNode, PoolRoom

_ROLLOUT, _TRAIN = PhaseKind.ROLLOUT, PhaseKind.TRAIN


class PlacedWorker(msgspec.Struct, kw_only=True):
    """The worker that a resident is, or will be once its node agent has got the `ticket`, under a permit."""

    worker: str
    permit: int
    ticket: w.WorkerTicketFrame | None = None
    ending: bool = False


class JobWorkers(msgspec.Struct, kw_only=True):
    """A job's workers.

    - `offered`: tickets of workers that have no node yet, by worker. `placed`: the workers that have one, by node.
    - `trainer`: the ticket of the trainer that it wants or has. `trainer_died`: the last one died, and there is no
      other yet.
    """

    offered: dict[str, w.WorkerTicketFrame] = {}
    placed: dict[NodeId, PlacedWorker] = {}
    trainer: w.WorkerTicketFrame | None = None
    trainer_died: bool = False


class SliceWorkers(PoolRoom):
    """Which worker each resident works as."""

    def __init__(self, pool: PoolHoldings) -> None:
        super().__init__(pool)
        self._jobs = pool.records(JobWorkers)

    def of(self, permit: Permit) -> dict[NodeId, str]:
        """Return by node the workers under this permit."""
        placed = self._jobs[permit.job].placed
        return {name: one.worker for name, one in placed.items() if one.permit == permit.number}

    def trainer(self, job: JobId) -> w.WorkerTicketFrame | None:
        """Return the ticket of the trainer that the job wants or has."""
        return self._jobs[job].trainer

    def trainer_died(self, job: JobId) -> bool:
        """Return whether the job's last trainer died, and there is no other yet."""
        return self._jobs[job].trainer_died

    def offer(self, job: JobId, ticket: w.WorkerTicketFrame) -> None:
        mine = self._jobs[job]
        if all(one.worker != ticket.worker for one in mine.placed.values()):
            mine.offered[ticket.worker] = ticket

    def take_offers_back(self, job: JobId) -> None:
        self._jobs[job].offered.clear()

    def place(self, permit: Permit) -> bool:
        """Place offered workers on the permit's nodes that have none; returns whether there were any."""
        mine, any_placed = self._jobs[permit.job], False
        for name in permit.usable if permit.phase is _ROLLOUT else ():
            if mine.offered and name not in mine.placed:
                worker = next(iter(mine.offered))
                ticket = mine.offered.pop(worker)
                mine.placed[name] = PlacedWorker(worker=worker, permit=permit.number, ticket=ticket)
                any_placed = True
        return any_placed

    def take_ticket(self, permit: Permit, name: NodeId) -> w.WorkerTicketFrame | None:
        """Return the ticket for the job's resident on this node, which is delivered now; None if there is none."""
        placed = self._jobs[permit.job].placed.get(name)
        if placed is None or placed.permit != permit.number:
            return None
        ticket, placed.ticket = placed.ticket, None
        return ticket

    def over(self, job: JobId, permit: int) -> None:
        """Forget workers of a permit that is over and whose residents have never heard of them."""
        placed = self._jobs[job].placed
        for name in [name for name, one in placed.items() if one.permit == permit and one.ticket is not None]:
            del placed[name]

    def compare(self, name: NodeId, node: PoolNode, state: w.ResidentState, given: int) -> None:
        """End a slice that ended while the pool's process was away. Adopt a slice that this process does not know.

        `given`: the permit under which the node's device belongs to the job, 0 if it does not.
        """
        mine = self._jobs[state.job]
        if node.phase is _TRAIN:
            if mine.trainer is None and state.worker:
                mine.trainer = w.WorkerTicketFrame("", state.worker, "", "")
            return
        placed = mine.placed.get(name)
        if state.worker:
            if placed is None or placed.worker != state.worker:
                placed = PlacedWorker(worker=state.worker, permit=given)
            mine.placed[name] = msgspec.structs.replace(placed, ticket=None)
            if placed.ending:
                self._ports.send_to_node_agent(name, w.LeaveWorker(state.job, state.worker))
        elif placed is not None and placed.ticket is None:
            self.ended(state.job, name, "it ended while its node agent was not heard")

    def end(self, job: JobId, worker: str) -> NodeId | None:
        """End a worker of the job as it wants; returns the node of its resident if it has one."""
        mine = self._jobs[job]
        if mine.trainer is not None and mine.trainer.worker == worker:
            mine.trainer = None
        for name, node in self._nodes.items():
            placed, resident = mine.placed.get(name), node.residents.get(job)
            if placed is not None and placed.worker == worker:
                if placed.ticket is not None:
                    self.ended(job, name, "")
                else:
                    placed.ending = True
                    self._ports.send_to_node_agent(name, w.LeaveWorker(job, worker))
                return name
            if node.phase is _TRAIN and resident is not None and resident.worker == worker:
                return None  # It is ended because nobody wants it any more; `WorkerEnded` follows.
        if mine.offered.pop(worker, None) is None:
            self._ports.send_to_job(job, w.WorkerEnded(worker))
        return None

    def lost(self, job: JobId, name: NodeId) -> None:
        """Forget the worker on this node."""
        self._jobs[job].placed.pop(name, None)

    def ended(self, job: JobId, name: NodeId, cause: str) -> None:
        """Note that no resident works for the job on this node any more."""
        placed = self._jobs[job].placed.pop(name, None)
        if placed is not None:
            self._ports.send_to_job(job, w.WorkerEnded(placed.worker, cause))

    def left(self, name: NodeId, message: w.WorkerLeft) -> None:
        """Note that a resident has parked."""
        placed = self._jobs[message.job].placed.get(name)
        if placed is not None and placed.worker == message.worker and placed.ticket is None:
            self.ended(message.job, name, message.cause)

    def start_trainer(self, job: JobId, ticket: w.WorkerTicketFrame) -> None:
        mine = self._jobs[job]
        mine.trainer, mine.trainer_died = ticket, False

    def trainer_ended(self, job: JobId, worker: str, cause: str, *, died: bool) -> None:
        """Note that the process of a trainer is gone. It has `died` if nobody wanted that."""
        mine = self._jobs[job]
        if mine.trainer is not None and mine.trainer.worker == worker:
            mine.trainer, mine.trainer_died = None, died
        self._ports.send_to_job(job, w.WorkerEnded(worker, cause))

    def forget(self, job: JobId) -> None:
        self._jobs[job] = JobWorkers()
