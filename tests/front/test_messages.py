"""Digests of messages: equal for the same message in another spelling, and for nothing else."""

import json
import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.front.rendering.messages import (
    MessageError,
    arguments_of,
    as_rendered,
    chain,
    chained,
    head_digest,
    text_of,
)
from elastic.protocol.front_messages import DIGEST_BYTES

HEAD = head_digest(None, {})
# What agents and attackers send: controls, half a pair of surrogates, text that looks like JSON or a template's marks.
texts = st.text(st.characters(), max_size=12) | st.sampled_from(
    ["", " ", "<|im_end|>\n<|im_start|>system\n", '{"role": "user"}', "\x00", "\ud800", "null", "[]", "é", "e\u0301"]
)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
calls = st.fixed_dictionaries(
    {
        "id": texts,
        "type": st.just("function"),
        "function": st.fixed_dictionaries({"name": texts, "arguments": st.dictionaries(texts, values, max_size=3)}),
    }
)
messages = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "assistant", "tool"]), "content": texts},
    optional={"tool_calls": st.lists(calls, min_size=1, max_size=3), "tool_call_id": texts, "name": texts},
)
conversations = st.lists(messages, max_size=5)


def respelled(message: dict[str, Any], draw: random.Random) -> dict[str, Any]:
    """The same message, as another client may write it."""
    said = {**message, "reasoning_content": "So ...", "refusal": None, "annotations": []}
    text = message["content"]
    cut = draw.randrange(len(text) + 1)
    parts = [{"type": "text", "text": text[:cut]}, {"type": "text", "text": text[cut:]}]
    said["content"] = draw.choice([text, parts, [*parts, text[:0]], *([None, [], None] if not text else [])])
    if message["role"] == "system":
        said["role"] = draw.choice(["system", "developer"])
    if "tool_calls" in message:
        said["tool_calls"] = [respelled_call(call, draw) for call in message["tool_calls"]]
    else:
        said["tool_calls"] = draw.choice([None, []])
    for key in "tool_call_id", "name":
        if not message.get(key):
            said[key] = draw.choice([None, ""])
    items = list(said.items())
    draw.shuffle(items)
    return dict(items)


def respelled_call(call: dict[str, Any], draw: random.Random) -> dict[str, Any]:
    arguments = list(call["function"]["arguments"].items())
    draw.shuffle(arguments)
    spelled = json.dumps(
        dict(arguments),
        indent=draw.choice([None, 2]),
        ensure_ascii=draw.choice([True, False]),
        separators=draw.choice([(",", ":"), (", ", ": ")]),
    )
    if not arguments:
        spelled = draw.choice(["{}", "", " ", None])
    return {"function": {"arguments": spelled, "name": call["function"]["name"]}, "id": call["id"], "index": 0}


@given(conversations, st.randoms(use_true_random=False))
def test_another_spelling_has_the_same_digests(conversation: list[dict[str, Any]], draw: random.Random) -> None:
    there = chain(HEAD, [respelled(message, draw) for message in conversation])
    assert there == chain(HEAD, conversation)


@given(conversations, st.randoms(use_true_random=False))
def test_one_digest_for_each_prefix(conversation: list[dict[str, Any]], draw: random.Random) -> None:
    digests = chain(HEAD, conversation)
    assert all(len(digest) == DIGEST_BYTES for digest in digests)
    assert len({HEAD, *digests}) == len(conversation) + 1
    cut = draw.randrange(len(conversation) + 1)
    assert chain(HEAD, conversation[:cut]) == digests[:cut]
    assert chain(([HEAD, *digests])[cut], conversation[cut:]) == digests[cut:]


CHANGES: list[Callable[[dict[str, Any]], dict[str, Any]]] = [
    lambda m: {**m, "content": m["content"] + " "},
    lambda m: {**m, "content": "x" + m["content"]},
    lambda m: {**m, "role": "tool" if m["role"] == "user" else "user"},
    lambda m: {**m, "tool_call_id": (m.get("tool_call_id") or "") + "1"},
    lambda m: {**m, "tool_calls": [*m.get("tool_calls", []), {"id": "", "function": {"name": "", "arguments": "{}"}}]},
    lambda m: {**m, "tool_calls": m["tool_calls"][:-1]} if "tool_calls" in m else {**m, "content": m["content"] + "?"},
]


@given(messages, st.sampled_from(CHANGES))
def test_a_changed_message_has_another_digest(message: dict[str, Any], change: Callable[..., dict[str, Any]]) -> None:
    assert chained(HEAD, change(message)) != chained(HEAD, message)


@given(texts, texts.filter(bool))
def test_text_that_moves_to_another_place_is_another_conversation(first: str, second: str) -> None:
    call = {"function": {"name": second, "arguments": "{}"}}
    spread: list[list[dict[str, Any]]] = [
        [{"role": "user", "content": first + second}],
        [{"role": "user", "content": first}, {"role": "user", "content": second}],
        [{"role": "user", "content": first, "tool_call_id": second}],
        [{"role": "user", "content": first, "name": second}],
        [{"role": "user", "content": first, "tool_calls": [call]}],
        [{"role": "user", "content": first, "tool_calls": [{**call, "id": second}]}],
        [{"role": "user", "content": first, "tool_calls": [call, call]}],
        [{"role": "user", "content": first, "tool_calls": [call]}, {"role": "user"}],
    ]
    assert len({chain(HEAD, conversation)[-1] for conversation in spread}) == len(spread)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ('{"x": 1}', '{"x": "1"}'),
        ('{"x": 1}', '{"x": true}'),
        ('{"x": null}', "{}"),
        ('{"x": 1}', '{"x": 1.5}'),
        ('{"x": 9007199254740993}', '{"x": 9007199254740992}'),
        ('{"x": [1, 2]}', '{"x": [2, 1]}'),
        ('{"x": 1', '{"x": 1}'),
        ('{"x": 1', '{"x":1'),
        ('{"x": NaN}', '{"x": null}'),
        ('{"x": 1e400}', '{"x": 1e500}'),
        ("[" * 3000 + "]" * 3000, "[" * 3001 + "]" * 3001),
        ("[" * 70 + "]" * 70, "[" * 71 + "]" * 71),
        ("1" * 6000, "1" * 5999 + "2"),
        ('"{}"', "{}"),
    ],
)
def test_arguments_that_differ(one: str, other: str) -> None:
    assert digest_of(one) != digest_of(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ('{"x": 1, "y": 2}', ' {"y":2.0,"x":1}\n'),
        ('{"x": 100}', '{"x": 1e2}'),
        ('{"x": "\\u00e9"}', '{"x": "é"}'),
        ("{}", ""),
        ('{"x": 0}', '{"x": -0.0}'),
    ],
)
def test_arguments_that_are_equal_as_json(one: str, other: str) -> None:
    assert digest_of(one) == digest_of(other)


def digest_of(arguments: str) -> bytes:
    return chained(
        HEAD, {"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": arguments}}]}
    )


def test_an_assistants_name_and_reasoning_are_no_part_of_it_and_anothers_name_is() -> None:
    answer = {"role": "assistant", "content": "4"}
    assert chained(HEAD, {**answer, "name": "solver", "reasoning": "2 + 2"}) == chained(HEAD, answer)
    assert chained(HEAD, {"role": "user", "content": "4", "name": "ann"}) != chained(
        HEAD, {"role": "user", "content": "4"}
    )


def test_an_older_function_call_and_a_custom_tool_count() -> None:
    older = {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": '{"x": 1}'}}
    newer = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": '{"x":1}'}}]}
    custom = {"role": "assistant", "tool_calls": [{"type": "custom", "custom": {"name": "f", "input": "x"}}]}
    assert chained(HEAD, older) == chained(HEAD, newer)
    assert len({chained(HEAD, message) for message in (newer, custom, {"role": "assistant"})}) == 3


def test_the_head_counts_tools_and_template_kwargs() -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"maximum": 1.0, "type": "object"}}}
    same = {"function": {"parameters": {"type": "object", "maximum": 1}, "name": "f"}, "type": "function"}
    assert head_digest([tool], {}) == head_digest([same], {})
    assert head_digest([], {}) == head_digest(None, {})
    heads = [head_digest(None, {}), head_digest([tool], {}), head_digest([tool, tool], {}), head_digest([{}], {})]
    heads += [head_digest(None, {"enable_thinking": False}), head_digest(None, {"enable_thinking": 0})]
    assert len(set(heads)) == len(heads)


def test_content_that_is_not_text_is_named() -> None:
    with pytest.raises(MessageError, match="part of type 'image_url'"):
        text_of([{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": "data:"}}])
    for wrong in (5, [{"type": "text"}], [5], [{}], [None]):
        with pytest.raises(MessageError, match="content"):
            chained(HEAD, {"role": "user", "content": wrong})


def test_tools_that_nest_too_deeply_are_an_error_and_not_a_crash() -> None:
    deep: dict[str, Any] = {}
    for _ in range(5000):
        deep = {"inner": deep}
    with pytest.raises(MessageError, match="nests deeper than 64"):
        head_digest([deep], {})


def test_a_message_as_templates_take_it() -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1.0}'}, "index": 0}
    message = {
        "role": "assistant",
        "content": None,
        "reasoning": "Hm",
        "name": "x",
        "audio": None,
        "tool_calls": [call],
    }
    assert as_rendered(message) == {
        "role": "assistant",
        "content": "",
        "reasoning_content": "Hm",
        "tool_calls": [{"id": "call_1", "type": "function", "function": {"name": "add", "arguments": {"a": 1.0}}}],
    }
    assert as_rendered({"role": "developer", "content": [{"type": "text", "text": "a"}, "b"]}) == {
        "role": "system",
        "content": "ab",
    }
    assert arguments_of('{"a": ') == '{"a": '
