"""A pool as one job sees it: it does what it is told as `elastic.pool.messages` says, and what it is made to do."""

import asyncio
from collections.abc import Callable

import msgspec

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
        self.offered: dict[str, w.WorkerTicketFrame] = {}
        self.slices: dict[str, str] = {}
        """By node, the worker that works there under a permit."""
        self.trainer = ""
        self.permit_numbers = 0
        self.heard: list[w.FromJob] = []
        self.lent: Callable[[str, w.WorkerTicketFrame], None] = lambda node, ticket: None
        """Called when a worker begins, and `freed` when it has ended."""
        self.freed: Callable[[str], None] = lambda worker: None
        self.left_s = 600.0
        self._spent: set[str] = set()

    def welcome(self) -> w.JobWelcome:
        self.offered.clear()
        return w.JobWelcome(
            rollout_nodes=self.nodes[ROLLOUT],
            train_nodes=self.nodes[TRAIN],
            rollout_usd_per_gpu_hour=1.85,
            train_usd_per_gpu_hour=5.28,
            gpus_per_rollout_node=1,
            gpus_per_train_node=2,
            grant_within_s=120.0,
            permits=tuple(self._grant_of(permit) for permit in self.permits),
            trainer=self.trainer,
        )

    def hear(self, message: w.FromJob) -> None:
        self.heard.append(message)
        match message:
            case w.AskPhase(phase=phase):
                if all(held.phase is not phase for held in self.permits.values()):
                    self.asked.add(phase)
            case w.WithdrawPhase(phase=phase):
                self.asked.discard(phase)
            case w.OfferWorker(ticket=ticket):
                if ticket.worker not in self.slices.values():
                    self.offered[ticket.worker] = ticket
                for permit in self.permits:
                    self._place(permit)
            case w.EndWorker(worker=worker):
                self._end_worker(worker)
            case w.YieldPhase(permit=permit):
                self._end(permit, "")
            case w.TailLeft(permit=permit):
                pass
            case w.StartTrainer(ticket=ticket) if self.trainer != ticket.worker:
                if self.trainer or ticket.worker in self._spent:
                    self.send(w.WorkerEnded(ticket.worker, "it was not let in"))
                else:
                    self._spent.add(ticket.worker)
                    self.trainer = ticket.worker
            case _:
                pass

    def grant(self, phase: PhaseKind, nodes: tuple[str, ...] = ()) -> int:
        """Also unasked for: the job may have withdrawn it meanwhile."""
        self.asked.discard(phase)
        self.permit_numbers += 1
        held = w.Granted(self.permit_numbers, phase, nodes or self.nodes[phase], self.left_s)
        self.permits[held.permit] = held
        if not self._place(held.permit):
            self.send(held)
        return held.permit

    def recall(self, permit: int, left_s: float = 5.0) -> None:
        self.permits[permit] = msgspec.structs.replace(self.permits[permit], left_s=left_s, recalled=True)
        self.send(self._grant_of(permit))

    def take(self, permit: int, cause: str = "it was not yielded in time") -> None:
        if self._end(permit, cause):
            self.send(w.PermitOver(permit, cause))

    def park(self, node: str, cause: str = "") -> None:
        worker = self.slices.pop(node, None)
        if worker is not None:
            self.freed(worker)
            self.send(w.WorkerEnded(worker, cause))

    def lose_trainer(self, cause: str) -> None:
        worker, self.trainer = self.trainer, ""
        self.freed(worker)
        self.send(w.WorkerEnded(worker, cause))

    def _end_worker(self, worker: str) -> None:
        node = next((node for node, there in self.slices.items() if there == worker), None)
        if node is not None:
            self.park(node)
        elif worker == self.trainer:
            self.lose_trainer("")
        elif self.offered.pop(worker, None) is None:
            self.send(w.WorkerEnded(worker))

    def _grant_of(self, permit: int) -> w.Granted:
        held = self.permits[permit]
        there = {node: worker for node, worker in self.slices.items() if node in held.nodes}
        return msgspec.structs.replace(held, workers=there)

    def _place(self, permit: int) -> bool:
        """Have residents work as the workers that are offered; the job hears of it before they do."""
        held, begun = self.permits[permit], dict[str, w.WorkerTicketFrame]()
        free = [node for node in held.nodes if node not in self.slices]
        for node in free if held.phase is ROLLOUT and not held.recalled else ():
            if self.offered:
                ticket = begun[node] = self.offered.pop(next(iter(self.offered)))
                self.slices[node] = ticket.worker
        if begun:
            self.send(self._grant_of(permit))
        for node, ticket in begun.items():
            if ticket.worker in self._spent:
                self.park(node, "it was not let in")
            else:
                self._spent.add(ticket.worker)
                self.lent(node, ticket)
        return bool(begun)

    def _end(self, permit: int, cause: str) -> bool:
        held = self.permits.pop(permit, None)
        for node in () if held is None or held.phase is TRAIN else held.nodes:
            if (worker := self.slices.pop(node, None)) is not None:
                self.freed(worker)
        return held is not None
