"""A run that agents drive, whose processes may be killed; and what its journals prove of the answers to agents."""

import contextlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from benchmarks._configurations import written
from benchmarks._crashes import FrontedRun
from benchmarks._runs import sets
from benchmarks._shapes import write_chat_policy
from elastic.core import events as e
from elastic.core.ids import parse_turn
from elastic.core.types import TrajectoryId, TurnId
from elastic.protocol.sampled import TOKEN_BYTES, Sampled, SampledBranch, ids_of
from elastic.runtime.agents import notes
from elastic.runtime.journal import JournalError, RunDirectory, TrajectoryRow
from tests.proof import trajectories

MODEL = "tiny"
ELSEWHERE = '[environment]\nname = "outside"\n'


class AgentsRun(FrontedRun):
    """A run below `directory` with these settings besides those of `agents`: a dedicated worker, and the trainer's
    device. `environments` are its sections of environments."""

    def __init__(
        self, directory: Path, *settings: str, options: Sequence[str] = (), environments: str = ELSEWHERE
    ) -> None:
        policy = write_chat_policy(directory / MODEL)
        config = written(directory / "agents.toml", "agents", policy=policy)
        config.write_text(config.read_text() + environments)
        super().__init__(directory / "runs", [str(config), "--providers", "reserved", *options, *sets(settings)])

    def driver_key(self, driver: str = "main") -> str:
        return self.secrets.driver_key(driver)

    def accepted(self) -> set[TurnId]:
        """The turns that have a token by now which will outlive the orchestrator."""
        with contextlib.suppress(JournalError), RunDirectory(self.run_dir).journals() as journals:
            return {turn for journal in journals for frame in journal.frames() for turn in frame.turns if turn}
        return set()


class Sampling(NamedTuple):
    """Tokens that were sampled in one go, with their log-probabilities."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]

    def head(self, tokens: int) -> "Sampling":
        return Sampling(self.ids[:tokens], self.logprobs[:tokens])


class Played(NamedTuple):
    """What the journals have of a run's agents.

    `asked` are the turns that were asked for, in whichever incarnation, `answers` what became an agent's answer, and
    `generated` counts turns of which any token was accepted. `twice` counts positions that were accepted again.
    """

    asked: set[TurnId]
    answers: dict[TurnId, Sampling]
    generated: int
    twice: int


def played(run: RunDirectory) -> Played:
    accepted: dict[TurnId, dict[int, tuple[int, float]]] = {}
    asked: set[TurnId] = set()
    kept: dict[TurnId, int] = {}
    twice = 0
    with run.journals() as journals:
        for journal in journals:
            for frame in journal.frames():
                for turn, (chunk, ids, logprobs) in zip(frame.turns, frame.tokens.said(), strict=True):
                    if turn:
                        tokens = accepted.setdefault(turn, {})
                        positions = range(chunk.start, chunk.start + chunk.count)
                        twice += sum(position in tokens for position in positions)
                        tokens.update(zip(positions, zip(ids, logprobs, strict=True), strict=True))
            for _, event in journal.events_of(e.TurnRequested.__name__, e.AgentNoted.__name__):
                if isinstance(event, e.TurnRequested):
                    asked.add(event.turn)
                elif isinstance(event, e.AgentNoted):
                    note = notes.decode_note(event.note)
                    if isinstance(note, notes.AnswerSettled):
                        kept[note.turn] = note.kept
    answers = {turn: _gapless(accepted.get(turn, {})).head(tokens) for turn, tokens in kept.items()}
    return Played(asked, answers, len(accepted), twice)


def trained(row: TrajectoryRow) -> list[Sampling]:
    """What of a trajectory is trained on: each stretch that was sampled in one go, over all of its branches."""
    found: list[Sampling] = []
    contexts = [(row.token_ids, msgspec.msgpack.decode(row.sampled, type=Sampled))]
    if row.branches:
        branches = msgspec.msgpack.decode(row.branches, type=list[SampledBranch])
        contexts += ((bytes(branch.token_ids), branch.sampled) for branch in branches)
    for packed, sampled in contexts:
        at, logprobs = 0, sampled.token_logprobs().tolist()
        for start, count in sampled.spans:
            ids = ids_of(packed[start * TOKEN_BYTES : (start + count) * TOKEN_BYTES])
            found.append(Sampling(tuple(ids), tuple(logprobs[at : at + count])))
            at += count
    return found


def wrongly_trained(run: RunDirectory, answers: dict[TurnId, Sampling]) -> int:
    """Counts sampled tokens of trajectories that have not failed that are not trained exactly once."""
    by_trajectory: dict[TrajectoryId, Counter[Sampling]] = {}
    for turn, answer in answers.items():
        by_trajectory.setdefault(parse_turn(turn)[0], Counter())[answer] += bool(answer.ids)
    wrong = 0
    for name, row in trajectories(run).items():
        if not row.cause:
            wanted, found = by_trajectory.get(name, Counter()), Counter(trained(row))
            wrong += sum(len(one.ids) * count for one, count in ((wanted - found) + (found - wanted)).items())
    return wrong


def _gapless(tokens: dict[int, tuple[int, float]]) -> Sampling:
    """Raises `RuntimeError` where a token is missing between others."""
    if sorted(tokens) != list(range(len(tokens))):
        raise RuntimeError(f"positions {sorted(tokens)} were accepted, and none between them")
    said: Sequence[tuple[int, float]] = [token for _, token in sorted(tokens.items())]
    return Sampling(tuple(token for token, _ in said), tuple(logprob for _, logprob in said))
