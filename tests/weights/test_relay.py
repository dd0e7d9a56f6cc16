"""The conformance suite of `Relay`: what holds for every one of them."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from elastic.weights.directory import DirectoryRelay
from elastic.weights.errors import BlobConflict, BlobNotFound, InvalidKey, RelayError
from elastic.weights.http import HttpRelay
from elastic.weights.relay import Relay, open_relay
from tests.seeds import examples

shared_relay = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=examples(16, 40))


def test_a_blob_is_read_back_whole(relay: Relay):
    relay.put("a/b", b"one", memoryview(b"two"), bytearray(b""), b"three")
    assert relay.get("a/b") == b"onetwothree"


def test_an_empty_blob_is_a_blob(relay: Relay):
    relay.put("empty")
    assert relay.get("empty") == b""
    assert relay.list_keys() == ["empty"]


@shared_relay
@given(content=st.binary(max_size=200), start=st.integers(0, 250), length=st.none() | st.integers(0, 250))
def test_a_range_is_a_slice(relay: Relay, content: bytes, start: int, length: int | None):
    relay.delete("blob")
    relay.put("blob", content)
    assert relay.get("blob", start, length) == content[start:][:length]


def test_a_blob_does_not_change(relay: Relay):
    relay.put("k", b"first")
    relay.put("k", b"fi", b"rst")
    for other in (b"other", b"firs", b"first!", b""):
        with pytest.raises(BlobConflict):
            relay.put("k", other)
    assert relay.get("k") == b"first"


def test_of_concurrent_writers_one_wins_whole(relay: Relay):
    contents = [bytes([writer]) * 300_000 for writer in range(6)]
    barrier = threading.Barrier(len(contents))

    def write(content: bytes) -> bytes | None:
        barrier.wait(timeout=10)
        try:
            relay.put("contested", content)
        except BlobConflict:
            return None
        return content

    with ThreadPoolExecutor(len(contents)) as threads:
        (winner,) = [content for content in threads.map(write, contents) if content is not None]
    assert relay.get("contested") == winner
    assert relay.list_keys() == ["contested"]


def test_keys_are_listed_by_prefix_and_sorted(relay: Relay):
    assert relay.list_keys() == []
    for key in ("v/2/b", "v/10/a", "w/1", "v/2/a"):
        relay.put(key, key.encode())
    assert relay.list_keys() == ["v/10/a", "v/2/a", "v/2/b", "w/1"]
    assert relay.list_keys("v/2") == ["v/2/a", "v/2/b"]
    assert relay.list_keys("x") == []


def test_a_deleted_blob_is_gone_and_its_key_free(relay: Relay):
    relay.put("v/1", b"old")
    relay.delete("v/1")
    relay.delete("v/1")
    relay.delete("never/was")
    assert relay.list_keys() == []
    with pytest.raises(BlobNotFound):
        relay.get("v/1")
    relay.put("v/1", b"new")
    assert relay.get("v/1") == b"new"


@pytest.mark.parametrize("key", ["missing", "v", "v/1/2"])
def test_what_is_not_a_blob_is_not_found(relay: Relay, key: str):
    relay.put("v/1", b"")
    with pytest.raises(RelayError, match=key):
        relay.get(key)


@pytest.mark.parametrize(
    "key", ["", "/etc/passwd", "../up", "a/../../b", "a//b", "a/", ".incoming/x", "a b", "ä", "a\n"]
)
def test_a_key_cannot_leave_the_relay(relay: Relay, key: str):
    for use in (relay.put, relay.get, relay.delete):
        with pytest.raises(InvalidKey):
            use(key)


def test_open_relay_reads_the_scheme(tmp_path: Path, relay_url: str, token: str):
    remote = open_relay(relay_url, token)
    assert isinstance(remote, HttpRelay)
    remote.put("k", b"content")
    remote.close()
    spaced = tmp_path / "with space"
    DirectoryRelay(spaced).put("k", b"content")
    for url in (str(spaced), spaced.as_uri(), f"{relay_url}/"):
        relay = open_relay(url, token)
        assert relay.get("k") == b"content"
        relay.close()


@pytest.mark.parametrize("url", ["gs://bucket", "file://host/share", "ftp://x"])
def test_open_relay_names_what_is_allowed(url: str):
    with pytest.raises(RelayError, match="allowed are"):
        open_relay(url)
