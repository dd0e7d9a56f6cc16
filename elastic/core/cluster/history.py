"""A cluster's journal as bytes, its replay, a hash of its state, and that state as bytes. The same events lead to the
same hash, and a cluster that is restored from its saved state goes on like the one that was saved."""

import hashlib
import json
from collections.abc import Iterable, Iterator

import msgspec

from elastic.core.cluster.cluster import Cluster
from elastic.core.cluster.events import ClusterEvent
from elastic.core.cluster.policy import ClusterPolicies
from elastic.core.cluster.state import ClusterState
from elastic.core.cluster.types import Nanoseconds, PoolSpec, WaitLimits
from elastic.core.timers import Wait

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


class SavedCluster(msgspec.Struct, frozen=True, kw_only=True):
    """A cluster between two events."""

    spec: PoolSpec
    limits: WaitLimits
    state: ClusterState
    waits: list[Wait]


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
    content = repr((cluster.state, waits))  # Sums of money are longer than what msgpack takes.
    return hashlib.blake2b(content.encode(), digest_size=DIGEST_BYTES).hexdigest()


def save(cluster: Cluster) -> bytes:
    """Return the cluster's state as bytes, for `restore`. Call it between two events only."""
    saved = SavedCluster(spec=cluster.spec, limits=cluster.limits, state=cluster.state, waits=list(cluster.waits))
    return json.dumps(msgspec.to_builtins(saved, str_keys=True)).encode()  # Sums are longer than what msgpack takes.


def restore(saved: bytes, policies: ClusterPolicies) -> Cluster:
    """Return a cluster in the saved state. Raises `ValueError` for bytes that `save` has not made."""
    found = msgspec.convert(json.loads(saved), SavedCluster, str_keys=True)
    cluster = Cluster(found.spec, policies, found.limits, found.state.now_ns)
    cluster.take_over(found.state, found.waits)
    return cluster
