"""Trainer ranks that publish together, and the tensors of ranks."""

import math
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from msgspec.structs import replace
from torch import Tensor

from elastic.weights.placements import FUSED, Placement, declared, inferred
from elastic.weights.publisher import Publisher, PublishSettings, TrainerRank
from elastic.weights.puller import Puller
from elastic.weights.relay import Relay
from elastic.weights.sharding import Shard, cells
from elastic.weights.signing import SigningKey
from tests.weights.signed import KEY, assert_same

HEAD, HEADS, KV_HEADS, HIDDEN, FFN, VOCABULARY, LAYERS = 2, 8, 2, 6, 12, 13, 3


def qwen3_shapes(tied: bool = False) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN)}
    for layer in range(LAYERS):
        shapes |= {
            f"model.layers.{layer}.{name}.weight": shape
            for name, shape in {
                "input_layernorm": (HIDDEN,),
                "self_attn.q_proj": (HEADS * HEAD, HIDDEN),
                "self_attn.k_proj": (KV_HEADS * HEAD, HIDDEN),
                "self_attn.v_proj": (KV_HEADS * HEAD, HIDDEN),
                "self_attn.q_norm": (HEAD,),
                "self_attn.o_proj": (HIDDEN, HEADS * HEAD),
                "mlp.gate_proj": (FFN, HIDDEN),
                "mlp.up_proj": (FFN, HIDDEN),
                "mlp.down_proj": (HIDDEN, FFN),
            }.items()
        }
    shapes["model.norm.weight"] = (HIDDEN,)
    return shapes if tied else shapes | {"lm_head.weight": (VOCABULARY, HIDDEN)}


def local_shapes(shapes: dict[str, tuple[int, ...]], tp: int, stages: int, stage: int, fused: bool):
    """What an engine's rank has: the shapes its modules are built with, not where they come from."""
    local: dict[str, tuple[int, ...]] = {}
    for name, (first, *rest) in shapes.items():
        if "layers." in name and int(name.split(".")[2]) * stages // LAYERS != stage:
            continue
        if ("embed" in name and stage != 0) or (name in ("model.norm.weight", "lm_head.weight") and stage < stages - 1):
            continue
        module = name.split(".")[-2]
        if module in ("k_proj", "v_proj"):
            first = max(first // HEAD // tp, 1) * HEAD
        elif module in ("q_proj", "gate_proj", "up_proj"):
            first //= tp
        elif module in ("embed_tokens", "lm_head"):
            first = math.ceil(first / tp)
        elif module in ("o_proj", "down_proj"):
            rest = [rest[0] // tp]
        whole_name = next((name.replace(module, f) for f, parts in FUSED.items() if fused and module in parts), name)
        local[whole_name] = (first + local.get(whole_name, (0,))[0], *rest)
    return local


def qwen3_layout(shapes: dict[str, tuple[int, ...]], tp: int, stages: int, fused: bool) -> list[Shard]:
    return [
        inferred(shapes, local_shapes(shapes, tp, stages, stage, fused), rank, tp)
        for stage in range(stages)
        for rank in range(tp)
    ]


def randomly_patterned(
    shapes: dict[str, tuple[int, ...]], seed: int, float32: Collection[str] = ()
) -> dict[str, Tensor]:
    """As integers of their width."""
    rng = torch.Generator().manual_seed(seed)
    return {
        name: torch.randint(-(2**31), 2**31, shape, generator=rng, dtype=torch.int64).to(torch.int32)
        if name in float32
        else torch.randint(-(2**15), 2**15, shape, generator=rng, dtype=torch.int32).to(torch.int16)
        for name, shape in shapes.items()
    }


def local_tensors(full: dict[str, Tensor], shard: Shard) -> dict[str, Tensor]:
    """A rank's tensors by plain slicing, padding zero. Of no elements at all one cannot tell that they are float32."""
    tensors: dict[str, Tensor] = {}
    for name, local in shard.items():
        parts = [full[b.tensor][tuple(map(slice, b.begin, b.end))] for b in local.boxes]
        wide = any(part.dtype is torch.int32 and part.numel() for part in parts)
        tensor = torch.zeros(local.shape, dtype=torch.int32 if wide else torch.int16)
        if local.shape:
            stacked = torch.cat(parts)
            tensor[: len(stacked)] = stacked
        else:
            tensor.copy_(parts[0])
        tensors[name] = tensor.view(torch.float32 if wide else torch.bfloat16)
    return tensors


class Trainer:
    """Ranks that publish together; `publish` is a version of theirs."""

    def __init__(
        self,
        relay: Relay,
        shapes,
        layout: Sequence[Shard],
        workers: Sequence[Shard],
        float32: Collection[str] = (),
        **options: int,
    ):
        shares = TrainerRank.of_all(layout, workers, float32)
        self.cells = shares[0].cells
        assert self.cells == cells(shapes, layout, workers)
        publish = replace(PublishSettings(bucket_elements=40, tile_elements=7, merge_every=2), **options)
        self.layout = layout
        keys = [SigningKey(KEY.secret) for _ in shares]
        self.publishers = [
            Publisher(relay, "run", {}, publish, share, key) for share, key in zip(shares, keys, strict=True)
        ]

    def publish(self, version: int, full: dict[str, Tensor]) -> None:
        with ThreadPoolExecutor(len(self.publishers)) as executor:
            work = [
                executor.submit(publisher.publish, version, local_tensors(full, shard))
                for publisher, shard in zip(self.publishers, self.layout, strict=True)
            ]
        for each in work:
            each.result()
        for publisher in self.publishers:
            publisher.wait()

    def close(self) -> None:
        for publisher in self.publishers:
            publisher.close()


def assert_has(puller: Puller, shard: Shard, version: int, full: dict[str, Tensor]) -> None:
    assert_same(puller.pull(version), local_tensors(full, shard))
    assert puller.audit() == []


def meshes_of(shapes: dict[str, tuple[int, ...]], ranks: int) -> list[Shard]:
    return [declared(shapes, {n: Placement((ranks,), (at,), (0,)) for n in shapes}) for at in range(ranks)]
