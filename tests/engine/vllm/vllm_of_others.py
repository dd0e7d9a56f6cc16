"""A vLLM that others start, in a process of its own, which takes three deltas and refuses a forged one."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

import sys
from collections.abc import Mapping
from pathlib import Path

import torch
import vllm
from vllm.v1.metrics.prometheus import get_prometheus_registry

from elastic.engine.model.checkpoint import write_checkpoint
from elastic.engine.model.config import Qwen3Config
from tests.tiny_models import TINY_MODELS, fused

MODEL = TINY_MODELS["qwen3"]
DELTAS = 3


def started(directory: Path) -> vllm.LLM:
    write_checkpoint(directory / "base", Qwen3Config.from_dict(MODEL.config), MODEL.tensors(0))
    return vllm.LLM(
        str(directory / "base"),
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=256,
        block_size=32,
        gpu_memory_utilization=0.1,
        num_gpu_blocks_override=32,
        max_num_seqs=4,
        weight_transfer_config={"backend": "elastic"},
    )


def assert_serves(server: vllm.LLM, tensors: Mapping[str, torch.Tensor]) -> None:
    [live] = server.apply_model(lambda model: {name: one.detach().clone() for name, one in model.named_parameters()})
    expected = fused(live, dict(tensors))
    for name, tensor in live.items():
        assert torch.equal(tensor[: expected[name].shape[0]], expected[name]), name


def metric(name: str) -> float:
    """As vLLM's `/metrics` show it."""
    [value] = [one.value for kind in get_prometheus_registry().collect() for one in kind.samples if one.name == name]
    return value


def main(directory: Path) -> None:
    server = started(directory)
    # After vLLM has looked for its kernels in all that is imported.
    from elastic.weights.directory import DirectoryRelay
    from elastic.weights.publisher import Publisher
    from elastic.weights.signing import SigningKey

    relay, key = directory / "relay", SigningKey()
    publisher = Publisher(DirectoryRelay(relay), "run", MODEL.config, key=key)
    told = {"run": "run", "relay": str(relay), "publisher": key.public, "timeout_s": 60.0}
    server.init_weight_transfer_engine({"init_info": told})
    tensors = MODEL.tensors(1)
    for version in range(1 + DELTAS):
        tensors = {
            name: torch.where(tensor > 1, tensor * (1 + version / 64), tensor) for name, tensor in tensors.items()
        }
        publisher.publish(version, tensors)
        server.start_weight_update()
        server.update_weights({"update_info": {"version": version, "stage": True}})
        server.generate({"prompt_token_ids": [1, 2, 3]}, vllm.SamplingParams(max_tokens=4, detokenize=False))
        server.update_weights({"update_info": {"version": version}})
        server.finish_weight_update(str(version))
        assert_serves(server, tensors)
        assert server.get_weight_version() == str(version)
        assert metric("elastic:weights_version") == version
    forger = Publisher(DirectoryRelay(relay), "run", MODEL.config, key=SigningKey())
    forger.publish(1 + DELTAS, MODEL.tensors(2))
    server.start_weight_update()
    try:
        server.update_weights({"update_info": {"version": 1 + DELTAS}})
    except Exception as error:
        print(f"refused: {error!r}")
    else:
        raise AssertionError("a forged version was taken")
    assert_serves(server, tensors)
    assert metric("elastic:weights_version") == DELTAS
    assert metric("elastic:weights_refused_total") == 1
    assert metric("elastic:weights_pulled_bytes_total") > 0
    publisher.close()
    forger.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
