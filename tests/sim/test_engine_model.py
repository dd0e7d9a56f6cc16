"""The folded engine: whatever happens to it, every token is reported once and every nanosecond is accounted for."""

from collections.abc import Sequence
from functools import partial

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from elastic.core.types import NS_PER_S, Account, Chunk, FinishReason, WeightMode
from elastic.simulation.loop import EventLoop
from elastic.simulation.performance.engine import EngineModel, Job
from elastic.simulation.performance.prefix_cache import PrefixCache
from elastic.simulation.performance.profile import EngineRates

LONGEST = 64
APPLY_S = 0.005


def rates(**changes: float) -> EngineRates:
    return EngineRates(
        **{
            "prefill_tokens_per_s": 1000.0,
            "decode_step_s": {1: 0.01, 8: 0.02},
            "kv_tokens": 4096,
            "kv_block_tokens": 16,
            "prefill_chunk_tokens": 64,
            "max_batch": 4,
            "max_pending": 2,
            "max_context_tokens": 4096,
            **changes,
        }
    )


class Watched:
    """An engine and everything it has sent, checked as it comes."""

    def __init__(self, engine_rates: EngineRates) -> None:
        self.loop = EventLoop()
        self.tokens: dict[str, int] = {}
        self.ended: dict[str, tuple[FinishReason, int]] = {}
        self.versions: dict[str, list[int]] = {}
        self.prefilled = 0
        self.engine = EngineModel(self.loop, engine_rates, self.hear, NS_PER_S // 100)
        self.engine.use_version(1)
        self.engine.set_idle_account(Account.IDLE)

    def hear(self, chunks: Sequence[Chunk]) -> None:
        for chunk in chunks:
            turn = list(self.tokens)[chunk.slot]
            assert turn not in self.ended
            assert chunk.start == self.tokens[turn]
            assert chunk.count >= 0
            self.tokens[turn] = chunk.start + chunk.count
            self.prefilled += chunk.prefilled
            if chunk.count:
                self.versions.setdefault(turn, []).append(chunk.version)
            if chunk.finish is not None:
                self.ended[turn] = (chunk.finish, self.loop.now_ns)

    def submit(
        self, turn: str, prompt: int, length: int, trajectory: str = "", group: str = "", shared: int = 0
    ) -> None:
        """The first `shared` tokens of the prompt are the group's."""
        self.tokens[turn] = 0
        slot = len(self.tokens) - 1
        self.engine.submit(Job(turn, 1, trajectory or turn, group, prompt, 0, length, LONGEST, shared, slot=slot))

    def run(self) -> None:
        self.loop.run(10_000 * NS_PER_S)


def test_one_turn_takes_its_prefill_and_an_iteration_a_token() -> None:
    watched = Watched(rates())
    watched.submit("a", prompt=100, length=11)
    watched.run()
    finish, at_ns = watched.ended["a"]
    assert finish is FinishReason.STOP
    assert watched.tokens["a"] == 11
    assert at_ns == pytest.approx((100 / 1000 + 10 * 0.01) * NS_PER_S, abs=10)


def test_a_full_length_turn_ends_by_length() -> None:
    watched = Watched(rates())
    watched.submit("a", 10, LONGEST)
    watched.run()
    assert watched.ended["a"][0] is FinishReason.LENGTH


def test_context_makes_iterations_longer() -> None:
    watched = Watched(rates(context_s=1e-4))
    watched.submit("a", prompt=100, length=11)
    watched.run()
    grown = sum(0.01 + 1e-4 * (101 + n) for n in range(10))
    assert watched.ended["a"][1] == pytest.approx((0.1 + grown) * NS_PER_S, rel=1e-6)


def test_the_next_turn_of_a_trajectory_finds_its_prefix() -> None:
    watched = Watched(rates())
    watched.submit("a", 100, 12, "talk")
    watched.run()
    watched.submit("b", 120, 4, "talk")
    watched.run()
    assert watched.engine.prefix_hit_tokens == 96
    watched.engine.use_version(2)
    watched.submit("c", 140, 4, "talk")
    watched.run()
    assert watched.engine.prefix_hit_tokens == 96


def test_a_prompt_that_a_group_shares_is_in_memory_once() -> None:
    """Of 2,000 tokens' room, four prompts of 1,000 and what follows them; what is computed of one is found at once."""
    watched = Watched(rates(kv_tokens=2000))
    for member in range(4):
        watched.submit(f"g/{member}", prompt=1000, length=50, group="g", shared=1000)
    watched.loop.run(round(1.5 * NS_PER_S))
    assert watched.engine.executing == 4
    assert watched.engine.prefix_hit_tokens == 3 * 960, "as much as is computed when the last chunk has room for more"
    assert watched.engine.kv_used_share < 1300 / 2000
    watched.run()
    assert watched.engine.kv_used_share == 0
    watched.submit("g/4", prompt=1000, length=5, group="g", shared=1000)
    watched.submit("g/0/1", prompt=1100, length=5, trajectory="g/0", group="g", shared=1000)
    watched.run()
    assert watched.engine.prefix_hit_tokens == 4 * 960 + 1040, "of 1,049 tokens with KV, whole blocks"


def test_a_waiting_turn_begins_when_the_chunk_has_room() -> None:
    watched = Watched(rates())
    for number in range(3):
        watched.submit(f"{number}", prompt=100, length=50)
    watched.loop.run(NS_PER_S // 100)
    assert (watched.engine.executing, watched.engine.pending) == (1, 2)
    watched.loop.run(NS_PER_S // 10)
    assert (watched.engine.executing, watched.engine.pending) == (2, 1)


TURN = st.tuples(st.integers(0, 2000), st.integers(1, 300), st.integers(1, LONGEST), st.integers(0, 4))


@example([(0, 1, 1, 0)], [(1, 0)])
@given(
    st.lists(TURN, min_size=1, max_size=12), st.lists(st.tuples(st.integers(0, 4000), st.integers(0, 11)), max_size=6)
)
def test_nothing_is_lost_or_repeated(turns: list[tuple[int, int, int, int]], aborts: list[tuple[int, int]]) -> None:
    watched = Watched(rates(kv_tokens=512))
    loop, engine = watched.loop, watched.engine
    for number, (at_ms, prompt, length, talk) in enumerate(turns):
        action = partial(watched.submit, f"{number}", prompt, length, f"talk {talk}", f"group {talk % 2}", prompt // 2)
        loop.at(at_ms * NS_PER_S // 1000, action)
    for at_ms, number in aborts:
        loop.at(at_ms * NS_PER_S // 1000, lambda n=number: engine.abort(f"{n}", 1))
        loop.at(at_ms * NS_PER_S // 1000 + 5, engine.flush)
    watched.run()
    assert set(watched.ended) == {f"{number}" for number in range(len(turns))}
    for number, (_, _, length, _) in enumerate(turns):
        finish, _ = watched.ended[f"{number}"]
        whole = FinishReason.LENGTH if length == LONGEST else FinishReason.STOP
        assert finish in (whole, FinishReason.ABORTED)
        assert watched.tokens[f"{number}"] <= length
        if finish is whole:
            assert watched.tokens[f"{number}"] == length
    engine.sync()
    assert sum(engine.accounts_ns.values()) == loop.now_ns
    assert engine.kv_used_share == 0
    assert engine.executing == engine.pending == 0


ITERATION_S = 64 / 1000 + 0.02
"""The longest one: a chunk of prefill, and a full batch."""


@pytest.mark.parametrize("mode", WeightMode)
@given(
    turns=st.lists(TURN, min_size=1, max_size=8),
    swaps=st.lists(st.integers(0, 4000), min_size=1, max_size=4),
    kv_tokens=st.sampled_from((512, 4096)),
)
def test_new_weights_lose_nothing(
    mode: WeightMode, turns: list[tuple[int, int, int, int]], swaps: list[int], kv_tokens: int
) -> None:
    watched = Watched(rates(kv_tokens=kv_tokens))
    loop, engine = watched.loop, watched.engine
    begun: list[int] = []

    def swap() -> None:
        asked_ns = loop.now_ns

        def apply() -> None:
            begun.append(loop.now_ns)
            if mode is WeightMode.FINISH:
                assert engine.executing == 0
            else:
                assert loop.now_ns - asked_ns <= (ITERATION_S + APPLY_S) * NS_PER_S
            loop.after(round(APPLY_S * NS_PER_S), lambda: engine.use_version((engine.version or 0) + 1, mode))

        engine.hold_admissions(apply, mode)

    for number, (at_ms, prompt, length, talk) in enumerate(turns):
        action = partial(watched.submit, f"{number}", prompt, length, f"talk {talk}", f"group {talk % 2}", prompt // 2)
        loop.at(at_ms * NS_PER_S // 1000, action)
    for at_ms in swaps:
        loop.at(at_ms * NS_PER_S // 1000, swap)
    watched.run()
    engine.sync()
    assert engine.version == 1 + len(begun)
    assert watched.tokens == {f"{number}": length for number, (_, _, length, _) in enumerate(turns)}
    assert all(versions == sorted(versions) for versions in watched.versions.values())
    assert sum(engine.accounts_ns.values()) == loop.now_ns
    assert engine.accounts_ns[Account.APPLYING] == pytest.approx(len(begun) * APPLY_S * NS_PER_S)
    assert engine.kv_used_share == 0
    assert engine.executing == engine.pending == 0


@given(st.lists(TURN, min_size=1, max_size=8))
def test_a_prompt_is_prefilled_but_for_what_is_cached(turns: list[tuple[int, int, int, int]]) -> None:
    watched = Watched(rates())
    for number, (at_ms, prompt, length, talk) in enumerate(turns):
        action = partial(watched.submit, f"{number}", prompt, length, f"talk {talk}", f"group {talk % 2}", prompt // 2)
        watched.loop.at(at_ms * NS_PER_S // 1000, action)
    watched.run()
    engine = watched.engine
    assert engine.prompt_tokens == sum(prompt for _, prompt, _, _ in turns)
    assert watched.prefilled == engine.prompt_tokens - engine.prefix_hit_tokens
    assert watched.prefilled >= len(turns)


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 200)), max_size=30), st.integers(0, 300))
def test_a_cache_keeps_to_its_room(kept: list[tuple[str, int]], room: int) -> None:
    cache = PrefixCache(16)
    for key, tokens in kept:
        group = f"group of {key}"
        cached, prompt = cache.take(key, group, tokens)
        assert cached < tokens
        assert prompt is None or prompt.tokens <= cached
        prompt = cache.share(group, tokens // 2, prompt)
        cache.keep(key, tokens, prompt.tokens if prompt else 0)
        if prompt:
            assert cache.leave(group, prompt) == prompt.tokens
        cache.shrink_to(room)
        assert 0 <= cache.tokens <= room
    found = [cache.take(key, f"group of {key}", 1000)[0] for key in "abcd"]
    assert all(tokens % 16 == 0 for tokens in found)
    cache.forget()
    assert cache.tokens == 0
    assert [cache.take(key, f"group of {key}", 1000) for key in "abcd"] == [(0, None)] * 4
