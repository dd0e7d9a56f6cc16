"""What vLLM has beyond the suite that every engine passes: noise in its sampler, deaths, and what it refuses."""

import os
import signal
import time

import pytest

pytest.importorskip("vllm")

from elastic.config import EngineConfig
from elastic.core.types import FinishReason, SamplingParameters, WeightMode
from elastic.engine import create_engine
from elastic.engine.base import GenerateRequest
from elastic.weights.source import TensorSource
from tests.tiny_models import TINY_MODELS, VOCABULARY

pytestmark = pytest.mark.timeout(1800)
MODEL = TINY_MODELS["qwen3"]
LONG = 200


@pytest.fixture(scope="module")
def vllm(start):
    recorder = start()
    recorder.engine.load_version(TensorSource(1, MODEL.tensors(1)), WeightMode.FINISH)
    return recorder


@pytest.fixture
def version(vllm):
    """The number of the weights of seed 1, in force as a version of their own."""
    number = (vllm.engine.statistics().weights_version or 0) + 1
    vllm.engine.load_version(TensorSource(number, MODEL.tensors(1)), WeightMode.FINISH)
    return number


def turn(name: str, prompt: int = 20, start: int = 0, accepted: tuple[int, ...] = (), **drawn) -> GenerateRequest:
    ids = [(7 * index + prompt) % VOCABULARY for index in range(prompt)]
    wanted = SamplingParameters(**{"max_new_tokens": 12, "noise_seed": 5, **drawn})
    return GenerateRequest(request_id=name, token_ids=[*ids, *accepted], start=start, sampling=wanted)


def test_noise_is_a_function_of_seed_and_position(vllm, version):
    """A turn that is cut goes on as it would have, where its logits are the same; another seed says something else."""
    (whole,) = vllm.run(turn("whole", max_new_tokens=60))
    for cut in (1, 17, 59):
        moved = turn(f"cut{cut}", start=cut, accepted=tuple(whole[:cut]), max_new_tokens=60)
        assert vllm.run(moved) == [whole[cut:]]
    assert vllm.run(turn("other", max_new_tokens=60, noise_seed=6)) != [whole]


def test_what_is_no_number_is_an_error_and_not_a_result(vllm, version):
    """And leaves nothing behind in the KV cache for the weights that come after."""
    (before,) = vllm.run(turn(f"finite {version}"))
    broken = MODEL.tensors(1)
    broken["model.norm.weight"][0] = float("nan")
    vllm.engine.load_version(TensorSource(version + 1, broken), WeightMode.FINISH)
    vllm.run(turn("no number"))
    end = vllm.end("no number")
    assert (end.finish, vllm.tokens("no number")) == (FinishReason.ERROR, [])
    assert "logits are not finite" in end.detail
    vllm.engine.load_version(TensorSource(version + 2, MODEL.tensors(1)), WeightMode.FINISH)
    assert vllm.run(turn("finite again")) == [before]


def test_a_hung_engine_makes_no_progress(vllm, version):
    vllm.engine.submit([turn("hung", max_new_tokens=LONG)])
    vllm.until_tokens("hung", 1)
    os.kill(vllm.engine.process_id, signal.SIGSTOP)
    try:
        tokens = -1
        while tokens != (tokens := len(vllm.tokens("hung"))):  # what was on its way
            time.sleep(0.2)
        hung = vllm.engine.statistics()
        time.sleep(0.5)
        assert vllm.engine.statistics().progress == hung.progress
        assert hung.executing == 1
    finally:
        os.kill(vllm.engine.process_id, signal.SIGCONT)
    vllm.finish("hung")


def test_a_killed_process_gives_its_turns_back_and_is_replaced(vllm, version, trainer):
    """By one that serves what the one before it served."""
    source = trainer().publish(version + 1, MODEL.tensors(2))
    vllm.load(source)
    (before,) = vllm.run(turn("before the kill"))
    vllm.engine.submit([turn("killed", max_new_tokens=LONG)])
    vllm.until_tokens("killed", 3)
    os.kill(vllm.engine.process_id, signal.SIGKILL)
    vllm.finish("killed")
    end = vllm.end("killed")
    assert end.finish is FinishReason.STALLED
    assert "SIGKILL" in end.detail
    assert end.start == len(vllm.tokens("killed"))
    down = vllm.engine.statistics()
    assert (down.capacity_turns, down.weights_version) == (0, None)
    vllm.engine.submit([turn("after the kill")])
    vllm.finish("after the kill")
    assert vllm.tokens("after the kill") == before
    assert vllm.engine.statistics().weights_version == version + 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kv_block_tokens": 16}, "block size.*engine.kv_block_tokens must be .* multiples of 32 on a CPU"),
        ({"pacing": {"prefill_tokens_per_s": 1.0, "decode_step_s": {1: 1.0}}}, "engine.pacing: 'vllm' runs as fast as"),
        ({"vllm": {"arguments": {"warp": 9}}}, "vLLM did not start: .*warp"),
    ],
)
def test_what_it_cannot_be_is_said(start, settings, message):
    with pytest.raises(ValueError, match=message):
        start(**settings)


def test_a_model_that_vllm_does_not_know_is_named():
    config = {**MODEL.config, "architectures": ["WarpForCausalLM"], "model_type": "warp"}
    with pytest.raises(ValueError, match=r"vLLM did not start: .*warp"):
        create_engine(config, EngineConfig.model_validate({"kind": "vllm", "kv_block_tokens": 32}))
