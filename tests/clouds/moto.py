"""A moto server in a process of its own."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

START_TIMEOUT_S = 60.0
SERVER = """
import sys
from moto.server import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
from werkzeug.serving import run_simple
answering = DomainDispatcherApplication(create_backend_app)
run_simple("127.0.0.1", int(sys.argv[1]), answering, request_handler=MotoRequestHandler)
"""
"""It answers one request at a time: in threads, moto looks whether an object is there and writes it in two steps."""


@contextmanager
def moto_server(**environment: str) -> Iterator[int]:
    """Its port, once it answers. Raises `TimeoutError`."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER, str(port)],
        env=os.environ | {"MOTO_PORT": str(port)} | environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while True:
            with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                break
            if time.monotonic() > deadline_s:
                raise TimeoutError("moto's server does not answer")
            time.sleep(0.05)
        yield port
    finally:
        process.kill()
        process.wait()
