"""Checks a run that agents have driven.

- An answer that an agent was given whole is trained, token for token and once; where an agent names one policy, in the
  first branch that has it. What no front has asked to be settled is trained nowhere.
- Spans of sampled tokens follow each other without overlap, and a sampled token is the one of its turn and place.
- A call that repeats an undelivered one is generated once; an equal call after delivery is a new turn.
- A trajectory has the reward that its agent was told that it has, and so has each of its policies.
- A branch has sampled tokens of one policy alone, the one by whose name they were asked for.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from elastic.compose.incarnations import StoredRun, replay
from elastic.config import Config
from elastic.core import commands as c
from elastic.core import events as e
from elastic.core.ids import parse_turn
from elastic.core.types import TrajectoryId, TurnId
from elastic.protocol.front_messages import AgentCall
from elastic.protocol.sampled import ids_of
from elastic.runtime.agents import notes
from elastic.runtime.episodes import stable_hash
from elastic.runtime.journal import TrajectoryRow
from elastic.testing.faults.shell.agents.record import AgentAnswer, AgentRecord, CallAttempt
from elastic.testing.faults.shell.models import scored, turn_tokens

Context: TypeAlias = tuple[int, ...]

UNREWARDED = "it was ended without a reward", "idle for ", "not ended in "
"""How the cause begins of a trajectory that has failed for want of a reward."""


@dataclass(slots=True)
class Journaled:
    """What the journal has of agents: for which call each turn was asked, and which turns came to nothing."""

    asked: dict[TurnId, AgentCall] = field(default_factory=dict[TurnId, AgentCall])
    nothing: set[TurnId] = field(default_factory=set[TurnId])

    def hear(self, event: e.Event, commands: Sequence[c.Command]) -> None:
        match event:
            case e.TurnRequested() if event.note:
                asked = notes.decode_note(event.note)
                assert isinstance(asked, notes.TurnAsked)
                self.asked[event.turn] = asked.call
            case e.AgentNoted():
                note = notes.decode_note(event.note)
                if isinstance(note, notes.Abandoned):
                    self.nothing.add(note.turn)
            case _:
                pass
        self.nothing.update(command.turn for command in commands if isinstance(command, c.FailTurn))


def contexts_of(row: TrajectoryRow) -> list[Context]:
    """The tokens of each of a trajectory's branches."""
    branches = (branch.token_ids for branch in row.further_branches())
    return [tuple(ids_of(ids)) for ids in (row.token_ids, *branches)]


def check_agents(
    record: AgentRecord,
    run: StoredRun,
    config: Config,
    rows: Sequence[TrajectoryRow],
    touched: set[TrajectoryId],
    *,
    by_functions: bool,
) -> None:
    """Raise `AssertionError` for what is wrong. Tokens of `touched` trajectories need not be true."""
    _require(not record.unknown, f"the run does not know what it has given: {record.unknown[:3]}")
    journaled = Journaled()
    replay(run, lambda _, event, __, commands: journaled.hear(event, commands))
    for row in rows:
        if row.reward is not None and not row.cause:
            _check_row(record, journaled, config, row, true=row.trajectory not in touched, by_functions=by_functions)
            _check_policies(record, journaled, row)
        unrewarded = row.cause.startswith(UNREWARDED)
        _require(not unrewarded or row.trajectory not in record.rewards, f"{row.trajectory} had a reward: {row.cause}")
    _check_attempts(record.attempts, journaled)


def _check_row(
    record: AgentRecord, journaled: Journaled, config: Config, row: TrajectoryRow, *, true: bool, by_functions: bool
) -> None:
    contexts, name = contexts_of(row), row.trajectory
    trained = Counter[tuple[Context, Context]]()
    first: dict[tuple[Context, Context], int] = {}
    for number, (context, sampled) in enumerate(zip(contexts, row.all_sampled(), strict=True)):
        end = 0
        for start, count in sampled.spans:
            _require(end <= start and start + count <= len(context), f"{name}: spans {sampled.spans}")
            end = start + count
            answer = context[:start], context[start:end]
            trained[answer] += 1
            first.setdefault(answer, number)
        tokens = sum(count for _, count in sampled.spans)
        told = sampled.tokens, sum(n for _, n in sampled.versions), sum(n for _, n in sampled.origins)
        _require(told == (tokens,) * 3, f"{name}: {told} of {tokens} tokens")
    given, settled = (_counted(of.get(name, ())) for of in (record.given, record.settled))
    _require(not given - trained, f"{name}: given whole and not trained: {_told(given - trained)}")
    _require(not trained - settled, f"{name}: trained and no answer: {_told(trained - settled)}")
    # Among several policies a branch may have another's answer as a part of its prompt, and have it first.
    alone = len({call.policy for turn, call in journaled.asked.items() if parse_turn(turn)[0] == name}) == 1
    for (before, ids), number in first.items() if alone else ():
        whole = before + ids
        earlier = [at for at in range(number) if contexts[at][: len(whole)] == whole]
        _require(not earlier or settled[before, ids] > 1, f"{name}: {whole} is of branch {earlier}, not {number}")
    for answer in record.given.get(name, ()) if true else ():
        _check_answer(record, config, answer)
    reward = scored(contexts[0]) if by_functions else record.rewards.get(name, row.reward)
    _require(row.reward == reward, f"{name}: reward {row.reward} instead of {reward}")


def _check_policies(record: AgentRecord, journaled: Journaled, row: TrajectoryRow) -> None:
    name = row.trajectory
    by_answer: defaultdict[tuple[Context, Context], set[str]] = defaultdict(set)
    for answer in record.settled.get(name, ()):
        if (call := journaled.asked.get(answer.turn)) is not None:
            by_answer[answer.context, answer.token_ids].add(call.policy)
    for number, (context, sampled) in enumerate(zip(contexts_of(row), row.all_sampled(), strict=True)):
        for start, count in sampled.spans:
            asked = by_answer[context[:start], context[start : start + count]]
            _require(not asked or sampled.policy in asked, f"{name}: branch {number} of {sampled.policy!r} has {asked}")
        told = record.policy_rewards.get((name, sampled.policy), sampled.policy_reward)
        _require(
            sampled.policy_reward == told,
            f"{name}: {sampled.policy!r} has the reward {sampled.policy_reward} instead of {told}",
        )
        _require(sampled.policy != "" or sampled.policy_reward is None, f"{name}: the model's own name has a reward")


def _counted(answers: Iterable[AgentAnswer]) -> Counter[tuple[Context, Context]]:
    return Counter((answer.context, answer.token_ids) for answer in answers if answer.token_ids)


def _told(answers: Counter[tuple[Context, Context]]) -> str:
    return ", ".join(f"{times} x {list(ids)} behind {list(before)}" for (before, ids), times in answers.items())


def _check_answer(record: AgentRecord, config: Config, answer: AgentAnswer) -> None:
    """Check that an answer is what the seed gives for its turn."""
    trajectory, number = parse_turn(answer.turn)
    seed = record.seeds.get(answer.turn, config.run.seed)
    noise = stable_hash(seed, *(int(part) for part in trajectory.split("/")), number)
    tokens = turn_tokens(noise, config.rollout.max_tokens_per_turn)
    found = list(answer.token_ids)
    _require(found == tokens[: len(found)], f"{answer.turn}: {found} instead of {tokens}")


def _check_attempts(attempts: Sequence[CallAttempt], journaled: Journaled) -> None:
    last: defaultdict[tuple[str, str, bytes], list[CallAttempt]] = defaultdict(list)
    for attempt in attempts:
        call = attempt.call
        before = last[attempt.trajectory, call.route, call.digest]
        if before:
            _check_attempt(before[-1], attempt, journaled)
        before.append(attempt)


def _check_attempt(former: CallAttempt, attempt: CallAttempt, journaled: Journaled) -> None:
    was, now = set(former.turns.values()), set(attempt.turns.values())
    if attempt.repeated:
        _require(not was & now, f"an equal call after delivery has {was & now} once more")
        return
    kept = [turn for turn in was if _same(journaled.asked.get(turn), former.call) and turn not in journaled.nothing]
    if len(kept) == len(was) and not former.delivered:
        _require(was <= now, f"{attempt.call} had {was}, and was generated once more as {now}")


def _same(asked: AgentCall | None, call: AgentCall) -> bool:
    return asked is not None and (asked.route, asked.digest) == (call.route, call.digest)


def _require(holds: bool, found: str) -> None:
    if not holds:
        raise AssertionError(found)
