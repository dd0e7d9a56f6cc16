"""What is said to be lost: judged from the journals of runs that ended at any moment."""

from pathlib import Path

import msgspec
import pytest

from elastic.config import JournalConfig
from elastic.core.commands import AcceptTokens
from elastic.core.events import TokensReceived, TrajectoryFinished
from elastic.core.ids import parse_turn, turn_id
from elastic.core.types import Chunk
from elastic.protocol import wire
from elastic.protocol.sampled import Sampled, pack_ids, pack_logprobs
from elastic.runtime.journal import (
    JournalRecord,
    RunDirectory,
    TrajectoryRow,
    event_row,
    frame_row,
)
from tests import proof

DONE, OPEN = "0/0/0", "0/0/1"
"""A trajectory that has finished, and one that has not."""


def frame(turn: str, start: int, *token_ids: int) -> JournalRecord:
    tokens = wire.Tokens.of([(Chunk(0, start, len(token_ids), 0), token_ids, [-0.5] * len(token_ids))])
    accepted = AcceptTokens(chunks=(0,), turns=(turn,))
    return frame_row(TokensReceived(worker="spot-1", epoch=1, chunks=tokens.chunks), tokens, accepted, start)


def finished(trajectory: str, *token_ids: int) -> JournalRecord:
    """All of its tokens were sampled."""
    count = len(token_ids)
    return TrajectoryRow(
        trajectory=trajectory,
        step=0,
        group=parse_turn(trajectory)[0],
        started_ns=0,
        ended_ns=1,
        reward=1.0,
        cause="",
        turns=1,
        policy_tokens=count,
        token_ids=pack_ids(token_ids),
        sampled=msgspec.msgpack.encode(
            Sampled([(0, count)], bytearray(pack_logprobs([-0.5] * count)), [(0, count)], reward=1.0)
        ),
    )


def ended(trajectory: str) -> JournalRecord:
    return event_row(TrajectoryFinished(trajectory=trajectory, reward=1.0, tokens=1), 1)


def run_of(directory: Path, *journals: list[JournalRecord], status: str) -> RunDirectory:
    """Each journal is that of an incarnation; the last one has ended with this status."""
    run = RunDirectory(directory)
    for rows in journals:
        journal = run.begin_journal(JournalConfig(), waits=True)  # type: ignore[call-arg]
        journal.append(*rows)
        if rows is journals[-1]:
            journal.meta("status", status)
        journal.close()
    return run


T, U = turn_id(DONE, 0), turn_id(OPEN, 0)
WHOLE = [frame(T, 0, 1, 2), frame(T, 2, 3), ended(DONE), finished(DONE, 1, 2, 3)]


@pytest.mark.parametrize(
    ("journals", "expected"),
    [
        pytest.param([WHOLE, [frame(U, 0, 4, 5)]], (0, 0), id="what an interruption left unfinished is not lost"),
        pytest.param([[frame(U, 0, 4)], [frame(U, 1, 5)]], (0, 0), id="goes on in the next incarnation"),
        pytest.param([[frame(U, 0, 4)], [frame(U, 2, 6)]], (1, 0), id="a gap in an unfinished turn"),
        pytest.param([[frame(U, 0, 4)], [frame(U, 0, 4)]], (0, 1), id="generated again"),
        pytest.param([[*WHOLE[:2], finished(DONE, 1, 3)]], (2, 0), id="another trajectory than was accepted"),
        pytest.param([WHOLE[:3]], (3, 0), id="a trajectory that finished and is not kept"),
    ],
)
def test_tokens_of_a_run_that_ended_at_any_moment(
    tmp_path: Path, journals: list[list[JournalRecord]], expected: tuple[int, int]
) -> None:
    assert proof.check_tokens(run_of(tmp_path, *journals, status="failed: interrupted")) == expected


def test_only_a_run_that_has_finished_is_judged_as_whole(tmp_path: Path) -> None:
    """The tokens of what was interrupted would count as lost, of which none is."""
    run = run_of(tmp_path, WHOLE, [frame(U, 0, 4, 5)], status="failed: interrupted")
    with pytest.raises(RuntimeError, match="'failed: interrupted'"):
        proof.check_run(run)
