"""A keyframe over an object store behind shaped links: ours, pulled while it is put, and boto3's own transfers.

The store is moto's server, a process of its own. Trainer and worker reach it by one link up and one down.
"""

import importlib
import importlib.util
import io
import os
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from itertools import islice
from statistics import median
from typing import Any

from torch import Tensor

from benchmarks._common import Figures
from benchmarks._throttle import LinkedPort
from elastic.weights.choice import BYTES_PER_S_IN_GBPS
from elastic.weights.publisher import Publisher, PublishSettings
from elastic.weights.puller import Puller
from elastic.weights.relay import open_relay
from elastic.weights.signing import SigningKey
from elastic.weights.tensors import flatten

NEEDED = ("boto3", "moto")
SLOW_GBPS, FAST_GBPS = 0.2, 1.0
BUCKET = "weights"
BUCKET_ELEMENTS = 4 << 20
PUTS_AT_ONCE = 2

TIMEOUT_S = 600.0
ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "benchmark",
    "AWS_SECRET_ACCESS_KEY": "benchmark",
    "AWS_DEFAULT_REGION": "us-east-1",
}


def measure_object_store(tensors: Mapping[str, Tensor], quick: bool) -> Figures:
    """Of all tensors, or, to be quick, of a quarter of them.

    `over_bound`: from the call that publishes to weights applied, over the bytes that crossed by one link's rate.

    `boto3_over_ours`: put and got by boto3's transfers, one after the other as it has no other way, over ours.
    """
    lacking = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if lacking:
        return {"skipped_because": f"{', '.join(lacking)} not installed; run it by .cache/clouds/bin/python"}
    os.environ.update(ENVIRONMENT)
    repetitions = 1 if quick else 3
    tensors = dict(islice(tensors.items(), len(tensors) // 4 if quick else None))
    with object_store() as port:
        slow = [ours(port, tensors, SLOW_GBPS) for _ in range(repetitions)]
        pairs = [(ours(port, tensors, FAST_GBPS), boto3_alone(port, tensors, FAST_GBPS)) for _ in range(repetitions)]
    ratios = [took_s / bound_s for took_s, bound_s, _ in slow]
    rivals = [theirs_s / took_s for (took_s, _, _), theirs_s in pairs]
    return {
        "weights_bytes": sum(2 * tensor.numel() for tensor in tensors.values()),
        "wire_bytes": slow[-1][2],
        "200_mbps": {
            "over_bound": median(ratios),
            "over_bound_spread": max(ratios) - min(ratios),
            "ours_s": median(took_s for took_s, _, _ in slow),
        },
        "1_gbps": {
            "boto3_over_ours": median(rivals),
            "boto3_over_ours_spread": max(rivals) - min(rivals),
            "ours_s": median(took_s for (took_s, _, _), _ in pairs),
        },
    }


@contextmanager
def object_store() -> Iterator[int]:
    """The port of one with an empty bucket."""
    from tests.clouds.moto import moto_server

    with moto_server() as port:
        client(port).create_bucket(Bucket=BUCKET)
        yield port


def client(port: int) -> Any:
    return importlib.import_module("boto3").client("s3", endpoint_url=f"http://127.0.0.1:{port}")


def ours(port: int, tensors: Mapping[str, Tensor], gbps: float) -> tuple[float, float, int]:
    """Seconds from published to applied, the bound for the bytes that crossed, and these."""
    rate = gbps * BYTES_PER_S_IN_GBPS
    key = SigningKey()
    settings = PublishSettings(
        bucket_elements=BUCKET_ELEMENTS,
        keyframe_in_buckets=True,
        puts_at_once=PUTS_AT_ONCE,
        merge_every=1,
        link_bytes_per_s=rate,
    )
    with closing(LinkedPort(port, rate)) as link, ThreadPoolExecutor(1) as executor:
        url = f"s3://{BUCKET}/{time.monotonic_ns()}?endpoint_url=http://127.0.0.1:{link.port}"
        with closing(open_relay(url)) as trainers, closing(open_relay(url)) as workers:
            workers.list_keys()  # Its connection is there before the version is.
            trainers.list_keys()
            publisher = Publisher(trainers, "run", {}, settings, key=key)
            with closing(publisher):
                begun_s = time.monotonic()
                applied = executor.submit(put_in_force, Puller(workers, key.trust("run")))
                publisher.publish(0, tensors)
                size_bytes = applied.result(TIMEOUT_S)
                took_s = time.monotonic() - begun_s
    return took_s, size_bytes / rate, size_bytes


def put_in_force(puller: Puller) -> int:
    """The bytes that it took."""
    staged = puller.stage(0, TIMEOUT_S, follow=True)
    puller.apply(staged)
    return staged.report.size_bytes


def boto3_alone(port: int, tensors: Mapping[str, Tensor], gbps: float) -> float:
    """Seconds from all weights in memory on the one side to all on the other."""
    with closing(LinkedPort(port, gbps * BYTES_PER_S_IN_GBPS)) as link:
        store, name = client(link.port), f"alone/{time.monotonic_ns()}"
        store.list_objects_v2(Bucket=BUCKET, MaxKeys=1)
        content = flatten(dict(tensors)).tobytes()
        begun_s = time.monotonic()
        store.upload_fileobj(io.BytesIO(content), BUCKET, name)
        got = io.BytesIO()
        store.download_fileobj(BUCKET, name, got)
        took_s = time.monotonic() - begun_s
        if got.getbuffer() != memoryview(content):
            raise RuntimeError("boto3 brought other bytes")
        store.delete_object(Bucket=BUCKET, Key=name)
    return took_s
