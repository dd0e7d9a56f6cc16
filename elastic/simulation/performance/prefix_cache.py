"""The prefix cache of a modelled engine: how many tokens of which trajectory's KV it still holds.

The cache is kept by trajectory instead of by block. The tokens that a trajectory has computed are one prefix; the
prompt that a group's members share is another one, and the members' prefixes follow it. The cache forgets the least
recently used prefix first, from its end.
"""

from collections import OrderedDict
from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class Prompt:
    """A prompt that a group's members share. It is in memory once; `users` members run on it.

    The prompt grows while its first user computes it, until a second user comes or the first ends.
    """

    tokens: int
    users: int = 1
    grows: bool = True


class PrefixCache:
    """A cache of tokens that no running turn uses; running turns own their tokens. Sizes are tokens in whole blocks."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._kept: OrderedDict[str, tuple[int, int]] = OrderedDict()
        """The tokens of trajectories and prompts, and how many tokens of a prompt come before them."""
        self._prompts: dict[str, Prompt] = {}
        self.tokens = 0

    def whole_blocks(self, tokens: int) -> int:
        return tokens - tokens % self._block_tokens

    def in_use(self, group: str) -> int:
        """Return the tokens of the group's prompt that a running turn uses; they need no further memory."""
        prompt = self._prompts.get(group)
        return prompt.tokens if prompt is not None and prompt.users else 0

    def take(self, trajectory: str, group: str, tokens: int) -> tuple[int, Prompt | None]:
        """Return how many of a context's `tokens` are cached, and the group's prompt if the context begins with it.

        The tokens leave the cache and belong to the turn. A context's last token is always computed.
        """
        most = self.whole_blocks(tokens - 1)
        own, behind = self._kept.pop(trajectory, (0, 0))
        self.tokens -= own
        prompt = self._prompts.get(group)
        if (own and not behind) or prompt is None or prompt.tokens > most:
            return (0 if behind else min(own, most)), None
        if prompt.users == 0:
            del self._kept[group]
            self.tokens -= prompt.tokens
        prompt.users += 1
        prompt.grows = False
        found = own if behind == prompt.tokens else 0
        return min(prompt.tokens + found, most), prompt

    def share(self, group: str, tokens: int, prompt: Prompt | None) -> Prompt | None:
        """Share the group's first `tokens` tokens, computed by a user of `prompt` if given; returns the shared prompt.

        Returns None if the group already has a prompt on which this user does not run.
        """
        tokens = self.whole_blocks(tokens)
        if prompt is not None:
            if prompt.grows:
                prompt.tokens = max(prompt.tokens, tokens)
        elif tokens and group not in self._prompts:
            prompt = self._prompts[group] = Prompt(tokens)
        return prompt

    def leave(self, group: str, prompt: Prompt) -> int:
        """Remove a user from the prompt; returns the tokens that no turn uses any more."""
        prompt.users -= 1
        prompt.grows = False
        if prompt.users:
            return 0
        if self._prompts.get(group) is prompt:
            self._kept[group] = (prompt.tokens, 0)
            self.tokens += prompt.tokens
        return prompt.tokens

    def keep(self, trajectory: str, tokens: int, behind: int = 0) -> None:
        """Cache a context of `tokens` tokens. The first `behind` of them are its group's prompt."""
        own = max(0, self.whole_blocks(tokens) - behind)
        self.tokens += own - self._kept.pop(trajectory, (0, 0))[0]
        if own:
            self._kept[trajectory] = (own, behind)

    def shrink_to(self, tokens: int) -> None:
        """Forget prefixes until at most `tokens` tokens are kept. A prompt is forgotten whole."""
        while self.tokens > max(0, tokens):
            key, (kept, behind) = next(iter(self._kept.items()))
            whole = self._prompts.pop(key, None) is not None
            left = 0 if whole else max(0, self.whole_blocks(kept - (self.tokens - max(0, tokens))))
            self.tokens -= kept - left
            if left:
                self._kept[key] = (left, behind)
            else:
                del self._kept[key]

    def forget(self) -> None:
        self._kept.clear()
        self._prompts.clear()
        self.tokens = 0
