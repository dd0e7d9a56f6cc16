"""Phases against a pool on a real socket: time slices, recalls, a pool that goes away, and what a script may not do."""

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

import elastic
from elastic.core.cluster.types import PhaseKind
from elastic.pool import messages as w
from elastic.pool import phases
from elastic.pool.phases import PhaseError
from elastic.pool.phases.slime import SlimePhases
from elastic.system.devices import visible
from tests.phases.stub_pool import PATIENCE_S, StubPool

ROLLOUT, TRAIN = PhaseKind.ROLLOUT, PhaseKind.TRAIN


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Iterator[StubPool]:
    with StubPool() as stub:
        for name, value in stub.environment().items():
            monkeypatch.setenv(name, value)
        yield stub
        phases.leave()


def eventually(condition: Callable[[], bool]) -> None:
    until_s = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < until_s
        time.sleep(0.001)


class Sleeper:
    def __init__(self) -> None:
        self.awake = True

    def park(self) -> None:
        self.awake = False

    def resume(self) -> None:
        self.awake = True


def told(pool: StubPool) -> list[object]:
    """What was said but for numbers that vary."""
    return [
        w.YieldPhase(message.permit, message.finished) if isinstance(message, w.YieldPhase) else message
        for message in pool.heard
        if not isinstance(message, w.JobHello)
    ]


def test_a_script_takes_its_turns_with_its_states(pool: StubPool) -> None:
    engine, model = Sleeper(), nn.Linear(3, 3)
    optimiser = torch.optim.Adam(model.parameters())
    seen: list[tuple[bool, bool]] = []

    @elastic.phase("rollout", state=[engine])
    def rollout() -> int:
        elastic.progress(1, 4)
        assert pool.held is not None
        seen.append((engine.awake, pool.held.phase is ROLLOUT))
        return 7

    for _ in range(2):
        assert rollout() == 7
        assert not engine.awake
        with elastic.phase("sync"):
            pool.until(lambda stub: stub.held is None)
        with elastic.phase("train", state=lambda: [model, optimiser]):
            seen.append((not engine.awake, pool.held is not None and pool.held.phase is TRAIN))
            model(torch.ones(3)).sum().backward()
            optimiser.step()
    pool.until(lambda stub: len(stub.said(w.StepsDone)) == 2)
    assert seen == [(True, True)] * 4
    assert told(pool) == [
        message
        for step in (1, 2)
        for message in (
            w.AskPhase(ROLLOUT),
            w.PhaseProgress(2 * step - 1, 1, 4),
            w.YieldPhase(2 * step - 1, True),
            w.AskPhase(TRAIN),
            w.YieldPhase(2 * step, True),
            w.StepsDone(step),
        )
    ]
    assert pool.said(w.JobHello) == [w.JobHello(w.POOL_PROTOCOL_VERSION, "script", "token", 3, script=True)]


def test_a_recalled_phase_gives_way_and_goes_on_in_its_next_turn(pool: StubPool) -> None:
    engine = Sleeper()
    with elastic.phase("rollout", state=[engine]):
        assert not elastic.should_yield()
        pool.change(recalled=True, left_s=5.0)
        eventually(elastic.should_yield)
        pool.grants = False
        waiting = threading.Thread(target=elastic.yield_device)
        waiting.start()
        pool.until(lambda stub: len(stub.said(w.AskPhase)) == 2)
        assert not engine.awake
        pool.grant(ROLLOUT)
        waiting.join(20)
        assert engine.awake
        assert not elastic.should_yield()
    pool.until(lambda stub: len(stub.said(w.YieldPhase)) == 2)
    assert told(pool) == [
        w.AskPhase(ROLLOUT),
        w.YieldPhase(1, False),
        w.AskPhase(ROLLOUT),
        w.YieldPhase(2, True),
    ]


def test_a_phase_outlives_the_pools_process_and_its_end_is_told(pool: StubPool) -> None:
    with elastic.phase("rollout"):
        pool.stop()
        pool.start()
        pool.until(lambda stub: stub.welcomes == 2)
        assert not elastic.should_yield()
        pool.stop()
    pool.start()
    pool.until(lambda stub: len(stub.said(w.YieldPhase)) == 1)
    assert pool.said(w.YieldPhase)[0].permit == 1
    with elastic.phase("train"):
        assert pool.held is not None
        assert pool.held.permit == 2


def test_a_grant_that_was_lost_with_its_connection_is_in_the_welcome(pool: StubPool) -> None:
    pool.grants = False
    entered = threading.Event()

    def script() -> None:
        with elastic.phase("rollout"):
            entered.set()

    thread = threading.Thread(target=script)
    thread.start()
    pool.until(lambda stub: len(stub.said(w.AskPhase)) == 1)
    pool.stop()
    pool.permits, pool.held = 9, w.Granted(9, ROLLOUT, ("rollout-1",), 10.0)
    pool.start()
    assert entered.wait(20)
    thread.join(20)
    pool.until(lambda stub: [each.permit for each in stub.said(w.YieldPhase)] == [9])


def test_a_permit_that_the_pool_does_not_know_is_not_yielded(pool: StubPool) -> None:
    with elastic.phase("rollout"):
        pool.tell(w.PermitOver(1, "its node is gone"))
        eventually(elastic.should_yield)
        pool.held = None
    with elastic.phase("train"):
        pass
    pool.until(lambda stub: len(stub.said(w.YieldPhase)) == 1)
    assert pool.said(w.YieldPhase)[0].permit == 2


def test_a_turn_that_nobody_waits_for_ends(pool: StubPool) -> None:
    with elastic.phase("rollout"):
        pass
    pool.until(lambda stub: len(stub.said(w.YieldPhase)) == 1)
    pool.grant(TRAIN)
    pool.until(lambda stub: len(stub.said(w.YieldPhase)) == 2)
    assert pool.held is None


def test_who_can_give_up_nodes_is_asked_to(pool: StubPool) -> None:
    asked: list[tuple[str, ...]] = []

    def cannot(nodes: tuple[str, ...]) -> None:
        asked.append(())
        raise RuntimeError(f"not to {nodes}")

    elastic.on_consolidate(asked.append)
    with elastic.phase("rollout"):
        pool.change(tail=("rollout-1",))
        pool.until(lambda stub: stub.said(w.TailLeft) == [w.TailLeft(1)])
    elastic.on_consolidate(cannot)
    with elastic.phase("rollout"):
        pool.change(tail=("rollout-2",))
        eventually(lambda: len(asked) == 2)
    assert asked == [("rollout-1",), ()]
    assert len(pool.said(w.TailLeft)) == 1


def test_phases_follow_one_another(pool: StubPool) -> None:
    @elastic.phase("train")
    def update() -> None: ...

    @elastic.phase("rollout")
    def generate() -> None:
        update()

    with pytest.raises(
        PhaseError, match=r"phase 'train' \(.*update, test_turns.py:\d+\) comes before any phase 'rollout'"
    ):
        update()
    assert pool.welcomes == 0, "a mistake asks for nothing"
    with pytest.raises(
        PhaseError,
        match=r"phase 'train' \(.*update, test_turns.py:\d+\) begins within phase 'rollout' \(.*generate, test",
    ):
        generate()
    pool.until(lambda stub: len(stub.said(w.YieldPhase)) == 1)
    assert not pool.said(w.YieldPhase)[0].finished
    update()


def test_a_coroutine_is_a_phase_and_a_generator_is_none(pool: StubPool) -> None:
    @elastic.phase("rollout")
    async def generate() -> bool:
        await asyncio.sleep(0)
        return pool.held is not None

    assert asyncio.run(generate())
    pool.until(lambda stub: stub.held is None)
    with pytest.raises(PhaseError, match="a generator"):

        @elastic.phase("rollout")
        def stream() -> Iterator[int]:
            yield 1


def test_both_at_once_is_one_question(pool: StubPool) -> None:
    with elastic.phase("rollout", both=True):
        pass
    with elastic.phase("sync", state=[Sleeper()], both=True):
        pass
    with elastic.phase("train"):
        pass
    assert [ask.both for ask in pool.said(w.AskPhase)] == [True, True, False]


def test_slimes_phases_hold_the_nodes_of_their_role(pool: StubPool) -> None:
    callback = SlimePhases()
    for phase, role in (("init", "both"), ("generate", "sampler"), ("train", "trainer"), ("weight_sync", "both")):
        callback.on_phase_begin(phase, role, {"rollout_id": 0})
        callback.on_phase_end(phase, role)
    callback.close()
    wanted = [(TRAIN, True), (ROLLOUT, False), (TRAIN, False), (TRAIN, True)]
    pool.until(lambda stub: [(ask.phase, ask.both) for ask in stub.said(w.AskPhase)] == wanted)
    with pytest.raises(PhaseError, match="role: found 'critic'"):
        callback.on_phase_begin("train", "critic")


def test_who_needs_both_pools_does_not_begin_with_one_of_them(pool: StubPool) -> None:
    """A grant of an earlier wish that was on its way is given back."""
    pool.grants = False
    began = threading.Event()

    def enter() -> None:
        with elastic.phase("rollout", both=True):
            began.set()

    thread = threading.Thread(target=enter)
    thread.start()
    pool.until(lambda stub: bool(stub.said(w.AskPhase)))
    pool.grant(ROLLOUT)
    pool.until(lambda stub: stub.said(w.YieldPhase) == [w.YieldPhase(1, finished=True)])
    assert not began.is_set()
    pool.grant(TRAIN, both=True)
    thread.join(PATIENCE_S)
    assert began.is_set()
    pool.until(lambda stub: [told.permit for told in stub.said(w.YieldPhase)] == [1, 2])


def test_who_is_not_let_in_hears_why(pool: StubPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ELASTIC_POOL_TOKEN", "old")
    for _ in range(2):
        with pytest.raises(PhaseError, match="an older process"), elastic.phase("rollout"):
            pass


def test_no_turn_in_the_time_that_was_promised(pool: StubPool) -> None:
    pool.grants, pool.grant_within_s = False, 0.2
    with (
        pytest.raises(PhaseError, match=r"no time slice for phase 'rollout' came within 0\.2 s"),
        elastic.phase("rollout"),
    ):
        pass
    pool.until(lambda stub: stub.said(w.WithdrawPhase) == [w.WithdrawPhase(ROLLOUT)])


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("ELASTIC_POOL_TOKEN", None, "ELASTIC_POOL_TOKEN is not"),
        ("ELASTIC_POOL_PLACEMENT", "x", "found 'x'; allowed: a number"),
    ],
)
def test_a_half_named_pool_is_an_error(
    pool: StubPool, monkeypatch: pytest.MonkeyPatch, variable: str, value: str | None, message: str
) -> None:
    monkeypatch.delenv(variable) if value is None else monkeypatch.setenv(variable, value)
    with pytest.raises(PhaseError, match=message), elastic.phase("rollout"):
        pass


def test_a_phase_that_there_is_not_is_named_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ELASTIC_POOL", raising=False)
    with pytest.raises(PhaseError, match="phase 'trian': allowed: rollout, train, sync"):
        elastic.phase("trian")  # type: ignore[arg-type]
    with pytest.raises(PhaseError, match="holds no device"):
        elastic.phase("sync", state=[Sleeper()])


def test_outside_of_a_pool_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ELASTIC_POOL", raising=False)
    engine = Sleeper()

    @elastic.phase("train", state=[engine, object()])
    def update(value: int) -> int:
        with elastic.phase("rollout", state=[engine]):
            elastic.progress(5, 2)
            elastic.yield_device()
            elastic.steps_done(-1)
            elastic.on_consolidate(print)
        return value + int(elastic.should_yield())

    assert update(3) == 3
    assert engine.awake


def test_elastic_is_light() -> None:
    code = (
        "import sys, elastic\n"
        "elastic.phase('rollout').__enter__()\n"
        "heavy = {'torch', 'msgspec', 'asyncio', 'numpy', 'pydantic'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    environment = {"PATH": "/usr/bin:/bin"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=60)
    assert done.returncode == 0, done.stderr


def test_a_script_that_sees_other_devices_than_its_node_has_ends_before_its_first_phase(pool: StubPool) -> None:
    code = (
        "import os, elastic\n"
        "os.environ['CUDA_VISIBLE_DEVICES'] = '0,1'\n"
        "with elastic.phase('rollout'):\n"
        "    print('it computes')\n"
    )
    environment = {"PATH": "/usr/bin:/bin", **pool.environment(), **visible(("cuda:0",))}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=60)
    assert (done.returncode, done.stdout) == (w.UNFIT_STATUS, "")
    assert "CUDA_VISIBLE_DEVICES: found '0,1'; allowed: '0', of cuda:0" in done.stderr
