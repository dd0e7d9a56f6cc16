"""What the journals of a run prove once it is over: nothing lost, nothing twice, the bill in balance.

Every incarnation's journal is replayed through a fresh core, as one history.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from elastic.compose.incarnations import replay
from elastic.core import commands as c
from elastic.core import events as e
from elastic.core.digest import digest
from elastic.core.ids import lease_of, parse_turn, turn_id
from elastic.core.types import EndCause
from elastic.protocol import wire
from elastic.protocol.sampled import Sampled, ids_of
from elastic.report import summarise
from elastic.runtime.journal import JournalReader, MoveRow, RunDirectory, StepRow, TrajectoryRow, TurnRow

FINISHED = "finished"
"""The status of a run that came to its end by itself."""


class Verdict(msgspec.Struct, kw_only=True):
    """What the journals of a run's incarnations prove.

    Lost are accepted tokens that are not where they belong in what their trajectory came to; a duplicate's position was
    accepted before, or the bill has it once more. `groups_twice` counts groups that the report or the steps' records
    have more of than the trainer was told of. Repeated is a turn that had finished and was asked for, begun or
    generated again. `kills_under_turns` counts preempted leases that turns had to leave.
    """

    tokens_lost: int
    tokens_duplicated: int
    groups_twice: int
    turns_repeated: int
    ledger_imbalance_ns: int
    kills_under_turns: int


class _Oracle:
    """Hears a run once more."""

    def __init__(self) -> None:
        self.accepted: dict[str, dict[int, int]] = {}
        """Of each turn, token ids by position."""
        self.duplicated = self.repeated = 0
        self.trained: set[str] = set()
        self.preempted: set[str] = set()
        self._finished: set[str] = set()
        self.over: set[str] = set()
        """Trajectories that have finished."""

    def read_all(self, journal: JournalReader) -> None:
        for frame in journal.frames():
            for turn, (chunk, token_ids, _) in zip(frame.turns, frame.tokens.said(), strict=True):
                if turn:
                    tokens = self.accepted.setdefault(turn, {})
                    positions = range(chunk.start, chunk.start + chunk.count)
                    self.duplicated += sum(position in tokens for position in positions)
                    tokens.update(zip(positions, token_ids, strict=True))

    def hear(self, _: int, event: e.Event, __: wire.Tokens | None, commands: Sequence[c.Command]) -> None:
        if isinstance(event, e.TurnRequested):
            self.repeated += event.turn in self._finished
        elif isinstance(event, e.TrajectoryFinished):
            self.repeated += event.trajectory in self.over
            self.over.add(event.trajectory)
        elif isinstance(event, e.LeaseEnded) and event.cause is EndCause.PREEMPTED:
            self.preempted.add(event.lease)
        for command in commands:
            match command:
                case c.StartTurn():
                    self.repeated += command.turn in self._finished
                case c.AcceptTokens():
                    self.repeated += len(self._finished.intersection(command.turns))
                case c.FinishTurn():
                    self._finished.add(command.turn)
                case c.TrainGroup():
                    self.trained.add(command.group)
                case _:
                    pass


def check_run(run: RunDirectory) -> Verdict:
    """Of a run that has finished: whatever it accepted has come to something.

    Raises `RuntimeError` for any other run, whose unfinished trajectories would count as lost (`check_tokens` is for
    these), and where replaying the journals does not come to the state that the run ended in.
    """
    with run.journals() as journals:
        status = journals[-1].meta().get("status", "none")
    if status != FINISHED:
        raise RuntimeError(
            f"{run.path}: its status is {status!r}, and only a run that is {FINISHED!r} is judged as whole"
        )
    oracle = _Oracle()
    found = digest(replay(run, oracle.hear))
    episodes, summary = trajectories(run), summarise(run)
    with run.journals() as journals:
        for journal in journals:
            oracle.read_all(journal)
        said = journals[-1].meta()["digest"]
        turns = Counter(row.turn for journal in journals for row in journal.rows(TurnRow))
        steps = {row.step: row.record for journal in journals for row in journal.rows(StepRow)}
        left = {lease_of(row.from_worker) for journal in journals for row in journal.rows(MoveRow)}
    if found != said:
        raise RuntimeError(f"{run.path}: replaying the journals comes to another state than the run did")
    trained = sum(record.groups_trained for record in steps.values())
    tokens = sum(map(len, oracle.accepted.values()))
    return Verdict(
        tokens_lost=_lost(oracle.accepted, episodes),
        tokens_duplicated=oracle.duplicated + abs(summary.total.tokens - tokens),
        groups_twice=abs(trained - len(oracle.trained)) + abs(summary.groups_trained - len(oracle.trained)),
        turns_repeated=oracle.repeated + sum(count - 1 for count in turns.values()),
        ledger_imbalance_ns=abs(summary.ledger_imbalance_ns),
        kills_under_turns=len(oracle.preempted & left),
    )


def check_tokens(run: RunDirectory) -> tuple[int, int]:
    """Tokens lost and tokens duplicated of a run that may have ended at any moment, whatever providers it had.

    Lost are those that are not where they belong in what a finished trajectory came to, and those missing between the
    accepted ones of an unfinished one. What was accepted and is generated again all the same is duplicated, also by an
    incarnation that did not go on from the journal.
    """
    oracle = _Oracle()
    with run.journals() as journals:
        for journal in journals:
            oracle.read_all(journal)
            for t_ns, event in journal.events_of(e.TrajectoryFinished.__name__):
                oracle.hear(t_ns, event, None, ())
    finished = {name: row for name, row in trajectories(run).items() if not row.cause}
    whole: dict[str, dict[int, int]] = {}
    missing = 0
    for turn, tokens in oracle.accepted.items():
        if parse_turn(turn)[0] in finished.keys() | oracle.over:
            whole[turn] = tokens
        elif tokens:
            missing += max(tokens) + 1 - len(tokens)
    return _lost(whole, finished) + missing, oracle.duplicated


def trajectories(run: RunDirectory) -> dict[str, TrajectoryRow]:
    """Every trajectory as the last incarnation has it that knows of it."""
    with run.journals() as journals:
        return {row.trajectory: row for journal in journals for row in journal.rows(TrajectoryRow)}


def same_episode(one: TrajectoryRow, other: TrajectoryRow | None) -> bool:
    """All that is trained on is the same, bit for bit, whichever workers sampled it."""
    return other is not None and _trained_on(one) == _trained_on(other)


def _trained_on(row: TrajectoryRow) -> tuple[object, ...]:
    sampled = msgspec.msgpack.decode(row.sampled, type=Sampled) if row.sampled else Sampled()
    sampled.origins.clear()
    return row.token_ids, sampled, row.reward, row.cause, row.turns, row.truncated


def same_weights(one: Path, other: Path) -> bool:
    """Whether two runs came to the same last checkpoint, masters, moments and counters bit for bit, whichever workers
    sampled what was trained on."""
    import torch

    (name, where, mine), (other_name, elsewhere, others) = map(_last_checkpoint, (one, other))
    same = name == other_name and where == elsewhere and mine.keys() == others.keys()
    return same and all(torch.equal(tensor, others[key]) for key, tensor in mine.items())


def _last_checkpoint(run_dir: Path) -> tuple[str, object, Mapping[str, Any]]:
    """Its name, counters without figures by source, and tensors."""
    from elastic.worker.trainer.base import saved
    from elastic.worker.trainer.checkpoint import read_all

    path = saved(run_dir / "checkpoints")[-1]
    tensors, counters = read_all(path)
    metrics = {name: value for name, value in counters.metrics.items() if "/" not in name}
    return path.name, msgspec.structs.replace(counters, metrics=metrics), tensors


def _lost(accepted: Mapping[str, Mapping[int, int]], episodes: Mapping[str, TrajectoryRow]) -> int:
    """Counts accepted tokens that are missing or wrong in their trajectories.

    A trajectory's sampled tokens must be those of its turns, in order.
    """
    turns: dict[str, list[int]] = {}
    for turn in accepted:
        trajectory, number = parse_turn(turn)
        turns.setdefault(trajectory, []).append(number)
    lost = 0
    for trajectory, numbers in turns.items():
        wanted = [token for n in sorted(numbers) for _, token in sorted(accepted[turn_id(trajectory, n)].items())]
        row = episodes.get(trajectory)
        if row is None or row.cause:
            lost += len(wanted)
            continue
        token_ids = ids_of(row.token_ids)
        marks = msgspec.msgpack.decode(row.sampled, type=Sampled).trained(len(token_ids))
        found = [token for token, trained in zip(token_ids, marks, strict=True) if trained]
        lost += sum(one != other for one, other in zip(wanted, found, strict=False)) + max(0, len(wanted) - len(found))
    return lost
