"""From one whole version to the next, in memory and in files, wherever the process is stopped."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from elastic.weights.codecs import CODECS
from elastic.weights.codecs.sums import tile_sums
from elastic.weights.delta import NOTHING, BucketEntry, DeltaManifest, state_of
from elastic.weights.held import Change, Held, Proof, Staged, Tiles, as_of, kept_small
from elastic.weights.manifest import TensorEntry
from elastic.weights.signing import Trust
from elastic.weights.store import KeptStore, Store, open_store
from tests.weights.signed import KEY, TRUST

TILE = 16
ENTRIES = (
    TensorEntry(name="a", shape=(10, 5), dtype="bfloat16", offset=0),
    TensorEntry(name="b", shape=(40,), dtype="bfloat16", offset=100),
    TensorEntry(name="c", shape=(3,), dtype="bfloat16", offset=180),
)

many = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=25, deadline=None)


class Stopped(BaseException):
    """In the place of a signal that ends the process."""


class Weights:
    """Versions 0, 1, … of `ENTRIES`, of which a worker hosts some, and the changes between them."""

    def __init__(self, seed: int, hosted: tuple[bool, ...] = (True, True, True)) -> None:
        self._rng = np.random.default_rng(seed)
        self.hosted = hosted
        self.tiles = Tiles(ENTRIES, hosted, TILE)
        self.size = int(self.tiles.ends[-1])
        self.bits = [self._rng.integers(0, 1 << 16, self.size, dtype=np.uint16)]

    def step(self) -> None:
        moved = self._rng.random(self.size) < self._rng.choice([0.0, 0.1, 1.0])
        self.bits.append(np.where(moved, self._rng.integers(0, 1 << 16, self.size, dtype=np.uint16), self.bits[-1]))

    def held(self, version: int, bits: np.ndarray) -> Held:
        sums = np.zeros(len(self.tiles.ends), np.uint64)
        sums[self.tiles.hosted] = tile_sums(self.bits[version], self.tiles.ends[self.tiles.hosted])
        manifest = DeltaManifest(
            run="run",
            version=version,
            base_version=NOTHING,
            base_state="",
            state=state_of(sums),
            model={"a": 1},
            tensors=ENTRIES,
            changed=(0,) * len(ENTRIES),
            tile_elements=TILE,
            tile_sums=sums.astype("<u8").tobytes(),
            buckets=(BucketEntry(0, len(sums), "raw", 0, ""),),
        )
        proof = Proof(KEY.seal(manifest), keyframe=False)
        return Held(version, "run", {"a": 1}, ENTRIES, self.hosted, bits, {TILE: (state_of(sums), sums)}, proof)

    def changes(self, base: int, version: int, codec: str, bucket_tiles: int) -> list[Change]:
        found: list[Change] = []
        for first in range(0, len(self.tiles.ends), bucket_tiles):
            for run in self.tiles.runs(first, bucket_tiles):
                elements = self.tiles.elements(run)
                old, new = self.bits[base][elements], self.bits[version][elements]
                ends = self.tiles.ends[run] - elements.start
                encoded = CODECS[codec].encode(old, new, ends)
                update = CODECS[codec].decode(encoded.shared, encoded.payload, encoded.payload_ends, old, ends)
                found.append(Change(base, version, run.start, elements.start, elements.stop, update))
        return found

    def staged(self, store: Store, path: list[int], codec: str, bucket_tiles: int) -> Staged:
        base = store.held
        assert base is not None
        changes = [
            change for before, after in pairwise(path) for change in self.changes(before, after, codec, bucket_tiles)
        ]
        return Staged.over(base, self.held(path[-1], base.bits), changes)

    def begin(self, store: Store, version: int = 0) -> None:
        bits = store.room(self.size)
        bits[:] = self.bits[version]
        store.put(Staged.afresh(self.held(version, bits)))

    def assert_holds(self, store: Store, version: int) -> None:
        held = store.held
        assert held is not None
        assert held.version == version
        assert np.array_equal(held.bits, self.bits[version])
        assert held.wrong_tiles() == []


@pytest.fixture(params=["memory", "kept"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    store = Store() if request.param == "memory" else KeptStore(tmp_path / "store", TRUST)
    yield store
    store.close()


def stop_after(monkeypatch: pytest.MonkeyPatch, writes: int) -> None:
    """The tile after so many is half written when the process stops."""
    from elastic.weights import held

    left = [writes]
    apply = held.apply_update

    def apply_or_stop(update, bits):
        if not left[0]:
            half = update.value.size // 2
            index = np.arange(half) if update.index is None else update.index[:half]
            bits[index] = update.value[:half]
            raise Stopped
        left[0] -= 1
        apply(update, bits)

    monkeypatch.setattr(held, "apply_update", apply_or_stop)


cases = {
    "seed": st.integers(0, 2**30),
    "codec": st.sampled_from(sorted(CODECS)),
    "bucket_tiles": st.integers(1, 9),
    "hosted": st.sampled_from([(True, True, True), (True, False, True), (False, True, False)]),
    "writes": st.integers(0, 20),
}


@many
@given(**cases)
def test_who_was_stopped_while_writing_goes_on_to_the_whole_version(store, seed, codec, bucket_tiles, hosted, writes):
    weights = Weights(seed, hosted)
    for _ in range(3):
        weights.step()
    weights.begin(store)
    staged = weights.staged(store, [0, 1, 2], codec, bucket_tiles)
    with pytest.MonkeyPatch.context() as patched:
        stop_after(patched, writes)
        try:
            store.put(staged)
        except Stopped:
            assert writes < 2 * len(weights.tiles.ends)
    weights.assert_holds(store, 2)
    store.put(weights.staged(store, [2, 3], codec, bucket_tiles))
    weights.assert_holds(store, 3)


@many
@given(**cases)
def test_writing_a_change_again_is_a_no_op(seed, codec, bucket_tiles, hosted, writes):
    weights = Weights(seed, hosted)
    weights.step()
    store = Store()
    weights.begin(store)
    staged = weights.staged(store, [0, 1], codec, bucket_tiles)
    store.put(staged)
    held = store.held
    assert held is not None
    assert (staged.tags[weights.tiles.hosted] == 1).all()
    scribbled = np.arange(weights.size, dtype=np.uint16)
    held.bits[:] = scribbled
    staged.write()
    assert np.array_equal(held.bits, scribbled), "no tile is of the version that the change is from"


@many
@given(**cases)
def test_a_change_is_kept_in_no_more_than_a_copy(seed, codec, bucket_tiles, hosted, writes):
    weights = Weights(seed, hosted)
    weights.step()
    for change in weights.changes(0, 1, codec, bucket_tiles):
        old, new = (bits[change.begin : change.end] for bits in weights.bits)
        ends = weights.tiles.ends[change.first_tile : change.first_tile + len(change.update.ends)] - change.begin
        kept = kept_small(change.update, old, ends)
        assert kept.value.nbytes + (0 if kept.index is None else kept.index.nbytes) <= old.nbytes
        for update in (kept, change.update):
            bits, tags = weights.bits[0].copy(), np.zeros(len(weights.tiles.ends), np.int64)
            change._replace(update=update).write(bits, tags)
            assert np.array_equal(bits[change.begin : change.end], new)


@many
@given(**cases)
def test_patterns_after_a_chain_are_known_before_it_is_written(seed, codec, bucket_tiles, hosted, writes):
    weights = Weights(seed, hosted)
    for _ in range(2):
        weights.step()
    changes = [*weights.changes(0, 1, codec, bucket_tiles), *weights.changes(1, 2, codec, bucket_tiles)]
    begin, end = sorted((writes % (weights.size + 1), seed % (weights.size + 1)))
    assert np.array_equal(as_of(weights.bits[0], changes, slice(begin, end)), weights.bits[2][begin:end])


@many
@given(**cases)
def test_a_successor_finds_what_was_held(tmp_path_factory, seed, codec, bucket_tiles, hosted, writes):
    """Stopped at any point, by an exception that unwinds nothing of what is on file."""
    directory = tmp_path_factory.mktemp("store")
    weights = Weights(seed, hosted)
    for _ in range(2):
        weights.step()
    with closing(KeptStore(directory, TRUST)) as store, pytest.MonkeyPatch.context() as patched:
        weights.begin(store)
        stop_after(patched, writes)
        reached = 0
        try:
            for version in (1, 2):
                store.put(weights.staged(store, [version - 1, version], codec, bucket_tiles))
                reached = version
        except Stopped:
            reached += 1  # it was on file
    with closing(KeptStore(directory, TRUST)) as successor:
        weights.assert_holds(successor, reached)
        assert sorted(path.name.partition("-")[0] for path in directory.iterdir()) == ["held.json", "lock", "patterns"]


@many
@given(seed=st.integers(0, 2**30), data=st.data())
def test_damaged_files_are_not_believed(tmp_path_factory, seed, data):
    directory = tmp_path_factory.mktemp("store")
    weights = Weights(seed)
    weights.step()
    with closing(KeptStore(directory, TRUST)) as store, pytest.MonkeyPatch.context() as patched:
        weights.begin(store)
        stop_after(patched, data.draw(st.integers(0, 3)))
        with pytest.raises(Stopped):
            store.put(weights.staged(store, [0, 1], "raw", 2))
    path = data.draw(st.sampled_from(sorted(path for path in directory.iterdir() if path.name != "lock")))
    content = bytearray(path.read_bytes())
    kind = data.draw(st.sampled_from(["flip", "cut", "remove"]))
    if kind == "flip":
        content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    elif kind == "cut":
        content = content[: data.draw(st.integers(0, len(content) - 1))]
    path.unlink()
    if kind != "remove":
        path.write_bytes(content)
    with closing(KeptStore(directory, TRUST)) as successor:
        if (held := successor.held) is not None:
            weights.assert_holds(successor, held.version)


def test_what_does_not_fit_what_is_held_leaves_nothing_on_file(tmp_path: Path):
    weights = Weights(0)
    for _ in range(2):
        weights.step()
    with closing(KeptStore(tmp_path, TRUST)) as store:
        weights.begin(store)
        late = weights.staged(store, [0, 1], "gap8", 2)
        store.put(weights.staged(store, [0, 1, 2], "gap8", 2))
        with pytest.raises(ValueError, match="staged over 0; held is 2"):
            store.put(late)
        assert not (tmp_path / "staged.bin").exists()
        weights.assert_holds(store, 2)


def test_a_directory_is_one_process_s_alone(tmp_path: Path):
    weights = Weights(0)
    first, second = open_store(tmp_path, TRUST), open_store(tmp_path, TRUST)
    weights.begin(first)
    assert second.held is None
    second.close()
    first.close()
    heir = open_store(tmp_path, TRUST)
    weights.assert_holds(heir, 0)
    heir.close()


def test_a_full_disk_costs_the_files_and_not_the_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    weights = Weights(0)
    for _ in range(2):
        weights.step()
    store = KeptStore(tmp_path, TRUST)
    weights.begin(store)
    with monkeypatch.context() as patched:
        patched.setattr(KeptStore, "_write", full)
        store.put(weights.staged(store, [0, 1], "gap8", 2))
    weights.assert_holds(store, 1)
    assert not (tmp_path / "held.json").exists(), "nobody takes half-written patterns for version 0"
    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", full)
        weights.begin(store, 2)
    weights.assert_holds(store, 2)
    store.close()
    successor = KeptStore(tmp_path, TRUST)
    assert successor.held is None
    successor.close()


KILLED_WHILE_WRITING = """
import os, signal, sys
from pathlib import Path
from elastic.weights import held
from elastic.weights.store import KeptStore
from tests.weights.signed import KEY, TRUST
from tests.weights.test_store import Weights

weights = Weights(7)
for _ in range(2):
    weights.step()
print(KEY.public, flush=True)
store = KeptStore(Path(sys.argv[1]), TRUST)
weights.begin(store)
store.put(weights.staged(store, [0, 1], "exponent_class", 3))
left = [2]

def apply_or_die(update, bits, apply=held.apply_update):
    if not left[0]:
        half = update.index.size // 2
        bits[update.index[:half]] = update.value[:half]
        os.kill(os.getpid(), signal.SIGKILL)
    left[0] -= 1
    apply(update, bits)

held.apply_update = apply_or_die
store.put(weights.staged(store, [1, 2], "exponent_class", 3))
"""


@pytest.mark.slow
def test_a_killed_process_leaves_a_whole_version(tmp_path: Path):
    arguments = [sys.executable, "-c", KILLED_WHILE_WRITING, str(tmp_path)]
    killed = subprocess.run(
        arguments, check=False, timeout=120, cwd=Path(__file__).parents[2], stdout=subprocess.PIPE, text=True
    )
    assert killed.returncode == -signal.SIGKILL
    weights = Weights(7)
    for _ in range(3):
        weights.step()
    successor = KeptStore(tmp_path, Trust("run", killed.stdout.strip()))
    weights.assert_holds(successor, 2)
    successor.put(weights.staged(successor, [2, 3], "exponent_class", 3))
    weights.assert_holds(successor, 3)
    successor.close()
