"""An engine that is told what changed serves the same as one that is told everything, and pauses for less."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from elastic.core.types import WeightMode
from elastic.engine.base import WeightsMismatch
from elastic.engine.model.checkpoint import model_tensors
from elastic.engine.model.config import Qwen3Config
from elastic.engine.model.qwen3 import Qwen3
from elastic.engine.torch.runner import Runner
from elastic.weights.source import TensorSource, WeightChanges
from tests.seeds import examples

many = settings(
    max_examples=examples(8, 20), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def moved(tensors: dict[str, Tensor], share: float, seed: int) -> tuple[dict[str, Tensor], list]:
    """Other tensors, and where they differ, twice over, first with values that do not last."""
    rng = torch.Generator().manual_seed(seed)
    others, changes = {}, []
    for name, tensor in tensors.items():
        flat = tensor.reshape(-1).clone()
        index = (torch.rand(len(flat), generator=rng) < share).nonzero().view(-1)
        values = torch.randn(len(index), generator=rng).bfloat16()
        flat[index] = values
        others[name] = flat.view(tensor.shape)
        changes += [(name, index, torch.zeros_like(values)), (name, index, values)]
    return others, changes


def runner(config: Qwen3Config) -> Runner:
    return Runner(config, torch.device("cpu"), max_context=32, kv_blocks=2, block_tokens=16)


def model_config(tied: bool, layers: int = 2, hidden: int = 24) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=16,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        tie_word_embeddings=tied,
    )


@many
@given(tied=st.booleans(), share=st.sampled_from([0.0, 0.05, 1.0]), seed=st.integers(0, 2**30))
@torch.inference_mode()
def test_a_patch_is_the_whole_load_bit_for_bit(tied: bool, share: float, seed: int):
    config = model_config(tied)
    tensors = model_tensors(Qwen3(config))
    others, changes = moved(tensors, share, seed)
    patched, loaded = runner(config), runner(config)
    patched.load(tensors)
    patched.patch_share = 9  # however much of it
    patch = patched.patch_of(WeightChanges(1, changes))
    assert patch is not None
    patched.apply(patch)
    loaded.load(others)
    assert patched.tables.keys() == loaded.tables.keys()
    for name, table in loaded.tables.items():
        assert torch.equal(patched.tables[name], table), name


@pytest.mark.parametrize("mode", list(WeightMode))
def test_changes_are_taken_where_they_are_from_what_is_served(make_engine, turn, weights, mode):
    others, changes = moved(weights(1), 0.01, 3)
    expected = make_engine(version=None)
    expected.engine.load_version(TensorSource(2, others), WeightMode.FINISH)
    wanted = expected.run(turn("a"), turn("b", prompt=90))
    for base in (0, 1):
        recorder = make_engine()
        # From another base they would make something else of it: then all of it counts.
        some = WeightChanges(base, changes if base == 1 else [])
        recorder.engine.load_version(TensorSource(2, others, some), mode)
        assert recorder.run(turn("a"), turn("b", prompt=90)) == wanted


@pytest.mark.parametrize(
    ("name", "index"), [("nobody.weight", [0]), ("model.norm.weight", [10**6]), ("model.norm.weight", [-1])]
)
def test_a_change_of_what_is_not_in_the_model_is_refused(name: str, index: list[int]):
    changes = WeightChanges(1, [(name, torch.tensor(index), torch.ones(1, dtype=torch.bfloat16))])
    with pytest.raises(WeightsMismatch, match=name):
        runner(model_config(tied=True)).patch_of(changes)


def test_where_much_changes_everything_is_loaded(make_engine, turn, weights):
    others, changes = moved(weights(1), 0.5, 3)
    assert runner(model_config(tied=True)).patch_of(WeightChanges(1, [])) is not None
    recorder = make_engine()
    recorder.engine.load_version(TensorSource(2, others, WeightChanges(1, changes)), WeightMode.FINISH)
    expected = make_engine(version=None)
    expected.engine.load_version(TensorSource(2, others), WeightMode.FINISH)
    assert recorder.run(turn("a")) == expected.run(turn("a"))


@given(share=st.sampled_from([0.0, 0.002, 0.01]), tied=st.booleans(), seed=st.integers(0, 2**30))
@settings(max_examples=examples(8, 20), deadline=None)
def test_the_pause_is_for_what_changed_alone(share: float, tied: bool, seed: int):
    config = model_config(tied)
    _, changes = moved(model_tensors(Qwen3(config)), share, seed)
    patch = runner(config).patch_of(WeightChanges(1, changes))
    assert patch is not None
    told, written = (sum(len(values) for _, _, values in elements) for elements in (changes, patch.writes))
    assert told <= written <= 2 * told, "a parameter is in at most two places"
