"""Weights in place: what is published is what is served, bit for bit, in every architecture, without a restart."""

import pytest

pytest.importorskip("vllm")

from safetensors.torch import load_file

from elastic.core.types import SamplingParameters, WeightMode
from elastic.engine.base import GenerateRequest
from elastic.testing.models import TINY_MODELS, VOCABULARY, fused
from elastic.weights.errors import WeightsError
from elastic.weights.source import TensorSource

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


def _said(recorder, tag: str) -> list[tuple[list[int], list[float]]]:
    """Tokens and log-probabilities of 64 prompts, one after the other: nothing else is in their batches."""
    for request in _prompts(tag):
        recorder.run(request)
    return [(recorder.tokens(r.request_id), recorder.logprobs(r.request_id)) for r in _prompts(tag)]


@pytest.mark.parametrize("architecture", TINY_MODELS)
def test_what_is_published_is_served_bit_for_bit(start, trainer, tmp_path, architecture):
    """By a keyframe and deltas, read back from live parameters; and a fresh engine says the same of 64 prompts."""
    publishes, updated = trainer(architecture), start(architecture)
    process = updated.engine.process_id
    model = publishes.model
    tensors = model.tensors(0)
    for version in range(3):
        tensors = model.nudged(tensors, version) if version else tensors
        updated.load(publishes.publish(version, tensors))
        assert updated.engine.statistics().weights_version == version
        _said(updated, f"{version}/")  # what it leaves in the prefix cache is of no use to the next version
    assert updated.engine.process_id == process
    updated.engine.read_back(tmp_path / "live")
    live = load_file(tmp_path / "live.0")
    expected = fused(live, tensors)
    for name, tensor in live.items():
        assert tensor[: expected[name].shape[0]].equal(expected[name]), name  # the vocabulary is padded
    fresh = start(architecture)
    fresh.engine.load_version(TensorSource(2, tensors), WeightMode.FINISH)
    assert _said(fresh, "x") == _said(updated, "x")
    fresh.close()
    updated.close()


def test_a_version_that_does_not_verify_is_never_served(start, trainer):
    """What was served before goes on being served."""
    publishes, recorder = trainer(), start()
    recorder.load(publishes.publish(0, tensors := publishes.model.tensors(0)))
    before = {path for path in publishes.directory.rglob("*") if path.is_file()}
    second = publishes.publish(1, publishes.model.nudged(tensors, 1))
    for path in {path for path in publishes.directory.rglob("*") if path.is_file()} - before:
        path.chmod(0o600)
        path.write_bytes(bytes(reversed(path.read_bytes())))
    with pytest.raises(WeightsError):
        recorder.engine.prefetch(second, 5.0)
    assert recorder.engine.statistics().weights_version == 0
    request = _prompts("a")[0]
    recorder.run(request)
    assert set(recorder.versions(request.request_id)) == {0}
    recorder.close()
