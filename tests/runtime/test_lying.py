"""Workers that hold valid sessions and lie: nothing but themselves suffers."""

import asyncio
import contextlib
from collections.abc import Callable
from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import lying
from elastic.core.types import Capabilities, SamplingParameters
from elastic.protocol import wire
from elastic.runtime.gateway import Door, Gateway
from elastic.runtime.validation import Claims, bounds_of
from elastic.testing.faults.core.lies import KINDS, ByzantineWorker
from tests.seeds import examples

PATIENCE_S = 20.0
ENGINE = {"max_batch": 4, "max_pending": 2, "max_context_tokens": 512}
MODEL = {"vocab_size": 64}
CAPABILITIES = Capabilities(engine="test", replayable_sampling=True, max_context_tokens=512, device="none")
WELCOME = wire.Welcome("", 0, 5.0, 0.03, 10.0, ENGINE, MODEL, "")


class Ear:
    def __init__(self) -> None:
        self.heard: list[tuple[str, object]] = []
        self.barred: list[str] = []
        self.gone: list[str] = []
        self.news = asyncio.Event()

    def on_ready(self, worker: str, epoch: int, ready: wire.Ready) -> None:
        self._note(worker, ready)

    def on_message(self, worker: str, epoch: int, message: wire.FromWorker) -> None:
        self._note(worker, message)

    def on_disconnected(self, worker: str, epoch: int, goodbye: bool) -> None:
        self.gone.append(worker)
        self.news.set()

    def on_barred(self, worker: str, epoch: int, cause: str) -> None:
        assert cause.strip()
        self.barred.append(worker)
        self.news.set()

    def _note(self, worker: str, message: object) -> None:
        assert worker not in self.barred, "a barred worker is heard no more"
        self.heard.append((worker, message))
        self.news.set()

    async def until(self, condition: Callable[[], object]) -> None:
        while not condition():
            self.news.clear()
            await self.news.wait()

    def of(self, worker: str) -> list[object]:
        return [message for who, message in self.heard if who == worker]


def framed(body: bytes) -> bytes:
    return len(body).to_bytes(4) + body


async def join(door: Door, address: str, worker: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    door.expect(worker, "token", f"key of {worker}")
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(wire.encode(wire.Hello(wire.PROTOCOL_VERSION, worker, "token", False, 1, "here", "run")))
    assert await reader.read(1 << 16)
    writer.write(wire.encode(wire.Ready(CAPABILITIES, 0)))
    return reader, writer


@settings(max_examples=examples(16, 40), deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(KINDS), st.randoms(use_true_random=False)), min_size=1, max_size=5), st.data()
)
def test_whatever_a_byzantine_worker_says_the_others_are_heard(
    lies: list[tuple[type, Random]], data: st.DataObject
) -> None:
    """Lies of any kind, one after the other, between the words of an honest worker."""
    bodies = [ByzantineWorker(rng, lambda: ["0/0/0/0", "honest"]).frame(kind) for kind, rng in lies]
    asyncio.run(_lie(bodies, between=[data.draw(st.integers(0, 3)) for _ in lies]))


async def _lie(bodies: list[bytes], between: list[int]) -> None:
    faults: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: faults.append(context))
    ear = Ear()
    gateway = Gateway()
    door = gateway.open("run", ear, WELCOME)
    address = await gateway.start()
    _, honest = await join(door, address, "honest")
    reader, byzantine = await join(door, address, "byzantine")
    sampling = SamplingParameters(max_new_tokens=8, noise_seed=0)
    orders = [wire.Generate(f"t{slot}", 1, slot, 0, bytearray(), sampling) for slot in range(6)]
    await ear.until(lambda: ear.of("honest") and ear.of("byzantine"))
    for order in orders:
        door.send("byzantine" if order.slot < 3 else "honest", 1, order)
    said = 0
    for body, count in zip(bodies, between, strict=True):
        for _ in range(count):
            said += 1
            honest.write(wire.encode(wire.WeightsReport(said, "", 0, 0.0, 0.0)))
        byzantine.write(framed(body))
    byzantine.write_eof()
    async with asyncio.timeout(PATIENCE_S):
        with contextlib.suppress(ConnectionError):
            while await reader.read(1 << 16):
                pass
        said += 1
        honest.write(wire.encode(wire.WeightsReport(said, "", 0, 0.0, 0.0)))
        await ear.until(lambda: len(ear.of("honest")) > said)
    assert [m.version for m in ear.of("honest")[1:]] == list(range(1, said + 1))  # type: ignore[attr-defined]
    assert "honest" not in ear.barred
    assert "honest" not in ear.gone
    assert not faults
    claims = Claims(bounds_of(ENGINE, MODEL, trains=False))
    for order in orders[:3]:
        claims.ordered(order)
    for message in ear.of("byzantine"):
        body = msgspec.msgpack.encode(message)
        claims.check(wire.decode_from_worker(body), 0.0)
    for writer in (honest, byzantine):
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
    await gateway.aclose()


@pytest.mark.nightly
@pytest.mark.alone
async def test_a_run_with_byzantine_workers_is_the_run_without_them() -> None:
    found = await lying.measure(frames=10 * len(KINDS), seed=3)
    assert found["kinds"].keys() == {wire.kind_of(kind) for kind in KINDS}
    assert min(found["kinds"].values()) >= 10
    assert (found["runs_ended"], found["cause"]) == (0, "")
    assert found["other_workers_fenced"] == 0
    assert found["rows"] > 200
    assert found["wrong_rows"] == 0
    assert found["liars_barred"] > 5 * len(KINDS)
    assert found["turns_of_liars"] > 0
