"""Finds a text in what trajectories say. A search reads one trajectory after the other for a bounded time; the next
search goes on after the last one that was read.

The text is looked for without regard to case, within one message: what was said, thought, or asked of a tool.
"""

import time
from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from elastic.front.rendering.transcripts import Transcriber
from elastic.protocol.api import FoundTrajectory, HostedContext, HostedTrajectory, Passage
from elastic.protocol.sampled import TOKEN_BYTES, ids_of
from elastic.report.bounds import whole
from elastic.report.history import History
from elastic.report.texts import Reading, by_tokenizer
from elastic.report.trajectories import BRANCHES_MAX, TOKENS_MAX, detail_of_row, page_of, row_of, spans_of
from elastic.runtime.journal import TrajectoryFilter, TrajectoryRow

SEARCH_S = 2.0
"""How long one search takes."""
PASSAGES_MAX = 3
"""Most passages of one trajectory that are shown."""
AROUND_CHARACTERS = 80
"""Characters that a passage shows on each side of the text."""
_LISTED = 256


class Searched(NamedTuple):
    """What a search has come to: of the trajectories up to `last`, which are `searched`, those that were `found`.

    has_more: there are others behind `last`. textless: those searched that have no text, as their tokens are gone.
    no_text: why nothing can be searched, empty where it can.
    """

    found: list[FoundTrajectory]
    searched: int = 0
    textless: int = 0
    last: str = ""
    has_more: bool = False
    no_text: str = ""


def search(
    history: History,
    wanted: TrajectoryFilter,
    text: str,
    reading: Reading,
    starting_after: str = "",
    limit: int = 20,
    for_s: float = SEARCH_S,
) -> Searched:
    """Search the wanted trajectories behind `starting_after`, in their order, until `limit` are found or `for_s` are
    over; one at least. Raises `JournalError`, and `NoSuchTrajectory` if `starting_after` does not exist."""

    def searched(transcriber: Transcriber) -> Searched:
        end_s = time.monotonic() + for_s
        found, count, textless, last = list[FoundTrajectory](), 0, 0, starting_after
        for listed, has_more in _listed(history, wanted, starting_after):
            row = row_of(history, listed.id)
            passages = None if row is None else _passages(row, text.lower(), transcriber)
            count, textless, last = count + 1, textless + (passages is None), listed.id
            if passages:
                found.append(FoundTrajectory(**listed.model_dump(), passages=passages))
            if len(found) == limit or time.monotonic() >= end_s:
                return Searched(found, count, textless, last, has_more)
        return Searched(found, count, textless, last)

    return by_tokenizer(reading, searched, lambda why: Searched([], no_text=why))


def _listed(history: History, wanted: TrajectoryFilter, after: str) -> Iterator[tuple[HostedTrajectory, bool]]:
    """The wanted trajectories in their order, each with whether there are more behind it."""
    has_more = True
    while has_more:
        rows, has_more = page_of(history, wanted, after, _LISTED)
        for place, row in enumerate(rows, 1):
            yield row, has_more or place < len(rows)
        after = rows[-1].id if rows else after


def _passages(row: TrajectoryRow, text: str, transcriber: Transcriber) -> list[Passage] | None:
    """Where a trajectory has the text, which is in lower case; None if it has no text at all."""
    if not row.token_ids:
        return None
    try:
        # Texts of all tokens are made sooner than messages of a few.
        if not any(text in transcriber.text(ids).lower() for ids in _contexts(row)):
            return []
        detail = detail_of_row(row)
    except (msgspec.DecodeError, ValueError, TypeError, IndexError):
        return None
    found = [
        passage
        for branch, shared, context in (
            (0, 0, detail),
            *((one.branch, one.shared_tokens, one) for one in detail.branches),
        )
        for passage in _in_context(context, branch, shared, text, transcriber)
    ]
    return found[:PASSAGES_MAX]


def _contexts(row: TrajectoryRow) -> Iterator[list[int]]:
    """The tokens of each context that is shown of a trajectory."""
    left = TOKENS_MAX
    branches = row.further_branches()
    for packed in (row.token_ids, *(branch.token_ids for branch in branches[:BRANCHES_MAX])):
        ids = ids_of(packed[: left * TOKEN_BYTES])
        left -= len(ids)
        yield ids


def _in_context(
    context: HostedContext, branch: int, shared_tokens: int, text: str, transcriber: Transcriber
) -> Iterator[Passage]:
    """The first passage of each message that is not of a context before this one."""
    for message in transcriber.messages(context.token_ids, spans_of(context.trained)):
        if message.start + message.tokens <= shared_tokens:
            continue
        calls = (f"{call.name}({call.arguments})" for call in message.said.tool_calls)
        for said in (message.said.content, message.said.reasoning, *calls):
            lowered = said.lower()
            at = lowered.find(text)
            if at >= 0:
                # Some letters are of another length in lower case; then that is what can be shown of it.
                yield _passage(message.role, branch, said if len(said) == len(lowered) else lowered, at, len(text))
                break


def _passage(role: str, branch: int, said: str, at: int, length: int) -> Passage:
    begin, end = max(0, at - AROUND_CHARACTERS), at + length + AROUND_CHARACTERS
    return Passage(
        role=whole(role),
        branch=branch,
        before=whole(("…" if begin else "") + said[begin:at]),
        found=whole(said[at : at + length]),
        after=whole(said[at + length : end] + ("…" if end < len(said) else "")),
    )
