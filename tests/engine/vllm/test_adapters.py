"""Versions of the policy as adapters to a base."""

import pytest

pytest.importorskip("vllm")

import torch

from elastic.core.types import SamplingParameters, WeightMode
from elastic.engine.base import GenerateRequest, WeightsMismatch, proof_text
from elastic.engine.model.checkpoint import load_tensors, write_checkpoint
from elastic.engine.model.config import Qwen3Config
from elastic.engine.model.qwen3 import Qwen3
from elastic.weights.source import TensorSource
from tests.tiny_models import HEAD_DIM, HEADS, HIDDEN, LAYERS, MLP, TINY_MODELS, VOCABULARY

pytestmark = pytest.mark.timeout(1800)
MODEL = TINY_MODELS["qwen3"]
CONFIG = Qwen3Config.from_dict(MODEL.config)
RANK = 8
ADAPTED = {"self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN), "mlp.down_proj": (HIDDEN, MLP)}


def adapter(seed: int, size: float = 0.2, rank: int = RANK) -> dict[str, torch.Tensor]:
    """A change of some of the model's matrices, as a product of two."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for layer in range(LAYERS):
        for module, (rows, columns) in ADAPTED.items():
            at = f"base_model.model.model.layers.{layer}.{module}"
            for part, shape in (("lora_A", (rank, columns)), ("lora_B", (rows, rank))):
                found[f"{at}.{part}.weight"] = (size * torch.randn(shape, generator=generator)).bfloat16()
    return found


def reference(changed: dict[str, torch.Tensor]) -> Qwen3:
    """The base in float32, with an adapter added to its matrices."""
    tensors = {name: tensor.float() for name, tensor in MODEL.tensors(1).items()}
    for name, down in changed.items():
        if name.endswith("lora_A.weight"):
            at = name.removeprefix("base_model.model.").replace("lora_A.", "")
            tensors[at] += changed[name.replace("lora_A", "lora_B")].float() @ down.float()
    model = Qwen3(CONFIG)
    load_tensors(model, tensors)
    return model


@pytest.fixture(scope="module")
def adapting(start, tmp_path_factory):
    """A recorder of an engine whose base is that of seed 1."""
    base = tmp_path_factory.mktemp("base") / "checkpoint"
    write_checkpoint(base, CONFIG, MODEL.tensors(1))
    own = {"base": str(base), "adapter_rank": RANK, "start_timeout_s": 600.0, "arguments": {"dtype": "float32"}}
    return start(vllm=own, kv_blocks=17, max_batch=4)


def turn(name: str, prompt: int = 20, **drawn) -> GenerateRequest:
    ids = [(7 * index + prompt) % VOCABULARY for index in range(prompt)]
    wanted = SamplingParameters(**{"max_new_tokens": 12, "noise_seed": 5, **drawn})
    return GenerateRequest(request_id=name, token_ids=ids, start=0, sampling=wanted)


def assert_said_by(model: Qwen3, recorder, request: GenerateRequest) -> None:
    tokens = recorder.tokens(request.request_id)
    with torch.no_grad():
        logits = model(torch.tensor([request.token_ids + tokens]))[0, len(request.token_ids) - 1 : -1]
    expected = logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(recorder.logprobs(request.request_id)), expected, atol=5e-4, rtol=0)


def proof(model: Qwen3) -> torch.Tensor:
    """What a version is known by, as the model has it."""
    text = torch.tensor([proof_text(VOCABULARY)])
    with torch.no_grad():
        return model(text)[0, :-1].log_softmax(-1).gather(-1, text[0, 1:, None]).squeeze(-1)


def test_each_version_is_the_base_with_its_adapter(adapting):
    adapting.engine.submit([turn("waits for a version")])
    for version in (1, 2):
        changed = adapter(version)
        adapting.engine.load_version(TensorSource(version, changed), WeightMode.FINISH)
        request = turn(f"policy {version}")
        adapting.run(request)
        assert_said_by(reference(changed), adapting, request)
        assert set(adapting.versions(request.request_id)) == {version}
        torch.testing.assert_close(torch.tensor(adapting.engine.proof), proof(reference(changed)), atol=5e-4, rtol=0)
    adapting.finish("waits for a version")
    assert set(adapting.versions("waits for a version")) == {1}
    assert adapting.tokens("policy 1") != adapting.tokens("policy 2")


def test_an_adapter_that_does_not_fit_is_refused_and_the_old_one_serves_on(adapting):
    adapting.engine.load_version(TensorSource(10, adapter(1)), WeightMode.FINISH)
    (before,) = adapting.run(turn("before"))
    for number, (spoiled, message) in enumerate(
        [
            (adapter(2, rank=4 * RANK), "expected shape"),
            (MODEL.tensors(2), "lora_A|not in the model"),
            ({name: tensor.float() for name, tensor in adapter(2).items()}, "expected bfloat16"),
        ]
    ):
        with pytest.raises(WeightsMismatch, match=message):
            adapting.engine.load_version(TensorSource(11, spoiled), WeightMode.FINISH)
        assert adapting.run(turn(f"after {number}")) == [before]
        assert adapting.engine.statistics().weights_version == 10
