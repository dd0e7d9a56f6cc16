"""What OpenAI's client makes of a live run's answers: each is, token for token, what the journal has of its turn."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.clients.conftest import CONTEXT_TOKENS, LiveRun, Trajectory

pytestmark = pytest.mark.clients

HELLO: list[Any] = [{"role": "user", "content": "What is 1 + 1?"}]
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds two numbers.",
            "parameters": {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}},
        },
    }
]
CALLED: list[Any] = [
    *HELLO,
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 1}'}}],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "2"},
]
IDS: dict[str, Any] = {"extra_body": {"return_token_ids": True, "ignore_eos": True}}


def chat(trajectory: Trajectory, messages: list[Any] = HELLO, **more: Any) -> Any:
    return trajectory.client.chat.completions.create(model="tiny", messages=messages, **{**IDS, **more})


def test_the_model_is_listed(live: LiveRun) -> None:
    (model,) = live.client(live.driver_key).models.list().data
    assert (model.id, model.object, model.max_model_len) == ("tiny", "model", CONTEXT_TOKENS)


def test_a_whole_chat(trajectory: Trajectory, journaled: Callable[..., Any]) -> None:
    answer = chat(trajectory, logprobs=True, max_tokens=10)
    (choice,) = answer.choices
    ids, logprobs = journaled(answer.id)
    assert (answer.object, choice.finish_reason, choice.message.role) == ("chat.completion", "length", "assistant")
    assert choice.message.content
    assert choice.message.tool_calls is None
    assert tuple(choice.token_ids) == ids
    assert len(ids) == answer.usage.completion_tokens == 10
    assert len(answer.prompt_token_ids) == answer.usage.prompt_tokens
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 10
    entries = choice.logprobs.content
    assert tuple(entry.token_id for entry in entries) == ids
    assert [entry.logprob for entry in entries] == pytest.approx(logprobs)
    assert all(entry.logprob <= 0 and entry.top_logprobs == [] for entry in entries)


def test_a_streamed_chat(trajectory: Trajectory, journaled: Callable[..., Any]) -> None:
    *chunks, used = chat(trajectory, stream=True, stream_options={"include_usage": True}, logprobs=True)
    assert used.choices == []
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    choices = [chunk.choices[0] for chunk in chunks]
    assert choices[0].delta.role == "assistant"
    assert [choice.finish_reason for choice in choices] == [None] * (len(choices) - 1) + ["length"]
    ids, logprobs = journaled(chunks[0].id)
    assert tuple(token for choice in choices for token in choice.token_ids) == ids
    entries = [entry for choice in choices if choice.logprobs for entry in choice.logprobs.content]
    assert [entry.logprob for entry in entries] == pytest.approx(logprobs)
    assert used.usage.completion_tokens == len(ids)
    assert len(chunks[0].prompt_token_ids) == used.usage.prompt_tokens


def test_a_conversation_goes_on_behind_its_own_tokens(trajectory: Trajectory) -> None:
    first = chat(trajectory)
    said = first.choices[0].message
    more = [*HELLO, {"role": "assistant", "content": said.content}, {"role": "user", "content": "And 2 + 2?"}]
    second = chat(trajectory, more)
    so_far = first.prompt_token_ids + first.choices[0].token_ids
    assert second.prompt_token_ids[: len(so_far)] == so_far
    assert len(second.prompt_token_ids) > len(so_far)


@pytest.mark.parametrize("stream", [False, True])
def test_several_choices(trajectory: Trajectory, journaled: Callable[..., Any], stream: bool) -> None:
    answer = chat(trajectory, n=3, stream=stream)
    found: dict[int, list[int]] = {0: [], 1: [], 2: []}
    identifier = ""
    for part in answer if stream else [answer]:
        identifier = part.id
        for choice in part.choices:
            found[choice.index] += choice.token_ids
    assert {index: tuple(ids) for index, ids in found.items()} == {n: journaled(identifier, n).ids for n in range(3)}
    assert len({tuple(ids) for ids in found.values()}) == 3


def test_tools_are_shown_to_the_model_and_their_results_go_on(trajectory: Trajectory) -> None:
    plain = chat(trajectory).usage.prompt_tokens
    shown = chat(trajectory, tools=TOOLS, tool_choice="auto").usage.prompt_tokens
    answer = chat(trajectory, CALLED, tools=TOOLS)
    assert plain < shown < answer.usage.prompt_tokens
    assert answer.choices[0].message.role == "assistant"


def test_text_is_completed(trajectory: Trajectory, journaled: Callable[..., Any]) -> None:
    answer = trajectory.client.completions.create(model="tiny", prompt="The sum is", logprobs=0, **IDS)
    (choice,) = answer.choices
    ids, logprobs = journaled(answer.id)
    assert (answer.object, choice.finish_reason) == ("text_completion", "length")
    assert tuple(choice.token_ids) == ids
    assert choice.logprobs.token_logprobs == pytest.approx(logprobs)
    assert len({len(choice.logprobs.tokens), len(choice.logprobs.text_offset), len(ids)}) == 1


def test_token_ids_are_completed_choice_by_choice(trajectory: Trajectory) -> None:
    answer = trajectory.client.completions.create(model="tiny", prompt=[[1, 2], [3]], n=2, max_tokens=3, **IDS)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [choice.prompt_token_ids for choice in answer.choices] == [[1, 2], [1, 2], [3], [3]]
    assert answer.usage.completion_tokens == 12


def test_a_stop_string_ends_the_answer(trajectory: Trajectory, journaled: Callable[..., Any]) -> None:
    whole = chat(trajectory, seed=5)
    text = whole.choices[0].message.content
    stop = text[4:6]
    cut = chat(trajectory, seed=5, stop=stop)
    (choice,) = cut.choices
    assert stop not in choice.message.content
    assert (choice.finish_reason, choice.stop_reason) in (("stop", stop), ("length", None))
    assert tuple(choice.token_ids) == journaled(cut.id).ids


def test_a_driver_names_the_trajectory(live: LiveRun, trajectory: Trajectory) -> None:
    by_path = live.client(live.driver_key, f"/t/{trajectory.id}/v1")
    by_header = live.client(live.driver_key, default_headers={"X-Session-ID": trajectory.id})
    by_key = live.client("none", f"/t/{trajectory.key}/v1")
    answers = [
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": str(number)}], **IDS)
        for number, client in enumerate((by_path, by_header, by_key))
    ]
    assert [answer.id for answer in answers] == [f"chatcmpl-{trajectory.id}-{number}" for number in range(3)]
