"""A rank's shard from what is known of it: declared placements, or else its tensors' names and shapes. Pure.

Source: ROSE §4.2, shard-aware routing. Names are those of Hugging Face's Qwen3; `qkv_proj` and `gate_up_proj` are
fused from `q_proj`, `k_proj`, `v_proj`, and `gate_proj`, `up_proj`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from elastic.weights.sharding import Box, LocalTensor, Shape, Shard, whole_box

SPLIT_DIMENSION = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head"), 0),
    **dict.fromkeys(("o_proj", "down_proj"), 1),
}
"""Column-parallel modules and the vocabulary are split by rows of their weight, row-parallel ones by columns."""

VOCABULARY, VOCABULARY_MULTIPLE = ("embed_tokens", "lm_head"), 64
"""Modules whose rows vLLM pads to such a multiple before it splits them."""

FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}

EXPERTS = {"w13_weight": ("gate_proj", "up_proj"), "w2_weight": ("down_proj",)}
"""Parts that vLLM stacks for each expert of a mixture: [experts, rows, columns]."""


@dataclass(frozen=True)
class Placement:
    """How a tensor lies on a mesh of ranks: for each of the mesh's dimensions the tensor's that it splits.

    None stands for replicated. This is a DTensor's `device_mesh.shape`, `device_mesh.get_coordinate()` and
    `placements` in plain numbers; splits are those of `torch.chunk`, and later ones split what earlier ones left.
    """

    mesh: tuple[int, ...]
    coordinate: tuple[int, ...]
    dimensions: tuple[int | None, ...]

    def box(self, tensor: str, shape: Shape) -> Box:
        """Return this rank's part of the tensor. Raises `ValueError` for a placement that does not fit."""
        if not len(self.mesh) == len(self.coordinate) == len(self.dimensions):
            raise ValueError(f"tensor {tensor}: mesh {self.mesh}, coordinate and placements differ in length")
        begin, end = [0] * len(shape), list(shape)
        for size, at, dimension in zip(self.mesh, self.coordinate, self.dimensions, strict=True):
            if not 0 <= at < size:
                raise ValueError(f"tensor {tensor}: coordinate {self.coordinate} is not on a mesh of {self.mesh}")
            if dimension is None:
                continue
            if not 0 <= dimension < len(shape):
                raise ValueError(f"tensor {tensor}: split along dimension {dimension}; its shape is {shape}")
            begin[dimension], end[dimension] = _chunk(begin[dimension], end[dimension], size, at)
        return Box(tensor, tuple(begin), tuple(end))


def declared(shapes: Mapping[str, Shape], placements: Mapping[str, Placement]) -> Shard:
    """The shard of a rank with these placements; it has no other tensors."""
    boxes = {name: placement.box(name, shapes[name]) for name, placement in placements.items()}
    return {name: LocalTensor(box.shape, (box,)) for name, box in boxes.items()}


def tensor_parallel(shapes: Mapping[str, Shape], size: int) -> list[Shard]:
    """The shards of tensor-parallel ranks, under the model's own names: for who publishes to such.

    Of what is split each rank has an equal part, of all else everything. Where ranks turn out to host something else,
    they pull what overlaps that.
    """
    return [
        {
            name: LocalTensor(box.shape, (box,))
            for name, shape in shapes.items()
            for box in (_even(name, shape, at, size),)
        }
        for at in range(size)
    ]


def _even(name: str, shape: Shape, rank: int, size: int) -> Box:
    module = _module(name)
    dimension = SPLIT_DIMENSION.get(module)
    if dimension is None or dimension >= len(shape):
        return whole_box(name, shape)
    of = shape[dimension]
    if module in VOCABULARY:
        of = -(-of // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
    step = -(-of // size)
    begin, end = [0] * len(shape), list(shape)
    begin[dimension], end[dimension] = (min(at * step, shape[dimension]) for at in (rank, rank + 1))
    return Box(name, tuple(begin), tuple(end))


def inferred(shapes: Mapping[str, Shape], local: Mapping[str, Shape], rank: int, size: int) -> Shard:
    """The shard of tensor-parallel rank `rank` of `size`, from the shapes of its own tensors beside the full ones.

    Pipeline stages simply have other tensors. Where fewer parts exist than ranks, neighbours hold the same one
    (key and value heads under GQA); where parts make more than the whole, the rest is padding (the vocabulary).
    Raises `ValueError` for a tensor whose shape cannot be explained.
    """
    return {name: LocalTensor(shape, _inferred(shapes, name, shape, rank, size)) for name, shape in local.items()}


def _inferred(shapes: Mapping[str, Shape], name: str, local: Shape, rank: int, size: int) -> tuple[Box, ...]:
    if (stack := name.rpartition(".")[2]) in EXPERTS and len(local) == 3:
        return tuple(_experts(shapes, name, EXPERTS[stack], local, rank, size))
    module = _module(name)
    if module not in FUSED:
        return (_part(shapes, name, local, rank, size),)
    parts = [name.replace(module, part) for part in FUSED[module]]
    for part in parts:
        if part not in shapes:
            raise ValueError(f"tensor {name}: fused from {part}, which the model does not have")
    rows = [shapes[part][0] // size for part in parts]
    if module == "qkv_proj":
        # Queries are always split evenly; the rest is as many rows of keys as of values.
        rows[1:] = [(local[0] - rows[0]) // 2] * 2
    if sum(rows) != local[0] or min(rows) <= 0:
        raise ValueError(f"tensor {name}: {local[0]} rows cannot be {' + '.join(FUSED[module])} on {size} ranks")
    return tuple(_part(shapes, part, (n, *local[1:]), rank, size) for part, n in zip(parts, rows, strict=True))


def _experts(
    shapes: Mapping[str, Shape], name: str, parts: tuple[str, ...], local: Shape, rank: int, size: int
) -> Iterator[Box]:
    """Each expert's parts; expert-parallel ranks have other experts, tensor-parallel ones slices of all of them."""
    place = name.rpartition(".")[0]
    experts = 0
    while f"{place}.{experts}.{parts[0]}.weight" in shapes:
        experts += 1
    here, rows, columns = local
    if here not in (experts, -(-experts // size)) or rows % len(parts):
        raise ValueError(f"tensor {name}: shape {local} is no stack of {' + '.join(parts)} of {experts} experts")
    first = 0 if here == experts else rank * here
    for expert in range(first, min(first + here, experts)):
        for part in parts:
            yield _part(shapes, f"{place}.{expert}.{part}.weight", (rows // len(parts), columns), rank, size)


def _part(shapes: Mapping[str, Shape], name: str, local: Shape, rank: int, size: int) -> Box:
    full = shapes.get(name)
    if full is None:
        raise ValueError(f"tensor {name}: not in the model")
    split = [n for n, (have, of) in enumerate(zip(local, full, strict=False)) if have != of]
    if len(local) != len(full) or split not in ([], [SPLIT_DIMENSION.get(_module(name))]):
        raise ValueError(f"tensor {name}: a part of shape {local} of {full} is no known way to split it")
    if not split:
        return whole_box(name, full)
    (dimension,) = split
    of, have = full[dimension], local[dimension]
    parts = -(-of // have) if have else 0
    group = max(size // parts, 1) if parts else 0
    if not 0 < parts <= size or (group > 1 and group * parts != size):
        raise ValueError(f"tensor {name}: {parts} parts of {have} of {of} do not fit {size} ranks")
    begin = [0] * len(full)
    end = list(full)
    begin[dimension] = min(rank // group * have, of)
    end[dimension] = min(begin[dimension] + have, of)
    return Box(name, tuple(begin), tuple(end))


def _module(name: str) -> str:
    """`model.layers.3.mlp.up_proj.weight` → up_proj."""
    parts = name.split(".")
    return parts[-2] if len(parts) > 1 else name


def _chunk(begin: int, end: int, size: int, at: int) -> tuple[int, int]:
    """Part `at` of `size` as `torch.chunk` cuts: equal ones, the last shorter or empty."""
    step = -(-(end - begin) // size)
    return min(begin + at * step, end), min(begin + (at + 1) * step, end)
