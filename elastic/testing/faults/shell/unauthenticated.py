"""Peers without a place in the run: they connect, send useless messages, and stay as long as the gateway allows."""

import asyncio
from functools import partial
from random import Random

from elastic.protocol import wire
from elastic.protocol.endpoint import Address
from elastic.testing.faults.shell.network import NetworkLoop

STAY_S = 8.0


class _Peer(asyncio.Protocol):
    """Sends a message or nothing, and leaves at the first answer."""

    def __init__(self, says: bytes) -> None:
        self._says = says

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(self._says)


async def flood(chance: Random, count: int, address: str, run: str, worker: str, silent: bool) -> None:
    """Open `count` connections within a moment, send a message or nothing on each, and leave them open."""
    host, port = Address.parse(address)
    loop = asyncio.get_running_loop()
    assert isinstance(loop, NetworkLoop)
    for _ in range(count):
        try:
            says = b"" if silent else _words(chance, run, worker)
            await loop.create_connection(partial(_Peer, says), host, port)
        except OSError:
            return
    await asyncio.sleep(STAY_S)
    for transport in list(loop.transports):
        transport.abort()


def _words(chance: Random, run: str, worker: str) -> bytes:
    """Return nothing, noise, half a message, or a Hello with a false token."""
    version, who = wire.PROTOCOL_VERSION, "unknown"
    hello = wire.encode(wire.Hello(version, worker, "guessed", chance.random() < 1 / 2, 1, who, run))
    return chance.choice(
        (
            b"",
            chance.randbytes(chance.randint(1, 64)),
            hello[: chance.randrange(len(hello))],
            hello,
            wire.encode(wire.Hello(version, worker, "guessed", False, 1, who, "no run")),
            wire.encode(wire.Hello(version, "", "guessed", False, 1, who, run, "abcdefgh")),
            (2**31).to_bytes(4, "big"),
        )
    )
