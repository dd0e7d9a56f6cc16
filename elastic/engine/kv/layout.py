"""How the KV blocks of one model lie in pages.

A *slot* holds the keys and values of one token in one layer. A page holds the same `block_tokens` · n tokens
of every layer, layer after layer, so that any page suits any model. In the flat view of a space, in units of
slots, token t of a page in layer l is at `page · page_slots + l · layer_slots + t`: a kernel that is given the
view from `l · layer_slots` on indexes it as one long cache of that layer.
"""

from math import lcm

import msgspec


class KvLayout(msgspec.Struct, frozen=True, kw_only=True):
    page_bytes: int
    slot_bytes: int
    """Key heads · (key and value) · head size · bytes of an element."""
    layers: int
    block_tokens: int

    def __post_init__(self) -> None:
        if self.page_bytes % self.slot_bytes:
            raise ValueError(f"page_bytes: must be a multiple of a slot's {self.slot_bytes} (found {self.page_bytes})")
        if not self.blocks_per_page:
            raise ValueError(
                f"page_bytes: {self.page_bytes} hold no block of {self.layers} layers · {self.block_tokens} tokens · "
                f"{self.slot_bytes} bytes; at least {self.block_bytes} are needed"
            )

    @property
    def block_bytes(self) -> int:
        return self.layers * self.block_tokens * self.slot_bytes

    @property
    def blocks_per_page(self) -> int:
        return self.page_bytes // self.block_bytes

    @property
    def page_slots(self) -> int:
        return self.page_bytes // self.slot_bytes

    @property
    def layer_slots(self) -> int:
        return self.blocks_per_page * self.block_tokens

    def origin(self, page: int, block: int) -> int:
        """The first slot in layer 0 of a page's block."""
        return page * self.page_slots + block * self.block_tokens

    def pages_for(self, tokens: int) -> int:
        """Pages that hold this many tokens of one sequence."""
        blocks = -(-tokens // self.block_tokens)
        return -(-blocks // self.blocks_per_page)


def common_page_bytes(at_least: int, *units: int) -> int:
    """The smallest page of `at_least` bytes that every unit (a slot, a device's granularity) divides."""
    unit = lcm(*units)
    return -(-at_least // unit) * unit
