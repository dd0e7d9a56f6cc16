"""A rank of vLLM pulls its part, and gives vLLM's loaders whole tensors of which that part alone is there."""

from pathlib import Path

import pytest
import torch
from structlog.testing import capture_logs
from torch import Tensor

from elastic.engine.vllm.parts import RankParts
from elastic.weights.directory import DirectoryRelay
from elastic.weights.placements import inferred, tensor_parallel
from elastic.weights.puller import Puller
from elastic.weights.sharding import whole
from tests.weights.ranks import Trainer, local_shapes, local_tensors, qwen3_shapes, randomly_patterned
from tests.weights.signed import TRUST, assert_same


def patterns(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.view(torch.int16) for name, tensor in tensors.items()}


def numbers(shapes: dict[str, tuple[int, ...]], seed: int) -> dict[str, Tensor]:
    drawn = randomly_patterned(shapes, seed)
    return {name: tensor.view(torch.bfloat16).nan_to_num(1.0, 1.0, 1.0) for name, tensor in drawn.items()}


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("tied", [True, False])
def test_what_a_rank_takes_is_there_and_little_else_is_pulled(tmp_path: Path, ranks: int, tied: bool):
    shapes = qwen3_shapes(tied)
    shapes |= {name: (128, 6) for name in ("model.embed_tokens.weight", "lm_head.weight") if name in shapes}
    relay = DirectoryRelay(tmp_path)
    trainer = Trainer(
        relay, shapes, [whole(shapes)], tensor_parallel(shapes, ranks), bucket_elements=1000, tile_elements=1000
    )
    local = local_shapes(shapes, ranks, 1, 0, fused=True)
    as_vllm_has_it = local | ({"lm_head.weight": local["model.embed_tokens.weight"]} if tied else {})
    parts = [RankParts(as_vllm_has_it, rank, ranks) for rank in range(ranks)]
    pullers = [Puller(relay, TRUST, shard=part.shard) for part in parts]
    for version in range(2):
        full = numbers(shapes, version)
        trainer.publish(version, patterns(full))
        everything, held_bytes = Puller(relay, TRUST).stage(version).report, 0
        for rank, (part, puller) in enumerate(zip(parts, pullers, strict=True)):
            staged = puller.stage(version)
            held_bytes += staged.report.full_bytes
            assert staged.report.size_bytes < everything.size_bytes
            spread = dict(part.spread(puller.apply(staged)))
            taken = inferred(shapes, local, rank, ranks)
            assert_same(local_tensors(patterns(spread), taken), local_tensors(patterns(full), taken))
            assert {name: tensor.shape for name, tensor in spread.items()} == shapes
            nothing = [tensor.isnan() for tensor in spread.values()]
            assert any(each.any() for each in nothing)
            assert all(spread[name][~each].equal(full[name][~each]) for name, each in zip(spread, nothing, strict=True))
        assert held_bytes < 1.2 * everything.full_bytes, "norms are everybody's, and key heads of two ranks"
    trainer.close()


def test_a_tensor_whose_part_cannot_be_told_is_pulled_whole():
    shapes = {"model.layers.0.mlp.up_proj.weight": (8, 4), "strange": (6, 4)}
    parts = RankParts({"model.layers.0.mlp.up_proj.weight": (4, 4), "unknown": (3, 4)}, 1, 2)
    with capture_logs() as logs:
        shard = parts.shard(shapes)
    assert {name: local.boxes[0].begin for name, local in shard.items()} == dict.fromkeys(shapes, (0, 0)) | {
        "model.layers.0.mlp.up_proj.weight": (4, 0)
    }
    assert shard["strange"] == whole(shapes)["strange"]
    assert [(log["event"], log["first"]) for log in logs] == [("tensors are pulled whole", "strange")]
