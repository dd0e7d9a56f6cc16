"""Rows of trajectories, packed across groups in the order in which they came. Pure, but for the tensors it makes.

A row holds whole trajectories, one after the other, up to `tokens_max` tokens; one that is longer has a row of its own.
What is in a row depends on the order of what came, and on nothing else.
"""

from collections.abc import Iterator, Sequence
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from elastic.protocol.sampled import TOKEN_BYTES
from elastic.protocol.wire import TrajectoryData
from elastic.worker.trainer.batches import Batch, collate, workers_of

Of = TypeVar("Of")


class PackedTrajectory(NamedTuple, Generic[Of]):
    """A trajectory of a group."""

    of: Of
    """The owner of the sequence."""
    trajectory: TrajectoryData
    advantage: float

    @property
    def tokens(self) -> int:
        return len(self.trajectory.token_ids) // TOKEN_BYTES


class GroupPart(NamedTuple, Generic[Of]):
    """The trajectories of one group that share a row."""

    of: Of
    batch: Batch
    workers: Sequence[str]
    """To which the batch's `origins` are positions."""


class PackedRow(NamedTuple):
    """Sequences one after the other, T tokens in all, of which N were trained."""

    token_ids: Tensor
    """[T]"""
    positions: Tensor
    """[T], each in its own sequence."""
    sequences: tuple[int, ...]
    """How long each is."""
    predicting: Tensor
    """[N], the places of the tokens before the trained ones."""
    trained_ids: Tensor
    """[N]"""


class Packer(Generic[Of]):
    """Takes trajectories and gives full rows; what does not fill one is held until more comes, or all of it is asked
    for."""

    def __init__(self, tokens_max: int) -> None:
        self._tokens_max = tokens_max
        self._held: list[PackedTrajectory[Of]] = []

    def take(self, pieces: Sequence[PackedTrajectory[Of]]) -> Iterator[list[GroupPart[Of]]]:
        """Yield the rows that are full now."""
        for piece in pieces:
            if self._held and sum(held.tokens for held in self._held) + piece.tokens > self._tokens_max:
                yield from self.rest()
            self._held.append(piece)

    def rest(self) -> Iterator[list[GroupPart[Of]]]:
        """Yield what is held, if there is any."""
        if self._held:
            held, self._held = self._held, []
            yield parts_of(held)


def parts_of(pieces: Sequence[PackedTrajectory[Of]]) -> list[GroupPart[Of]]:
    """One part for each stretch of pieces of the same group."""
    parts: list[GroupPart[Of]] = []
    begin = 0
    for end in range(1, len(pieces) + 1):
        if end == len(pieces) or pieces[end].of is not pieces[begin].of:
            stretch = pieces[begin:end]
            workers = workers_of([piece.trajectory for piece in stretch])
            place = {worker: position for position, worker in enumerate(workers)}
            batch = collate([(piece.trajectory, piece.advantage) for piece in stretch], place)
            parts.append(GroupPart(stretch[0].of, batch, workers))
            begin = end
    return parts


def row_of(batches: Sequence[Batch]) -> PackedRow:
    """The sequences of several batches as one row; trained tokens are in the order of the batches' own."""
    ids, positions, predicting, lengths = [], [], [], []
    begin = 0
    for batch in batches:
        places = torch.arange(batch.token_ids.shape[1]).expand_as(batch.token_ids)
        there = places < batch.lengths[:, None]
        ids.append(batch.token_ids[there])
        positions.append(places[there])
        predicting.append(batch.predicting() + begin)
        lengths += batch.lengths.tolist()
        begin += len(ids[-1])
    trained = torch.cat([batch.token_ids[batch.trained] for batch in batches])
    return PackedRow(torch.cat(ids), torch.cat(positions), tuple(lengths), torch.cat(predicting), trained)
