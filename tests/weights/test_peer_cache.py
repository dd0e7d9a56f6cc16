import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks._throttle import RelayAround
from elastic.weights import peer_cache, reading
from elastic.weights.directory import DirectoryRelay
from elastic.weights.errors import BlobNotFound, RelayError, RelayUnavailable
from elastic.weights.peer_cache import CLAIM_S, PATIENCE_S, PeerCacheRelay
from elastic.weights.publisher import Publisher, PublishSettings
from elastic.weights.puller import Puller
from elastic.weights.relay import Buffer, Relay
from elastic.weights.signing import SigningKey, Trust
from elastic.weights.versions import discard_all
from tests.weights.signed import KEY, TRUST, damage, sharing

BLOB = "versions/00000001/keyframe.bin"
CONTENT = bytes(range(256)) * 40


class Watched(RelayAround):
    """A relay that counts what is read of it, and calls `before` with the key and the start first."""

    def __init__(self, relay: Relay, before: Callable[[str, int], object] = lambda key, start: None) -> None:
        super().__init__(relay)
        self.before = before
        self._lock = threading.Lock()
        self.reads: list[tuple[str, int]] = []

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        with self._lock:
            self.reads.append((key, start))
        self.before(key, start)
        return super().get(key, start, length)


class Time:
    """Passes while somebody sleeps, and when told to."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.pauses = 0

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, pause_s: float) -> None:
        self.now_s += pause_s
        self.pauses += 1


@pytest.fixture
def far(tmp_path: Path) -> Watched:
    relay = DirectoryRelay(tmp_path / "far")
    relay.put(BLOB, CONTENT)
    return Watched(relay)


@pytest.fixture
def near(tmp_path: Path) -> DirectoryRelay:
    return DirectoryRelay(tmp_path / "near")


@pytest.fixture
def time() -> Time:
    return Time()


def cached(far: Relay, near: Relay, worker: str, trust: Trust = TRUST, **options: Any) -> PeerCacheRelay:
    """In small parts."""
    return PeerCacheRelay(far, near, worker, trust, part_bytes_min=100, **options)


def joined(
    far: Relay, near: Relay, worker: str = "w", time: Time | None = None, trust: Trust = TRUST
) -> PeerCacheRelay:
    if time is None:
        return cached(far, near, worker, trust)
    return cached(far, near, worker, trust, clock=time, sleep=time.sleep)


def claims(near: Relay) -> list[str]:
    return [key for key in near.list_keys() if ".claim-" in key]


def test_of_every_piece_one_copy_crosses_the_link(far: Watched, near: DirectoryRelay):
    def pull(number: int) -> bytes:
        relay = joined(far, near, f"w{number}")
        return b"".join(relay.get(BLOB, start, 100) for start in range(0, len(CONTENT), 100))

    with ThreadPoolExecutor(12) as executor:
        assert set(executor.map(pull, range(12))) == {CONTENT}
    assert sorted(far.reads) == [(BLOB, start) for start in range(0, len(CONTENT), 100)]


def die_with_a_claim(far: Watched, near: DirectoryRelay, length: int) -> None:
    class Dead(BaseException):
        pass

    class Mute(Watched):
        def delete(self, key: str) -> None:
            raise RelayUnavailable("dead")

    def die(key: str, start: int) -> None:
        raise Dead

    with pytest.raises(Dead):
        joined(Watched(far, die), Mute(near), "dead").get(BLOB, 0, length)
    assert len(claims(near)) == 1


def test_who_knows_no_better_waits_for_a_dead_worker_for_a_while(far: Watched, near: DirectoryRelay, time: Time):
    die_with_a_claim(far, near, 100)
    assert joined(far, near, "heir", time).get(BLOB, 0, 100) == CONTENT[:100]
    assert CLAIM_S <= time.now_s <= 1.1 * CLAIM_S
    assert time.pauses < 200, "nor does one ask all the time"


@pytest.mark.parametrize("took_s", [0.001, 0.5])
def test_who_knows_better_waits_a_few_times_as_long_as_such_a_piece_takes(
    far: Watched, near: DirectoryRelay, time: Time, took_s: float
):
    die_with_a_claim(far, near, 90)
    slow = Watched(far, lambda key, start: time.sleep(took_s))
    heir = joined(slow, near, "heir", time)
    heir.get(BLOB, 1000, 100)
    begun_s = time.now_s
    assert heir.get(BLOB, 0, 90) == CONTENT[:90]
    fair_s = max(peer_cache.PATIENCE * took_s, PATIENCE_S)
    assert fair_s <= time.now_s - begun_s <= 1.1 * fair_s + took_s


def test_nobody_waits_for_a_slow_worker_which_takes_what_the_faster_one_brought(
    far: Watched, near: DirectoryRelay, time: Time
):
    fast = joined(far, near, "fast", time)
    fast.get(BLOB, 5000, 1000)
    far.reads.clear()

    def meanwhile(key: str, start: int) -> None:
        begun_s = time.now_s
        assert fast.get(BLOB, 0, 1000) == CONTENT[:1000]
        assert time.now_s - begun_s <= 1.1 * PATIENCE_S

    link = Watched(far, meanwhile)
    slow = joined(link, near, "slow", time)
    assert slow.get(BLOB, 0, 1000) == CONTENT[:1000]
    assert link.reads == [(BLOB, 0)], "one part, then it takes the other's"
    begun_s = time.now_s
    joined(far, near, "other", time).get(BLOB, 1000, 100)
    slow.get(BLOB, 1000, 100)
    assert time.now_s == begun_s
    link.before = lambda key, start: None
    assert slow.get(BLOB, 2000, 100) == CONTENT[2000:2100]
    assert time.now_s - begun_s == pytest.approx(PATIENCE_S, rel=0.1), "others go first, if there are any"


def test_a_claim_that_another_made_anew_is_waited_for_anew(far: Watched, near: DirectoryRelay, time: Time):
    """Several ask for what the far relay does not have yet; the last of them gets it, and is let do so."""
    die_with_a_claim(far, near, 100)
    (claim,) = claims(near)
    waited_s: list[float] = []

    class Contended(Watched):
        def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
            if key == claim and time.now_s > 0.6 * CLAIM_S and not waited_s:
                waited_s.append(time.now_s)
                near.delete(claim)
                near.put(claim, b"somebody else")
            return super().get(key, start, length)

    assert joined(far, Contended(near), "w", time).get(BLOB, 0, 100) == CONTENT[:100]
    assert time.now_s - waited_s[0] >= CLAIM_S


def test_claims_that_all_come_to_nothing_are_not_waited_for_for_ever(far: Watched, near: DirectoryRelay, time: Time):
    class Crowded(Watched):
        def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
            return b"somebody" if ".claim-" in key else super().get(key, start, length)

    assert joined(far, Crowded(near), "w", time).get(BLOB, 0, 100) == CONTENT[:100]
    assert time.now_s <= CLAIM_S * 2**peer_cache.CLAIMS


@pytest.mark.parametrize("start", [0, 300])
def test_whoever_fails_to_fetch_gives_its_claim_back(far: Watched, near: DirectoryRelay, start: int):
    def fail(key: str, at: int) -> None:
        if at >= start:
            raise RelayUnavailable("far relay is down")

    with pytest.raises(RelayUnavailable, match="far relay"):
        joined(Watched(far, fail), near).get(BLOB, 0, 1000)
    assert near.list_keys() == []


@pytest.mark.parametrize(
    "error", [RelayError("No space left on device"), RelayUnavailable("down"), BlobNotFound("gone")]
)
@pytest.mark.parametrize("operation", ["get", "put claim", "put piece", "list_keys", "delete"])
def test_a_near_relay_that_fails_is_done_without(
    far: Watched, near: DirectoryRelay, time: Time, error: RelayError, operation: str
):
    asked: list[str] = []

    class Failing(Watched):
        def _fail(self, now: str) -> None:
            asked.append(now)
            if now == operation:
                raise error

        def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
            self._fail("get")
            return super().get(key, start, length)

        def put(self, key: str, *parts: Buffer) -> None:
            self._fail("put claim" if ".claim-" in key else "put piece")
            super().put(key, *parts)

        def list_keys(self, prefix: str = "") -> list[str]:
            self._fail("list_keys")
            return super().list_keys(prefix)

        def delete(self, key: str) -> None:
            self._fail("delete")
            super().delete(key)

    far.put("versions/00000001/manifest.json", b"{}")
    broken = Failing(near)
    relay = joined(far, broken, "w", time)
    for at in range(0, 1000, 250):
        assert relay.get(BLOB, at, 250) == CONTENT[at : at + 250]
    assert relay.get("versions/00000001/manifest.json") == b"{}"
    with pytest.raises(BlobNotFound, match="00000009"):
        relay.get("versions/00000009/manifest.json")
    assert time.now_s == 0, "and nobody waits for it"
    if operation == "put piece":
        assert claims(near) == [], "nor for what could not be shared"
        asked.clear()
        relay.get(BLOB, 0, 10)
        assert asked == [], "it is let be for a while"
        time.now_s += CLAIM_S
        relay.get(BLOB, 0, 10)
        assert asked != []


def test_what_the_far_relay_deletes_leaves_the_site_and_nothing_else_does(
    far: Watched, near: DirectoryRelay, tmp_path: Path
):
    for foreign in ("worker-0/held.json", "versions/00000000/keyframe.bin", "claims/x"):
        near.put(foreign, b"somebody's")
    other = DirectoryRelay(tmp_path / "near" / "other")
    other.put(BLOB, b"another run's")
    assert joined(other, near, trust=KEY.trust("another run")).get(BLOB) == b"another run's"
    theirs = near.list_keys()
    relay = joined(far, near)
    relay.get(BLOB, 0, 100)
    far.delete(BLOB)
    for version in (2, 3):
        far.put(f"versions/0000000{version}/manifest.json", b"{}")
        relay.get(f"versions/0000000{version}/manifest.json")
    left = set(near.list_keys()) - set(theirs)
    assert {key.split("/")[4] for key in left} == {"00000002", "00000003"}
    assert set(theirs) <= set(near.list_keys())
    resumed = SigningKey()
    relay = joined(far, near, trust=resumed.trust("run"))
    relay.get("versions/00000003/manifest.json")
    left = set(near.list_keys()) - set(theirs)
    assert {tuple(key.split("/")[2:5:2]) for key in left} == {(resumed.public[:32], "00000003")}


def test_a_missing_blob_is_missing(far: Watched, near: DirectoryRelay):
    with pytest.raises(BlobNotFound):
        joined(far, near).get("versions/00000009/manifest.json")
    assert near.list_keys() == [], "and nobody waits for a claim on it"


def tensors(value: float, elements: int = 4000) -> dict[str, Tensor]:
    return {"w": torch.full((elements,), value, dtype=torch.bfloat16)}


def published(place: Path, values: list[float], run: str = "run") -> DirectoryRelay:
    relay = DirectoryRelay(place)
    publish(relay, values, run)
    return relay


def publish(relay: Relay, values: list[float], run: str = "run", key: SigningKey = KEY) -> None:
    publisher = Publisher(relay, run, {}, PublishSettings(bucket_elements=1000, tile_elements=500), key=key)
    for version, value in enumerate(values):
        publisher.publish(version, tensors(value))
    publisher.close()


def assert_pulls(puller: Puller, version: int, value: float) -> None:
    assert torch.equal(puller.pull(version)["w"], tensors(value)["w"])


def test_a_keyframe_in_buckets_is_opened_without_asking_for_what_is_not_there(tmp_path: Path, near: DirectoryRelay):
    relay = DirectoryRelay(tmp_path / "far")
    settings = PublishSettings(keyframe_in_buckets=True, bucket_elements=1000, tile_elements=500)
    publisher = Publisher(relay, "run", {}, settings, key=KEY)
    publisher.publish(0, tensors(1.0))
    publisher.close()
    far = Watched(relay)
    assert_pulls(sharing(joined(far, near)), 0, 1.0)
    assert {key for key, _ in far.reads} <= {*relay.list_keys()}


def test_two_runs_share_a_site_and_get_their_own_weights(tmp_path: Path, near: DirectoryRelay):
    for run, value in (("one", 1.0), ("two", 7.0)):
        relay = published(tmp_path / f"{run}{value}", [value, value + 1], run)
        for worker in ("a", "b"):
            puller = sharing(joined(relay, near, worker, trust=KEY.trust(run)), KEY.trust(run))
            assert_pulls(puller, 0, value)
            assert_pulls(puller, 1, value + 1)


def test_after_a_resume_the_site_gives_what_was_published_again(tmp_path: Path, near: DirectoryRelay):
    far = published(tmp_path / "far", [1.0, 2.0, 3.0])
    assert_pulls(sharing(joined(far, near)), 2, 3.0)
    discard_all(far)
    resumed = SigningKey()
    publish(far, [1.0, 2.0, 5.0], key=resumed)
    trust = resumed.trust("run")
    assert_pulls(sharing(joined(far, near, trust=trust), trust), 2, 5.0)


@pytest.mark.parametrize("kind", ["keyframe.bin", "manifest.json", "delta-00000000-00002.bin", "delta-00000000.json"])
@pytest.mark.parametrize(
    "change", [lambda blob: bytes([blob[0] ^ 1]) + blob[1:], lambda blob: blob[:-1], lambda _: b""]
)
def test_a_damaged_piece_is_replaced_once_for_all(
    tmp_path: Path, near: DirectoryRelay, kind: str, change: Callable[[bytes], bytes]
):
    far = Watched(published(tmp_path / "far", [1.0, 2.0]))
    assert_pulls(sharing(cached(far, near, "first")), 0, 1.0)
    assert_pulls(sharing(cached(far, near, "second")), 1, 2.0)
    for key in near.list_keys():
        if f"/{kind}/" in key and ".claim-" not in key:
            damage(near, key, change)
    far.reads.clear()
    for number in range(5):
        puller = sharing(cached(far, near, f"w{number}"))
        assert_pulls(puller, 0, 1.0)
        assert_pulls(puller, 1, 2.0)
    assert any(key.endswith(kind) for key, _ in far.reads)
    assert max(Counter(far.reads).values()) == 1, "those who refused it share the other copy"


def test_workers_of_a_site_fetch_different_parts_of_a_keyframe_at_once(
    tmp_path: Path, near: DirectoryRelay, monkeypatch: pytest.MonkeyPatch
):
    begins = count(step=8)
    monkeypatch.setattr(reading.random, "randrange", lambda chunks: next(begins) % chunks)
    opened, crowd = threading.Event(), threading.Semaphore(0)

    def hold(key: str, start: int) -> None:
        if key.endswith(".bin"):
            crowd.release()
            assert opened.wait(30)

    far = Watched(published(tmp_path / "far", [1.0]), hold)
    with ThreadPoolExecutor(4) as executor:
        relays = [cached(far, near, f"w{number}", patience_s=60.0) for number in range(4)]
        pulled = [executor.submit(Puller(relay, TRUST, share_bytes=100).pull, 0) for relay in relays]
        under_way = [crowd.acquire(timeout=30) for _ in relays]
        at_first = [read for read in far.reads if read[0].endswith(".bin")]
        opened.set()
        assert all(under_way), "each has one under way"
        assert len(set(at_first)) == len(at_first), "of different chunks"
        assert all(torch.equal(each.result()["w"], tensors(1.0)["w"]) for each in pulled)
    assert max(Counter(far.reads).values()) == 1


def test_a_worker_fetches_one_piece_at_a_time(far: Watched, near: DirectoryRelay):
    opened, begun = threading.Event(), threading.Semaphore(0)

    def hold(key: str, start: int) -> None:
        begun.release()
        assert opened.wait(30)

    relay = joined(Watched(far, hold), near, "new")
    with ThreadPoolExecutor(3) as executor:
        pieces = [executor.submit(relay.get, BLOB, start, 50) for start in (0, 100, 200)]
        assert begun.acquire(timeout=30)
        (held,) = claims(near)
        others = [start for start in (0, 100, 200) if f"/{start}-50." not in held]
        for start in others:
            joined(far, near, "other").get(BLOB, start, 50)
        opened.set()
        assert [piece.result(30) for piece in pieces] == [CONTENT[start : start + 50] for start in (0, 100, 200)]
    assert sorted(far.reads) == [(BLOB, start) for start in (0, 100, 200)]


def test_where_all_is_there_every_worker_begins_somewhere_else(tmp_path: Path):
    relay = published(tmp_path / "far", [1.0, 2.0])
    first: set[str] = set()
    for _ in range(40):
        watched = Watched(relay)
        puller = Puller(watched, TRUST, transfers=1)
        assert_pulls(puller, 0, 1.0)
        watched.reads.clear()
        assert_pulls(puller, 1, 2.0)
        buckets = [key for key, _ in watched.reads if key.endswith(".bin")]
        assert len(set(buckets)) == len(buckets) == 4
        first.add(buckets[0])
    assert len(first) > 1


def test_workers_that_die_amid_a_piece_leave_the_others_what_they_claimed(tmp_path: Path, near: DirectoryRelay):
    soon: dict[str, Any] = {"claim_s": 0.2, "patience_s": 0.2}
    relay = published(tmp_path / "far", [1.0, 2.0])

    class Lost(Watched):
        """The way to the site, once its worker is dead."""

        def delete(self, key: str) -> None:
            raise RelayError("dead")

    def die(key: str, start: int) -> None:
        if key.endswith(".bin"):
            raise RelayError("dead")

    for number in range(3):
        dead = cached(Watched(relay, die), Lost(near), f"dead-{number}", **soon)
        with pytest.raises(RelayError, match="dead"):
            sharing(dead, share_bytes=500).pull(0)
    left = claims(near)
    assert left

    def live(number: int) -> None:
        puller = sharing(cached(relay, near, f"w{number}", **soon), share_bytes=500)
        assert_pulls(puller, 0, 1.0)
        assert_pulls(puller, 1, 2.0)

    with ThreadPoolExecutor(6) as executor:
        list(executor.map(live, range(6)))
    there = near.list_keys()
    assert all(claim.rpartition(".claim-")[0] in there for claim in left if "keyframe" in claim)
