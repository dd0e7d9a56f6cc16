"""An engine's live requests: joined, refused, scheduled, ended with their last chunk. Pure; no tensors, no clock."""

import math
from collections.abc import Callable, Iterable, Sequence

from elastic.config import EngineConfig
from elastic.core.types import FinishReason
from elastic.engine import validation
from elastic.engine.base import NO_VERSION, GenerateRequest, TokenChunk
from elastic.engine.torch.scheduler import BatchScheduler, Work
from elastic.engine.torch.scheduler import Sequence as Running


class RequestTable:
    """Every request from its arrival to its last chunk, and the weights version that they are served with.

    Callers hold the engine's lock. `committed` hears of each iteration before its chunks are made, `forgotten` of each
    request that is over.
    """

    def __init__(
        self,
        scheduler: BatchScheduler,
        vocab_size: int,
        settings: EngineConfig,
        committed: Callable[[Sequence[Work]], None] = lambda _: None,
        forgotten: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.scheduler = scheduler
        self.version: int | None = None
        self._signed_by = ""
        self.decoded_tokens = 0
        self._vocab_size = vocab_size
        self._most_tokens = settings.max_context_tokens
        self._committed = committed
        self._forgotten = forgotten
        self._inbox: list[GenerateRequest] = []
        self._aborting: set[str] = set()
        self._alive: dict[str, Running | None] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._alive

    @property
    def pending(self) -> int:
        return len(self._inbox) + len(self.scheduler.waiting)

    def add(self, requests: Iterable[GenerateRequest]) -> None:
        for request in requests:
            if request.request_id not in self._alive:
                self._alive[request.request_id] = None
                self._inbox.append(request)

    def abort(self, request_ids: Iterable[str]) -> None:
        self._aborting.update(request_id for request_id in request_ids if request_id in self._alive)

    def abort_all(self) -> None:
        self._aborting.update(self._alive)

    def take(self) -> list[TokenChunk]:
        """Schedule new requests; returns the last chunks of those that are refused, complete or aborted."""
        chunks: list[TokenChunk] = []
        for request in self._inbox:
            if (why := validation.refusal(request, self._vocab_size, self._most_tokens)) is not None:
                chunks.append(self.end(request, FinishReason.ERROR, why))
            elif validation.is_complete(request, self._most_tokens):
                chunks.append(self.end(request, FinishReason.LENGTH))
            elif request.request_id in self._aborting:
                chunks.append(self.end(request, FinishReason.ABORTED))
            else:
                self._alive[request.request_id] = self.scheduler.add(request)
        self._inbox.clear()
        aborted = [sequence for request_id in self._aborting if (sequence := self._alive[request_id])]
        chunks.extend(self.end(sequence.request, FinishReason.ABORTED) for sequence in aborted)
        return chunks

    def commit(self, work: Sequence[Work], token_ids: list[int], logprobs: list[float]) -> list[TokenChunk]:
        """Book a computed iteration; `token_ids` and `logprobs` are of the items that sample, in order."""
        self._committed(work)
        chunks: list[TokenChunk] = []
        samples = iter(zip(token_ids, logprobs, strict=True))
        for item in work:
            sampled = next(samples) if item.samples else None
            self.scheduler.commit(item)
            if sampled is not None:
                chunks.append(self._append(item.sequence, *sampled))
        return chunks

    def give_up(self, work: Sequence[Work], why: str) -> list[TokenChunk]:
        """An iteration failed: its requests end, the rest is computed afresh."""
        chunks = [self.end(item.sequence.request, FinishReason.ERROR, why) for item in work]
        if self.version is not None:
            self.scheduler.use_version(self.version, keep_kv=False, signed_by=self._signed_by)
        return chunks

    def use_version(self, version: int, keep_kv: bool, signed_by: str) -> None:
        self.scheduler.use_version(version, keep_kv, signed_by)
        self.version, self._signed_by = version, signed_by

    def end(self, request: GenerateRequest, finish: FinishReason, detail: str = "") -> TokenChunk:
        chunk = self._last_chunk(request, finish, detail)
        self._forget(request.request_id)
        return chunk

    def last_chunks(self, finish: FinishReason, detail: str) -> list[TokenChunk]:
        """Return a last chunk for every request. No request is forgotten by it."""
        requests = [*(sequence.request for sequence in self._alive.values() if sequence), *self._inbox]
        return [self._last_chunk(request, finish, detail) for request in requests]

    def forget_all(self) -> None:
        self._inbox.clear()
        for request_id in list(self._alive):
            self._forget(request_id)

    def abandon(self) -> None:
        """Forget all requests without the book-keeping, where that has failed."""
        self._alive.clear()
        self._aborting.clear()

    def _append(self, sequence: Running, token_id: int, logprob: float) -> TokenChunk:
        request = sequence.request
        if not math.isfinite(logprob):
            return self.end(request, FinishReason.ERROR, "the model's logits are not finite")
        position = sequence.position
        sequence.tokens.append(token_id)
        self.decoded_tokens += 1
        finish = None
        if token_id in request.sampling.stop_token_ids:
            finish = FinishReason.STOP
        elif sequence.position >= request.sampling.max_new_tokens or len(sequence.tokens) >= self._most_tokens:
            finish = FinishReason.LENGTH
        elif request.request_id in self._aborting:
            finish = FinishReason.ABORTED
        chunk = self._chunk(request, sequence, position, [token_id], [logprob], finish)
        if finish is not None:
            self._forget(request.request_id)
        return chunk

    def _last_chunk(self, request: GenerateRequest, finish: FinishReason, detail: str) -> TokenChunk:
        sequence = self._alive.get(request.request_id)
        position = sequence.position if sequence else request.start
        return self._chunk(request, sequence, position, [], [], finish, detail)

    def _chunk(
        self,
        request: GenerateRequest,
        sequence: Running | None,
        start: int,
        token_ids: list[int],
        logprobs: list[float],
        finish: FinishReason | None,
        detail: str = "",
    ) -> TokenChunk:
        first = sequence is not None and not sequence.reported
        if sequence is not None:
            sequence.reported = True
        return TokenChunk(
            request_id=request.request_id,
            start=start,
            token_ids=token_ids,
            logprobs=logprobs,
            weights_version=NO_VERSION if self.version is None else self.version,
            finish=finish,
            cached_tokens=sequence.cached_tokens if sequence and first else 0,
            prefilled_tokens=sequence.prefilled_tokens if sequence and first else 0,
            detail=detail,
        )

    def _forget(self, request_id: str) -> None:
        sequence = self._alive.pop(request_id)
        if sequence is not None:
            self.scheduler.remove(sequence)
        self._aborting.discard(request_id)
        self._forgotten(request_id)
