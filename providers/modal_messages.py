"""What a run and its rollout workers' containers on Modal tell each other. All of it is msgpack.

A call brings its container an order, with a ticket. Containers speak through the run's queue: each says that it began,
and asks once its worker has ended otherwise than in order, for Modal starts a preempted input again, and then the
ticket is spent. The answer waits for a container in a partition of its own.
"""

from collections.abc import Mapping

import msgspec

from elastic.core.types import LeaseId


class RolloutOrder(msgspec.Struct, frozen=True, kw_only=True):
    """A worker is to be started: `command` with a container's own interpreter, in this `environment` besides.

    Who asks for another ticket waits for it for `ask_s`.
    """

    lease: LeaseId
    queue: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    ask_s: float


class ContainerSays(msgspec.Struct, frozen=True, kw_only=True):
    """A container has begun or, if it `asks`, its worker has ended with this `status`, a signal's where negative."""

    call: str
    container: str
    lease: LeaseId
    asks: bool = False
    status: int = 0


class NewTicket(msgspec.Struct, frozen=True, kw_only=True):
    """Another lease's environment; without one the container ends."""

    lease: LeaseId = ""
    environment: Mapping[str, str] = {}


class RolloutEnd(msgspec.Struct, frozen=True, kw_only=True):
    """How a container's last worker ended."""

    status: int
