"""What the pool's shell knows of residents and jobs' processes, besides the state of the cluster."""

import msgspec

from elastic import pool_wire as w
from elastic.cluster.types import JobId, NodeId, PhaseKind


class Resident(msgspec.Struct, kw_only=True):
    """A job's process on a node, as the keeper was told to start it or reports it.

    `worker` is the worker that it was lent as, or for a trainer, started as. `ticket` waits until the worker can be
    told.
    """

    placement: int
    up: bool = False
    ending: bool = False
    permit: int = 0
    worker: str = ""


class PoolNode(msgspec.Struct, kw_only=True):
    """A node's keeper. `given` is the last permit under which it was told to give out its device."""

    phase: PhaseKind
    connected: bool = False
    given: int = 0
    pid: int = 0
    residents: dict[JobId, Resident] = {}


class Yielding(msgspec.Struct, kw_only=True):
    """A permit whose devices are being taken back; with `tail` only its nodes outside of the tail."""

    permit: int
    finished: bool = False
    switch_ns: int = 0
    waiting: set[NodeId] = set()
    tail: bool = False


class LiveJob(msgspec.Struct, kw_only=True):
    """A job as the shell sees it.

    - `process`: the placement of its living process. `told_stop`, `told_kill`: whether that process was told so.
    - `wants`: the phases that it has asked for and was not granted since.
    - `lent`: by node, the worker that the resident works as, or will work as. `tickets`: tickets not yet delivered.
      `returning`: nodes where the worker is to end.
    - `trainer`: the ticket of the trainer that it wants or has.
    - `deaths`: deaths of its resident on a node in a row. `restarts`: restarts of its process in this placement.
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
    """Permits that the job was told of and has not yielded."""
    memory: dict[NodeId, int] = {}
    """The largest host memory measured of its residents."""
    progress: tuple[int, int, int] = (0, 0, 0)
