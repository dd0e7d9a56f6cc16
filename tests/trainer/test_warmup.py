from pathlib import Path

import pytest
import torch

from elastic.engine.model.checkpoint import CheckpointError, load_model, read_config, read_tensors
from elastic.engine.model.config import Qwen3Config
from elastic.environments.frozenlake import FrozenLakeSettings
from elastic.environments.frozenlake_demonstrations import Demonstration
from elastic.worker.trainer.embedded.warmup import WarmupSettings, cache_key, imitation_loss, warm_up

SHORT = WarmupSettings(steps=4, batch_size=4, threads=1)


def run(
    settings: WarmupSettings, model, directory: Path
) -> tuple[dict[str, torch.Tensor], list[tuple[int, int, float]]]:
    history: list[tuple[int, int, float]] = []
    config = model().config
    warm_up(settings, config, directory, lambda *progress: history.append(progress))
    return read_tensors(directory, config), history


def test_the_policy_is_a_checkpoint_that_can_be_loaded(model, tmp_path: Path):
    tensors, history = run(SHORT, model, tmp_path / "base" / "policy")
    assert read_config(tmp_path / "base" / "policy") == model().config
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert load_model(tmp_path / "base" / "policy").config == model().config
    assert [(done, total) for done, total, _ in history] == [(1, 4), (2, 4), (3, 4), (4, 4)]


def test_equal_seeds_give_equal_policies_whatever_the_callers_generator(model, tmp_path: Path):
    one, history = run(SHORT, model, tmp_path / "one")
    torch.manual_seed(99)
    before = torch.random.get_rng_state()
    other, same_history = run(SHORT, model, tmp_path / "other")
    assert torch.equal(before, torch.random.get_rng_state())
    assert history == same_history
    assert all(torch.equal(one[name], other[name]) for name in one)
    third, _ = run(SHORT.model_copy(update={"seed": 1}), model, tmp_path / "third")
    assert not all(torch.equal(one[name], third[name]) for name in one)


def test_imitation_improves(model, tmp_path: Path):
    _, history = run(WarmupSettings(steps=40, batch_size=8, threads=1), model, tmp_path / "base")
    losses = [loss for _, _, loss in history]
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])


def test_the_loss_is_the_mean_over_the_policys_tokens(model):
    policy = model()
    demonstrations = [Demonstration([3, 4, 5, 6], [0, 1, 0, 1]), Demonstration([3, 7], [0, 1])]
    with torch.no_grad():
        first, second = (policy(torch.tensor([d.token_ids]))[0].log_softmax(-1) for d in demonstrations)
        expected = -(first[0, 4] + first[2, 6] + second[0, 7]) / 3
        torch.testing.assert_close(imitation_loss(policy, demonstrations), expected)


def test_the_cache_key_stands_for_what_shapes_the_policy():
    settings, model = WarmupSettings(), Qwen3Config()
    key = cache_key(settings, model)
    assert key == cache_key(WarmupSettings(threads=1), Qwen3Config())
    others = [
        cache_key(WarmupSettings(seed=1), model),
        cache_key(WarmupSettings(lake=FrozenLakeSettings(sizes=(4, 5))), model),
        cache_key(settings, Qwen3Config(hidden_size=64)),
    ]
    assert len({key, *others}) == 4


def test_a_policy_that_cannot_be_written_is_an_error(model, tmp_path: Path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(CheckpointError, match="file"):
        run(SHORT, model, tmp_path / "file" / "policy")
