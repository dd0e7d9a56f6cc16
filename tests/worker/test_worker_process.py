"""Workers as processes of their own, with the real engine, killed, frozen and told to leave."""

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch

from elastic.config import EngineConfig
from elastic.core.types import Account, FinishReason, SamplingParameters
from elastic.engine.model.checkpoint import model_tensors
from elastic.engine.model.config import Qwen3Config
from elastic.engine.model.qwen3 import Qwen3
from elastic.protocol import wire
from elastic.weights.publisher import publish_keyframe
from elastic.weights.relay import open_relay
from tests.worker.conftest import KEY, Orchestra, ordered

pytestmark = pytest.mark.alone

MODEL = Qwen3Config(num_hidden_layers=1, hidden_size=32, intermediate_size=48, initializer_range=0.2)
ENGINE = EngineConfig.model_validate(
    {
        "max_context_tokens": 128,
        "kv_blocks": 32,
        "pacing": {"prefill_tokens_per_s": 10_000, "decode_step_s": {1: 0.01}},
    }
)
WORKER = """
import asyncio, os, uvloop
from elastic.protocol.endpoint import Endpoint
from elastic.worker.agent import Ticket, leave_process, run_agent
worker = os.environ["WORKER"]
with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
    ticket = Ticket(endpoint=Endpoint(os.environ["JOIN"]), run="run", worker=worker, token=f"token of {worker}")
    end = runner.run(run_agent(ticket))
print(end.reason)
leave_process(end)
"""
TURN_TOKENS = 100


class Workers(Orchestra):
    """An orchestra of processes."""

    def __init__(self, relay: Path) -> None:
        super().__init__(
            engine=ENGINE.model_dump(mode="json"),  # type: ignore[arg-type]
            model=MODEL.to_dict(),
            relay=str(relay),
            run="run",  # type: ignore[arg-type]
            heartbeat_interval_s=0.2,
            silence_timeout_s=2.0,
            resume_timeout_s=5.0,
        )
        self.processes: list[asyncio.subprocess.Process] = []

    async def start(self, worker: str) -> asyncio.subprocess.Process:
        self.expect(worker)
        ticket = {"JOIN": self.address, "WORKER": worker}
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", WORKER, env=os.environ | ticket | {"OMP_NUM_THREADS": "1"}, stdout=-1
        )
        self.processes.append(process)
        return process

    async def spawn(self, worker: str) -> asyncio.subprocess.Process:
        """A ready worker with weights, in a process of its own."""
        process = await self.start(worker)
        await self.until(lambda: any(w == worker for w, _, _ in self.heard))
        self.send(ordered(0), worker=worker)
        await self.until(lambda: any(w == worker and isinstance(m, wire.WeightsReport) for w, _, m in self.heard))
        return process

    async def __aexit__(self, *_: object) -> None:
        await super().__aexit__()
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.communicate()


@pytest.fixture
async def workers(tmp_path: Path) -> AsyncIterator[Workers]:
    torch.manual_seed(0)
    publish_keyframe(open_relay(str(tmp_path)), "run", 0, model_tensors(Qwen3(MODEL)), MODEL.to_dict(), KEY)
    async with Workers(tmp_path) as workers:
        yield workers


def turn(name: str, attempt: int = 1, accepted: tuple[int, ...] = ()) -> wire.Generate:
    return wire.Generate(
        name,
        attempt,
        [1, 2, 3, *accepted],
        len(accepted),
        SamplingParameters(max_new_tokens=TURN_TOKENS, noise_seed=11),
    )


def tokens(chunks: list[wire.Chunk]) -> list[int]:
    return [token for chunk in chunks for token in chunk.token_ids]


@pytest.mark.slow
async def test_a_turn_of_a_killed_worker_continues_elsewhere_token_for_token(workers: Workers) -> None:
    victim, _ = await asyncio.gather(workers.spawn("victim"), workers.spawn("heir"))
    workers.send(turn("whole"), worker="heir")
    workers.send(turn("cut"), worker="victim")
    await workers.until(lambda: len(tokens(workers.chunks("cut"))) > TURN_TOKENS // 4)
    victim.send_signal(signal.SIGKILL)
    loop = asyncio.get_running_loop()
    killed_at_s = loop.time()
    await workers.until(lambda: workers.gone)
    assert loop.time() - killed_at_s < 1.0
    assert workers.gone == [("victim", 1, False)]
    accepted = tuple(tokens(workers.chunks("cut")))
    assert len(accepted) < TURN_TOKENS
    workers.send(turn("cut", 2, accepted), worker="heir")
    await workers.finished("whole")
    await workers.finished("cut", 2)
    assert [*accepted, *tokens(workers.chunks("cut", 2))] == tokens(workers.chunks("whole"))


ORCHESTRATOR = """
import asyncio, sys
from elastic.protocol import wire
from elastic.runtime.gateway import Gateway

port, epoch, welcome = sys.argv[1:]

def tell(epoch, message):
    print(epoch, wire.encode(message)[4:].hex(), flush=True)

class Ear:
    def on_ready(self, worker, epoch, ready): tell(epoch, ready)
    def on_message(self, worker, epoch, message): tell(epoch, message)
    def on_tokens(self, worker, epoch, tokens, body): tell(epoch, tokens)
    def on_disconnected(self, worker, epoch, goodbye): pass

async def main():
    gateway = Gateway()
    await gateway.start(port=int(port))
    door = gateway.open("run", Ear(), wire.decode_from_orchestrator(bytes.fromhex(welcome)))
    door.expect("w", "token of w", "key of w", epoch=int(epoch))
    stdin = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stdin), sys.stdin)
    async for line in stdin:
        epoch_to, order = line.split()
        door.send("w", int(epoch_to), wire.decode_from_orchestrator(bytes.fromhex(order.decode())))

asyncio.run(main())
"""


class KilledOrchestrator(Workers):
    """An orchestra whose gateway is a process, which can be killed, and come back at its address."""

    async def rise(self, epoch: int = 0) -> None:
        """As the gateway of an orchestrator that knows so many epochs of the worker."""
        if not epoch:
            with socket.create_server(("127.0.0.1", 0)) as free:
                self.address = "{}:{}".format(*free.getsockname())
        welcome = wire.encode(self.door._welcome)[4:].hex()
        self.process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", ORCHESTRATOR, self.address.split(":")[1], str(epoch), welcome),
            stdin=-1,
            stdout=-1,
            limit=1 << 20,
        )
        self.processes.append(self.process)
        self.hearing = asyncio.create_task(self._hear(self.process))

    async def _hear(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        async for line in process.stdout:
            epoch, body = line.split()
            self.on_message("w", int(epoch), wire.decode_from_worker(bytes.fromhex(body.decode())))

    def send(self, *messages: wire.FromOrchestrator, epoch: int = 1, worker: str = "w") -> None:
        assert self.process.stdin is not None
        for message in messages:
            self.process.stdin.write(f"{epoch} {wire.encode(message)[4:].hex()}\n".encode())

    async def kill(self) -> None:
        self.process.kill()
        await self.hearing


@pytest.mark.nightly
async def test_a_worker_outlives_its_orchestrator_with_its_weights_and_its_kv(workers: Workers, tmp_path: Path) -> None:
    async with KilledOrchestrator(tmp_path) as orchestra:
        await orchestra.rise()
        worker = await orchestra.spawn("w")
        orchestra.send(turn("whole"))
        await orchestra.finished("whole")
        for epoch in (1, 2):
            orchestra.send(turn(f"cut {epoch}"), epoch=epoch)
            await orchestra.until(lambda name=f"cut {epoch}": orchestra.chunks(name))
            await orchestra.kill()
            before = len(orchestra.heard)
            await orchestra.rise(epoch)
            ready = await orchestra.first(wire.Ready, epoch=epoch + 1)
            assert ready.weights_version == 0  # type: ignore[attr-defined]
            whole = tokens(orchestra.chunks("whole"))
            accepted = tuple(whole[: TURN_TOKENS // 2])
            orchestra.send(turn(f"again {epoch}", 1, accepted), epoch=epoch + 1)
            await orchestra.finished(f"again {epoch}")
            again = orchestra.chunks(f"again {epoch}")
            assert [*accepted, *tokens(again)] == whole
            assert again[0].cached_tokens >= len(accepted) // 16 * 16, "its prefix was still there"
            assert not any(isinstance(m, wire.WeightsReport) for _, _, m in orchestra.heard[before:])
        assert worker.returncode is None
        await orchestra.kill()
        output, _ = await asyncio.wait_for(worker.communicate(), 30)
        assert worker.returncode == 1
        assert "could not be resumed within 5.0 s" in output.decode()


@pytest.mark.nightly
async def test_a_frozen_worker_falls_silent_and_is_sent_away_when_it_thaws(workers: Workers) -> None:
    process = await workers.spawn("w")
    workers.send(turn("t"))
    await workers.until(lambda: workers.chunks("t"))
    process.send_signal(signal.SIGSTOP)
    await asyncio.sleep(0.2)  # what it had sent by then arrives
    before = len(workers.heard)
    await asyncio.sleep(5 * 0.2)  # heartbeat intervals
    assert len(workers.heard) == before
    workers.door.fence("w", "silent for too long")
    process.send_signal(signal.SIGCONT)
    output, _ = await asyncio.wait_for(process.communicate(), 10)
    assert process.returncode == 1
    assert "silent for too long" in output.decode()
    assert len(workers.heard) == before


@pytest.mark.slow
async def test_a_worker_told_to_leave_gives_its_turns_back_and_says_goodbye(workers: Workers) -> None:
    process = await workers.spawn("w")
    workers.send(turn("t"))
    await workers.until(lambda: workers.chunks("t"))
    process.terminate()
    output, _ = await asyncio.wait_for(process.communicate(), 10)
    assert process.returncode == 0
    assert output.decode().splitlines()[-1] == "terminated"
    assert workers.chunks("t")[-1].finish is FinishReason.ABORTED
    await workers.until(lambda: workers.gone)
    assert workers.gone == [("w", 1, True)]
    goodbye = workers.heard[-1][2]
    assert isinstance(goodbye, wire.Goodbye)
    assert goodbye.accounts_ns[Account.BOOTING] > 200_000_000, "imports are part of booting"


@pytest.mark.slow
async def test_a_worker_told_to_leave_before_it_is_ready_leaves(workers: Workers) -> None:
    dialled = asyncio.Event()

    async def keep_waiting(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        dialled.set()
        await reader.read()
        writer.close()

    async with await asyncio.start_server(keep_waiting, "127.0.0.1", 0) as server:
        workers.address = "{}:{}".format(*server.sockets[0].getsockname())
        process = await workers.start("w")
        await asyncio.wait_for(dialled.wait(), 20)
        process.terminate()
        output, _ = await asyncio.wait_for(process.communicate(), 10)
    assert process.returncode == 0
    assert output.decode().splitlines()[-1] == "terminated before it was ready"
