"""Groups of trajectories as tensors."""

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from elastic.protocol.wire import TrainGroupFrame, TrajectoryData


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

    def to(self, device: torch.device) -> "Batch":
        return Batch(*(tensor.to(device) for tensor in self))


def micro_batches(
    trajectories: Sequence[TrajectoryData], advantages: Sequence[float], tokens_max: int
) -> Iterator[Batch]:
    """Like lengths together, as many as fit into `tokens_max` with their padding (one always does)."""
    rows = sorted(zip(trajectories, advantages, strict=True), key=lambda row: len(row[0].token_ids))
    place = {worker: position for position, worker in enumerate(workers_of(trajectories))}
    start = 0
    for end in range(1, len(rows) + 1):
        if end == len(rows) or (end + 1 - start) * len(rows[end][0].token_ids) > tokens_max:
            yield _collate(rows[start:end], place)
            start = end


def workers_of(trajectories: Sequence[TrajectoryData]) -> list[str]:
    """Who sampled the policy's tokens in them."""
    return sorted({worker for trajectory in trajectories for worker, _ in trajectory.origins})


def _collate(rows: Sequence[tuple[TrajectoryData, float]], place: Mapping[str, int]) -> Batch:
    lengths = [len(trajectory.token_ids) for trajectory, _ in rows]
    token_ids = torch.zeros(len(rows), max(lengths), dtype=torch.int64)
    trained = torch.zeros_like(token_ids, dtype=torch.bool)
    logprobs = torch.zeros_like(token_ids, dtype=torch.float32)
    versions = torch.zeros_like(token_ids)
    origins: list[int] = []
    for row, (trajectory, _) in enumerate(rows):
        token_ids[row, : lengths[row]] = torch.tensor(trajectory.token_ids)
        trained[row, : lengths[row]] = torch.tensor(trajectory.trained, dtype=torch.bool)
        logprobs[row, : lengths[row]] = torch.tensor(trajectory.logprobs)
        versions[row, : lengths[row]] = torch.tensor(trajectory.versions)
        if trajectory.origins:
            origins += [place[worker] for worker, count in trajectory.origins for _ in range(count)]
        else:
            origins += [-1] * sum(map(bool, trajectory.trained))
    advantages = torch.tensor([advantage for _, advantage in rows]).unsqueeze(1).expand_as(token_ids)
    of_tokens = (logprobs[trained], versions[trained], advantages[trained])
    return Batch(token_ids, torch.tensor(lengths), trained, *of_tokens, torch.tensor(origins))


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
        count = len(trajectory.token_ids)
        where = f"trajectory {trajectory.trajectory}"
        if any(len(each) != count for each in (trajectory.trained, trajectory.logprobs, trajectory.versions)):
            raise UnusableGroup(f"{where}: token_ids, trained, logprobs and versions differ in length")
        if trajectory.origins and sum(n for _, n in trajectory.origins) != sum(map(bool, trajectory.trained)):
            raise UnusableGroup(f"{where}: origins are not those of its policy's tokens")
        if not any(trajectory.trained) or trajectory.trained[0]:
            raise UnusableGroup(f"{where}: needs a prompt and at least one token of the policy")
        if not math.isfinite(trajectory.reward):
            raise UnusableGroup(f"{where}: its reward is {trajectory.reward}")
        odd = next((token for token in trajectory.token_ids if not 0 <= token < vocabulary), None)
        if odd is not None:
            raise UnusableGroup(f"{where}: token {odd} is not in the vocabulary of {vocabulary}")


def policy_tokens(group: TrainGroupFrame) -> int:
    """How many tokens of the group the policy sampled."""
    return sum(map(bool, itertools.chain.from_iterable(trajectory.trained for trajectory in group.trajectories)))
