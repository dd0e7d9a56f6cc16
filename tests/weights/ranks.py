"""Trainer ranks that publish together, and the tensors of ranks."""

from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from msgspec.structs import replace
from torch import Tensor

from elastic.weights.placements import Placement, declared
from elastic.weights.publisher import Publisher, PublishSettings, TrainerRank
from elastic.weights.puller import Puller
from elastic.weights.relay import Relay
from elastic.weights.sharding import Shard, cells
from elastic.weights.signing import SigningKey
from tests.weights.signed import KEY, assert_same


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
