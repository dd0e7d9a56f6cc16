"""How streams are asked for by route, and what is read of them."""

import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

CHAT = "/v1/chat/completions"
PLAIN_PROMPT = list(range(300, 340))
"""Token ids, for routes that take these."""

ChatMessages: TypeAlias = list[dict[str, Any]]


class SpokenRoute(NamedTuple):
    """`piece` is in each event with content and in no other; `identifier` is what comes before a turn's name.

    `said` is what a whole stream's events say; empty unless it ended as it should.
    """

    body: Callable[[ChatMessages, int], dict[str, Any]]
    piece: bytes
    identifier: bytes
    said: Callable[[Sequence[bytes]], str]


def _data(events: Sequence[bytes]) -> list[dict[str, Any]]:
    found = [event.partition(b"data: ")[2] for event in events if not event.startswith(b":")]
    return [json.loads(data) for data in found if data and data != b"[DONE]"]


def _choices(events: Sequence[bytes]) -> str:
    if events[-1] != b"data: [DONE]":
        return ""
    said: list[str] = []
    finish = None
    for chunk in _data(events):
        for choice in chunk["choices"]:
            said.append(choice.get("text") or choice.get("delta", {}).get("content") or "")
            finish = choice.get("finish_reason") or finish
    return "".join(said) if finish else ""


def _response(events: Sequence[bytes]) -> str:
    *told, last = _data(events)
    ended = last["type"] in ("response.completed", "response.incomplete")
    return "".join(event["delta"] for event in told if event["type"] == "response.output_text.delta") if ended else ""


def _message(events: Sequence[bytes]) -> str:
    *told, last = _data(events)
    deltas = [event["delta"] for event in told if event["type"] == "content_block_delta"]
    return "".join(delta.get("text", "") for delta in deltas) if last["type"] == "message_stop" else ""


def _generate_body(_: ChatMessages, most: int) -> dict[str, Any]:
    return {"model": "tiny", "token_ids": PLAIN_PROMPT, "sampling_params": {"max_tokens": most}}


ROUTES: dict[str, SpokenRoute] = {
    CHAT: SpokenRoute(
        lambda messages, most: {"model": "tiny", "messages": messages, "max_tokens": most},
        b'"content":',
        b'"id":"chatcmpl-',
        _choices,
    ),
    "/v1/completions": SpokenRoute(
        lambda _, most: {"model": "tiny", "prompt": PLAIN_PROMPT, "max_tokens": most},
        b'"text":',
        b'"id":"cmpl-',
        _choices,
    ),
    "/inference/v1/generate": SpokenRoute(
        _generate_body, b'"token_ids":', b'"request_id":"generate-tokens-', lambda events: str(len(events))
    ),
    "/v1/responses": SpokenRoute(
        lambda messages, most: {"model": "tiny", "input": messages, "max_output_tokens": most},
        b'"delta":',
        b'"id":"resp_',
        _response,
    ),
    "/v1/messages": SpokenRoute(
        lambda messages, most: {
            "model": "tiny",
            "system": messages[0]["content"],
            "messages": messages[1:],
            "max_tokens": most,
        },
        b'"text_delta"',
        b'"id":"msg_',
        _message,
    ),
}
