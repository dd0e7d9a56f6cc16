"""A real engine is measured through its contract: what it is known to take comes back, and what fails is said."""

import multiprocessing
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elastic.config import Config, ConfigError, EngineConfig
from elastic.core.types import WeightMode
from elastic.engine import create_engine
from elastic.engine.base import RolloutEngine
from elastic.engine.model.checkpoint import read_config, read_tensors
from elastic.engine.torch import pacing
from elastic.simulation.calibration import CalibrationError, measure_engine, probe, profile_engine
from elastic.simulation.calibration.engine import engine_numbers
from elastic.simulation.calibration.probe import ITERATIONS, Probe, Probed, loads
from elastic.simulation.performance.profile import EngineRates, load_profile
from elastic.weights.source import TensorSource

PACING = {"prefill_tokens_per_s": 2000, "decode_step_s": {1: 0.02, 4: 0.04}}
LATE = 10.0
"""Of these times a saturated machine needs no more than so many, in the median."""


def ignore(done: int, total: int, what: str) -> None:
    pass


@pytest.fixture
def probing() -> Iterator[Callable[..., Probe]]:
    """A probe of the configured engine, in this process."""
    engines: list[RolloutEngine] = []

    def of(config: Config, *, scale: float = 1.0, loaded: bool = True) -> Probe:
        model = read_config(config.model.checkpoint)
        tensors = read_tensors(config.model.checkpoint, model)
        engine = create_engine(
            {"model_type": "qwen3", **{f: getattr(model, f) for f in model.__struct_fields__}}, config.engine
        )
        engines.append(engine)
        found = Probe(engine, config.engine, model.vocab_size, wait_s=60.0 if loaded else 0.05)
        engine.start(found.sink)
        if loaded:
            weights = {name: (tensor * scale).to(torch.bfloat16) for name, tensor in tensors.items()}
            engine.load_version(TensorSource(0, weights), WeightMode.FINISH)
        return found

    yield of
    for engine in engines:
        engine.close()


@given(
    st.builds(
        EngineConfig,
        max_batch=st.integers(1, 300),
        max_context_tokens=st.integers(2, 40_000),
        kv_block_tokens=st.sampled_from([1, 16, 32]),
        kv_blocks=st.integers(1, 4000),
        prefill_chunk_tokens=st.sampled_from([1, 16, 256, 8192]),
    )
)
def test_every_load_fits_into_the_engine(settings: EngineConfig) -> None:
    """With what its sequences generate until enough iterations of the whole batch are timed."""
    kv_tokens = settings.kv_blocks * settings.kv_block_tokens
    for load in loads(settings, kv_tokens):
        assert load.prompt_tokens >= 1
        assert load.batch <= settings.max_batch
        ahead = -(-load.prompt_tokens * load.batch // settings.prefill_chunk_tokens) + ITERATIONS + 1
        length = load.prompt_tokens + (ahead if load.decodes else 1)
        assert length <= settings.max_context_tokens
        if load.decodes:
            blocks = -(-length // settings.kv_block_tokens)
            assert load.batch * blocks <= settings.kv_blocks


def test_each_load_is_what_was_asked_for(configured, probing) -> None:
    config = configured()
    seen: list[tuple[int, int]] = []
    found = probing(config).measure(lambda done, total, what: seen.append((done, total)), repeats=2)
    planned = loads(config.engine, found.kv_tokens)
    assert found.left_out == []
    assert found.kv_tokens == config.engine.kv_blocks * config.engine.kv_block_tokens
    assert seen == [(done, 2 * len(planned)) for done in range(2 * len(planned) + 1)]
    for load, sample in zip(planned, found.samples, strict=True):
        assert sample.seconds > 0
        if load.decodes:
            assert sample.batch == load.batch
            assert 0 < sample.context - load.batch * load.prompt_tokens < load.batch * 30
        else:
            chunks = -(-load.prompt_tokens // config.engine.prefill_chunk_tokens)
            assert sample.prefilled == pytest.approx(load.prompt_tokens / chunks)


@pytest.mark.alone
def test_a_paced_engines_times_come_back(configured, probing) -> None:
    """A pacing is kept from below: no iteration is shorter. From above the median of some tells."""
    config = configured(pacing=PACING)
    found = probing(config).measure(ignore, repeats=2)
    for sample in found.samples:
        costs = pacing.costs(pacing.IterationLoad(round(sample.batch), 0, 0), config.engine.pacing)
        assert 0.999 <= sample.seconds / (sum(costs) + sample.prefilled / 2000) <= LATE
    numbers = engine_numbers(found, config.engine)
    overhead_s = numbers.overhead_s.value
    for batch, number in numbers.decode_step_s.items():
        assert number.source
        step_s = pacing.decode_step_s(batch, PACING["decode_step_s"])
        assert 0.5 <= (number.value + overhead_s + batch * 50 * numbers.context_s.value) / step_s <= LATE
    prefill_s = overhead_s + 64 / numbers.prefill_tokens_per_s.value
    assert 0.5 <= prefill_s / 0.032 <= LATE


@pytest.mark.nightly
def test_an_engine_in_its_own_process_makes_a_profile(configured, tmp_path: Path) -> None:
    """Unpaced: the real thing. Whatever is not the engine's says that it is an estimate."""
    config, path = configured(), tmp_path / "machine.toml"
    steps: list[tuple[int, int, str]] = []
    measured = profile_engine(config, path, observe=lambda *step: steps.append(step), repeats=2)
    assert steps[0][0] == 0
    assert steps[-1][0] == steps[-1][1] == steps[0][1]
    profile = load_profile(str(path))
    assert set(profile.decode_step_s) == {1, 2, 4}
    assert profile.kv_tokens == 1024
    assert 0 < profile.decode_step_s[1] + profile.overhead_s < 1
    assert "torch on cpu" in measured.numbers["kv_tokens"].source
    for key, number in measured.numbers.items():
        assert bool(number.source) != bool(number.estimate), key
        if key in EngineRates.__struct_fields__:
            assert not number.source or "torch on cpu" in number.source, key
        elif key != "environment_serial":
            assert number.estimate, key
            assert None not in (number.low, number.high), key
    assert multiprocessing.active_children() == []


def test_an_engine_that_holds_too_little_cannot_be_measured(configured, probing) -> None:
    config = configured({"rollout": {"max_tokens_per_turn": 4}}, max_context_tokens=8)
    found = probing(config).measure(ignore, repeats=1)
    with pytest.raises(CalibrationError, match="max_context_tokens: found 8, and 1024 tokens of KV cache"):
        engine_numbers(found, config.engine)


def test_why_the_engine_s_process_fails_is_said(configured) -> None:
    """The engine's process really starts, and fails."""
    with pytest.raises(CalibrationError, match=r"unknown engine .nosuch."):
        measure_engine(configured(kind="nosuch"), repeats=1)


def test_without_a_policy_nothing_is_started(configured, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.checkpoint: .*cannot be read"):
        measure_engine(configured({"model": {"checkpoint": str(tmp_path / "none")}}))


def test_an_engine_that_fails_says_why(configured, probing) -> None:
    with pytest.raises(CalibrationError, match="prefill of 8 tokens: the engine failed: the model's logits are not"):
        probing(configured(), scale=float("nan")).measure(ignore)


def test_an_engine_that_brings_nothing_is_not_waited_for(configured, probing) -> None:
    with pytest.raises(CalibrationError, match="prefill of 8 tokens: the engine has brought nothing"):
        probing(configured(), loaded=False).measure(ignore)


def test_loads_that_were_left_out_are_named(configured) -> None:
    config = configured()
    planned = loads(config.engine, 1024)
    rates = {0: 0.01, 1: 0.03, 2: 0.03, 4: 0.03}
    samples = [
        probe.IterationSample(
            rates[load.batch if load.decodes else 0] + (0 if load.decodes else load.prompt_tokens * 1e-3),
            1,
            batch=load.batch if load.decodes else 0,
            context=load.batch * load.prompt_tokens if load.decodes else 0,
            prefilled=0 if load.decodes else load.prompt_tokens,
        )
        for load in planned[:-1]
    ]
    numbers = engine_numbers(Probed(samples, planned[-1:], 1024, "some engine"), config.engine)
    assert str(planned[-1]) in numbers.decode_step_s[1].source
    assert numbers.context_s.value == pytest.approx(0, abs=1e-7)
    assert numbers.overhead_s.value == pytest.approx(0.01, rel=1e-3)
