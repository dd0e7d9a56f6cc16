from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elastic.config import EngineConfig
from elastic.engine.coserving.profile import (
    CostModel,
    CostProfile,
    CostProfileError,
    Grid,
    Prefill,
    ProfileRange,
    Shape,
    read_profile,
    write_profile,
)
from elastic.engine.coserving.profiler import device_name, kept_profile, profile_path

PROFILE = CostProfile(
    model="m",
    device="d",
    prefill=Grid((10, 100), (0, 1000), ((100, 200), (1000, 2000))),
    decode=Grid((1, 4), (100,), ((50,), (80,))),
)
REACH = ProfileRange(prefill_tokens=100, batch=4, context=100)
SETTINGS = EngineConfig.model_validate({"max_context_tokens": 101, "prefill_chunk_tokens": 512, "max_batch": 4})


def test_costs_are_measured_points_and_linear_between_and_beyond() -> None:
    grid = PROFILE.prefill
    assert grid.at(10, 0) == 100
    assert grid.at(100, 1000) == 2000
    assert grid.at(55, 500) == pytest.approx((100 + 200 + 1000 + 2000) / 4)
    assert grid.at(190, 0) == pytest.approx(1900)
    assert grid.at(1, 0) == 100


@given(st.integers(1, 500), st.integers(1, 500), st.integers(0, 2000))
def test_more_tokens_never_cost_less(a: int, b: int, start: int) -> None:
    low, high = sorted((a, b))
    assert PROFILE.prefill.at(low, start) <= PROFILE.prefill.at(high, start) + 1e-6


def test_a_chunked_prefill_is_the_sum_of_its_chunks_and_of_the_decodes_beside_them() -> None:
    cost = CostModel(PROFILE)
    assert cost.prefill_ns(0, 100, chunk_tokens=100) == 1000
    chunks = [cost.iteration_ns(Shape([Prefill(start, 50)], decodes=1, context=100)) for start in (0, 50)]
    assert cost.prefill_ns(0, 100, chunk_tokens=50, shared=Shape(decodes=1, context=100)) == sum(chunks)


@given(st.floats(0.1, 10), st.sampled_from([Shape([Prefill(0, 50)]), Shape(decodes=2, context=100)]))
def test_a_profile_that_is_off_is_put_right(off: float, shape: Shape) -> None:
    cost = CostModel(PROFILE)
    truth_ns = int(CostModel(PROFILE).iteration_ns(shape) * off)
    few, many = 8, 120
    for _ in range(few if off > 1 else many):
        cost.observe(shape, truth_ns)
    assert cost.iteration_ns(shape) == pytest.approx(truth_ns, rel=0.15, abs=2)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=3), st.integers(1, 40))
def test_iterations_of_several_pieces_teach_nothing_wrong_about_those_of_one(counts: list[int], times: int) -> None:
    """What an iteration costs whatever is in it is paid once, however many prompts share it."""

    def truth_ns(tokens: int) -> int:
        return 500 + 10 * tokens

    grid = Grid((1, 100), (0,), ((truth_ns(1),), (truth_ns(100),)))
    cost = CostModel(CostProfile(model="m", device="d", prefill=grid, decode=PROFILE.decode))
    for _ in range(times):
        cost.observe(Shape([Prefill(0, count) for count in counts]), truth_ns(sum(counts)))
    assert cost.iteration_ns(Shape([Prefill(0, 100)])) == pytest.approx(truth_ns(100), abs=2)


def test_one_quick_iteration_proves_nothing_but_one_slow_one_does() -> None:
    shape = Shape(decodes=2, context=100)
    cost = CostModel(PROFILE)
    before_ns = cost.iteration_ns(shape)
    cost.observe(shape, before_ns // 10)
    assert cost.iteration_ns(shape) > 0.9 * before_ns
    cost.observe(shape, before_ns * 4)
    assert cost.iteration_ns(shape) > 1.4 * before_ns
    assert cost.prefill_factor == 1.0


def test_a_profile_survives_the_disk(tmp_path: Path) -> None:
    path = tmp_path / "profiles" / "p.json"
    assert kept_profile(path, "m", "d", SETTINGS) is None
    write_profile(path, PROFILE)
    assert kept_profile(path, "m", "d", SETTINGS) == PROFILE
    assert kept_profile(None, "m", "d", SETTINGS) is None


def test_every_model_has_a_profile_for_every_device(tmp_path: Path) -> None:
    paths = {profile_path(tmp_path, model, device) for model in "ab" for device in ("NVIDIA H100", "node/1 4 threads")}
    assert len(paths) == 4
    for path in paths:
        write_profile(path, PROFILE)
    assert set(tmp_path.iterdir()) == paths


def test_a_paced_device_has_a_profile_of_its_own() -> None:
    steps = [None, *({"prefill_tokens_per_s": 1e3, "decode_step_s": {1: step_s}} for step_s in (0.1, 0.2))]
    settings = [EngineConfig.model_validate({"pacing": pacing}) for pacing in steps]
    assert len({device_name(torch.device("cpu"), each) for each in settings}) == 3


def test_hosts_that_start_together_may_keep_the_same_profile(tmp_path: Path) -> None:
    path = tmp_path / "p.json"

    def keep(_number: int) -> bool:
        write_profile(path, PROFILE)
        return kept_profile(path, "m", "d", SETTINGS) == PROFILE

    with ThreadPoolExecutor(8) as hosts:
        assert all(hosts.map(keep, range(200)))
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(("model", "device", "which"), [("m", "other", "device"), ("other", "d", "model")])
def test_a_profile_of_another_device_is_refused(tmp_path: Path, model: str, device: str, which: str) -> None:
    path = tmp_path / "p.json"
    write_profile(path, PROFILE)
    with pytest.raises(CostProfileError, match=f"p.json: profile of another {which}: found '.', wanted 'other'"):
        read_profile(path, model, device, REACH)
    assert kept_profile(path, model, device, SETTINGS) is None


@pytest.mark.parametrize("text", ["", "{}", '{"model": "m"', "\x00"])
def test_a_damaged_profile_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "p.json"
    path.write_text(text)
    with pytest.raises(CostProfileError, match=r"p\.json: not a cost profile"):
        read_profile(path, "m", "d", REACH)
    with pytest.raises(CostProfileError, match="cannot be read"):
        read_profile(tmp_path / "none.json", "m", "d", REACH)


@pytest.mark.parametrize("smaller", [{"prefill_tokens": 101}, {"batch": 5}, {"context": 101}])
def test_a_profile_that_was_measured_for_less_is_refused(tmp_path: Path, smaller: dict[str, int]) -> None:
    path = tmp_path / "p.json"
    write_profile(path, PROFILE)
    with pytest.raises(CostProfileError, match=r"p\.json: measured for smaller iterations: found .* wanted "):
        read_profile(path, "m", "d", REACH._replace(**smaller))
    assert read_profile(path, "m", "d", REACH) == PROFILE


def test_a_cost_of_nothing_could_never_be_put_right(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    write_profile(path, PROFILE)
    path.write_text(path.read_text().replace("[100,200]", "[0,200]"))
    with pytest.raises(CostProfileError, match="costs must be positive"):
        read_profile(path, "m", "d", REACH)
