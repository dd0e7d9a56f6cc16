"""Tokens as bytes: what they are packed to between the processes of a run, and in its journal.

Token ids are int32, log-probabilities float32, both little-endian, as all machines are that a run uses.
"""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

TOKEN_BYTES = 4
"""The bytes of a token's id, and of its log-probability."""

Packed: TypeAlias = bytes | bytearray | memoryview


def pack_ids(token_ids: Iterable[int]) -> bytes:
    return array("i", token_ids).tobytes()


def pack_logprobs(logprobs: Iterable[float]) -> bytes:
    return array("f", logprobs).tobytes()


def last_of(packed: Packed, end: int, tokens: int) -> bytes:
    """The last `tokens` of the first `end` tokens; all of those, where they are fewer."""
    return bytes(packed[max(end - tokens, 0) * TOKEN_BYTES : end * TOKEN_BYTES])


def ids_of(packed: Packed) -> list[int]:
    return memoryview(packed).cast("i").tolist()


def logprobs_of(packed: Packed) -> list[float]:
    return np.frombuffer(packed, np.float32).tolist()


@dataclass(slots=True)
class SampledRun:
    """A stretch of tokens that one worker has sampled with one version of the weights."""

    version: int
    worker: str
    tokens: int


class Sampled(msgspec.Struct, array_like=True):
    """What the policy sampled in an episode, and the reward that the environment gave.

    `spans` are the stretches (start, tokens) of the episode that it sampled, and `logprobs` (packed) those of their
    tokens. `versions` are runs (weights version, tokens) of these, and `origins` runs (worker, tokens); there are no
    `origins` where it is not known who sampled them. `temperatures` are runs (temperature, tokens), where tokens were
    sampled at others than the run's. `policy` is the name by which an agent asked for them, empty for the model's own;
    `policy_reward` is that of this policy in the trajectory, None where it has the trajectory's. `truncated` says that
    a limit of turns or tokens ended the episode; the trainer alone is told so here.
    """

    spans: list[tuple[int, int]] = msgspec.field(default_factory=list[tuple[int, int]])
    logprobs: bytearray = msgspec.field(default_factory=bytearray)
    versions: list[tuple[int, int]] = msgspec.field(default_factory=list[tuple[int, int]])
    origins: list[tuple[str, int]] = msgspec.field(default_factory=list[tuple[str, int]])
    reward: float = 0.0
    temperatures: list[tuple[float, int]] = msgspec.field(default_factory=list[tuple[float, int]])
    policy: str = ""
    policy_reward: float | None = None
    truncated: bool = False

    @property
    def worth(self) -> float:
        """The reward that these tokens are trained by."""
        return self.reward if self.policy_reward is None else self.policy_reward

    @property
    def tokens(self) -> int:
        return len(self.logprobs) // TOKEN_BYTES

    def take(self, start: int, logprobs: Packed, runs: Iterable[SampledRun], temperature: float | None = None) -> None:
        """Let the tokens of a turn follow, as the span that begins at `start`; `temperature` is another than the
        run's."""
        if temperature is not None or self.temperatures:
            if not self.temperatures:
                _extend(self.temperatures, 0.0, self.tokens)
            _extend(self.temperatures, temperature or 0.0, len(logprobs) // TOKEN_BYTES)
        self.spans.append((start, len(logprobs) // TOKEN_BYTES))
        self.logprobs += logprobs
        for run in runs:
            _extend(self.versions, run.version, run.tokens)
            _extend(self.origins, run.worker, run.tokens)

    def since(self, version: int) -> "Sampled":
        """What of it was sampled with weights of this version or later; itself, where that is all."""
        kept = self.token_versions() >= version
        if kept.all():
            return self
        places = np.flatnonzero(self.trained(max(start + count for start, count in self.spans)))[kept]
        stretches = np.split(places, np.flatnonzero(np.diff(places) > 1) + 1)
        return msgspec.structs.replace(
            self,
            spans=[(int(stretch[0]), len(stretch)) for stretch in stretches if len(stretch)],
            logprobs=bytearray(self.token_logprobs()[kept].tobytes()),
            versions=_kept(self.versions, kept),
            origins=_kept(self.origins, kept),
            temperatures=_kept(self.temperatures, kept),
        )

    def trained(self, tokens: int) -> npt.NDArray[np.bool_]:
        """Return whether the policy sampled each of the episode's `tokens`, as an array of that length."""
        marks = np.zeros(tokens, np.bool_)
        for start, count in self.spans:
            marks[start : start + count] = True
        return marks

    def token_temperatures(self) -> npt.NDArray[np.float32]:
        """The temperature of each sampled token; 0 for the run's."""
        if not self.temperatures:
            return np.zeros(self.tokens, np.float32)
        runs = self.temperatures
        return np.repeat(np.array([at for at, _ in runs], np.float32), [tokens for _, tokens in runs])

    def token_logprobs(self) -> npt.NDArray[np.float32]:
        return np.frombuffer(self.logprobs, np.float32)

    def token_versions(self) -> npt.NDArray[np.int64]:
        """The weights version of each sampled token."""
        return np.repeat([version for version, _ in self.versions], [tokens for _, tokens in self.versions])


class SampledBranch(msgspec.Struct, array_like=True):
    """A further context of a trajectory, numbered from 1, and what was sampled in it and in no branch before it."""

    branch: int
    token_ids: bytearray
    sampled: Sampled


_What = TypeVar("_What", int, str, float)


def _extend(runs: list[tuple[_What, int]], what: _What, tokens: int) -> None:
    if runs and runs[-1][0] == what:
        tokens += runs.pop()[1]
    if tokens:
        runs.append((what, tokens))


def _kept(runs: Iterable[tuple[_What, int]], kept: npt.NDArray[np.bool_]) -> list[tuple[_What, int]]:
    """The runs of those tokens that are kept."""
    found, start = list[tuple[_What, int]](), 0
    for what, tokens in runs:
        _extend(found, what, int(kept[start : start + tokens].sum()))
        start += tokens
    return found
