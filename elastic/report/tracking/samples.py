"""Trajectories as people read them: which of a step's, and their messages, within bounds."""

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from elastic.core.ids import parse_trajectory
from elastic.protocol.sampled import Sampled, ids_of
from elastic.report.bounds import cut
from elastic.report.tracking.delivery import TrackedSample
from elastic.runtime.journal import TrajectoryRow
from elastic.system.installed import installed, is_ours

ToText = Callable[[Sequence[int]], str]
_HALF_CHARACTERS = re.compile("\N{REPLACEMENT CHARACTER}+")


class SampleBounds(msgspec.Struct, frozen=True, kw_only=True):
    """Of how many trajectories a step, and how much of each: bytes of its messages in UTF-8."""

    trajectories: int
    bytes: int


def chosen(rows: Sequence[TrajectoryRow], most: int) -> list[TrajectoryRow]:
    """At most so many of the trajectories that were scored: evenly spaced ones in the order of their launch."""
    scored = sorted((row for row in rows if row.reward is not None), key=lambda row: parse_trajectory(row.trajectory))
    if len(scored) <= most:
        return scored
    return [scored[place * len(scored) // most] for place in range(most)]


def sample_of(row: TrajectoryRow, to_text: ToText, most_bytes: int) -> TrackedSample:
    """A trajectory's messages: what the policy said, and what it was told in between."""
    ids, spans = ids_of(row.token_ids), _sampled(row).spans
    messages, at = list[dict[str, str]](), 0
    for start, tokens in spans:
        if start > at:
            messages.append({"role": "user", "content": to_text(ids[at:start])})
        messages.append({"role": "assistant", "content": to_text(ids[start : start + tokens])})
        at = start + tokens
    if at < len(ids):
        messages.append({"role": "user", "content": to_text(ids[at:])})
    assert row.reward is not None
    return TrackedSample(trajectory=row.trajectory, reward=row.reward, messages=list(_cut(messages, most_bytes)))


def _sampled(row: TrajectoryRow) -> Sampled:
    return msgspec.msgpack.decode(row.sampled, type=Sampled) if row.sampled else Sampled()


def _cut(messages: Sequence[dict[str, str]], most_bytes: int) -> Iterator[dict[str, str]]:
    """The messages within so many bytes: a long one keeps its beginning and its end, later ones what is left."""
    for place, message in enumerate(messages):
        share = most_bytes // (len(messages) - place)
        content = cut(message["content"], share)
        most_bytes -= len(content.encode())
        yield {**message, "content": content}


def text_of(environment: str, checkpoint: Path) -> ToText:
    """How tokens become text: by the environment's words, else by the policy's tokenizer, else as numbers."""
    point = installed("elastic.environments").get(environment)
    words: Sequence[str] = () if point is None or not is_ours(point) else point.load().vocabulary
    if words:
        return lambda ids: "".join(words[one] if one < len(words) else f"<{one}>" for one in ids)
    try:
        import tokenizers

        tokenizer = tokenizers.Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    except Exception:  # The library raises nothing narrower, and a sample may do without words.
        return lambda ids: " ".join(map(str, ids))
    return lambda ids: _HALF_CHARACTERS.sub(
        "\N{REPLACEMENT CHARACTER}", tokenizer.decode(ids, skip_special_tokens=False)
    )
