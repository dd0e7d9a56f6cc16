"""Which rank holds which part of which tensor, and the cells that all layouts have in common. Pure.

A *box* is a part of a full tensor. A rank's own tensors are made of boxes; fused ones of several, stacked along
their first dimension. *Cells* are the common refinement of all boxes of trainers and workers: no rank holds a part
of one, so whatever is published by cells can be put together by each reader that needs it (ROSE §4.2). A version lies
as its cells one after the other; tiles do not cross cells, and buckets do not cross from what one group of workers
hosts, or one trainer rank publishes, to what another does.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain, pairwise, product
from math import prod
from typing import NamedTuple

Shape = tuple[int, ...]


class Box(NamedTuple):
    """Elements `begin` to `end` of a full tensor, in each of its dimensions."""

    tensor: str
    begin: Shape
    end: Shape

    @property
    def shape(self) -> Shape:
        return tuple(end - begin for begin, end in zip(self.begin, self.end, strict=True))

    @property
    def elements(self) -> int:
        return prod(self.shape)

    def contains(self, other: "Box") -> bool:
        return self.tensor == other.tensor and self.overlap(other) == other

    def overlap(self, other: "Box") -> "Box | None":
        """The common part of two boxes; None where they do not meet."""
        begin = tuple(map(max, self.begin, other.begin))
        end = tuple(map(min, self.end, other.end))
        apart = self.tensor != other.tensor or any(b >= e for b, e in zip(begin, end, strict=True))
        return None if apart else Box(self.tensor, begin, end)


class LocalTensor(NamedTuple):
    """A rank's own tensor, as boxes stacked along the first dimension. Rows behind the last box's are padding.

    One with more dimensions than its boxes (experts) is their stack, cut into pieces of equal size.
    """

    shape: Shape
    boxes: tuple[Box, ...]

    @property
    def stacked_shape(self) -> Shape:
        """With as many dimensions as its boxes; elements lie the same."""
        tail = self.boxes[0].shape[1:] if self.boxes else self.shape[1:]
        extra = len(self.shape) - 1 - len(tail)
        return (prod(self.shape[: extra + 1]), *tail) if self.shape and extra else self.shape

    def rows(self) -> Iterable[tuple[int, Box]]:
        """Each box with the row of this tensor at which it begins."""
        row = 0
        for box in self.boxes:
            yield row, box
            row += box.shape[0] if box.shape else 1


Shard = Mapping[str, LocalTensor]
"""A rank's own tensors, by the names it has for them."""

ShardOf = Callable[[Mapping[str, Shape]], Shard]
"""Makes a rank's shard of the shapes of the model's tensors, once."""


class Cell(NamedTuple):
    box: Box
    owner: int
    """The trainer rank that publishes it."""
    audience: frozenset[int]
    """The worker shards that host it, numbered as they were given."""


def whole(shapes: Mapping[str, Shape]) -> Shard:
    """The shard that holds every tensor whole."""
    return {name: LocalTensor(shape, (whole_box(name, shape),)) for name, shape in shapes.items()}


def whole_shapes(boxes: Iterable[Box]) -> dict[str, Shape]:
    """The shapes of the tensors that these boxes are all of."""
    shapes: dict[str, Shape] = {}
    for box in boxes:
        shapes[box.tensor] = tuple(map(max, shapes.get(box.tensor, box.end), box.end))
    return shapes


def whole_box(name: str, shape: Shape) -> Box:
    return Box(name, (0,) * len(shape), shape)


def cells(shapes: Mapping[str, Shape], trainer: Sequence[Shard], workers: Sequence[Shard] = ()) -> tuple[Cell, ...]:
    """The common refinement, in the order in which a version lies: by owner, then by audience, then as in `shapes`.

    Of the ranks that hold a cell the one with the least to publish so far owns it, so that data-parallel ranks
    publish disjoint parts. Raises `ValueError` for a box beyond its tensor, and a cell that no trainer rank holds.
    """
    holders, hosts = ([_boxes_by_tensor(shard) for shard in shards] for shards in (trainer, workers))
    _check_boxes(shapes, chain(holders, hosts))
    load = [0] * len(trainer)
    found: list[Cell] = []
    for name, shape in shapes.items():
        boxes = [box for rank in chain(holders, hosts) for box in rank.get(name, ())]
        for box in _grid(whole_box(name, shape), boxes):
            owners = _ranks_with(holders, box)
            if not owners:
                raise ValueError(f"tensor {name}: no trainer rank holds its elements {box.begin} to {box.end}")
            owner = min(owners, key=lambda rank: (load[rank], rank))
            load[owner] += box.elements
            found.append(Cell(box, owner, frozenset(_ranks_with(hosts, box))))
    return tuple(sorted(found, key=lambda cell: (cell.owner, sorted(cell.audience))))


def _grid(full: Box, boxes: Iterable[Box]) -> Iterable[Box]:
    """What cutting `full` at every edge of `boxes` leaves; nothing of an empty tensor."""
    cuts = [set(edges) for edges in zip(full.begin, full.end, strict=True)]
    for box in boxes:
        for dimension, edges in enumerate(zip(box.begin, box.end, strict=True)):
            cuts[dimension].update(edges)
    for intervals in product(*(pairwise(sorted(edges)) for edges in cuts)):
        yield Box(full.tensor, tuple(b for b, _ in intervals), tuple(e for _, e in intervals))


def _boxes_by_tensor(shard: Shard) -> dict[str, list[Box]]:
    boxes: dict[str, list[Box]] = {}
    for box in chain.from_iterable(local.boxes for local in shard.values()):
        boxes.setdefault(box.tensor, []).append(box)
    return boxes


def _ranks_with(ranks: Sequence[Mapping[str, Sequence[Box]]], cell: Box) -> list[int]:
    return [n for n, boxes in enumerate(ranks) if any(box.contains(cell) for box in boxes.get(cell.tensor, ()))]


def _check_boxes(shapes: Mapping[str, Shape], ranks: Iterable[Mapping[str, Sequence[Box]]]) -> None:
    for box in (box for boxes in ranks for several in boxes.values() for box in several):
        shape = shapes.get(box.tensor)
        if shape is None:
            raise ValueError(f"tensor {box.tensor}: part of a shard, but not of the model")
        if len(box.begin) != len(shape) or any(
            not 0 <= b <= e <= size for b, e, size in zip(box.begin, box.end, shape, strict=True)
        ):
            raise ValueError(f"tensor {box.tensor}: elements {box.begin} to {box.end} are not within {shape}")


def needed(boxes: Iterable[Box], shard: Shard) -> list[bool]:
    """Returns for each of `boxes`, a version's cells, whether `shard` overlaps it and so needs it.

    Raises `ValueError` where the cells do not cover the shard.
    """
    hosted = _boxes_by_tensor(shard)
    missing = {mine: mine.elements for several in hosted.values() for mine in several}
    found: list[bool] = []
    for box in boxes:
        overlaps = {mine: both for mine in hosted.get(box.tensor, ()) if (both := box.overlap(mine)) is not None}
        for mine, both in overlaps.items():
            missing[mine] -= both.elements
        found.append(bool(overlaps))
    for mine, elements in missing.items():
        if elements:
            where = f"tensor {mine.tensor}: elements {mine.begin} to {mine.end}"
            raise ValueError(f"{where} are hosted, but {elements} of them are not in the version")
    return found


def breaks(cells: Sequence[Cell]) -> list[int]:
    """The cells, by number, that have another owner or audience than the one before; no bucket goes on into these."""
    pairs = enumerate(pairwise(cells), start=1)
    return [at for at, (before, cell) in pairs if (before.owner, before.audience) != (cell.owner, cell.audience)]


def owned(cells: Sequence[Cell], rank: int) -> range:
    """The cells that `rank` publishes, by number."""
    owners = [cell.owner for cell in cells]
    return range(bisect_left(owners, rank), bisect_left(owners, rank + 1))
