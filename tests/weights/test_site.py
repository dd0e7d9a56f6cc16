import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from elastic.weights.directory import DirectoryRelay
from elastic.weights.errors import BlobNotFound, RelayUnavailable
from elastic.weights.link import Link, LinkedRelay
from elastic.weights.relay import Buffer, Relay
from elastic.weights.site import SiteRelay

KEY = "versions/00000001/keyframe.bin"


class Far:
    """A far relay over a directory that counts what crosses the link, and can be made to wait."""

    def __init__(self, relay: Relay) -> None:
        self._relay = relay
        self._lock = threading.Lock()
        self.crossings: list[tuple[str, int]] = []
        self.open = threading.Event()
        self.open.set()

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        with self._lock:
            self.crossings.append((key, start))
        assert self.open.wait(10)
        return self._relay.get(key, start, length)

    def put(self, key: str, *parts: Buffer) -> None:
        self._relay.put(key, *parts)

    def list_keys(self, prefix: str = "") -> list[str]:
        return self._relay.list_keys(prefix)

    def delete(self, key: str) -> None:
        self._relay.delete(key)

    def close(self) -> None:
        self._relay.close()


@pytest.fixture
def far(tmp_path: Path) -> Far:
    relay = DirectoryRelay(tmp_path / "far")
    relay.put(KEY, bytes(range(256)) * 40)
    return Far(relay)


@pytest.fixture
def near(tmp_path: Path) -> DirectoryRelay:
    return DirectoryRelay(tmp_path / "near")


def test_of_every_piece_one_copy_crosses_the_link(far: Far, near: DirectoryRelay):
    content = far.get(KEY)
    far.crossings.clear()

    def pull(number: int) -> bytes:
        relay = SiteRelay(far, near, f"w{number}")
        return b"".join(relay.get(KEY, start, 1024) for start in range(0, len(content), 1024))

    with ThreadPoolExecutor(12) as executor:
        assert set(executor.map(pull, range(12))) == {content}
    assert sorted(far.crossings) == [(KEY, start) for start in range(0, len(content), 1024)]


def test_a_worker_that_dies_with_a_claim_holds_nobody_up_for_long(far: Far, near: DirectoryRelay):
    now = [1000.0]
    near.put(f"claims/{KEY}/0-100/0", b"1005.0 dead")

    def sleep(pause_s: float) -> None:
        now[0] += 1

    heir = SiteRelay(far, near, "heir", claim_s=5, clock=lambda: now[0], sleep=sleep)
    assert heir.get(KEY, 0, 100) == bytes(range(100))
    assert now[0] == 1005.0


@pytest.mark.parametrize("parts", [1, 3, 7])
def test_a_claim_lasts_as_long_as_its_piece_comes_in(
    far: Far, near: DirectoryRelay, monkeypatch: pytest.MonkeyPatch, parts: int
):
    monkeypatch.setattr("elastic.weights.site.PART_BYTES", 100)
    now = [0.0]
    other = SiteRelay(far, near, "other", claim_s=5, clock=lambda: now[0])

    class Slow(Far):
        def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
            now[0] += 4
            assert not other._claim(f"{KEY}/0-{100 * parts}")[1], "nobody else fetches it meanwhile"
            return super().get(key, start, length)

    slow = Slow(far)
    content = (bytes(range(256)) * 40)[: 100 * parts]
    assert SiteRelay(slow, near, "slow", claim_s=5, clock=lambda: now[0]).get(KEY, 0, 100 * parts) == content
    assert slow.crossings == [(KEY, start) for start in range(0, 100 * parts, 100)]
    assert other.get(KEY, 0, 100 * parts) == content
    assert len(far.crossings) == parts


def test_whoever_fails_to_fetch_gives_all_of_its_claims_back(
    far: Far, near: DirectoryRelay, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("elastic.weights.site.PART_BYTES", 100)
    now = [0.0]

    class Failing(Far):
        def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
            now[0] += 4
            if start > 300:
                raise RelayUnavailable("far relay is down")
            return super().get(key, start, length)

    worker = SiteRelay(Failing(far), near, "w", claim_s=5, clock=lambda: now[0])
    with pytest.raises(RelayUnavailable):
        worker._fetch(worker._claim(f"{KEY}/0-1000")[0], f"{KEY}/0-1000", KEY, 0, 1000)
    assert near.list_keys() == []


def test_a_claim_that_never_ends_well_is_gone_round(far: Far, near: DirectoryRelay):
    now = [0.0]

    def sleep(pause_s: float) -> None:
        now[0] += 1
        near.put(f"claims/{KEY}/0-100/{int(now[0])}", b"1e9 liar")

    near.put(f"claims/{KEY}/0-100/0", b"1e9 liar")
    relay = SiteRelay(far, near, "w", claim_s=2, clock=lambda: now[0], sleep=sleep)
    assert relay.get(KEY, 0, 100) == bytes(range(100))


def test_a_near_relay_that_fails_is_done_without(far: Far):
    class Broken(Far):
        def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
            raise RelayUnavailable("near relay is down")

    relay = SiteRelay(far, Broken(far), "w")
    assert relay.get(KEY, 0, 10) == bytes(range(10))


def test_what_the_far_relay_deletes_leaves_the_site(far: Far, near: DirectoryRelay):
    relay = SiteRelay(far, near, "w")
    relay.get(KEY, 0, 100)
    far.delete(KEY)
    far.put("versions/00000002/manifest.json", b"{}")
    relay.get("versions/00000002/manifest.json")
    assert {key.removeprefix("claims/").split("/")[1] for key in near.list_keys()} == {"00000002"}


def test_a_missing_blob_is_missing(far: Far, near: DirectoryRelay):
    with pytest.raises(BlobNotFound):
        SiteRelay(far, near, "w").get("versions/00000009/manifest.json")
    assert near.list_keys() == [], "and nobody waits for a claim on it"


def test_a_link_carries_its_rate_and_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    now = [50.0]
    monkeypatch.setattr("elastic.weights.link.time.monotonic", lambda: now[0])
    monkeypatch.setattr("elastic.weights.link.time.sleep", lambda pause_s: now.__setitem__(0, now[0] + pause_s))
    relay = DirectoryRelay(tmp_path)
    relay.put("blob", bytes(5000))
    link = Link(bytes_per_s=1000)
    assert len(LinkedRelay(relay, link).get("blob")) == 5000
    assert now[0] == pytest.approx(55.0, abs=0.02)
    assert link.sent_bytes == 5000
    with pytest.raises(ValueError, match="bytes_per_s"):
        Link(0)
