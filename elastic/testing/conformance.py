"""What every `RolloutEngine` must do, as tests of pytest; `elastic.testing.engines` has their fixtures."""

# pyright: basic

import math
import threading
import time
from typing import Any

import msgspec
import pytest
import torch

from elastic.core.types import Account, FinishReason, WeightMode
from elastic.engine.base import WeightsMismatch
from elastic.system.parking import Parkable
from elastic.testing.engines import CONFIG
from elastic.weights.directory import DirectoryRelay
from elastic.weights.errors import VersionSuperseded, WeightsError
from elastic.weights.publisher import Publisher
from elastic.weights.signing import SigningKey
from elastic.weights.source import RelaySource

LONG = 80
EXACT = 1e-3
"""A tolerance below which two models cut off the same tokens."""
PACED = {"pacing": {"prefill_tokens_per_s": 1e6, "decode_step_s": {1: 0.005, 16: 0.005}}}


def counting(length):
    return [place % CONFIG.vocab_size for place in range(length)]


def test_serves_nothing_before_the_first_weights(make_engine, turn, published):
    recorder = make_engine(version=None)
    request = turn("a")
    recorder.engine.submit([request])
    before = recorder.engine.statistics()
    assert before.weights_version is None
    assert (before.pending, before.executing, before.progress) == (1, 0, 0)
    recorder.load(published(7))
    recorder.finish("a")
    assert recorder.versions("a") == [7] * 12


def test_streams_are_gapless_and_end_once(make_engine, turn):
    recorder = make_engine(max_batch=4)
    requests = [turn(f"t{i}", prompt=5 + 9 * i, max_new_tokens=3 + i) for i in range(9)]
    before = recorder.engine.statistics()
    recorder.run(*requests)
    for request in requests:
        recorder.check(request)
        end = recorder.end(request.request_id)
        assert end.finish is FinishReason.LENGTH
        assert len(recorder.tokens(request.request_id)) == request.sampling.max_new_tokens
        first = recorder.of(request.request_id)[0]
        assert first.cached_tokens + first.prefilled_tokens == len(request.token_ids)
    after = recorder.engine.statistics()
    assert (after.pending, after.executing, after.kv_blocks_used) == (0, 0, 0)
    said = sum(request.sampling.max_new_tokens for request in requests)
    assert after.decoded_tokens - before.decoded_tokens == said


def test_a_stop_token_is_emitted_and_ends_the_turn(make_engine, turn):
    recorder = make_engine()
    (free,) = recorder.run(turn("free", prompt=[1, 2, 3], noise_seed=5, max_new_tokens=30))
    stop = free[10]
    (stopped,) = recorder.run(
        turn("stopped", prompt=[1, 2, 3], noise_seed=5, max_new_tokens=30, stop_token_ids=(stop,))
    )
    assert stopped == free[: free.index(stop) + 1]
    assert recorder.end("stopped").finish is FinishReason.STOP


def test_max_new_tokens_counts_what_was_accepted_before(make_engine, turn):
    recorder = make_engine()
    (tokens,) = recorder.run(turn("moved", prompt=20, start=8, max_new_tokens=12))
    assert len(tokens) == 4
    assert recorder.of("moved")[0].start == 8
    (none,) = recorder.run(turn("over", prompt=20, start=12, max_new_tokens=12))
    assert none == []
    assert recorder.end("over").finish is FinishReason.LENGTH


def test_the_context_ends_a_turn(make_engine, turn):
    recorder = make_engine(max_context_tokens=64)
    for name, prompt in (("near", 60), ("full", 64)):
        (tokens,) = recorder.run(turn(name, prompt=prompt, max_new_tokens=30))
        assert len(tokens) == 64 - prompt
        assert recorder.end(name).finish is FinishReason.LENGTH


@pytest.mark.parametrize(
    ("fields", "detail"),
    [
        ({"prompt": []}, "empty prompt"),
        ({"prompt": [1, 2], "start": 2}, "empty prompt"),
        ({"prompt": [1, 2], "start": -1}, "empty prompt"),
        ({"prompt": [1] * 257}, "prompt too long: 257 tokens; at most 256"),
        ({"prompt": [1, 32, 2]}, "token id 32 is not in the vocabulary"),
        ({"prompt": [1, -1, 2]}, "token id -1 is not in the vocabulary"),
        ({"temperature": -0.5}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
    ],
)
def test_a_bad_request_ends_alone(make_engine, turn, fields, detail):
    recorder = make_engine()
    recorder.run(turn("good"), turn("bad", **fields), turn("good too"))
    end = recorder.end("bad")
    assert (end.finish, end.token_ids) == (FinishReason.ERROR, [])
    assert detail in end.detail
    assert recorder.end("good").finish is recorder.end("good too").finish is FinishReason.LENGTH


def test_a_repeated_request_joins_the_living_one(make_engine, turn):
    recorder = make_engine()
    request = turn("a")
    recorder.hold()
    recorder.engine.submit([request, request])
    recorder.until_tokens("a", 1)
    recorder.engine.submit([request])
    recorder.release()
    recorder.finish("a")
    recorder.check(request)
    once = recorder.tokens("a")
    assert recorder.run(turn("b", prompt=request.token_ids, noise_seed=request.sampling.noise_seed)) == [once]


def test_abort_ends_the_living_and_only_them(make_engine, turn, engine_under_test):
    recorder = make_engine(max_batch=2, max_pending=4)
    requests = [turn(name, max_new_tokens=LONG) for name in ("a", "b", "waiting")]
    recorder.hold()
    recorder.engine.submit(requests)
    recorder.until_tokens("a", 1)
    recorder.engine.abort(["a", "waiting", "unknown"])
    recorder.release()
    recorder.finish("a", "b", "waiting")
    for request in requests:
        recorder.check(request)
    assert recorder.end("a").finish is recorder.end("waiting").finish is FinishReason.ABORTED
    assert len(recorder.tokens("a")) <= (2 if engine_under_test.waits_for_sink else LONG - 1)
    assert recorder.tokens("waiting") == []
    assert len(recorder.tokens("b")) == LONG
    chunks = len(recorder.chunks)
    recorder.engine.abort(["a", "b"])
    recorder.run(turn("later"))
    assert all(chunk.request_id == "later" for chunk in recorder.chunks[chunks:])


def _renamed(tensors):
    tensors["model.norm.scale"] = tensors.pop("model.norm.weight")


def _extra(tensors):
    tensors["model.extra.weight"] = torch.ones(2, dtype=torch.bfloat16)


def _reshaped(tensors):
    tensors["model.norm.weight"] = torch.ones(64, dtype=torch.bfloat16)


@pytest.mark.parametrize("spoil", [_renamed, _extra, _reshaped])
def test_weights_that_do_not_fit_are_refused_and_the_old_ones_serve_on(make_engine, turn, weights, published, spoil):
    recorder = make_engine()
    tensors = weights(2)
    spoil(tensors)
    with pytest.raises(WeightsMismatch, match=r"model\.(norm|extra)"):
        recorder.load(published(2, tensors, spoil.__name__.strip("_")))
    assert recorder.engine.statistics().weights_version == 1
    (after,) = recorder.run(turn("a"))
    assert recorder.versions("a") == [1] * 12
    assert make_engine().run(turn("a")) == [after]


def test_finish_lets_running_turns_end_and_starts_no_new_ones(make_engine, turn, published):
    recorder = make_engine(max_batch=1, **PACED)
    recorder.engine.submit([turn("old", max_new_tokens=LONG), turn("new")])
    recorder.until_tokens("old", 1)
    recorder.load(published(2))
    assert len(recorder.tokens("old")) == LONG
    recorder.finish("new")
    assert set(recorder.versions("old")) == {1}
    assert set(recorder.versions("new")) == {2}
    assert make_engine(2).run(turn("new")) == [recorder.tokens("new")]


@pytest.mark.parametrize("mode", [WeightMode.RECOMPUTE, WeightMode.KEEP])
def test_running_turns_go_on_under_the_new_weights(make_engine, turn, published, mode):
    recorder = make_engine(**PACED)
    request = turn("a", max_new_tokens=LONG)
    recorder.engine.submit([request])
    recorder.until_tokens("a", 5)
    recorder.load(published(2), mode)
    recorder.finish("a")
    recorder.check(request)
    versions, tokens = recorder.versions("a"), recorder.tokens("a")
    switch = versions.index(2)
    assert versions == [1] * switch + [2] * (LONG - switch)
    assert tokens[:switch] == make_engine(1).run(request)[0][:switch]
    fresh = make_engine(2)
    moved = turn("a", prompt=request.token_ids + tokens[:switch], start=switch, max_new_tokens=LONG)
    (continued,) = fresh.run(moved)
    same = continued == tokens[switch:] and fresh.logprobs("a") == recorder.logprobs("a")[switch:]
    if recorder.engine.capabilities.replayable_sampling:
        assert same is (mode is WeightMode.RECOMPUTE)


def test_kv_of_one_version_is_never_found_by_another(make_engine, turn, published, engine_under_test):
    block_tokens = engine_under_test.block_tokens
    recorder = make_engine(kv_block_tokens=block_tokens)
    prompt = counting(4 * block_tokens - 2)
    for version, mode in ((1, WeightMode.FINISH), (2, WeightMode.KEEP), (3, WeightMode.RECOMPUTE)):
        recorder.load(published(version), mode)
        name = f"v{version}"
        recorder.run(turn(name, prompt=prompt))
        assert recorder.of(name)[0].cached_tokens == 0
        recorder.run(turn(name + " again", prompt=prompt))
        assert recorder.of(name + " again")[0].cached_tokens == 3 * block_tokens


def test_kv_of_a_version_that_was_retrained_is_never_found(make_engine, turn, weights, engine_under_test, tmp_path):
    """The trainer's next process has come to other bits under the same number; what runs goes on with the KV it has."""
    block_tokens = engine_under_test.block_tokens
    recorder = make_engine(version=None, kv_block_tokens=block_tokens)
    prompt = counting(4 * block_tokens - 2)
    for life in range(2):
        key, place = SigningKey(), tmp_path / str(life)
        publisher = Publisher(DirectoryRelay(place), "run", CONFIG.to_dict(), key=key)
        publisher.publish(1, weights(life))
        publisher.close()
        recorder.load(RelaySource(run="run", version=1, relay=str(place), publisher=key.public), WeightMode.KEEP)
        recorder.run(turn(f"life {life}", prompt=prompt))
        assert recorder.of(f"life {life}")[0].cached_tokens == 0
        running = turn(f"running {life}", prompt=prompt, max_new_tokens=LONG)
        recorder.engine.submit([running])
        recorder.until_tokens(running.request_id, 5)
        assert recorder.of(running.request_id)[0].cached_tokens == 3 * block_tokens


def test_a_delta_makes_the_weights_of_its_keyframe(make_engine, turn, weights, published, tmp_path):
    """Fetched and applied while turns run, tensor by tensor as a small step would change them."""
    stepped = weights(1)
    for tensor in stepped.values():
        tensor.view(-1)[::40] += 0.25
    key = SigningKey()
    publisher = Publisher(DirectoryRelay(tmp_path), "run", CONFIG.to_dict(), key=key)
    for version, tensors in enumerate((weights(1), stepped)):
        publisher.publish(version, tensors)
    publisher.close()
    where = {"run": "run", "relay": str(tmp_path), "publisher": key.public}
    recorder = make_engine(version=None)
    recorder.load(RelaySource(version=0, **where))
    received_bytes = recorder.engine.statistics().received_bytes
    recorder.engine.submit([turn("running", max_new_tokens=LONG)])
    recorder.until_tokens("running", 5)
    report = recorder.engine.prefetch(RelaySource(version=1, **where), 30.0)
    assert recorder.engine.statistics().weights_version == 0
    assert 0 < report.size_bytes < report.full_bytes
    assert recorder.engine.statistics().received_bytes == received_bytes + report.size_bytes
    recorder.engine.load_version(RelaySource(version=1, **where), WeightMode.FINISH)
    assert recorder.engine.audit()
    found = recorder.run(turn("a"))
    whole = make_engine(version=None)
    whole.load(published(1, stepped, "stepped"))
    assert whole.run(turn("a")) == found
    assert whole.logprobs("a") == recorder.logprobs("a")


def test_what_its_trainer_did_not_sign_is_never_served(make_engine, turn, published):
    recorder, foreign = make_engine(), SigningKey().public
    forged = msgspec.structs.replace(published(2), publisher=foreign)
    with pytest.raises(WeightsError):
        recorder.engine.prefetch(forged, 1.0)
    with pytest.raises(VersionSuperseded):
        recorder.engine.load_version(forged, WeightMode.FINISH)
    recorder.run(turn("a"))
    assert recorder.versions("a") == [1] * 12


def test_only_what_was_prefetched_last_is_put_in_force(make_engine, published):
    recorder = make_engine()
    for version in (2, 3):
        recorder.engine.prefetch(published(version), 30.0)
    with pytest.raises(VersionSuperseded):
        recorder.engine.load_version(published(2), WeightMode.FINISH)
    assert recorder.engine.statistics().weights_version == 1
    recorder.engine.load_version(published(3), WeightMode.FINISH)
    assert recorder.engine.statistics().weights_version == 3


def test_sleep_ends_what_runs_and_frees_the_cache(make_engine, turn):
    recorder = make_engine(max_batch=1, **PACED)
    requests = [turn("a", max_new_tokens=LONG), turn("b", max_new_tokens=LONG)]
    recorder.engine.submit(requests)
    recorder.until_tokens("a", 1)
    recorder.engine.sleep()
    assert recorder.end("a").finish is recorder.end("b").finish is FinishReason.ABORTED
    for request in requests:
        recorder.check(request)
    asleep = recorder.engine.statistics()
    assert asleep.asleep
    assert (asleep.executing, asleep.kv_blocks_used, asleep.capacity_turns) == (0, 0, 0)
    recorder.engine.submit([turn("c")])
    assert recorder.engine.statistics().pending == 1
    recorder.engine.wake()
    recorder.finish("c")
    assert recorder.end("c").finish is FinishReason.LENGTH
    awake = recorder.engine.statistics()
    assert not awake.asleep
    assert awake.capacity_turns > 0
    assert awake.accounts_ns[Account.ASLEEP] > 0


def test_weights_can_be_loaded_asleep(make_engine, turn, published):
    recorder = make_engine()
    recorder.engine.sleep()
    recorder.load(published(2))
    recorder.engine.sleep()
    recorder.engine.wake()
    recorder.run(turn("a"))
    assert recorder.versions("a") == [2] * 12


def test_every_nanosecond_is_in_one_account(make_engine, turn, published):
    begun = time.monotonic_ns()
    recorder = make_engine(version=None)
    created = time.monotonic_ns()
    recorder.engine.set_idle_account(Account.LOADING)
    recorder.load(published(1))
    recorder.engine.set_idle_account(Account.DRAINING)
    recorder.engine.submit([turn("a", max_new_tokens=LONG), turn("b", prompt=[3] * 100, recompute=True)])
    last = {}
    while not recorder.end("a"):
        before = time.monotonic_ns()
        accounts = recorder.engine.statistics().accounts_ns
        assert before - created <= sum(accounts.values()) <= time.monotonic_ns() - begun
        assert all(accounts[account] >= ns for account, ns in last.items())
        last = accounts
        time.sleep(0.001)  # without it this thread would hardly let the engine's run
    accounts = recorder.engine.statistics().accounts_ns
    spent = {account for account, ns in accounts.items() if ns}
    working = {Account.APPLYING, Account.PREFILL, Account.RECOMPUTE, Account.DECODE}
    assert working | {Account.LOADING} <= spent <= working | {Account.LOADING, Account.DRAINING, Account.IDLE}


def test_progress_stands_still_in_a_hung_engine(make_engine, turn):
    recorder = make_engine()
    recorder.hold()
    recorder.engine.submit([turn("a", max_new_tokens=LONG)])
    recorder.until_tokens("a", 1)
    hung = recorder.engine.statistics()
    assert hung.executing == 1
    assert recorder.engine.statistics().progress == hung.progress
    recorder.release()
    recorder.finish("a")
    assert recorder.engine.statistics().progress >= hung.progress + LONG - 1


def test_a_failing_sink_does_not_end_the_engine(make_engine, turn):
    recorder = make_engine()
    recorder.fail_on("lost")
    recorder.run(turn("lost", max_new_tokens=1), turn("a"))
    recorder.run(turn("b"))
    assert recorder.end("b").finish is FinishReason.LENGTH


def test_a_found_prefix_is_reported_and_saves_prefill(make_engine, turn, engine_under_test):
    block_tokens = engine_under_test.block_tokens
    recorder = make_engine(kv_block_tokens=block_tokens)
    before = recorder.engine.statistics()
    prompt = counting(length := 4 * block_tokens - 2)
    recorder.run(turn("first", prompt=prompt))
    recorder.run(turn("second", prompt=[*prompt, 1, 2]), turn("third", prompt=[5, *prompt]))
    chunks = [recorder.of(name)[0] for name in ("first", "second", "third")]
    found = [(chunk.cached_tokens, chunk.prefilled_tokens) for chunk in chunks]
    assert found == [(0, length), (3 * block_tokens, block_tokens), (0, length + 1)]
    after = recorder.engine.statistics()
    assert after.prefix_hit_tokens - before.prefix_hit_tokens == 3 * block_tokens
    assert after.prompt_tokens - before.prompt_tokens == 3 * length + 3


def test_noise_is_a_function_of_the_seed(make_engine, turn):
    recorder = make_engine()
    prompt = [1, 2, 3]
    seeds = [0, 1, 2**63, 2**64 - 1]
    runs = [turn(f"{seed} {go}", prompt=prompt, noise_seed=seed, max_new_tokens=40) for seed in seeds for go in (1, 2)]
    tokens = recorder.run(*runs)
    assert tokens[0::2] == tokens[1::2]
    assert len({tuple(t) for t in tokens}) == len(seeds)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprobs_are_those_of_the_distribution_sampled_from(make_engine, turn, model, temperature, engine_under_test):
    recorder = make_engine(prefill_chunk_tokens=16)
    request = turn("a", prompt=50, temperature=temperature, max_new_tokens=100)
    (tokens,) = recorder.run(request)
    with torch.no_grad():
        logits = model(1)(torch.tensor([request.token_ids + tokens]))[0, 49:-1]
    expected = (logits / temperature).log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(recorder.logprobs("a")), expected, atol=engine_under_test.tolerance, rtol=0)


def test_temperature_zero_is_greedy(make_engine, turn, model, engine_under_test):
    recorder = make_engine(prefill_chunk_tokens=16)
    request = turn("a", prompt=50, temperature=0.0, max_new_tokens=60)
    (tokens,) = recorder.run(request)
    with torch.no_grad():
        logits = model(1)(torch.tensor([request.token_ids + tokens]))[0, 49:-1]
    likeliest, taken = logits.max(-1).values, logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    torch.testing.assert_close(taken, likeliest, atol=engine_under_test.tolerance, rtol=0)


def test_too_little_memory_slows_down_but_loses_nothing(make_engine, turn, engine_under_test):
    block_tokens = engine_under_test.block_tokens
    blocks = 256 // block_tokens + engine_under_test.spare_blocks
    requests = [turn(f"t{i}", prompt=40 + i, max_new_tokens=60) for i in range(6)]
    roomy = make_engine(max_batch=6)
    tight = make_engine(max_batch=6, kv_block_tokens=block_tokens, kv_blocks=blocks)
    before = tight.engine.statistics()
    expected, found = roomy.run(*requests), tight.run(*requests)
    for request in requests:
        tight.check(request)
        assert len(tight.tokens(request.request_id)) == 60
    if tight.engine.capabilities.replayable_sampling:
        assert found == expected
    now = tight.engine.statistics()
    asked = sum(len(request.token_ids) for request in requests)
    assert now.prompt_tokens - before.prompt_tokens > asked  # some were admitted twice
    assert not now.accounts_ns.get(Account.RECOMPUTE, 0)  # but none has moved


def _require_pacing(engine_under_test):
    if not engine_under_test.has_pacing:
        pytest.skip(f"{engine_under_test.kind!r} runs as fast as its device")


def test_paced_iterations_take_their_modelled_time(make_engine, turn, engine_under_test):
    _require_pacing(engine_under_test)
    pacing = {"prefill_tokens_per_s": 1000, "decode_step_s": {1: 0.02, 3: 0.03}}
    recorder = make_engine(pacing=pacing)
    begun = time.monotonic()
    recorder.run(*(turn(f"t{i}", prompt=10, max_new_tokens=6) for i in range(3)))
    modelled_s = 30 / 1000 + 5 * 0.03
    assert time.monotonic() - begun >= modelled_s
    statistics = recorder.engine.statistics()
    assert statistics.accounts_ns[Account.PREFILL] + statistics.accounts_ns[Account.DECODE] >= modelled_s * 1e9
    assert statistics.accounts_ns[Account.DECODE] >= 0.15e9


@pytest.mark.parametrize("stop", ["sleep", "close"])
def test_a_paced_wait_can_be_interrupted(make_engine, turn, stop, engine_under_test):
    _require_pacing(engine_under_test)
    recorder = make_engine(pacing={"prefill_tokens_per_s": 1e6, "decode_step_s": {1: 3600.0}})
    recorder.engine.submit([turn("a")])
    recorder.until_tokens("a", 1)
    getattr(recorder.engine, stop)()
    assert recorder.end("a").finish is FinishReason.ABORTED


def test_close_ends_everything(make_engine, turn, published):
    recorder = make_engine(max_batch=1, **PACED)
    threads = threading.active_count()
    recorder.engine.submit([turn("a", max_new_tokens=LONG), turn("b")])
    recorder.until_tokens("a", 1)
    waiting = recorder.aside(recorder.load, published(2))
    recorder.engine.close()
    recorder.engine.close()
    assert recorder.end("a").finish is recorder.end("b").finish is FinishReason.ABORTED
    with pytest.raises(RuntimeError, match="closed"):
        waiting()
    with pytest.raises(RuntimeError, match="closed"):
        recorder.engine.submit([turn("c")])
    assert threading.active_count() <= threads


@pytest.mark.parametrize("truncation", [{"top_k": 1}, {"top_p": 1e-6}, {"top_k": 5}, {"top_p": 0.4}])
def test_what_is_cut_off_is_never_drawn(make_engine, turn, model, truncation, engine_under_test):
    """And log-probabilities are those of what is left: with one token left, zero."""
    if engine_under_test.tolerance > EXACT:
        pytest.skip(f"{engine_under_test.kind!r} computes too coarsely to tell which tokens are cut off")
    recorder = make_engine()
    request = turn("a", prompt=20, max_new_tokens=60, **truncation)
    (tokens,) = recorder.run(request)
    with torch.no_grad():
        logits = model(1)(torch.tensor([request.token_ids + tokens]))[0, 19:-1]
    vocab_size = logits.shape[-1]
    top_k, top_p = truncation.get("top_k", vocab_size), truncation.get("top_p", 1.0)
    ordered = logits.softmax(-1).sort(-1, descending=True)
    left = (torch.arange(vocab_size) < top_k) & (ordered.values.cumsum(-1) - ordered.values < top_p)
    left[:, 0] = True
    kept = torch.zeros_like(left).scatter(-1, ordered.indices, left)
    expected = logits.masked_fill(~kept, -torch.inf).log_softmax(-1).gather(-1, torch.tensor(tokens)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(recorder.logprobs("a")), expected, atol=engine_under_test.tolerance, rtol=0)


def parkable(recorder) -> Any:
    engine = recorder.engine
    if not isinstance(engine, Parkable):
        pytest.skip("this engine does not make way on its device")
    return engine


def test_a_parked_engine_comes_back_as_it_was(make_engine, turn):
    recorder = make_engine()
    engine = parkable(recorder)
    for again in range(3):
        assert (engine.park().state_bytes > 0, engine.park().state_bytes) == (True, 0)
        parked = engine.statistics()
        assert (parked.capacity_turns, parked.executing, parked.kv_blocks_used) == (0, 0, 0)
        assert (engine.resume().state_bytes > 0, engine.resume().state_bytes) == (True, 0)
        recorder.run(turn(f"a{again}", prompt=[1, 2, 3], noise_seed=5))
        assert recorder.of(f"a{again}")[0].cached_tokens == 0
    assert recorder.tokens("a0") == recorder.tokens("a1") == recorder.tokens("a2")
    assert recorder.versions("a2") == [1] * 12


def test_turns_of_a_parked_engine_end_aborted_and_later_ones_wait(make_engine, turn):
    recorder = make_engine(**PACED)
    engine = parkable(recorder)
    cut = turn("cut", max_new_tokens=LONG, temperature=0.0)
    engine.submit([cut])
    recorder.until_tokens("cut", 3)
    engine.park()
    assert recorder.end("cut").finish is FinishReason.ABORTED
    recorder.check(cut)
    had = recorder.tokens("cut")
    engine.submit([turn("rest", [*cut.token_ids, *had], start=len(had), max_new_tokens=LONG, temperature=0.0)])
    engine.submit([turn("given up")])
    engine.abort(["given up"])
    recorder.finish("given up")
    before = engine.statistics()
    assert (before.pending, before.executing, recorder.tokens("rest")) == (1, 0, [])
    engine.resume()
    recorder.finish("rest")
    (whole,) = make_engine().run(turn("cut", max_new_tokens=LONG, temperature=0.0))
    assert had + recorder.tokens("rest") == whole


@pytest.mark.parametrize("mode", list(WeightMode))
def test_a_parked_engine_follows_the_versions(make_engine, turn, published, mode):
    recorder = make_engine()
    engine = parkable(recorder)
    engine.park()
    for version in (2, 3):
        recorder.load(published(version), mode)
        assert engine.statistics().weights_version == version
    engine.resume()
    assert recorder.run(turn("a")) == make_engine(version=3).run(turn("a"))
    assert recorder.versions("a") == [3] * 12


def test_time_parked_has_a_name(make_engine, turn):
    recorder = make_engine()
    engine = parkable(recorder)
    engine.park()
    began = engine.statistics().accounts_ns
    time.sleep(0.02)
    ended = engine.statistics().accounts_ns
    assert {account for account in ended if ended[account] != began.get(account, 0)} == {Account.PARKED}
    engine.resume()
    after = engine.statistics().accounts_ns
    assert after[Account.SWITCHING] > began[Account.SWITCHING] > 0


def test_a_parked_engine_sleeps_wakes_and_closes(make_engine, turn):
    recorder = make_engine()
    engine = parkable(recorder)
    engine.sleep()
    engine.park()
    engine.wake()
    engine.submit([turn("a")])
    engine.resume()
    recorder.finish("a")
    engine.park()
    engine.sleep()
    engine.resume()
    assert engine.statistics().asleep
    engine.wake()
    assert recorder.run(turn("b")) == make_engine().run(turn("b"))
