"""What weight updates cost: bytes, where the time went by version and worker, and which layers changed."""

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from elastic.core import events as e
from elastic.core.types import NS_PER_S
from elastic.report.history import History, Segment
from elastic.runtime.journal import PullRow, StepRow, StepWeights

PARTS = ("encode", "queue", "wire", "decode", "apply", "pause")
"""From the end of a training step to weights that are served, in order; in the first a worker waits for the trainer."""


class PublishedVersion(msgspec.Struct, frozen=True, kw_only=True):
    """What the trainer put on the relay. Shares are of the elements that differ from the version before.

    `over_full`: bytes over those of all weights. `changed_by_layer` goes from the input to the output (ROSE Fig. 6).
    """

    version: int
    at_s: float
    bytes: int
    over_full: float
    encode_s: float
    changed: float
    changed_by_layer: dict[str, float]


class WorkerPull(msgspec.Struct, frozen=True, kw_only=True):
    """One version into one worker. `split_s` adds up to the time from the order to weights that are served.

    `encode` is waiting for what the trainer still encodes (in runs of old all was encoded by then), `queue` for the
    pull before, the device and running turns, `apply` making the new weights beside the old ones, and `pause` the
    time without generation. `first` is a worker's first, which is a keyframe at least;
    `current_s` is the time since the version was published, of later ones.
    """

    at_s: float
    worker: str
    version: int
    first: bool
    bytes: int
    over_full: float | None
    split_s: dict[str, float]
    current_s: float | None


class VerificationFailure(msgspec.Struct, frozen=True, kw_only=True):
    """An object that a worker refused, at the time of its next report. `replaced`: whether that report's pull brought
    another one.
    """

    at_s: float
    worker: str
    version: int
    what: str
    reason: str
    replaced: bool


class WeightUpdates(msgspec.Struct, frozen=True, kw_only=True):
    versions: list[PublishedVersion]
    pulls: list[WorkerPull]
    refused: list[VerificationFailure]

    @property
    def layers(self) -> list[str]:
        """From the input to the output."""
        return list(dict.fromkeys(layer for version in self.versions for layer in version.changed_by_layer))

    def changed_of(self, layer: str) -> list[float]:
        """A layer's shares, by version."""
        return [v.changed_by_layer[layer] for v in self.versions if layer in v.changed_by_layer]


def weights_of(history: History) -> WeightUpdates:
    """A version that a later segment made again was published in each."""
    versions = [
        _version(row, row.weights) for row in history.rows(StepRow) if row.weights is not None and row.weights.changed
    ]
    return WeightUpdates(
        versions=versions,
        pulls=[pull for segment in history.segments for pull in _pulls(segment)],
        refused=[refused for row in history.rows(PullRow) for refused in _refused(row)],
    )


def _pulls(segment: Segment) -> list[WorkerPull]:
    published_ns: dict[int, int] = {}
    for t_ns, event in segment.events_of(e.WeightsPublished):
        published_ns.setdefault(event.version, t_ns)
    seen: set[str] = set()
    pulls: list[WorkerPull] = []
    for row in segment.rows(PullRow):
        if not row.error and row.split_s:
            pulls.append(_pull(row, published_ns, first=row.worker not in seen))
            seen.add(row.worker)
    return pulls


def _refused(row: PullRow) -> list[VerificationFailure]:
    return [
        VerificationFailure(
            at_s=row.t_ns / NS_PER_S,
            worker=row.worker,
            version=row.version,
            what=refusal.what,
            reason=refusal.reason,
            replaced=not row.error,
        )
        for refusal in row.refused
    ]


def _version(row: StepRow, weights: StepWeights) -> PublishedVersion:
    figures = {name: value or 0.0 for name, value in row.trainer.items()}
    return PublishedVersion(
        version=weights.version,
        at_s=row.t_ns / NS_PER_S,
        bytes=round(figures["weights_bytes"]),
        over_full=figures["weights_over_full"],
        encode_s=figures["weights_encode_s"],
        changed=figures["weights_changed_share"],
        changed_by_layer=weights.changed,
    )


def _pull(row: PullRow, published_ns: Mapping[int, int], first: bool) -> WorkerPull:
    since_ns = None if first else published_ns.get(row.version)
    return WorkerPull(
        at_s=row.t_ns / NS_PER_S,
        worker=row.worker,
        version=row.version,
        first=first,
        bytes=row.bytes,
        over_full=row.bytes / row.full_bytes if row.full_bytes else None,
        split_s=dict(row.split_s.items()),
        current_s=None if since_ns is None else max(0, row.t_ns - since_ns) / NS_PER_S,
    )


def mean_split_s(pulls: Sequence[WorkerPull]) -> dict[str, float]:
    """Means of a pull's parts, which add up to the mean of the whole; {} without pulls."""
    parts = [part for part in PARTS if any(part in pull.split_s for pull in pulls)]
    return {part: sum(pull.split_s.get(part, 0.0) for pull in pulls) / len(pulls) for part in parts}


def mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
