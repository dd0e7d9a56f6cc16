"""Who waits for a relay that is away: until it is back, here or elsewhere, and no longer than it may."""

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from elastic.weights.directory import DirectoryRelay
from elastic.weights.errors import BlobConflict, BlobNotFound, RelayError, RelayUnavailable
from elastic.weights.http import HttpRelay
from elastic.weights.relay import Buffer
from elastic.weights.rights import RelayRights
from elastic.weights.server import relay_app
from elastic.weights.waiting import PatientRelay

PATIENCE_S = 20.0


class Refusing(DirectoryRelay):
    """Cannot be reached for as long as it is `away`."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.away = True
        self.asked = threading.Semaphore(0)

    def put(self, key: str, *parts: Buffer) -> None:
        self.asked.release()
        if self.away:
            raise RelayUnavailable("nobody is there")
        super().put(key, *parts)


def test_what_is_put_meanwhile_is_there_when_the_relay_is_back(tmp_path: Path):
    relay = Refusing(tmp_path)
    putting = threading.Thread(target=PatientRelay(relay, PATIENCE_S).put, args=("k", b"one", b"two"))
    putting.start()
    for _ in range(3):
        assert relay.asked.acquire(timeout=PATIENCE_S)
    relay.away = False
    putting.join(PATIENCE_S)
    assert relay.get("k") == b"onetwo"


def test_a_relay_that_comes_back_elsewhere_is_followed(tmp_path: Path):
    gone = Refusing(tmp_path / "gone")
    relay = PatientRelay(gone, PATIENCE_S)
    putting = threading.Thread(target=relay.put, args=("k", b"content"))
    putting.start()
    assert gone.asked.acquire(timeout=PATIENCE_S)
    relay.follow(DirectoryRelay(tmp_path / "back"))
    putting.join(PATIENCE_S)
    assert relay.list_keys() == ["k"]
    assert relay.get("k", 3) == b"tent"
    relay.delete("k")
    assert relay.list_keys() == []


def test_patience_ends_and_what_is_wrong_is_no_matter_of_patience(tmp_path: Path):
    relay = PatientRelay(Refusing(tmp_path), 0.3)
    begun_s = time.monotonic()
    with pytest.raises(RelayUnavailable, match="nobody is there"):
        relay.put("k", b"")
    assert time.monotonic() - begun_s >= 0.3
    right = PatientRelay(DirectoryRelay(tmp_path), PATIENCE_S)
    right.put("k", b"content")
    for wrong, error in (
        (lambda: right.get("another"), BlobNotFound),
        (lambda: right.put("k", b"other content"), BlobConflict),
        (lambda: right.put("../k", b""), RelayError),
    ):
        begun_s = time.monotonic()
        with pytest.raises(error):
            wrong()
        assert time.monotonic() - begun_s < PATIENCE_S / 2


def test_a_server_that_is_killed_may_come_back_at_its_address(tmp_path: Path, server: Callable, token: str):
    app = relay_app(DirectoryRelay(tmp_path), RelayRights(token))
    with server(app) as url:
        relay = PatientRelay(HttpRelay(url, token), PATIENCE_S)
        relay.put("k", b"before")
    putting = threading.Thread(target=relay.put, args=("k2", b"meanwhile"))
    putting.start()
    time.sleep(0.1)  # so that it is refused at first
    with server(app, port=int(url.rpartition(":")[2])):
        putting.join(PATIENCE_S)
        assert not putting.is_alive()
        assert relay.list_keys() == ["k", "k2"]
        assert relay.get("k2") == b"meanwhile"
    relay.close()
