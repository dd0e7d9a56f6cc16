"""What a worker says, held against what can be true of it.

Types bound every field by itself (`protocol/wire.py`). Here is what depends on the run, on the worker and on what it
said before. Nothing here asks whether a plausible token is the right one: that harms the worker's own turns alone.
Pure: the caller brings the time, in seconds on any clock that only goes forward.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import msgspec
import numpy as np

from elastic.core.types import INTEGER_MAX, NS_PER_S, Account
from elastic.protocol import wire
from elastic.runtime.refusals import REASON_MAX

CLOCK_SLACK_S = 60.0
"""How far a worker's clock may be from ours before what it says of its time is a lie rather than a drift."""
DRIFT = 1e-3
"""Most by which a worker's clock may run faster than ours: ten times the drift of a bad quartz."""
BACKWARDS_NS = NS_PER_S
"""Most by which an account may shrink, since one reading is taken from two running threads."""
LINK_BYTES_PER_S = 100_000_000_000
"""Faster than any worker's link."""
TOKENS_PER_S_MAX = 1_000_000
"""More than any one worker decodes."""
WORDLESS_CHUNKS_MAX = 4
"""Most chunks without tokens in a frame for each turn that its worker has: how it begins and how it ends, and again."""
IDS_MAX = 1 << 31
"""More than any vocabulary has. Read without their sign, negative ids are no less."""

_OF_TRAINER = (wire.Trained, wire.Stepped, wire.PublishedFrame, wire.TrainerFailedFrame, wire.UpdateRefused)


class Implausible(wire.WireError):
    """A frame that cannot be true, or is not the worker's to send."""


class Bounds(msgspec.Struct, frozen=True, kw_only=True):
    """The most that a worker of this run can truthfully say. `trains` for the trainer's worker alone."""

    vocab_size: int = IDS_MAX
    capacity_turns: int = INTEGER_MAX
    trains: bool = False


def bounds_of(engine: Mapping[str, Any], model: Mapping[str, Any], *, trains: bool) -> Bounds:
    """`engine` and `model` as in `wire.Welcome`; what they leave open is not bounded. Nor is the credit of the
    trainer's worker: it is the run's own, and may be several such engines."""
    max_batch, max_pending = engine.get("max_batch"), engine.get("max_pending")
    if trains:
        max_batch = None
    return Bounds(
        vocab_size=vocabulary(model, IDS_MAX),
        capacity_turns=INTEGER_MAX if max_batch is None or max_pending is None else max_batch + max_pending,
        trains=trains,
    )


def vocabulary(model: Mapping[str, Any], unknown: int) -> int:
    """The size that a model's `config.json` says of its vocabulary, itself or in its nested text config."""
    nested = model.get("text_config")
    own = model.get("vocab_size")
    said = nested.get("vocab_size") if own is None and isinstance(nested, Mapping) else own
    return said if isinstance(said, int) else unknown


class _Reading(NamedTuple):
    """A worker's report on its work, and the time of its arrival."""

    at_s: float
    accounts_ns: Mapping[Account, int]
    decoded_tokens: int


class Claims:
    """One worker's frames, in the order in which they come."""

    def __init__(self, bounds: Bounds, served_bytes: Callable[[], int] | None = None) -> None:
        """`served_bytes`: how much the relay has served to all workers, if that is known."""
        self._bounds = bounds
        self._served_bytes = served_bytes
        self._began_s: float | None = None
        self._weights_s = 0.0
        self._weights_bytes = 0
        self._first: _Reading | None = None
        self._accounts_ns: Mapping[Account, int] = {}
        self._slots: set[int] = set()
        """Those of the turns that it was sent in this epoch, and has not ended."""
        self._newest = 0
        """The latest weights version that it may have."""
        self._checks: dict[type[Any], Callable[[Any, float], None]] = {
            wire.Ready: self._ready,
            wire.Tokens: self._tokens,
            wire.Heartbeat: self._heartbeat,
            wire.Goodbye: lambda m, now_s: self._work(_Reading(now_s, m.accounts_ns, m.decoded_tokens)),
        }

    def begin_epoch(self) -> None:
        """The worker has abandoned what it was sent before."""
        self._slots.clear()

    def ordered(self, order: wire.FromOrchestrator) -> None:
        """What the worker is told to do, it may speak of."""
        match order:
            case wire.Generate():
                self._slots.add(order.slot)
            case wire.PullWeights() | wire.UpdateFrame():
                self._newest = max(self._newest, order.version)
            case _:
                pass

    def check(self, message: wire.FromWorker, now_s: float) -> None:
        """Raises `Implausible`, whose message names what is wrong without its value."""
        if self._began_s is None:
            self._began_s = now_s
        if isinstance(message, _OF_TRAINER) and not self._bounds.trains:
            raise Implausible(f"{wire.kind_of(message)}, which only the trainer sends")
        check = self._checks.get(type(message))
        if check is not None:
            check(message, now_s)

    def doubt(self, report: wire.WeightsReport, now_s: float) -> str:
        """What of a report on weights cannot be, with those before; empty if it can. It says little of the weights
        themselves, so its sender may go on."""
        passed_s = now_s - (now_s if self._began_s is None else self._began_s)
        seconds = self._weights_s + max(report.pull_s + report.apply_s, sum(report.split_s.values()))
        size_bytes = self._weights_bytes + report.pulled_bytes
        served_bytes = LINK_BYTES_PER_S * (passed_s + CLOCK_SLACK_S)
        if self._served_bytes is not None:
            served_bytes = min(served_bytes, self._served_bytes())
        if seconds > passed_s * (1 + DRIFT) + CLOCK_SLACK_S:
            return "loaded weights for more time than has passed"
        if size_bytes > served_bytes:
            return "pulled more bytes of weights than the relay can have served"
        self._weights_s, self._weights_bytes = seconds, size_bytes
        return ""

    def _ready(self, ready: wire.Ready, _: float) -> None:
        if ready.weights_version is not None:
            self._newest = max(self._newest, ready.weights_version)
        if self._bounds.trains:
            return
        if ready.publisher:
            raise Implausible("a key that signs weights, which only the trainer has")
        if ready.groups or ready.slots:
            raise Implausible("groups that it was given, which only the trainer is")

    def _tokens(self, tokens: wire.Tokens, _: float) -> None:
        """Every token of a run comes through here. Positions are the core's to check: it knows what it asked for."""
        chunks = tokens.chunks
        if not self._slots.issuperset(chunks.slots):
            raise Implausible("tokens of a turn that it was not sent, or that it has ended")
        ids = np.frombuffer(tokens.token_ids, np.uint32)
        if len(chunks) > len(ids) + WORDLESS_CHUNKS_MAX * len(self._slots):
            raise Implausible("more chunks without tokens than its turns can have")
        if chunks.ends:
            last = {slot: place for place, slot in enumerate(chunks.slots)}
            if any(last[chunks.slots[end.place]] != end.place for end in chunks.ends):
                raise Implausible("tokens of a turn after its end")
            self._slots.difference_update([chunks.slots[end.place] for end in chunks.ends])
        if chunks.versions and max(chunks.versions)[0] > self._newest:
            raise Implausible("tokens of a weights version that it was never told to load")
        if len(ids) and np.maximum.reduce(ids) >= self._bounds.vocab_size:
            raise Implausible("token id outside the vocabulary")

    def _heartbeat(self, beat: wire.Heartbeat, now_s: float) -> None:
        if beat.capacity_turns > self._bounds.capacity_turns:
            raise Implausible("credit for more turns than its engine's settings allow")
        self._work(_Reading(now_s, beat.accounts_ns, beat.decoded_tokens))

    def _work(self, now: _Reading) -> None:
        """Check reported work. The worker alone knows its process's age, but that age grows at the normal rate."""
        first = self._first = self._first or now
        passed_s = (now.at_s - first.at_s) * (1 + DRIFT) + CLOCK_SLACK_S
        if _total_ns(now) - _total_ns(first) > passed_s * NS_PER_S:
            raise Implausible("accounts of more time than has passed")
        if any(ns - now.accounts_ns.get(account, 0) > BACKWARDS_NS for account, ns in self._accounts_ns.items()):
            raise Implausible("an account that goes backwards")
        if now.decoded_tokens - first.decoded_tokens > passed_s * TOKENS_PER_S_MAX:
            raise Implausible("more tokens than a worker can decode in the time")
        self._accounts_ns = now.accounts_ns


def without_figures(report: wire.WeightsReport) -> wire.WeightsReport:
    """What remains of a report whose figures cannot be."""
    return wire.WeightsReport(report.version, report.error[:REASON_MAX], 0, 0.0, 0.0, proof=report.proof)


def _total_ns(reading: _Reading) -> int:
    return sum(reading.accounts_ns.values())
