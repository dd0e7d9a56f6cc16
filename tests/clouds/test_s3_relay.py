"""The relay `s3` on a real server that speaks S3: the conformance suite of relays, and what only object stores do."""

import contextlib
import importlib
import itertools
import json
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic.weights.encoder import PublishSettings
from elastic.weights.errors import BlobConflict, BlobNotFound, RelayError, RelayUnavailable
from elastic.weights.publisher import Publisher
from elastic.weights.puller import Puller
from elastic.weights.relay import Relay, below, open_relay
from elastic.weights.s3 import PART_BYTES, S3Relay
from elastic.weights.waiting import PatientRelay
from tests.cli.conftest import Ended
from tests.clouds.faulty_s3 import FaultyS3, S3Answer
from tests.clouds.moto import moto_server
from tests.weights.signed import KEY, TRUST
from tests.weights.test_relay import (  # noqa: F401
    test_a_blob_does_not_change,
    test_a_blob_is_read_back_whole,
    test_a_deleted_blob_is_gone_and_its_key_free,
    test_a_key_cannot_leave_the_relay,
    test_a_range_is_a_slice,
    test_an_empty_blob_is_a_blob,
    test_keys_are_listed_by_prefix_and_sorted,
    test_of_concurrent_writers_one_wins_whole,
    test_what_is_not_a_blob_is_not_found,
)

boto3 = pytest.importorskip("boto3")

pytestmark = [pytest.mark.clouds]

BUCKET = "weights"
SMALL_PART_BYTES = 1000
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "a secret of this test"}

_numbers = itertools.count()


class Store:
    """A server, as its own client sees it."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        once = importlib.import_module("botocore.config").Config(retries={"total_max_attempts": 1})
        self.client: Any = boto3.client("s3", endpoint_url=self.url, region_name="us-east-1", config=once)

    def uploads(self) -> list[str]:
        return [upload["Key"] for upload in self._uploads()]

    def end_uploads(self) -> None:
        """As the bucket's lifecycle would: nobody knows of one whose first answer was lost."""
        for upload in self._uploads():
            self.client.abort_multipart_upload(Bucket=BUCKET, Key=upload["Key"], UploadId=upload["UploadId"])

    def _uploads(self) -> list[dict[str, str]]:
        return self.client.list_multipart_uploads(Bucket=BUCKET).get("Uploads", [])


@pytest.fixture(scope="module")
def store() -> Iterator[Store]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**CREDENTIALS, "AWS_DEFAULT_REGION": "us-east-1"}.items():
            patch.setenv(name, value)
        with moto_server(S3_UPLOAD_PART_MIN_SIZE="1") as port:
            store = Store(port)
            store.client.create_bucket(Bucket=BUCKET)
            yield store


def relay_at(url: str, part_bytes: int = PART_BYTES) -> Relay:
    """One that nobody has used yet."""
    place = below(f"s3://{BUCKET}?region=us-east-1&endpoint_url={url}", f"test-{next(_numbers)}")
    return S3Relay(place, part_bytes=part_bytes)


@pytest.fixture(params=["whole", "in parts"])
def relay(request: pytest.FixtureRequest, store: Store) -> Iterator[Relay]:
    small = 50_000 if "concurrent" in request.node.name else 3
    relay = relay_at(store.url, small if request.param == "in parts" else PART_BYTES)
    yield relay
    relay.close()
    relay.close()
    assert store.uploads() == []


@pytest.mark.parametrize("seed", range(6))
def test_what_was_put_is_there_whole_whatever_fails(store: Store, seed: int) -> None:
    """Refusals, lost requests and answers, torn ones: what was acknowledged is there, and nothing else."""
    chance = random.Random(seed)
    proxy = FaultyS3(store.port, seed)
    acknowledged: dict[str, bytes] = {}
    tried: dict[str, bytes] = {}
    with proxy.serving() as url, contextlib.closing(relay_at(url, SMALL_PART_BYTES)) as relay:
        proxy.share = 0.25
        patient = PatientRelay(relay, 60.0)
        for number in range(25):
            key = f"v/{chance.randrange(8)}"
            match chance.randrange(5):
                case 0:
                    patient.delete(key)
                    tried.pop(key, None), acknowledged.pop(key, None)
                case 1:
                    with contextlib.suppress(BlobNotFound):
                        start, length = chance.randrange(3000), chance.choice((None, 1, 2500))
                        found = patient.get(key, start, length)
                        assert found == tried[key][start:][:length], f"seed {seed}, operation {number}"
                case _ if key not in tried:
                    content = tried[key] = chance.randbytes(chance.choice((0, 10, 999, 1000, 1001, 4321)))
                    patient.put(key, content[:5], content[5:])
                    acknowledged[key] = content
                case _:
                    patient.put(key, tried[key])
                    with pytest.raises(BlobConflict):
                        patient.put(key, tried[key] + b"x")
            assert set(patient.list_keys()) == set(acknowledged), f"seed {seed}, operation {number}"
        proxy.share = 0.0
        assert proxy.faults > 10
        for key, content in acknowledged.items():
            assert relay.get(key) == content, f"seed {seed}, {key}"
            relay.delete(key)
    store.end_uploads()


@pytest.mark.parametrize("bucketed", [False, True])
def test_a_version_arrives_bit_for_bit_while_it_is_put_and_requests_fail(store: Store, bucketed: bool) -> None:
    proxy = FaultyS3(store.port, 7)
    settings = PublishSettings(
        bucket_elements=64 << 10, tile_elements=16 << 10, keyframe_in_buckets=bucketed, merge_every=2
    )
    rng = torch.Generator().manual_seed(5)
    weights = {"a": torch.randn(700, 999, generator=rng).bfloat16(), "b": torch.randn(33, generator=rng).bfloat16()}
    with proxy.serving() as url, contextlib.closing(relay_at(url)) as relay:
        proxy.share = 0.1
        patient = PatientRelay(relay, 60.0)
        publisher = Publisher(patient, TRUST.run, {}, settings, key=KEY)
        with contextlib.closing(publisher):
            puller = Puller(patient, TRUST)
            for version in range(3):
                weights["a"][version] += 1
                weights["b"][:] = version
                publishing = threading.Thread(target=publisher.publish, args=(version, weights))
                publishing.start()
                pulled = puller.pull(version, 120.0, follow=True)
                publishing.join(60)
                assert all(torch.equal(pulled[name], tensor) for name, tensor in weights.items())
            proxy.share = 0.0
    store.end_uploads()


@pytest.mark.parametrize(
    ("answer", "kind", "words"),
    [
        (S3Answer(404, "NoSuchBucket"), RelayError, ["no bucket weights", "weights.relay"]),
        (S3Answer(403, "AccessDenied"), RelayError, ["access denied", "s3:ListBucket"]),
        (S3Answer(403, "InvalidAccessKeyId"), RelayError, ["wrong or expired", "renew"]),
        (S3Answer(400, "ExpiredToken"), RelayError, ["wrong or expired", "renew"]),
        (
            S3Answer(403, "RequestTimeTooSkewed", (("date", "Mon, 23 Nov 2026 05:00:00 GMT"),)),
            RelayError,
            ["clock", "05:00:00"],
        ),
        (
            S3Answer(301, "PermanentRedirect", (("x-amz-bucket-region", "eu-west-1"),)),
            RelayError,
            ["?region=eu-west-1"],
        ),
        (S3Answer(503, "SlowDown"), RelayUnavailable, ["SlowDown"]),
        (S3Answer(400, "BadDigest"), RelayUnavailable, ["BadDigest"]),
    ],
    ids=lambda value: value.code if isinstance(value, S3Answer) else "",
)
def test_a_refusal_says_what_to_do(store: Store, answer: S3Answer, kind: type[RelayError], words: list[str]) -> None:
    proxy = FaultyS3(store.port)
    proxy.answer = answer
    with proxy.serving() as url, contextlib.closing(relay_at(url)) as relay:
        for use in (lambda: relay.put("k", b"content"), lambda: relay.get("k"), relay.list_keys):
            with pytest.raises(RelayError) as raised:
                use()
            assert type(raised.value) is kind
            assert all(word in str(raised.value) for word in words), str(raised.value)
            assert CREDENTIALS["AWS_SECRET_ACCESS_KEY"] not in str(raised.value)


def test_without_credentials_the_message_says_where_they_are_looked_for(
    store: Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in CREDENTIALS:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("HOME", str(tmp_path))
    with contextlib.closing(relay_at(store.url)) as relay, pytest.raises(RelayError, match="AWS_PROFILE"):
        relay.list_keys()


def test_nobody_there_is_unavailable_and_a_bad_url_is_not() -> None:
    with contextlib.closing(relay_at("http://127.0.0.1:1")) as relay, pytest.raises(RelayUnavailable):
        relay.get("k")
    for url, words in (("s3:///prefix", "no bucket"), ("s3://b/p?regoin=x", "regoin.*expected.*region")):
        with pytest.raises(RelayError, match=words):
            open_relay(url)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (S3Answer(404, "NoSuchBucket"), ("no bucket", "weights.relay")),
        (S3Answer(403, "AccessDenied"), ("access denied", "s3:ListBucket")),
        (S3Answer(400, "ExpiredToken"), ("wrong or expired", "renew")),
    ],
)
def test_a_bucket_that_refuses_ends_a_run_before_it_begins(
    store: Store,
    config: Path,
    elastic: Callable[..., Ended],
    refused: Callable[..., None],
    answer: S3Answer,
    words: tuple[str, ...],
) -> None:
    proxy = FaultyS3(store.port)
    proxy.answer = answer
    with proxy.serving() as url:
        relay = f"s3://{BUCKET}/runs?region=us-east-1&endpoint_url={url}"
        own = "--set", f"weights.relay={relay}", "--set", f"run.pass_env={json.dumps(list(CREDENTIALS))}"
        refused(elastic("run", config, "--providers", "spot", *own), *words)


@pytest.mark.timeout(600)
def test_a_run_trains_over_it_and_leaves_nothing_there(
    store: Store, checkpoint: Path, config: Path, elastic: Callable[..., Ended]
) -> None:
    relay = f"s3://{BUCKET}/runs?region=us-east-1&endpoint_url={store.url}"
    own = "--set", f"weights.relay={relay}", "--set", f"run.pass_env={json.dumps(list(CREDENTIALS))}"
    ended = elastic("run", config, "--providers", "spot", *own)
    assert ended.code == 0, ended.err
    assert "Contents" not in store.client.list_objects_v2(Bucket=BUCKET, Prefix="runs/")
    assert store.uploads() == []


def test_the_bucket_takes_the_lifecycle_that_is_recommended(store: Store) -> None:
    rules = json.loads((Path(__file__).parents[2] / "infra" / "s3-lifecycle.json").read_text())
    store.client.put_bucket_lifecycle_configuration(Bucket=BUCKET, LifecycleConfiguration=rules)
    found = store.client.get_bucket_lifecycle_configuration(Bucket=BUCKET)["Rules"]
    assert {rule["ID"] for rule in found} == {rule["ID"] for rule in rules["Rules"]}
    store.client.delete_bucket_lifecycle(Bucket=BUCKET)
