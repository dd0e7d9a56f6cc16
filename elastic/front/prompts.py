"""The prompts of chats: what the run has of a conversation stays as it was, and what is new is rendered behind it."""

import asyncio
import functools
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import NamedTuple, ParamSpec, TypeVar

from elastic.front.asked import Chat, ServedModel
from elastic.front.rendering.messages import Messages, chain, head_digest, texts_of
from elastic.protocol.front_messages import CHAIN_MAX, BranchFound
from elastic.protocol.openai.errors import FrontError, too_long
from elastic.protocol.sampled import ids_of

RENDERED_HERE_CHARS = 20_000
"""Messages with more text are rendered on a thread, while streams go on."""

COUNTED_CHARS_PER_TOKEN = 8
"""Texts that are longer, for the context that there is, are counted before they are rendered and encoded whole."""

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
        self._model = model
        self._renderer = model.renderer
        self._renders = renders

    async def chain(self, chat: Chat) -> list[bytes]:
        """A digest for each prefix of the chat, if it is one that may fit into the context."""
        if len(chat.messages) > CHAIN_MAX:
            said = f"there are {len(chat.messages)} with all that was said before; at most {CHAIN_MAX} are allowed"
            raise FrontError(400, f"messages: {said}", "messages", "invalid_messages")
        return await self._rendering(chat.messages, self._chain_of, chat)

    def _chain_of(self, chat: Chat) -> list[bytes]:
        context = self._model.context_tokens
        texts = [text for message in chat.messages for text in texts_of(message)]
        if sum(map(len, texts)) > COUNTED_CHARS_PER_TOKEN * context:
            tokens = self._model.tokenizer.estimate(texts, context)
            if tokens > context:
                raise too_long(context, tokens)
        return chain(head_digest(chat.tools, chat.template_kwargs), chat.messages)

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

    async def _rendering(self, messages: Messages, render: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """What `render` makes, on a thread if that may take long."""
        rendering = functools.partial(render, *args, **kwargs)
        chars = sum(len(text) for message in messages for text in texts_of(message))
        try:
            if chars <= RENDERED_HERE_CHARS:
                return rendering()
            return await asyncio.get_running_loop().run_in_executor(self._renders, rendering)
        except ValueError as error:
            raise FrontError(400, f"messages: {error}", "messages", "invalid_messages") from error
