"""A crowd of half TLS handshakes from one address, and others from elsewhere, 200 ms a flight away.

`others_answered` is the share of the others that a gateway in a process of its own has answered, `others_p99_s` how
long that took (their distance included), `log_mb` what it has logged meanwhile.
"""

import asyncio
import contextlib
import os
import socket
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

from benchmarks._common import Figures
from benchmarks._crowds import ELSEWHERE, GATHERS_S, PATIENCE_S, asked_for, attackers, figures, log_here
from benchmarks._hosted import forks
from benchmarks._processes import Child
from elastic.protocol import tls, wire
from elastic.protocol.endpoint import Address
from elastic.runtime.gateway import Gateway

CROWD_PER_S = 1_600
FLIGHT_S = 0.2


def _serve(told: Connection, directory: str) -> None:
    log_here(directory)

    async def serve() -> None:
        certificate = tls.run_certificate(Path(directory), ["127.0.0.1"])
        told.send(str(await Gateway().start("127.0.0.1", 0, certificate)))
        await asyncio.Event().wait()

    asyncio.run(serve())


def _crowd(port: int) -> None:
    os.nice(10)

    async def come() -> None:
        began_s, come = time.monotonic(), 0
        waiting: list[socket.socket] = []
        while True:
            while come < (time.monotonic() - began_s) * CROWD_PER_S:
                come += 1
                with contextlib.suppress(OSError):
                    unauthenticated = socket.socket()
                    unauthenticated.setblocking(False)
                    waiting.append(unauthenticated)
                    unauthenticated.connect_ex(("127.0.0.1", port))
                if len(waiting) > 400:
                    waiting.pop(0).close()
            await asyncio.sleep(0.002)

    asyncio.run(come())


async def _ask(port: int) -> float:
    """How long somebody far away waits for an answer; infinite if there is none."""
    began_s = time.monotonic()
    hello = wire.Hello(wire.PROTOCOL_VERSION, "unknown", "token", False, 0, "", "a-run")
    try:
        async with asyncio.timeout(PATIENCE_S):
            distant = socket.socket()
            distant.bind((ELSEWHERE, 0))
            distant.setblocking(False)
            await asyncio.get_running_loop().sock_connect(distant, ("127.0.0.1", port))
            await asyncio.sleep(FLIGHT_S)
            reader, writer = await asyncio.open_connection(
                sock=distant, ssl=tls.pinning_context(), server_hostname="gateway"
            )
            writer.write(wire.encode(hello))
            answer = await reader.read(1)
            writer.close()
    except OSError:
        answer = b""
    return time.monotonic() - began_s if answer else float("inf")


def tls_evictions(duration_s: float) -> Figures:
    with tempfile.TemporaryDirectory() as directory:
        with Child(_serve, directory, context=forks()) as gateway:
            port = Address.parse(gateway.hear()).port
            with attackers(_crowd, [(port,)]):
                time.sleep(GATHERS_S)
                took_s = asyncio.run(asked_for([lambda: _ask(port)], duration_s))
        return figures(took_s, Path(directory, "log").stat().st_size)


if __name__ == "__main__":
    print(tls_evictions(float(sys.argv[1])))
