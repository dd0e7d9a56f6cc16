"""What a call asks for, whichever route it came by, before the run is asked."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from elastic.core.types import TurnId
from elastic.front.destinations import ModelNames
from elastic.front.rendering.messages import Messages, Tools
from elastic.front.rendering.renderer import ChatRenderer
from elastic.front.rendering.tokenizer import Tokenizer
from elastic.protocol.front_messages import AgentCall, WantedSampling
from elastic.protocol.openai.answers import AnswerSettings, Dialect


class ServedModel(NamedTuple):
    """The policy as agents see it."""

    name: str
    context_tokens: int
    vocab_size: int
    tokenizer: Tokenizer
    renderer: ChatRenderer
    created_s: int
    policies: tuple[str, ...] = ()
    upstream: bool = False

    @property
    def names(self) -> ModelNames:
        return ModelNames(self.name, self.policies, self.upstream)

    def token_text(self, token: int) -> str:
        return self.tokenizer.decode([token], special=True)


class Chat(NamedTuple):
    """The messages of a chat, and what changes their rendering besides."""

    messages: Messages
    tools: Tools | None
    template_kwargs: Mapping[str, Any]
    calls_tools: bool
    """Whether calls of tools are looked for in answers."""
    one_call: bool
    """Whether an answer has one call of a tool at most."""


class ChatThread(NamedTuple):
    """How a chat stands to others of its trajectory that clients name by their ids.

    behind: the turn whose answer this chat goes on from, with all that was said before; empty for none.
    own: so many messages at the beginning are of this call alone, and not of what goes on from it.
    kept: whether others may go on from it.
    """

    behind: TurnId = ""
    own: int = 0
    kept: bool = True


class Asked(NamedTuple):
    """`prompts` are those of a completion, each with `n` choices. A chat has none of its own but its messages."""

    call: AgentCall
    dialect: Dialect
    n: int
    sampling: WantedSampling
    stops: tuple[str, ...]
    silent: frozenset[int]
    """Token ids that end an answer, and are no text of it."""
    stop_ids: frozenset[int]
    """Those of them that the client has named."""
    settings: AnswerSettings
    stream: bool
    session: str
    chat: Chat | None = None
    prompts: Sequence[Sequence[int]] = ()
    thread: ChatThread | None = None


class CountCall(NamedTuple):
    """Asks for the tokens of the prompt that a chat would have, and for no answer."""

    asked: Asked

    @property
    def session(self) -> str:
        return self.asked.session
