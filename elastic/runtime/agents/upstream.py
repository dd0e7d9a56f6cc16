"""What agents' calls of models elsewhere may come to, and what they have: a run's account of its upstream. Pure.

A front asks leave before it calls, and says afterwards what the call has come to.

- Beyond `calls_max` calls, or what `usd_max` can pay for, there is no leave.
- A call that is open counts as the dearest that it can be. So what calls cost stays below the bound, whichever process
  dies meanwhile: a call of which nobody says what it came to has cost that.
- Nothing that is said twice, or too late, counts.
"""

import math
from dataclasses import dataclass, field
from typing import TypeAlias

from elastic.core.ledger import NANO_USD_PER_USD
from elastic.core.types import NS_PER_S, Nanoseconds, TrajectoryId
from elastic.protocol.front_messages import AskUpstream, UpstreamOver
from elastic.runtime.agents import notes
from elastic.runtime.agents.refusals import CallRefused
from elastic.runtime.status import UpstreamModelStatus, UpstreamStatus
from functions.base import Call, CallOutcome

FUNCTION = "upstream {}"
"""What calls of a model are called among metered calls."""
LATE_S = 30.0
"""How long after its time an open call may still be told of, for instance once its front has found the run again."""

MODELS_MAX = 32
OTHERS = "(others)"
"""More models than so many are not told apart."""
GATEWAY_TIMEOUT = 504

UpstreamNote: TypeAlias = notes.UpstreamAsked | notes.UpstreamTold | notes.UpstreamCarried


@dataclass(frozen=True, slots=True, kw_only=True)
class UpstreamBounds:
    """Bounds of all calls of a run together; `usd_max` is None where money has no bound."""

    calls_max: int
    usd_max: float | None
    concurrency: int
    timeout_s: float
    context_tokens: int
    usd_per_million_in: float
    usd_per_million_out: float

    def most(self, tokens: int | None) -> int:
        """How many tokens there can be of what a call bounds to `tokens`, or does not bound."""
        return self.context_tokens if tokens is None else min(tokens, self.context_tokens)

    def nano_usd(self, prompt_tokens: int, answer_tokens: int) -> int:
        """What so many tokens cost, rounded up."""
        micro_usd = prompt_tokens * self.usd_per_million_in + answer_tokens * self.usd_per_million_out
        return math.ceil(micro_usd * 1000)


@dataclass(slots=True)
class UpstreamUse:
    """What calls of one model have come to. Tokens are those that the upstream has told; `bounded` calls, of which it
    is not known what they came to, cost the most that they could."""

    calls: int = 0
    failed: int = 0
    bounded: int = 0
    prompt_tokens: int = 0
    answer_tokens: int = 0
    nano_usd: int = 0
    duration_s: float = 0.0

    def add(self, told: notes.UpstreamTold) -> None:
        self.calls += 1
        self.failed += told.status >= 400
        self.bounded += told.prompt_tokens is None
        self.prompt_tokens += told.prompt_tokens or 0
        self.answer_tokens += told.answer_tokens or 0
        self.nano_usd += told.nano_usd
        self.duration_s += told.duration_s


@dataclass(slots=True)
class UpstreamAccount:
    """All calls of a run's upstream. `granted` counts leaves, `open` has those of which nobody has said how they
    ended."""

    granted: int = 0
    returned: int = 0
    """Leaves that were not used."""
    open: dict[int, notes.UpstreamAsked] = field(default_factory=dict[int, notes.UpstreamAsked])
    used: dict[str, UpstreamUse] = field(default_factory=dict[str, UpstreamUse])
    """By model."""
    spent_nano_usd: int = 0

    @property
    def calls(self) -> int:
        return self.granted - self.returned

    def named(self, model: str) -> str:
        """Under what a model's calls are counted."""
        return model if model in self.used or len(self.used) < MODELS_MAX else OTHERS

    @property
    def held_nano_usd(self) -> int:
        """What open calls may cost at the most."""
        return sum(call.nano_usd for call in self.open.values())

    def leave(
        self, ask: AskUpstream, trajectory: TrajectoryId, bounds: UpstreamBounds, now_ns: Nanoseconds
    ) -> notes.UpstreamAsked | None:
        """The leave that a call gets now; None where it has to wait for others to end.

        Raises `CallRefused` where waiting would not help.
        """
        if self.calls >= bounds.calls_max:
            said = f"the run has made its {bounds.calls_max} calls of the upstream (front.upstream_calls_max)"
            raise CallRefused(429, "upstream_calls_max", said, retry=False)
        prompt_tokens = bounds.most(ask.prompt_tokens)
        answer_tokens = bounds.most(ask.answer_tokens) * ask.choices
        nano_usd = bounds.nano_usd(prompt_tokens, answer_tokens)
        if bounds.usd_max is not None:
            left_nano_usd = math.floor(bounds.usd_max * NANO_USD_PER_USD) - self.spent_nano_usd - nano_usd
            if left_nano_usd < 0:
                said = (
                    f"the run may spend ${bounds.usd_max:g} on its upstream (front.upstream_usd_max), and has spent "
                    f"${self.spent_nano_usd / NANO_USD_PER_USD:.6f}; this call may cost "
                    f"${nano_usd / NANO_USD_PER_USD:.6f}: {prompt_tokens} tokens of prompt and {answer_tokens} of "
                    "answer, which a lower max_tokens would bound"
                )
                raise CallRefused(402, "upstream_usd_max", said, retry=False)
            if left_nano_usd < self.held_nano_usd:
                return None
        if len(self.open) >= bounds.concurrency:
            return None
        return notes.UpstreamAsked(
            call=self.granted,
            model=ask.model,
            route=ask.route,
            trajectory=trajectory,
            driver=ask.caller.driver,
            prompt_tokens=prompt_tokens,
            answer_tokens=answer_tokens,
            nano_usd=nano_usd,
            at_ns=now_ns,
        )

    def told(self, over: UpstreamOver, bounds: UpstreamBounds) -> notes.UpstreamTold | None:
        """What a call that is over has come to; None where that is known already. More tokens than a context has are
        not believed: the call is taken for the dearest that it can have been."""
        call = self.open.get(over.call)
        if call is None:
            return None
        prompt_tokens, answer_tokens = over.prompt_tokens, over.answer_tokens
        most = max(call.answer_tokens, bounds.context_tokens)
        if prompt_tokens is None or answer_tokens is None or max(prompt_tokens, answer_tokens) > most:
            return notes.UpstreamTold(over.call, over.status, None, None, call.nano_usd, over.duration_s)
        nano_usd = bounds.nano_usd(prompt_tokens, answer_tokens)
        return notes.UpstreamTold(over.call, over.status, prompt_tokens, answer_tokens, nano_usd, over.duration_s)

    def given_up(self, call: int, now_ns: Nanoseconds) -> notes.UpstreamTold | None:
        """What a call has come to of which nobody will say so."""
        asked = self.open.get(call)
        if asked is None:
            return None
        return notes.UpstreamTold(call, GATEWAY_TIMEOUT, None, None, asked.nano_usd, (now_ns - asked.at_ns) / NS_PER_S)

    def overdue(self, bounds: UpstreamBounds, now_ns: Nanoseconds) -> list[int]:
        """Open calls of which nobody will say any more how they ended."""
        most_ns = round((bounds.timeout_s + LATE_S) * NS_PER_S)
        return [number for number, call in self.open.items() if now_ns - call.at_ns > most_ns]

    @property
    def trajectories(self) -> set[TrajectoryId]:
        """Those that have an open call."""
        return {call.trajectory for call in self.open.values()}

    def carried(self) -> notes.UpstreamCarried:
        """What the run's next incarnation is told that goes on from none: what is open has cost the most it can."""
        return notes.UpstreamCarried(self.granted, self.returned, self.spent_nano_usd + self.held_nano_usd)

    def status(self, bounds: UpstreamBounds) -> UpstreamStatus:
        models = {
            model: UpstreamModelStatus(
                calls=use.calls,
                failed=use.failed,
                bounded=use.bounded,
                prompt_tokens=use.prompt_tokens,
                answer_tokens=use.answer_tokens,
                duration_s=use.duration_s,
                usd=use.nano_usd / NANO_USD_PER_USD,
            )
            for model, use in sorted(self.used.items())
        }
        return UpstreamStatus(
            calls=self.calls,
            calls_max=bounds.calls_max,
            open=len(self.open),
            usd=self.spent_nano_usd / NANO_USD_PER_USD,
            held_usd=self.held_nano_usd / NANO_USD_PER_USD,
            usd_max=bounds.usd_max,
            models=models,
        )

    def apply(self, note: UpstreamNote) -> None:
        match note:
            case notes.UpstreamAsked():
                self.open[note.call] = note
                self.granted = max(self.granted, note.call + 1)
            case notes.UpstreamTold():
                asked = self.open.pop(note.call, None)
                if note.status == 0:
                    self.returned += 1
                    return
                model = OTHERS if asked is None else self.named(asked.model)
                self.used.setdefault(model, UpstreamUse()).add(note)
                self.spent_nano_usd += note.nano_usd
            case notes.UpstreamCarried():
                self.granted, self.returned = note.granted, note.returned
                self.spent_nano_usd = note.nano_usd


def call_of(model: str, asked: notes.UpstreamAsked, told: notes.UpstreamTold) -> Call:
    """The call as it is billed, among those of `model`."""
    outcome = CallOutcome.OK
    if told.status >= 400:
        known = {502: CallOutcome.UNAVAILABLE, GATEWAY_TIMEOUT: CallOutcome.TIMED_OUT}
        outcome = known.get(told.status, CallOutcome.RAISED)
    return Call(
        function=FUNCTION.format(model),
        key=asked.trajectory or asked.driver,
        outcome=outcome,
        queued_s=0.0,
        cold_start_s=0.0,
        duration_s=told.duration_s,
        usd=told.nano_usd / NANO_USD_PER_USD,
    )
