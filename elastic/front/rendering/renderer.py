"""Messages to tokens and answers to messages. What was sampled stays as it was: only what is new is rendered.

A `ChatRenderer` renders a conversation whole (`prompt`), or what comes behind an answer (`more`). Two do that here:

- `TemplateRenderer` takes the difference of two renderings of the checkpoint's template: with the new messages and
  without. That is right where the rendering of a prefix is a prefix of the whole. Probes show for which settings it is
  and how a message is closed; each call is checked once more with its own messages.
- `LibraryRenderer` asks the `renderers` library for its bridge, for models that it knows.

`make_renderer` chooses one, and logs which.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import structlog

from elastic.front.rendering import library
from elastic.front.rendering.messages import AnyMessage, head_digest
from elastic.front.rendering.probing import (
    ANSWER,
    CALL,
    CALLS_UNREAD,
    QUESTION,
    RESULT,
    RESULT_TEXT,
    TOOL,
    Habits,
    Parse,
    Tools,
    habits_of,
    losses_of,
    reads_calls,
    reads_reasoning,
)
from elastic.front.rendering.reading import TAIL_TOKENS, AnswerParsers, AnswerReader
from elastic.front.rendering.reasoning_grammars import REASONING_PARSERS, THOUGHT
from elastic.front.rendering.templates import ChatTemplate, Conversation, RendererError, RenderingError, plain_messages
from elastic.front.rendering.tokenizer import ControlTextError, Tokenizer
from elastic.front.rendering.tool_grammars import TOOL_PARSERS
from elastic.protocol.openai.answers import ParsedAnswer

log = structlog.get_logger(__name__)

SETTINGS_MAX = 256
"""Most template settings whose probes are remembered."""


NO_PARSER = "nothing here reads calls of tools"


class ChatRenderer(Protocol):
    """Makes tokens of messages, and messages of answers.

    stop_token_ids: end an answer.
    unread: why calls of tools are not read out of answers, as clients are told; empty if they are read.
    ids_before: how many tokens before the answer `more` and `parse` read, at most.
    """

    stop_token_ids: tuple[int, ...]
    ids_before: int
    unread: str

    @property
    def reads_reasoning(self) -> bool:
        """Whether reasoning is read out of answers."""
        ...

    def prompt(
        self, messages: Sequence[AnyMessage], tools: Tools | None, template_kwargs: Mapping[str, Any]
    ) -> list[int]:
        """The whole conversation, up to where an answer begins. Raises `RenderingError`."""
        ...

    def more(
        self,
        messages: Sequence[AnyMessage],
        matched: int,
        tools: Tools | None,
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

    def answered(
        self, messages: Sequence[AnyMessage], tools: Tools | None, template_kwargs: Mapping[str, Any]
    ) -> list[int]:
        """The whole conversation, up to where its last message is closed. Raises `RenderingError`."""
        ...

    def parse(
        self,
        token_ids: Sequence[int],
        prompt_ids: Sequence[int] | None,
        tools: Tools | None,
        turn: str = "",
        text: str | None = None,
    ) -> ParsedAnswer:
        """The answer that sampled tokens are. Tools' calls are looked for where there are `tools`. Their ids follow
        from `turn`, or from the prompt where no turn is named. `text` is the answer's where it is not that of all of
        its tokens, as before a stop string."""
        ...

    def reader(self, prompt_ids: Sequence[int] | None, tools: Tools | None, turn: str = "") -> AnswerReader:
        """Parses as tokens come."""
        ...

    def plain(self, calls_tools: bool) -> bool:
        """Whether an answer is its text, with nothing to be parsed in it."""
        ...


class TemplateRenderer:
    ids_before = TAIL_TOKENS

    def __init__(self, tokenizer: Tokenizer, tool_parser: str = "", reasoning_parser: str = "") -> None:
        """Raises `RendererError` for names that nobody has, and for a template that is none."""
        self._tokenizer = tokenizer
        self._template = ChatTemplate(tokenizer)
        self._answers = AnswerParsers(tokenizer, tool_parser, reasoning_parser)
        self.unread = "" if self._answers.reads_calls else NO_PARSER
        self._known: dict[tuple[bool, bytes], Habits | None] = {}
        habits = self._habits(None, {})
        closings = () if habits is None else (habits.closing, habits.closing_of_calls)
        ends = [number for closing in closings if (number := tokenizer.control_at_start(closing)) is not None]
        self.stop_token_ids = tuple(dict.fromkeys((*tokenizer.eos_token_ids, *ends)))
        self._openers = {*self.stop_token_ids} - {tokenizer.token_id(tokenizer.named.get("eos_token", ""))}
        """Tokens that end an answer since they begin a message, in templates that close none."""

    @property
    def reads_reasoning(self) -> bool:
        return self._answers.reads_reasoning

    @property
    def habits(self) -> dict[str, Any]:
        """What the log says of the template."""
        habits, with_tools = self._habits(None, {}), self._habits([TOOL], {})
        return {
            "continues": bool(habits and habits.after_user),
            "continues_behind_tools": bool(with_tools and with_tools.after_tools),
            "closes_messages_with": habits and habits.closing.strip(),
        }

    def prompt(
        self, messages: Sequence[AnyMessage], tools: Tools | None, template_kwargs: Mapping[str, Any]
    ) -> list[int]:
        return self._encode(self._template.coded(plain_messages(messages), tools, template_kwargs))

    def more(
        self,
        messages: Sequence[AnyMessage],
        matched: int,
        tools: Tools | None,
        template_kwargs: Mapping[str, Any],
        so_far: Sequence[int],
        answer_tokens: int,
    ) -> list[int] | None:
        if not 0 < matched <= len(messages):
            return None
        if messages[matched - 1].get("role") != "assistant":
            return [] if matched == len(messages) and answer_tokens == 0 else None
        habits = self._habits(tools, template_kwargs)
        answer = so_far[max(len(so_far) - answer_tokens, 0) :]
        if habits is None or not self._continues(habits, messages[matched:], answer):
            return None
        plain = plain_messages(messages)
        closing = habits.closing_of_calls if plain[matched - 1].get("tool_calls") else habits.closing
        for thought in dict.fromkeys((habits.thought, "")):
            conversation = self._template.given(_placeholders(plain, matched, thought), tools, template_kwargs)
            try:
                before = conversation.text(matched)
            except RenderingError:
                continue  # a template that takes the whole alone, or no reasoning beside the rest
            whole = conversation.text(generation=True)
            if whole.startswith(before) and before.endswith(closing):
                return self._behind(conversation, closing, closing + whole[len(before) :], answer)
        return None

    def _behind(self, conversation: Conversation, closing: str, text: str, answer: Sequence[int]) -> list[int] | None:
        """The tokens behind an answer of a text that begins with what closes its message."""
        end, last = self._tokenizer.control_at_start(text), answer[-1] if answer else None
        if end is None or (not closing and last != end and last in self._openers):
            return None  # for instance, the answer has begun another message than the one that follows
        ids = self._encode(conversation.coded(text))
        return ids[1:] if last == end else ids

    def answered(
        self, messages: Sequence[AnyMessage], tools: Tools | None, template_kwargs: Mapping[str, Any]
    ) -> list[int]:
        conversation = self._template.given(plain_messages(messages), tools, template_kwargs)
        return self._encode(conversation.coded(conversation.text()))

    def parse(
        self,
        token_ids: Sequence[int],
        prompt_ids: Sequence[int] | None,
        tools: Tools | None,
        turn: str = "",
        text: str | None = None,
    ) -> ParsedAnswer:
        if text is not None:
            return self._answers.parser(prompt_ids, tools, turn).whole(text)
        return self.reader(prompt_ids, tools, turn).whole(token_ids)

    def reader(self, prompt_ids: Sequence[int] | None, tools: Tools | None, turn: str = "") -> AnswerReader:
        return self._answers.reader(prompt_ids, tools, turn)

    def plain(self, calls_tools: bool) -> bool:
        return self._answers.plain(calls_tools)

    def _encode(self, coded: str) -> list[int]:
        try:
            return self._tokenizer.encode_coded(coded)
        except ControlTextError as error:
            raise RenderingError(str(error)) from error

    def _continues(self, habits: Habits, new: Sequence[AnyMessage], answer: Sequence[int]) -> bool:
        """Whether the rendering stays a prefix behind such an answer, where such messages follow."""
        roles = {message.get("role") for message in new}
        if not (habits.after_tools if "tool" in roles else habits.after_user):
            return False
        return not habits.drops_thoughts or THOUGHT not in self._tokenizer.decode(answer, special=True)

    def _habits(self, tools: Tools | None, template_kwargs: Mapping[str, Any]) -> Habits | None:
        """None where an answer cannot be gone on from."""
        key = bool(tools), head_digest(None, template_kwargs)
        if key not in self._known:
            if len(self._known) >= SETTINGS_MAX:
                self._known.clear()
            self._known[key] = habits_of(self._tokenizer, self._template, bool(tools), template_kwargs)
        return self._known[key]


def make_renderer(
    tokenizer: Tokenizer, *, renderer: str = "auto", tool_parser: str = "", reasoning_parser: str = ""
) -> ChatRenderer:
    """The renderer by this name: `template`, one of the `renderers` library's, or `auto`.

    `auto` takes the library's for a checkpoint that says that it is a published model, if both render that model alike,
    and the template otherwise, with the parsers that go with that model unless others are named. What answers lose that
    are rendered, parsed and rendered once more is logged. Raises `RendererError`.
    """
    if renderer == "auto":
        tool_parser, reasoning_parser = library.parsers_of(tokenizer, renderer, tool_parser, reasoning_parser)
    by_template = TemplateRenderer(tokenizer, tool_parser, reasoning_parser)
    names = library.names() if renderer not in ("auto", "template") else []
    if renderer not in ("auto", "template", *names):
        lacks = (
            ""
            if names
            else "; others need the `renderers` library, which the extra `fronts` brings: pip install -e '.[fronts]'"
        )
        allowed = ", ".join(map(repr, ["auto", "template", *names]))
        raise RendererError(f"front.renderer: found {renderer!r}; allowed: {allowed}{lacks}")
    chosen: ChatRenderer = by_template
    if renderer in names:
        chosen = library.LibraryRenderer(tokenizer, renderer, tool_parser, reasoning_parser)
        log.info("renderer", renderer=renderer)
    elif renderer == "auto" and (published := _published(tokenizer, by_template, tool_parser, reasoning_parser)):
        chosen = published
    else:
        log.info("renderer", renderer="template", **by_template.habits)
    if tokenizer.templates or chosen is not by_template:
        _tell_losses(chosen, tokenizer, tool_parser)
    return chosen


def _published(
    tokenizer: Tokenizer, by_template: TemplateRenderer, tool_parser: str, reasoning_parser: str
) -> ChatRenderer | None:
    """The library's renderer for the model that a checkpoint says to be, if it renders that as its template does."""
    name = library.name_for(tokenizer.hub_name)
    if not name:
        return None
    try:
        chosen = library.LibraryRenderer(tokenizer, name, tool_parser, reasoning_parser)
    except RendererError as error:
        log.warning("the checkpoint's tokenizer is not the published one", reason=str(error))
        return None
    if tokenizer.template is not None and not _alike(chosen, by_template):
        log.warning("the checkpoint's template is not the published one", model=tokenizer.hub_name)
        return None
    log.info("renderer", renderer=name, model=tokenizer.hub_name)
    return chosen


def _tell_losses(chosen: ChatRenderer, tokenizer: Tokenizer, tool_parser: str) -> None:
    """Log what is lost of answers, and which parsers would lose less. Tools whose calls are not read are refused."""
    losses = losses_of(chosen, tokenizer, chosen.parse, not chosen.unread, chosen.reads_reasoning)
    if losses:
        log.warning("answers that are rendered and parsed lose something", lost=losses)
    if CALLS_UNREAD in losses:
        chosen.unread = f"front.tool_parser {tool_parser!r} does not read calls as this model's template writes them"
    if chosen.unread:
        better = [
            one
            for one in TOOL_PARSERS
            if one != tool_parser and reads_calls(chosen, tokenizer, _parse_with(tokenizer, one, ""))
        ]
        advice = (
            f"front.tool_parser = {' or '.join(map(repr, better))} does" if better else "name one in front.tool_parser"
        )
        chosen.unread += f"; {advice}"
        log.info("agents cannot use tools", reason=chosen.unread)
    if not chosen.reads_reasoning:
        better = [
            one for one in REASONING_PARSERS if reads_reasoning(chosen, tokenizer, _parse_with(tokenizer, "", one))
        ]
        if better:
            log.info("reasoning stays in the text of answers", read_by_front_reasoning_parser=better)


def _parse_with(tokenizer: Tokenizer, tool_parser: str, reasoning_parser: str) -> Parse:
    parsers = AnswerParsers(tokenizer, tool_parser, reasoning_parser)
    return lambda ids, prompt_ids, tools: parsers.reader(prompt_ids, tools, "").whole(ids)


def _placeholders(plain: Sequence[Mapping[str, Any]], matched: int, thought: str) -> list[dict[str, Any]]:
    """The same messages, but for what of the first ones is no part of what follows: their reasoning, and arguments that
    are no JSON, which not all templates take."""
    messages = [dict(message) for message in plain]
    for message in messages[:matched]:
        if message["role"] != "assistant":
            continue
        message["reasoning_content"] = thought
        if calls := message.get("tool_calls"):
            message["tool_calls"] = [_with_arguments(call) for call in calls]
    return messages


def _with_arguments(call: Mapping[str, Any]) -> Mapping[str, Any]:
    function = call["function"]
    return call if not isinstance(function["arguments"], str) else {**call, "function": {**function, "arguments": {}}}


def _alike(one: ChatRenderer, other: ChatRenderer) -> bool:
    """Whether both render some conversations to the same tokens."""
    calling = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    answer = {"role": "assistant", "content": ANSWER}
    conversations: list[tuple[list[dict[str, Any]], Tools | None]] = [
        ([QUESTION], None),
        ([{"role": "system", "content": RESULT_TEXT}, QUESTION, answer, QUESTION], None),
        ([QUESTION, calling, RESULT, answer, QUESTION], [TOOL]),
    ]
    try:
        return all(
            one.prompt(messages, tools, {}) == other.prompt(messages, tools, {}) for messages, tools in conversations
        )
    except RenderingError:
        return False
