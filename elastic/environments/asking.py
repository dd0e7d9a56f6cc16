"""How a kind that converses asks the policy: OpenAI's chat completions, a call at a time."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import httpx
import structlog

from elastic.environments.agent import BadOutcome, PlayedTrajectory
from elastic.system.plain_values import told

log = structlog.get_logger(__name__)

AGAIN = (408, 409, 429, 500, 502, 503, 504)
"""Statuses after which a call is made again, as OpenAI's client does."""
AGAIN_S = 0.5
NO_ROOM = ("max_turns", "context_length_exceeded")
"""Codes of refusals which say that an episode has come to a limit of the run's."""
REFUSED_CHARACTERS = 500


class PolicyAnswer(NamedTuple):
    """An answer of the policy; `cut` if its limit of tokens has ended it."""

    message: dict[str, Any]
    cut: bool

    @property
    def text(self) -> str:
        return self.message.get("content") or ""


class _LimitReached(Exception):
    """The episode has come to a limit of the run's: of turns, or of tokens."""


async def ask(
    http: httpx.AsyncClient,
    trajectory: PlayedTrajectory,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] = (),
) -> PolicyAnswer:
    """What the policy says to a prompt. Raises `BadOutcome`, for a prompt that is beyond the run's limits, too."""
    try:
        return await _ask(http, trajectory, messages, tools)
    except _LimitReached as full:
        raise BadOutcome(f"the prompt was refused: {full}") from full


async def ask_in_turn(
    turn: int,
    http: httpx.AsyncClient,
    trajectory: PlayedTrajectory,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] = (),
) -> PolicyAnswer | None:
    """As `ask` in turn 0; later None where the episode has come to a limit of the run's."""
    if not turn:
        return await ask(http, trajectory, messages, tools)
    try:
        return await _ask(http, trajectory, messages, tools)
    except _LimitReached:
        return None


async def _ask(
    http: httpx.AsyncClient,
    trajectory: PlayedTrajectory,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]],
) -> PolicyAnswer:
    """A call that breaks is made again, which joins it. Raises `_LimitReached`, `BadOutcome`."""
    headers = {"authorization": f"Bearer {trajectory.key}"}
    body = {"model": trajectory.model, "messages": messages} | ({"tools": tools} if tools else {})
    times = 0
    while True:
        try:
            answer = await http.post(f"{trajectory.base_url}/chat/completions", json=body, headers=headers)
            if answer.status_code == 200:
                choice = answer.json()["choices"][0]
                return PolicyAnswer(choice["message"], choice["finish_reason"] == "length")
            if answer.status_code not in AGAIN or answer.headers.get("x-should-retry") == "false":
                raise _refusal(answer)
            cause = f"status {answer.status_code}"
        except httpx.TransportError as error:
            cause = told(error)
        times += 1
        if times & (times - 1) == 0:  # The first time, and then ever more rarely.
            log.warning("a call is made again", trajectory=trajectory.id, times=times, cause=cause)
        await asyncio.sleep(AGAIN_S)


def _refusal(answer: httpx.Response) -> Exception:
    """Why the run does not answer."""
    try:
        error = answer.json()["error"]
        code, message = str(error["code"]), str(error["message"])
    except (ValueError, KeyError, TypeError):
        code, message = "", answer.text
    message = message[:REFUSED_CHARACTERS]
    return (
        _LimitReached(message)
        if code in NO_ROOM
        else BadOutcome(f"a call was refused ({answer.status_code}): {message}")
    )
