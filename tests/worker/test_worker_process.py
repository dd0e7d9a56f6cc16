"""Workers as processes of their own, with the real engine, killed, frozen and told to leave."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from elastic.config import EngineConfig
from elastic.core.types import Account, FinishReason, SamplingParameters
from elastic.engine.base import TokenChunk
from elastic.protocol import wire
from elastic.protocol.sampled import pack_ids
from elastic.weights.publisher import publish_keyframe
from elastic.weights.relay import open_relay
from tests.worker.conftest import KEY, MODEL, Orchestra, ordered, policy

pytestmark = pytest.mark.alone

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
            model=MODEL.to_dict(),  # type: ignore[arg-type]
            relay=str(relay),  # type: ignore[arg-type]
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
    publish_keyframe(open_relay(str(tmp_path)), "run", 0, policy(), MODEL.to_dict(), KEY)
    async with Workers(tmp_path) as workers:
        yield workers


def turn(name: str, attempt: int = 1, accepted: tuple[int, ...] = ()) -> wire.Generate:
    return wire.Generate(
        name,
        attempt,
        -1,
        len(accepted),
        bytearray(pack_ids([1, 2, 3, *accepted])),
        SamplingParameters(max_new_tokens=TURN_TOKENS, noise_seed=11),
    )


def tokens(chunks: list[TokenChunk]) -> list[int]:
    return [token for chunk in chunks for token in chunk.token_ids]


@pytest.mark.slow
async def test_turns_of_a_killed_worker_continue_elsewhere_and_one_told_to_leave_gives_its_back(
    workers: Workers,
) -> None:
    victim, heir = await asyncio.gather(workers.spawn("victim"), workers.spawn("heir"))
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

    workers.send(turn("left"), worker="heir")
    await workers.until(lambda: workers.chunks("left"))
    heir.terminate()
    output, _ = await asyncio.wait_for(heir.communicate(), 10)
    assert heir.returncode == 0
    assert output.decode().splitlines()[-1] == "terminated"
    assert workers.chunks("left")[-1].finish is FinishReason.ABORTED
    await workers.until(lambda: len(workers.gone) == 2)
    assert workers.gone[-1] == ("heir", 1, True)
    goodbye = workers.heard[-1][2]
    assert isinstance(goodbye, wire.Goodbye)
    assert goodbye.accounts_ns[Account.BOOTING] > 200_000_000, "imports are part of booting"


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
