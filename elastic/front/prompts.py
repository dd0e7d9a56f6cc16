"""The prompts of chats: what the run has of a conversation stays as it was, and what is new is rendered behind it."""

import asyncio
import functools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from typing import Any, NamedTuple, ParamSpec, TypeVar

from elastic.front.asked import Chat, ServedModel
from elastic.front.messages import chain, head_digest
from elastic.protocol.front_messages import CHAIN_MAX, BranchFound
from elastic.protocol.openai.errors import FrontError
from elastic.protocol.sampled import ids_of

RENDERED_HERE_CHARS = 20_000
"""Messages with more text are rendered on a thread, while streams go on."""

P = ParamSpec("P")
T = TypeVar("T")


class TurnPrompt(NamedTuple):
    """The first `tokens` tokens of `branch`, and then `new`; without a branch `new` is all of it.

    `ids` are its tokens; of those of the branch the last ones, as far as they were looked for.
    """

    branch: int | None
    tokens: int
    new: Sequence[int]
    ids: Sequence[int]

    @property
    def size(self) -> int:
        return self.tokens + len(self.new)


class ChatPrompts:
    """Makes the prompts of a model's chats. `renders` are threads for what takes long.

    All methods raise `FrontError` for messages that cannot be rendered.
    """

    def __init__(self, model: ServedModel, renders: Executor) -> None:
        self._renderer = model.renderer
        self._renders = renders

    async def chain(self, chat: Chat) -> list[bytes]:
        """A digest for each prefix of the chat."""
        if len(chat.messages) > CHAIN_MAX:
            said = f"there are {len(chat.messages)} with all that was said before; at most {CHAIN_MAX} are allowed"
            raise FrontError(400, f"messages: {said}", "messages", "invalid_messages")
        return await self._rendering(chat.messages, _chain_of, chat)

    async def behind(self, chat: Chat, found: BranchFound) -> TurnPrompt:
        """The chat's prompt behind the branch that was found for it."""
        renderer = self._renderer
        so_far = ids_of(found.ids) if found.ids else []
        if found.branch is not None and found.matched:
            new = await self._rendering(
                chat.messages[found.matched :],
                renderer.more,
                chat.messages,
                found.matched,
                chat.tools,
                chat.template_kwargs,
                so_far,
                found.answer_tokens,
            )
            if new is not None:
                return TurnPrompt(found.branch, found.tokens, new, so_far + new)
        ids = await self._rendering(chat.messages, renderer.prompt, chat.messages, chat.tools, chat.template_kwargs)
        return TurnPrompt(None, 0, ids, ids)

    async def _rendering(
        self, messages: Sequence[Mapping[str, Any]], render: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """What `render` makes, on a thread if that may take long."""
        rendering = functools.partial(render, *args, **kwargs)
        chars = sum(len(content) for message in messages if isinstance(content := message.get("content"), str))
        try:
            if chars <= RENDERED_HERE_CHARS:
                return rendering()
            return await asyncio.get_running_loop().run_in_executor(self._renders, rendering)
        except ValueError as error:
            raise FrontError(400, f"messages: {error}", "messages", "invalid_messages") from error


def _chain_of(chat: Chat) -> list[bytes]:
    return chain(head_digest(chat.tools, chat.template_kwargs), chat.messages)
