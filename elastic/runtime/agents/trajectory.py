"""One trajectory that an agent plays: its branches, its calls and its turns, and what its driver says of it. Pure."""

import statistics
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from elastic.core.types import Nanoseconds, SamplingParameters, TrajectoryId, TurnId
from elastic.protocol.front_messages import HISTORY_BYTES_MAX, AgentCall
from elastic.protocol.sampled import TOKEN_BYTES, SampledBranch, SampledRun, ids_of
from elastic.runtime.agents.branches import Branches, Opening
from elastic.runtime.agents.joining import Calls
from elastic.runtime.agents.notes import TurnAsked
from elastic.runtime.episodes import OpenTurn, RolloutTrajectory


class HistoryPiece(NamedTuple):
    """What was said up to an answer, behind an earlier one (of this digest; empty for none)."""

    behind: bytes
    piece: bytes


@dataclass(slots=True)
class AgentTurn:
    """A turn that a call has asked for.

    Its tokens are in `generated` until a client has had the answer, and in its branch from when that is settled. `kept`
    is how many of them are the answer, None until then; `sampled_before` of the branch's were sampled earlier.
    `alone_ns` is since when no client waits for it; it was `cut_off` if its client's front has ended then.
    """

    asked: TurnAsked
    at: Opening
    generated: OpenTurn
    kept: int | None = None
    answer: bytes = b""
    """The digest of all that was said up to its answer."""
    sampled_before: int = 0
    given: bool = False
    """Whether a client has had the whole answer."""
    alone_ns: Nanoseconds | None = None
    cut_off: bool = False
    aborted: bool = False
    """Whether somebody else than its client has ended it."""

    @property
    def id(self) -> TurnId:
        return self.generated.id

    @property
    def call(self) -> AgentCall:
        return self.asked.call

    @property
    def tokens(self) -> int:
        if self.given and self.kept is not None:
            return self.kept
        return len(self.generated.token_ids) // TOKEN_BYTES

    @property
    def over(self) -> bool:
        """Whether no more tokens come."""
        return self.generated.ended is not None

    @property
    def finish(self) -> str:
        """`stop`, `length` or `abort`; empty where it was given up."""
        if self.generated.ended:
            return ""
        if self.aborted:
            return "abort"
        sampling = self.generated.sampling
        if sampling is None or self.tokens < sampling.max_new_tokens:
            return "stop"
        last = ids_of(self.generated.token_ids[-TOKEN_BYTES:])
        return "length" if set(last).isdisjoint(sampling.stop_token_ids) else "stop"

    def shorten(self, kept: int) -> None:
        """It ends behind its first `kept` tokens."""
        generated = self.generated
        del generated.token_ids[kept * TOKEN_BYTES :]
        del generated.logprobs[kept * TOKEN_BYTES :]
        generated.runs = head(generated.runs, kept)
        generated.ended = generated.ended or ""


@dataclass(slots=True)
class AgentTrajectory:
    """`name` is what its driver calls its group; `task` is the driver's own."""

    trajectory: TrajectoryId
    started_ns: Nanoseconds
    driver: str
    name: str
    task: bytes
    heard_ns: Nanoseconds
    branches: Branches = field(default_factory=Branches)
    calls: Calls = field(default_factory=Calls)
    turns: dict[TurnId, AgentTurn] = field(default_factory=dict[TurnId, AgentTurn])
    """Also those that are delivered: clients may ask again."""
    histories: dict[bytes, HistoryPiece] = field(default_factory=dict[bytes, HistoryPiece])
    """By the digest of the messages up to an answer, of answers that clients may go on from by their names."""
    asked: int = 0
    """The number of turns, of all env workers that played it."""
    asked_before: int = 0
    """By those who played it before, and are gone."""
    reward: float | None = None
    policy_rewards: dict[str, float] = field(default_factory=dict[str, float])
    """The rewards of policies that have their own."""
    truncated: bool = False
    metrics: dict[str, float] = field(default_factory=dict[str, float])

    @property
    def awaited(self) -> bool:
        """Whether a client waits for a turn of it."""
        return any(turn.alone_ns is None and not turn.given for turn in self.turns.values())

    @property
    def waits(self) -> bool:
        """Whether it waits for the policy, as far as is known."""
        return any(not turn.given for turn in self.turns.values())

    @property
    def played(self) -> int:
        """How many turns there have been by who plays it now."""
        return self.asked - self.asked_before

    @property
    def policies(self) -> list[str]:
        """Those that have sampled anything, in the order of their first branches."""
        return list(dict.fromkeys(branch.policy for _, branch in self.branches.trained()))

    @property
    def unrewarded(self) -> list[str]:
        """Those of the policies that have neither a reward of their own nor the trajectory's."""
        return [] if self.reward is not None else [one for one in self.policies if one not in self.policy_rewards]

    @property
    def worth(self) -> float | None:
        """Its reward: the one that it was given, else the mean of its policies' own, if they all have one."""
        if self.reward is not None or self.unrewarded or not self.policies:
            return self.reward
        return statistics.fmean(self.policy_rewards[policy] for policy in self.policies)

    def by_policy(self, reward: float) -> dict[str, float]:
        """What each of its policies is trained by, if the trajectory is worth `reward`."""
        return {policy: self.policy_rewards.get(policy, reward) for policy in self.policies}

    def given_reward(self, policy: str) -> float | None:
        """What it was given for this policy; the trajectory's reward for none."""
        return self.policy_rewards.get(policy) if policy else self.reward

    def take_reward(self, policy: str, reward: float) -> None:
        if policy:
            self.policy_rewards[policy] = reward
        else:
            self.reward = reward

    def ask(self, turn: TurnId, asked: TurnAsked, sampling: SamplingParameters | None) -> AgentTurn:
        """Open a turn. Raises `ValueError` where its branch has no such place."""
        at = self.branches.begin(asked.branch, asked.tokens, asked.ids, asked.call.policy)
        generated = OpenTurn(turn, at.prompt_tokens, prompt=self.branches.branches[at.branch].token_ids)
        generated.sampling = sampling
        opened = self.turns[turn] = AgentTurn(asked, at, generated)
        self.calls.asked(asked.call, turn, asked.choice)
        self.asked += 1
        return opened

    def settle(self, turn: AgentTurn, kept: int, answer: bytes, pinned_temperature: float) -> None:
        """The first `kept` tokens of a turn that is over are the answer, and enter its branch."""
        generated, size = turn.generated, kept * TOKEN_BYTES
        turn.sampled_before = self.branches.branches[turn.at.branch].sampled.tokens
        self.branches.answer(
            turn.at,
            generated.token_ids[:size],
            generated.logprobs[:size],
            head(generated.runs, kept),
            answer,
            None if turn.asked.temperature == pinned_temperature else turn.asked.temperature,
        )
        turn.kept = kept
        turn.answer = answer

    def keeps(self, answer: bytes, history: bytes, behind: bytes) -> bool:
        """Whether what was said up to an answer is kept: if all of it is known then, and it is not too much."""
        if not (history and answer) or answer in self.histories or (behind and behind not in self.histories):
            return False
        return len(history) + sum(len(kept.piece) for kept in self.histories.values()) <= HISTORY_BYTES_MAX

    def known(self, chain: list[bytes]) -> int:
        """How many of a call's messages are in a history."""
        if not self.histories:
            return 0
        return next((number for number in range(len(chain), 0, -1) if chain[number - 1] in self.histories), 0)

    def recall(self, turn: TurnId) -> list[bytes]:
        """All that was said up to the turn's answer, piece by piece; empty where that is not known."""
        pieces: list[bytes] = []
        answer = self.turns[turn].answer if turn in self.turns else b""
        while answer and (found := self.histories.get(answer)) is not None:
            pieces.append(found.piece)
            answer = found.behind
        return pieces[::-1]

    def deliver(self, turn: AgentTurn) -> None:
        self.calls.delivered(turn.call, turn.id)
        turn.given = True
        turn.generated.token_ids, turn.generated.logprobs = bytearray(), bytearray()
        turn.asked = msgspec.structs.replace(turn.asked, ids=b"")

    def said(self, turn: AgentTurn) -> tuple[bytes, bytes]:
        """The turn's ids and log-probabilities so far, packed."""
        if not turn.given or not turn.kept:
            return bytes(turn.generated.token_ids), bytes(turn.generated.logprobs)
        branch, size = self.branches.branches[turn.at.branch], turn.kept * TOKEN_BYTES
        at, drawn = turn.at.prompt_tokens * TOKEN_BYTES, turn.sampled_before * TOKEN_BYTES
        return bytes(branch.token_ids[at : at + size]), bytes(branch.sampled.logprobs[drawn : drawn + size])

    def withdraw(self, turn: AgentTurn) -> None:
        """The turn has come to nothing."""
        self.branches.withdraw(turn.at)
        self.calls.forget(turn.call, turn.id)
        self.turns.pop(turn.id, None)

    def episode(self) -> RolloutTrajectory:
        """What it has come to: its first branch in which anything was sampled, and the others."""
        episode = RolloutTrajectory(self.trajectory, self.started_ns, 0)
        episode.turns, episode.truncated = self.played, self.truncated
        episode.task, episode.metrics = self.task, self.metrics
        for place, (_, branch) in enumerate(self.branches.trained()):
            branch.sampled.policy = branch.policy
            branch.sampled.policy_reward = self.policy_rewards.get(branch.policy)
            if place:
                episode.branches.append(SampledBranch(place, branch.token_ids, branch.sampled))
            else:
                episode.token_ids, episode.sampled = branch.token_ids, branch.sampled
        episode.sampled.reward = self.worth or 0.0
        return episode


def head(runs: list[SampledRun], tokens: int) -> list[SampledRun]:
    """The runs of the first tokens."""
    left, found = tokens, list[SampledRun]()
    for run in runs:
        if left <= 0:
            break
        found.append(SampledRun(run.version, run.worker, min(left, run.tokens)))
        left -= run.tokens
    return found


def behind(runs: list[SampledRun], kept: int) -> tuple[tuple[str, int], ...]:
    """Return the workers that have sampled the tokens behind the first `kept`, and how many each."""
    at, found = 0, dict[str, int]()
    for run in runs:
        lost = min(run.tokens, at + run.tokens - kept)
        if lost > 0:
            found[run.worker] = found.get(run.worker, 0) + lost
        at += run.tokens
    return tuple(found.items())
