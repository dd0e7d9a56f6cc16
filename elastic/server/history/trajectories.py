"""A run's trajectories, read and told apart from the server: journals belong to tenants, and tokenizers to anybody."""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from elastic.protocol.api import HostedTrajectory, HostedTrajectoryDetail
from elastic.report import trajectories
from elastic.report.samples import Chosen, choose
from elastic.report.search import Searched, search
from elastic.report.texts import Reading, with_texts, without_texts
from elastic.runtime.journal import TrajectoryFilter
from elastic.server.history.apart import CannotBeRead, apart
from elastic.server.history.journals import history_in
from elastic.system.tenant_files import as_owner

TEXT_LIMIT_S = 20.0
"""Longest that tokens take to become text."""
NOT_WITHIN_LIMITS = "its tokens did not become text within the limits of time and memory"


@apart()
def trajectories_of(
    run_dir: Path, wanted: TrajectoryFilter, starting_after: str, limit: int
) -> tuple[list[HostedTrajectory], bool, list[str]]:
    """As `elastic.report.trajectories.page_of`, with what of the journals cannot be read."""
    with history_in(run_dir) as history:
        found, has_more = trajectories.page_of(history, wanted, starting_after, limit)
        return found, has_more, history.broken


def searched_in(
    run_dir: Path, wanted: TrajectoryFilter, text: str, reading: Reading, starting_after: str, limit: int
) -> Searched:
    """As `elastic.report.search.search`; without what is found, and with why, where that takes too long or too much
    memory."""
    try:
        return _searched_in(run_dir, wanted, text, reading, starting_after, limit)
    except CannotBeRead:
        return Searched([], no_text=NOT_WITHIN_LIMITS)


@apart(TEXT_LIMIT_S)
def _searched_in(
    run_dir: Path, wanted: TrajectoryFilter, text: str, reading: Reading, starting_after: str, limit: int
) -> Searched:
    with history_in(run_dir) as history:
        return search(history, wanted, text, reading, starting_after, limit)


def trajectory_of(run_dir: Path, name: str, reading: Reading) -> HostedTrajectoryDetail | None:
    """Return one trajectory, with its text as far as there is any. Raises `JournalError`."""
    found = _detail_of(run_dir, name)
    return None if found is None else told(run_dir, [found], reading)[0]


@apart()
def _detail_of(run_dir: Path, name: str) -> HostedTrajectoryDetail | None:
    with history_in(run_dir) as history:
        return trajectories.detail_of(history, name)


def chosen_of(run_dir: Path, reading: Reading) -> Chosen | None:
    """Return the trajectories that the run's report shows, with their texts. Raises `JournalError`."""
    chosen = _chosen_of(run_dir)
    if chosen is None:
        return None
    return msgspec.structs.replace(chosen, details=told(run_dir, chosen.details, reading))


@apart()
def _chosen_of(run_dir: Path) -> Chosen | None:
    with history_in(run_dir) as history:
        return choose(history)


def told(run_dir: Path, details: Sequence[HostedTrajectoryDetail], reading: Reading) -> list[HostedTrajectoryDetail]:
    """Return trajectories with their texts; without, and with why, where that takes too long or too much memory."""
    try:
        return _told(run_dir, details, reading)
    except CannotBeRead:
        return without_texts(details, NOT_WITHIN_LIMITS)


@apart(TEXT_LIMIT_S)
def _told(run_dir: Path, details: Sequence[HostedTrajectoryDetail], reading: Reading) -> list[HostedTrajectoryDetail]:
    with as_owner(run_dir):
        return with_texts(details, reading)
