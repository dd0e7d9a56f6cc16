"""A version of weights to a site behind a slow link: each worker by itself, or one copy to the site (Weave Fig. 13).

Live: a process a worker, each with the client that engines have and with the version before; relays as a pool's nodes
have them (`elastic pool-site`), the far one behind a shaped link. `direct_s`: until the last worker has the version
where each pulls it over the link. `two_stage_s`: where the workers of the site share the relay of one of its nodes, in
its memory: workers of that node read it as a directory, those of another by HTTPS over a link between the nodes. Rates
have the papers' ratio, 20 to 400, in both arms. `ratio`: direct over two-stage; it can be as large as there are workers
(`ratio_of_most`). `bytes_over_link`: what crossed the slow link by what the version has on its relay. `cpu_share`: what
all processes computed of what this machine's cores had to give; near 1 the time is the machine's.

`computed`: the papers' nodes bucket by bucket, wire times alone. All of a node's workers share its links. The near
relay is host memory, so a worker's last stretch is its own PCIe; NVLink, which is faster and which the papers use, is
stated and not counted on.
"""

import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
import numpy as np
import psutil
import torch

from benchmarks._common import PRINTED, Arguments, Figures, benchmark
from benchmarks._processes import IN_MEMORY, Child, program
from benchmarks._throttle import LinkedPort
from elastic.pool.messages import SiteRelay, SiteServed
from elastic.weights.choice import BYTES_PER_S_IN_GBPS
from elastic.weights.client import WeightsClient
from elastic.weights.codecs import warm_up
from elastic.weights.directory import DirectoryRelay
from elastic.weights.publisher import Publisher, PublishSettings
from elastic.weights.records import version_prefix
from elastic.weights.signing import SigningKey
from elastic.weights.source import RelaySource

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
DELTA_SHARE = 0.0136
"""A delta's bytes by those of the weights of which 1.3 % changed: `weights_link.py` measures it."""

BUCKETS = 64
ELEMENTS = BUCKETS << 14
VERSION_BEFORE, VERSION = 0, 1
"""The first one is small; workers have it, and their connections."""
ALONE_S, ALONE_QUICK_S = 5.0, 2.5
"""How long a copy of the version takes over the slow link."""
WORKERS_QUICK = 3
TIMEOUT_S = 300.0
KEY = SigningKey()
TRUST = KEY.trust("run")


def main(arguments: Arguments) -> Figures:
    torch.set_num_threads(1)
    warm_up()
    workers = WORKERS_QUICK if arguments.quick else WORKERS
    # Before there are threads: everybody has what is imported and compiled here.
    pullers = [Child(_pull, context=multiprocessing.get_context("fork")) for _ in range(max(NODES.values()) * workers)]
    with ExitStack() as stack:
        for puller in pullers:
            stack.enter_context(puller)
        place = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=IN_MEMORY)))
        far = stack.enter_context(_relay(place / "far"))
        size_bytes = _publish(far)
        across = size_bytes / (ALONE_QUICK_S if arguments.quick else ALONE_S)
        figures: Figures = {}
        for name, nodes in NODES.items():
            figures[name] = _measured(pullers[: nodes * workers], workers, far, place / name, size_bytes, across)
    figures["version"] = {"bytes": size_bytes, "buckets": BUCKETS, "workers_a_node": workers}
    return {**figures, "computed": computed()}


def _pull(pipe: Connection) -> None:
    """Pull each version that is named; begin anew with None."""
    client = WeightsClient()
    while True:
        try:
            source: RelaySource | None = pipe.recv()
        except EOFError:
            return
        if source is None:
            client.close()
            client = WeightsClient()
        else:
            client.stage(source, TIMEOUT_S)
            client.apply(source)
        pipe.send(client.received_bytes)


@contextmanager
def _relay(directory: Path) -> Iterator[SiteServed]:
    """A relay as a pool's node has one, on this machine."""
    directory.mkdir(parents=True)
    command = [sys.executable, "-P", "-m", "elastic.cli", "pool-site", str(directory), "--host", "127.0.0.1"]
    with program(command, 20, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        yield msgspec.json.decode(process.stdout.readline(), type=SiteServed)
        process.stdin.close()


def _publish(far: SiteServed) -> int:
    """Put keyframes of random weights there; returns the bytes on the relay of the one that counts."""
    assert far.near is not None
    relay = DirectoryRelay(Path(far.near.place))
    settings = PublishSettings(keyframe_in_buckets=True, bucket_elements=ELEMENTS // BUCKETS, tile_elements=1 << 13)
    bits = (np.random.default_rng(0).normal(0, 0.02, ELEMENTS).astype(np.float32).view(np.uint32) >> 16).astype(
        np.uint16
    )
    publisher = Publisher(relay, TRUST.run, {}, settings, key=KEY)
    weights = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)
    publisher.publish(VERSION_BEFORE, {"weights": weights[: 1 << 13]})
    publisher.publish(VERSION, {"weights": weights})
    publisher.close()
    keys = relay.list_keys(version_prefix(VERSION))
    assert sum("manifest" not in key for key in keys) >= BUCKETS, keys
    return sum(len(relay.get(key)) for key in keys)


def _measured(
    pullers: list[Child], workers: int, far: SiteServed, place: Path, size_bytes: int, across: float
) -> Figures:
    within = across * WITHIN_GBPS / ACROSS_GBPS
    assert far.far is not None
    direct_s, direct_bytes, direct_share = _all_pull(pullers, far.far, across, [None] * len(pullers))
    with _relay(place) as near:
        assert near.near is not None
        assert near.far is not None
        between = LinkedPort(_port(near.far), within)
        beyond = _at(near.far, between)
        seen = [near.near if number < workers else beyond for number in range(len(pullers))]
        two_stage_s, two_stage_bytes, two_stage_share = _all_pull(pullers, far.far, across, seen)
        between.close()
    return {
        "direct_s": direct_s,
        "two_stage_s": two_stage_s,
        "ratio": direct_s / two_stage_s,
        "ratio_of_most": direct_s / two_stage_s / len(pullers),
        "cpu_share": {"direct": direct_share, "two_stage": two_stage_share},
        "bytes_over_link": {"direct": direct_bytes / size_bytes, "two_stage": two_stage_bytes / size_bytes},
        "bytes_between_nodes": between.carried_bytes / size_bytes,
        "rates": {"across_bytes_per_s": across, "within_bytes_per_s": within, "across_to_within": within / across},
        "load": os.getloadavg()[0],
    }


def _all_pull(
    pullers: list[Child], far: SiteRelay, across: float, near: Sequence[SiteRelay | None]
) -> tuple[float, int, float]:
    """Have all pull at once over one link. Returns the seconds until the last has it, the bytes over the link, and the
    share of the cores' time that was computed."""
    link = LinkedPort(_port(far), across)
    its = _at(far, link)

    def pulled(version: int) -> None:
        for puller, relay in zip(pullers, near, strict=True):
            cache = relay or SiteRelay("")
            puller.pipe.send(
                RelaySource(
                    run=TRUST.run,
                    version=version,
                    relay=its.place,
                    relay_token=its.token,
                    relay_anchor=its.anchor,
                    publisher=TRUST.public,
                    cache=cache.place,
                    cache_token=cache.token,
                    cache_anchor=cache.anchor,
                )
            )
        for puller in pullers:
            puller.hear(TIMEOUT_S)

    pulled(VERSION_BEFORE)
    carried_before, computed_s, begun_s = link.carried_bytes, _computed_s(), time.monotonic()
    pulled(VERSION)
    took_s, computed_s = time.monotonic() - begun_s, _computed_s() - computed_s
    for puller in pullers:
        puller.pipe.send(None)
        puller.hear(TIMEOUT_S)
    link.close()
    return took_s, link.carried_bytes - carried_before, computed_s / took_s / len(os.sched_getaffinity(0))


def _computed_s() -> float:
    """What this process and all that it has started have computed."""
    me = psutil.Process()
    return sum(sum(process.cpu_times()[:2]) for process in (me, *me.children(recursive=True)))


def _port(relay: SiteRelay) -> int:
    return int(relay.place.rpartition(":")[2])


def _at(relay: SiteRelay, port: LinkedPort) -> SiteRelay:
    return SiteRelay(f"https://127.0.0.1:{port.port}", relay.token, relay.anchor)


def computed() -> Figures:
    found: Figures = {}
    for name, nodes in NODES.items():
        found[name] = {}
        for model, parameters in MODELS.items():
            size = 2 * parameters
            flat, two = flat_s(size, nodes), two_stage_s(size, nodes)
            found[name][model] = {
                "flat_s": flat,
                "two_stage_s": two,
                "with_delta_s": two_stage_s(DELTA_SHARE * size, nodes),
                "flat_over_two_stage": flat / two,
            }
    found["assumed"] = {
        "across_gbps": ACROSS_GBPS,
        "within_gbps": WITHIN_GBPS,
        "pcie_gbytes_per_s": PCIE_BYTES_PER_S / 1e9,
        "nvlink_gbytes_per_s": NVLINK_BYTES_PER_S / 1e9,
        "workers_a_node": WORKERS,
        "delta_share": DELTA_SHARE,
        "flat_over_two_stage_printed": PRINTED["weave"]["sites"],
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


if __name__ == "__main__":
    benchmark(__doc__, main)
