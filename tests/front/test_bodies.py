"""What a body asks for, and what is refused of it, by name."""

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.protocol.openai.bodies import (
    CHAT,
    CHOICES_MAX,
    COMPLETION,
    ChatRequest,
    CompletionRequest,
    digest,
    parsed,
    read,
    read_tokens,
    strict,
)
from elastic.protocol.openai.errors import FrontError, too_long

USER = {"role": "user", "content": "hello"}


def refusal(**fields) -> FrontError:
    with pytest.raises(FrontError) as refused:
        read(ChatRequest, {"messages": [USER], **fields}, CHAT)
    assert refused.value.status == 400
    assert isinstance(refused.value.code, str)
    return refused.value


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
        ({"messages": [USER, {"role": "robot", "content": "x"}]}, "messages.1.role"),
        ({"messages": [{"content": "x"}]}, "messages.0.role"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]},
            "messages.0.content.0.type",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content.0.text"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}]},
            "messages.0.tool_calls.0.function.arguments",
        ),
        ({"tools": [{"type": "function"}]}, "tools.0.function"),
        ({"tools": [{"type": "computer", "function": {"name": "f"}}]}, "tools.0.type"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools.0.function.name"),
        ({"tools": [{"function": {"name": "f", "parameters": []}}]}, "tools.0.function.parameters"),
        ({"tools": [{"function": {"name": "f", "parameters": {"type": "text"}}}]}, "tools.0.function.parameters.type"),
        (
            {"tools": [{"function": {"name": "f", "parameters": {"properties": {"a": {"type": "text"}}}}}]},
            "tools.0.function.parameters.properties.a.type",
        ),
        (
            {"tools": [{"function": {"name": "f", "parameters": {"properties": {"a": 3}}}}]},
            "tools.0.function.parameters.properties.a",
        ),
        (
            {"tools": [{"function": {"name": "f", "parameters": {"required": "a"}}}]},
            "tools.0.function.parameters.required",
        ),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"structured_outputs": {"json": {}}}, "structured_outputs"),
        ({"guided_json": {}}, "guided_json"),
        ({"top_logprobs": 1}, "top_logprobs"),
        ({"logprobs": 1}, "logprobs"),
        ({"prompt_logprobs": 0}, "prompt_logprobs"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"min_p": 0.1}, "min_p"),
        ({"presence_penalty": 0.1}, "presence_penalty"),
        ({"frequency_penalty": -1}, "frequency_penalty"),
        ({"repetition_penalty": 1.1}, "repetition_penalty"),
        ({"min_tokens": 1}, "min_tokens"),
        ({"echo": True}, "echo"),
        ({"audio": {}}, "audio"),
        ({"chat_template": "x"}, "chat_template"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"n": 0}, "n"),
        ({"n": CHOICES_MAX + 1}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": -1}, "max_completion_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"seed": 2**63}, "seed"),
        ({"stop": ""}, "stop"),
        ({"stop": ["x", ""]}, "stop.1"),
        ({"stop": ["x"] * 65}, "stop"),
        ({"stop_token_ids": [-1]}, "stop_token_ids.0"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ],
)
def test_what_would_change_the_answer_is_refused_by_name(fields, param):
    error = refusal(**fields)
    assert error.param == param
    assert param in str(error)


def test_what_changes_nothing_is_passed_over():
    plain = read(ChatRequest, {"messages": [USER]}, CHAT)
    dressed = read(
        ChatRequest,
        {
            "messages": [USER],
            "user": "u",
            "metadata": {"a": 1},
            "store": True,
            "something_new": [1, 2],
            "priority": 3,
            "cache_salt": "4",
            "tools": None,
            "stop": None,
            "response_format": {"type": "text"},
            "logit_bias": {},
            "top_logprobs": 0,
            "presence_penalty": 0.0,
            "tool_choice": "auto",
        },
        CHAT,
    )
    assert dressed == plain


def test_the_newer_name_of_the_limit_wins():
    body = read(ChatRequest, {"messages": [USER], "max_tokens": 3, "max_completion_tokens": 4}, CHAT)
    assert body.most_tokens == 4


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [("x", ["x"]), (["x", "y"], ["x", "y"]), ([1, 2], [[1, 2]]), ([[1], [2]], [[1], [2]]), ([], [[]])],
)
def test_prompts_of_completions(prompt, prompts):
    assert read(CompletionRequest, {"prompt": prompt}, COMPLETION).prompts() == prompts


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt.1"),
        ({"prompt": ["a", 1]}, "prompt.1"),
        ({"prompt": [[1], [2**31]]}, "prompt.1.0"),
        ({"prompt": "x", "logprobs": 2}, "logprobs"),
        ({"prompt": "x", "logprobs": -1}, "logprobs"),
        ({"prompt": "x", "best_of": 2}, "best_of"),
        ({"prompt": "x", "suffix": "y"}, "suffix"),
    ],
)
def test_completions_that_are_none(fields, param):
    with pytest.raises(FrontError) as refused:
        read(CompletionRequest, fields, COMPLETION)
    assert refused.value.param == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "token_ids"),
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": ["a"]}, "token_ids.0"),
        ({"token_ids": [1], "features": {}}, "features"),
        ({"token_ids": [1], "output_mode": "text"}, "output_mode"),
        ({"token_ids": [1], "sampling_params": []}, "sampling_params"),
        ({"token_ids": [1], "sampling_params": {"logprobs": 2}}, "sampling_params.logprobs"),
        ({"token_ids": [1], "sampling_params": {"min_p": 0.5}}, "sampling_params.min_p"),
        (
            {"token_ids": [1], "sampling_params": {"structured_outputs": {"regex": "x"}}},
            "sampling_params.structured_outputs",
        ),
        ({"token_ids": [1], "sampling_params": {"n": 0}}, "sampling_params.n"),
    ],
)
def test_token_requests_that_are_none(fields, param):
    with pytest.raises(FrontError) as refused:
        read_tokens(fields)
    assert refused.value.param == param


def test_sampling_counts_where_it_stands():
    body = read_tokens(
        {"token_ids": [1], "max_tokens": 3, "sampling_params": {"max_tokens": 4, "stream": True, "x": 1}}
    )
    assert (body.max_tokens, body.stream) == (4, False)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[1]",
        b"null",
        b'"x"',
        b'{"a": NaN}',
        b'{"a": 1e999}',
        b'{"a": "\xff"}',
        b"[" * 100_000,
        b"\xef\xbb\xbf{}",
        b'{"a":' + b"9" * 5000 + b"}",
        b'{"a": "\\ud800"}',
    ],
)
def test_what_is_no_body(body):
    with pytest.raises(FrontError) as refused:
        parsed(body)
    assert refused.value.status == 400
    msgspec.json.decode(refused.value.body())


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)
names = st.sampled_from([*ChatRequest.__struct_fields__, "response_format", "logit_bias", "min_p"]) | st.text()


def refused(attempt) -> FrontError | None:
    try:
        attempt()
    except FrontError as error:
        return error
    return None


@given(st.dictionaries(names, json_values, max_size=6))
def test_whatever_comes_is_read_or_refused(fields):
    for attempt in (
        lambda: read(ChatRequest, fields, CHAT),
        lambda: read(CompletionRequest, fields, COMPLETION),
        lambda: read(CompletionRequest, fields, strict("prompt", "max_tokens", "stream_options")),
        lambda: read_tokens(fields),
    ):
        error = refused(attempt)
        if error is not None:
            assert error.status == 400
            assert set(msgspec.json.decode(error.body())["error"]) == {"message", "type", "param", "code"}


def test_equal_bodies_have_one_digest_whatever_their_order_and_how_they_are_answered():
    one = parsed(b'{"messages": [{"role": "user", "content": "x"}], "seed": 1, "stream": true}')
    two = parsed(b'{"seed":1,"stream_options":{"include_usage":true},"messages":[{"content":"x","role":"user"}]}')
    assert digest(one) == digest(two)
    assert digest(one) != digest({**one, "seed": 2})
    assert len(digest(one)) == 16


def test_a_prompt_that_is_too_long_is_told_as_clients_expect():
    error = too_long(4096, 5000)
    assert str(error).startswith("This model's maximum context length is 4096 tokens. However, ")
    assert (error.status, error.code) == (400, "context_length_exceeded")


def test_errors_say_when_to_come_back():
    assert FrontError(503, "x").headers()["Retry-After"] == "1"
    assert FrontError(429, "x", retry_after_s=2.5).headers()["Retry-After"] == "3"
    assert FrontError(410, "x", retry=False).headers() == {"x-should-retry": "false"}
    assert "Retry-After" not in FrontError(400, "x").headers()
    assert not math.isnan(FrontError(503, "x").retry_after_s or 0)
