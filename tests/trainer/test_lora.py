"""Adapters: they alone are trained, published and kept; what travels counts once, and merges into the base."""

from pathlib import Path

import pytest
import torch

from elastic.config import Config, ConfigError, TrainerConfig
from elastic.engine.base import PROOF_TOKENS, proof_text
from tests.trainer.hugging_face import read_weights, write_model
from tests.trainer.test_transformers_trainer import GROUPS, PLAIN, groups_of, step

pytest.importorskip("transformers")
pytest.importorskip("peft")
pytestmark = pytest.mark.trainers

from elastic.worker.trainer.transformers import Transformers, TransformersSettings  # noqa: E402
from elastic.worker.trainer.transformers.examination import examine  # noqa: E402
from elastic.worker.trainer.transformers.lora import AdaptedModel  # noqa: E402
from elastic.worker.trainer.transformers.model import CausalModel  # noqa: E402
from elastic.worker.trainer.transformers.trainer import TransformersTrainer  # noqa: E402

LORA = {"r": 4, "lora_alpha": 8}
KINDS = ("llama", "qwen3", "gemma3_text", "qwen3_moe")
ATTENTION = {**LORA, "target_modules": ["q_proj", "o_proj"]}


def settings_of(lora: dict[str, object]) -> TransformersSettings:
    return TransformersSettings.model_validate({"lora": lora})


def adapted(directory: Path, lora: dict[str, object] | None = None, **settings: object) -> TransformersTrainer:
    own = settings_of(ATTENTION if lora is None else lora)
    assert own.lora is not None
    model = AdaptedModel(directory, torch.device("cpu"), "auto", True, own.lora, seed=3)
    return TransformersTrainer(TrainerConfig.model_validate(PLAIN | settings), own, model, GROUPS, 1.0)


def config_of(directory: Path, lora: dict[str, object]) -> Config:
    return Config.model_validate(
        {
            "run": {"name": "adapters", "seed": 3},
            "model": {"checkpoint": str(directory)},
            "environment": {"name": "frozenlake"},
            "trainer": {"kind": "transformers", "transformers": {"lora": lora}},
            "engine": {"kind": "vllm", "vllm": {"base": str(directory)}},
        }
    )


@pytest.mark.parametrize("kind", KINDS)
def test_adapters_begin_as_the_base_and_then_are_what_travels(kind: str, tmp_path: Path) -> None:
    directory = write_model(tmp_path / kind, kind)
    base = CausalModel(directory, torch.device("cpu"), "auto", False)
    made = adapted(directory, learning_rate=1e-2)
    text = torch.tensor([proof_text(base.vocab_size)])
    with torch.no_grad():
        expected = base.model(text).logits[0, :-1].log_softmax(-1).gather(-1, text[0, 1:, None]).squeeze(-1)
    assert len(made.proof()) == PROOF_TOKENS - 1
    torch.testing.assert_close(torch.tensor(made.proof()), expected, atol=2e-5, rtol=1e-4)

    before = made.tensors()
    for seed in range(2):
        step(made, groups_of(seed))
    published = made.tensors()
    assert published.keys() == before.keys()
    assert all(name.startswith("base_model.model.model.layers.") for name in published)
    assert {name.split(".")[-3] for name in published} == {"q_proj", "o_proj"}
    assert {len(tensor) for name, tensor in published.items() if ".lora_A." in name} == {4}
    assert any(not torch.equal(tensor, before[name]) for name, tensor in published.items())
    assert made.proof() != pytest.approx(expected.tolist(), abs=1e-3)
    for name, tensor in base.named_parameters().items():
        now = dict(made.model.model.named_parameters())
        there = now.get(name, now.get(name.replace(".weight", ".base_layer.weight")))
        assert there is not None
        assert torch.equal(there, tensor), name


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")  # peft asks by the old name
@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_is_gone_on_from_exported_and_merged(kind: str, tmp_path: Path) -> None:
    """Served by peft at a scale of 1, and merged into the base's files, it is the policy that was trained."""
    import peft
    import transformers
    from safetensors.torch import save_file

    directory, path = write_model(tmp_path / kind, kind), tmp_path / "checkpoint.safetensors"
    config, own = config_of(directory, ATTENTION), settings_of(ATTENTION)
    made = adapted(directory, learning_rate=1e-2)
    step(made, groups_of(1))
    made.save(path)
    other = adapted(directory, learning_rate=1e-2)
    other.load(path)
    assert other.proof() == made.proof()
    for seed in (2, 3):
        assert step(made, groups_of(seed)) == step(other, groups_of(seed))
    assert all(torch.equal(tensor, other.tensors()[name]) for name, tensor in made.tensors().items())
    made.save(path)
    Transformers.check_checkpoint(config, own, path)

    merged = dict(Transformers.exported(config, own, path))
    stored = read_weights(directory)
    assert {name: one.shape for name, one in merged.items()} == {name: stored[name].shape for name in merged}
    whole = CausalModel(directory, torch.device("cpu"), "auto", False)
    changed = [name for name, one in merged.items() if not torch.equal(one, stored[name].float())]
    assert {name.split(".")[-2] for name in changed} == {"q_proj", "o_proj"}
    there = tmp_path / "merged"
    there.mkdir()
    save_file({name: one.contiguous() for name, one in merged.items()}, there / "model.safetensors", {"format": "pt"})
    (there / "config.json").write_text((directory / "config.json").read_text())
    text = torch.tensor([proof_text(whole.vocab_size)])
    expected = torch.tensor(made.proof())

    def said(model: torch.nn.Module) -> torch.Tensor:
        with torch.no_grad():
            return model(text).logits[0, :-1].log_softmax(-1).gather(-1, text[0, 1:, None]).squeeze(-1)

    plain = transformers.AutoModelForCausalLM.from_pretrained(there, dtype=torch.float32)
    torch.testing.assert_close(said(plain), expected, atol=2e-5, rtol=1e-4)
    adapter = Transformers.exported_adapter(config, own, path)
    served = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    at_one = peft.LoraConfig(r=4, lora_alpha=4, target_modules=["q_proj", "o_proj"])
    served = peft.get_peft_model(served, at_one)
    found = peft.set_peft_model_state_dict(served, adapter)
    assert not found.unexpected_keys
    torch.testing.assert_close(said(served), expected, atol=2e-5, rtol=1e-4)


def test_only_adapters_are_kept_and_counted(tmp_path: Path) -> None:
    directory = write_model(tmp_path / "llama", "llama")
    assert examine(directory, settings_of(LORA)).parameters < examine(directory, TransformersSettings()).parameters
    made = adapted(directory)
    made.save(tmp_path / "checkpoint.safetensors")
    from safetensors.torch import load_file

    kept = load_file(tmp_path / "checkpoint.safetensors")
    assert all(".lora_" in name for name in kept)
    assert len(kept) == 3 * len(made.tensors())


def test_no_worker_is_asked_for_a_proof_of_whole_models(tmp_path: Path) -> None:
    directory = write_model(tmp_path / "llama", "llama")
    own = TransformersSettings()
    model = CausalModel(directory, torch.device("cpu"), own.attention, True)
    assert TransformersTrainer(TrainerConfig.model_validate(PLAIN), own, model, GROUPS, 1.0).proof() == []


@pytest.mark.parametrize(
    ("lora", "words"),
    [
        ({"r": 16, "lora_alpha": 24}, "a scale of 1.5; allowed: r times a power of two"),
        ({"bias": "all"}, "bias: found 'all'; allowed: 'none'"),
        ({"use_dora": True}, "use_dora: found True; allowed: False"),
        ({"lora_dropout": 0.1}, "lora_dropout: found 0.1; allowed: 0"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save: found"),
        ({"target_modules": ["q_proj", "lm_head"]}, "target_modules: found 'lm_head'"),
    ],
)
def test_adapters_that_do_not_travel_exactly_are_refused(lora: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match="1 validation error") as caught:
        settings_of(lora)
    assert words in str(caught.value)


def test_modules_that_a_model_does_not_have_are_named(tmp_path: Path) -> None:
    directory = write_model(tmp_path / "llama", "llama")
    with pytest.raises(ConfigError, match=r"target_modules: found \['c_attn'\].*allowed: ends of .*q_proj") as caught:
        examine(directory, settings_of({"target_modules": ["c_attn"]}))
    assert "lm_head" not in str(caught.value)


def test_an_engine_for_adapters_is_refused_where_the_trainer_makes_none(tmp_path: Path) -> None:
    from elastic.engine.vllm import VllmSettings
    from elastic.worker.trainer.base import TrainerSettings
    from elastic.worker.trainer.embedded import Embedded

    config = Config.model_validate({"model": {"checkpoint": str(tmp_path)}, "environment": {"name": "frozenlake"}})
    engines = [VllmSettings(), VllmSettings(base=tmp_path)]
    plain, based = (Embedded.unserved(config, TrainerSettings(), config.engine, own) for own in engines)
    assert plain == ""
    assert "trainer.kind = 'transformers' with trainer.transformers.lora" in based


def test_every_engine_serves_the_base_with_adapters_of_that_rank(tmp_path: Path) -> None:
    from elastic.engine.vllm import VllmSettings

    config = config_of(tmp_path, LORA)

    def unserved(lora: dict[str, object] | None, context: int = PROOF_TOKENS + 1, **own: Path) -> str:
        engine = config.engine.model_copy(update={"max_context_tokens": context})
        settings = TransformersSettings() if lora is None else settings_of(lora)
        return Transformers.unserved(config, settings, engine, VllmSettings.model_validate(own))

    assert unserved(LORA, base=tmp_path) == ""
    assert "base = " in unserved(LORA)
    assert "base = " in unserved(LORA, base=tmp_path / "other")
    assert "adapter_rank" in unserved({"r": 32, "lora_alpha": 32}, base=tmp_path)
    assert "max_context_tokens" in unserved(LORA, PROOF_TOKENS, base=tmp_path)
    assert "no adapters" in unserved(None, base=tmp_path)
