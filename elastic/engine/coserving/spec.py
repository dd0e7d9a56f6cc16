"""A model that shares a device with another one: its architecture, its settings, and how much memory it may hold."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch

from elastic.config import EngineConfig
from elastic.core.types import Nanoseconds
from elastic.engine.coserving.runner import PagedRunner
from elastic.engine.kv import KvLayout
from elastic.engine.model.config import Qwen3Config


class ModelSpec(NamedTuple):
    """A model on a shared device. `settings.kv_blocks` does not count: the pool's pages do."""

    config: Qwen3Config
    settings: EngineConfig
    dtype: torch.dtype
    runner: Callable[..., PagedRunner] = PagedRunner
    """Makes what computes on the device, of `PagedRunner`'s arguments."""

    def layout(self, page_bytes: int) -> KvLayout:
        config = self.config
        return KvLayout(
            page_bytes=page_bytes,
            slot_bytes=config.num_key_value_heads * 2 * config.head_dim * self.dtype.itemsize,
            layers=config.num_hidden_layers,
            block_tokens=self.settings.kv_block_tokens,
        )


class PageLending(NamedTuple):
    """How an engine gets pages: how many more it may map now, and in what context it does."""

    growth: Callable[[], int]
    growing: Callable[[int], AbstractContextManager[None]]
    lease_ns: Nanoseconds
