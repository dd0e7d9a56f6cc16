"""A version for an engine: its place on a relay, or its tensors; and the engine's report of having fetched it.

Light enough for every process: no tensor, no codec.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import msgspec

from elastic.weights.errors import WeightsRefusal


class RelaySource(msgspec.Struct, frozen=True, kw_only=True):
    """Where a version of a run's weights is, and whose signature counts.

    It can be pickled, and sent to each rank of an engine. Its repr keeps the tokens to itself.
    """

    run: str
    version: int
    relay: str
    """Directory or URL."""
    relay_token: str = ""
    relay_anchor: str = ""
    """The relay's certificate or that of its issuer (PEM), over HTTPS."""
    publisher: str = ""
    """The trainer's public key, in hexadecimal."""
    cache: str = ""
    """A relay that all workers of a site, or all ranks of an engine, reach fast: one copy crosses to them."""
    cache_token: str = ""
    cache_anchor: str = ""
    """As `relay_anchor`, of the cache."""

    def __repr__(self) -> str:
        return f"RelaySource(run={self.run!r}, version={self.version}, relay={self.relay!r})"


class WeightChanges(NamedTuple):
    """The elements in which a version of bfloat16 weights differs from `base`, by tensor and in order of change."""

    base: int
    elements: Sequence[tuple[str, object, object]]
    """(tensor, indices into it, flat and row-major, int64, the values there), as CPU tensors; later ones overwrite."""


class TensorSource(NamedTuple):
    """A version whose tensors are in this process: names → bfloat16 or float32 tensors that stay as they are while it
    is loaded.

    An engine that has the weights of `changes.base` in force may write only the `changes`, with the same result.
    """

    version: int
    tensors: Mapping[str, object]
    changes: WeightChanges | None = None


WeightsSource: TypeAlias = RelaySource | TensorSource


class PullReport(msgspec.Struct, frozen=True, kw_only=True):
    """What it took to fetch a version. The times add up to that of the whole pull."""

    size_bytes: int
    """Off the relay, manifests not counted."""
    full_bytes: int
    """The bytes of the whole weights that the engine then holds."""
    encode_s: float = 0.0
    """Seconds spent waiting for objects that the trainer had not put yet."""
    wire_s: float = 0.0
    """Spent waiting for the relay."""
    decode_s: float = 0.0
    refused: tuple[WeightsRefusal, ...] = ()
    """Objects that did not verify during this pull, and tiles that audits since the pull before found wrong."""

    @classmethod
    def of_ranks(cls, reports: Iterable["PullReport"]) -> "PullReport":
        """Return the report of an engine whose ranks pull at the same time: all their bytes, and the times of the
        slowest."""
        each = list(reports)
        slowest = max(each, key=lambda report: report.encode_s + report.wire_s + report.decode_s)
        return msgspec.structs.replace(
            slowest,
            size_bytes=sum(report.size_bytes for report in each),
            full_bytes=sum(report.full_bytes for report in each),
            refused=tuple(refusal for report in each for refusal in report.refused),
        )
