"""Messages to tokens and answers to messages. What was sampled stays as it was: only what is new is rendered.

A `ChatRenderer` renders a conversation whole (`prompt`), or what comes behind an answer (`more`). Two do that here:

- `TemplateRenderer` takes the difference of two renderings of the checkpoint's template: with the new messages and
  without. That is right where the rendering of a prefix is a prefix of the whole. Probes show for which settings it is
  and how a message is closed; each call is checked once more with its own messages.
- `LibraryRenderer` asks the `renderers` library for its bridge, for models that it knows.

`make_renderer` chooses one, and logs which.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import structlog

from elastic.front import library
from elastic.front.messages import AnyMessage, head_digest
from elastic.front.reading import TAIL_TOKENS, AnswerParsers, AnswerReader
from elastic.front.reasoning_grammars import THOUGHT
from elastic.front.templates import ChatTemplate, RendererError, RenderingError, now_here, plain_messages
from elastic.front.tokenizer import ControlTextError, Tokenizer
from elastic.protocol.openai.answers import ParsedAnswer

log = structlog.get_logger(__name__)

SETTINGS_MAX = 256
"""Most template settings whose probes are remembered."""

_QUESTION, _ANSWER, _THOUGHT, _RESULT = "elastic-question", "elastic-answer", "elastic-thought", "elastic-result"
_CALL = {"id": "call00000", "type": "function", "function": {"name": "elastic", "arguments": {"value": 1}}}
_TOOL = {"type": "function", "function": {"name": "elastic", "description": "", "parameters": {"type": "object"}}}

Tools = Sequence[Mapping[str, Any]] | None


class ChatRenderer(Protocol):
    """Makes tokens of messages, and messages of answers.

    stop_token_ids: end an answer.
    ids_before: how many tokens before the answer `more` and `parse` read, at most.
    """

    stop_token_ids: tuple[int, ...]
    ids_before: int

    @property
    def reads_calls(self) -> bool:
        """Whether calls of tools are read out of answers."""
        ...

    def prompt(self, messages: Sequence[AnyMessage], tools: Tools, template_kwargs: Mapping[str, Any]) -> list[int]:
        """The whole conversation, up to where an answer begins. Raises `RenderingError`."""
        ...

    def more(
        self,
        messages: Sequence[AnyMessage],
        matched: int,
        tools: Tools,
        template_kwargs: Mapping[str, Any],
        so_far: Sequence[int],
        answer_tokens: int,
    ) -> list[int] | None:
        """The tokens behind `so_far` for `messages[matched:]`, up to where an answer begins.

        `so_far` is the prompt of the turn that answered with `messages[matched - 1]`, or its last `ids_before` tokens,
        and then its sampled tokens, of which there are `answer_tokens`.

        None where nobody can say that these tokens are right: the conversation has to be rendered whole. Raises
        `RenderingError`.
        """
        ...

    def parse(
        self,
        token_ids: Sequence[int],
        prompt_ids: Sequence[int] | None,
        tools: Tools,
        turn: str = "",
        text: str | None = None,
    ) -> ParsedAnswer:
        """The answer that sampled tokens are. Tools' calls are looked for where there are `tools`. Their ids follow
        from `turn`, or from the prompt where no turn is named. `text` is the answer's where it is not that of all of
        its tokens, as before a stop string."""
        ...

    def reader(self, prompt_ids: Sequence[int] | None, tools: Tools, turn: str = "") -> AnswerReader:
        """Parses as tokens come."""
        ...

    def plain(self, calls_tools: bool) -> bool:
        """Whether an answer is its text, with nothing to be parsed in it."""
        ...


class _Habits(NamedTuple):
    """What probes show of a template, for some settings.

    closing: what closes an assistant's message. It begins with a control token, `closing_id`.
    thought: the reasoning that stands for that of earlier answers; empty for a template that shows none.
    after_user, after_tools: whether the rendering stays a prefix where a user's message, or tools' results, follow.
    drops_thoughts: whether reasoning within an answer's content is left out of its message.
    """

    closing: str
    closing_id: int
    thought: str
    after_user: bool
    after_tools: bool
    drops_thoughts: bool


class TemplateRenderer:
    ids_before = TAIL_TOKENS

    def __init__(self, tokenizer: Tokenizer, tool_parser: str = "", reasoning_parser: str = "") -> None:
        """Raises `RendererError` for names that nobody has, and for a template that is none."""
        self._tokenizer = tokenizer
        self._template = ChatTemplate(tokenizer)
        self._answers = AnswerParsers(tokenizer, tool_parser, reasoning_parser)
        self._known: dict[tuple[bool, bytes], _Habits | None] = {}
        closing = None if (habits := self._habits(None, {})) is None else habits.closing_id
        ends = tokenizer.eos_token_ids if closing is None else (*tokenizer.eos_token_ids, closing)
        self.stop_token_ids = tuple(dict.fromkeys(ends))

    @property
    def reads_calls(self) -> bool:
        return self._answers.reads_calls

    @property
    def habits(self) -> dict[str, Any]:
        """What the log says of the template."""
        habits, with_tools = self._habits(None, {}), self._habits([_TOOL], {})
        return {
            "continues": bool(habits and habits.after_user),
            "continues_behind_tools": bool(with_tools and with_tools.after_tools),
            "closes_messages_with": habits and self._tokenizer.token(habits.closing_id),
        }

    def prompt(self, messages: Sequence[AnyMessage], tools: Tools, template_kwargs: Mapping[str, Any]) -> list[int]:
        return self._encode(self._template.coded(plain_messages(messages), tools, template_kwargs))

    def more(
        self,
        messages: Sequence[AnyMessage],
        matched: int,
        tools: Tools,
        template_kwargs: Mapping[str, Any],
        so_far: Sequence[int],
        answer_tokens: int,
    ) -> list[int] | None:
        if not 0 < matched <= len(messages):
            return None
        if messages[matched - 1].get("role") != "assistant":
            return [] if matched == len(messages) and answer_tokens == 0 else None
        habits = self._habits(tools, template_kwargs)
        if habits is None or not self._continues(
            habits, messages[matched:], so_far[max(len(so_far) - answer_tokens, 0) :]
        ):
            return None
        plain = plain_messages(messages)
        for message in plain[:matched]:
            if message["role"] == "assistant":
                message["reasoning_content"] = habits.thought
        conversation = self._template.given(plain, tools, template_kwargs)
        try:
            before = conversation.text(matched)
        except RenderingError:
            return None  # a template that takes the whole alone
        whole = conversation.text(generation=True)
        if not whole.startswith(before) or not before.endswith(habits.closing):
            return None
        ids = self._encode(conversation.coded(habits.closing + whole[len(before) :]))
        closed = answer_tokens > 0 and list(so_far[-1:]) == [habits.closing_id]
        return ids[1:] if closed else ids

    def parse(
        self,
        token_ids: Sequence[int],
        prompt_ids: Sequence[int] | None,
        tools: Tools,
        turn: str = "",
        text: str | None = None,
    ) -> ParsedAnswer:
        if text is not None:
            return self._answers.parser(prompt_ids, tools, turn).whole(text)
        return self.reader(prompt_ids, tools, turn).whole(token_ids)

    def reader(self, prompt_ids: Sequence[int] | None, tools: Tools, turn: str = "") -> AnswerReader:
        return self._answers.reader(prompt_ids, tools, turn)

    def plain(self, calls_tools: bool) -> bool:
        return self._answers.plain(calls_tools)

    def _encode(self, coded: str) -> list[int]:
        try:
            return self._tokenizer.encode_coded(coded)
        except ControlTextError as error:
            raise RenderingError(str(error)) from error

    def _continues(self, habits: _Habits, new: Sequence[AnyMessage], answer: Sequence[int]) -> bool:
        """Whether the rendering stays a prefix behind such an answer, where such messages follow."""
        roles = {message.get("role") for message in new}
        if not (habits.after_tools if "tool" in roles else habits.after_user):
            return False
        return not habits.drops_thoughts or THOUGHT not in self._tokenizer.decode(answer, special=True)

    # Probes.

    def _habits(self, tools: Tools, template_kwargs: Mapping[str, Any]) -> _Habits | None:
        """None where an answer cannot be gone on from."""
        key = bool(tools), head_digest(None, template_kwargs)
        if key not in self._known:
            if len(self._known) >= SETTINGS_MAX:
                self._known.clear()
            probe = _Probe(self._tokenizer, self._template, [_TOOL] if tools else None, template_kwargs)
            self._known[key] = probe.habits()
        return self._known[key]


class _Probe:
    """Renders made-up conversations."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate, tools: Tools, kwargs: Mapping[str, Any]) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._tools = tools
        self._kwargs = kwargs
        self._now = now_here()

    def habits(self) -> _Habits | None:
        """Tried with reasoning in answers at first, and without where that is not how answers are rendered."""
        return next((habits for thought in (_THOUGHT, "") if (habits := self._with(thought)) is not None), None)

    def _with(self, thought: str) -> _Habits | None:
        question = {"role": "user", "content": _QUESTION}
        answer = {"role": "assistant", "content": _ANSWER} | ({"reasoning_content": thought} if thought else {})
        prompt = self._text([question], generation=True)
        answered = self._text([question, answer])
        inline = self._text([question, {"role": "assistant", "content": f"<think>\n{_THOUGHT}\n</think>\n\n{_ANSWER}"}])
        if prompt is None or answered is None or not answered.startswith(prompt) or answered.count(_ANSWER) != 1:
            return None
        closing = answered.partition(_ANSWER)[2].lstrip()
        closing_id = self._tokenizer.control_at_start(closing)
        if closing_id is None:
            return None
        calling = {**answer, "tool_calls": [_CALL]}
        result = {"role": "tool", "content": _RESULT, "tool_call_id": _CALL["id"], "name": "elastic"}
        return _Habits(
            closing,
            closing_id,
            thought,
            after_user=self._stays([question, answer], question),
            after_tools=self._stays([question, calling], result),
            drops_thoughts=inline is None or _THOUGHT not in inline,
        )

    def _stays(self, messages: list[dict[str, Any]], new: dict[str, Any]) -> bool:
        before, whole = self._text(messages), self._text([*messages, new], generation=True)
        return before is not None and whole is not None and whole.startswith(before)

    def _text(self, messages: list[dict[str, Any]], generation: bool = False) -> str | None:
        try:
            return self._template.given(messages, self._tools, self._kwargs, self._now).text(generation=generation)
        except RenderingError:
            return None


def make_renderer(
    tokenizer: Tokenizer, *, renderer: str = "auto", tool_parser: str = "", reasoning_parser: str = ""
) -> ChatRenderer:
    """The renderer by this name: `template`, one of the `renderers` library's, or `auto`.

    `auto` takes the library's for a checkpoint that says that it is a published model, if both render that model alike,
    and the template otherwise. Raises `RendererError`.
    """
    by_template = TemplateRenderer(tokenizer, tool_parser, reasoning_parser)
    names = library.names() if renderer not in ("auto", "template") else []
    if renderer in names:
        log.info("renderer", renderer=renderer)
        return library.LibraryRenderer(tokenizer, renderer, tool_parser, reasoning_parser)
    if renderer not in ("auto", "template"):
        lacks = (
            ""
            if names
            else "; others need the `renderers` library, which the extra `fronts` brings: pip install -e '.[fronts]'"
        )
        allowed = ", ".join(map(repr, ["auto", "template", *names]))
        raise RendererError(f"front.renderer: found {renderer!r}; allowed: {allowed}{lacks}")
    if renderer == "auto" and (published := library.name_for(tokenizer.hub_name)):
        try:
            chosen = library.LibraryRenderer(tokenizer, published, tool_parser, reasoning_parser)
            if tokenizer.template is None or _alike(chosen, by_template):
                log.info("renderer", renderer=published, model=tokenizer.hub_name)
                return chosen
            log.warning("the checkpoint's template is not the published one", model=tokenizer.hub_name)
        except RendererError as error:
            log.warning("the checkpoint's tokenizer is not the published one", reason=str(error))
    log.info("renderer", renderer="template", **by_template.habits)
    return by_template


def _alike(one: ChatRenderer, other: ChatRenderer) -> bool:
    """Whether both render some conversations to the same tokens."""
    question = {"role": "user", "content": _QUESTION}
    calling = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
    result = {"role": "tool", "content": _RESULT, "tool_call_id": _CALL["id"], "name": "elastic"}
    answer = {"role": "assistant", "content": _ANSWER}
    conversations: list[tuple[list[dict[str, Any]], Tools]] = [
        ([question], None),
        ([{"role": "system", "content": _RESULT}, question, answer, question], None),
        ([question, calling, result, answer, question], [_TOOL]),
    ]
    try:
        return all(
            one.prompt(messages, tools, {}) == other.prompt(messages, tools, {}) for messages, tools in conversations
        )
    except RenderingError:
        return False
