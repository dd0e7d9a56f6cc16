"""Two models on one device: serving first, memory that moves, and faults of one engine that the other survives."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from random import Random

import msgspec
import pytest
import torch

from elastic.core.device_sharing import Slo
from elastic.core.types import Account, FinishReason, WeightMode
from elastic.engine.coserving.profile import CostProfile, Grid, Prefill, Shape, write_profile
from elastic.engine.coserving.runner import PagedRunner
from elastic.engine.coserving.swapping import Swapping
from elastic.weights.source import TensorSource, WeightChanges
from policies.admission import ExclusiveAdmission, NoAdmission, SloAdmission
from policies.kvmemory import FineGrainedMemory, PreemptiveMemory, StaticPartition
from tests.engine.coserving.conftest import load, raising

MS = 1_000_000
RESTING_BYTES = 3 * 16 * 1024
"""A page for padding, and a rotation table of 256 positions."""
LOOSE = Slo(ttft_ns=60_000 * MS, tpot_ns=60_000 * MS)
NEVER = SloAdmission(slo=LOOSE, longest_ns=0)


@pytest.mark.parametrize("vmm", [False, True], ids=["slab", "vmm"])
def test_both_models_give_what_each_gives_alone(make_device, turn, vmm):
    """Neither sees the other's memory, whatever passes from hand to hand."""
    together, alone = make_device(vmm=vmm), make_device()
    rollout = together.lend()
    serves = [turn(f"s{i}", prompt=30 + 40 * i, max_new_tokens=10) for i in range(5)]
    turns = [turn(f"r{i}", prompt=50 + 10 * i, max_new_tokens=20) for i in range(6)]
    for request, rolled in zip([*serves, None], turns, strict=True):
        rollout.submit([rolled])
        if request is not None:
            together.serving.submit([request])
    together.served.finish(*(s.request_id for s in serves))
    together.rolled.finish(*(t.request_id for t in turns))
    for request in serves:
        alone.serving.submit([request])
        alone.served.finish(request.request_id)
        assert alone.served.tokens(request.request_id) == together.served.tokens(request.request_id)
    sole = alone.lend()
    for request in turns:
        sole.submit([request])
        alone.rolled.finish(request.request_id)
        assert alone.rolled.tokens(request.request_id) == together.rolled.tokens(request.request_id)
    together.check_pages()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device here")
def test_a_gpu_is_shared_like_any_other_device(make_device, turn, spec_of_serving):
    memory = PreemptiveMemory(headroom_share=0.25)
    device = make_device(pages=16, memory=memory, serving=spec_of_serving(device="cuda"), on="cuda")
    rollout = device.lend(device="cuda")
    turns = [turn(f"r{i}", prompt=100, max_new_tokens=100) for i in range(4)]
    rollout.submit(turns)
    serves = [turn(f"s{i}", prompt=250, max_new_tokens=6) for i in range(12)]
    device.check_serves(*serves)
    ends = device.rolled.finish(*(t.request_id for t in turns))
    assert {end.finish for end in ends} <= {FinishReason.LENGTH, FinishReason.ABORTED}
    rollout.sleep()
    rollout.wake()
    assert device.roll(turn("awake"))[0].finish is FinishReason.LENGTH
    device.check_pages()


@pytest.mark.alone
def test_rollouts_wait_while_there_is_no_slack_and_stall_to_be_routed_again(make_device, turn):
    device = make_device(admission=NoAdmission(), stall_timeout_ns=300 * MS)
    device.lend()
    device.admission.policy = NEVER
    (end,) = device.roll(turn("r"))
    assert end.finish is FinishReason.STALLED
    assert "no progress" in end.detail
    device.check_serves(turn("s"))


@pytest.mark.alone
def test_a_turn_that_new_weights_wait_for_stalls_like_any_other(make_device, turn):
    device = make_device(stall_timeout_ns=300 * MS)
    rollout = device.lend()
    rollout.submit([turn("r", max_new_tokens=200)])
    device.rolled.begun("r")
    device.admission.policy = NEVER
    with ThreadPoolExecutor() as threads:
        loading = threads.submit(load, rollout, 2)
        (end,) = device.rolled.finish("r")
        assert end.finish is FinishReason.STALLED
        device.admission.policy = NoAdmission()
        loading.result(30)


@pytest.mark.alone
def test_a_turn_whose_new_weights_get_stuck_on_their_way_stalls_too(make_device, turn):
    device = make_device(stall_timeout_ns=300 * MS)
    rollout = device.lend()
    rollout.submit([turn("r", max_new_tokens=200)])
    device.rolled.begun("r")

    def no_more() -> None:
        device.admission.policy = NEVER

    device.runner.before["piece"] = no_more
    with ThreadPoolExecutor() as threads:
        loading = threads.submit(load, rollout, 2, WeightMode.KEEP)
        assert device.rolled.finish("r")[0].finish is FinishReason.STALLED
        device.runner.before.clear()
        device.admission.policy = NoAdmission()
        loading.result(30)


@pytest.mark.alone
def test_waiting_for_a_place_in_the_batch_is_no_stall(make_device, turn):
    device = make_device(stall_timeout_ns=500 * MS)
    rollout = device.lend(max_batch=1, pacing={"prefill_tokens_per_s": 1e5, "decode_step_s": {1: 0.02}})
    rollout.submit([turn("first", max_new_tokens=40), turn("second", max_new_tokens=2)])
    ends = device.rolled.finish("first", "second")
    assert [end.finish for end in ends] == [FinishReason.LENGTH] * 2


def test_serving_runs_first_at_every_tick(make_device, turn):
    """Behind each rollout iteration stands a serving one, as long as serving has something to do."""
    device = make_device()
    rollout = device.lend()
    order: list[str] = []
    for engine, name in ((device.serving, "s"), (rollout, "r")):
        iterate = engine.iterate

        def noted(iteration, iterate=iterate, name=name):
            busy = device.serving.has_work
            iterate(iteration)
            order.append(name if busy else name.upper())

        engine.iterate = noted
    rollout.submit([turn(f"r{i}", max_new_tokens=50) for i in range(4)])
    device.serve(turn("s", max_new_tokens=20))
    device.rolled.finish(*(f"r{i}" for i in range(4)))
    assert "rr" not in "".join(order)
    assert "s" in order
    assert "r" in order


def test_admission_sees_all_that_serving_will_do_next_and_what_may_come(make_device, turn, spec_of_serving):
    """Short prompts share an iteration; a chunk that they leave room in may be filled by the next request."""
    device = make_device(serving=spec_of_serving(prefill_chunk_tokens=64))
    serving = device.serving
    with device.executor.changed:
        assert serving.view(0).arriving.cost_ns == 0
        serving.submit([turn(f"s{i}", prompt=20) for i in range(2)])
        serving.housekeeping()
        view, cost = serving.view(0), serving.costs
        both = Shape([Prefill(0, 20), Prefill(0, 20)])
        assert view.decode_ns == cost.iteration_ns(both) <= sum(q.cost_ns for q in view.queued)
        assert view.arriving.next_ns == cost.prefill_ns(0, 24, 64)
        serving.submit([turn("long", prompt=100)])
        serving.housekeeping()
        view = serving.view(0)
        assert view.decode_ns == cost.iteration_ns(Shape([*both.prefills, Prefill(0, 24)]))
        assert view.arriving.cost_ns == sum(q.cost_ns for q in view.queued) > cost.prefill_ns(0, 100, 64)
        assert view.arriving.next_ns == 0


def test_a_request_waits_for_a_place_as_well_as_for_its_prefill(make_device, turn, spec_of_serving):
    pacing = {"prefill_tokens_per_s": 1e6, "decode_step_s": {1: 0.02}}
    device = make_device(serving=spec_of_serving(max_batch=1, pacing=pacing))
    serving = device.serving
    serving.submit([turn("has the place", prompt=20, max_new_tokens=100)])
    device.served.begun("has the place")
    with device.executor.changed:
        serving.submit([turn(f"s{i}", prompt=20) for i in range(2)])
        serving.housekeeping()
        said = len(device.served.tokens("has the place"))
        left = 100 - said
        first, second = serving.view(0).queued
        step_ns = serving.costs.iteration_ns(Shape((), 1, 20 + said - 1))
        assert first.cost_ns - second.cost_ns == left * step_ns


def test_the_next_burst_is_taken_to_be_as_large_as_the_largest_of_late(make_device, turn, spec_of_serving):
    """What is kept for arrivals outlasts the queue that it was learnt from, and fades with the requests that come
    one by one, down to one prompt."""
    device = make_device(serving=spec_of_serving(prefill_chunk_tokens=64))
    serving = device.serving
    device.serve(turn("first", prompt=100, max_new_tokens=1))

    def kept_ns() -> int:
        with device.executor.changed:
            serving.costs.prefill_factor = serving.costs.decode_factor = 1.0
            return serving.view(0).arriving.cost_ns

    one_ns = kept_ns()
    with device.executor.changed:
        serving.submit([turn(f"b{i}", prompt=100, max_new_tokens=1) for i in range(6)])
        serving.housekeeping()
        burst_ns = kept_ns()
    assert burst_ns > 5 * one_ns
    device.served.finish(*(f"b{i}" for i in range(6)))
    assert 0.8 * burst_ns < kept_ns() <= burst_ns
    for number in range(100):
        device.serve(turn(f"s{number}", prompt=100, max_new_tokens=1))
    assert kept_ns() == one_ns


def test_a_burst_takes_the_memory_back_and_the_turns_are_given_back_whole(make_device, turn):
    """Serving never waits for memory that rollouts hold; the turns cut lose no token that was emitted."""
    memory = PreemptiveMemory(headroom_share=0.25)
    device = make_device(pages=16, memory=memory, stall_timeout_ns=5_000 * MS)
    rollout = device.lend()
    turns = [turn(f"r{i}", prompt=100, max_new_tokens=150) for i in range(4)]
    rollout.submit(turns)
    device.rolled.until(lambda: sum(bool(device.rolled.tokens(t.request_id)) for t in turns) >= 1)
    serves = [turn(f"s{i}", prompt=250, max_new_tokens=6) for i in range(12)]
    device.check_serves(*serves)
    device.check_pages()
    statistics = device.executor.statistics()
    assert statistics.budget.pressure
    assert statistics.budget.cuts >= len(statistics.reclaims_ns) >= 1
    ends = device.rolled.finish(*(t.request_id for t in turns))
    assert FinishReason.ABORTED in {end.finish for end in ends}
    for request in turns:
        chunks = [c for c in device.rolled.all if c.request_id == request.request_id]
        positions = [chunk.start + len(chunk.token_ids) for chunk in chunks]
        assert [chunk.start for chunk in chunks] == [0, *positions[:-1]]
    # Frozen until the next step, which a new version of the policy begins.
    assert device.executor.statistics().budget.pages == statistics.budget.pages
    load(rollout, 2, seed=1)
    assert not device.executor.statistics().budget.pressure


@pytest.mark.parametrize("memory", [PreemptiveMemory(), FineGrainedMemory()], ids=lambda m: type(m).__name__)
def test_serving_can_reach_the_whole_memory(make_device, turn, spec_of_serving, memory):
    device = make_device(pages=12, memory=memory, serving=spec_of_serving(max_batch=64))
    rollout = device.lend()
    rollout.submit([turn(f"r{i}", prompt=120, max_new_tokens=100) for i in range(4)])
    device.rolled.begun()
    serves = [turn(f"s{i}", prompt=90, max_new_tokens=30) for i in range(12)]
    device.serve(*serves)
    assert device.executor.statistics().serving_peak_pages == 12
    device.check_pages()


@pytest.mark.alone
def test_a_page_that_a_decode_lacks_is_counted_from_the_token_before(make_device, turn):
    """Behind that token a rollout iteration may run, and it is waited for."""
    device = make_device(pages=16, memory=FineGrainedMemory())
    rollout = device.lend(max_batch=8, pacing={"prefill_tokens_per_s": 1e6, "decode_step_s": {1: 0.05}})
    device.serving.submit([turn("s", prompt=20, max_new_tokens=60)])
    device.served.begun("s")
    rollout.submit([turn(f"r{i}", prompt=100, max_new_tokens=150) for i in range(8)])
    device.served.finish("s")
    lasted_ns = device.executor.statistics().usage.lent_ns
    reclaims_ns = device.executor.statistics().reclaims_ns
    assert reclaims_ns
    assert all(50 * MS <= reclaim_ns < lasted_ns / 2 for reclaim_ns in reclaims_ns)


def test_an_idle_host_keeps_its_headroom(make_device, turn):
    """However long serving has rested: its next burst finds it free."""
    device = make_device(pages=16, memory=PreemptiveMemory(headroom_share=0.25))
    with device.executor.changed:
        for _ in range(20):
            device.executor.memory.share(time.monotonic_ns() + 3600 * 1000 * MS)
    rollout = device.lend()
    assert device.executor.statistics().budget.pages == 12
    rollout.submit([turn(f"r{i}", prompt=150, max_new_tokens=40) for i in range(8)])
    device.rolled.finish(*(f"r{i}" for i in range(8)))
    assert device.executor.statistics().budget.cuts == 0
    device.check_pages()


def until(condition) -> None:
    deadline_s = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.005)  # the executor is asked, it does not tell


def test_a_profile_of_another_device_is_measured_anew(make_device, turn, tmp_path):
    make_device(profiles=tmp_path).executor.close()
    (path,) = tmp_path.iterdir()
    known = msgspec.json.decode(path.read_bytes(), type=CostProfile)
    foreign = msgspec.structs.replace(known, device="another", decode=Grid((1,), (1,), ((10**15,),)))
    write_profile(path, foreign)
    device = make_device(profiles=tmp_path)
    device.serve(turn("s", prompt=20, max_new_tokens=3))
    found = msgspec.json.decode(path.read_bytes(), type=CostProfile)
    assert found.device == known.device
    assert device.serving.costs.profile == found


@pytest.mark.alone
def test_a_slow_piece_of_weights_does_not_keep_the_next_ones_out(make_device):
    """One hiccup of the host may take longer than any allowance; while serving rests weights still come in."""
    device = make_device(admission=SloAdmission(slo=LOOSE, longest_ns=20 * MS))
    rollout = device.lend()
    hiccups = iter([0.1])
    device.runner.before["piece"] = lambda: time.sleep(next(hiccups, 0))
    load(rollout, 2)
    assert rollout.statistics().weights_version == 2


@pytest.mark.alone
def test_the_first_piece_of_weights_is_taken_to_be_as_slow_as_servings_were(
    make_device, spec_of_serving, rollout_weights
):
    """Nothing of the model has been measured yet; a slack that is too short for its pieces must not be spent on one."""
    runners: list[PagedRunner] = []

    def noted(*arguments) -> PagedRunner:
        runners.append(PagedRunner(*arguments))
        return runners[-1]

    device = make_device(serving=spec_of_serving()._replace(runner=noted), admission=NEVER)
    executor = device.executor
    rollout = device.attach()
    loading = threading.Thread(target=never_loaded, args=(rollout, rollout_weights(1)))
    loading.start()
    until(lambda: rollout.loading_step() is not None)
    slowest_ns = executor.serving.slowest_piece_ns
    ratio = device.runner.largest_piece_bytes / runners[0].largest_piece_bytes
    assert slowest_ns * ratio <= rollout.piece_ns < slowest_ns * ratio + 1
    with executor.changed:
        assert executor.admitted_step(rollout, rollout.piece_ns, tries=False) is None
        assert executor.admitted_step(rollout, rollout.piece_ns + 1, tries=False) is not None
    executor.close()
    loading.join()


def never_loaded(rollout, weights) -> None:
    with pytest.raises(RuntimeError):
        rollout.load_version(TensorSource(1, weights), WeightMode.FINISH)


@pytest.mark.alone
@pytest.mark.parametrize("longest_ms", [0.001, 10_000])
def test_beside_a_load_that_never_rests_rollouts_are_tried_now_and_then(make_device, turn, spec_of_serving, longest_ms):
    """Else costs that are not known, or thought too high, would never be measured: here any is, or one by far."""
    busy = spec_of_serving(pacing={"prefill_tokens_per_s": 1e6, "decode_step_s": {1: 0.02}})
    admission = SloAdmission(slo=LOOSE, longest_ns=int(longest_ms * MS))
    device = make_device(serving=busy, admission=admission, try_after_ns=50 * MS)
    rollout = device.lend()
    rollout.costs.prefill_factor = rollout.costs.decode_factor = 1e9
    device.serving.submit([turn(f"s{i}", max_new_tokens=200) for i in range(3)])
    device.served.begun()
    assert device.roll(turn("r", max_new_tokens=2))[0].finish is FinishReason.LENGTH
    assert not device.served.end("s0")


@pytest.mark.alone
def test_a_model_is_measured_beside_a_load_that_never_rests(make_device, turn, spec_of_serving):
    busy = spec_of_serving(pacing={"prefill_tokens_per_s": 1e6, "decode_step_s": {1: 0.05}})
    device = make_device(serving=busy, profiles=None, admission=SloAdmission(slo=LOOSE, longest_ns=60_000 * MS))
    device.serving.submit([turn(f"s{i}", max_new_tokens=220) for i in range(3)])
    device.served.begun()
    rollout = device.lend(max_batch=2)
    assert rollout.costs is not None
    assert not device.served.end("s0")


def test_measuring_costs_is_loading_and_no_pause_of_a_version(make_device):
    device = make_device(profiles=None)
    rollout = device.attach()
    accounts: list[dict[Account, int]] = []
    device.runner.before["forward"] = lambda: accounts.append(dict(rollout.statistics().accounts_ns))
    load(rollout, 1)
    grown = {account for account, ns in accounts[-1].items() if ns > accounts[0].get(account, 0)}
    assert grown == {Account.LOADING}


def test_of_a_new_version_only_what_changed_is_written_and_piece_by_piece(make_device, turn, rollout_weights):
    """Between two pieces serving may run; what comes of it is the version that everything was loaded of."""
    patched, loaded = make_device(), make_device()
    rollout, whole = patched.lend(), loaded.lend()
    others, changes = dict(rollout_weights(1)), []
    for name, tensor in others.items():
        index = torch.arange(0, tensor.numel(), 100)
        values = torch.linspace(-1, 1, len(index)).bfloat16()
        others[name] = tensor.reshape(-1).index_copy(0, index, values).view(tensor.shape)
        changes.append((name, index, values))
    pieces: list[int] = []
    patched.runner.before = {
        "piece": lambda: pieces.append(1),
        "loading": lambda: pytest.fail("everything is loaded"),
    }
    rollout.load_version(TensorSource(2, others, WeightChanges(1, changes)), WeightMode.FINISH)
    patched.runner.before = {}
    written = sum(len(values) for _, _, values in changes)
    assert written // 128 <= len(pieces) <= written // 64 + 1
    whole.load_version(TensorSource(2, others), WeightMode.FINISH)
    # Woken from host memory, it is the same.
    for wake in (False, True):
        request = turn(f"r{wake}", prompt=60)
        if wake:
            rollout.sleep()
            rollout.wake()
        for engine in (rollout, whole):
            engine.submit([request])
        patched.rolled.finish(request.request_id)
        loaded.rolled.finish(request.request_id)
        assert patched.rolled.tokens(request.request_id) == loaded.rolled.tokens(request.request_id)
        assert patched.rolled.end(request.request_id).weights_version == 2


def test_a_static_partition_holds_both_to_their_half(make_device, turn):
    """Both engines compute for so long that each meets its bound."""
    device = make_device(pages=24, memory=StaticPartition())
    rollout = device.lend()
    rollout.submit([turn(f"r{i}", prompt=120, max_new_tokens=60) for i in range(4)])
    serves = [turn(f"s{i}", prompt=200, max_new_tokens=10) for i in range(12)]
    device.serve(*serves)
    device.check_pages()
    assert {end.finish for end in device.rolled.finish(*(f"r{i}" for i in range(4)))} == {FinishReason.LENGTH}
    assert device.executor.statistics().serving_peak_pages <= 12


@pytest.mark.alone
def test_a_prefix_is_kept_for_its_lease_and_no_longer(make_device, turn):
    device = make_device(memory=PreemptiveMemory(lease_ns=200 * MS))
    device.lend()
    prompt = list(range(32)) * 3

    def cached(name: str) -> int:
        device.roll(turn(name, prompt=prompt))
        return next(c for c in device.rolled.all if c.request_id == name).cached_tokens

    assert cached("first") == 0
    assert cached("within the lease") == 80
    deadline = time.monotonic() + 10
    while device.executor.statistics().rollout_pages and time.monotonic() < deadline:
        time.sleep(0.01)
    assert device.executor.statistics().rollout_pages == 0
    assert cached("after it") == 0


def test_credits_follow_the_budget(make_device):
    device = make_device(pages=40, memory=PreemptiveMemory(headroom_share=0))
    rollout = device.lend(max_batch=16, max_pending=4)
    layout = rollout.layout
    assert rollout.statistics().capacity_turns == min(20, 40 * layout.layer_slots // 256)
    memory = device.executor.memory
    memory.budget = PreemptiveMemory().observe(memory.budget, 40, 12, 0)
    assert rollout.statistics().capacity_turns == 20 * layout.layer_slots // 256


def test_asleep_the_rollout_model_keeps_one_page_and_wakes_from_host_memory(make_device, turn):
    device = make_device()
    rollout = device.lend()
    request = turn("a", prompt=60)
    rollout.submit([request])
    device.rolled.finish("a")
    awake, free = device.executor.statistics(), device.executor.memory.pages.free
    rollout.sleep()
    asleep = device.executor.statistics()
    assert asleep.rollout_pages == 0
    assert asleep.rollout_bytes <= RESTING_BYTES < awake.rollout_bytes
    assert device.executor.memory.pages.free >= free
    assert device.runner.weight_bytes == 0
    load(rollout, 2, seed=1)
    assert device.runner.weight_bytes == 0
    rollout.wake()
    device.roll(turn("b", prompt=request.token_ids, noise_seed=request.sampling.noise_seed))
    assert device.rolled.tokens("a") == device.rolled.tokens("b")
    assert rollout.statistics().accounts_ns[Account.LOADING] > 0


@pytest.mark.alone
def test_the_devices_time_that_serving_takes_is_servings(make_device, turn):
    device = make_device()
    rollout = device.lend()
    device.serve(turn("s", prompt=200, max_new_tokens=30))
    accounts = rollout.statistics().accounts_ns
    usage = device.executor.statistics().usage
    assert accounts[Account.SERVING] >= 0.5 * usage.lent_serving_ns
    assert usage.lent_serving_ns == usage.serving_ns
    assert usage.serving_ns + usage.rollout_ns < usage.lent_ns


# Bad input and faults.


def test_a_device_serves_one_run_at_a_time_and_can_be_lent_again(make_device, turn, spec_of_rollouts):
    device = make_device()
    first = device.lend()
    first.submit([turn("a", max_new_tokens=200)])
    with pytest.raises(RuntimeError, match="lent to another run"):
        device.executor.attach(spec_of_rollouts())
    first.close()
    assert device.rolled.finish("a")[0].finish is FinishReason.ABORTED
    assert device.executor.rollout is None
    device.check_pages()
    device.lend(version=3)
    assert device.roll(turn("b"))[0].weights_version == 3


def test_a_rollout_model_that_does_not_fit_is_refused(make_device, turn, spec_of_rollouts):
    device = make_device(pages=8)
    with pytest.raises(ValueError, match="the rollout model does not fit: 4096 tokens of KV need 128 pages of 16384"):
        device.executor.attach(spec_of_rollouts(max_context_tokens=4096))
    with pytest.raises(ValueError, match="at least 32768 are needed"):
        device.executor.attach(spec_of_rollouts(kv_block_tokens=64))
    assert device.executor.rollout is None
    device.check_pages()
    device.check_serves(turn("s"))


def test_a_core_that_is_not_there_keeps_nobody_waiting(make_device):
    with pytest.raises(RuntimeError, match=r"failed|closed"):
        make_device(cpu=100_000)


def test_a_serving_model_that_could_wait_for_ever_is_refused(make_device):
    with pytest.raises(ValueError, match=r"the serving model does not fit: 256 tokens .* may have 6 of 12"):
        make_device(pages=12, memory=StaticPartition())


def test_weights_that_the_device_has_no_room_for_leave_nothing_on_it(make_device, turn):
    device = make_device()
    rollout = device.lend()
    pieces = iter(range(3))

    def no_room() -> None:
        if next(pieces, None) is None:
            raise MemoryError("out of memory")

    device.runner.before["piece"] = no_room
    with pytest.raises(MemoryError, match="out of memory"):
        load(rollout, 2)
    device.runner.before.clear()
    assert device.executor.statistics().rollout_bytes <= RESTING_BYTES
    device.check_serves(turn("s"))
    load(rollout, 3)
    assert device.roll(turn("r"))[0].weights_version == 3


def test_weights_that_cannot_be_put_in_force_are_none_at_all(make_device, turn):
    """They lie over the old ones by then, which are not what the version says any more."""
    device = make_device()
    rollout = device.lend()

    broken = raising(RuntimeError("the cache cannot be cleared"))

    device.runner.before["scrub_cache"] = broken
    with pytest.raises(RuntimeError, match="cannot be cleared"):
        load(rollout, 2)
    device.runner.before.clear()
    assert rollout.statistics().weights_version is None
    device.check_serves(turn("s"))
    load(rollout, 3)
    assert device.roll(turn("r"))[0].weights_version == 3


def test_serving_survives_a_rollout_engine_that_cannot_even_be_cleared_away(make_device, turn):
    device = make_device()
    rollout = device.lend()
    rollout.submit([turn("r", max_new_tokens=200)])
    device.rolled.begun("r")

    broken = raising(RuntimeError("the page table is damaged"))

    rollout.pool.trim = broken
    assert device.rolled.finish("r")[0].finish is FinishReason.ERROR
    until(lambda: device.executor.rollout is None)
    device.check_serves(turn("s"))
    device.check_pages()
    device.lend(version=2)
    assert device.roll(turn("again"))[0].finish is FinishReason.LENGTH


class FailingMemory:
    """A memory policy that fails once it has something to do before, which it does first."""

    def __init__(self) -> None:
        self.before_failing: Callable[[], object] | None = None
        self._policy = PreemptiveMemory()

    def __getattr__(self, name: str):
        return getattr(self._policy, name)

    def observe(self, *arguments):
        if self.before_failing is not None:
            self.before_failing()
            raise RuntimeError("the device fell off the bus")
        return self._policy.observe(*arguments)


def test_what_comes_as_the_executor_fails_is_answered_too(make_device, turn):
    memory = FailingMemory()
    device = make_device(memory=memory)
    memory.before_failing = lambda: device.serving.submit([turn("late")])
    with device.executor.changed:
        device.executor.changed.notify_all()
    assert device.served.finish("late")[0].finish is FinishReason.ERROR
    until(lambda: not device.executor.running)


@pytest.mark.parametrize("where", ["forward", "next_iteration", "end_stalled"])
def test_serving_survives_a_crash_of_the_rollout_engine(make_device, turn, where):
    device = make_device()
    rollout = device.lend()

    crash = raising(ZeroDivisionError("a bug"))

    if where == "forward":
        device.runner.before["forward"] = crash
    else:
        setattr(rollout, where, crash)
    rollout.submit([turn("r")])
    device.serving.submit([turn("s", max_new_tokens=50)])
    (end,) = device.served.finish("s")
    assert (end.finish, len(device.served.tokens("s"))) == (FinishReason.LENGTH, 50)
    if where != "end_stalled":
        assert device.rolled.finish("r")[0].finish is FinishReason.ERROR
    device.runner.before.clear()
    rollout.__dict__.pop(where, None)
    assert device.roll(turn("again"))[0].finish is FinishReason.LENGTH
    device.check_pages()


@pytest.mark.parametrize("where", ["give_back", "tidy"])
def test_serving_gets_its_memory_from_a_rollout_engine_that_fails_to_give_it(make_device, turn, where):
    device = make_device(pages=16, memory=PreemptiveMemory(headroom_share=0))
    rollout = device.lend()

    crash = raising(ZeroDivisionError("a bug"))

    rollout.submit([turn(f"r{i}", prompt=100, max_new_tokens=150) for i in range(4)])
    device.rolled.begun()
    setattr(rollout, where, crash)
    serves = [turn(f"s{i}", prompt=250, max_new_tokens=6) for i in range(8)]
    device.check_serves(*serves)
    assert FinishReason.ERROR in {end.finish for end in device.rolled.finish(*(f"r{i}" for i in range(4)))}
    assert device.executor.rollout_failures >= 1


@pytest.mark.parametrize("whole", [True, False], ids=["the device", "the engine"])
def test_closing_while_costs_are_measured_keeps_nobody_waiting(make_device, whole):
    device = make_device(profiles=None)
    rollout = device.attach()
    reached, closed = threading.Event(), threading.Event()

    def slowly() -> None:
        reached.set()
        closed.wait(0.1)

    device.runner.before["forward"] = slowly
    with ThreadPoolExecutor() as threads:
        loading = threads.submit(load, rollout, 1)
        assert reached.wait(30)
        (device.executor if whole else rollout).close()
        closed.set()
        with pytest.raises(RuntimeError, match="closed"):
            loading.result(30)


def test_costs_that_cannot_be_measured_fail_the_load_and_not_serving(make_device, turn):
    device = make_device(profiles=None)
    rollout = device.attach()

    out_of_memory = raising(MemoryError())

    device.runner.before["forward"] = out_of_memory
    with pytest.raises(RuntimeError, match="rollout engine"):
        load(rollout, 1)
    device.runner.before.clear()
    device.check_serves(turn("s"))
    assert device.executor.rollout_failures == 1
    load(rollout, 1)
    assert device.roll(turn("r"))[0].finish is FinishReason.LENGTH


def test_a_profile_that_cannot_be_kept_is_used_all_the_same(make_device, turn, tmp_path):
    (tmp_path / "file").write_text("")
    device = make_device(profiles=tmp_path / "file" / "profiles")
    device.check_serves(turn("s"))


@pytest.mark.parametrize(
    ("seed", "vmm"),
    [(2, True), *(pytest.param(*each, marks=pytest.mark.nightly) for each in ((0, False), (1, False), (3, True)))],
)
def test_whatever_happens_every_request_ends_once_and_no_page_is_lost(make_device, turn, rollout_weights, seed, vmm):
    """Requests, aborts, bursts, sleep, new weights, runs that come and go, in any order. Where pages are mapped,
    whoever touches one that is not crashes."""
    random = Random(seed)
    # A step's budget may be too small for a turn, which then goes elsewhere.
    device = make_device(pages=24, vmm=vmm, stall_timeout_ns=5_000 * MS)
    rollout = device.lend()
    asked: dict[str, list] = {"s": [], "r": []}
    for number in range(120):
        act = random.choice(["serve", "serve", "roll", "roll", "roll", "abort", "sleep", "load", "return"])
        name = f"{act}-{number}"
        if act == "serve":
            asked["s"].append(turn(name, prompt=random.randint(1, 200), max_new_tokens=random.randint(1, 20)))
            device.serving.submit(asked["s"][-1:])
        elif act == "roll":
            asked["r"].append(turn(name, prompt=random.randint(1, 150), max_new_tokens=random.randint(1, 40)))
            rollout.submit(asked["r"][-1:])
        elif act == "abort":
            engine, kind = random.choice([(device.serving, "s"), (rollout, "r")])
            engine.abort([random.choice(asked[kind]).request_id] if asked[kind] else [])
        elif act == "sleep":
            rollout.sleep()
            rollout.wake()
        elif act == "load":
            base = rollout.statistics().weights_version or 0
            changes = random.choice([None, WeightChanges(base, [])])
            rollout.load_version(TensorSource(number, rollout_weights(1), changes), random.choice(list(WeightMode)))
        elif random.random() < 0.5:
            rollout.close()
            rollout = device.lend(version=number)
        if number % 10 == 0:
            device.check_pages()
    device.served.finish(*(request.request_id for request in asked["s"]))
    device.rolled.finish(*(request.request_id for request in asked["r"]))
    for chunks, requests in ((device.served, asked["s"]), (device.rolled, asked["r"])):
        for request in requests:
            own = [chunk for chunk in chunks.all if chunk.request_id == request.request_id]
            assert [chunk.finish is not None for chunk in own] == [False] * (len(own) - 1) + [True]
            ends = [chunk.start + len(chunk.token_ids) for chunk in own]
            assert [chunk.start for chunk in own] == [0, *ends[:-1]]
    assert {chunk.finish for chunk in device.served.all} <= {None, FinishReason.LENGTH, FinishReason.ABORTED}
    assert FinishReason.ERROR not in {chunk.finish for chunk in device.rolled.all}
    device.check_pages()
    rollout.close()
    statistics = device.executor.statistics()
    assert (statistics.rollout_pages, device.executor.rollout_failures) == (0, 0)


def test_closing_ends_what_is_alive_in_both_halves(make_device, turn):
    device = make_device()
    rollout = device.lend()
    rollout.submit([turn("r", max_new_tokens=200)])
    device.serving.submit([turn("s", max_new_tokens=200)])
    device.served.begun("s")
    device.executor.close()
    device.executor.close()
    assert device.served.finish("s")[0].finish is FinishReason.ABORTED
    assert device.rolled.finish("r")[0].finish is FinishReason.ABORTED
    with pytest.raises(RuntimeError, match="closed"):
        device.serving.submit([turn("late")])


@pytest.mark.alone
def test_stop_and_reload_lets_one_model_on_the_device_at_a_time(make_device, turn):
    swapping = Swapping(idle_ns=50 * MS, boot_ns=20 * MS)
    device = make_device(admission=ExclusiveAdmission(), swapping=swapping)
    device.lend().submit([turn("r", max_new_tokens=12), turn("long", max_new_tokens=200)])
    device.rolled.finish("r")
    assert device.serving.aside
    device.check_serves(turn("s"))
    assert device.rolled.finish("long")[0].finish in (FinishReason.ABORTED, FinishReason.LENGTH)
    device.check_pages()
