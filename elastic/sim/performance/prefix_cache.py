"""The prefix cache of a modelled engine: which conversation's KV is still there, and how many tokens of it.

Kept by conversation rather than by block: what a conversation has computed is one prefix, and the prompt that a
group's members share is another. The least recently used is forgotten first, from its end.
"""

from collections import OrderedDict


class PrefixCache:
    """Sizes in tokens, in whole blocks. Whoever runs owns its tokens; the cache holds what nobody uses."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._kept: OrderedDict[str, int] = OrderedDict()
        self.tokens = 0

    def whole_blocks(self, tokens: int) -> int:
        return tokens - tokens % self._block_tokens

    def find(self, conversation: str, shared: str, tokens: int) -> int:
        """How much of a prompt of `tokens` is cached; its last token is always computed.

        The conversation's own prefix is taken out (it is in use from now on), a shared one stays.
        """
        most = self.whole_blocks(tokens - 1)
        own = self._kept.pop(conversation, 0)
        self.tokens -= own
        if own == 0 and shared in self._kept:
            self._kept.move_to_end(shared)
            own = self._kept[shared]
        return min(own, most)

    def keep(self, key: str, tokens: int) -> None:
        tokens = self.whole_blocks(tokens)
        self.tokens += tokens - self._kept.pop(key, 0)
        if tokens:
            self._kept[key] = tokens

    def shrink_to(self, tokens: int) -> None:
        """Forget until at most `tokens` are kept."""
        while self.tokens > max(0, tokens):
            key, kept = next(iter(self._kept.items()))
            left = max(0, self.whole_blocks(kept - (self.tokens - max(0, tokens))))
            self.tokens -= kept - left
            if left:
                self._kept[key] = left
            else:
                del self._kept[key]

    def forget(self) -> None:
        self._kept.clear()
        self.tokens = 0
