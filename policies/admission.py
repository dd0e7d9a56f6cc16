"""When a rollout may use a serving device: dual-SLO admission by temporal sharing. Source: ROSE §4.1, Eq. 1–2.

One model runs at a time, serving first. Before a rollout iteration is begun, the time that serving can spare
is computed from its queued prefills (TTFT) and active decodes (TPOT); an iteration that is profiled to take
longer must wait, or be cut smaller. An iteration cannot be interrupted, so that a request that comes the moment
after must be spared for, too: it waits for the iteration, and its prefill delays the decodes' next tokens.
"""

from enum import StrEnum
from itertools import accumulate

import msgspec

from elastic.core.device_sharing import ArrivingPrefill, QueuedPrefill, ServingView, Slo
from elastic.core.types import Nanoseconds

UNBOUNDED_NS: Nanoseconds = 2**62
"""More slack than any iteration needs."""


class Role(StrEnum):
    """The work of a serving instance. With disaggregation it has one of the first two roles (ROSE §4.3,
    "Extensions")."""

    PREFILLER = "prefiller"
    DECODER = "decoder"
    COLOCATED = "colocated"


def ttft_slack_ns(view: ServingView, budget_ns: Nanoseconds, subtract_ahead: bool = True) -> Nanoseconds:
    """The least slack among queued prefills (Eq. 1), of which one that may come now is the last.

    As printed, Eq. 1 lets every request count on a device of its own and so overestimates the slack in a burst:
    the prefills queued ahead of a request come out of its time too. `subtract_ahead=False` is the equation as
    printed.
    """
    queued = list(view.queued)
    if view.arriving.cost_ns:
        queued.append(QueuedPrefill(view.now_ns, view.arriving.cost_ns))
    costs = [request.cost_ns for request in queued]
    finished = accumulate(costs) if subtract_ahead else costs
    slacks = (
        request.arrival_ns + budget_ns - view.now_ns - done for request, done in zip(queued, finished, strict=True)
    )
    return min(slacks, default=UNBOUNDED_NS)


def tpot_slack_ns(view: ServingView, budget_ns: Nanoseconds) -> Nanoseconds:
    """The least slack among active decodes (Eq. 2), beside whose next tokens a prefill that may come now is done."""
    if not view.last_tokens_ns:
        return UNBOUNDED_NS
    return min(view.last_tokens_ns) + budget_ns - view.now_ns - view.decode_ns - view.arriving.next_ns


class SloAdmission(msgspec.Struct, frozen=True, kw_only=True):
    """Rollouts run while the smaller of the slacks that count covers them.

    `ttft` and `tpot` say which of the two targets is enforced; both is ROSE's Dual-SLO. A prefiller has no
    decodes and a decoder no prefills of serving, so that `role` leaves one slack out; colocated takes both.
    `longest_ns` bounds an iteration where there is slack without end. `arriving_share` is the most of each target
    that is kept for a request that may come meanwhile: none of it is ROSE, with all of it rollouts rest wherever the
    target could be missed without them, too.
    """

    slo: Slo
    longest_ns: Nanoseconds
    arriving_share: float = 0.75
    role: Role = Role.COLOCATED
    ttft: bool = True
    tpot: bool = True

    def __post_init__(self) -> None:
        if not 0 <= self.arriving_share <= 1:
            raise ValueError(f"arriving_share: must be in [0, 1] (found {self.arriving_share})")

    def allowance_ns(self, view: ServingView) -> Nanoseconds:
        view = msgspec.structs.replace(view, arriving=self._kept_for(view.arriving))
        slack_ns = UNBOUNDED_NS
        if self.ttft and self.role is not Role.DECODER:
            slack_ns = ttft_slack_ns(view, self.slo.ttft_ns)
        if self.tpot and self.role is not Role.PREFILLER:
            slack_ns = min(slack_ns, tpot_slack_ns(view, self.slo.tpot_ns))
        return min(slack_ns, self.longest_ns)

    def _kept_for(self, arriving: ArrivingPrefill) -> ArrivingPrefill:
        return ArrivingPrefill(
            min(arriving.cost_ns, int(self.arriving_share * self.slo.ttft_ns)),
            min(arriving.next_ns, int(self.arriving_share * self.slo.tpot_ns)),
        )


class NoAdmission(msgspec.Struct, frozen=True):
    """Both models run whenever they can."""

    def allowance_ns(self, view: ServingView) -> Nanoseconds:
        return UNBOUNDED_NS


class ExclusiveAdmission(msgspec.Struct, frozen=True, kw_only=True):
    """The device belongs to one model at a time: to rollouts only while serving has nothing at all to do."""

    def allowance_ns(self, view: ServingView) -> Nanoseconds:
        return 0 if view.busy else UNBOUNDED_NS
