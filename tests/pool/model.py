"""A pool as one job sees it: it does what it is told as `elastic.pool.messages` says, and what it is made to do."""

import asyncio
from collections.abc import Callable

from elastic.core.cluster.types import PhaseKind
from elastic.pool import messages as w
from elastic.pool.connection import FROM_DIALLER, FromDialler, PoolLink
from elastic.protocol.admission import listen
from elastic.protocol.connection import Connection
from elastic.protocol.tls import TlsServer

ROLLOUT, TRAIN = PhaseKind.ROLLOUT, PhaseKind.TRAIN


async def listen_as_pool(
    connected: Callable[[PoolLink[FromDialler]], None], port: int = 0
) -> asyncio.Server | TlsServer:
    """Pass every connection to `connected`, whoever dials."""
    return await listen("127.0.0.1", port, None, lambda: Connection(FROM_DIALLER, "who dialled", connected))


class JobsPool:
    """`send` gets what the job is to hear. A worker's token is spent by its first use."""

    def __init__(self, send: Callable[[w.ToJob], None], nodes: tuple[str, ...] = ("node-1", "node-2")) -> None:
        self.send = send
        self.nodes = {ROLLOUT: nodes, TRAIN: ("train-1",)}
        self.asked: set[PhaseKind] = set()
        self.permits: dict[int, w.Granted] = {}
        self.slices: dict[str, str] = {}
        self.trainer = ""
        self.permit_numbers = 0
        self.heard: list[w.FromJob] = []
        self.lent: Callable[[str, w.WorkerTicketFrame], None] = lambda node, ticket: None
        """Called when a worker begins, and `freed` when it has ended."""
        self.freed: Callable[[str], None] = lambda worker: None
        self.left_s = 600.0
        self._spent: set[str] = set()

    def welcome(self) -> w.JobWelcome:
        return w.JobWelcome(
            rollout_nodes=self.nodes[ROLLOUT],
            train_nodes=self.nodes[TRAIN],
            rollout_usd_per_gpu_hour=1.85,
            train_usd_per_gpu_hour=5.28,
            gpus_per_rollout_node=1,
            gpus_per_train_node=2,
            grant_within_s=120.0,
            permits=tuple(self.permits.values()),
            trainer=self.trainer,
            slices=dict(self.slices),
        )

    def hear(self, message: w.FromJob) -> None:
        self.heard.append(message)
        match message:
            case w.AskPhase(phase=phase):
                if all(held.phase is not phase for held in self.permits.values()):
                    self.asked.add(phase)
            case w.WithdrawPhase(phase=phase):
                self.asked.discard(phase)
            case w.LendSlice(permit=permit, node=node, ticket=ticket):
                self._lend(permit, node, ticket)
            case w.ReturnSlice(node=node):
                self.park(node)
            case w.YieldPhase(permit=permit):
                self._end(permit, "")
            case w.TailLeft(permit=permit):
                pass
            case w.StartTrainer(ticket=ticket) if self.trainer != ticket.worker:
                if self.trainer or ticket.worker in self._spent:
                    self.send(w.TrainerEnded(ticket.worker, "it was not let in"))
                else:
                    self._spent.add(ticket.worker)
                    self.trainer = ticket.worker
            case w.EndTrainer(worker=worker) if worker == self.trainer:
                self.lose_trainer("")
            case _:
                pass

    def grant(self, phase: PhaseKind, nodes: tuple[str, ...] = ()) -> int:
        """Also unasked for: the job may have withdrawn it meanwhile."""
        self.asked.discard(phase)
        self.permit_numbers += 1
        held = w.Granted(self.permit_numbers, phase, nodes or self.nodes[phase], self.left_s)
        self.permits[held.permit] = held
        self.send(held)
        return held.permit

    def recall(self, permit: int, left_s: float = 5.0) -> None:
        held = self.permits[permit]
        self.permits[permit] = w.Granted(held.permit, held.phase, held.nodes, left_s, recalled=True)
        self.send(w.Recalled(permit, left_s))

    def take(self, permit: int, cause: str = "it was not yielded in time") -> None:
        if self._end(permit, cause):
            self.send(w.PermitOver(permit, cause))

    def park(self, node: str, cause: str = "") -> None:
        worker = self.slices.pop(node, None)
        if worker is not None:
            self.freed(worker)
            permit = next((x.permit for x in self.permits.values() if node in x.nodes), 0)
            self.send(w.SliceParked(permit, node, worker, cause=cause))

    def lose_trainer(self, cause: str) -> None:
        worker, self.trainer = self.trainer, ""
        self.freed(worker)
        self.send(w.TrainerEnded(worker, cause))

    def _lend(self, permit: int, node: str, ticket: w.WorkerTicketFrame) -> None:
        held = self.permits.get(permit)
        if self.slices.get(node) == ticket.worker:
            return
        if held is None or node not in held.nodes or node in self.slices or ticket.worker in self._spent:
            self.send(w.SliceParked(permit, node, ticket.worker, cause="nothing to lend"))
            return
        self._spent.add(ticket.worker)
        self.slices[node] = ticket.worker
        self.lent(node, ticket)

    def _end(self, permit: int, cause: str) -> bool:
        held = self.permits.pop(permit, None)
        for node in () if held is None or held.phase is TRAIN else held.nodes:
            if (worker := self.slices.pop(node, None)) is not None:
                self.freed(worker)
        return held is not None
