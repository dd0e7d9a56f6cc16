"""The paged KV cache's book-keeping: which block belongs to whom, and which can be found again by content.

A block holds the keys and values of `kv_block_tokens` consecutive tokens. A full one is registered under a
digest of everything that its content depends on: the weights, all tokens before it and its own. Blocks
that nobody uses stay findable until their space is needed, least recently used first. Pure; no tensors here.
Source: PagedAttention (vLLM), automatic prefix caching.
"""

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b


def root_digest(weights_version: int, signed_by: str = "") -> bytes:
    """Where a chain begins: KV of one version is never taken for another's, nor for that of the same version to which
    another trainer process has come. `signed_by` is its key; empty where no weights of others are loaded."""
    return blake2b(f"{weights_version} {signed_by}".encode(), digest_size=16).digest()


def chain_digest(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """The digest of a full block that follows `parent`."""
    return blake2b(array("q", token_ids).tobytes(), key=parent, digest_size=16).digest()


class BlockPool:
    """Every block is free, in use (by one or more sequences), or cached: unused but findable."""

    def __init__(self, total: int) -> None:
        self.total = total
        self._free = list(range(total - 1, -1, -1))
        self._users = [0] * total
        self._digests: list[bytes | None] = [None] * total
        self._found: dict[bytes, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()

    @property
    def available(self) -> int:
        """Blocks that `allocate` can give: free ones, and cached ones by forgetting them."""
        return len(self._free) + len(self._cached)

    @property
    def used(self) -> int:
        return self.total - self.available

    def allocate(self, count: int) -> list[int]:
        """`count` blocks of unspecified content for one user. Raises `ValueError` if they are not available."""
        if count > self.available:
            raise ValueError(f"{count} blocks wanted, {self.available} available")
        blocks = [self._free.pop() if self._free else self._evict() for _ in range(count)]
        for block in blocks:
            self._users[block] = 1
        return blocks

    def share(self, digests: Sequence[bytes]) -> list[int]:
        """The blocks of the longest prefix of `digests` that is known, with one user more each."""
        blocks: list[int] = []
        for digest in digests:
            block = self._found.get(digest)
            if block is None:
                break
            self._users[block] += 1
            self._cached.pop(block, None)
            blocks.append(block)
        return blocks

    def release(self, blocks: Sequence[int]) -> None:
        """Removes one user of each block. `blocks` are in a sequence's order: its tail is evicted first."""
        for block in reversed(blocks):
            if self._users[block] < 1:
                raise ValueError(f"block {block} is not in use")
            self._users[block] -= 1
            if not self._users[block]:
                self._rest(block)

    def register(self, block: int, digest: bytes) -> None:
        """The block is full and computed: make it findable, unless another one with its content already is."""
        if digest not in self._found and self._digests[block] is None:
            self._found[digest] = block
            self._digests[block] = digest

    def forget(self) -> None:
        """No block can be found any more; those in use stay with their users."""
        self._found.clear()
        self._digests = [None] * self.total
        while self._cached:
            self._put_back(self._cached.popitem(last=False)[0])

    def _rest(self, block: int) -> None:
        """Nobody uses the block any more."""
        if self._digests[block] is None:
            self._put_back(block)
        else:
            self._cached[block] = None

    def _put_back(self, block: int) -> None:
        self._free.append(block)

    def _evict(self) -> int:
        block, _ = self._cached.popitem(last=False)
        self._unregister(block)
        return block

    def _unregister(self, block: int) -> None:
        digest = self._digests[block]
        if digest is not None:
            del self._found[digest]
            self._digests[block] = None

    def check(self) -> None:
        """Assert that no block is lost or in two states (for tests)."""
        in_use = {block for block in range(self.total) if self._users[block]}
        states = [*self._free, *self._cached, *in_use]
        assert sorted(states) == list(range(self.total)), "a block is lost or in two states"
        self._check_digests(self._free)
        assert all(self._digests[block] is not None for block in self._cached)

    def _check_digests(self, free: Sequence[int]) -> None:
        assert all(self._digests[block] == digest for digest, block in self._found.items())
        assert len(self._found) == sum(digest is not None for digest in self._digests)
        assert all(self._digests[block] is None for block in free)
