"""Everything that comes out of an engine, kept and checked."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from elastic.core.types import WeightMode
from elastic.engine.base import GenerateRequest, RolloutEngine, TokenChunk
from elastic.weights.source import RelaySource

T = TypeVar("T")


class Recorder:
    """An engine under test with everything that came out of it. While held, the sink does not return."""

    def __init__(self, engine: RolloutEngine, timeout_s: float = 30.0) -> None:
        """Starts the engine. Nothing is waited for longer than `timeout_s`."""
        self.engine = engine
        self._timeout_s = timeout_s
        self.chunks: list[TokenChunk] = []
        self._changed = threading.Condition()
        self._open = threading.Event()
        self._open.set()
        self._threads = ThreadPoolExecutor()
        self._failing: str | None = None
        self.on_chunks: Callable[[], None] = lambda: None
        engine.start(self._sink)

    def _sink(self, chunks: Sequence[TokenChunk]) -> None:
        self.on_chunks()
        with self._changed:
            self.chunks.extend(chunks)
            self._changed.notify_all()
        self._open.wait(self._timeout_s)
        if any(chunk.request_id == self._failing for chunk in chunks):
            raise ConnectionError("nobody takes this")

    def hold(self) -> None:
        self._open.clear()

    def release(self) -> None:
        self._open.set()

    def load(self, source: RelaySource, mode: WeightMode = WeightMode.FINISH) -> None:
        """Loads a version as a worker does: fetches it beside running turns, then puts it in force."""
        self.engine.prefetch(source, self._timeout_s)
        self.engine.load_version(source, mode)

    def fail_on(self, request_id: str) -> None:
        """Makes the sink raise for every batch with a chunk of this request."""
        self._failing = request_id

    def until(self, condition: Callable[[], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(condition, self._timeout_s), (
                f"waited in vain; last chunks: {self.chunks[-3:]}"
            )

    def until_tokens(self, request_id: str, count: int) -> None:
        self.until(lambda: len(self.tokens(request_id)) >= count)

    def finish(self, *request_ids: str) -> None:
        self.until(lambda: all(self.end(request_id) for request_id in request_ids))

    def run(self, *requests: GenerateRequest) -> list[list[int]]:
        self.engine.submit(requests)
        self.finish(*(request.request_id for request in requests))
        return [self.tokens(request.request_id) for request in requests]

    def aside(self, call: Callable[..., T], *args: Any) -> Callable[[], T]:
        """Runs a blocking call of the engine on another thread. The function that is returned waits for its result."""
        future = self._threads.submit(call, *args)
        return lambda: future.result(self._timeout_s)

    def of(self, request_id: str) -> list[TokenChunk]:
        return [chunk for chunk in self.chunks if chunk.request_id == request_id]

    def end(self, request_id: str) -> TokenChunk | None:
        return next((chunk for chunk in self.of(request_id) if chunk.finish is not None), None)

    def tokens(self, request_id: str) -> list[int]:
        return [token for chunk in self.of(request_id) for token in chunk.token_ids]

    def logprobs(self, request_id: str) -> list[float]:
        return [logprob for chunk in self.of(request_id) for logprob in chunk.logprobs]

    def versions(self, request_id: str) -> list[int]:
        return [chunk.weights_version for chunk in self.of(request_id) for _ in chunk.token_ids]

    def check(self, request: GenerateRequest) -> None:
        """The stream's own invariants: gapless from `start`, a log-probability a token, one end, at the end."""
        chunks = self.of(request.request_id)
        position = request.start
        for chunk in chunks:
            assert chunk.start == position
            assert len(chunk.token_ids) == len(chunk.logprobs)
            assert all(logprob <= 0 for logprob in chunk.logprobs)
            position += len(chunk.token_ids)
        assert [chunk.finish is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
        assert not any(chunk.cached_tokens or chunk.prefilled_tokens for chunk in chunks[1:])

    def rest(self) -> bool:
        """Leave the engine to the next test, with nothing alive and awake. False where it is of no more use."""
        self.release()
        self._failing = None
        self.on_chunks = lambda: None
        try:
            self.engine.sleep()
            self.engine.wake()
        except RuntimeError:
            return False
        with self._changed:
            self.chunks.clear()
        return True

    def close(self) -> None:
        self.release()
        self.engine.close()
        self._threads.shutdown()
