"""What the pool's shell knows of nodes' residents and of jobs' processes, besides what the cluster remembers."""

import msgspec

from elastic import pool_wire as w
from elastic.cluster.types import JobId, NodeId, PhaseKind


class Resident(msgspec.Struct, kw_only=True):
    """A job's process on a node, as its keeper was told to start it or says that it is.

    `worker` is what it was lent as; for a trainer, what it was started as. `ticket` waits until the worker can be told.
    """

    placement: int
    up: bool = False
    ending: bool = False
    permit: int = 0
    worker: str = ""


class PoolNode(msgspec.Struct, kw_only=True):
    """A node's keeper. `given` is the last permit under which it was told to give its device out."""

    phase: PhaseKind
    connected: bool = False
    given: int = 0
    pid: int = 0
    residents: dict[JobId, Resident] = {}


class Yielding(msgspec.Struct, kw_only=True):
    """A permit, or with `tail` its nodes beyond the tail, whose devices are being taken back."""

    permit: int
    finished: bool = False
    switch_ns: int = 0
    waiting: set[NodeId] = set()
    tail: bool = False


class LiveJob(msgspec.Struct, kw_only=True):
    """A job as the shell sees it.

    - `process`: the placement of the process that there is; `told_stop`, `told_kill`: of it, once.
    - `wants`: the phases that it has asked for and was not granted since.
    - `lent`: by node, the worker that its resident works as, or is to work as; `tickets`: those not told yet;
      `returning`: where it is to end.
    - `trainer`: the ticket of the trainer that it wants, or has.
    - `deaths`: how often in a row its resident on a node has died; `restarts`: its process, in this placement.
    """

    process: int | None = None
    connected: bool = False
    told_stop: bool = False
    told_kill: bool = False
    restarts: int = 0
    wants: set[PhaseKind] = set()
    yielding: Yielding | None = None
    leaving: Yielding | None = None
    lent: dict[NodeId, str] = {}
    tickets: dict[NodeId, w.WorkerTicketFrame] = {}
    returning: set[NodeId] = set()
    trainer: w.WorkerTicketFrame | None = None
    deaths: dict[NodeId, int] = {}
    known: set[int] = set()
    """Permits that it was told of and has not yielded."""
    memory: dict[NodeId, int] = {}
    """The most that its residents were seen to hold."""
    progress: tuple[int, int, int] = (0, 0, 0)
