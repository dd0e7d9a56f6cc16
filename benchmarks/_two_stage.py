"""Weights over a slow link to a site of many workers: each by itself, or through its near relay (Weave Fig. 13).

Computed bucket by bucket, wire times alone. *Flat*: every worker pulls everything over the slow link. *Two-stage*: one
worker fetches a bucket, puts it on the near relay, and all others read it there, while the next bucket comes. Of
workers on another node than the relay's all share the link between the nodes. The near relay is host memory, so a
worker's last stretch is its own PCIe; NVLink, which is faster and which the papers use, is stated and not counted on.

Live: the same with real pullers and relays on shaped links whose rates have the same ratio, at a small size.
"""

import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from _throttle import Link, LinkedRelay

from elastic.weights.choice import BYTES_PER_S_IN_GBPS
from elastic.weights.directory import DirectoryRelay
from elastic.weights.peer_cache import PeerCacheRelay
from elastic.weights.puller import Puller
from elastic.weights.relay import Relay
from elastic.weights.signing import Trust

ACROSS_GBPS, WITHIN_GBPS = 20, 400
"""Weave §6.1: between the clusters, and within one."""
PCIE_BYTES_PER_S = 55e9
"""Gen 5, 16 lanes."""
NVLINK_BYTES_PER_S = 450e9
"""An H20's, one way."""
WORKERS = 8
"""A node's GPUs, each a worker."""
MODELS = {"qwen2.5-7b": 7.62e9, "qwen2.5-14b": 14.77e9, "qwen2.5-32b": 32.76e9}
BUCKET_BYTES = 2 * (32 << 20)
NODES = {"one_node": 1, "two_nodes": 2}
PRINTED = {"one_node": [7.87, 8.33], "two_nodes": [2.62, 2.75]}
TIMEOUT_S = 600.0


def computed(delta_share: float) -> dict[str, Any]:
    """`delta_share`: a delta's bytes by those of the weights, as measured."""
    found: dict[str, Any] = {}
    for name, nodes in NODES.items():
        found[name] = {}
        for model, parameters in MODELS.items():
            size = 2 * parameters
            flat, two = flat_s(size, nodes), two_stage_s(size, nodes)
            found[name][model] = {
                "flat_s": flat,
                "two_stage_s": two,
                "with_delta_s": two_stage_s(size * delta_share, nodes),
                "flat_over_two_stage": flat / two,
            }
    found["assumed"] = {
        "across_gbps": ACROSS_GBPS,
        "within_gbps": WITHIN_GBPS,
        "pcie_gbytes_per_s": PCIE_BYTES_PER_S / 1e9,
        "nvlink_gbytes_per_s": NVLINK_BYTES_PER_S / 1e9,
        "workers_a_node": WORKERS,
        "delta_share": delta_share,
        "flat_over_two_stage_printed": PRINTED,
    }
    return found


def flat_s(size_bytes: float, nodes: int) -> float:
    """Of the slow link's users the last; its last bucket goes to the device after that."""
    last = min(BUCKET_BYTES, size_bytes)
    return nodes * WORKERS * size_bytes / (ACROSS_GBPS * BYTES_PER_S_IN_GBPS) + last / PCIE_BYTES_PER_S


def two_stage_s(size_bytes: float, nodes: int) -> float:
    """Until the last worker has the last bucket. A bucket that a worker of another node fetched is put over the link
    between the nodes before it is read over that."""
    across, within = ACROSS_GBPS * BYTES_PER_S_IN_GBPS, WITHIN_GBPS * BYTES_PER_S_IN_GBPS
    fetched_s = there_s = read_s = 0.0
    left = size_bytes
    while left > 0:
        bucket = min(BUCKET_BYTES, left)
        left -= bucket
        fetched_s += bucket / across
        there_s = max(there_s, fetched_s)
        if nodes > 1:
            there_s += (1 + (nodes - 1) * WORKERS) * bucket / within
        read_s = max(read_s, there_s) + bucket / PCIE_BYTES_PER_S
    return read_s


def live(
    publish: Callable[[Relay], Callable[[], int]], trust: Trust, size_bytes: int, across_bytes_per_s: float
) -> dict[str, Any]:
    """`publish` puts a version of `size_bytes` on a relay, and returns what puts the next one there and tells its
    number. The first delta is not timed: what decodes it is compiled then."""
    return {
        "size_bytes": size_bytes,
        "across_bytes_per_s": across_bytes_per_s,
        "within_bytes_per_s": across_bytes_per_s * WITHIN_GBPS / ACROSS_GBPS,
        **{name: _live(publish, trust, nodes, across_bytes_per_s) for name, nodes in NODES.items()},
    }


def _live(
    publish: Callable[[Relay], Callable[[], int]], trust: Trust, nodes: int, across_bytes_per_s: float
) -> dict[str, float]:
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm") as directory,
        ThreadPoolExecutor(nodes * WORKERS) as executor,
    ):
        source = DirectoryRelay(Path(directory) / "source")
        step = publish(source)

        def all_pull(pullers: list[Puller], version: int) -> float:
            begun_s = time.monotonic()
            list(executor.map(lambda puller: puller.pull(version, TIMEOUT_S), pullers))
            return time.monotonic() - begun_s

        slow = Link(across_bytes_per_s)
        flat_took_s = all_pull([Puller(LinkedRelay(source, slow), trust) for _ in range(nodes * WORKERS)], 0)
        slow, between = Link(across_bytes_per_s), Link(across_bytes_per_s * WITHIN_GBPS / ACROSS_GBPS)
        near = DirectoryRelay(Path(directory) / "near")

        def in_site(number: int) -> Puller:
            seen = near if number < WORKERS else LinkedRelay(near, between)
            cache = PeerCacheRelay(LinkedRelay(source, slow), seen, f"{number}", trust)
            return Puller(cache, trust, another_copy=cache.refuse)

        site = [in_site(number) for number in range(nodes * WORKERS)]
        two_stage_took_s = all_pull(site, 0)
        all_pull(site, step())
        with_delta_s = all_pull(site, step())
        return {
            "flat_s": flat_took_s,
            "two_stage_s": two_stage_took_s,
            "with_delta_s": with_delta_s,
            "flat_over_two_stage": flat_took_s / two_stage_took_s,
        }
