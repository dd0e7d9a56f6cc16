"""The suite that every trainer passes, on both kinds and on the fault worlds' model of one."""

import pytest
import torch

from elastic.config import TrainerConfig
from elastic.testing.faults.shell.models import ModelTrainer
from elastic.testing.trainer_conformance import *  # noqa: F403
from elastic.testing.trainers import GROUPS, TrainerUnderTest
from elastic.worker.trainer.embedded.trainer import GRPOTrainer
from tests.trainer.conftest import tiny_model

SETTINGS = TrainerConfig.model_validate(
    {"updates_per_step": 2, "warmup_updates": 0, "micro_batch_tokens": 100, "mismatch_max": 1e9, "learning_rate": 1e-2}
)


def embedded() -> GRPOTrainer:
    return GRPOTrainer(SETTINGS, tiny_model(), GROUPS, 1.0)


def modelled() -> ModelTrainer:
    return ModelTrainer(lambda weights: None, lambda version, bits: None, mismatch_max=1e9)


@pytest.fixture(scope="module")
def stored_policy(tmp_path_factory: pytest.TempPathFactory):
    """A directory with a tiny model of transformers."""
    transformers = pytest.importorskip("transformers")
    directory = tmp_path_factory.mktemp("llama")
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        transformers.LlamaForCausalLM(config).save_pretrained(directory)
    return directory


@pytest.fixture(params=["embedded", "modelled", "transformers", "transformers-bfloat16-offloaded"])
def trainer_under_test(request: pytest.FixtureRequest) -> TrainerUnderTest:
    if request.param == "embedded":
        return TrainerUnderTest("embedded", embedded)
    if request.param == "modelled":
        return TrainerUnderTest("modelled", modelled)
    directory = request.getfixturevalue("stored_policy")
    from elastic.worker.trainer.transformers import TransformersSettings
    from elastic.worker.trainer.transformers.model import CausalModel
    from elastic.worker.trainer.transformers.trainer import TransformersTrainer

    chosen = {"dtype": "bfloat16", "offload": "all", "activation_checkpointing": False}
    own = TransformersSettings.model_validate({} if request.param == "transformers" else chosen)

    def make() -> TransformersTrainer:
        model = CausalModel(directory, torch.device("cpu"), own.attention, own.activation_checkpointing)
        return TransformersTrainer(SETTINGS, own, model, GROUPS, 1.0)

    return TrainerUnderTest(request.param, make, float32=True)
