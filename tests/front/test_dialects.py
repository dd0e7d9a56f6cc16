"""Answers of the Responses API and of the Messages API: sent back, they are the messages that were answered with."""

import contextlib
import json
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.front.history import packed, unpacked
from elastic.front.rendering.messages import chain, head_digest
from elastic.protocol.anthropic.answers import MessageWriter
from elastic.protocol.anthropic.bodies import BILLING, BLOCKS, MESSAGES, MessagesRequest
from elastic.protocol.openai import bodies
from elastic.protocol.openai.answers import (
    Answered,
    AnswerHead,
    AnswerWriter,
    CallDelta,
    ChoiceEnd,
    ParsedAnswer,
    Sample,
)
from elastic.protocol.openai.errors import FrontError
from elastic.protocol.openai.response_answers import ResponseWriter, told_again
from elastic.protocol.openai.responses import ITEMS, RESPONSE, ResponseRequest, flattened
from tests.front.dialects import events_of, read_message, read_response

HEAD = AnswerHead("0-0-0-1", "tiny", 17, 5)
CHAIN = head_digest(None, {})
texts = st.text(st.characters(codec="utf-8"), max_size=8)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=4,
)
arguments = st.dictionaries(texts, values, max_size=3).map(json.dumps) | st.sampled_from(["", "{}", " {} "])
said = st.builds(
    lambda content, reasoning, calls: ParsedAnswer(
        content, reasoning, tuple(CallDelta(n, f"call_{n}", "look", one) for n, one in enumerate(calls))
    ),
    texts,
    texts,
    st.lists(arguments, max_size=3),
)
conversations = st.lists(st.tuples(texts, said), min_size=1, max_size=3)


def response_writer() -> ResponseWriter:
    body = bodies.read(ResponseRequest, {"input": "x"}, RESPONSE)
    return ResponseWriter(HEAD, told_again(body, {}))


def message_writer() -> MessageWriter:
    return MessageWriter(HEAD)


def answered(answer: ParsedAnswer, ending: ChoiceEnd | None = None) -> Answered:
    finish = ChoiceEnd("tool_calls" if answer.tool_calls else "stop")
    return Answered(answer, Sample([1, 2, 3]), ending or finish)


def whole(writer: AnswerWriter, answer: ParsedAnswer, ending: ChoiceEnd | None = None) -> dict[str, Any]:
    return json.loads(writer.whole([answered(answer, ending)], 5, 3))


def cut(text: str, draw: random.Random) -> list[str]:
    """The text in pieces, of which none is empty."""
    pieces: list[str] = []
    while text:
        size = draw.randint(1, len(text))
        pieces.append(text[:size])
        text = text[size:]
    return pieces


def pieces(answer: ParsedAnswer, draw: random.Random) -> list[str | ParsedAnswer]:
    """The answer as parsers give it, piece by piece; calls may come before the text, or within it."""
    parts: list[str | ParsedAnswer] = [ParsedAnswer(reasoning=text) for text in cut(answer.reasoning, draw)]
    content = [draw.choice([text, ParsedAnswer(text)]) for text in cut(answer.content, draw)]
    for call in answer.tool_calls:
        while content and draw.random() < 0.5:
            parts.append(content.pop(0))
        begun, *rest = cut(call.arguments, draw) or [""]
        parts.append(ParsedAnswer(tool_calls=(CallDelta(call.index, call.id, call.name, begun),)))
        parts += [ParsedAnswer(tool_calls=(CallDelta(call.index, arguments=more),)) for more in rest]
    joined: list[str | ParsedAnswer] = []
    for part in [*parts, *content]:
        # What was fed at once comes at once.
        if joined and draw.random() < 0.2 and may_join(joined[-1], part):
            joined[-1] = plus(joined[-1], part)
        else:
            joined.append(part)
    return joined


def may_join(one: str | ParsedAnswer, other: str | ParsedAnswer) -> bool:
    """A piece is shown as reasoning, content, and calls that begin."""
    return not (as_parsed(one).tool_calls or any(not call.begins for call in as_parsed(other).tool_calls)) and not (
        as_parsed(one).content and as_parsed(other).reasoning
    )


def as_parsed(piece: str | ParsedAnswer) -> ParsedAnswer:
    return ParsedAnswer(piece) if isinstance(piece, str) else piece


def plus(one: str | ParsedAnswer, other: str | ParsedAnswer) -> ParsedAnswer:
    return as_parsed(one).plus(as_parsed(other))


def streamed(writer: AnswerWriter, answer: ParsedAnswer, draw: random.Random, ending: ChoiceEnd | None = None) -> bytes:
    last = answered(answer, ending)
    *parts, rest = [*pieces(answer, draw), ""]
    events = [writer.piece(0, part) for part in parts]
    return b"".join([*events, writer.piece(0, rest, ending=last.ending), writer.end([last], 5, 3)])


def items_sent_back(answer: ParsedAnswer, draw: random.Random) -> list[dict[str, Any]]:
    if draw.random() < 0.5:
        output = whole(response_writer(), answer)["output"]
    else:
        output = read_response(events_of(streamed(response_writer(), answer, draw)))["output"]
    if draw.random() < 0.5:
        output = [item for item in output if item["type"] != "reasoning"]
    for item in output:
        if item["type"] == "reasoning" and draw.random() < 0.5:
            item.update(summary=None, content=None, encrypted_content=None)
    for item in output:
        if item["type"] == "message" and draw.random() < 0.3:
            item["content"] = item["content"][0]["text"]
            del item["type"], item["id"]
    return output


def blocks_sent_back(answer: ParsedAnswer, draw: random.Random) -> list[dict[str, Any]] | str:
    if draw.random() < 0.5:
        blocks = whole(message_writer(), answer)["content"]
    else:
        blocks = read_message(events_of(streamed(message_writer(), answer, draw)))["content"]
    if draw.random() < 0.5:
        blocks = [block for block in blocks if block["type"] != "thinking"]
    if len(blocks) == 1 and blocks[0]["type"] == "text" and draw.random() < 0.5:
        return blocks[0]["text"]
    return blocks


def as_chat(conversation: Sequence[tuple[str, ParsedAnswer]]) -> list[dict[str, Any]]:
    """With a result of each call, and a last question."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": "Be brief."}]
    for question, answer in conversation:
        messages.append({"role": "user", "content": question})
        messages.append(answer.message())
        messages += [{"role": "tool", "tool_call_id": call.id, "content": "done"} for call in answer.tool_calls]
    return [*messages, {"role": "user", "content": "And?"}]


def responses_body(conversation: Sequence[tuple[str, ParsedAnswer]], draw: random.Random) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    for question, answer in conversation:
        part = {"type": "input_text", "text": question}
        items.append({"role": "user", "content": draw.choice([question, [part]])})
        items += items_sent_back(answer, draw)
        for call in answer.tool_calls:
            output = draw.choice(["done", [{"type": "input_text", "text": "do"}, {"type": "input_text", "text": "ne"}]])
            items.append({"type": "function_call_output", "call_id": call.id, "output": output})
    return [*items, {"role": "user", "content": "And?"}]


def messages_body(conversation: Sequence[tuple[str, ParsedAnswer]], draw: random.Random) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []

    def ask(text: str) -> None:
        content = [*results, {"type": "text", "text": text, "cache_control": {"type": "ephemeral"}}]
        messages.append({"role": "user", "content": draw.choice([content, text]) if not results else content})
        results.clear()

    for question, answer in conversation:
        ask(question)
        messages.append({"role": "assistant", "content": blocks_sent_back(answer, draw)})
        for call in answer.tool_calls:
            text = draw.choice(["done", [{"type": "text", "text": "done"}]])
            results.append({"type": "tool_result", "tool_use_id": call.id, "content": text, "is_error": False})
    ask("And?")
    return messages


def read_items(items: list[dict[str, Any]], **more: Any) -> ResponseRequest:
    return bodies.read(ResponseRequest, flattened({"input": items, **more}), RESPONSE)


def read_blocks(messages: list[dict[str, Any]], **more: Any) -> MessagesRequest:
    return bodies.read(MessagesRequest, {"messages": messages, **more}, MESSAGES)


@given(conversations, st.randoms(use_true_random=False))
def test_a_conversation_is_the_same_in_every_dialect(
    conversation: list[tuple[str, ParsedAnswer]], draw: random.Random
) -> None:
    chat = chain(CHAIN, as_chat(conversation))
    system = {"role": "system", "content": "Be brief."}
    assert chain(CHAIN, [system, *read_items(responses_body(conversation, draw)).messages()]) == chat
    told = draw.choice(["Be brief.", [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]])
    assert chain(CHAIN, read_blocks(messages_body(conversation, draw), system=told).chat_messages()) == chat


@given(said, st.randoms(use_true_random=False))
def test_a_stream_adds_up_to_the_whole_answer(answer: ParsedAnswer, draw: random.Random) -> None:
    streamed_response = read_response(events_of(streamed(response_writer(), answer, draw)))
    one = whole(response_writer(), answer)
    # In a stream a call may come before the text.
    assert sorted(streamed_response.pop("output"), key=lambda item: item["id"]) == sorted(
        one.pop("output"), key=lambda item: item["id"]
    )
    assert streamed_response == one
    message, other = read_message(events_of(streamed(message_writer(), answer, draw))), whole(message_writer(), answer)
    assert joined_text(message.pop("content")) == joined_text(other.pop("content"))
    assert message == other


def joined_text(blocks: list[dict[str, Any]]) -> list[Any]:
    text = "".join(block["text"] for block in blocks if block["type"] == "text")
    return [text, *(block for block in blocks if block["type"] != "text")]


@given(conversations)
def test_a_history_is_kept_as_it_is(conversation: list[tuple[str, ParsedAnswer]]) -> None:
    chat = [*as_chat(conversation), {"role": "user", "content": "\ud800"}]
    assert unpacked([packed(chat[:2]), packed(chat[2:])]) == chat


def test_what_is_too_much_is_not_kept() -> None:
    said = [{"role": "user", "content": random.Random(0).randbytes(1000).hex()}]
    assert packed(said, 500) == b""
    assert packed(said, 1500) == packed(said) != b""


@pytest.mark.parametrize(
    ("ending", "status", "stopped"),
    [
        (ChoiceEnd("stop"), "completed", ("end_turn", None)),
        (ChoiceEnd("stop", 7), "completed", ("end_turn", None)),
        (ChoiceEnd("stop", "END"), "completed", ("stop_sequence", "END")),
        (ChoiceEnd("length"), "incomplete", ("max_tokens", None)),
    ],
)
def test_why_an_answer_ends(ending: ChoiceEnd, status: str, stopped: tuple[str, str | None]) -> None:
    for draw in map(random.Random, range(5)):
        answer = ParsedAnswer("so be it")
        for response in (
            whole(response_writer(), answer, ending),
            read_response(events_of(streamed(response_writer(), answer, draw, ending))),
        ):
            cut_off = {"reason": "max_output_tokens"} if status == "incomplete" else None
            assert (response["status"], response["incomplete_details"]) == (status, cut_off)
            assert response["usage"]["total_tokens"] == 8
        for message in (
            whole(message_writer(), answer, ending),
            read_message(events_of(streamed(message_writer(), answer, draw, ending))),
        ):
            assert (message["stop_reason"], message["stop_sequence"]) == stopped
            assert (message["usage"]["input_tokens"], message["usage"]["output_tokens"]) == (5, 3)


@pytest.mark.parametrize("said", ['{"a": 1', "[1]", "no JSON", '{"a": NaN}', '"{}"'])
def test_arguments_that_are_no_object_are_shown_and_never_another_call(said: str) -> None:
    """Sent back they are a branch of their own."""
    answer = ParsedAnswer(tool_calls=(CallDelta(0, "c", "look", said),))
    recorded = chain(CHAIN, [answer.message()])
    (item,) = whole(response_writer(), answer)["output"]
    assert chain(CHAIN, read_items([item]).messages()) == recorded
    (block,) = whole(message_writer(), answer)["content"]
    assert block["input"] == {"arguments": said}
    assert chain(CHAIN, read_blocks([{"role": "assistant", "content": [block]}]).chat_messages()) != recorded


def test_a_stream_that_fails_says_so_in_its_clients_words() -> None:
    error = FrontError(503, "no worker came", code="no_capacity")
    response = response_writer()
    events = events_of(response.piece(0, "a") + response.failed(error))
    assert [event["type"] for event in events[-2:]] == ["response.failed", "error"]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    failed, last = events[-2:]
    assert (failed["response"]["status"], failed["response"]["error"]["code"]) == ("failed", "server_error")
    assert (last["message"], last["code"], last["error"]["message"]) == (
        "no worker came",
        "no_capacity",
        "no worker came",
    )
    message = message_writer()
    *_, last = events_of(message.piece(0, "a") + message.failed(error))
    assert last == {"type": "error", "error": {"type": "overloaded_error", "message": "no worker came"}}


# What is asked for.


def refused(read: Callable[..., Any], **fields: Any) -> FrontError:
    with pytest.raises(FrontError) as refusal:
        read(**fields)
    assert refusal.value.status == 400
    assert str(refusal.value).startswith(f"{refusal.value.param}:")
    return refusal.value


def asks_response(**fields: Any) -> Any:
    body = bodies.read(ResponseRequest, flattened({"input": "hi", **fields}), RESPONSE)
    return body.behind, body.messages(), body.chat_tools()


def asks_messages(**fields: Any) -> Any:
    body = bodies.read(MessagesRequest, {"messages": [{"role": "user", "content": "hi"}], **fields}, MESSAGES)
    return body.chat_messages(), body.chat_tools(), body.template_kwargs()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {}}}}, "text.format"),
        ({"text": "x"}, "text"),
        ({"truncation": "auto"}, "truncation"),
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"include": ["message.output_text.logprobs"]}, "include"),
        ({"context_management": [{"type": "compaction"}]}, "context_management"),
        ({"n": 2}, "n"),
        ({"top_logprobs": 1}, "top_logprobs"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "f"}}, "tool_choice"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"tools": [{"type": "function"}]}, "tools.0.name"),
        ({"tools": [{"type": "function", "name": "f", "parameters": {"type": "text"}}]}, "tools.0.parameters.type"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"previous_response_id": "chatcmpl-1"}, "previous_response_id"),
        ({"previous_response_id": "resp_"}, "previous_response_id"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input.0.type"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input.0.role"),
        ({"input": [{"role": "user"}]}, "input.0.content"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input.0.call_id"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:"}]}]},
            "input.0.content.0.type",
        ),
        (
            {"input": [{"type": "function_call_output", "call_id": "c", "output": [{"type": "input_file"}]}]},
            "input.0.output.0.type",
        ),
    ],
)
def test_what_a_response_cannot_have(fields: Any, param: str) -> None:
    assert refused(asks_response, **fields).param == param


def test_what_changes_no_response_is_passed_over() -> None:
    plain = asks_response()
    assert plain == ("", [{"role": "user", "content": "hi"}], None)
    harmless = {
        "metadata": {"a": "b"},
        "include": ["reasoning.encrypted_content"],
        "text": {"format": {"type": "text"}, "verbosity": "low"},
        "truncation": "disabled",
        "service_tier": "auto",
        "prompt_cache_key": "k",
        "user": "me",
        "max_tool_calls": 3,
        "store": False,
        "stream_options": {"include_obfuscation": False},
        "unheard_of": {"x": 1},
    }
    assert asks_response(**harmless) == plain


def test_tools_of_a_response_are_a_chats() -> None:
    tool = {"type": "function", "name": "f", "description": "d", "parameters": {"type": "object"}, "strict": True}
    function = {"name": "f", "description": "d", "parameters": {"type": "object"}}
    assert asks_response(tools=[tool])[2] == [{"type": "function", "function": function}]
    tool = {"name": "f", "description": "d", "input_schema": {"type": "object"}, "cache_control": {"type": "ephemeral"}}
    assert asks_messages(tools=[tool])[1] == [{"type": "function", "function": function}]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages.0.content.0.type"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_use"}]}]}, "messages.0.content.0.type"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content.0.text"),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [{"type": "tool_result", "tool_use_id": "t", "content": [{"type": "image"}]}],
                    }
                ]
            },
            "messages.0.content.0.content.0.type",
        ),
        ({"system": 5}, "system"),
        ({"tool_choice": {"type": "any"}}, "tool_choice.type"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0.type"),
        ({"tools": [{"name": "f", "input_schema": {"type": "text"}}]}, "tools.0.input_schema.type"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {}}}}, "output_config.format"),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management.edits.0.type"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
        ({"stop_sequences": "x"}, "stop_sequences"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"n": 2}, "n"),
    ],
)
def test_what_a_message_cannot_have(fields: Any, param: str) -> None:
    assert refused(asks_messages, **fields).param == param


def test_what_changes_no_message_is_passed_over() -> None:
    plain = asks_messages()
    assert plain == ([{"role": "user", "content": "hi"}], None, {})
    harmless = {
        "metadata": {"user_id": "me"},
        "service_tier": "auto",
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "cache_control": {"type": "ephemeral"},
        "system": [{"type": "text", "text": f"{BILLING}: cc_version=2.1; cch=0;"}],
        "unheard_of": 1,
    }
    assert asks_messages(**harmless) == plain
    assert asks_messages(thinking={"type": "disabled"})[2] == {"enable_thinking": False}
    assert asks_messages(output_config={"effort": "low"})[2] == {"reasoning_effort": "low"}


junk = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 2**64) | texts,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["type", "role", "content", "text", "id", "name", "input", "summary", "arguments", "call_id"]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=8,
)
kinds = st.sampled_from(
    [*ITEMS, "text", "thinking", "redacted_thinking", "tool_use", "tool_result", "input_text", "refusal", "function"]
)
parts = st.lists(
    st.fixed_dictionaries(
        {"type": kinds},
        optional={
            "role": st.sampled_from(["user", "assistant", "system", "tool"]),
            **dict.fromkeys(("content", "text", "input", "output", "name", "id", "call_id", "tool_use_id"), junk),
            **dict.fromkeys(("thinking", "arguments", "summary", "refusal"), junk),
        },
    ),
    max_size=3,
)
response_fields = st.dictionaries(
    st.sampled_from([*ResponseRequest.__struct_fields__, "text", "include", "store"]), junk | parts, max_size=4
)
message_fields = st.dictionaries(
    st.sampled_from([*MessagesRequest.__struct_fields__, "container", "mcp_servers"]), junk | parts, max_size=4
)


@given(response_fields, message_fields, st.lists(st.tuples(st.sampled_from(list(BLOCKS)), junk | parts), max_size=3))
def test_whatever_is_sent_is_read_or_refused(
    asks: dict[str, Any], other: dict[str, Any], said: list[tuple[str, Any]]
) -> None:
    messages = [{"role": role, "content": content} for role, content in said] or [{"role": "user", "content": "hi"}]
    with contextlib.suppress(FrontError):
        told = asks_response(**asks)
        chain(CHAIN, told[1])
    with contextlib.suppress(FrontError):
        chain(CHAIN, asks_messages(**{"messages": messages, **other})[0])


@pytest.mark.parametrize("depth", [70, 100_000])
def test_what_nests_deeply_is_refused_or_a_text(depth: int) -> None:
    """As for a chat: a call's arguments that nest too deeply are no JSON."""
    nested = "[" * depth + "]" * depth
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": nested}
    (message,) = read_items([call]).messages()
    assert len(chain(CHAIN, [message])) == 1
    block = {"type": "tool_use", "id": "c", "name": "f", "input": {"a": "NESTED"}}
    body = json.dumps({"messages": [{"role": "assistant", "content": [block]}]}).replace('"NESTED"', nested)
    if depth == 70:
        read = bodies.read(MessagesRequest, bodies.parsed(body.encode()), MESSAGES)
        assert len(chain(CHAIN, read.chat_messages())) == 1
    else:
        with pytest.raises(FrontError, match="too deeply"):
            bodies.parsed(body.encode())
