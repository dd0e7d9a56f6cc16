"""Anthropic's client: messages whole and streamed, a tool, and how many tokens there are."""

import importlib
from typing import Any

from _told import ADD, MODEL, QUESTION, added, made, valid


def main() -> None:
    client = importlib.import_module("anthropic").Anthropic()
    tools: list[Any] = [{"name": ADD["name"], "description": ADD["description"], "input_schema": ADD["parameters"]}]
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    more: dict[str, Any] = {"model": MODEL, "system": "You are a helpful assistant.", "tools": tools}
    counted = client.messages.count_tokens(messages=messages, **more)
    answer = client.messages.create(messages=messages, max_tokens=200, **more)
    (block,) = (block for block in answer.content if block.type == "tool_use")
    made("tokens counted", valid=valid(counted), same=counted.input_tokens == answer.usage.input_tokens)
    made(
        "message with a tool",
        answer.id,
        tool=(block.name, block.input),
        valid=valid(answer),
        stop=answer.stop_reason == "tool_use",
    )
    result = {"type": "tool_result", "tool_use_id": block.id, "content": added(block.input)}
    messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
    with client.messages.stream(messages=messages, max_tokens=200, **more) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    made(
        "streamed message",
        final.id,
        text=text,
        valid=valid(final),
        stop=final.stop_reason == "end_turn",
        whole="".join(block.text for block in final.content) == text,
    )
    messages += [{"role": "assistant", "content": final.content}, {"role": "user", "content": "And once more?"}]
    events = list(client.messages.create(messages=messages, max_tokens=200, stream=True, **more))
    deltas = [event.delta.text for event in events if event.type == "content_block_delta"]
    made(
        "events of a message",
        events[0].message.id,
        text="".join(deltas),
        valid=all(map(valid, events)),
        ends=events[-1].type == "message_stop",
    )
    with client.messages.stream(messages=[{"role": "user", "content": QUESTION}], max_tokens=200, **more) as stream:
        inputs = [event.snapshot for event in stream if event.type == "input_json"]
        final = stream.get_final_message()
    (block,) = (block for block in final.content if block.type == "tool_use")
    made(
        "streamed tool",
        final.id,
        tool=(block.name, block.input),
        valid=valid(final),
        snapshot=inputs[-1] == block.input,
    )


if __name__ == "__main__":
    main()
