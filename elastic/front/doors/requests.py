"""What all protocols' requests and answers have in common. Pure."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from starlette.datastructures import Headers

from elastic.front.doors.base import TokenChoice, VersionRun
from elastic.front.keys import SESSION_HEADER
from elastic.front.readers import idempotency_key
from elastic.protocol.front_messages import NAME_MAX
from elastic.protocol.openai.answers import VersionSpan
from elastic.protocol.openai.errors import FrontError

SESSION_HEADERS = (SESSION_HEADER, "x-smg-routing-key")
_EXPERTS = (
    "which experts a token went to is not told; set prime-rl's trainer.enable_router_replay and AReaL's "
    "rollout.return_routed_experts to false, and leave out slime's --use-rollout-routing-replay"
)
_IMAGES = "prompts are of text alone: token ids, without images; leave out slime's --multimodal-keys"
_SCORES = (
    "tokens of a prompt are not scored; have a server of its own score them (prime-rl: base_url of "
    "[orchestrator.algo.teacher])"
)
UNTOLD: Mapping[str, str] = {
    "prompt_logprobs": _SCORES,
    "return_routed_experts": _EXPERTS,
    "features": _IMAGES,
    "content_parts": _IMAGES,
    "image_data": _IMAGES,
    "video_data": _IMAGES,
    "audio_data": _IMAGES,
    "input_embeds": _IMAGES,
}
"""Fields that ask for what is not to be had, with the setting of the peer's to change."""
_NOTHING: tuple[Any, ...] = (False, [], {}, "")


def check_wanted(fields: Mapping[str, Any]) -> None:
    """Refuse what no answer has. Raises `FrontError`, which names the peer's setting."""
    for name, why in UNTOLD.items():
        if fields.get(name) is not None and (name == "prompt_logprobs" or fields[name] not in _NOTHING):
            raise FrontError(400, f"{name}: {why}", name, "unsupported_parameter")


def routing_of(headers: Headers, session: str = "") -> tuple[str, str]:
    """The session of a request, by its body or its headers, and the key that makes two requests one."""
    named = session or next((found for name in SESSION_HEADERS if (found := headers.get(name))), "")
    return named[:NAME_MAX], idempotency_key(headers)


def check_numbers(choice: TokenChoice) -> None:
    """Raises `FrontError` unless each token has a log-probability: peers would train on what is none."""
    if len(choice.logprobs) != len(choice.ids) or not all(map(math.isfinite, choice.logprobs)):
        raise FrontError(500, "the turn has failed: a log-probability is missing, or no number", code="turn_failed")


def finish_of(choice: TokenChoice) -> Literal["stop", "length", "abort"]:
    """Why a choice is over."""
    match choice.finish:
        case "stop" | "length" | "abort":
            return choice.finish
        case _:
            raise FrontError(500, f"the turn has failed: {choice.finish}", code="turn_failed")


def version_name(run: VersionRun) -> str:
    """What a trainer hears of a version: its own name for it, and the run's number where it has given none."""
    return run.label or str(run.version)


def spans_of(runs: Sequence[VersionRun]) -> list[VersionSpan]:
    """Runs of tokens by where they begin and end."""
    spans: list[VersionSpan] = []
    start = 0
    for run in runs:
        spans.append(VersionSpan(version_name(run), start, start + run.tokens))
        start += run.tokens
    return spans
