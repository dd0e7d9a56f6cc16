"""Drives an engine through its contract, one load after the other, and takes the time of its iterations.

Prefills run alone, one prompt that nothing is cached of at a time; decodes in full batches, of which only the
iterations count in which every sequence decodes. Everything is done several times over, in turns, so that what
disturbs the machine for a while disturbs all of it alike, and the medians count.
"""

import random
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from elastic.config import EngineConfig
from elastic.core.types import NS_PER_S, Account, FinishReason, Nanoseconds, SamplingParameters
from elastic.engine.base import GenerateRequest, RolloutEngine, TokenChunk
from elastic.simulation.calibration.fit import IterationSample
from elastic.simulation.calibration.numbers import CalibrationError

BUSY = (Account.PREFILL, Account.DECODE, Account.RECOMPUTE)
REPEATS = 5
ITERATIONS = 8
"""Number of timed iterations in each measurement of a decoding batch."""
FEWEST_ITERATIONS = 3
WAIT_S = 60.0
"""How long a busy engine may deliver no token."""
TEMPERATURE = 1.0

Observe = Callable[[int, int, str], None]
"""Called with (loads done, loads in all, the next load in words)."""


class ProbeLoad(NamedTuple):
    """A number of prompts at once, of a number of tokens each; `decodes` says whether their decoding is timed."""

    batch: int
    prompt_tokens: int
    decodes: bool

    def __str__(self) -> str:
        what = f"decode, {self.batch} at once after" if self.decodes else "prefill of"
        return f"{what} {self.prompt_tokens} tokens"


class Probed(NamedTuple):
    """A sample for each load, the median of its repeats, and the loads that the engine did not run as meant."""

    samples: list[IterationSample]
    left_out: list[ProbeLoad]
    kv_tokens: int
    engine: str
    """A description of the measured engine."""


def loads(settings: EngineConfig, kv_tokens: int) -> list[ProbeLoad]:
    """Prefills up to the longest prompt, and decodes of one sequence up to the largest batch, with two contexts."""
    longest, chunk = settings.max_context_tokens - 1, settings.prefill_chunk_tokens
    prompts = sorted({min(longest, max(1, length)) for length in (chunk // 8, chunk // 2, chunk, 2 * chunk)})
    found = [ProbeLoad(1, length, decodes=False) for length in prompts]
    batches = sorted({min(2**power, settings.max_batch) for power in range(settings.max_batch.bit_length() + 1)})
    for batch in batches:
        context = _longest_context(settings, kv_tokens, batch)
        if context >= 1:
            found += [ProbeLoad(batch, tokens, decodes=True) for tokens in sorted({max(1, context // 8), context})]
    return found


def _longest_context(settings: EngineConfig, kv_tokens: int, batch: int) -> int:
    """The longest context that still leaves room for the iterations that are timed.

    The first sequences generate while the last ones are still prefilled: their tokens need room, too.
    """
    each = min(settings.max_context_tokens, kv_tokens // batch - settings.kv_block_tokens)
    return int((each - 2 * ITERATIONS) / (1 + batch / settings.prefill_chunk_tokens))


class Probe:
    """An engine that serves some weights, and everything that comes out of it. The prompts are random tokens.

    Raises `CalibrationError` when the engine refuses, fails, or brings nothing in time.
    """

    def __init__(self, engine: RolloutEngine, settings: EngineConfig, vocab_size: int, wait_s: float = WAIT_S) -> None:
        self._engine = engine
        self._settings = settings
        self._random = random.Random(0)
        self._vocab_size = vocab_size
        self._wait_s = wait_s
        self._changed = threading.Condition()
        self._calls: list[tuple[Nanoseconds, Sequence[TokenChunk]]] = []
        self._alive: set[str] = set()
        self._batch = 0
        self._full = 0
        """Iterations that delivered a token of every sequence."""
        self._error = ""
        self._number = 0

    def sink(self, chunks: Sequence[TokenChunk]) -> None:
        """For `RolloutEngine.start`."""
        now_ns = time.monotonic_ns()
        with self._changed:
            self._calls.append((now_ns, chunks))
            self._full += len(chunks) == self._batch
            for chunk in chunks:
                if chunk.finish is not None:
                    self._alive.discard(chunk.request_id)
                if chunk.finish in (FinishReason.ERROR, FinishReason.STALLED):
                    self._error = chunk.detail or chunk.finish
            # Not at every iteration: a thread that wakes up takes time from the engine.
            if self._timed or self._error:
                self._changed.notify_all()

    @property
    def _timed(self) -> bool:
        return not self._alive or self._full > ITERATIONS

    def measure(self, observe: Observe, repeats: int = REPEATS) -> Probed:
        kv_tokens = self._engine.statistics().kv_blocks_total * self._settings.kv_block_tokens
        planned = loads(self._settings, kv_tokens)
        found: dict[ProbeLoad, list[IterationSample]] = {load: [] for load in planned}
        for load in (planned[0], planned[-1]):  # the first of a kind is slower: memory, threads, compiled code
            self._samples_of(load)
        rounds = [load for _ in range(repeats) for load in planned]
        for done, load in enumerate(rounds):
            observe(done, len(rounds), str(load))
            found[load] += self._samples_of(load)
        observe(len(rounds), len(rounds), "")
        capabilities = self._engine.capabilities
        return Probed(
            samples=[_median(samples) for samples in found.values() if samples],
            left_out=[load for load, samples in found.items() if not samples],
            kv_tokens=kv_tokens,
            engine=f"{capabilities.engine} on {capabilities.device}",
        )

    def _samples_of(self, load: ProbeLoad) -> list[IterationSample]:
        return self._decode(load) if load.decodes else self._prefill(load)

    def _prefill(self, load: ProbeLoad) -> list[IterationSample]:
        before = self._engine.statistics()
        self._submit(load, max_new_tokens=1)
        self._until(lambda: not self._alive, load)
        after = self._engine.statistics()
        iterations = after.progress - before.progress
        busy_ns = sum(after.accounts_ns.get(account, 0) - before.accounts_ns.get(account, 0) for account in BUSY)
        prefilled = sum(chunk.prefilled_tokens for _, chunks in self._calls for chunk in chunks)
        if iterations < 1 or busy_ns <= 0 or prefilled < 1:
            return []
        return [IterationSample(busy_ns / NS_PER_S, iterations, batch=0, prefilled=prefilled / iterations)]

    def _decode(self, load: ProbeLoad) -> list[IterationSample]:
        self._submit(load, self._settings.max_context_tokens - load.prompt_tokens)
        self._until(lambda: self._timed, load)
        self._engine.abort(list(self._alive))
        self._until(lambda: not self._alive, load)
        steady = list(self._steady(load))
        return steady if len(steady) >= FEWEST_ITERATIONS else []

    def _steady(self, load: ProbeLoad) -> Iterator[IterationSample]:
        """Yield the iterations that, like the one before each, decoded a token of every sequence of the load."""
        generated: dict[str, int] = {}
        before_ns: Nanoseconds | None = None
        for now_ns, chunks in self._calls:
            grown = {chunk.request_id: len(chunk.token_ids) for chunk in chunks}
            decoded = len(generated) == load.batch and list(grown.values()) == [1] * load.batch
            if decoded and before_ns is not None:
                context = load.batch * load.prompt_tokens + sum(generated.values())
                yield IterationSample((now_ns - before_ns) / NS_PER_S, 1, batch=load.batch, context=context)
            for request_id, count in grown.items():
                generated[request_id] = generated.get(request_id, 0) + count
            before_ns = now_ns if len(generated) == load.batch else None

    def _submit(self, load: ProbeLoad, max_new_tokens: int) -> None:
        requests: list[GenerateRequest] = []
        for _ in range(load.batch):
            self._number += 1
            requests.append(
                GenerateRequest(
                    request_id=f"probe-{self._number}",
                    token_ids=self._random.choices(range(self._vocab_size), k=load.prompt_tokens),
                    start=0,
                    sampling=SamplingParameters(
                        max_new_tokens=max_new_tokens,
                        stop_token_ids=(),
                        temperature=TEMPERATURE,
                        noise_seed=self._number,
                    ),
                )
            )
        with self._changed:
            self._calls.clear()
            self._alive = {request.request_id for request in requests}
            self._batch, self._full = load.batch, 0
        self._engine.submit(requests)

    def _until(self, condition: Callable[[], bool], load: ProbeLoad) -> None:
        """Wait for a condition, as long as tokens arrive."""
        began_ns = time.monotonic_ns()
        with self._changed:
            while not (condition() or self._error):
                in_time = self._changed.wait(self._wait_s)
                last_ns = self._calls[-1][0] if self._calls else began_ns
                if not in_time and time.monotonic_ns() - last_ns > self._wait_s * NS_PER_S:
                    raise CalibrationError(f"{load}: the engine has brought nothing for {self._wait_s:g} s")
            if self._error:
                raise CalibrationError(f"{load}: the engine failed: {self._error}")


def _median(samples: Sequence[IterationSample]) -> IterationSample:
    """Summarise samples by the median of an iteration's seconds and the means of its sizes."""
    return IterationSample(
        seconds=statistics.median(sample.seconds / sample.iterations for sample in samples),
        iterations=1,
        batch=samples[0].batch,
        context=statistics.fmean(sample.context for sample in samples),
        prefilled=statistics.fmean(sample.prefilled for sample in samples),
    )
