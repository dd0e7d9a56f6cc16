"""The agent against a real gateway: turns, weights, sleep, credit, and what happens when the path goes dead."""

import asyncio
import os
import socket
import threading
import time

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from elastic.core.types import NS_PER_S, Account, FinishReason, LoadPhase, WeightMode
from elastic.engine.base import TokenChunk, WeightsMismatch
from elastic.protocol import wire
from elastic.protocol.endpoint import Endpoint
from elastic.weights.errors import WeightsCorrupted, WeightsRefusal
from elastic.weights.source import PullReport, RelaySource
from elastic.worker.accounts import process_start_ns
from elastic.worker.agent import Ticket, run_agent
from elastic.worker.service import Intervals
from tests.bad_link import BadLink
from tests.seeds import examples
from tests.worker.conftest import FETCHED, PATIENCE_S, Orchestra, ScriptedEngine, generate, token_at

FINISH = WeightMode.FINISH


def check_tokens(chunks: list[TokenChunk], seed: int, start: int = 0) -> int:
    """Gapless, in order, right tokens, one finish at the end; returns the position after the last token."""
    at = start
    for chunk in chunks:
        assert chunk.start == at
        assert chunk.token_ids == [token_at(seed, at + i) for i in range(len(chunk.token_ids))]
        at += len(chunk.token_ids)
    assert [chunk.finish is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    return at


async def test_credit_is_announced_right_after_ready(orchestra: Orchestra) -> None:
    orchestra.employ(ScriptedEngine())
    await orchestra.first(wire.Heartbeat)
    ready, beat = (message for _, _, message in orchestra.heard[:2])
    assert isinstance(ready, wire.Ready)
    assert isinstance(beat, wire.Heartbeat)
    assert ready.weights_version is None
    assert beat.capacity_turns == 8


@settings(max_examples=examples(5, 12), deadline=None)
@given(
    seed=st.integers(0, 2**32),
    turns=st.lists(st.tuples(st.integers(0, 20), st.integers(1, 40), st.booleans()), min_size=1, max_size=12),
)
def test_tokens_come_in_order_and_gapless_whatever_the_schedule(seed: int, turns: list[tuple[int, int, bool]]) -> None:
    """`turns`: tokens accepted before, tokens to come, and whether the turn is aborted on its way."""

    async def run() -> None:
        async with Orchestra(flush_interval_s=0.005) as orchestra:
            await orchestra.at_work(ScriptedEngine(seed, iteration_s=0.0005))
            for i, (start, count, abort) in enumerate(turns):
                orchestra.send(generate(f"t{i}", seed=i, start=start, most=start + count, attempt=i + 1))
                if abort:
                    orchestra.send(wire.Abort(f"t{i}", i + 1))
            for i, (start, count, abort) in enumerate(turns):
                last = await orchestra.finished(f"t{i}", i + 1)
                end = check_tokens(orchestra.chunks(f"t{i}", i + 1), i, start)
                assert last.finish is FinishReason.LENGTH or (abort and last.finish is FinishReason.ABORTED)
                assert (last.finish is FinishReason.LENGTH) == (end == start + count)

    asyncio.run(run())


async def test_tokens_are_batched(orchestra: Orchestra) -> None:
    engine = ScriptedEngine(iteration_s=0.001)
    await orchestra.at_work(engine)
    orchestra.send(*(generate(f"t{i}", seed=i, most=200) for i in range(4)))
    for i in range(4):
        await orchestra.finished(f"t{i}")
    frames = orchestra.of(wire.Tokens)
    iterations = engine.statistics().progress
    assert len(frames) < iterations / 4
    assert all(len(set(f.chunks.slots)) == len(f.chunks) for f in frames)


async def test_a_finish_does_not_wait_for_the_batch() -> None:
    async with Orchestra(flush_interval_s=30.0) as orchestra:
        await orchestra.at_work(ScriptedEngine())
        orchestra.send(generate("t", most=5))
        await orchestra.finished("t")


async def test_aborting_gives_back_all_there_is(orchestra: Orchestra) -> None:
    await orchestra.at_work(ScriptedEngine())
    await orchestra.running()
    orchestra.send(wire.Abort("t", 1), wire.Abort("unknown", 1), wire.Abort("t", 2))
    assert (await orchestra.finished("t")).finish is FinishReason.ABORTED
    assert check_tokens(orchestra.chunks("t"), 1) > 0


async def test_accounts_add_up_to_the_process_age_in_every_heartbeat(orchestra: Orchestra) -> None:
    engine = ScriptedEngine()
    ages: list[tuple[int, int]] = []
    born_ns = process_start_ns()
    tick_ns = NS_PER_S // os.sysconf("SC_CLK_TCK")
    note = orchestra.on_message

    def on_message(worker: str, epoch: int, message: wire.FromWorker) -> None:
        if isinstance(message, wire.Heartbeat | wire.Goodbye):
            ages.append((time.monotonic_ns() - born_ns, sum(message.accounts_ns.values())))
        note(worker, epoch, message)

    orchestra.on_message = on_message  # type: ignore[method-assign]
    agent = await orchestra.at_work(engine)
    orchestra.send(wire.PullWeights(1, FINISH), generate("t", most=400))
    await orchestra.finished("t")
    orchestra.send(wire.Sleep(), wire.Wake())
    await orchestra.first(wire.Awoke)
    await orchestra.next(wire.Heartbeat)
    drained_ns = time.monotonic_ns() - born_ns
    orchestra.send(wire.Drain("done"))
    await agent
    assert len(ages) > 5
    for age_ns, sum_ns in ages:
        assert sum_ns <= age_ns + tick_ns
    assert [ns for _, ns in ages] == sorted(ns for _, ns in ages)
    assert ages[-1][1] >= drained_ns - tick_ns
    last = orchestra.of(wire.Goodbye)[0].accounts_ns
    assert last.keys() >= {Account.BOOTING, Account.DECODE, Account.LOADING, Account.IDLE}


async def test_time_without_weights_is_loading_and_then_idle(orchestra: Orchestra) -> None:
    orchestra.employ(ScriptedEngine())
    first = await orchestra.first(wire.Heartbeat)
    await orchestra.next(wire.Heartbeat)
    assert Account.IDLE not in first.accounts_ns
    await orchestra.report_of(0)
    await orchestra.until(lambda: Account.IDLE in orchestra.of(wire.Heartbeat)[-1].accounts_ns)


async def test_sleep_gives_turns_back_first_and_wake_takes_new_ones(orchestra: Orchestra) -> None:
    await orchestra.at_work(ScriptedEngine())
    await orchestra.running()
    orchestra.send(wire.Sleep(), generate("late"))
    await orchestra.first(wire.Slept)
    kinds = [type(message) for _, _, message in orchestra.heard]
    assert wire.Tokens not in kinds[kinds.index(wire.Slept) :]
    assert (await orchestra.finished("t")).finish is FinishReason.ABORTED
    assert (await orchestra.finished("late")).finish is FinishReason.ABORTED
    orchestra.send(wire.Wake())
    await orchestra.first(wire.Awoke)
    beats = [m for _, _, m in orchestra.heard if isinstance(m, wire.Heartbeat)]
    assert beats[-1].capacity_turns == 8, "credit is back by the time the worker says that it is awake"
    orchestra.send(generate("t", attempt=2))
    assert (await orchestra.finished("t", 2)).finish is FinishReason.LENGTH


async def test_weights_are_pulled_applied_and_reported(orchestra: Orchestra) -> None:
    engine = ScriptedEngine()
    await orchestra.at_work(engine)
    report = await orchestra.report_of(3, WeightMode.KEEP)
    assert (report.version, report.error, report.pulled_bytes) == (3, "", 12)
    assert engine.loads == [(3, WeightMode.KEEP)]
    assert report.split_s.keys() == {"encode", "queue", "wire", "decode", "apply", "pause"}
    assert min(report.split_s.values()) >= 0
    assert sum(report.split_s.values()) >= max(report.pull_s, report.apply_s)


async def test_weights_that_are_served_already_are_not_pulled_again(orchestra: Orchestra) -> None:
    engine = ScriptedEngine(version=3)
    await orchestra.at_work(engine)
    assert await orchestra.report_of(3) == wire.WeightsReport(3, "", 0, 0.0, 0.0)
    assert engine.loads == []


async def test_newer_weights_supersede_those_being_pulled(orchestra: Orchestra) -> None:
    engine, pulls, release = ScriptedEngine(), threading.Semaphore(0), threading.Event()

    def fetch(source: RelaySource) -> None:
        pulls.release()
        if source.version < 3:
            release.wait(10)

    engine.fetch = fetch
    await orchestra.at_work(engine)
    for version in (1, 2, 3):
        orchestra.send(wire.PullWeights(version, FINISH))
        assert await asyncio.to_thread(pulls.acquire, timeout=10)
    await orchestra.first(wire.WeightsReport)
    release.set()
    orchestra.send(wire.PullWeights(4, FINISH))
    await orchestra.until(lambda: len(orchestra.of(wire.WeightsReport)) == 2)
    assert [version for version, _ in engine.loads] == [3, 4]
    assert [r.version for r in orchestra.of(wire.WeightsReport)] == [3, 4]


async def test_weights_superseded_while_they_wait_for_the_device_are_not_applied(orchestra: Orchestra) -> None:
    engine, release = ScriptedEngine(), threading.Event()
    engine.before_load = lambda version: None if version > 1 else assert_set(release)
    await orchestra.at_work(engine)
    orchestra.send(wire.PullWeights(1, FINISH))
    for version in (2, 3):
        await orchestra.next(wire.Heartbeat)
        orchestra.send(wire.PullWeights(version, FINISH))
    await orchestra.next(wire.Heartbeat)
    release.set()
    await orchestra.until(lambda: len(orchestra.of(wire.WeightsReport)) == 2)
    assert [version for version, _ in engine.loads] == [1, 3]


async def test_a_version_that_is_served_is_pulled_again_for_another_trainer_only(orchestra: Orchestra) -> None:
    """A resumed trainer has another key, and may have come to other bits under the same number."""
    engine = ScriptedEngine()
    await orchestra.at_work(engine)
    for reports, key in enumerate(["", "", "ab" * 32, "ab" * 32, "cd" * 32], start=1):
        orchestra.send(wire.PullWeights(1, FINISH, key))
        await orchestra.until(lambda: len(orchestra.of(wire.WeightsReport)) == reports)  # noqa: B023
    assert [version for version, _ in engine.loads] == [1, 1, 1]


def assert_set(event: threading.Event) -> None:
    assert event.wait(10)


@pytest.mark.parametrize("problem", ["relay is down", "mismatch"])
async def test_weights_that_cannot_be_had_are_reported_and_not_served(orchestra: Orchestra, problem: str) -> None:
    def fetch(source: RelaySource) -> None:
        if source.version == 1 and problem != "mismatch":
            raise ConnectionError(problem)

    def before_load(version: int) -> None:
        if version == 1:
            raise WeightsMismatch("mismatch: not in the model")

    engine = ScriptedEngine(version=0)
    engine.fetch, engine.before_load = fetch, before_load
    await orchestra.at_work(engine)
    report = await orchestra.report_of(1)
    assert problem in report.error
    assert engine.statistics().weights_version == 0
    orchestra.send(wire.PullWeights(2, FINISH))
    await orchestra.until(lambda: orchestra.of(wire.WeightsReport)[-1].version == 2)


async def test_weights_that_an_audit_finds_wrong_are_pulled_again_and_reported(orchestra: Orchestra) -> None:
    engine, wrong = ScriptedEngine(), threading.Event()
    refusals: list[WeightsRefusal] = []

    def sound() -> bool:
        if not wrong.is_set():
            return True
        wrong.clear()
        refusals.append(WeightsRefusal("weights held", "a tile is wrong"))
        return False

    def fetch(source: RelaySource) -> PullReport:
        told = tuple(refusals)
        refusals.clear()
        return msgspec.structs.replace(FETCHED, refused=told)

    engine.fetch, engine.sound = fetch, sound
    await orchestra.at_work(engine, intervals=Intervals(audit_s=0.01))
    await orchestra.report_of(3)
    wrong.set()
    await orchestra.until(lambda: len(orchestra.of(wire.WeightsReport)) == 2)
    reports = [(r.version, r.error, r.refused) for r in orchestra.of(wire.WeightsReport)]
    assert reports == [(3, "", []), (3, "", [wire.UnverifiedWeights("weights held", "a tile is wrong")])]
    assert [version for version, _ in engine.loads] == [3, 3]


async def test_what_a_failed_pull_refused_is_reported(orchestra: Orchestra) -> None:
    def fetch(source: RelaySource) -> None:
        error = WeightsCorrupted("nothing verifies")
        error.refused = (WeightsRefusal("keyframe of version 1", "torn"),)
        raise error

    engine = ScriptedEngine()
    engine.fetch = fetch
    with capture_logs() as logged:
        await orchestra.at_work(engine)
        report = await orchestra.report_of(1)
    assert "nothing verifies" in report.error
    assert report.refused == [wire.UnverifiedWeights("keyframe of version 1", "torn")]
    (said,) = [line for line in logged if line["event"] == "weights not pulled"]
    assert ("nothing verifies" in said["reason"], said["exc_info"]) == (True, False), "a line, and no stack"


async def test_a_pull_that_hangs_is_given_up() -> None:
    async with Orchestra(pull_timeout_s=0.05) as orchestra:
        engine, release = ScriptedEngine(), threading.Event()
        engine.fetch = lambda source: release.wait(10)
        await orchestra.at_work(engine)
        report = await orchestra.report_of(1)
        release.set()
        assert "not pulled within" in report.error


async def test_a_pull_that_fails_is_told_where_it_was_ordered(orchestra: Orchestra) -> None:
    """On the next connection the weights are ordered again, and that order has not failed."""
    engine, release = ScriptedEngine(), threading.Event()

    def fetch(source: RelaySource) -> object:
        release.wait(10)
        raise WeightsCorrupted("torn")

    def beats(epoch: int, phase: LoadPhase) -> bool:
        return any(e == epoch and isinstance(m, wire.Heartbeat) and m.loading is phase for _, e, m in orchestra.heard)

    engine.fetch = fetch
    await orchestra.at_work(engine)
    orchestra.send(wire.PullWeights(1, FINISH))
    await orchestra.until(lambda: beats(1, LoadPhase.PULLING))
    orchestra.cut()
    await orchestra.first(wire.Ready, epoch=2)
    release.set()
    await orchestra.until(lambda: beats(2, LoadPhase.NONE))
    assert not orchestra.of(wire.WeightsReport)


async def test_weights_wait_for_running_turns_however_long_these_are() -> None:
    async with Orchestra(load_timeout_s=0.1) as orchestra:
        engine = ScriptedEngine()
        engine.finishes_first = True
        agent = await orchestra.at_work(engine)
        await orchestra.running()
        orchestra.send(wire.PullWeights(1, FINISH))
        # Ten heartbeats are several times as long as loading may take.
        await orchestra.until(lambda: [b.loading for b in orchestra.of(wire.Heartbeat)].count(LoadPhase.WAITING) > 10)
        assert not agent.done()
        orchestra.send(wire.Abort("t", 1))
        report = await orchestra.first(wire.WeightsReport)
        assert not report.error
        after = len(orchestra.heard)
        assert (await orchestra.first(wire.Heartbeat, after=after)).loading is LoadPhase.NONE


async def test_an_engine_that_hangs_while_it_applies_weights_ends_the_worker() -> None:
    async with Orchestra(load_timeout_s=0.1) as orchestra:
        engine, release = ScriptedEngine(), threading.Event()
        engine.before_load = lambda version: assert_set(release)
        agent = await orchestra.at_work(engine)
        orchestra.send(generate("t", most=1_000_000), wire.PullWeights(1, FINISH))
        end = await asyncio.wait_for(agent, PATIENCE_S)
        release.set()
        assert (end.code, end.reason) == (1, "TimeoutError: ")


async def test_drain_lets_running_turns_finish_then_says_goodbye(orchestra: Orchestra) -> None:
    agent = await orchestra.at_work(ScriptedEngine())
    orchestra.send(generate("t", most=100), wire.Drain("no longer needed"), generate("late"))
    end = await agent
    assert (end.code, end.reason) == (0, "no longer needed")
    assert orchestra.chunks("t")[-1].finish is FinishReason.LENGTH
    assert orchestra.chunks("late")[-1].finish is FinishReason.ABORTED
    goodbye = orchestra.heard[-1][2]
    assert isinstance(goodbye, wire.Goodbye)
    assert goodbye.accounts_ns[Account.DRAINING] >= 0
    await orchestra.until(lambda: orchestra.gone)
    assert orchestra.gone == [("w", 1, True)]


async def test_drain_gives_back_what_does_not_finish_in_time() -> None:
    async with Orchestra(drain_timeout_s=0.1) as orchestra:
        agent = await orchestra.at_work(ScriptedEngine())
        orchestra.send(generate("t", most=1_000_000), wire.Drain("preempted"))
        assert (await agent).code == 0
        assert orchestra.chunks("t")[-1].finish is FinishReason.ABORTED
        check_tokens(orchestra.chunks("t"), 1)


class Switch:
    """A device share that the test flips."""

    def __init__(self) -> None:
        self.turns = 6
        self.held = False

    def capacity_turns(self, most: int) -> int:
        return min(most, self.turns)

    def acquire_iteration(self) -> int:
        return 0

    def hold_back(self) -> bool:
        return self.held


async def test_credit_follows_the_device_share_without_waiting_for_a_heartbeat() -> None:
    async with Orchestra(heartbeat_interval_s=60.0, silence_timeout_s=300.0) as orchestra:
        share = Switch()
        orchestra.employ(ScriptedEngine(), share=share)
        beat = await orchestra.first(wire.Heartbeat)
        assert beat.capacity_turns == 6
        share.turns = 2
        await orchestra.until(lambda: orchestra.of(wire.Heartbeat)[-1].capacity_turns == 2)


async def test_turns_are_given_back_as_stalled_when_the_owner_needs_the_device(orchestra: Orchestra) -> None:
    share = Switch()
    await orchestra.at_work(ScriptedEngine(), share=share)
    await orchestra.running()
    share.held = True
    assert (await orchestra.finished("t")).finish is FinishReason.STALLED
    check_tokens(orchestra.chunks("t"), 1)
    orchestra.send(generate("late"))
    assert (await orchestra.finished("late")).finish is FinishReason.STALLED
    share.held = False
    orchestra.send(generate("t", attempt=2))
    assert (await orchestra.finished("t", 2)).finish is FinishReason.LENGTH


async def test_a_dead_path_is_left_and_the_session_resumed(orchestra: Orchestra) -> None:
    engine, path = ScriptedEngine(iteration_s=0.005), BadLink(orchestra.address)
    await orchestra.at_work(engine, join=await path.start())
    await orchestra.running()
    path.cut()
    async with asyncio.timeout(PATIENCE_S):
        while engine.statistics().executing:  # noqa: ASYNC110  # the worker has left the path; it tells nobody
            await asyncio.sleep(0.01)
    path.mend()
    await orchestra.first(wire.Ready, epoch=2)
    assert orchestra.gone == [("w", 1, False)]
    orchestra.send(generate("t", attempt=2, start=len(orchestra.chunks("t"))), epoch=2)
    await orchestra.finished("t", 2)
    assert all(chunk.finish is None for chunk in orchestra.chunks("t", 1))
    epochs = [epoch for _, epoch, _ in orchestra.heard]
    assert epochs == sorted(epochs)
    assert engine.statistics().executing == 0, "turns of the old epoch were ended where they ran"
    await path.aclose()


@pytest.mark.parametrize("patience", [{"resume_timeout_s": 0.3}, {"orchestrator_timeout_s": 0.3}], ids=str)
async def test_a_worker_whose_orchestrator_stays_away_exits(patience: dict[str, float]) -> None:
    async with Orchestra(**{"resume_timeout_s": 0.1, "orchestrator_timeout_s": 0.1} | patience) as orchestra:
        engine = ScriptedEngine()
        agent = await orchestra.at_work(engine)
        await orchestra.running()
        await orchestra.gateway.aclose()
        end = await asyncio.wait_for(agent, 10)
        assert end.code == 1
        assert "could not be resumed within 0.3 s" in end.reason
        assert "cannot be reached" in end.reason
        assert engine.closed


@settings(max_examples=examples(5, 12), deadline=None)
@given(
    st.integers(0, 2**32 - 1),
    st.lists(st.sampled_from(["cut", "kill", "kill, and forget", "turn", "weights"]), min_size=1, max_size=8),
)
def test_a_worker_serves_on_whatever_becomes_of_its_orchestrator(seed: int, script: list[str]) -> None:
    """Its connection is cut, or its orchestrator killed, in the middle of anything; the next one may have forgotten the
    last epoch, for want of time to make it durable. Every orchestrator then gets turns as if nothing had been."""
    asyncio.run(_serve_on(seed, script))


async def _serve_on(seed: int, script: list[str]) -> None:
    pulls: list[int] = []
    engine = ScriptedEngine(seed, iteration_s=0.01, version=0)
    engine.fetch = lambda source: pulls.append(source.version)
    orchestra, version = Orchestra(orchestrator_timeout_s=PATIENCE_S), 0
    await orchestra.__aenter__()
    agent = orchestra.employ(engine)
    epoch = await expected(orchestra, version)
    try:
        for number, act in enumerate(script):
            before = len(orchestra.heard)
            orchestra.send(generate(f"{number}", seed=number, most=12), epoch=epoch)
            await orchestra.first(wire.Tokens, after=before)
            match act:
                case "turn":
                    await orchestra.finished(f"{number}")
                    assert check_tokens(orchestra.chunks(f"{number}"), number) == 12
                    continue
                case "weights":
                    version += 1
                    orchestra.send(wire.PullWeights(version, FINISH), epoch=epoch)
                    await orchestra.next(wire.WeightsReport)
                    continue
                case "cut":
                    orchestra.heard.clear()
                    orchestra.cut()
                case _:
                    known = epoch - (act == "kill, and forget")
                    host, port = orchestra.address.split(":")
                    await orchestra.gateway.aclose()
                    orchestra = Orchestra(orchestrator_timeout_s=PATIENCE_S)
                    orchestra.expect("w", epoch=known)
                    orchestra.address = await orchestra.gateway.start(host, int(port))
            epoch = await expected(orchestra, version)
            # The same attempt of the same turn: whoever forgot an epoch has forgotten that, too.
            orchestra.send(generate(f"{number}", seed=number + 100, most=12), epoch=epoch)
            await orchestra.finished(f"{number}")
            assert check_tokens(orchestra.chunks(f"{number}"), number + 100) == 12
        assert pulls == list(range(1, version + 1))
        assert not agent.done()
    finally:
        agent.cancel()
        await asyncio.gather(agent, return_exceptions=True)
        await orchestra.gateway.aclose()


async def expected(orchestra: Orchestra, version: int) -> int:
    """The worker is there with its weights; its epoch."""
    ready = await orchestra.first(wire.Ready)
    assert ready.weights_version == version
    return next(epoch for _, epoch, message in orchestra.heard if message is ready)


async def test_an_orchestrator_may_come_back_while_an_engine_boots() -> None:
    building, built = threading.Event(), threading.Event()

    def build(_: wire.Welcome) -> ScriptedEngine:
        building.set()
        assert built.wait(PATIENCE_S)
        return ScriptedEngine()

    async with Orchestra() as killed:
        killed.expect("w")
        agent = asyncio.create_task(run_agent(killed.ticket("w"), build))
        await asyncio.to_thread(building.wait)
    back = Orchestra()
    try:
        host, port = killed.address.split(":")
        back.address = await back.gateway.start(host, int(port))
        back.expect("w")
        built.set()
        await back.first(wire.Ready, epoch=1)
        back.send(generate("t"))
        await back.finished("t")
    finally:
        agent.cancel()
        await asyncio.gather(agent, return_exceptions=True)
        await back.gateway.aclose()


async def test_a_session_follows_its_new_welcome(orchestra: Orchestra) -> None:
    """Of an orchestrator that counts attempts anew: what the engine still says of the former's is not for it."""
    engine = ScriptedEngine(iteration_s=0.01)
    relays: list[str] = []
    engine.fetch = lambda source: relays.append(source.relay)
    await orchestra.at_work(engine)
    await orchestra.running()
    orchestra.door._sessions["w"].welcome = msgspec.structs.replace(orchestra.door._welcome, relay="elsewhere")
    orchestra.heard.clear()
    orchestra.cut()
    await orchestra.first(wire.Ready, epoch=2)
    before = len(orchestra.chunks("t"))
    orchestra.send(wire.PullWeights(3, FINISH), generate("t", seed=2), epoch=2)
    assert (await orchestra.finished("t")).finish is FinishReason.LENGTH
    check_tokens(orchestra.chunks("t")[before:], 2)
    await orchestra.first(wire.WeightsReport)
    assert relays == ["elsewhere"]


async def test_a_fenced_worker_exits_and_says_why(orchestra: Orchestra) -> None:
    agent = await orchestra.at_work(ScriptedEngine())
    orchestra.door.fence("w", "no heartbeat for 3 s")
    end = await asyncio.wait_for(agent, 10)
    assert end.code == 1
    assert "no heartbeat for 3 s" in end.reason


async def test_a_refused_worker_exits_and_says_why(orchestra: Orchestra) -> None:
    end = await run_agent(orchestra.ticket("nobody"))
    assert (end.code, end.reason) == (1, "unknown worker or wrong token")


async def test_an_orchestrator_that_is_not_there_is_given_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = "{}:{}".format(*taken.getsockname())
    end = await run_agent(Ticket(endpoint=Endpoint(address), run="run", worker="w", token="token", wait_s=0.3))
    assert end.code == 1
    assert f"{address} cannot be reached" in end.reason


async def test_a_worker_waits_for_an_orchestrator_that_is_late() -> None:
    orchestra = Orchestra()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        host, port = taken.getsockname()
    orchestra.address = f"{host}:{port}"
    agent = orchestra.employ(ScriptedEngine())
    try:
        await asyncio.sleep(0.1)  # so that the first attempt fails
        await orchestra.gateway.start(host, port)
        await orchestra.first(wire.Ready)
    finally:
        await orchestra.__aexit__()
    assert agent.done()


@pytest.mark.parametrize("join", ["", "host", "host:", ":80", "host:http", "host:70000"])
async def test_a_join_address_that_is_none_is_named(join: str) -> None:
    with pytest.raises(ValueError, match="allowed: HOST:PORT"):
        await run_agent(Ticket(endpoint=Endpoint(join), run="run", worker="w", token="token"))


async def test_an_engine_that_cannot_be_built_ends_the_worker(orchestra: Orchestra) -> None:
    orchestra.expect("w")

    def build(_: wire.Welcome) -> ScriptedEngine:
        raise ValueError("engine.device: no CUDA here")

    end = await run_agent(orchestra.ticket("w"), build)
    assert end.code == 1
    assert "engine.device: no CUDA here" in end.reason


@pytest.mark.parametrize("prompt", [b"\1\0\0\0\2", [1], "12", {"1": 2}, [None], None])
async def test_an_order_that_cannot_be_read_costs_its_attempt_and_no_connection(
    orchestra: Orchestra, prompt: object
) -> None:
    await orchestra.at_work(ScriptedEngine())
    poison = generate("poison", attempt=7, start=2, most=30)
    msgspec.structs.force_setattr(poison, "token_ids", prompt)
    orchestra.send(poison)
    orchestra.send(generate("sound", seed=5, most=20))
    last = await orchestra.finished("poison", 7)
    assert (last.finish, last.start, last.token_ids) == (FinishReason.ERROR, 2, [])
    assert "cannot read the order" in last.detail
    assert (await orchestra.finished("sound")).finish is FinishReason.LENGTH
    assert orchestra.gone == []
