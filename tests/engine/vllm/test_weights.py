"""Weights in place: what is published is what is served, bit for bit, in every architecture, without a restart; and
what is said is what `transformers` computes from it."""

import os
import signal

import pytest

pytest.importorskip("vllm")

import msgspec
import torch
from safetensors.torch import load_file

from elastic.core.types import SamplingParameters
from elastic.engine.base import GenerateRequest
from elastic.engine.model.checkpoint import load_tensors
from elastic.engine.model.config import Qwen3Config
from elastic.engine.model.qwen3 import Qwen3
from tests.engine.vllm import families
from tests.engine.vllm.reference import Reference
from tests.tiny_models import TINY_MODELS, VOCABULARY, fused

pytestmark = pytest.mark.timeout(1800)
PROMPTS = 64


def _prompts(tag: str) -> list[GenerateRequest]:
    return [
        GenerateRequest(
            request_id=f"{tag}{number}",
            token_ids=[(7 * number + 3 * place) % VOCABULARY for place in range(5 + number)],
            start=0,
            sampling=SamplingParameters(max_new_tokens=4, noise_seed=number),
        )
        for number in range(PROMPTS)
    ]


def said_by(recorder, tag: str) -> list[tuple[list[int], list[int], list[float]]]:
    """Of each prompt: its ids, and the tokens and log-probabilities that follow."""
    requests = _prompts(tag)
    recorder.run(*requests)
    return [(r.token_ids, recorder.tokens(r.request_id), recorder.logprobs(r.request_id)) for r in requests]


def apart(said: list[tuple[list[int], list[int], list[float]]], reference: "Reference | _Embedded") -> float:
    """The mean distance of an engine's log-probabilities from a reference's."""
    distances = [
        abs(ours - theirs)
        for prompt, tokens, logprobs in said
        for ours, theirs in zip(logprobs, reference.logprobs(prompt, tokens), strict=True)
    ]
    assert len(distances) == 4 * PROMPTS
    return sum(distances) / len(distances)


class _Embedded:
    """The model that trainer and embedded engine share."""

    def __init__(self, model: Qwen3) -> None:
        self._model = model

    @torch.no_grad()
    def logprobs(self, prompt: list[int], tokens: list[int]) -> list[float]:
        logits = self._model(torch.tensor([[*prompt, *tokens]]))[0, len(prompt) - 1 : -1]
        return torch.log_softmax(logits.float(), -1).gather(1, torch.tensor(tokens)[:, None])[:, 0].tolist()


@pytest.mark.parametrize("architecture", TINY_MODELS)
def test_what_is_published_is_served_bit_for_bit(start, trainer, tmp_path, architecture):
    """By a keyframe and deltas, read back from live parameters, which are whole where no kernel packs them."""
    publishes, updated = trainer(architecture), start(architecture, kernels="torch")
    process = updated.engine.process_id
    model = publishes.model
    tensors = model.tensors(0)
    for version in range(3):
        tensors = model.nudged(tensors, version) if version else tensors
        updated.load(publishes.publish(version, tensors))
        assert updated.engine.statistics().weights_version == version
    assert updated.engine.process_id == process
    updated.engine.read_back(tmp_path / "live")
    live = load_file(tmp_path / "live.0")
    expected = fused(live, tensors)
    for name, tensor in live.items():
        found, wanted = tensor[: expected[name].shape[0]], expected[name]  # the vocabulary is padded
        if ".experts." in name and not torch.cuda.is_available():  # A CPU's kernel reads them in another order.
            found, wanted = found.flatten().sort().values, wanted.flatten().sort().values
        assert found.equal(wanted), name
    updated.close()


@pytest.mark.parametrize("kernels", families.of_this_machine())
@pytest.mark.parametrize("architecture", TINY_MODELS)
def test_what_is_served_is_what_the_model_s_own_library_computes(start, trainer, tmp_path, architecture, kernels):
    """After a keyframe, a delta, sleep and a restart, whatever copies of weights the kernels compute with.

    The versions say different things: each is told from the one before it.
    """
    publishes, recorder = trainer(architecture), start(architecture, kernels=kernels)
    model = publishes.model
    versions = [model.tensors(0)]
    versions.append(model.drifted(versions[0], 1))
    says = [Reference(tmp_path / f"v{number}", model, tensors) for number, tensors in enumerate(versions)]
    other = Reference(tmp_path / "other", model, model.drifted(versions[0], 2))

    def check(when: str, version: int, former: Reference) -> None:
        said = said_by(recorder, f"{when}/")
        assert apart(said, says[version]) <= recorder.engine.capabilities.logprob_noise, when
        assert apart(said, former) > 4 * recorder.engine.capabilities.logprob_noise, when

    recorder.load(publishes.publish(0, versions[0]))
    check("keyframe", 0, other)
    recorder.load(publishes.publish(1, versions[1]))
    check("delta", 1, says[0])
    recorder.engine.sleep()
    recorder.engine.wake()
    check("sleep", 1, says[0])
    long = msgspec.structs.replace(
        _prompts("killed/")[0], sampling=SamplingParameters(max_new_tokens=200, noise_seed=1)
    )
    recorder.engine.submit([long])
    recorder.until_tokens(long.request_id, 1)
    os.kill(recorder.engine.process_id, signal.SIGKILL)
    recorder.finish(long.request_id)
    check("restart", 1, says[0])
    if architecture == "qwen3":
        config = Qwen3Config.from_dict(model.config)
        embedded = Qwen3(config)
        load_tensors(embedded, versions[1])
        said = said_by(recorder, "embedded/")
        assert apart(said, _Embedded(embedded)) <= recorder.engine.capabilities.logprob_noise
    recorder.close()
