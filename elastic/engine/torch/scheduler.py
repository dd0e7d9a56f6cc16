"""Continuous batching: which tokens of which sequence the next iteration computes. Pure; no tensors, no clock.

Running sequences decode one token an iteration; what is left of the chunk goes to prefill, oldest first. A
waiting sequence is admitted when a place in the batch and blocks for all its tokens are there. When a running
one needs a block and there is none, the newest gives its blocks back and waits to be computed again; so the
oldest always advances. Source: Orca (OSDI 2022) §3; Sarathi-Serve (OSDI 2024) §4 for chunked prefill.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from elastic.config import EngineConfig
from elastic.engine.base import GenerateRequest
from elastic.engine.torch.blocks import BlockPool, chain_digest, root_digest
from elastic.engine.torch.pacing import IterationLoad


@dataclass(slots=True, eq=False)
class Sequence:
    """A request on its way. `computed` tokens have their KV in `blocks`; all but the last do while decoding."""

    request: GenerateRequest
    tokens: list[int]
    blocks: list[int] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)
    computed: int = 0
    registered: int = 0
    prefill_end: int = 0
    admissions: int = 0
    cacheable: bool = True
    cached_tokens: int = 0
    prefilled_tokens: int = 0
    reported: bool = False

    @property
    def position(self) -> int:
        """The position of the next token in the turn's output."""
        return self.request.start + len(self.tokens) - len(self.request.token_ids)

    @property
    def recomputes(self) -> bool:
        """Whether its prefill is paid again because the turn has moved: only that of its first admission here. What the
        engine itself preempts is no loss of capacity."""
        return self.request.recompute and self.admissions == 1


class Work(NamedTuple):
    """Compute the next `token_count` tokens of the sequence; sample if that reaches its end."""

    sequence: Sequence
    token_count: int

    @property
    def samples(self) -> bool:
        return self.sequence.computed + self.token_count == len(self.sequence.tokens)


class BatchScheduler:
    """Owns the sequences and the block pool."""

    def __init__(self, settings: EngineConfig) -> None:
        self._max_batch = settings.max_batch
        self._chunk_tokens = settings.prefill_chunk_tokens
        self._block_tokens = settings.kv_block_tokens
        self._root = root_digest(0)
        self.pool = BlockPool(settings.kv_blocks)
        self.running: list[Sequence] = []
        self.waiting: deque[Sequence] = deque()
        self.prompt_tokens = 0
        self.prefix_hit_tokens = 0

    def __iter__(self) -> Iterator[Sequence]:
        yield from self.running
        yield from self.waiting

    def add(self, request: GenerateRequest) -> Sequence:
        sequence = Sequence(request, list(request.token_ids))
        self.waiting.append(sequence)
        return sequence

    def remove(self, sequence: Sequence) -> None:
        """Removes a sequence that has ended; later ones may still find its KV."""
        if sequence in self.running:
            self.running.remove(sequence)
        else:
            self.waiting.remove(sequence)
        self._release(sequence)

    @property
    def has_started(self) -> bool:
        """Whether a sequence that has been admitted once is still alive."""
        return bool(self.running) or any(sequence.admissions for sequence in self.waiting)

    def plan(self, admit_new: bool) -> list[Work]:
        """The next iteration. Without `admit_new` only sequences that have been admitted before come back."""
        work: list[Work] = []
        chunk = self._chunk_tokens
        crowded = False
        for sequence in list(self.running):
            left = len(sequence.tokens) - sequence.computed
            count = left if left == 1 else min(left, chunk)
            if not count or sequence not in self.running:
                continue
            if not self._reserve(sequence):
                crowded = True
                continue
            chunk -= count if left > 1 else 0
            work.append(Work(sequence, count))
        while chunk and not crowded and (sequence := self._admit(admit_new)):
            count = min(len(sequence.tokens) - sequence.computed, chunk)
            chunk -= count
            work.append(Work(sequence, count))
        return work

    def commit(self, work: Work) -> None:
        """The work is done: its KV is in the cache. A sampled token is appended by the caller afterwards."""
        sequence, count = work
        prefilled = max(0, min(sequence.computed + count, sequence.prefill_end) - sequence.computed)
        sequence.prefilled_tokens += prefilled
        sequence.computed += count
        if sequence.cacheable:
            full = sequence.computed // self._block_tokens
            self._extend_digests(sequence, full)
            for index in range(sequence.registered, full):
                self.pool.register(sequence.blocks[index], sequence.digests[index])
            sequence.registered = full

    def use_version(self, weights_version: int, keep_kv: bool, signed_by: str = "") -> None:
        """New weights: nothing cached can be found any more. Running sequences go on with the KV they have
        (whose mixture of versions is never shared), or are computed again."""
        for sequence in reversed(list(self.running)):
            if keep_kv:
                sequence.cacheable = False
            else:
                self._preempt(sequence)
        self.pool.forget()
        self._root = root_digest(weights_version, signed_by)
        for sequence in self:
            sequence.digests.clear()

    def _admit(self, admit_new: bool) -> Sequence | None:
        if not self.waiting or len(self.running) >= self._max_batch:
            return None
        sequence = self.waiting[0]
        if not (admit_new or sequence.admissions):
            return None
        if not self._place(sequence):
            return None
        self.waiting.popleft()
        self.running.append(sequence)
        return sequence

    def _place(self, sequence: Sequence) -> bool:
        """Blocks for all tokens, those of a cached prefix included; the last token is always computed."""
        tokens = len(sequence.tokens)
        self._extend_digests(sequence, (tokens - 1) // self._block_tokens)
        shared = self.pool.share(sequence.digests[: (tokens - 1) // self._block_tokens])
        missing = -(-tokens // self._block_tokens) - len(shared)
        if missing > self.pool.available:
            self.pool.release(shared)
            return False
        sequence.blocks = shared + self.pool.allocate(missing)
        sequence.registered = len(shared)
        sequence.computed = len(shared) * self._block_tokens
        sequence.prefill_end = tokens
        sequence.admissions += 1
        if sequence.admissions == 1:
            sequence.cached_tokens = sequence.computed
        self.prompt_tokens += tokens
        self.prefix_hit_tokens += sequence.computed
        return True

    def _reserve(self, sequence: Sequence) -> bool:
        """A block for the next token, if need be from the newest sequence; False if that is this one itself."""
        if len(sequence.blocks) * self._block_tokens >= len(sequence.tokens):
            return True
        while not self.pool.available:
            newest = self.running[-1]
            self._preempt(newest)
            if newest is sequence:
                return False
        sequence.blocks += self.pool.allocate(1)
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._release(sequence)
        self.waiting.appendleft(sequence)

    def _release(self, sequence: Sequence) -> None:
        self.pool.release(sequence.blocks)
        sequence.blocks = []
        sequence.computed = sequence.registered = 0
        # Once its KV is gone, what it computes next is of one version again.
        sequence.cacheable = True

    def _extend_digests(self, sequence: Sequence, count: int) -> None:
        digests, size = sequence.digests, self._block_tokens
        for index in range(len(digests), count):
            parent = digests[-1] if digests else self._root
            digests.append(chain_digest(parent, sequence.tokens[index * size : (index + 1) * size]))


def load_of(work: list[Work]) -> IterationLoad:
    """How many tokens of each kind an iteration computes."""
    decode = prefill = recompute = 0
    for sequence, count in work:
        if sequence.computed >= sequence.prefill_end:
            decode += 1
        elif sequence.recomputes:
            recompute += count
        else:
            prefill += count
    return IterationLoad(decode, prefill, recompute)
