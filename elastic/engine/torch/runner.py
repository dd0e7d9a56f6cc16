"""The model's forward pass over a ragged batch with a paged KV cache.

All tokens of an iteration, prefill and decode alike, form one matrix [N, D]. On one CPU thread the result of a token
must not depend, bit for bit, on what else is computed beside it, how its context was cut into chunks, or what
came from the cache. But BLAS kernels sum in an order that depends on the operands' shapes. So every
multiplication has a shape that is fixed, or is a function of the token's position alone:

- linear layers multiply tiles of `ROW_TILE` rows, as one batched product;
- attention takes tiles of `QUERY_TILE` consecutive positions (a decoding token is alone in its tile) over a
  context padded to a length that is a power of two (`_context_length`);
- everything else works on one row at a time.

On CUDA, in the weights' own bfloat16, there is no such promise: linear layers and norms are one kernel each.
"""

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from elastic.engine.base import WeightsMismatch
from elastic.engine.model.config import Qwen3Config
from elastic.engine.model.qwen3 import rotate, rotations
from elastic.engine.model.stored import misfit, parameter_shapes
from elastic.engine.torch.scheduler import Work
from elastic.system.parking.tensors import give_back
from elastic.weights.source import WeightChanges

ROW_TILE = 8
QUERY_TILE = 4
SHORTEST_CONTEXT = 128
MASKED = -1e30
"""Finite, so that a padded query row stays finite; its exponential is exactly zero."""

_EMBEDDING, _HEAD, _NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
_ALONE = ("input_layernorm", "self_attn.o_proj", "post_attention_layernorm", "mlp.down_proj")
_FUSED = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
}


class _Layer(NamedTuple):
    """One layer's weights; projections are [out, in], those with a common input stacked."""

    input_norm: Tensor
    qkv: Tensor
    qk_norm: Tensor
    o: Tensor
    post_norm: Tensor
    gate_up: Tensor
    down: Tensor


class _QueryGroup(NamedTuple):
    """Query tiles with contexts of one padded length C; Q tiles, K key heads, R = QUERY_TILE · queries per key."""

    tokens: Tensor
    """[Q · QUERY_TILE]: the token in each place (any token where there is none)."""
    context: Tensor
    """[Q · K · C]: rows of the cache."""
    mask: Tensor
    """[Q, 1, R, C]: zero or `MASKED`."""


class _Layout(NamedTuple):
    """Where the tokens of an iteration stand; N is padded to a multiple of `ROW_TILE`."""

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    """[N]: where each token's KV goes."""
    groups: list[_QueryGroup]
    places: Tensor
    """[N]: where each token's query stands among the groups' tiles."""
    last: Tensor
    """[S], padded like N: the last token of each sequence that samples."""
    samples: int


class Patch(NamedTuple):
    """New values for some elements of the weights of version `base`, ready to be written."""

    base: int
    writes: list[tuple[str, Tensor, Tensor]]
    """(table, where in it, flat, the values there), in the device's precision."""


def device_named(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("engine.device: 'cuda' was asked for, but torch finds no CUDA device")
    return torch.device(name)


def dtype_on(device: torch.device) -> torch.dtype:
    """Return the type of weights and KV on this device."""
    return torch.float32 if device.type == "cpu" else torch.bfloat16


class ModelRunner(Protocol):
    """What `elastic.engine.torch.engine.TorchEngine` asks of what computes a model, on its thread alone (`verify` and
    `patch_of` on any). It is made with the model's config, a device, the longest context, and the KV cache's blocks
    and the tokens of a block, which it need not have."""

    def verify(self, tensors: Mapping[str, object]) -> dict[str, Tensor]:
        """Return `tensors`, if they are this model's. Raises `WeightsMismatch` naming the first that is not."""
        ...

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy verified `tensors` over the weights."""
        ...

    def patch_of(self, changes: WeightChanges) -> "Patch | None":
        """Return what `apply` writes to come to the next version; None where everything is to be loaded."""
        ...

    def apply(self, patch: "Patch") -> None: ...

    def unload(self) -> None:
        """Give the weights' memory back; `load` brings them again."""
        ...

    def forward(self, work: Sequence[Work]) -> Tensor:
        """Compute `work`; returns the logits [S, V] in float32 of the items that sample, in order."""
        ...

    def scrub_cache(self, keep: bool) -> None:
        """Forget all KV, or (`keep`) only values that are not finite."""
        ...

    def free_cache(self) -> None:
        """Give the cache's memory back; the next `forward` takes it again."""
        ...

    @property
    def weight_bytes(self) -> int: ...

    @property
    def rest_bytes(self) -> int:
        """What stays on the device without weights and KV."""
        ...


class Runner:
    """Holds the weights and the KV cache of one device. Used by one thread, inside `torch.inference_mode`."""

    patch_share = 1 / 25
    """On the CPU, writing this share of the weights here and there takes as long as copying all of them in a row."""
    patch_piece = 1 << 18
    """Elements of a patch that are written in one piece."""

    def __init__(
        self, config: Qwen3Config, device: torch.device, max_context: int, kv_blocks: int, block_tokens: int
    ) -> None:
        self._config = config
        self._device = device
        self._dtype = dtype_on(device)
        if device.type == "cuda":
            # cuDNN's attention builds a plan for every number of tiles, for tenths of a second.
            torch.backends.cuda.enable_cudnn_sdp(False)
        self._patches_wait_on = device
        self._block_tokens = block_tokens
        # One block more than the pool knows: padding reads and writes there.
        self._spare_block = kv_blocks
        self._spare_slot = kv_blocks * block_tokens
        self._heads = (config.num_attention_heads, config.num_key_value_heads)
        self._shapes = parameter_shapes(config)
        self._places = _places(config, self._shapes)
        self._rotations = rotations(config, torch.arange(max_context, device=device)).to(self._dtype)
        self._eps = torch.tensor(config.rms_norm_eps, device=device)
        self._tables: dict[str, Tensor] = {}
        self._given_back: dict[str, Tensor] = {}
        """Tables in memory that an arena gets back lazily."""
        self._layers: list[_Layer] = []
        self._cache: Tensor | None = None

    def verify(self, tensors: Mapping[str, object]) -> dict[str, Tensor]:
        """`tensors`, if they are this model's in bfloat16 or float32. Raises `WeightsMismatch` naming the first that
        is not."""
        checked: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            if not isinstance(tensor, Tensor) or tensor.dtype not in (torch.bfloat16, torch.float32):
                found = getattr(tensor, "dtype", type(tensor))
                raise WeightsMismatch(f"{name}: expected bfloat16 or float32, found {found}")
            checked[name] = tensor
        if (why := misfit({name: tensor.shape for name, tensor in checked.items()}, self._shapes)) is not None:
            raise WeightsMismatch(why)
        return checked

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy verified `tensors` over the weights, in place once they exist."""
        for _ in self.loading(tensors):
            pass

    def patch_of(self, changes: WeightChanges) -> Patch | None:
        """Leaves the weights as they are; any thread may. None where it is quicker to load everything.

        Raises `WeightsMismatch` for what is not in the model.
        """
        writes: list[tuple[str, Tensor, Tensor]] = []
        for name, index, values in changes.elements:
            if name not in self._shapes or not isinstance(index, Tensor) or not isinstance(values, Tensor):
                raise WeightsMismatch(f"{name}: no change of a parameter of this model")
            size = prod(self._shapes[name])
            if len(index) != len(values) or (len(index) and not 0 <= int(index.min()) <= int(index.max()) < size):
                raise WeightsMismatch(f"{name}: {len(values)} values for {len(index)} places within {size}")
            table, offsets = self._places[name]
            where = torch.cat([index + offset for offset in offsets])
            values = values.to(self._patches_wait_on, self._dtype).repeat(len(offsets))
            writes.append((table, where.to(self._patches_wait_on), values))
        written = sum(len(values) for _, _, values in writes)
        if self._device.type == "cpu" and written > self.patch_share * sum(map(prod, self._shapes.values())):
            return None
        return Patch(changes.base, writes)

    def apply(self, patch: Patch) -> None:
        for _ in self.applying(patch):
            pass

    def applying(self, patch: Patch) -> Iterator[None]:
        """`apply` in pieces, as `loading` is `load`."""
        written = 0
        for name, where, values in patch.writes:
            table = self._tables[name].view(-1)
            for places, new in zip(where.split(self.patch_piece), values.split(self.patch_piece), strict=True):
                table.index_copy_(0, places.to(self._device), new.to(self._device))
                written += len(places)
                if written >= self.patch_piece:
                    written = 0
                    yield

    def loading(self, tensors: Mapping[str, Tensor]) -> Iterator[None]:
        """`load` in pieces, for who cannot spare the device for all of it at once; of use when exhausted."""
        for name in (_EMBEDDING, _NORM, *(() if self._config.tie_word_embeddings else (_HEAD,))):
            self._put(name, tensors[name])
            yield
        layers: list[_Layer] = []
        for index in range(self._config.num_hidden_layers):
            layers.append(self._load_layer(tensors, index))
            yield
        self._layers = layers

    @property
    def largest_piece_bytes(self) -> int:
        """Return the bytes of the largest piece of `loading`, which is a table or a layer."""
        tables = [prod(shape) for name, shape in self._shapes.items() if name in (_EMBEDDING, _HEAD)]
        layer = sum(prod(shape) for name, shape in self._shapes.items() if name.startswith("model.layers.0."))
        return max(layer, *tables) * self._dtype.itemsize

    @property
    def loaded(self) -> bool:
        return bool(self._layers)

    @property
    def tables(self) -> Mapping[str, Tensor]:
        """The weights as they lie on the device, by name; none while they are not there."""
        return self._tables

    @property
    def weight_bytes(self) -> int:
        return sum(table.nbytes for table in self._tables.values())

    @property
    def rest_bytes(self) -> int:
        """What stays on the device without weights and KV."""
        return self._rotations.nbytes

    def unload(self) -> None:
        """Give the weights' memory back; `load` brings them again."""
        if self._device.type == "cpu":
            for table in self._tables.values():
                give_back(table.untyped_storage())
            self._given_back |= self._tables
        self._tables = {}
        self._layers = []

    def scrub_cache(self, keep: bool) -> None:
        """Forget all KV, or (`keep`) only values that are not finite: masking cannot silence those."""
        if self._cache is None:
            return
        if keep:
            self._cache.nan_to_num_(0.0, 0.0, 0.0)
        else:
            self._cache.zero_()

    def free_cache(self) -> None:
        """Give the cache's memory back; the next `forward` takes it again."""
        self._cache = None

    def forward(self, work: Sequence[Work]) -> Tensor:
        """Compute the KV of `work`; returns the logits [S, V] in float32 of the items that sample, in order."""
        layout = self._lay_out(work)
        cache = self._allocated_cache()
        x = F.embedding(layout.token_ids, self._tables[_EMBEDDING])
        rotation = self._rotations.index_select(0, layout.positions)
        for layer, layer_cache in zip(self._layers, cache, strict=True):
            x = x + self._attend(self._norm(x, layer.input_norm), layer, layer_cache, rotation, layout)
            x = x + self._mlp(self._norm(x, layer.post_norm), layer)
        x = self._norm(x.index_select(0, layout.last), self._tables[_NORM])
        head = self._tables[_EMBEDDING if self._config.tie_word_embeddings else _HEAD]
        return _linear(x, head)[: layout.samples].float()

    def _attend(self, x: Tensor, layer: _Layer, cache: Tensor, rotation: Tensor, layout: _Layout) -> Tensor:
        heads, key_heads = self._heads
        size = self._config.head_dim
        qkv = _linear(x, layer.qkv).view(len(x), -1, size)
        qk = rotate(self._norm(qkv[:, : heads + key_heads], layer.qk_norm), rotation)
        kv = torch.cat((qk[:, heads:], qkv[:, heads + key_heads :]), -1)
        cache.index_copy_(0, layout.slots, kv)
        q = qk[:, :heads].reshape(len(x), heads * size)
        rows = cache.view(-1, 2 * size)
        out = [self._attend_group(q, rows, group) for group in layout.groups]
        return _linear((out[0] if len(out) == 1 else torch.cat(out)).index_select(0, layout.places), layer.o)

    def _attend_group(self, q: Tensor, rows: Tensor, group: _QueryGroup) -> Tensor:
        """q: [N, H · head_dim]; rows: [slots · K, 2 · head_dim]. Returns [Q · QUERY_TILE, H · head_dim]."""
        heads, key_heads = self._heads
        size = self._config.head_dim
        by_key = (-1, QUERY_TILE, key_heads, heads // key_heads, size)
        q = q.index_select(0, group.tokens).view(by_key).transpose(1, 2).flatten(2, 3)
        kv = rows.index_select(0, group.context).view(len(q), key_heads, -1, 2 * size)
        out = F.scaled_dot_product_attention(q, kv[..., :size], kv[..., size:], attn_mask=group.mask)
        return out.unflatten(2, (QUERY_TILE, -1)).transpose(1, 2).reshape(-1, heads * size)

    def _mlp(self, x: Tensor, layer: _Layer) -> Tensor:
        gate, up = _linear(x, layer.gate_up).chunk(2, -1)
        return _linear(F.silu(gate) * up, layer.down)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """RMSNorm over the last dimension, in float32; on the CPU in half the time of `torch.rms_norm`."""
        if x.is_cuda:
            return F.rms_norm(x, x.shape[-1:], eps=self._config.rms_norm_eps) * weight
        x = x.float()
        scale = torch.add(self._eps, (x * x).sum(-1, keepdim=True), alpha=1 / x.shape[-1]).rsqrt_()
        return (x * scale).to(weight.dtype) * weight

    def _lay_out(self, work: Sequence[Work]) -> _Layout:
        counts = np.array([item.token_count for item in work])
        starts = np.array([item.sequence.computed for item in work])
        ends = counts.cumsum()
        total = int(ends[-1])
        padded = _padded(total)
        owner = np.repeat(np.arange(len(work)), counts)
        positions = np.arange(total) + np.repeat(starts - ends + counts, counts)
        token_ids = np.zeros(padded, np.int64)
        token_ids[:total] = [
            token
            for sequence, count in work
            for token in sequence.tokens[sequence.computed : sequence.computed + count]
        ]
        slot_table = self._slot_table(work)
        slots = np.full(padded, self._spare_slot)
        slots[:total] = slot_table[owner, positions]

        # A tile begins wherever the sequence, or the position divided by the tile's size, changes.
        tile_positions = positions // QUERY_TILE
        begins = np.ones(total, bool)
        begins[1:] = (owner[1:] != owner[:-1]) | (tile_positions[1:] != tile_positions[:-1])
        first = begins.nonzero()[0]
        lengths = self._context_lengths(tile_positions[first])
        order = lengths.argsort(kind="stable")
        tile_tokens = np.repeat(first[order, None], QUERY_TILE, 1)
        rank = np.empty_like(order)
        rank[order] = np.arange(len(order))
        places = np.zeros(padded, np.int64)
        places[:total] = rank[begins.cumsum() - 1] * QUERY_TILE + positions % QUERY_TILE
        tile_tokens.reshape(-1)[places[:total]] = np.arange(total)

        groups: list[_QueryGroup] = []
        for length in np.unique(lengths):
            members = lengths[order] == length
            tiles = first[order[members]]
            context = slot_table[owner[tiles], :length]
            groups.append(self._query_group(tile_tokens[members], tile_positions[tiles] * QUERY_TILE, context))
        sampled = ends[[item.samples for item in work]] - 1
        last = np.zeros(_padded(len(sampled)), np.int64)
        last[: len(sampled)] = sampled
        padded_positions = np.zeros(padded, np.int64)
        padded_positions[:total] = positions
        return _Layout(
            token_ids=self._tensor(token_ids),
            positions=self._tensor(padded_positions),
            slots=self._tensor(slots),
            groups=groups,
            places=self._tensor(places),
            last=self._tensor(last),
            samples=len(sampled),
        )

    def _query_group(self, tokens: np.ndarray, first_positions: np.ndarray, slots: np.ndarray) -> _QueryGroup:
        """tokens: [Q, QUERY_TILE]; first_positions: [Q]; slots: [Q, C]."""
        heads, key_heads = self._heads
        context = slots[:, None] * key_heads + np.arange(key_heads)[:, None]
        last_seen = first_positions[:, None] + np.arange(QUERY_TILE).repeat(heads // key_heads)
        hidden = np.arange(slots.shape[1]) > last_seen[..., None]
        mask = np.where(hidden, np.float32(MASKED), np.float32(0))[:, None]
        return _QueryGroup(
            self._tensor(tokens.reshape(-1)), self._tensor(context.reshape(-1)), self._tensor(mask).to(self._dtype)
        )

    def _slot_table(self, work: Sequence[Work]) -> np.ndarray:
        """[sequences, positions] → cache slot; beyond a sequence's blocks the spare one."""
        longest = max(item.sequence.computed + item.token_count for item in work) - 1
        columns = -(-int(self._context_lengths(np.array([longest // QUERY_TILE]))[0]) // self._block_tokens)
        blocks = np.full((len(work), columns), self._spare_block)
        for row, item in zip(blocks, work, strict=True):
            used = item.sequence.blocks[:columns]
            row[: len(used)] = used
        slots = self._origins(blocks)[:, :, None] + np.arange(self._block_tokens)
        return slots.reshape(len(work), -1)

    def _origins(self, blocks: np.ndarray) -> np.ndarray:
        """The first cache slot of each block."""
        return blocks * self._block_tokens

    def _context_lengths(self, tiles: np.ndarray) -> np.ndarray:
        """The padded context of query tiles: a function of the tile's place alone, in few distinct values."""
        doublings = np.ceil(np.log2((tiles + 1) * QUERY_TILE / SHORTEST_CONTEXT)).clip(0).astype(int)
        lengths = SHORTEST_CONTEXT << doublings
        return lengths if self._device.type == "cpu" else np.full_like(lengths, lengths.max())

    def _allocated_cache(self) -> Tensor:
        """[layers, slots, key heads, key and value]."""
        if self._cache is None:
            slots = (self._spare_block + 1) * self._block_tokens
            shape = (self._config.num_hidden_layers, slots, self._heads[1], 2 * self._config.head_dim)
            self._cache = torch.zeros(shape, dtype=self._dtype, device=self._device)
        return self._cache

    def _load_layer(self, tensors: Mapping[str, Tensor], index: int) -> _Layer:
        prefix = f"model.layers.{index}."

        def stack(*names: str) -> Tensor:
            return self._put(prefix + "+".join(names), *(tensors[f"{prefix}{name}.weight"] for name in names))

        heads, key_heads = self._heads
        input_norm, o, post_norm, down = map(stack, _ALONE)
        q_norm, k_norm = (tensors[f"{prefix}self_attn.{name}.weight"] for name in ("q_norm", "k_norm"))
        return _Layer(
            input_norm=input_norm,
            qkv=stack(*_FUSED["qkv"]),
            qk_norm=self._put(f"{prefix}qk_norm", q_norm.expand(heads, -1), k_norm.expand(key_heads, -1)),
            o=o,
            post_norm=post_norm,
            gate_up=stack(*_FUSED["gate_up"]),
            down=down,
        )

    def _put(self, name: str, *parts: Tensor) -> Tensor:
        """Copy `parts`, one below the other, into a table."""
        counts = [len(part) for part in parts]
        if name not in self._tables:
            shape = (sum(counts), *parts[0].shape[1:])
            table = self._given_back.pop(name, None)
            self._tables[name] = (
                table if table is not None else torch.empty(shape, dtype=self._dtype, device=self._device)
            )
        table = self._tables[name]
        for rows, part in zip(table.split(counts), parts, strict=True):
            rows.copy_(part)
        return table

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self._device)


def _places(config: Qwen3Config, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[str, list[int]]]:
    """The table that each parameter is put into, and where it begins there, flat: a norm of heads once for each."""
    places = {name: (name, [0]) for name in (_EMBEDDING, _NORM, _HEAD)}
    heads, key_heads, size = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    for index in range(config.num_hidden_layers):
        prefix = f"model.layers.{index}."
        for names in (*((name,) for name in _ALONE), *_FUSED.values()):
            begin = 0
            for name in (f"{prefix}{name}.weight" for name in names):
                places[name] = (prefix + "+".join(names), [begin])
                begin += prod(shapes[name])
        for name, first, last in (("q_norm", 0, heads), ("k_norm", heads, heads + key_heads)):
            offsets = [head * size for head in range(first, last)]
            places[f"{prefix}self_attn.{name}.weight"] = (f"{prefix}qk_norm", offsets)
    return places


def _padded(rows: int) -> int:
    return -(-rows // ROW_TILE) * ROW_TILE


def _linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [N, in] · weightᵀ [in, out], on the CPU in products of `ROW_TILE` rows whatever N is."""
    if x.is_cuda:
        return F.linear(x, weight)
    tiles = x.view(-1, ROW_TILE, x.shape[1])
    return torch.bmm(tiles, weight.t().expand(len(tiles), -1, -1)).flatten(0, 1)
