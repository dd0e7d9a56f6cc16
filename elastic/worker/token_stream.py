"""The worker's running turns, and the way of their tokens from the engine's thread to the connection."""

import asyncio
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from elastic.core.types import CHUNK_TOKENS_MAX, CHUNKS_MAX, Chunk, FinishReason
from elastic.engine.base import NO_VERSION, GenerateRequest, TokenChunk
from elastic.protocol import wire
from elastic.protocol.sampled import ids_of

SAME_TICK = 1e-6
"""Share of an interval by which rounding may have a timer be early."""


@dataclass(slots=True)
class _StreamedTurn:
    slot: int
    begun: bool = False
    """A token of it has been sent."""
    stalled: str = ""


class TokenStream:
    """Collects the engine's output and passes it to `send` in batches.

    A token waits for the flush interval at most (with `whole_turns` until its turn's end); a turn's first token and its
    end do not wait. Flushes come at times of a clock of its own, whose `phase` in [0, 1) differs between workers: those
    of many workers do not come together, whenever their turns began.
    Tokens of one turn within a batch leave as one chunk, and a batch as one frame, unless they are too long. Abandoned
    turns are never reported again. All methods but `sink` belong to the event loop's thread.
    """

    def __init__(
        self,
        flush_interval_s: float,
        send: Callable[[wire.Tokens], None],
        *,
        whole_turns: bool = False,
        phase: float = 0.0,
    ) -> None:
        self._flush_interval_s = flush_interval_s
        self._phase = phase
        self._whole_turns = whole_turns
        self._waiting: list[TokenChunk] = []
        self._send = send
        self._loop = asyncio.get_running_loop()
        self._turns: dict[str, _StreamedTurn] = {}
        self._slots: set[int] = set()
        """All that this orchestrator has given on this connection."""
        self._abandoned = 0
        self._timer: asyncio.TimerHandle | None = None
        self._idle = asyncio.Event()
        self._idle.set()
        self._lock = threading.Lock()
        self._produced: list[TokenChunk] = []
        self._urgent = False
        self._begun: set[str] = set()
        """Requests that tokens have come of. The engine's thread alone looks at it."""

    def sink(self, chunks: Sequence[TokenChunk]) -> None:
        """Take chunks on the engine's thread. Wakes the loop only for the first token of a batch, and the first that
        does not wait."""
        hurries = self._hurries(chunks)
        with self._lock:
            first = not self._produced
            urgent = hurries and not self._urgent
            self._urgent |= hurries
            self._produced += chunks
        if urgent:
            self._loop.call_soon_threadsafe(self._flush_urgent)
        elif first:
            self._loop.call_soon_threadsafe(self._arm)

    def _hurries(self, chunks: Sequence[TokenChunk]) -> bool:
        """Whether a turn begins or ends with one of these."""
        hurries = False
        for chunk in chunks:
            if chunk.finish is not None:
                self._begun.discard(chunk.request_id)
                hurries = True
            elif chunk.token_ids and chunk.request_id not in self._begun:
                self._begun.add(chunk.request_id)
                hurries |= not self._whole_turns
        return hurries

    def flush_every(self, interval_s: float) -> None:
        """Flush so often from now on."""
        self._flush_interval_s = interval_s
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self._arm()

    def is_new(self, order: wire.Generate) -> bool:
        """Whether an order has come for the first time on this connection."""
        known = order.slot in self._slots
        self._slots.add(order.slot)
        return not known

    def open(self, order: wire.Generate) -> GenerateRequest:
        """Begin a turn; returns the request for the engine."""
        request_id = self._request_id(order)
        self._turns[request_id] = _StreamedTurn(order.slot)
        self._idle.clear()
        return GenerateRequest(
            request_id=request_id,
            token_ids=ids_of(order.token_ids),
            start=order.start,
            sampling=order.sampling,
            recompute=order.recompute,
        )

    def decline(self, orders: Iterable[wire.Generate], finish: FinishReason, detail: str) -> None:
        """Give turns back at once, without asking the engine."""
        declined = [Chunk(order.slot, order.start, 0, NO_VERSION, finish, detail) for order in orders]
        self._send(wire.Tokens.of((chunk, (), ()) for chunk in declined))

    def running(self, orders: Iterable[wire.Abort]) -> list[str]:
        """Return the engine's request ids of those of these turns that still run."""
        return [request_id for order in orders if (request_id := self._request_id(order)) in self._turns]

    def all_running(self) -> list[str]:
        return list(self._turns)

    def stall(self, detail: str) -> list[str]:
        """Return the request ids of all running turns, for the caller to abort. They will end as STALLED because of
        `detail`."""
        for turn in self._turns.values():
            turn.stalled = detail
        return self.all_running()

    def abandon(self) -> list[str]:
        """Forget all turns and their tokens since the last batch; returns their request ids.

        Another orchestrator may count their attempts anew, so the engine's later output for them must not reach it.
        """
        abandoned = self.all_running()
        self._abandoned += 1
        self._turns.clear()
        self._slots.clear()
        self._waiting.clear()
        self._idle.set()
        return abandoned

    async def idle(self) -> None:
        """Wait until no turn runs and everything is handed over."""
        await self._idle.wait()

    def flush(self) -> None:
        """Send all waiting tokens."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._whole_turns:
            self._flush_urgent()
        else:
            produced, self._waiting = self._waiting + self._take(), []
            self._hand_over(produced)

    def _flush_urgent(self) -> None:
        """Send the turns that begin or end. The tokens of other turns may wait."""
        known = self._waiting + self._take()
        urgent = {chunk.request_id for chunk in known if self._is_urgent(chunk)}
        self._waiting = [chunk for chunk in known if chunk.request_id not in urgent]
        if self._waiting and not self._whole_turns:
            self._arm()
        self._hand_over([chunk for chunk in known if chunk.request_id in urgent])

    def _is_urgent(self, chunk: TokenChunk) -> bool:
        turn = self._turns.get(chunk.request_id)
        begins = turn is not None and not turn.begun and bool(chunk.token_ids) and not self._whole_turns
        return chunk.finish is not None or begins

    def _request_id(self, order: wire.Generate | wire.Abort) -> str:
        return f"{order.turn}#{order.attempt}.{self._abandoned}"

    def _take(self) -> list[TokenChunk]:
        with self._lock:
            produced, self._produced = self._produced, []
            self._urgent = False
        return produced

    def _hand_over(self, produced: list[TokenChunk]) -> None:
        runs = [run for run in _runs(produced) if run[0].request_id in self._turns]
        for frame in _frames(runs):
            self._send(wire.Tokens.of(map(self._said, frame)))
        if not self._turns:
            self._idle.set()

    def _arm(self) -> None:
        if self._timer is None:
            interval_s = self._flush_interval_s
            tick = math.floor(self._loop.time() / interval_s - self._phase + SAME_TICK) + 1
            self._timer = self._loop.call_at((tick + self._phase) * interval_s, self.flush)

    def _said(self, run: list[TokenChunk]) -> tuple[Chunk, list[int], list[float]]:
        first, last = run[0], run[-1]
        turn = self._turns[first.request_id]
        turn.begun = turn.begun or _tokens(run) > 0
        finish, detail = last.finish, last.detail
        if finish is not None:
            del self._turns[first.request_id]
        if finish is FinishReason.ABORTED and turn.stalled:
            finish, detail = FinishReason.STALLED, turn.stalled
        chunk = Chunk(
            turn.slot,
            first.start,
            _tokens(run),
            first.weights_version,
            finish,
            wire.clipped(detail),
            sum(chunk.prefilled_tokens for chunk in run),
            sum(chunk.cached_tokens for chunk in run),
        )
        ids = [token for chunk in run for token in chunk.token_ids]
        return chunk, ids, [logprob for chunk in run for logprob in chunk.logprobs]


def _tokens(run: Iterable[TokenChunk]) -> int:
    return sum(len(chunk.token_ids) for chunk in run)


def _runs(chunks: Iterable[TokenChunk]) -> list[list[TokenChunk]]:
    """Join chunks of one request with one weights version and consecutive positions; keep the order otherwise."""
    runs: list[list[TokenChunk]] = []
    latest: dict[str, list[TokenChunk]] = {}
    for chunk in chunks:
        run = latest.get(chunk.request_id)
        if run is not None and _continues(run, chunk):
            run.append(chunk)
        else:
            latest[chunk.request_id] = run = [chunk]
            runs.append(run)
    return runs


def _frames(runs: Iterable[list[TokenChunk]]) -> Iterator[list[list[TokenChunk]]]:
    """Pack runs in order into frames, as many as each holds."""
    frame: list[list[TokenChunk]] = []
    tokens = 0
    for run in runs:
        tokens += _tokens(run)
        if frame and (tokens > wire.FRAME_TOKENS or len(frame) == CHUNKS_MAX):
            yield frame
            frame, tokens = [], _tokens(run)
        frame.append(run)
    if frame:
        yield frame


def _continues(run: Sequence[TokenChunk], chunk: TokenChunk) -> bool:
    last = run[-1]
    return (
        last.finish is None
        and chunk.start + len(chunk.token_ids) - run[0].start <= CHUNK_TOKENS_MAX
        and chunk.start == last.start + len(last.token_ids)
        and (chunk.weights_version == last.weights_version or not chunk.token_ids)
    )
