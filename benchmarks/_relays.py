"""LiteLLM's proxy over a stub of an upstream: what agents would put between themselves and a server of tokens.

The proxy lives in an environment of its own, `.cache/litellm`, which `install` makes out of the index. Its upstream
streams one event a token to each of its clients, at an even pace and for ever, and costs little.
"""

import asyncio
import contextlib
import itertools
import os
import secrets
import socket
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import NamedTuple, cast

import psutil
import uvloop

from benchmarks import ROOT
from benchmarks._client_environments import make_environment
from benchmarks._processes import Child, program
from elastic.system.machine import raise_descriptor_limit
from elastic.system.processes import inherited

LITELLM = "litellm[proxy]==1.106.2"
ENVIRONMENT = ROOT / ".cache" / "litellm"
INSTALLED = ENVIRONMENT / "installed"
UP_S = 120.0
LOOK_S = 0.2
CONFIG = """
model_list:
  - model_name: tiny
    litellm_params: {{model: openai/tiny, api_base: "http://127.0.0.1:{port}/v1", api_key: none}}
litellm_settings: {{telemetry: false, drop_params: true, request_timeout: 600}}
"""
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
EVENT = (
    b'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1700000000,"model":"tiny",'
    b'"choices":[{"index":0,"delta":{"role":"assistant","content":" %b"},"logprobs":null,"finish_reason":null}]}\n\n'
)
CHUNKS = [b"%x\r\n%b\r\n" % (len(event), event) for word in (b"the", b"sum", b"is", b"42") for event in (EVENT % word,)]
"""The proxy ends a stream that repeats one token."""


def skipped_without_litellm() -> str:
    """Why LiteLLM is not measured; empty where it is installed."""
    if INSTALLED.exists():
        return ""
    return "LiteLLM's proxy is not installed in .cache/litellm: --with-litellm makes that environment"


def install() -> str:
    """Make the environment, unless it is there. Returns why there is none, if it does not install."""
    if INSTALLED.exists():
        return ""
    if why := make_environment(ENVIRONMENT, LITELLM):
        return why
    INSTALLED.write_text(LITELLM + "\n")
    return ""


class LiteLLMProxy(NamedTuple):
    """A proxy that is up."""

    port: int
    key: str
    process: psutil.Process

    def cpu_s(self) -> float:
        """What it and its children have computed."""
        return sum(cpu_s(process) for process in (self.process, *self.process.children(recursive=True)))


def cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


@contextlib.asynccontextmanager
async def litellm(tokens_per_s: float) -> AsyncIterator[LiteLLMProxy]:
    """The proxy, with an upstream of its own. Raises `TimeoutError` if it does not come up."""
    with Child(upstream, tokens_per_s) as stub, tempfile.TemporaryDirectory() as directory:
        config = Path(directory) / "config.yaml"
        config.write_text(CONFIG.format(port=await asyncio.to_thread(stub.hear)))
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        command = [str(ENVIRONMENT / "bin" / "litellm"), "--config", str(config)]
        key = f"sk-{secrets.token_hex(32)}"
        alone = {"NO_PROXY": "*", "LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_MASTER_KEY": key}
        with program(
            [*command, "--host", "127.0.0.1", "--port", str(port), "--num_workers", "1"],
            env={**inherited(), **alone, "PATH": os.environ["PATH"]},
            cwd=directory,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        ) as process:
            await _up(process, port)
            yield LiteLLMProxy(port, key, psutil.Process(process.pid))


async def _up(process: "subprocess.Popen[bytes]", port: int) -> None:
    ends_s = time.monotonic() + UP_S
    while time.monotonic() < ends_s:
        if process.poll() is not None:
            raise ConnectionError(f"LiteLLM's proxy has ended with {process.returncode}")
        with contextlib.suppress(OSError):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET /health/liveliness HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
            line = await reader.readline()
            writer.close()
            if b" 200 " in line:
                return
        await asyncio.sleep(LOOK_S)
    raise TimeoutError(f"LiteLLM's proxy was not up within {UP_S:g} s")


def upstream(port: Pipe, tokens_per_s: float) -> None:
    """A streaming server of chats: one event a token."""
    raise_descriptor_limit()
    uvloop.run(_upstream(port, tokens_per_s))


async def _upstream(port: Pipe, tokens_per_s: float) -> None:
    loop = asyncio.get_running_loop()
    listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
    server = await loop.create_server(lambda: _StreamingStub(1 / tokens_per_s), sock=listener)
    port.send(listener.getsockname()[1])
    await server.serve_forever()


class _StreamingStub(asyncio.Protocol):
    """Whatever is asked, tokens are the answer."""

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._loop = asyncio.get_running_loop()
        self._due_s = 0.0
        self._chunks = itertools.cycle(CHUNKS)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if not self._due_s:
            self._transport.write(HEAD)
            self._due_s = self._loop.time()
            self._produce()

    def _produce(self) -> None:
        if self._transport.is_closing():
            return
        self._transport.write(next(self._chunks))
        self._due_s += self._every_s
        self._loop.call_at(self._due_s, self._produce)
