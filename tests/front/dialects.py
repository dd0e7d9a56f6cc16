"""What clients of the Responses API and of the Messages API make of streams, and send back of answers."""

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

Event = dict[str, Any]


def events_of(stream: bytes) -> list[Event]:
    """The events of a whole stream, each named as its data is."""
    *whole, rest = stream.decode().split("\n\n")
    assert rest == ""
    found: list[Event] = []
    for event in whole:
        if event.startswith(":"):
            continue
        name, data = event.split("\n")
        said = json.loads(data.removeprefix("data: "))
        assert name == f"event: {said['type']}"
        found.append(said)
    return found


RESPONSE_ORDER = re.compile(
    r"created in_progress "
    r"((output_item.added (content_part.added )?|reasoning_text.delta |output_text.delta "
    r"|function_call_arguments.delta |reasoning_text.done content_part.done output_item.done "
    r"|function_call_arguments.done output_item.done |output_text.done content_part.done output_item.done ))*"
    r"(completed|incomplete|failed error) "
)


def read_response(events: Iterable[Event]) -> dict[str, Any]:
    """The response that a stream ends with, which is what its deltas add up to."""
    items: dict[int, dict[str, Any]] = {}
    text: dict[int, str] = {}
    done: set[int] = set()
    names = ""
    last: Event = {}
    for number, event in enumerate(events):
        assert event["sequence_number"] == number
        names += event["type"].removeprefix("response.") + " "
        last = event
        at = event.get("output_index", -1)
        if at >= 0:
            assert at not in done
        match event["type"].split("."):
            case [_, "output_item", "added"]:
                assert at == len(items)
                items[at], text[at] = event["item"], ""
            case [_, "output_item", "done"]:
                assert event["item"]["id"] == items[at]["id"]
                items[at] = event["item"]
                assert text[at] == said_in(event["item"])
                done.add(at)
            case [_, _, "delta"]:
                assert event["item_id"] == items[at]["id"]
                text[at] += event["delta"]
            case [_, "output_text" | "reasoning_text", "done"]:
                assert event["text"] == text[at]
            case [_, "function_call_arguments", "done"]:
                assert event["arguments"] == text[at]
            case _:
                pass
    assert RESPONSE_ORDER.fullmatch(names), names
    if last["type"] == "error":
        return last
    assert done == set(items)
    response = last["response"]
    assert response["output"] == [items[at] for at in sorted(items)]
    assert last["type"] == f"response.{response['status']}"
    return response


def said_in(item: Mapping[str, Any]) -> str:
    if item["type"] == "function_call":
        return item["arguments"]
    return "".join(part["text"] for part in item["content"])


MESSAGE_ORDER = re.compile(
    r"message_start (content_block_start (content_block_delta )*content_block_stop )*message_delta message_stop "
)


def read_message(events: Iterable[Event]) -> dict[str, Any]:
    """The message that a stream adds up to."""
    message: dict[str, Any] = {}
    blocks: list[dict[str, Any]] = []
    inputs: dict[int, str] = {}
    names = ""
    for event in events:
        names += event["type"] + " "
        match event["type"]:
            case "message_start":
                message = event["message"]
                assert message["content"] == []
            case "content_block_start":
                assert event["index"] == len(blocks)
                blocks.append(event["content_block"])
                inputs[event["index"]] = ""
            case "content_block_delta":
                assert event["index"] == len(blocks) - 1
                delta = event["delta"]
                match delta["type"]:
                    case "text_delta":
                        blocks[-1]["text"] += delta["text"]
                    case "thinking_delta":
                        blocks[-1]["thinking"] += delta["thinking"]
                    case "signature_delta":
                        blocks[-1]["signature"] = delta["signature"]
                    case "input_json_delta":
                        inputs[event["index"]] += delta["partial_json"]
                    case other:
                        raise AssertionError(other)
            case "message_delta":
                message |= event["delta"]
                message["usage"] = event["usage"]
            case _:
                pass
    assert MESSAGE_ORDER.fullmatch(names), names
    for number, said in inputs.items():
        if said:
            assert blocks[number]["type"] == "tool_use"
            blocks[number]["input"] = json.loads(said)
    message["content"] = blocks
    return message
