"""The embedded runner over a space of pages: same kernels, same indexing, KV memory that comes and goes."""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from elastic.core.types import SamplingParameters
from elastic.engine.base import GenerateRequest
from elastic.engine.kv import KvLayout, PageSpace
from elastic.engine.model.config import Qwen3Config
from elastic.engine.torch.runner import Runner
from elastic.engine.torch.scheduler import Sequence


class PagedRunner(Runner):
    """Blocks are virtual; `place_page` says where those of a page lie in the space's view.

    One page is mapped from the start for what padding reads and writes. `dtype` is that of weights and KV.
    """

    def __init__(
        self,
        config: Qwen3Config,
        device: torch.device,
        dtype: torch.dtype,
        max_context: int,
        layout: KvLayout,
        space: PageSpace,
        total_pages: int,
    ) -> None:
        blocks = total_pages * layout.blocks_per_page
        super().__init__(config, device, max_context, blocks, layout.block_tokens)
        self._dtype = dtype
        self._rotations = self._rotations.to(dtype)
        # The device's memory is for who computes.
        self._patches_wait_on = torch.device("cpu")
        self._layout = layout
        self.space = space
        self._block_origins = np.zeros(blocks + 1, np.int64)
        """Virtual block → its first slot in layer 0; the last is the spare one."""
        self._indices: dict[int, int] = {}
        """Virtual page → its index in the view."""
        page, index = space.map()
        self.place_page(page, index)
        self._spare_slot = layout.origin(index, 0)
        self._block_origins[self._spare_block] = self._spare_slot

    @property
    def device_bytes(self) -> int:
        return self.weight_bytes + self._rotations.nbytes + len(self.space) * self._layout.page_bytes

    def place_page(self, page: int, index: int) -> None:
        per_page = self._layout.blocks_per_page
        self._indices[page] = index
        origins = self._layout.origin(index, 0) + np.arange(per_page) * self._layout.block_tokens
        self._block_origins[page * per_page : (page + 1) * per_page] = origins

    def made_up_sequence(self, computed: int, length: int) -> Sequence:
        """For measurements: so many tokens, all in the spare block, of which `computed` count as done."""
        request = GenerateRequest(
            request_id="",
            token_ids=[],
            start=0,
            sampling=SamplingParameters(max_new_tokens=1, stop_token_ids=(), temperature=0.0, noise_seed=0),
        )
        blocks = [self._spare_block] * -(-length // self._layout.block_tokens)
        return Sequence(request, [0] * length, blocks=blocks, computed=computed, prefill_end=length - 1)

    def scrub_cache(self, keep: bool) -> None:
        for page in self._pages():
            if keep:
                page.nan_to_num_(0.0, 0.0, 0.0)
            else:
                page.zero_()

    def free_cache(self) -> None:
        """Does nothing: sequences return their own pages."""

    def _pages(self) -> Iterator[Tensor]:
        cache = self._flat().split(self._layout.page_slots)
        return (cache[self._indices[page]] for page in self.space.physical)

    def _origins(self, blocks: np.ndarray) -> np.ndarray:
        return self._block_origins[blocks]

    def _allocated_cache(self) -> Tensor:
        """[layers, slots, key heads, key and value], where layers overlap: each begins a little later in one view."""
        if self._cache is None:
            flat = self._flat()
            layers, step = self._layout.layers, self._layout.layer_slots
            shape = (layers, len(flat) - (layers - 1) * step, *flat.shape[1:])
            self._cache = flat.as_strided(shape, (step * flat.stride(0), *flat.stride()))
        return self._cache

    def _flat(self) -> Tensor:
        """[slots, key heads, key and value]: all of the space."""
        return self.space.view(self._dtype).view(-1, self._heads[1], 2 * self._config.head_dim)
