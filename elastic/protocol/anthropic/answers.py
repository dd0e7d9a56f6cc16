"""Answers of Anthropic's Messages API: whole, and as events.

An answer has blocks: its thinking, its text, and one for each use of a tool. A stream begins with `message_start`, has
`content_block_start`, `content_block_delta` and `content_block_stop` of one block after the other, and ends with
`message_delta` and `message_stop`. An answer that cannot go on ends with `error`.

The input of a tool is a JSON object. Arguments that are none are shown as an object that has them as its only text, so
that clients can read them; sent back, they are another message than what the model has said.

Most of a text's delta is the same for all of a block, so it is made once.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from elastic.protocol.anthropic import errors
from elastic.protocol.openai.answers import Answered, AnswerHead, CallDelta, ChoiceEnd, ParsedAnswer, Sample
from elastic.protocol.openai.errors import FrontError

PING = b'event: ping\ndata: {"type":"ping"}\n\n'
MESSAGE_ID = "msg_"
UNREAD = "arguments"
"""What the input of a tool is called that is no JSON object."""

_json = msgspec.json.encode


class MessageWriter:
    """Writes one message."""

    def __init__(self, head: AnswerHead) -> None:
        self._prompt_tokens = head.prompt_tokens
        self._shell: dict[str, Any] = {
            "id": MESSAGE_ID + head.identifier,
            "type": "message",
            "role": "assistant",
            "model": head.model,
        }
        self._begun = False
        self._blocks = 0
        self._open = ""
        """The type of the block that is open."""
        self._text_delta = b""
        """The beginning of a delta of the text that is open."""
        self._held: str | None = None
        """The open tool's arguments as long as they may not be a JSON object: they are not shown. None once they are
        one."""

    def piece(
        self,
        index: int,
        said: str | ParsedAnswer,
        sample: Sample = Sample(),  # noqa: B008  # immutable
        ending: ChoiceEnd | None = None,
        usage: tuple[int, int] | None = None,
        prompt_ids: Sequence[int] | None = None,
    ) -> bytes:
        if type(said) is str and self._text_delta:
            return b"%b%b}}\n\n" % (self._text_delta, _json(said)) if said else b""
        events = [] if self._begun else [self._begin()]
        if isinstance(said, str):
            said = ParsedAnswer(said)
        events += [self._using(call.arguments) for call in said.tool_calls if not call.begins]
        if said.reasoning:
            events.append(self._opened("thinking", {"thinking": "", "signature": ""}))
            events.append(self._delta("thinking_delta", thinking=said.reasoning))
        if said.content:
            events.append(self._opened("text", {"text": ""}))
            events.append(b"%b%b}}\n\n" % (self._text_delta, _json(said.content)))
        for call in said.tool_calls:
            if call.begins:
                events.append(self._close())
                events.append(self._opened("tool_use", {"id": call.id, "name": call.name, "input": {}}))
                self._held = ""
                events.append(self._using(call.arguments))
        return b"".join(events)

    def end(self, choices: Sequence[Answered], prompt_tokens: int, completion_tokens: int) -> bytes:
        (answered,) = choices
        events = [
            self._close(),
            _event("message_delta", delta=_stopped(answered), usage=_usage(prompt_tokens, completion_tokens)),
            _event("message_stop"),
        ]
        return b"".join(events)

    def whole(self, choices: Sequence[Answered], prompt_tokens: int, completion_tokens: int) -> bytes:
        (answered,) = choices
        said, blocks = answered.said, list[dict[str, Any]]()
        if said.reasoning:
            blocks.append({"type": "thinking", "thinking": said.reasoning, "signature": self._shell["id"]})
        if said.content:
            blocks.append({"type": "text", "text": said.content})
        blocks += [_tool_use(call) for call in said.tool_calls]
        usage = _usage(prompt_tokens, completion_tokens)
        return _json({**self._shell, "content": blocks, **_stopped(answered), "usage": usage})

    def failed(self, error: FrontError) -> bytes:
        return _event("error", error=errors.told(error))

    def _begin(self) -> bytes:
        self._begun = True
        nothing = {"content": [], "stop_reason": None, "stop_sequence": None, "usage": _usage(self._prompt_tokens, 0)}
        return _event("message_start", message={**self._shell, **nothing})

    def _opened(self, kind: str, block: dict[str, Any]) -> bytes:
        """A block of this type is open, behind what was."""
        if self._open == kind:
            return b""
        closed, number = self._close(), self._blocks
        self._open = kind
        self._blocks += 1
        if kind == "text":
            at = b'{"type":"content_block_delta","index":%d,"delta":{"type":"text_delta","text":' % number
            self._text_delta = b"event: content_block_delta\ndata: " + at
        return closed + _event("content_block_start", index=number, content_block={"type": kind, **block})

    def _using(self, arguments: str) -> bytes:
        """What is added to the arguments of the tool that is open."""
        if self._held is not None:
            arguments = self._held = self._held + arguments
            if not arguments.lstrip().startswith("{"):
                return b""
            self._held = None
        return self._delta("input_json_delta", partial_json=arguments) if arguments else b""

    def _close(self) -> bytes:
        kind, self._open, self._text_delta = self._open, "", b""
        if not kind:
            return b""
        events: list[bytes] = []
        if kind == "thinking":
            events.append(self._delta("signature_delta", signature=self._shell["id"]))
        if kind == "tool_use" and self._held and self._held.strip():
            events.append(self._delta("input_json_delta", partial_json=_json({UNREAD: self._held}).decode()))
        return b"".join([*events, _event("content_block_stop", index=self._blocks - 1)])

    def _delta(self, kind: str, **more: Any) -> bytes:
        return _event("content_block_delta", index=self._blocks - 1, delta={"type": kind, **more})


def _event(kind: str, **more: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), _json({"type": kind, **more}))


def _tool_use(call: CallDelta) -> dict[str, Any]:
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": _input(call.arguments)}


def _input(arguments: str) -> Any:
    """The object that arguments are, as the model has written it."""
    if not arguments.strip():
        return {}
    try:
        reads = isinstance(msgspec.json.decode(arguments), dict)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        reads = False
    return msgspec.Raw(arguments.encode()) if reads else {UNREAD: arguments}


def _stopped(answered: Answered) -> dict[str, Any]:
    finish, reason = answered.ending
    if finish == "length":
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if isinstance(reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": reason}
    return {"stop_reason": "tool_use" if answered.said.tool_calls else "end_turn", "stop_sequence": None}


def _usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    return {
        "input_tokens": prompt_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
        "output_tokens": completion_tokens,
    }
