"""What a serving device asks of the policies by which rollouts share it, and the views on which they decide.

Policies are pure: no I/O, no clock, no memory of their own. Source: ROSE §4.1.
"""

from collections.abc import Sequence
from typing import Protocol

import msgspec

from elastic.core.types import Nanoseconds


class Slo(msgspec.Struct, frozen=True, kw_only=True):
    """Serving's latency targets: time to first token, and time per output token."""

    ttft_ns: Nanoseconds
    tpot_ns: Nanoseconds


class QueuedPrefill(msgspec.Struct, frozen=True, gc=False):
    """A request without a first token. `cost_ns` is what is left of its prefill, as profiled for its mode
    (monolithic or chunked), with the decode steps that share its iterations."""

    arrival_ns: Nanoseconds
    cost_ns: Nanoseconds


class ArrivingPrefill(msgspec.Struct, frozen=True, gc=False):
    """A request that may arrive during a rollout iteration, with the burst that it may end.

    `cost_ns` is the cost of all of that prefill, `next_ns` the part that would share serving's next iteration.
    """

    cost_ns: Nanoseconds = 0
    next_ns: Nanoseconds = 0


class ServingView(msgspec.Struct, frozen=True, kw_only=True):
    """The pending work of serving on this device. `queued` is in the order of execution."""

    now_ns: Nanoseconds
    queued: Sequence[QueuedPrefill] = ()
    last_tokens_ns: Sequence[Nanoseconds] = ()
    """When each active decode produced its most recent token."""
    decode_ns: Nanoseconds = 0
    """The time of the next iteration of these decodes, with the queued prefills that share it."""
    arriving: ArrivingPrefill = ArrivingPrefill()

    @property
    def busy(self) -> bool:
        return bool(self.queued or self.last_tokens_ns)


class AdmissionPolicy(Protocol):
    def allowance_ns(self, view: ServingView) -> Nanoseconds:
        """The longest rollout iteration that may begin now; none may where it is not positive."""
        ...


class Budget(msgspec.Struct, frozen=True, kw_only=True):
    """What rollouts may hold until the next observation.

    `pages` is the most that they may have mapped: what is above must be given back now, request by request.
    `serving_pages` is the most that serving may have mapped. `reserve_pages` must stay unmapped when rollouts
    take another page. `expected_pages` is the serving use on which `pages` was based.
    """

    pages: int
    serving_pages: int
    reserve_pages: int = 0
    expected_pages: int = 0
    pressure: bool = False
    cuts: int = 0


class MemoryPolicy(Protocol):
    @property
    def lease_ns(self) -> Nanoseconds:
        """How long a page of rollout prefix cache is kept after its last use."""
        ...

    def begin_step(self, total_pages: int, recent_pages: Sequence[int]) -> Budget:
        """The budget of a new step, from samples of serving's use since the last (oldest first)."""
        ...

    def observe(self, budget: Budget, total_pages: int, serving_pages: int, needed_pages: int) -> Budget:
        """The budget now that serving uses `serving_pages`. `needed_pages` is zero, or how many more it is about to
        map although not so many are free."""
        ...


class SharingPolicies(msgspec.Struct, frozen=True, kw_only=True):
    """The policies by which rollouts share one serving device: when they may compute, and how much memory they have."""

    admission: AdmissionPolicy
    memory: MemoryPolicy
