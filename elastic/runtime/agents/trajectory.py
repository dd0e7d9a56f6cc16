"""One trajectory that an agent plays: its branches, its calls and its turns, and what its driver says of it. Pure."""

from dataclasses import dataclass, field

from elastic.core.types import Nanoseconds, SamplingParameters, TrajectoryId, TurnId
from elastic.protocol.front_messages import AgentCall
from elastic.protocol.sampled import TOKEN_BYTES, SampledBranch, SampledRun
from elastic.runtime.agents.branches import Branches, Opening
from elastic.runtime.agents.joining import Calls
from elastic.runtime.agents.notes import TurnAsked
from elastic.runtime.episodes import OpenTurn, RolloutTrajectory

GIVEN_KEPT = 16
"""Answers that are kept after delivery, besides those of the last call."""


@dataclass(slots=True)
class AgentTurn:
    """A turn that a call has asked for.

    Its tokens are in `generated` until the answer is settled, and in its branch from then on. `kept` is how many of
    them are the answer, None until it is settled. `alone_ns` is since when no client waits for it.
    """

    asked: TurnAsked
    at: Opening
    generated: OpenTurn
    kept: int | None = None
    answer: bytes = b""
    given: bool = False
    """Whether a client has had the whole answer."""
    alone_ns: Nanoseconds | None = None

    @property
    def id(self) -> TurnId:
        return self.generated.id

    @property
    def call(self) -> AgentCall:
        return self.asked.call

    @property
    def tokens(self) -> int:
        return len(self.generated.token_ids) // TOKEN_BYTES

    @property
    def over(self) -> bool:
        """Whether no more tokens come."""
        return self.generated.ended is not None

    @property
    def finish(self) -> str:
        """`stop` or `length`; empty where it was given up."""
        if self.generated.ended:
            return ""
        sampling = self.generated.sampling
        return "length" if sampling is not None and self.tokens >= sampling.max_new_tokens else "stop"


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
    """Those that are not settled, or not delivered, and the latest of those that are: clients may ask again."""
    given: list[TurnId] = field(default_factory=list[TurnId])
    """Those of them that are delivered, in order."""
    asked: int = 0
    """How many turns there have been."""
    reward: float | None = None
    truncated: bool = False

    def ask(self, turn: TurnId, asked: TurnAsked, sampling: SamplingParameters | None) -> AgentTurn:
        """Open a turn. Raises `ValueError` where its branch has no such place."""
        at = self.branches.begin(asked.branch, asked.tokens, asked.ids)
        generated = OpenTurn(turn, at.prompt_tokens, prompt=self.branches.branches[at.branch].token_ids)
        generated.sampling = sampling
        opened = self.turns[turn] = AgentTurn(asked, at, generated)
        self.calls.asked(asked.call, turn, asked.choice)
        self.asked += 1
        return opened

    def settle(self, turn: AgentTurn, kept: int, answer: bytes, pinned_temperature: float) -> None:
        """The first `kept` tokens of a turn that is over are the answer, and enter its branch."""
        generated, size = turn.generated, kept * TOKEN_BYTES
        self.branches.answer(
            turn.at,
            generated.token_ids[:size],
            generated.logprobs[:size],
            head(generated.runs, kept),
            answer,
            None if turn.asked.temperature == pinned_temperature else turn.asked.temperature,
        )
        turn.kept, turn.answer = kept, answer

    def deliver(self, turn: AgentTurn) -> None:
        self.calls.delivered(turn.call, turn.id)
        turn.given = True
        self.given.append(turn.id)
        while len(self.given) > GIVEN_KEPT and self.turns[self.given[0]].call != turn.call:
            del self.turns[self.given.pop(0)]

    def withdraw(self, turn: AgentTurn) -> None:
        """The turn has come to nothing."""
        self.branches.withdraw(turn.at)
        self.calls.forget(turn.call, turn.id)
        self.turns.pop(turn.id, None)

    def episode(self) -> RolloutTrajectory:
        """What it has come to: its first branch in which anything was sampled, and the others."""
        episode = RolloutTrajectory(self.trajectory, self.started_ns, 0)
        episode.turns, episode.truncated = self.asked, self.truncated
        for place, (_, branch) in enumerate(self.branches.trained()):
            if place:
                episode.branches.append(SampledBranch(place, branch.token_ids, branch.sampled))
            else:
                episode.token_ids, episode.sampled = branch.token_ids, branch.sampled
        episode.sampled.reward = self.reward or 0.0
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
    """Who has sampled the tokens behind the first `kept`, and how many."""
    at, found = 0, dict[str, int]()
    for run in runs:
        lost = min(run.tokens, at + run.tokens - kept)
        if lost > 0:
            found[run.worker] = found.get(run.worker, 0) + lost
        at += run.tokens
    return tuple(found.items())
