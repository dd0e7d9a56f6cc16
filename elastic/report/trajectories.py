"""A run's trajectories, to be read: pages of them, read from the journals that hold them, and each with its tokens.

A page reads as many rows as it shows, and counts all by the index of steps, to say which are missing. Text comes of
tokens elsewhere: `elastic.report.texts`.
"""

import heapq
import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import msgspec
import numpy as np

from elastic.core.ids import is_evaluated
from elastic.core.types import NS_PER_S
from elastic.protocol.api import HostedBranch, HostedTrajectory, HostedTrajectoryDetail
from elastic.protocol.sampled import TOKEN_BYTES, Sampled, ids_of
from elastic.report.history import History, Segment
from elastic.runtime.journal import (
    EvaluatedRow,
    JournalError,
    JournalReader,
    TrajectoryFilter,
    TrajectoryPlace,
    TrajectoryRow,
)

TOKENS_MAX = 2**18
"""The most tokens of one trajectory that are shown, over all of its contexts."""
BRANCHES_MAX = 64
TASK_CHARACTERS = 16_384
REWARDS = "rewards/"
"""The beginning of the names of metrics that are parts of a reward."""
ENVIRONMENT_PART = "environment"
"""The part of a reward that the environment gave, where a function gave another one."""
LAST_ROW = 2**63 - 1


class NoSuchTrajectory(Exception):
    """The run has no trajectory of this name."""


def page_of(
    history: History, wanted: TrajectoryFilter, starting_after: str, limit: int
) -> tuple[list[HostedTrajectory], bool]:
    """Return up to `limit` finished trajectories behind `starting_after`, and whether there are more.

    Raises `JournalError`, and `NoSuchTrajectory` if `starting_after` does not exist.
    """
    sources = [(segment, number) for segment in history.segments for number, _ in enumerate(segment.journals)]
    behind = _place_of(sources, wanted, starting_after) if starting_after else None
    orders = [
        _ranked(segment, number, wanted, _behind(behind, source), source, limit + 1)
        for source, (segment, number) in enumerate(sources)
    ]
    merged = heapq.merge(*orders, key=lambda one: (one[0].rank, one[1], one[0].row), reverse=True)
    found = [row for _, (_, _, row) in zip(range(limit + 1), merged, strict=False)]
    return [_trajectory(row) for row in found[:limit]], len(found) > limit


def _place_of(
    sources: Sequence[tuple[Segment, int]], wanted: TrajectoryFilter, trajectory: str
) -> tuple[int, TrajectoryPlace]:
    for source, (segment, number) in reversed(list(enumerate(sources))):
        place = segment.journals[number].trajectory_place(wanted, trajectory)
        if place is not None:
            return source, place
    raise NoSuchTrajectory(trajectory)


def _behind(behind: tuple[int, TrajectoryPlace] | None, source: int) -> TrajectoryPlace | None:
    """Translate a place in one journal to another journal. Among equal ranks, later journals come first."""
    if behind is None or behind[0] == source:
        return None if behind is None else behind[1]
    return TrajectoryPlace(behind[1].rank, LAST_ROW if source < behind[0] else 0)


def _ranked(
    segment: Segment,
    number: int,
    wanted: TrajectoryFilter,
    behind: TrajectoryPlace | None,
    source: int,
    limit: int,
) -> Iterator[tuple[TrajectoryPlace, int, TrajectoryRow]]:
    """Return the trajectories of one journal, without those that a later journal of the same segment records again."""
    journal, later = segment.journals[number], segment.journals[number + 1 :]
    # An evaluation's step is the version, which a step begins with.
    here = msgspec.structs.replace(wanted, step_end=segment.undone_from + wanted.evaluation)
    while True:
        found = journal.trajectories(here, behind, limit)
        for place, row in found:
            if row is not None and not _recorded_again(row, wanted, later):
                yield place, source, _retold(row, segment)
        if len(found) < limit:
            return
        behind = found[-1][0]


def _recorded_again(row: TrajectoryRow, wanted: TrajectoryFilter, later: Sequence[JournalReader]) -> bool:
    return any(journal.trajectory_place(wanted, row.trajectory) is not None for journal in later)


def _retold(row: TrajectoryRow, segment: Segment) -> TrajectoryRow:
    times = {"started_ns": segment.begun_ns + row.started_ns, "ended_ns": segment.begun_ns + row.ended_ns}
    return msgspec.structs.replace(row, **times)


def detail_of(history: History, name: str, most_tokens: int = TOKENS_MAX) -> HostedTrajectoryDetail | None:
    """Return one trajectory with the first of its tokens, and without their text; None if the run has none of this
    name. Raises `JournalError`."""
    row = row_of(history, name)
    try:
        return None if row is None else detail_of_row(row, most_tokens)
    except (msgspec.DecodeError, ValueError, TypeError, IndexError) as error:
        raise JournalError(f"{history.name}: trajectory {name} is no record of tokens: {error}") from error


def row_of(history: History, name: str) -> TrajectoryRow | None:
    """Return the record of one trajectory; None if the run has none of this name. Raises `JournalError`."""
    evaluated = is_evaluated(name)  # Then `step` is the version, which a step begins with.
    for segment in reversed(history.segments):
        for journal in reversed(segment.journals):
            row = journal.by_key(EvaluatedRow if evaluated else TrajectoryRow, [name]).get(name)
            if row is not None and row.step < segment.undone_from + evaluated:
                return _retold(row, segment)
    return None


def detail_of_row(row: TrajectoryRow, left: int = TOKENS_MAX) -> HostedTrajectoryDetail:
    """As `detail_of`. Raises `msgspec.DecodeError`, `ValueError`, `TypeError` or `IndexError` for what is no record."""
    sampled = msgspec.msgpack.decode(row.sampled, type=Sampled) if row.sampled else Sampled()
    branches = row.further_branches()
    first = _context(row.token_ids, sampled, left)
    before, shown = [np.frombuffer(row.token_ids, np.int32)], list[HostedBranch]()
    for branch in branches[:BRANCHES_MAX]:
        left -= len(shown[-1].token_ids if shown else first["token_ids"])
        shared, ids = _shared(before, branch.token_ids), np.frombuffer(branch.token_ids, np.int32)
        fields = _context(branch.token_ids, branch.sampled, left)
        shown.append(HostedBranch(branch=branch.branch, shared_tokens=shared, **fields))
        before.append(ids)
    listed = _trajectory(row).model_dump()
    if row.sampled and row.reward is not None and not math.isclose(sampled.reward, row.reward, rel_tol=1e-6):
        listed["rewards"] |= {ENVIRONMENT_PART: sampled.reward}
    return HostedTrajectoryDetail(
        **listed,
        **first,
        task=row.task.decode(errors="replace")[:TASK_CHARACTERS],
        branches=shown,
        left_out_branches=max(0, len(branches) - BRANCHES_MAX),
    )


def _context(packed: bytes | bytearray, sampled: Sampled, most_tokens: int) -> dict[str, Any]:
    """The fields of a `HostedContext`, of its first tokens."""
    tokens = len(packed) // TOKEN_BYTES
    trained = sampled.trained(tokens)
    logprobs, versions = np.zeros(tokens), np.zeros(tokens, np.int64)
    logprobs[trained], versions[trained] = sampled.token_logprobs(), sampled.token_versions()
    shown = min(tokens, max(0, most_tokens))
    return {
        "policy": sampled.policy,
        "policy_reward": sampled.policy_reward,
        "token_ids": ids_of(packed[: shown * TOKEN_BYTES]),
        "trained": trained[:shown].tolist(),
        "logprobs": np.nan_to_num(logprobs[:shown], posinf=0.0, neginf=float(np.finfo(np.float32).min)).tolist(),
        "versions": versions[:shown].tolist(),
        "left_out_tokens": tokens - shown,
    }


def _shared(before: Sequence[np.ndarray[Any, Any]], packed: bytes | bytearray) -> int:
    """How many tokens a context has in common with one before it, from its beginning on."""
    ids, most = np.frombuffer(packed, np.int32), 0
    for other in before:
        both = min(len(ids), len(other))
        differs = np.flatnonzero(ids[:both] != other[:both])
        most = max(most, int(differs[0]) if len(differs) else both)
    return most


def spans_of(trained: Sequence[bool]) -> list[tuple[int, int]]:
    """The stretches (start, tokens) that the policy sampled, by the marks of its tokens."""
    marks = np.diff(np.concatenate(([0], np.asarray(trained, np.int8), [0])))
    starts, ends = np.flatnonzero(marks == 1), np.flatnonzero(marks == -1)
    return [(int(start), int(end - start)) for start, end in zip(starts, ends, strict=True)]


def _trajectory(row: TrajectoryRow) -> HostedTrajectory:
    metrics = dict[str, float]()
    with suppress(msgspec.DecodeError):
        metrics |= {name: value for name, value in row.metrics_by_name.items() if math.isfinite(value)}
    return HostedTrajectory(
        id=row.trajectory,
        step=row.step,
        group=row.group,
        environment=row.environment,
        reward=row.reward,
        rewards={name.removeprefix(REWARDS): value for name, value in metrics.items() if name.startswith(REWARDS)},
        metrics={name: value for name, value in metrics.items() if not name.startswith(REWARDS)},
        cause=row.cause,
        turns=row.turns,
        policy_tokens=row.policy_tokens,
        truncated=row.truncated,
        started_s=row.started_ns / NS_PER_S,
        ended_s=row.ended_ns / NS_PER_S,
    )
