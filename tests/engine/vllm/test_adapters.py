"""A base that is served, and the policy as an adapter to it, in one engine: versions, and who goes first."""

from typing import Any

import pytest

pytest.importorskip("vllm")

import torch

from elastic.core.types import FinishReason, SamplingParameters, WeightMode
from elastic.engine.base import NO_VERSION, GenerateRequest, WeightsMismatch
from elastic.engine.model.checkpoint import load_tensors, write_checkpoint
from elastic.engine.model.config import Qwen3Config
from elastic.engine.model.qwen3 import Qwen3
from elastic.testing.models import HEAD_DIM, HEADS, HIDDEN, LAYERS, MLP, TINY_MODELS, VOCABULARY
from elastic.testing.recorder import Recorder
from elastic.weights.source import TensorSource

pytestmark = pytest.mark.timeout(1800)
MODEL = TINY_MODELS["qwen3"]
CONFIG = Qwen3Config.from_dict(MODEL.config)
RANK = 8
ADAPTED = {"self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN), "mlp.down_proj": (HIDDEN, MLP)}
LONG = 150


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


def reference(changed: dict[str, torch.Tensor] | None) -> Qwen3:
    """The base in float32, with an adapter added to its matrices."""
    tensors = {name: tensor.float() for name, tensor in MODEL.tensors(1).items()}
    changed = changed or {}
    for name, down in changed.items():
        if name.endswith("lora_A.weight"):
            at = name.removeprefix("base_model.model.").replace("lora_A.", "")
            tensors[at] += changed[name.replace("lora_A", "lora_B")].float() @ down.float()
    model = Qwen3(CONFIG)
    load_tensors(model, tensors)
    return model


@pytest.fixture(scope="module")
def served(start, tmp_path_factory):
    """An engine whose base is that of seed 1, a recorder of its turns, and one of its users' requests."""
    base = tmp_path_factory.mktemp("base") / "checkpoint"
    write_checkpoint(base, CONFIG, MODEL.tensors(1))
    own = {
        "base": str(base),
        "adapter_rank": RANK,
        "rollout_kv_share": 0.5,
        "start_timeout_s": 600.0,
        "arguments": {"dtype": "float32"},
    }
    recorder = start(vllm=own, kv_blocks=17, max_batch=4)
    users: Any = Users(recorder.engine)
    return recorder, Recorder(users, 600.0)


class Users:
    """What a recorder needs of an engine, of its users' side."""

    def __init__(self, engine) -> None:
        self._engine = engine

    def start(self, sink) -> None:
        self._serving = self._engine.serve(sink)

    def __getattr__(self, name):
        return getattr(self._serving, name)


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


def test_users_are_served_by_the_base_before_and_beside_every_version(served):
    recorder, users = served
    request = turn("user 0")
    users.run(request)
    assert_said_by(reference(None), users, request)
    recorder.engine.submit([turn("waits for a version")])
    for version in (1, 2):
        changed = adapter(version)
        recorder.engine.load_version(TensorSource(version, changed), WeightMode.FINISH)
        of_policy, of_user = turn(f"policy {version}"), turn(f"user {version}")
        recorder.engine.submit([of_policy])
        users.run(of_user)
        recorder.finish(of_policy.request_id)
        assert_said_by(reference(changed), recorder, of_policy)
        assert_said_by(reference(None), users, of_user)
        assert set(recorder.versions(of_policy.request_id)) == {version}
        assert users.tokens(of_user.request_id) == users.tokens("user 0")
        assert users.end(of_user.request_id).weights_version in (NO_VERSION, version)
    assert set(recorder.versions("waits for a version")) == {1}
    assert recorder.tokens("policy 1") != recorder.tokens("policy 2") != users.tokens("user 0")


def test_an_adapter_that_does_not_fit_is_refused_and_the_old_one_serves_on(served):
    recorder, _ = served
    recorder.engine.load_version(TensorSource(10, adapter(1)), WeightMode.FINISH)
    (before,) = recorder.run(turn("before"))
    for number, (spoiled, message) in enumerate(
        [
            (adapter(2, rank=4 * RANK), "expected shape"),
            (MODEL.tensors(2), "lora_A|not in the model"),
            ({name: tensor.float() for name, tensor in adapter(2).items()}, "expected bfloat16"),
        ]
    ):
        with pytest.raises(WeightsMismatch, match=message):
            recorder.engine.load_version(TensorSource(11, spoiled), WeightMode.FINISH)
        assert recorder.run(turn(f"after {number}")) == [before]
        assert recorder.engine.statistics().weights_version == 10


def test_running_turns_wait_for_nobody_but_users_are_not_asked_to_end(served):
    """New weights wait for running turns alone: a user's request goes on through them."""
    recorder, users = served
    users.engine.submit([turn("long user", max_new_tokens=LONG)])
    users.until_tokens("long user", 3)
    recorder.engine.load_version(TensorSource(20, adapter(1)), WeightMode.FINISH)
    assert users.end("long user") is None
    recorder.engine.sleep()
    recorder.engine.wake()
    users.finish("long user")
    assert users.end("long user").finish is FinishReason.LENGTH
    assert len(users.tokens("long user")) == LONG


def test_rollouts_leave_blocks_and_places_to_users(served):
    """Four rollouts that would fill the batch and all KV blocks, and four users: these end first, nothing is lost."""
    recorder, users = served
    recorder.engine.load_version(TensorSource(30, adapter(1)), WeightMode.FINISH)
    rollouts = [turn(f"rollout {number}", prompt=60, max_new_tokens=LONG) for number in range(4)]
    recorder.engine.submit(rollouts)
    recorder.until_tokens("rollout 0", 3)
    used = recorder.engine.statistics().kv_blocks_used
    assert used <= 17 // 2 + 1  # a lone rollout's next block may exceed it until the next iteration
    requests = [turn(f"pressing user {number}", prompt=90) for number in range(4)]
    users.run(*requests)
    assert not all(recorder.end(request.request_id) for request in rollouts)
    recorder.finish(*(request.request_id for request in rollouts))
    for request in rollouts:
        recorder.check(request)
        assert len(recorder.tokens(request.request_id)) == LONG
    for request in requests:
        assert len(users.tokens(request.request_id)) == 12
