"""Weights over a shaped link: from published to applied, what crosses the link, and who holds up whom.

`gbps.RATE.over_bound`: publish → applied of a delta of 256 MB of weights (1.3 % changed), both sides at once, over
max(encode, wire, decode and apply), each measured alone; the link is a token bucket before the relay. The codec is the
one that is chosen for the rate. `coo_over_ours`: COO (ROSE §4.2) on the same path, version by version in turn with
ours, both by the clock; `coo_cpu_over_ours`: the same by the CPU time of both sides. `coo_bound_over_ours`: the slowest
stage of COO alone over all of ours, which no path can reach. `dense_over_ours` (zstd of shuffled bytes) and
`raw_over_ours`: the same path with these. `scheduled` is the same from CPU times of the stages alone, bucket by bucket,
as if each side had a core of its own: on a machine that is busy otherwise it says what the clock cannot. So does
`over_bound_on_cores`: both sides at once, less the time that they were ready and had no core (the kernel's account),
over the CPU time of the slowest stage; `cores` is how many they had.

`slow_link_copies`: bytes over the slow link by those of the blobs that crossed it, for pullers of one site that join
while others pull, and leave at any of their requests, with what they had claimed: `claims_taken_over` counts what then
expired. `others_slowdown`: p99 of the time from published to current with one puller's link throttled to 1 %, for the
others, over the same without; every puller has a link of its own there. `others_slowdown_in_site`: the same where they
share what they fetch, the first keyframe too. Everything shares this machine's cores.

`s3`: a keyframe over an object store behind shaped links (`_object_store`), where boto3 and moto are installed.
"""

import math
import random
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import count, islice, pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from benchmarks._common import Arguments, Figures, benchmark
from benchmarks._coo import Coo
from benchmarks._object_store import measure_object_store
from benchmarks._processes import IN_MEMORY
from benchmarks._throttle import Link, LinkedRelay, RelayAround
from benchmarks._updates import Snapshot, snapshots
from elastic.weights.blobs import Buffer
from elastic.weights.choice import BYTES_PER_S_IN_GBPS
from elastic.weights.codecs import register
from elastic.weights.codecs.base import Ends
from elastic.weights.codecs.sums import apply_update
from elastic.weights.directory import DirectoryRelay
from elastic.weights.errors import RelayError
from elastic.weights.peer_cache import PeerCacheRelay
from elastic.weights.publisher import Publisher, PublishSettings
from elastic.weights.puller import Puller
from elastic.weights.relay import Relay
from elastic.weights.signing import SigningKey
from elastic.weights.tensors import filling, flatten

KEY = SigningKey()
TRUST = KEY.trust("run")

RATES_GBPS = (1, 5, 20)
WEIGHTS_BYTES = 256 << 20
BUCKET_ELEMENTS = 8 << 20
TIMEOUT_S = 600.0
NEVER = 10**6

WARM_UP = 2
"""Versions until all memory is memory that was used before."""

PULLERS = 100
SMALL_ELEMENTS = 2_000_000
SMALL_LINK_BYTES_PER_S = 20e6
JOINING_S = 0.5
"""Within this time after a version is published its pullers begin."""
REQUESTS = 40
"""Those who leave do so before as many requests; a version takes about that."""

Tensors = dict[str, Tensor]


def main(arguments: Arguments) -> Figures:
    torch.set_num_threads(1)
    register(Coo())
    rates = RATES_GBPS[:1] if arguments.quick else RATES_GBPS
    pullers = 20 if arguments.quick else PULLERS
    old, new = versions_of(next(iter(snapshots(["0.01"]))))
    gbps: Figures = {str(rate): None for rate in RATES_GBPS}
    for rate in rates:
        gbps[str(rate)] = measure_rate(old, new, rate * BYTES_PER_S_IN_GBPS, arguments.quick)
    return {
        "gbps": gbps,
        "s3": measure_object_store(old, arguments.quick),
        **measure_copies(pullers, versions=4 if arguments.quick else 12),
        "others_slowdown": None if arguments.quick else measure_slowdown(pullers, versions=12, in_site=False),
        "others_slowdown_in_site": None if arguments.quick else measure_slowdown(pullers, versions=12, in_site=True),
    }


class CountedRelay(RelayAround):
    """Counts what it gives."""

    def __init__(self, relay: Relay) -> None:
        super().__init__(relay)
        self._lock = threading.Lock()
        self.given_bytes = 0
        self.blobs: dict[str, int] = {}
        """Where each ends, as far as it was read."""

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        content = super().get(key, start, length)
        with self._lock:
            self.given_bytes += len(content)
            self.blobs[key] = max(self.blobs.get(key, 0), start + len(content))
        return content


@dataclass
class RequestsLeft:
    """How many more requests a puller makes, to any relay, before it leaves."""

    left: float = math.inf


class LeavingRelay(RelayAround):
    """For somebody who may leave at any request, and after that not even gives back what it claimed."""

    def __init__(self, relay: Relay, requests: RequestsLeft) -> None:
        super().__init__(relay)
        self._requests = requests

    def asked(self) -> Relay:
        self._requests.left -= 1
        if self._requests.left < 0:
            raise RelayError("left")
        return self.relay


class Discarding(DirectoryRelay):
    """Takes nothing down, so that publishing to it is encoding alone; notes each bucket's size and CPU time so far."""

    def __init__(self) -> None:
        super().__init__(Path())
        self.buckets: list[tuple[float, int]] = []

    def put(self, key: str, *parts: Buffer) -> None:
        if key.endswith(".bin"):
            self.buckets.append((time.process_time(), sum(map(len, parts))))

    def list_keys(self, prefix: str = "") -> list[str]:
        """Nothing: a search for garbage in the working directory would run beside what is measured next."""
        return []


class TimedVersion(NamedTuple):
    """One version from published to applied; times in seconds, `scheduled` and `bound_cpu` from CPU times."""

    total_s: float
    cpu_s: float
    """Of this process meanwhile, which is both sides."""
    in_line_s: float
    """How long publishing, and after it applying, were ready to go on and had no core."""
    bound_s: float
    scheduled_s: float
    bound_cpu_s: float
    size_bytes: int
    """That crossed the link."""


def versions_of(snapshot: Snapshot) -> tuple[Tensors, Tensors]:
    """The snapshot's tensors as often as it takes to have `WEIGHTS_BYTES`."""
    size = 2 * sum(bits.size for bits in snapshot.old.values())
    copies = -(-WEIGHTS_BYTES // size)

    def repeated(tensors: dict[str, Any]) -> Tensors:
        return {
            f"{copy}.{name}": torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)
            for copy in range(copies)
            for name, bits in tensors.items()
        }

    return repeated(snapshot.old), repeated(snapshot.new)


def measure_rate(old: Tensors, new: Tensors, bytes_per_s: float, quick: bool) -> Figures:
    repetitions = 3 if quick else 9
    with closing(runs_of(old, new, bytes_per_s)) as ours, closing(runs_of(old, new, bytes_per_s, "coo")) as coo:
        pairs = list(islice(zip(ours, coo, strict=False), WARM_UP + repetitions))[WARM_UP:]
    runs = [run for run, _ in pairs]
    ours_s, scheduled_s = (median(times_s) for times_s in ((r.total_s for r in runs), (r.scheduled_s for r in runs)))
    ratios = [run.total_s / run.bound_s for run in runs]
    coo_ratios = [coo.total_s / run.total_s for run, coo in pairs]
    bound_s, bound_cpu_s = coo_bounds_s(old, new, bytes_per_s)
    others = {} if quick else {name: last_run_of(old, new, bytes_per_s, name) for name in ("dense", "raw")}
    return {
        "over_bound": median(ratios),
        "over_bound_spread": max(ratios) - min(ratios),
        "over_bound_on_cores": median((run.total_s - run.in_line_s) / run.bound_cpu_s for run in runs),
        "cores": median(run.cpu_s / run.total_s for run in runs),
        "coo_over_ours": median(coo_ratios),
        "coo_over_ours_spread": max(coo_ratios) - min(coo_ratios),
        "coo_cpu_over_ours": median(coo.cpu_s / run.cpu_s for run, coo in pairs),
        "coo_bound_over_ours": bound_s / ours_s,
        "dense_over_ours": None,
        "raw_over_ours": None,
        **{f"{name}_over_ours": run.total_s / ours_s for name, run in others.items()},
        "ours_s": ours_s,
        "delta_share": median(run.size_bytes for run in runs) / sum(tensor.nbytes for tensor in old.values()),
        "scheduled": {
            "over_bound": median(run.scheduled_s / run.bound_cpu_s for run in runs),
            "coo_over_ours": median(coo.scheduled_s / run.scheduled_s for run, coo in pairs),
            "coo_bound_over_ours": bound_cpu_s / scheduled_s,
            **{f"{name}_over_ours": run.scheduled_s / scheduled_s for name, run in others.items()},
            "ours_s": scheduled_s,
        },
    }


def last_run_of(old: Tensors, new: Tensors, bytes_per_s: float, codec: str) -> TimedVersion:
    """The first one after those that warm up."""
    with closing(runs_of(old, new, bytes_per_s, codec)) as runs:
        return next(islice(runs, WARM_UP, None))


def runs_of(
    old: Tensors, new: Tensors, bytes_per_s: float, codec: str | None = None
) -> Generator[TimedVersion, None, None]:
    """To `new` and back to `old` and so on, each time with both sides at once, and then each stage alone."""
    settings = PublishSettings(
        bucket_elements=BUCKET_ELEMENTS,
        keyframe_every=NEVER,
        merge_every=NEVER,
        codec=codec,
        link_bytes_per_s=bytes_per_s,
    )
    with tempfile.TemporaryDirectory(dir=IN_MEMORY) as directory, ThreadPoolExecutor(1) as executor:
        relay, discarding = DirectoryRelay(Path(directory)), Discarding()
        publisher, encoder = (Publisher(each, "run", {}, settings, key=KEY) for each in (relay, discarding))
        switched = CountedRelay(relay)
        puller, decoder = Puller(switched, TRUST, chunk_bytes=1 << 20), Puller(relay, TRUST)
        for each in (publisher, encoder):
            each.publish(0, old)
            each.wait()
        for each in (puller, decoder):
            each.pull(0, TIMEOUT_S)
        switched.relay = LinkedRelay(relay, Link(bytes_per_s))
        with closing(publisher), closing(encoder):
            for version in count(1):
                tensors = new if version % 2 else old
                begun_s, begun_cpu_s, begun_line_s = time.monotonic(), time.process_time(), in_line_s()
                applied = executor.submit(put_in_force, puller, version)
                publisher.publish(version, tensors)
                published_in_line_s = in_line_s() - begun_line_s
                size_bytes, applied_in_line_s = applied.result()
                total_s, cpu_s = time.monotonic() - begun_s, time.process_time() - begun_cpu_s
                decode_s, decode_cpu_s = timed(partial(decoder.pull, version, TIMEOUT_S))
                discarding.buckets.clear()
                begun_cpu_s = time.process_time()
                encode_s, encode_cpu_s = timed(partial(encoder.publish, version, tensors))
                buckets = [(encoded_s - begun_cpu_s, size) for encoded_s, size in discarding.buckets]
                wire_s = size_bytes / bytes_per_s
                yield TimedVersion(
                    total_s,
                    cpu_s,
                    published_in_line_s + applied_in_line_s,
                    max(encode_s, wire_s, decode_s),
                    scheduled(buckets, bytes_per_s, decode_cpu_s),
                    max(encode_cpu_s, wire_s, decode_cpu_s),
                    size_bytes,
                )


def put_in_force(puller: Puller, version: int) -> tuple[int, float]:
    """The bytes that it took, and how long the end of it was ready and without a core."""
    staged = puller.stage(version, TIMEOUT_S, follow=True)
    begun_s = in_line_s()
    puller.apply(staged)
    return staged.report.size_bytes, in_line_s() - begun_s


def scheduled(buckets: list[tuple[float, int]], bytes_per_s: float, decode_s: float) -> float:
    """When all is applied, if both sides had a core each: buckets are (encoded at, bytes), decoded in equal times."""
    sent_s = applied_s = 0.0
    for encoded_s, size_bytes in buckets:
        sent_s = max(sent_s, encoded_s) + size_bytes / bytes_per_s
        applied_s = max(applied_s, sent_s) + decode_s / len(buckets)
    return applied_s


def coo_bounds_s(old: Tensors, new: Tensors, bytes_per_s: float) -> tuple[float, float]:
    """COO's slowest stage alone, by the clock and by CPU time; it has to keep a flat copy of the new weights too."""
    before, after = flatten(old), flatten(new)
    target, coo = before.copy(), Coo()
    times_s = np.zeros((2, 2))
    times_s[0] += timed(lambda: deque(filling(after, new.values()), maxlen=0))
    size_bytes = 0
    for begin, end in pairwise([*range(0, before.size, BUCKET_ELEMENTS), before.size]):
        ends = np.array([end - begin])
        bucket = coo.encode(before[begin:end], after[begin:end], ends)
        times_s[0] += timed(partial(coo.encode, before[begin:end], after[begin:end], ends))

        def decode_and_apply(begin: int = begin, end: int = end, ends: Ends = ends, bucket: Any = bucket) -> None:
            update = coo.decode(bucket.shared, bucket.payload, bucket.payload_ends, before[begin:end], ends)
            apply_update(update, target[begin:end])

        times_s[1] += timed(decode_and_apply)
        size_bytes += bucket.size_bytes
    clock_s, cpu_s = (max(*column, size_bytes / bytes_per_s) for column in times_s.T.tolist())
    return clock_s, cpu_s


class SmallHistory:
    """A small model whose versions change 2 % of its weights each, and its publisher."""

    def __init__(self, relay: Relay) -> None:
        self._rng = np.random.default_rng(0)
        self._bits = (self._rng.normal(0, 0.02, SMALL_ELEMENTS).astype(np.float32).view(np.uint32) >> 16).astype(
            np.uint16
        )
        settings = PublishSettings(keep_versions=8, bucket_elements=SMALL_ELEMENTS // 8, tile_elements=1 << 17)
        self._publisher = Publisher(relay, TRUST.run, {}, settings, key=KEY)
        self.version = -1

    def step(self) -> None:
        moved = self._rng.integers(0, SMALL_ELEMENTS, SMALL_ELEMENTS // 50)
        self._bits[moved] += np.uint16(1)
        tensors = {"weights": torch.from_numpy(self._bits.view(np.int16)).view(torch.bfloat16)}
        self._publisher.publish(self.version + 1, tensors)
        self.version += 1

    def close(self) -> None:
        self._publisher.close()


def measure_copies(pullers: int, versions: int) -> Figures:
    chance = random.Random(0)
    with tempfile.TemporaryDirectory(dir=IN_MEMORY) as directory, ThreadPoolExecutor(pullers) as executor:
        relay = DirectoryRelay(Path(directory) / "far")
        far = CountedRelay(LinkedRelay(relay, Link(SMALL_LINK_BYTES_PER_S)))
        near = DirectoryRelay(Path(directory) / "near")
        history = SmallHistory(relay)

        def join(number: int) -> tuple[Puller, RequestsLeft]:
            requests = RequestsLeft()
            cache = PeerCacheRelay(LeavingRelay(far, requests), LeavingRelay(near, requests), f"{number}", TRUST)
            return Puller(cache, TRUST, another_copy=cache.refuse), requests

        def pull(number: int, begin_s: float) -> None:
            time.sleep(begin_s)
            puller, requests = site[number]
            try:
                puller.pull(history.version, TIMEOUT_S)
            except RelayError:
                if requests.left >= 0:
                    raise

        site = [join(number) for number in range(pullers)]
        taken_over: set[str] = set()
        for _ in range(versions):
            history.step()
            present = [number for number in range(pullers) if chance.random() < 0.8]
            leaving = chance.sample(range(pullers), pullers // 5)
            for number in leaving:
                site[number][1].left = chance.randrange(1, REQUESTS)
            list(executor.map(pull, present, [JOINING_S * chance.random() for _ in present]))
            taken_over.update(key for key in near.list_keys() if ".claim-" in key and not key.endswith(".claim-0"))
            for number in leaving:
                site[number] = join(number)
        history.close()
    copies = far.given_bytes / sum(far.blobs.values())
    return {"slow_link_copies": copies, "claims_taken_over": len(taken_over)}


def measure_slowdown(pullers: int, versions: int, in_site: bool) -> float:
    """The p99 of the others, with one throttled puller over without, each over several versions."""
    times_s: dict[float, list[float]] = {1.0: [], 0.01: []}
    for first_share in (1.0, 0.01, 0.01, 1.0):
        times_s[first_share] += times_to_current(pullers, versions // 2, first_share, in_site)
    return float(np.percentile(times_s[0.01], 99) / np.percentile(times_s[1.0], 99))


def times_to_current(pullers: int, versions: int, first_share: float, in_site: bool) -> list[float]:
    with tempfile.TemporaryDirectory(dir=IN_MEMORY) as directory, ThreadPoolExecutor(pullers) as executor:
        relay, near = (DirectoryRelay(Path(directory) / name) for name in ("far", "near"))
        history = SmallHistory(relay)
        links = [CountedRelay(relay) for _ in range(pullers)]
        workers = [
            Puller(PeerCacheRelay(each, near, f"{number}", TRUST) if in_site else each, TRUST)
            for number, each in enumerate(links)
        ]
        if not in_site:
            history.step()
            for worker in workers:
                worker.pull(0, TIMEOUT_S)
        for number, each in enumerate(links):
            share = 1.0 if number else first_share
            each.relay = LinkedRelay(relay, Link(share * SMALL_LINK_BYTES_PER_S))
        times_s: list[float] = []
        slow = executor.submit(lambda: 0.0)
        for _ in range(versions):
            history.step()
            begun_s, version = time.monotonic(), history.version

            def current(worker: Puller, begun_s: float = begun_s, version: int = version) -> float:
                worker.pull(version, TIMEOUT_S)
                return time.monotonic() - begun_s

            if slow.done():
                slow.result()
                slow = executor.submit(current, workers[0])
            times_s += executor.map(current, workers[1:])
        slow.cancel()
        history.close()
    return times_s


def in_line_s() -> float:
    """How long this thread has been ready and without a core so far."""
    return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9


def timed(function: Callable[[], object]) -> tuple[float, float]:
    """By the clock, and this thread's CPU time."""
    begun_s, begun_cpu_s = time.monotonic(), time.thread_time()
    function()
    return time.monotonic() - begun_s, time.thread_time() - begun_cpu_s


if __name__ == "__main__":
    benchmark(__doc__, main)
