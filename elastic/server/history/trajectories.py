"""Pages of a run's trajectories, read from the journals that hold them. Cost does not depend on their number."""

import heapq
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np

from elastic.core.types import NS_PER_S
from elastic.protocol.api import HostedTrajectory, HostedTrajectoryDetail
from elastic.protocol.sampled import Sampled, ids_of
from elastic.report.history import Segment
from elastic.runtime.journal import (
    JournalReader,
    RunDirectory,
    TrajectoryFilter,
    TrajectoryPlace,
    TrajectoryRow,
)
from elastic.server.history.apart import apart
from elastic.server.history.journals import history_in
from elastic.system.installed import installed
from elastic.system.tenant_files import as_owner

LAST_ROW = 2**63 - 1


class NoSuchTrajectory(Exception):
    """The run has no trajectory of this name."""


@apart()
def trajectories_of(
    run_dir: Path, wanted: TrajectoryFilter, starting_after: str, limit: int
) -> tuple[list[HostedTrajectory], bool]:
    """Return up to `limit` finished trajectories behind `starting_after`, and whether there are more.

    Raises `JournalError`, and `NoSuchTrajectory` if `starting_after` does not exist.
    """
    with history_in(run_dir) as history:
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
    here = msgspec.structs.replace(wanted, step_end=segment.undone_from)
    while True:
        places = journal.trajectory_places(here, behind, limit)
        rows = journal.trajectories_at(places)
        for place, row in zip(places, rows, strict=True):
            if not _recorded_again(row, wanted, later):
                yield place, source, _retold(row, segment)
        if len(places) < limit:
            return
        behind = places[-1]


def _recorded_again(row: TrajectoryRow, wanted: TrajectoryFilter, later: Sequence[JournalReader]) -> bool:
    return any(journal.trajectory_place(wanted, row.trajectory) is not None for journal in later)


def _retold(row: TrajectoryRow, segment: Segment) -> TrajectoryRow:
    times = {"started_ns": segment.begun_ns + row.started_ns, "ended_ns": segment.begun_ns + row.ended_ns}
    return msgspec.structs.replace(row, **times)


@apart()
def trajectory_of(run_dir: Path, name: str, environment: str) -> HostedTrajectoryDetail | None:
    """Return one trajectory with its tokens. Raises `JournalError`."""
    with as_owner(run_dir):
        row = RunDirectory(run_dir).trajectories([name]).get(name)
    if row is None:
        return None
    token_ids = ids_of(row.token_ids)
    sampled = msgspec.msgpack.decode(row.sampled, type=Sampled) if row.sampled else Sampled()
    trained = sampled.trained(len(token_ids))
    logprobs, versions = np.zeros(len(token_ids)), np.zeros(len(token_ids), np.int64)
    logprobs[trained], versions[trained] = sampled.token_logprobs(), sampled.token_versions()
    return HostedTrajectoryDetail(
        **_trajectory(row).model_dump(),
        token_ids=token_ids,
        trained=trained.tolist(),
        logprobs=logprobs.tolist(),
        versions=versions.tolist(),
        text=_text(token_ids, environment),
    )


def _text(token_ids: Sequence[int], environment: str) -> str | None:
    """Return the tokens as text of the environment; None if its vocabulary is unknown."""
    point = installed("elastic.environments").get(environment)
    if point is None:
        return None
    words: Sequence[str] = point.load().vocabulary
    known = all(token_id < len(words) for token_id in token_ids)
    return "".join(words[token_id] for token_id in token_ids) if known else None


def _trajectory(row: TrajectoryRow) -> HostedTrajectory:
    return HostedTrajectory(
        id=row.trajectory,
        step=row.step,
        group=row.group,
        reward=row.reward,
        cause=row.cause,
        turns=row.turns,
        policy_tokens=row.policy_tokens,
        truncated=row.truncated,
        started_s=row.started_ns / NS_PER_S,
        ended_s=row.ended_ns / NS_PER_S,
    )
