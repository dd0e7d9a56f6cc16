"""Bodies of Anthropic's Messages API, and what they are as a chat.

`chat_messages` makes a chat's messages of a body's. What an answer's blocks (`elastic.protocol.anthropic.answers`)
become, sent back, is the message that the answer is, with its thinking or without.
"""

from collections.abc import Mapping
from typing import Annotated, Any, TypeAlias

import msgspec

from elastic.protocol.openai.bodies import (
    CONSTRAINED,
    MESSAGES_MAX,
    STOPS_MAX,
    TOOLS_MAX,
    AnswerFields,
    Name,
    Terms,
    Text,
    chat_tool,
    check_schema,
    check_template_kwargs,
    converted,
    invalid,
    quoted,
)
from elastic.protocol.openai.errors import FrontError

BILLING = "x-anthropic-billing-header"
"""With this begins a text for Anthropic's servers, another one with each call, which is no part of a prompt."""


class TextBlock(msgspec.Struct, tag_field="type", tag="text"):
    text: str


class ThinkingBlock(msgspec.Struct, tag_field="type", tag="thinking"):
    thinking: str = ""


class RedactedBlock(msgspec.Struct, tag_field="type", tag="redacted_thinking"):
    """Thinking that nobody here can read."""


class ToolUseBlock(msgspec.Struct, tag_field="type", tag="tool_use"):
    id: Name
    name: Name
    input: dict[str, Any] = {}


class ToolResultBlock(msgspec.Struct, tag_field="type", tag="tool_result"):
    """What a call of a tool has come to; that it is an error is for its text to say."""

    tool_use_id: Name
    content: str | list[TextBlock] | None = None


Block: TypeAlias = TextBlock | ThinkingBlock | RedactedBlock | ToolUseBlock | ToolResultBlock
BLOCKS: Mapping[str, tuple[str, ...]] = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
    "system": ("text",),
}
"""The types of blocks that the messages of a role may have."""


class RoleMessage(msgspec.Struct):
    role: str
    content: str | list[dict[str, Any]]


class MessagesTool(msgspec.Struct):
    """A function that the model may call; tools of other types are Anthropic's own."""

    name: Name
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None


class ToolChoice(msgspec.Struct):
    type: str
    disable_parallel_tool_use: bool = False


class Thinking(msgspec.Struct):
    """Whether the model is to think first. How long it does so is its own affair."""

    type: str


class OutputConfig(msgspec.Struct):
    effort: str | None = None
    format: dict[str, Any] | None = None


class ContextEdit(msgspec.Struct):
    type: str


class ContextManagement(msgspec.Struct):
    edits: list[ContextEdit] = []


class MessagesRequest(AnswerFields, kw_only=True):
    messages: Annotated[list[RoleMessage], msgspec.Meta(min_length=1, max_length=MESSAGES_MAX)]
    system: str | list[TextBlock] = ""
    stop_sequences: Annotated[list[Text], msgspec.Meta(max_length=STOPS_MAX)] = msgspec.field(default_factory=list)
    tools: Annotated[list[MessagesTool], msgspec.Meta(max_length=TOOLS_MAX)] = msgspec.field(default_factory=list)
    tool_choice: ToolChoice = msgspec.field(default_factory=lambda: ToolChoice("auto"))
    thinking: Thinking | None = None
    output_config: OutputConfig = msgspec.field(default_factory=OutputConfig)
    context_management: ContextManagement = msgspec.field(default_factory=ContextManagement)
    chat_template_kwargs: dict[str, Any] = msgspec.field(default_factory=dict)

    def __post_init__(self) -> None:
        for number, tool in enumerate(self.tools):
            _check_tool(tool, f"tools.{number}")
        if self.tool_choice.type not in ("auto", "none"):
            raise _unsupported(
                "tool_choice.type",
                f"found {quoted(self.tool_choice.type)}; allowed: 'auto' or 'none', since a call that is forced is "
                "sampled from another distribution than the policy's",
            )
        if self.output_config.format is not None:
            raise _unsupported(
                "output_config.format",
                "not supported by this server; log-probabilities would be those of another distribution than the "
                "policy's",
            )
        for number, edit in enumerate(self.context_management.edits):
            if not edit.type.startswith("clear_thinking"):
                said = f"found {quoted(edit.type)}; the conversation is what is sent"
                raise _unsupported(f"context_management.edits.{number}.type", said)
        check_template_kwargs(self.chat_template_kwargs)

    @property
    def stops(self) -> tuple[str, ...]:
        return tuple(self.stop_sequences)

    def template_kwargs(self) -> dict[str, Any]:
        """What templates are told besides messages and tools."""
        kwargs = dict(self.chat_template_kwargs)
        if self.output_config.effort is not None:
            kwargs.setdefault("reasoning_effort", self.output_config.effort)
        if self.thinking is not None and self.thinking.type == "disabled":
            kwargs.setdefault("enable_thinking", False)
        return kwargs

    def chat_messages(self) -> list[dict[str, Any]]:
        """The chat that the body is. Raises `FrontError`."""
        messages: list[dict[str, Any]] = []
        if system := _system(self.system):
            messages.append({"role": "system", "content": system})
        for number, message in enumerate(self.messages):
            messages += _chat_messages(message, f"messages.{number}")
        return messages

    def chat_tools(self) -> list[dict[str, Any]] | None:
        return [_chat_tool(tool) for tool in self.tools] or None


MESSAGES = Terms(
    {
        **CONSTRAINED,
        "n": (1,),
        "return_token_ids": (False,),
        "logprobs": (False,),
        "stop": ([],),
        "container": (),
        "mcp_servers": ([],),
    },
    frozenset(MessagesRequest.__struct_fields__) - {"n", "return_token_ids", "stop", "stream_options"},
)


def _system(system: str | list[TextBlock]) -> str:
    if isinstance(system, str):
        return system
    return "".join(block.text for block in system if not block.text.startswith(BILLING))


def _chat_messages(message: RoleMessage, where: str) -> list[dict[str, Any]]:
    """The chat's messages that one message is: each result of a tool is one of its own."""
    role = message.role
    if role not in BLOCKS:
        raise invalid(f"{where}.role", f"found {quoted(role)}; allowed: {', '.join(BLOCKS)}")
    if isinstance(message.content, str):
        return [{"role": role, "content": message.content}]
    blocks = [_block(block, role, f"{where}.content.{number}") for number, block in enumerate(message.content)]
    return [_assistant(blocks)] if role == "assistant" else _others(role, blocks)


def _block(fields: Mapping[str, Any], role: str, where: str) -> Block:
    kind = fields.get("type")
    if kind not in BLOCKS[role]:
        said = f"found {quoted(kind)}; a message of role {role!r} has blocks of type {', '.join(BLOCKS[role])} here"
        raise invalid(f"{where}.type", said)
    return converted(fields, Block, where)


def _assistant(blocks: list[Block]) -> dict[str, Any]:
    own: dict[str, Any] = {"role": "assistant"}
    own["content"] = "".join(block.text for block in blocks if isinstance(block, TextBlock))
    if thought := "".join(block.thinking for block in blocks if isinstance(block, ThinkingBlock)):
        own["reasoning_content"] = thought
    if calls := [_call(block) for block in blocks if isinstance(block, ToolUseBlock)]:
        own["tool_calls"] = calls
        own["content"] = own["content"] or None
    return own


def _call(block: ToolUseBlock) -> dict[str, Any]:
    try:
        arguments = msgspec.json.encode(block.input).decode()
    except RecursionError:
        raise FrontError(400, "the body nests too deeply") from None
    return {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": arguments}}


def _others(role: str, blocks: list[Block]) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    text: list[str] = []
    for block in blocks:
        if isinstance(block, TextBlock):
            text.append(block.text)
        elif isinstance(block, ToolResultBlock):
            if text:
                messages.append({"role": role, "content": "".join(text)})
                text.clear()
            said = block.content or ""
            told = said if isinstance(said, str) else "".join(part.text for part in said)
            messages.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": told})
    if text or not messages:
        messages.append({"role": role, "content": "".join(text)})
    return messages


def _check_tool(tool: MessagesTool, where: str) -> None:
    if tool.type not in (None, "custom"):
        raise invalid(f"{where}.type", f"found {quoted(tool.type)}; allowed: 'custom'")
    if tool.input_schema is not None:
        check_schema(tool.input_schema, f"{where}.input_schema")


def _chat_tool(tool: MessagesTool) -> dict[str, Any]:
    return chat_tool(tool.name, tool.description, tool.input_schema)


def _unsupported(param: str, said: str) -> FrontError:
    return FrontError(400, f"{param}: {said}", param, "unsupported_parameter")
