"""Several engines on a trainer's devices, as one: they share its turns while it does not train.

Each has devices of its own, as many as its model is split over. Source: RLBoost §4.1, N_resv.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import msgspec

from elastic.config import EngineConfig, validate
from elastic.core.types import Account, Capabilities, Nanoseconds, WeightMode
from elastic.engine import create_engine, resolve_engine
from elastic.engine.base import ChunkSink, EngineStatistics, GenerateRequest, RolloutEngine, TokenChunk
from elastic.engine.meter import AccountMeter
from elastic.protocol import wire
from elastic.system.host import here
from elastic.weights.source import PullReport, RelaySource, WeightsSource

T = TypeVar("T")


class SeveralEngines:
    """`elastic.engine.base.RolloutEngine`. A turn goes to the engine that has the fewest as it comes."""

    def __init__(self, engines: Sequence[RolloutEngine]) -> None:
        self._engines = engines
        self._lock = here().lock()
        self._emitting = here().lock()
        self._looking = here().lock()
        self._places: dict[str, int] = {}
        """The engine of each turn that is alive."""
        self._meter = AccountMeter(here().monotonic_ns(), Account.IDLE)
        began = [engine.statistics() for engine in engines]
        self._seen_ns = [one.accounts_ns for one in began]
        self._progress = [one.progress for one in began]
        """Each engine's progress as this round began. The round ends once all that execute turns have made progress."""
        self._rounds = 0

    @property
    def capabilities(self) -> Capabilities:
        each = [engine.capabilities for engine in self._engines]
        batches = [one.max_batch for one in each if one.max_batch is not None]
        return msgspec.structs.replace(each[0], max_batch=sum(batches) if len(batches) == len(each) else None)

    def start(self, sink: ChunkSink) -> None:
        def take(chunks: Sequence[TokenChunk]) -> None:
            with self._lock:
                for chunk in chunks:
                    if chunk.finish is not None:
                        self._places.pop(chunk.request_id, None)
            with self._emitting:  # As if they came from one engine's thread.
                sink(chunks)

        for engine in self._engines:
            engine.start(take)

    def submit(self, requests: Sequence[GenerateRequest]) -> None:
        open_ = [place for place, engine in enumerate(self._engines) if engine.statistics().capacity_turns]
        with self._lock:
            counts = Counter(self._places.values())
            for request in requests:
                if request.request_id not in self._places:
                    place = min(open_ or range(len(self._engines)), key=lambda one: counts[one])
                    self._places[request.request_id] = place
                    counts[place] += 1
            given = self._by_place([request.request_id for request in requests])
        of = {request.request_id: request for request in requests}
        for place, names in given.items():
            self._engines[place].submit([of[name] for name in names])

    def abort(self, request_ids: Sequence[str]) -> None:
        with self._lock:
            given = self._by_place(request_ids)
        for place, names in given.items():
            self._engines[place].abort(names)

    def prefetch(self, source: RelaySource, timeout_s: float) -> PullReport:
        return PullReport.of_ranks(self._all(lambda engine: engine.prefetch(source, timeout_s)))

    def load_version(self, source: WeightsSource, mode: WeightMode) -> float:
        return max(self._all(lambda engine: engine.load_version(source, mode)))

    def audit(self) -> bool:
        return all(self._all(lambda engine: engine.audit()))

    def sleep(self) -> None:
        self._all(lambda engine: engine.sleep())

    def wake(self) -> None:
        self._all(lambda engine: engine.wake())

    def set_idle_account(self, account: Account) -> None:
        for engine in self._engines:
            engine.set_idle_account(account)

    def statistics(self) -> EngineStatistics:
        """Raises what the statistics of any engine raise."""
        with self._looking:
            each = [engine.statistics() for engine in self._engines]
            accounts_ns = self._booked([one.accounts_ns for one in each])
            self._note_progress(each)
            rounds = self._rounds
        held = [one.weights_version for one in each if one.weights_version is not None]
        return EngineStatistics(
            pending=sum(one.pending for one in each),
            executing=sum(one.executing for one in each),
            capacity_turns=sum(one.capacity_turns for one in each),
            kv_blocks_used=sum(one.kv_blocks_used for one in each),
            kv_blocks_total=sum(one.kv_blocks_total for one in each),
            prefix_hit_tokens=sum(one.prefix_hit_tokens for one in each),
            prompt_tokens=sum(one.prompt_tokens for one in each),
            decoded_tokens=sum(one.decoded_tokens for one in each),
            progress=rounds,
            accounts_ns=accounts_ns,
            # One that was started again, and has no weights yet, is not hidden by the others.
            weights_version=min(held) if len(held) == len(each) else None,
            asleep=all(one.asleep for one in each),
            waits_to_apply=any(one.waits_to_apply for one in each),
            load_progress=sum(one.load_progress for one in each),
            received_bytes=sum(one.received_bytes for one in each),
            paced_iterations=sum(one.paced_iterations for one in each),
            late_iterations=sum(one.late_iterations for one in each),
        )

    def close(self) -> None:
        self._all(lambda engine: engine.close())

    def _by_place(self, request_ids: Sequence[str]) -> dict[int, list[str]]:
        given: dict[int, list[str]] = {}
        for name in request_ids:
            if (place := self._places.get(name)) is not None:
                given.setdefault(place, []).append(name)
        return given

    def _booked(self, accounts_ns: Sequence[Mapping[Account, Nanoseconds]]) -> dict[Account, Nanoseconds]:
        """This worker's time by account: what passed since the last look is divided as its engines' time was."""
        spent: Counter[Account] = Counter()
        for now, before in zip(accounts_ns, self._seen_ns, strict=True):
            spent.update({account: ns - before.get(account, 0) for account, ns in now.items()})
        self._seen_ns = [*accounts_ns]
        now_ns = here().monotonic_ns()
        if costs := {account: float(ns) for account, ns in spent.items() if ns > 0}:
            self._meter.settle(now_ns, costs)
        return self._meter.read(now_ns)

    def _note_progress(self, each: Sequence[EngineStatistics]) -> None:
        pairs = list(zip(each, self._progress, strict=True))
        moved = [now.progress != before for now, before in pairs]
        if any(moved) and all(came or not now.executing for came, (now, _) in zip(moved, pairs, strict=True)):
            self._progress = [now.progress for now in each]
            self._rounds += 1

    def _all(self, work: Callable[[RolloutEngine], T]) -> list[T]:
        """Done by all engines at the same time, beside whatever else is: an audit or a pull takes long. Raises the
        first error once all are through."""
        with here().executor(len(self._engines), "seeding") as threads:
            under_way = [threads.submit(work, engine) for engine in self._engines]
        return [one.result() for one in under_way]


def several_engines(number: int) -> Callable[[wire.Welcome], RolloutEngine]:
    """How the engines that the orchestrator asks for are built (`elastic.worker.agent.build_engine`), so many, each
    with its own of the devices of this process."""

    def build(welcome: wire.Welcome) -> RolloutEngine:
        config = validate(EngineConfig, welcome.engine, "the orchestrator's welcome")
        ranks = resolve_engine(config, "the orchestrator's welcome")[1].ranks
        shares = [range(place * ranks, (place + 1) * ranks) for place in range(number)]
        with here().executor(number, "building") as threads:
            built = [threads.submit(create_engine, welcome.model, config, None, devices) for devices in shares]
        try:
            return SeveralEngines([one.result() for one in built])
        except BaseException:
            for one in built:
                if one.exception() is None:
                    one.result().close()
            raise

    return build
