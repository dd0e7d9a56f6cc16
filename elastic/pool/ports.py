"""What the pool's shell needs of the world: live, in worlds of faults and in simulations it is the same shell."""

from typing import Literal, Protocol

import msgspec

from elastic import pool_wire as w
from elastic.cluster.types import JobId, Nanoseconds, NodeId, PhaseKind

HowEnded = Literal["finished", "stopped", "failed", "died"]


class JobEnding(msgspec.Struct, frozen=True):
    """How a job's process ended. Who `died` may be started again; who `failed` has judged so itself."""

    how: HowEnded
    cause: str = ""


class JobEntry(msgspec.Struct, frozen=True, kw_only=True):
    """What is kept of a submission besides its request. A job with a `script` is no run: it parks by itself."""

    job: JobId
    directory: str
    providers: tuple[str, ...] = ()
    script: tuple[str, ...] = ()
    phases: str = ""
    environment: dict[str, str] = {}
    max_restarts: int = 3


class DoneCommand(msgspec.Struct, frozen=True):
    """A command by its id, so that it is done once. `words` tell one command from another under the same id."""

    id: str
    words: str


class PoolTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of the shell's own waits, beside the cluster's."""

    silence_ns: Nanoseconds
    park_ns: Nanoseconds
    keeper_start_ns: Nanoseconds
    retry_base_ns: Nanoseconds = 1_000_000_000
    retry_max_ns: Nanoseconds = 30_000_000_000


class PoolPorts(Protocol):
    """Everything is told and not waited for; what becomes of it the shell hears by its own methods.

    `tell_keeper` and `tell_job` drop what is for nobody: who comes back says what it holds.
    """

    def now_ns(self) -> Nanoseconds:
        """Since the pool began; never less than before."""
        ...

    def append(self, record: bytes, entry: JobEntry | None = None, command: DoneCommand | None = None) -> None:
        """Have an entry of the journal, and what comes with it, durable before this returns."""
        ...

    def settled(self) -> None:
        """All that was fed has gone through the cluster; the next wake-up may be another one now."""
        ...

    def start_keeper(self, node: NodeId, phase: PhaseKind) -> None: ...

    def end_keeper(self, node: NodeId) -> None:
        """Kill the node's keeper and all that it has started."""
        ...

    def tell_keeper(self, node: NodeId, message: msgspec.Struct) -> None: ...

    def tell_job(self, job: JobId, message: msgspec.Struct) -> None: ...

    def cut_job(self, job: JobId) -> None:
        """End the job's session: its process is not believed any more."""
        ...

    def resident(
        self, entry: JobEntry, placement: int, node: NodeId, phase: PhaseKind, ticket: w.WorkerTicketFrame | None
    ) -> w.StartResidentFrame:
        """How the job's resident is started: for rollouts, the trainer of this `ticket`, or the script itself."""
        ...

    def start_job(self, entry: JobEntry, placement: int, restarts: int) -> None:
        """Start the job's process; `PoolShell.job_ended` follows some time."""
        ...

    def stop_job(self, job: JobId, reason: str) -> None:
        """Have the job's process stop at its step's end; said until it has ended."""
        ...

    def kill_job(self, job: JobId) -> None: ...

    def profile(self, entry: JobEntry) -> None:
        """Time a few steps of the job alone; `PoolShell.profiled` or `not_profiled` follows."""
        ...

    def end_profile(self, job: JobId) -> None: ...
