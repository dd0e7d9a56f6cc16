"""Answers of OpenAI's Responses API: whole, and as events.

An answer has an item for its reasoning, one for its text, and one for each call of a function; without calls there is
always one for the text. A stream has these events, each with its `sequence_number`:

- `response.created` and `response.in_progress`, with the first piece;
- `response.output_item.added` as an item begins, and then what is added to it. Reasoning and calls are done when
  something else begins, the text is done at the end;
- `response.completed` or `response.incomplete` with the whole answer; or `response.failed` and then `error`, for which
  OpenAI's clients raise an error.

Most of a text's delta is the same for all of a stream, so it is made once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from elastic.protocol.openai.answers import (
    Answered,
    AnswerHead,
    CallDelta,
    ChoiceEnd,
    ParsedAnswer,
    Sample,
)
from elastic.protocol.openai.errors import FrontError
from elastic.protocol.openai.responses import RESPONSE_ID, ResponseRequest

_json = msgspec.json.encode
_DONE = "completed"
_UNTIL_THEN = "in_progress"


def told_again(body: ResponseRequest, fields: Mapping[str, Any]) -> dict[str, Any]:
    """What a response says of the request that it answers; `fields` are those of the request's body."""
    return {
        "background": False,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": metadata if isinstance(metadata := fields.get("metadata"), dict) else {},
        "parallel_tool_calls": body.parallel_tool_calls,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": body.reasoning.effort, "summary": None},
        "store": body.store,
        "temperature": body.temperature,
        "text": {"format": {"type": "text"}},
        "tool_choice": body.tool_choice,
        "tools": fields.get("tools") or [],
        "top_p": body.top_p,
        "truncation": "disabled",
        "user": fields.get("user"),
    }


@dataclass(slots=True)
class _StreamedItem:
    """An item of a stream: its place in the output, and what it has so far."""

    index: int
    item: dict[str, Any]
    parts: list[str] = field(default_factory=list[str])


class ResponseWriter:
    """Writes one response, which has one choice. `request` is what it tells of its request."""

    def __init__(self, head: AnswerHead, request: Mapping[str, Any]) -> None:
        self._name = head.identifier
        self._shell: dict[str, Any] = {
            "id": RESPONSE_ID + head.identifier,
            "object": "response",
            "created_at": head.created_s,
            "model": head.model,
            **request,
        }
        self._sequence = 0
        self._items: list[_StreamedItem] = []
        self._text: _StreamedItem | None = None
        self._text_delta = b""
        self._open: _StreamedItem | None = None
        """Reasoning, or a call, that is not done."""

    def piece(
        self,
        index: int,
        said: str | ParsedAnswer,
        sample: Sample = Sample(),  # noqa: B008  # immutable
        ending: ChoiceEnd | None = None,
        usage: tuple[int, int] | None = None,
        prompt_ids: Sequence[int] | None = None,
    ) -> bytes:
        if type(said) is str and self._text_delta and self._open is None:
            return self._said(said) if said else b""
        events = [] if self._sequence else [self._begun()]
        if isinstance(said, str):
            said = ParsedAnswer(said)
        events += [self._calling(call) for call in said.tool_calls if not call.begins]
        if said.reasoning:
            events += self._thinking(said.reasoning)
        if said.content:
            events += self._saying(said.content)
        for call in said.tool_calls:
            if call.begins:
                events += self._begin_call(call)
        return b"".join(events)

    def end(self, choices: Sequence[Answered], prompt_tokens: int, completion_tokens: int) -> bytes:
        (answered,) = choices
        events = [self._close()]
        if self._text is None and not answered.said.tool_calls:
            events += self._begin_text()
        if self._text is not None:
            events += self._end_text(self._text, answered.said.content)
        output = [streamed.item for streamed in self._items]
        whole = self._whole(output, answered.ending, prompt_tokens, completion_tokens)
        events.append(self._event(f"response.{whole['status']}", response=whole))
        return b"".join(events)

    def whole(self, choices: Sequence[Answered], prompt_tokens: int, completion_tokens: int) -> bytes:
        (answered,) = choices
        said, output = answered.said, list[dict[str, Any]]()
        if said.reasoning:
            output.append(self._reasoning_item(0, said.reasoning))
        if said.content or not said.tool_calls:
            output.append(self._text_item(said.content))
        output += [self._call_item(call, call.arguments) for call in said.tool_calls]
        return _json(self._whole(output, answered.ending, prompt_tokens, completion_tokens))

    def failed(self, error: FrontError) -> bytes:
        """The last events of a stream that cannot go on."""
        output = [streamed.item for streamed in self._items]
        response = self._response("failed", output) | {"error": {"code": "server_error", "message": error.said}}
        ended = self._event("response.failed", response=response)
        return ended + self._event("error", code=error.code, message=error.said, param=error.param, error=error.told())

    # The events of items.

    def _begun(self) -> bytes:
        response = self._response(_UNTIL_THEN, [])
        created = self._event("response.created", response=response)
        return created + self._event("response.in_progress", response=response)

    def _thinking(self, reasoning: str) -> list[bytes]:
        events: list[bytes] = []
        if (item := self._open) is None or item.item["type"] != "reasoning":
            events.append(self._close())
            item = self._open = self._added(self._reasoning_item(len(self._items)))
            events.append(self._item_event("added", item))
            part = {"type": "reasoning_text", "text": ""}
            events.append(self._part_event("response.content_part.added", item, part=part))
        item.parts.append(reasoning)
        events.append(self._part_event("response.reasoning_text.delta", item, delta=reasoning))
        return events

    def _saying(self, content: str) -> list[bytes]:
        events = [self._close()]
        if self._text is None:
            events += self._begin_text()
        events.append(self._said(content))
        return events

    def _said(self, content: str) -> bytes:
        self._sequence += 1
        return b'%b%d,"delta":%b}\n\n' % (self._text_delta, self._sequence - 1, _json(content))

    def _begin_text(self) -> list[bytes]:
        item = self._text = self._added({**self._text_item(""), "status": _UNTIL_THEN, "content": []})
        at = _json({"item_id": item.item["id"], "output_index": item.index, "content_index": 0, "logprobs": []})
        kind = b"response.output_text.delta"
        self._text_delta = b'event: %b\ndata: {"type":"%b",%b,"sequence_number":' % (kind, kind, at[1:-1])
        part = _output_text("")
        return [self._item_event("added", item), self._part_event("response.content_part.added", item, part=part)]

    def _end_text(self, item: _StreamedItem, content: str) -> list[bytes]:
        item.item = self._text_item(content)
        return [
            self._part_event("response.output_text.done", item, text=content, logprobs=[]),
            self._part_event("response.content_part.done", item, part=_output_text(content)),
            self._item_event("done", item),
        ]

    def _begin_call(self, call: CallDelta) -> list[bytes]:
        closed = self._close()
        item = self._open = self._added({**self._call_item(call, ""), "status": _UNTIL_THEN})
        events = [closed, self._item_event("added", item)]
        if call.arguments:
            events.append(self._calling(call))
        return events

    def _calling(self, call: CallDelta) -> bytes:
        item = self._open
        assert item is not None
        item.parts.append(call.arguments)
        return self._of_item("response.function_call_arguments.delta", item, delta=call.arguments)

    def _close(self) -> bytes:
        """What is open is done."""
        item, self._open = self._open, None
        if item is None:
            return b""
        said = "".join(item.parts)
        if item.item["type"] == "reasoning":
            item.item = self._reasoning_item(item.index, said)
            part = {"type": "reasoning_text", "text": said}
            events = [
                self._part_event("response.reasoning_text.done", item, text=said),
                self._part_event("response.content_part.done", item, part=part),
            ]
        else:
            item.item = {**item.item, "arguments": said, "status": _DONE}
            named = item.item["name"]
            events = [self._of_item("response.function_call_arguments.done", item, name=named, arguments=said)]
        return b"".join([*events, self._item_event("done", item)])

    def _added(self, item: dict[str, Any]) -> _StreamedItem:
        added = _StreamedItem(len(self._items), item)
        self._items.append(added)
        return added

    def _item_event(self, what: str, item: _StreamedItem) -> bytes:
        return self._event(f"response.output_item.{what}", output_index=item.index, item=item.item)

    def _part_event(self, kind: str, item: _StreamedItem, **more: Any) -> bytes:
        return self._of_item(kind, item, content_index=0, **more)

    def _of_item(self, kind: str, item: _StreamedItem, **more: Any) -> bytes:
        return self._event(kind, item_id=item.item["id"], output_index=item.index, **more)

    def _event(self, kind: str, **more: Any) -> bytes:
        told = _json({"type": kind, "sequence_number": self._sequence, **more})
        self._sequence += 1
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), told)

    # Items and the response.

    def _reasoning_item(self, index: int, said: str = "") -> dict[str, Any]:
        content = [{"type": "reasoning_text", "text": said}] if said else []
        return {"id": f"rs_{self._name}-{index}", "type": "reasoning", "summary": [], "content": content}

    def _text_item(self, content: str) -> dict[str, Any]:
        return {
            "id": f"msg_{self._name}",
            "type": "message",
            "role": "assistant",
            "status": _DONE,
            "content": [_output_text(content)],
        }

    def _call_item(self, call: CallDelta, arguments: str) -> dict[str, Any]:
        return {
            "id": f"fc_{self._name}-{call.index}",
            "type": "function_call",
            "status": _DONE,
            "call_id": call.id,
            "name": call.name,
            "arguments": arguments,
        }

    def _whole(
        self, output: Sequence[dict[str, Any]], ending: ChoiceEnd, prompt_tokens: int, completion_tokens: int
    ) -> dict[str, Any]:
        cut = ending.finish == "length"
        return self._response("incomplete" if cut else _DONE, output) | {
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "usage": {
                "input_tokens": prompt_tokens,
                "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                "output_tokens": completion_tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": prompt_tokens + completion_tokens,
            },
        }

    def _response(self, status: str, output: Sequence[dict[str, Any]]) -> dict[str, Any]:
        more = {"status": status, "error": None, "incomplete_details": None, "output": output, "usage": None}
        return self._shell | more


def _output_text(content: str) -> dict[str, Any]:
    return {"type": "output_text", "text": content, "annotations": [], "logprobs": []}
