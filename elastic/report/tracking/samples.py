"""Trajectories as people read them: which of a step's, and their messages, within bounds."""

from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import msgspec

from elastic.core.ids import parse_trajectory
from elastic.protocol.api import HostedMessage, HostedTrajectoryDetail
from elastic.report.bounds import cut
from elastic.report.tracking.delivery import TrackedSample
from elastic.report.trajectories import spans_of
from elastic.runtime.journal import TrajectoryRow

Tell: TypeAlias = Callable[[Sequence[HostedTrajectoryDetail]], Sequence[HostedTrajectoryDetail]]
"""Gives trajectories their texts, as far as there are any."""


class SampleBounds(msgspec.Struct, frozen=True, kw_only=True):
    """How many trajectories are sent a step, and how much of each: bytes of its messages in UTF-8."""

    trajectories: int
    bytes: int


def chosen(rows: Sequence[TrajectoryRow], most: int) -> list[TrajectoryRow]:
    """At most so many of the trajectories that were scored: evenly spaced ones in the order of their launch."""
    scored = sorted((row for row in rows if row.reward is not None), key=lambda row: parse_trajectory(row.trajectory))
    if len(scored) <= most:
        return scored
    return [scored[place * len(scored) // most] for place in range(most)]


def sample_of(detail: HostedTrajectoryDetail, most_bytes: int) -> TrackedSample:
    """A trajectory's messages: what the policy said, as it wrote it, and what it was told in between."""
    assert detail.reward is not None
    messages = _in_numbers(detail) if detail.messages is None else [_told(detail, one) for one in detail.messages]
    return TrackedSample(trajectory=detail.id, reward=detail.reward, messages=list(_cut(messages, most_bytes)))


def _told(detail: HostedTrajectoryDetail, message: HostedMessage) -> dict[str, str]:
    if message.by_policy and detail.pieces is not None:
        written = "".join(detail.pieces[message.start : message.start + message.tokens])
        return {"role": message.role, "content": written}
    calls = [f"{call.name}({call.arguments})" for call in message.tool_calls]
    return {"role": message.role, "content": "\n".join(filter(None, (message.reasoning, message.content, *calls)))}


def _in_numbers(detail: HostedTrajectoryDetail) -> list[dict[str, str]]:
    """The messages of tokens for which nobody has words."""
    messages, at, end = list[dict[str, str]](), 0, len(detail.token_ids)
    for start, tokens in [*spans_of(detail.trained), (end, 0)]:
        for role, first, behind in (("user", at, start), ("assistant", start, start + tokens)):
            if behind > first:
                messages.append({"role": role, "content": " ".join(map(str, detail.token_ids[first:behind]))})
        at = start + tokens
    return messages


def _cut(messages: Sequence[dict[str, str]], most_bytes: int) -> Iterator[dict[str, str]]:
    """The messages within so many bytes: a long one keeps its beginning and its end, later ones what is left."""
    for place, message in enumerate(messages):
        share = most_bytes // (len(messages) - place)
        content = cut(message["content"], share)
        most_bytes -= len(content.encode())
        yield {**message, "content": content}
