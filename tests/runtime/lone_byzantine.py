"""One Byzantine worker with a valid session: a process of its own, which says nothing but what the protocol allows.

python -m tests.runtime.lone_byzantine ARM TICKET     (the ticket as JSON)
"""

import asyncio
import contextlib
import os
import sys
from collections.abc import Callable
from typing import TypeAlias

import msgspec

from elastic.core.types import INTEGER_MAX, TEXT_MAX, Account, Capabilities, Chunk, FinishReason
from elastic.protocol import wire
from elastic.protocol.connection import ConnectionLost, SessionRefused
from elastic.worker.connection import OrchestratorLink, Ticket, dial

CREDIT = 6
CAPABILITIES = Capabilities(
    engine="model", replayable_sampling=True, max_context_tokens=512, device="none", max_batch=CREDIT
)
TICK_S = 0.005
BEAT_S = 0.1
DRIP_S = 0.25
"""Between two tokens of a turn: just less than it may take."""
UNREAD_BYTES = 1 << 20
PATIENCE_S = 60.0
LONG = "x" * TEXT_MAX
_Said: TypeAlias = tuple[Chunk, list[int], list[float]]


class LoneByzantineWorker:
    def __init__(self, arm: str, ticket: Ticket) -> None:
        self._arm, self._ticket = arm, ticket
        self._turns: dict[str, wire.Generate] = {}
        self._dripped: dict[tuple[str, int], int] = {}
        self._progress = self._version = self._taken = 0
        self._beat_s = self._drip_s = 0.0

    async def live(self) -> None:
        key = ""
        while True:
            connection, welcome = await dial(self._ticket, key, PATIENCE_S)
            key = welcome.session_key or key
            self._turns.clear()
            connection.send(wire.Ready(CAPABILITIES, self._version))
            self._beat(connection)
            lying = asyncio.create_task(self._lie(connection))
            with contextlib.suppress(ConnectionLost):
                connection.watch(PATIENCE_S)
                await connection.listen(self._hear(connection))
            lying.cancel()
            await connection.aclose()
            if self._arm != "flap":
                return

    def _hear(self, connection: OrchestratorLink) -> Callable[[list[wire.FromOrchestrator]], None]:
        def hear(orders: list[wire.FromOrchestrator]) -> None:
            for order in orders:
                if isinstance(order, wire.PullWeights):
                    self._version = order.version
                    connection.send(wire.WeightsReport(order.version, "", INTEGER_MAX, 86_400.0, 86_400.0, 1))
                elif isinstance(order, wire.Generate):
                    self._turns[order.turn] = order
                    if self._arm == "badstart":
                        connection.send(wire.Tokens.of([self._chunk(order, order.start + 5, [1])]))
                    if self._arm == "one_in_three":
                        self._end_one_in_three(connection, order)
                elif isinstance(order, wire.Abort):
                    self._turns.pop(order.turn, None)

        return hear

    def _end_one_in_three(self, connection: OrchestratorLink, order: wire.Generate) -> None:
        self._taken += 1
        if self._taken % 3 == 0:
            tokens = [1] * (order.sampling.max_new_tokens - order.start)
            chunk, ids, logprobs = self._chunk(order, order.start, tokens)
            ended = msgspec.structs.replace(chunk, finish=FinishReason.LENGTH)
            connection.send(wire.Tokens.of([(ended, ids, logprobs)]))
            del self._turns[order.turn]

    async def _lie(self, connection: OrchestratorLink) -> None:
        loop = asyncio.get_running_loop()
        if self._arm == "flap":
            await asyncio.sleep(TICK_S if self._turns else 0)
            connection.transport.abort()
            return
        while True:
            await asyncio.sleep(TICK_S)
            if loop.time() > self._beat_s + BEAT_S:
                self._beat_s = loop.time()
                self._beat(connection)
                if self._arm == "trickle" and self._turns:
                    empty = [self._chunk(order, order.start, []) for order in self._turns.values()]
                    connection.send(wire.Tokens.of(empty))
            if self._arm == "drip" and loop.time() > self._drip_s + DRIP_S:
                self._drip_s = loop.time()
                self._drip(connection)
            while self._arm.startswith("flood") and connection.transport.get_write_buffer_size() < UNREAD_BYTES:
                self._flood(connection)
                await asyncio.sleep(0)

    def _drip(self, connection: OrchestratorLink) -> None:
        chunks: list[_Said] = []
        for turn, order in list(self._turns.items()):
            at = order.start + self._dripped.get((turn, order.attempt), 0)
            self._dripped[turn, order.attempt] = at + 1 - order.start
            chunks.append(self._chunk(order, at, [1]))
            if at + 1 == order.sampling.max_new_tokens:
                del self._turns[turn]
        connection.send(wire.Tokens.of(chunks))

    def _flood(self, connection: OrchestratorLink) -> None:
        for _ in range(64):
            if self._arm == "flood_tokens":
                empty = [(Chunk(order.slot, order.start, 0, -1), [], []) for order in self._turns.values()]
                connection.send(wire.Tokens.of(empty))
            elif self._arm == "flood_reports":
                connection.send(wire.WeightsReport(self._version, LONG, INTEGER_MAX, 86_400.0, 86_400.0))
            else:
                self._beat(connection)

    def _beat(self, connection: OrchestratorLink) -> None:
        self._progress += 1
        held, accounts = len(self._turns), {Account.DECODE: 1}
        waiting, executing = (0, held) if self._arm == "one_in_three" else (held, 1)
        connection.send(wire.Heartbeat(CREDIT, waiting, executing, self._progress, accounts, 0, 0.0, 0, 0))

    def _chunk(self, order: wire.Generate, start: int, tokens: list[int]) -> _Said:
        chunk = Chunk(order.slot, start, len(tokens), self._version, prefilled=1)
        return chunk, tokens, [-0.5] * len(tokens)


async def main() -> None:
    os.nice(10)
    with contextlib.suppress(ConnectionLost, SessionRefused):
        await LoneByzantineWorker(sys.argv[1], msgspec.json.decode(sys.argv[2], type=Ticket)).live()


if __name__ == "__main__":
    asyncio.run(main())
