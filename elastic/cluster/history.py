"""A cluster's journal as bytes, its replay, and a hash of its state. The same events lead to the same hash."""

import hashlib
from collections.abc import Iterable, Iterator

import msgspec

from elastic.cluster.cluster import Cluster
from elastic.cluster.events import ClusterEvent
from elastic.cluster.policy import ClusterPolicies
from elastic.cluster.types import Nanoseconds, PoolSpec, WaitLimits

DIGEST_BYTES = 16


class ClusterEntry(msgspec.Struct, frozen=True):
    """One event, and the time at which the cluster got it."""

    now_ns: Nanoseconds
    event: ClusterEvent


class ClusterOpening(msgspec.Struct, frozen=True):
    """The first record of a journal: the pool that the events are of."""

    now_ns: Nanoseconds
    spec: PoolSpec
    limits: WaitLimits


_encoder = msgspec.msgpack.Encoder()
_entries = msgspec.msgpack.Decoder(ClusterEntry)
_openings = msgspec.msgpack.Decoder(ClusterOpening)


def encode(record: ClusterEntry | ClusterOpening) -> bytes:
    return _encoder.encode(record)


def decoded(records: Iterable[bytes]) -> tuple[ClusterOpening, Iterator[ClusterEntry]]:
    """Return a journal's first record, and an iterator over the others.

    Raises `msgspec.ValidationError` for bytes that are not such records, and `ValueError` if there is no record.
    """
    it = iter(records)
    first = next(it, None)
    if first is None:
        raise ValueError("a cluster's journal without its first record")
    return _openings.decode(first), (_entries.decode(record) for record in it)


def replay(records: Iterable[bytes], policies: ClusterPolicies) -> Cluster:
    """Return the cluster after the last record. Commands are not carried out again. Raises as `decoded`."""
    opening, entries = decoded(records)
    cluster = Cluster(opening.spec, policies, opening.limits, opening.now_ns)
    for entry in entries:
        cluster.handle(entry.event, entry.now_ns)
    return cluster


def cluster_digest(cluster: Cluster) -> str:
    """Return a hexadecimal hash of state and waits. Order counts, since decisions may depend on it."""
    waits = [(wait.what, wait.key, wait.since_ns, wait.until_ns) for wait in cluster.waits]
    content = repr((cluster.now_ns, cluster.state, waits))  # Sums of money are longer than what msgpack takes.
    return hashlib.blake2b(content.encode(), digest_size=DIGEST_BYTES).hexdigest()
