"""Frames held against what can be true: no lie comes through, and no honest worker is refused."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.core.types import (
    INTEGER_MAX,
    Account,
    Capabilities,
    Chunk,
    FinishReason,
    SamplingParameters,
    WeightMode,
)
from elastic.engine.meter import AccountMeter
from elastic.protocol import wire
from elastic.runtime.validation import BACKWARDS_NS, CLOCK_SLACK_S, DRIFT, Bounds, Claims, Implausible, bounds_of

BOUNDS = Bounds(vocab_size=32, capacity_turns=20)
TRAINER = Bounds(vocab_size=32, capacity_turns=20, trains=True)
S = 10**9
READY = wire.Ready(Capabilities(engine="t", replayable_sampling=True, max_context_tokens=8, device="cpu"), 0, "ab" * 32)


def beat(accounts_ns: dict[Account, int], capacity: int = 4, decoded: int = 0) -> wire.Heartbeat:
    return wire.Heartbeat(capacity, 0, 0, 0, accounts_ns, decoded, 0.0, 0, 0)


def tokens(*slots: int, token: int = 1, version: int = 0, ends: tuple[int, ...] = ()) -> wire.Tokens:
    """One token of each turn; `ends` are the places of the last ones."""
    finishes = [FinishReason.STOP if place in ends else None for place, _ in enumerate(slots)]
    chunks = [Chunk(slot, 0, 1, version, finish) for slot, finish in zip(slots, finishes, strict=True)]
    return wire.Tokens.of((chunk, [token], [-0.5]) for chunk in chunks)


def told(*slots: int, bounds: Bounds = BOUNDS) -> Claims:
    """Of a worker that serves version 0, was told to load version 1, and has these turns."""
    claims = Claims(bounds)
    claims.check(msgspec.structs.replace(READY, publisher=""), 0.0)
    claims.ordered(wire.PullWeights(1, WeightMode.FINISH))
    for slot in slots:
        claims.ordered(
            wire.Generate(f"t{slot}", 1, slot, 0, bytearray(), SamplingParameters(max_new_tokens=8, noise_seed=0))
        )
    return claims


@pytest.mark.parametrize(
    ("lie", "named"),
    [
        (tokens(0, token=32), "vocabulary"),
        (tokens(0, token=-1), "vocabulary"),
        (tokens(0, 7), "was not sent"),
        (tokens(0, version=2), "never told to load"),
        (tokens(0, 1, 0, ends=(0,)), "after its end"),
        (wire.Tokens.of([(Chunk(0, 0, 0, -1), [], [])] * 1000), "chunks without tokens"),
    ],
)
def test_tokens_that_cannot_be_are_named(lie: wire.Tokens, named: str) -> None:
    told(0, 1).check(tokens(0, 1), 0.0)
    with pytest.raises(Implausible, match=named):
        told(0, 1).check(lie, 0.0)


def test_a_slot_is_the_workers_until_its_turn_ends_or_its_epoch_does() -> None:
    claims = told(0, 1, 2)
    claims.check(tokens(0, 1, ends=(1,), version=1), 0.0)
    claims.check(tokens(0), 0.0)
    with pytest.raises(Implausible, match="it has ended"):
        claims.check(tokens(1), 0.0)
    claims.begin_epoch()
    with pytest.raises(Implausible, match="was not sent"):
        claims.check(tokens(0), 0.0)


def test_ids_are_no_negative_numbers_whatever_the_vocabulary() -> None:
    with pytest.raises(Implausible, match="vocabulary"):
        told(0, bounds=Bounds()).check(tokens(0, token=-1), 0.0)


@pytest.mark.parametrize(
    ("lie", "named"),
    [
        (beat({}, capacity=21), "credit"),
        (beat({}, capacity=10**15), "credit"),
        (wire.Trained("0/0", 0.1), "only the trainer"),
        (wire.Stepped(1, {}), "only the trainer"),
        (wire.PublishedFrame(1, {}, {}), "only the trainer"),
        (wire.TrainerFailedFrame("no"), "only the trainer"),
        (READY, "only the trainer"),
        (msgspec.structs.replace(READY, publisher="", groups=["0/0"]), "only the trainer"),
        (msgspec.structs.replace(READY, publisher="", slots=[0]), "only the trainer"),
    ],
)
def test_a_lie_is_named(lie: wire.FromWorker, named: str) -> None:
    with pytest.raises(Implausible, match=named):
        Claims(BOUNDS).check(lie, 0.0)


@pytest.mark.parametrize(
    "message", [wire.Trained("0/0", 0.1), wire.Stepped(1, {}), wire.TrainerFailedFrame("no"), READY]
)
def test_the_trainer_may_say_what_trainers_say(message: wire.FromWorker) -> None:
    Claims(TRAINER).check(message, 0.0)


@given(st.lists(st.tuples(st.integers(0, 10 * S), st.sampled_from(Account), st.floats(0, 5)), min_size=1, max_size=30))
def test_a_meters_readings_are_believed_however_late_they_come(steps: list[tuple[int, Account, float]]) -> None:
    """Whatever its device was at; frames are late by up to 5 s, and none overtakes another."""
    claims, now_ns, heard_s = Claims(BOUNDS), 0, 0.0
    meter = AccountMeter(0, Account.BOOTING)
    for passed_ns, account, late_s in steps:
        now_ns += passed_ns
        heard_s = max(heard_s, now_ns / S + late_s)
        claims.check(beat(meter.read(now_ns), decoded=now_ns // S), heard_s)
        meter.switch(now_ns, {account: 1.0})


@given(st.integers(0, INTEGER_MAX), st.floats(0, 1000))
def test_accounts_grow_no_faster_than_time_passes(grown_ns: int, passed_s: float) -> None:
    claims = Claims(BOUNDS)
    claims.check(beat({Account.BOOTING: 77 * S}), 5.0)
    room_ns = (passed_s * (1 + DRIFT) + CLOCK_SLACK_S) * S
    now = beat({Account.BOOTING: 77 * S, Account.DECODE: grown_ns})
    if grown_ns > room_ns + S:
        with pytest.raises(Implausible, match="more time than has passed"):
            claims.check(now, 5.0 + passed_s)
    elif grown_ns < room_ns - S:
        claims.check(now, 5.0 + passed_s)


@given(st.dictionaries(st.sampled_from(Account), st.integers(0, 10 * S), min_size=1), st.data())
def test_no_account_goes_backwards(accounts_ns: dict[Account, int], data: st.DataObject) -> None:
    claims = Claims(BOUNDS)
    claims.check(beat(accounts_ns), 0.0)
    account = data.draw(st.sampled_from(sorted(accounts_ns)))
    less = data.draw(st.integers(0, accounts_ns[account]))
    now = beat(accounts_ns | {account: less})
    if accounts_ns[account] - less > BACKWARDS_NS:
        with pytest.raises(Implausible, match="backwards"):
            claims.check(now, 1.0)
    else:
        claims.check(now, 1.0)


def test_tokens_are_decoded_in_time() -> None:
    claims = Claims(BOUNDS)
    claims.check(beat({}, decoded=5_000), 0.0)
    claims.check(beat({}, decoded=50_000), 1.0)
    with pytest.raises(Implausible, match="more tokens"):
        claims.check(beat({}, decoded=INTEGER_MAX), 2.0)


def test_bounds_are_those_of_the_workers_engine_and_model() -> None:
    engine, model = {"max_batch": 3, "max_pending": 2, "max_context_tokens": 64}, {"vocab_size": 9}
    found = bounds_of(engine, model, trains=False)
    assert found == Bounds(vocab_size=9, capacity_turns=5)
    assert bounds_of({}, {}, trains=True) == Bounds(trains=True)
