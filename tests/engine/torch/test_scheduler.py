import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.config import EngineConfig
from elastic.engine.torch.pacing import IterationLoad
from elastic.engine.torch.scheduler import BatchScheduler, load_of

CONTEXT = 40


@st.composite
def scenes(draw):
    block_tokens = draw(st.sampled_from([1, 4, 7]))
    least = -(-CONTEXT // block_tokens)
    config = EngineConfig(
        max_batch=draw(st.integers(1, 6)),
        prefill_chunk_tokens=draw(st.integers(1, 50)),
        kv_block_tokens=block_tokens,
        kv_blocks=draw(st.integers(least, 4 * least)),
        max_context_tokens=CONTEXT,
    )
    sizes = st.tuples(st.integers(1, CONTEXT - 1), st.integers(1, CONTEXT))
    return config, draw(st.lists(sizes, min_size=1, max_size=10)), draw(st.lists(st.integers(0, 9), max_size=40))


def _check(scheduler: BatchScheduler, config: EngineConfig, work) -> None:
    scheduler.pool.check()
    assert len(scheduler.running) <= config.max_batch
    prefill = 0
    holders: dict[int, list] = {}
    for sequence in scheduler.running:
        for index, block in enumerate(sequence.blocks):
            holders.setdefault(block, []).append((sequence, index))
    for sharers in holders.values():
        prefixes = {(index, tuple(s.tokens[: (index + 1) * config.kv_block_tokens])) for s, index in sharers}
        assert len(prefixes) == 1, "a block belongs to two sequences that do not share its prefix"
    for sequence, count in work:
        assert sequence in scheduler.running
        assert 1 <= count <= len(sequence.tokens) - sequence.computed
        assert len(sequence.blocks) * config.kv_block_tokens >= sequence.computed + count
        prefill += count if len(sequence.tokens) - sequence.computed > 1 else 0
    assert prefill <= config.prefill_chunk_tokens
    assert sum(load_of(work)) == sum(count for _, count in work)


@given(scenes())
@settings(deadline=None, max_examples=150)
def test_everything_ends_whatever_the_memory(turn, scene):
    config, sizes, events = scene
    scheduler = BatchScheduler(config)
    left = {}
    for index, (prompt, new) in enumerate(sizes):
        sequence = scheduler.add(turn(f"t{index}", prompt=[index % 2] * prompt))
        left[sequence] = min(new, CONTEXT - prompt)
    occasions = iter(events)
    version = 0
    iterations = 0
    while left:
        iterations += 1
        assert iterations < 5_000, "no progress"
        work = scheduler.plan(admit_new=True)
        assert work, "a sequence waits though nothing runs"
        _check(scheduler, config, work)
        samplers = [item.sequence for item in work if item.samples]
        for item in work:
            scheduler.commit(item)
        for sequence in samplers:
            sequence.tokens.append(len(sequence.tokens) % 3)
            left[sequence] -= 1
            if not left[sequence]:
                scheduler.remove(sequence)
                del left[sequence]
        event = next(occasions, None)
        if event in (0, 1):
            version += 1
            scheduler.use_version(version, keep_kv=event == 0)
        elif event == 2 and left:
            aborted = next(iter(left))
            scheduler.remove(aborted)
            del left[aborted]
        _check(scheduler, config, [])
    assert scheduler.pool.used == 0


def test_decoding_goes_on_while_a_long_prompt_is_chunked(turn):
    scheduler = BatchScheduler(EngineConfig(max_batch=4, prefill_chunk_tokens=10))
    first = scheduler.add(turn("first", prompt=5))
    for item in scheduler.plan(admit_new=True):
        scheduler.commit(item)
    first.tokens.append(1)
    second = scheduler.add(turn("second", prompt=25))
    for expected in (10, 10, 5):
        work = scheduler.plan(admit_new=True)
        assert [(item.sequence, item.token_count) for item in work] == [(first, 1), (second, expected)]
        for item in work:
            scheduler.commit(item)
        first.tokens.append(1)


def test_the_newest_is_preempted_and_comes_back_first(turn):
    config = EngineConfig(max_batch=3, kv_block_tokens=4, kv_blocks=5, max_context_tokens=20, prefill_chunk_tokens=99)
    scheduler = BatchScheduler(config)
    old, new = scheduler.add(turn("old", prompt=8)), scheduler.add(turn("new", prompt=12))
    for item in scheduler.plan(admit_new=True):
        scheduler.commit(item)
        item.sequence.tokens.append(1)
    later = scheduler.add(turn("later", prompt=1))
    work = scheduler.plan(admit_new=True)
    assert [item.sequence for item in work] == [old]
    assert list(scheduler.waiting) == [new, later]
    assert scheduler.has_started


@pytest.mark.parametrize("moved", [True, False])
def test_only_a_turn_that_has_moved_pays_again(turn, moved):
    """And not one that its engine preempts itself."""
    config = EngineConfig(max_batch=2, kv_block_tokens=4, kv_blocks=5, max_context_tokens=20, prefill_chunk_tokens=99)
    scheduler = BatchScheduler(config)
    old = scheduler.add(turn("old", prompt=8))
    new = scheduler.add(turn("new", prompt=[3] * 12, recompute=moved))
    work = scheduler.plan(admit_new=True)
    assert load_of(work) == (IterationLoad(0, 8, 12) if moved else IterationLoad(0, 20, 0))
    for item in work:
        scheduler.commit(item)
        item.sequence.tokens.append(1)
    assert load_of(scheduler.plan(admit_new=True)) == IterationLoad(1, 0, 0)  # the cache is full
    scheduler.remove(old)
    assert load_of(scheduler.plan(admit_new=True)) == IterationLoad(0, len(new.tokens) - new.computed, 0)


def test_without_new_admissions_only_the_started_come_back(turn):
    scheduler = BatchScheduler(EngineConfig(max_batch=3))
    started = scheduler.add(turn("started"))
    scheduler.plan(admit_new=True)
    waiting = scheduler.add(turn("waiting"))
    scheduler.use_version(2, keep_kv=False)
    assert [item.sequence for item in scheduler.plan(admit_new=False)] == [started]
    assert list(scheduler.waiting) == [waiting]
