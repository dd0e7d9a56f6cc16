"""Bodies of OpenAI's Responses API, and what they are as a chat.

A body has items: messages, calls of functions, their results, and reasoning. `chat_messages` makes a chat's messages of
them. What an answer's items (`elastic.protocol.openai.response_answers`) become, sent back, is the message that the
answer is, with its reasoning or without.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeAlias

import msgspec

from elastic.protocol.openai.bodies import (
    CONSTRAINED,
    MESSAGES_MAX,
    ROLES,
    TOOLS_MAX,
    AnswerFields,
    AtLeastOne,
    MaybeName,
    Name,
    Terms,
    chat_tool,
    check_schema,
    check_template_kwargs,
    check_tool_choice,
    converted,
    invalid,
    quoted,
)

RESPONSE_ID = "resp_"
"""What the ids of responses begin with."""


class ItemText(msgspec.Struct):
    """A part of an item's content: a text, or a refusal to give one."""

    type: str
    text: str | None = None
    refusal: str | None = None


class MessageItem(msgspec.Struct):
    """A message, or an answer's text."""

    role: str
    content: str | list[ItemText]


class CallItem(msgspec.Struct):
    """A call of a function. `arguments` is the text of a JSON object."""

    call_id: Name
    name: Name
    arguments: str = ""


class ResultItem(msgspec.Struct):
    """What a call of a function has come to."""

    call_id: Name
    output: str | list[ItemText]


class ReasoningItem(msgspec.Struct):
    """An answer's reasoning, or a summary of it."""

    summary: list[ItemText] | None = None
    content: list[ItemText] | None = None


Item: TypeAlias = MessageItem | CallItem | ResultItem | ReasoningItem
ITEMS: Mapping[str, type[Item]] = {
    "message": MessageItem,
    "function_call": CallItem,
    "function_call_output": ResultItem,
    "reasoning": ReasoningItem,
}


class ResponseTool(msgspec.Struct):
    """A function that the model may call; other tools are run by OpenAI's servers."""

    type: str
    name: Name = ""
    description: str | None = None
    parameters: dict[str, Any] | None = None


class ReasoningOptions(msgspec.Struct):
    effort: str | None = None


class ResponseRequest(AnswerFields, kw_only=True):
    """`instructions` are of this answer alone: a response that goes on behind it has its own."""

    input: str | Annotated[list[dict[str, Any]], msgspec.Meta(max_length=MESSAGES_MAX)] = msgspec.field(
        default_factory=list
    )
    instructions: str | None = None
    previous_response_id: MaybeName | None = None
    store: bool = True
    max_output_tokens: AtLeastOne | None = None
    tools: Annotated[list[ResponseTool], msgspec.Meta(max_length=TOOLS_MAX)] = msgspec.field(default_factory=list)
    tool_choice: Any = "auto"
    parallel_tool_calls: bool = True
    reasoning: ReasoningOptions = msgspec.field(default_factory=ReasoningOptions)
    chat_template_kwargs: dict[str, Any] = msgspec.field(default_factory=dict)

    def __post_init__(self) -> None:
        for number, tool in enumerate(self.tools):
            _check_tool(tool, f"tools.{number}")
        check_tool_choice(self.tool_choice)
        check_template_kwargs(self.chat_template_kwargs)

    @property
    def most_tokens(self) -> int | None:
        return self.max_output_tokens

    @property
    def behind(self) -> str:
        """The name of the turn whose answer this goes on from; empty for none. Raises `FrontError`."""
        if self.previous_response_id is None:
            return ""
        named, _, turn = self.previous_response_id.partition(RESPONSE_ID)
        if named or not turn:
            said = f"found {quoted(self.previous_response_id)}; ids of responses begin with {RESPONSE_ID!r}"
            raise invalid("previous_response_id", said)
        return turn

    def messages(self) -> list[dict[str, Any]]:
        """The chat that the input is, without instructions. Raises `FrontError`."""
        if isinstance(self.input, str):
            return [{"role": "user", "content": self.input}]
        return chat_messages([_item(item, f"input.{number}") for number, item in enumerate(self.input)])

    def chat_tools(self) -> list[dict[str, Any]] | None:
        """The tools as a chat has them. How strictly calls keep to their schemas is not for a server to say here."""
        return [_chat_tool(tool) for tool in self.tools] or None


RESPONSE = Terms(
    {
        **CONSTRAINED,
        "n": (1,),
        "return_token_ids": (False,),
        "logprobs": (False,),
        "top_logprobs": (0,),
        "stop": ([],),
        "max_tokens": (),
        "text.format": ({"type": "text"},),
        "include": ([], ["reasoning.encrypted_content"]),
        "truncation": ("disabled",),
        "background": (False,),
        "conversation": (),
        "prompt": (),
        "context_management": ([],),
        "moderation": (),
    },
    frozenset(ResponseRequest.__struct_fields__) - {"n", "return_token_ids", "stop", "max_tokens"},
)


def flattened(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a body with those of its `text` beside the others, as `RESPONSE` names them."""
    text = fields.get("text")
    if text is None:
        return dict(fields)
    inner = converted(text, dict[str, Any], "text")
    return {**fields, **{f"text.{name}": value for name, value in inner.items()}}


def chat_messages(items: Sequence[Item]) -> list[dict[str, Any]]:
    """The messages of a chat that items are: what a model has said in one go is one message of its own."""
    messages: list[dict[str, Any]] = []
    own: dict[str, Any] | None = None
    """The model's message that items are still added to."""
    for item in items:
        if isinstance(item, ResultItem):
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)})
            own = None
        elif isinstance(item, MessageItem) and item.role != "assistant":
            messages.append({"role": item.role, "content": _text(item.content)})
            own = None
        else:
            if own is None or (isinstance(item, MessageItem) and "content" in own):
                own = {"role": "assistant"}
                messages.append(own)
            _add(own, item)
    for message in messages:
        message.setdefault("content", None if message.get("tool_calls") else "")
    return messages


def _add(own: dict[str, Any], item: MessageItem | CallItem | ReasoningItem) -> None:
    match item:
        case MessageItem():
            own["content"] = _text(item.content)
        case CallItem():
            called = {"name": item.name, "arguments": item.arguments}
            own.setdefault("tool_calls", []).append({"id": item.call_id, "type": "function", "function": called})
        case ReasoningItem():
            if thought := _text(item.content or item.summary or []):
                own["reasoning_content"] = own.get("reasoning_content", "") + thought


def _item(fields: Mapping[str, Any], where: str) -> Item:
    kind = fields.get("type") or "message"
    if (struct := ITEMS.get(kind) if isinstance(kind, str) else None) is None:
        raise invalid(f"{where}.type", f"found {quoted(kind)}; allowed: {', '.join(ITEMS)}")
    item = converted(fields, struct, where)
    if isinstance(item, MessageItem):
        if item.role not in ROLES[:-1]:
            raise invalid(f"{where}.role", f"found {quoted(item.role)}; allowed: {', '.join(ROLES[:-1])}")
        _check_parts(item.content, f"{where}.content")
    elif isinstance(item, ResultItem):
        _check_parts(item.output, f"{where}.output")
    return item


def _check_parts(parts: str | list[ItemText], where: str) -> None:
    if isinstance(parts, str):
        return
    for number, part in enumerate(parts):
        if part.text is None and part.refusal is None:
            said = f"found {quoted(part.type)}; this model reads parts with a text alone"
            raise invalid(f"{where}.{number}.type", said)


def _text(parts: str | list[ItemText]) -> str:
    return parts if isinstance(parts, str) else "".join(part.text or part.refusal or "" for part in parts)


def _check_tool(tool: ResponseTool, where: str) -> None:
    if tool.type != "function":
        raise invalid(f"{where}.type", f"found {quoted(tool.type)}; allowed: 'function'")
    if not tool.name:
        raise invalid(f"{where}.name", "is missing")
    if tool.parameters is not None:
        check_schema(tool.parameters, f"{where}.parameters")


def _chat_tool(tool: ResponseTool) -> dict[str, Any]:
    return chat_tool(tool.name, tool.description, tool.parameters)
