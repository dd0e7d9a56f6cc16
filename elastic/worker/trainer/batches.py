"""Groups of trajectories as tensors."""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from elastic.config import LossConfig
from elastic.protocol.sampled import TOKEN_BYTES
from elastic.protocol.wire import TrainGroupFrame, TrajectoryData
from elastic.worker.trainer.advantages import group_advantages, overlong_penalty


class Batch(NamedTuple):
    """B trajectories right-padded to T; N counts their trained tokens, row by row."""

    token_ids: Tensor
    """[B, T]"""
    lengths: Tensor
    """[B]"""
    trained: Tensor
    """[B, T], bool."""
    logprobs: Tensor
    """[N]"""
    versions: Tensor
    """[N], of the weights that sampled the token."""
    advantages: Tensor
    """[N]"""
    origins: Tensor
    """[N], the position in `workers_of` of the worker that sampled the token; -1 where that is not known."""
    temperatures: Tensor
    """[N], at which the token was sampled; 0 for the run's."""
    sequences: Tensor
    """[N], the row of the token."""
    truncated: Tensor
    """[N], bool, of tokens of trajectories that a limit has ended."""

    def to(self, device: torch.device) -> "Batch":
        return Batch(*(tensor.to(device) for tensor in self))

    def predicting(self) -> Tensor:
        """[N], among all tokens but padding, row by row, the place of the one before each trained token."""
        before = torch.zeros_like(self.trained)
        before[:, :-1] = self.trained[:, 1:]
        there = torch.arange(self.trained.shape[1], device=before.device) < self.lengths[:, None]
        return before[there].nonzero().squeeze(1)

    def heat(self, temperature: float) -> float | Tensor:
        """At which the trained tokens were sampled in a run of this `temperature`: that, or [N, 1]."""
        own = self.temperatures
        return torch.where(own > 0, own, temperature).unsqueeze(-1) if own.any() else temperature


def micro_batches(
    trajectories: Sequence[TrajectoryData], advantages: Sequence[float], tokens_max: int
) -> Iterator[Batch]:
    """Like lengths together, as many as fit into `tokens_max` with their padding (one always does)."""
    rows = sorted(zip(trajectories, advantages, strict=True), key=lambda row: _tokens(row[0]))
    place = {worker: position for position, worker in enumerate(workers_of(trajectories))}
    start = 0
    for end in range(1, len(rows) + 1):
        if end == len(rows) or (end + 1 - start) * _tokens(rows[end][0]) > tokens_max:
            yield collate(rows[start:end], place)
            start = end


def by_member(trajectories: Sequence[TrajectoryData]) -> dict[str, float]:
    """The reward of each member of a group, however many branches it has."""
    return {trajectory.trajectory: trajectory.sampled.reward for trajectory in trajectories}


def by_policy(trajectories: Sequence[TrajectoryData], settings: LossConfig) -> dict[str, dict[str, float]]:
    """Of each policy that agents name, the rewards of the group's members in which it has sampled, however many of its
    branches they have, less what they lose by their length."""
    rewards: dict[str, dict[str, float]] = {}
    tokens = defaultdict[tuple[str, str], int](int)
    for trajectory in trajectories:
        sampled = trajectory.sampled
        rewards.setdefault(sampled.policy, {})[trajectory.trajectory] = sampled.worth
        tokens[sampled.policy, trajectory.trajectory] += sampled.tokens
    if (buffer := settings.overlong_buffer) is not None:
        for policy, members in rewards.items():
            for member in members:
                members[member] += overlong_penalty(tokens[policy, member], buffer)
    return rewards


def advantages_of(trajectories: Sequence[TrajectoryData], settings: LossConfig) -> list[float]:
    """The advantage of each row: its member's among the members in which the same policy has sampled.

    Raises `UnusableGroup` where their rewards lie too far apart for floats.
    """
    advantages: dict[tuple[str, str], float] = {}
    for policy, members in by_policy(trajectories, settings).items():
        rewards = list(members.values())
        try:
            relative = group_advantages(rewards, settings)
        except OverflowError as error:
            raise UnusableGroup(f"rewards from {min(rewards):g} to {max(rewards):g}: {error}") from error
        advantages |= {(policy, member): one for member, one in zip(members, relative, strict=True)}
    return [advantages[one.sampled.policy, one.trajectory] for one in trajectories]


def workers_of(trajectories: Sequence[TrajectoryData]) -> list[str]:
    """Return the workers that sampled the policy's tokens in them."""
    return sorted({worker for trajectory in trajectories for worker, _ in trajectory.sampled.origins})


def collate(rows: Sequence[tuple[TrajectoryData, float]], place: Mapping[str, int]) -> Batch:
    """Trajectories with their advantages as a batch; `place` has the positions of workers."""
    lengths = [_tokens(trajectory) for trajectory, _ in rows]
    token_ids = torch.zeros(len(rows), max(lengths), dtype=torch.int64)
    trained = torch.zeros_like(token_ids, dtype=torch.bool)
    logprobs: list[npt.NDArray[np.float32]] = []
    versions: list[npt.NDArray[np.int64]] = []
    origins: list[npt.NDArray[np.int64]] = []
    temperatures: list[npt.NDArray[np.float32]] = []
    for row, (trajectory, _) in enumerate(rows):
        sampled, length = trajectory.sampled, lengths[row]
        token_ids[row, :length] = torch.from_numpy(_ids(trajectory).astype(np.int64))
        trained[row, :length] = torch.from_numpy(sampled.trained(length))
        logprobs.append(sampled.token_logprobs())
        versions.append(sampled.token_versions())
        temperatures.append(sampled.token_temperatures())
        runs = sampled.origins or [("", sampled.tokens)]
        origins.append(np.repeat([place.get(worker, -1) for worker, _ in runs], [tokens for _, tokens in runs]))
    counts = torch.tensor([trajectory.sampled.tokens for trajectory, _ in rows])
    advantages, truncated = (
        torch.tensor(column).repeat_interleave(counts)
        for column in ([one for _, one in rows], [trajectory.sampled.truncated for trajectory, _ in rows])
    )
    return Batch(
        token_ids,
        torch.tensor(lengths),
        trained,
        torch.from_numpy(np.concatenate(logprobs)),
        torch.from_numpy(np.concatenate(versions)),
        advantages,
        torch.from_numpy(np.concatenate(origins)),
        torch.from_numpy(np.concatenate(temperatures)),
        torch.arange(len(rows)).repeat_interleave(counts),
        truncated,
    )


def _tokens(trajectory: TrajectoryData) -> int:
    return len(trajectory.token_ids) // TOKEN_BYTES


def _ids(trajectory: TrajectoryData) -> npt.NDArray[np.int32]:
    return np.frombuffer(trajectory.token_ids, np.int32)


class UnusableGroup(ValueError):
    """No gradient can be had from the group; the message says why."""


def check_group(group: TrainGroupFrame, vocabulary: int) -> None:
    """Raises `UnusableGroup` for a group from which no batch can be made; tokens are below `vocabulary`."""
    if not group.trajectories:
        raise UnusableGroup("has no trajectories")
    check_trajectories(group.trajectories, vocabulary)


def check_trajectories(trajectories: Iterable[TrajectoryData], vocabulary: int) -> None:
    """As `check_group`, of some of its trajectories."""
    for trajectory in trajectories:
        ids, sampled = _ids(trajectory), trajectory.sampled
        where = f"trajectory {trajectory.trajectory}"
        ends = [0, *(start + tokens for start, tokens in sampled.spans)]
        if any(start < end or not tokens for end, (start, tokens) in zip(ends, sampled.spans, strict=False)):
            raise UnusableGroup(f"{where}: the spans that the policy sampled are not one after the other")
        counts = {sum(tokens for _, tokens in runs) for runs in (sampled.spans, sampled.versions)}
        if counts != {sampled.tokens} or ends[-1] > len(ids):
            raise UnusableGroup(f"{where}: token_ids, spans, logprobs and versions differ in length")
        if sampled.origins and sum(tokens for _, tokens in sampled.origins) != sampled.tokens:
            raise UnusableGroup(f"{where}: origins are not those of its policy's tokens")
        if sampled.temperatures and sum(tokens for _, tokens in sampled.temperatures) != sampled.tokens:
            raise UnusableGroup(f"{where}: temperatures are not those of its policy's tokens")
        if not sampled.tokens or not sampled.spans[0][0]:
            raise UnusableGroup(f"{where}: needs a prompt and at least one token of the policy")
        if not math.isfinite(sampled.reward) or not math.isfinite(sampled.worth):
            raise UnusableGroup(f"{where}: its reward is {sampled.worth}")
        odd = ids[ids.view(np.uint32) >= vocabulary]
        if len(odd):
            raise UnusableGroup(f"{where}: token {odd[0]} is not in the vocabulary of {vocabulary}")


def without_overtaken(group: TrainGroupFrame, advantages: Sequence[float]) -> tuple[TrainGroupFrame, Sequence[float]]:
    """The group as if tokens of versions before its `oldest_version` were no longer the policy's; rows without any
    token left are left out. Each keeps its advantage."""
    if not group.oldest_version:
        return group, advantages
    rows: list[TrajectoryData] = []
    kept: list[float] = []
    for row, advantage in zip(group.trajectories, advantages, strict=True):
        sampled = row.sampled.since(group.oldest_version)
        if sampled.tokens:
            rows.append(msgspec.structs.replace(row, sampled=sampled))
            kept.append(advantage)
    return msgspec.structs.replace(group, trajectories=rows), kept


def policy_tokens(group: TrainGroupFrame) -> int:
    """How many tokens of the group the policy sampled."""
    return sum(trajectory.sampled.tokens for trajectory in group.trajectories)
