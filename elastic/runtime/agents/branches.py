"""The branches of a trajectory: what agents have made of its contexts, each token in the first branch that has it.

An agent that only appends makes one branch. One that edits its history, asks for several choices, or runs others beside
itself makes more: a turn goes on from the end of a branch, or from within it, which forks. A branch holds the whole
context, and of it the spans that were sampled in this branch; what it shares with an earlier one is trained there.
A branch is one policy's: a call by another policy's name forks as well, since rewards may differ. This module is pure.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from elastic.protocol.sampled import TOKEN_BYTES, Packed, Sampled, SampledRun


class AnswerMark(NamedTuple):
    """Where an answer ends that an agent may go on from: `answer_tokens` of it are the last before there."""

    branch: int
    tokens: int
    answer_tokens: int


@dataclass(slots=True)
class Branch:
    """A context (packed) and what `policy` has sampled in it. `busy` while a turn is open at its end."""

    token_ids: bytearray = field(default_factory=bytearray)
    sampled: Sampled = field(default_factory=Sampled)
    busy: bool = False
    policy: str = ""

    @property
    def tokens(self) -> int:
        return len(self.token_ids) // TOKEN_BYTES


@dataclass(slots=True)
class Opening:
    """A turn's place: behind `prompt_tokens` tokens of `branch`, which had `before_tokens` until then."""

    branch: int
    prompt_tokens: int
    before_tokens: int


@dataclass(slots=True)
class Branches:
    branches: list[Branch] = field(default_factory=list[Branch])
    marks: dict[bytes, dict[str, AnswerMark]] = field(default_factory=dict[bytes, dict[str, AnswerMark]])
    """By the digest of the messages up to an answer, and the policy whose answer it is."""

    def longest(self, chain: list[bytes], policy: str = "") -> tuple[int, AnswerMark] | None:
        """Return how many of a call's messages end at a mark, and that mark; the most there are.

        Of several such marks that of `policy` is taken, else the first one: the model is the same, and so are tokens.
        """
        for matched in range(len(chain), 0, -1):
            if marks := self.marks.get(chain[matched - 1]):
                return matched, marks.get(policy) or next(iter(marks.values()))
        return None

    def nearest(self, ids: Packed, policy: str = "") -> tuple[int | None, int]:
        """Return the branch that has the most of these tokens at its beginning, and how many; the first of equals, and
        of `policy` before others."""
        best: int | None = None
        most = 0, False
        for number, branch in enumerate(self.branches):
            tokens = _common(branch.token_ids, ids)
            if tokens and (found := (tokens, branch.policy == policy)) > most:
                best, most = number, found
        return best, most[0]

    def begin(self, branch: int | None, tokens: int, ids: Packed, policy: str = "") -> Opening:
        """Open a turn of `policy` behind the first `tokens` of `branch` and then `ids`. Raises `ValueError` where these
        are not."""
        if branch is None:
            branch, tokens = None, 0
        elif branch >= len(self.branches) or tokens > self.branches[branch].tokens:
            raise ValueError(f"there is no token {tokens} of branch {branch}")
        if branch is None or not self._goes_on(self.branches[branch], tokens, policy):
            shared = bytearray() if branch is None else self.branches[branch].token_ids[: tokens * TOKEN_BYTES]
            branch, before = len(self.branches), 0
            self.branches.append(Branch(shared, policy=policy))
        else:
            before = tokens
        open_at = self.branches[branch]
        open_at.token_ids += ids
        open_at.busy = True
        return Opening(branch, open_at.tokens, before)

    def _goes_on(self, branch: Branch, tokens: int, policy: str) -> bool:
        """Whether a turn of `policy` behind the branch's first `tokens` is at its end, and may be of it."""
        return not branch.busy and tokens == branch.tokens and policy == branch.policy

    def answer(
        self,
        at: Opening,
        token_ids: Packed,
        logprobs: Packed,
        runs: list[SampledRun],
        digest: bytes = b"",
        temperature: float | None = None,
    ) -> None:
        """The turn has come to an answer; `digest` is that of the messages up to it, where it is one.

        `temperature` is given where it is another than the run's.
        """
        branch = self.branches[at.branch]
        if token_ids:
            branch.sampled.take(branch.tokens, logprobs, runs, temperature)
        branch.token_ids += token_ids
        branch.busy = False
        if digest:
            mark = AnswerMark(at.branch, branch.tokens, len(token_ids) // TOKEN_BYTES)
            self.marks.setdefault(digest, {}).setdefault(branch.policy, mark)

    def withdraw(self, at: Opening) -> None:
        """The turn has come to nothing: its branch is as it was."""
        branch = self.branches[at.branch]
        del branch.token_ids[at.before_tokens * TOKEN_BYTES :]
        branch.busy = False

    def trained(self) -> list[tuple[int, Branch]]:
        """The branches in which anything was sampled, with their numbers."""
        return [(number, branch) for number, branch in enumerate(self.branches) if branch.sampled.spans]

    @property
    def tokens(self) -> int:
        """How many tokens the policy has sampled."""
        return sum(branch.sampled.tokens for branch in self.branches)


def _common(a: Packed, b: Packed) -> int:
    """How many tokens two contexts begin with alike."""
    low, high = 0, min(len(a), len(b)) // TOKEN_BYTES
    left, right = memoryview(a), memoryview(b)
    while low < high:
        middle = (low + high + 1) // 2
        if left[low * TOKEN_BYTES : middle * TOKEN_BYTES] == right[low * TOKEN_BYTES : middle * TOKEN_BYTES]:
            low = middle
        else:
            high = middle - 1
    return low
