"""A directory relay whose blobs are in shared memory for a while: nothing is lost by it, and nothing is left of it."""

import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from elastic.system.host import Host, on
from elastic.weights import directory
from elastic.weights.directory import DirectoryRelay
from elastic.weights.errors import BlobConflict, BlobNotFound
from elastic.weights.shared_memory import in_memory, kept_in_memory
from tests.small_files import small_files
from tests.weights.signed import full_disk


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "weights"
    root.mkdir()
    return root


def in_files(place: Path) -> list[bytes]:
    """What lies in a place, links not counted."""
    return sorted(path.read_bytes() for path in place.rglob("*") if path.is_file() and not path.is_symlink())


def contents(relay: DirectoryRelay) -> dict[str, bytes]:
    return {key: relay.get(key) for key in relay.list_keys()}


def test_blobs_are_in_memory_for_a_while_and_on_the_disk_afterwards(root: Path, memory: Path):
    relay = DirectoryRelay(root)
    relay.put("v/0", b"before")
    with in_memory(root, memory):
        relay.put("v/1", b"one")
        relay.put("v/2", b"two")
        relay.delete("v/2")
        assert (in_files(root), in_files(memory)) == ([b"before"], [b"one"])
        everything = contents(relay)
        with pytest.raises(BlobConflict):
            relay.put("v/1", b"another")
        assert in_files(memory) == [b"one"]
    assert list(memory.iterdir()) == []
    assert in_files(root) == [b"before", b"one"]
    assert contents(relay) == everything == {"v/0": b"before", "v/1": b"one"}


class Usage(NamedTuple):
    total: int
    free: int


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
@given(sizes=st.lists(st.integers(0, 40), max_size=12), total=st.integers(0, 200), deleted=st.sets(st.integers(0, 11)))
def test_what_finds_no_room_is_on_the_disk(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], total: int, deleted: set[int]
):
    base = tmp_path_factory.mktemp("machine")
    root, memory = base / "weights", base / "memory"
    root.mkdir()
    memory.mkdir()
    relay, expected = DirectoryRelay(root), dict[str, bytes]()

    def usage(path: Path) -> Usage:
        return Usage(total, total - sum(map(len, in_files(memory))))

    with on(Host(disk_usage=usage)), in_memory(root, memory):
        for number, size in enumerate(sizes):
            relay.put(f"v/{number}", bytes([number]) * size)
            expected[f"v/{number}"] = bytes([number]) * size
            assert sum(map(len, in_files(memory))) <= directory.MEMORY_LEFT * total
            if number in deleted:
                relay.delete(f"v/{number}")
                del expected[f"v/{number}"]
        assert contents(relay) == expected
        assert sorted(in_files(root) + in_files(memory)) == sorted(expected.values())
    assert contents(relay) == expected
    assert list(memory.iterdir()) == []


def test_a_memory_that_is_full_sooner_than_it_says_costs_nothing(root: Path, memory: Path):
    relay = DirectoryRelay(root)
    with in_memory(root, memory):
        with full_disk(1000, below=memory):
            relay.put("v/1", bytes(2500))
        assert (in_files(root), in_files(memory)) == ([bytes(2500)], [])
        relay.put("v/2", b"there is room again")
        assert in_files(memory) == [b"there is room again"]
    assert contents(relay) == {"v/1": bytes(2500), "v/2": b"there is room again"}


def test_without_shared_memory_all_is_as_ever(root: Path, tmp_path: Path):
    relay = DirectoryRelay(root)
    with in_memory(root, tmp_path / "none"):
        relay.put("v/1", b"one")
        assert in_files(root) == [b"one"]
    assert contents(relay) == {"v/1": b"one"}


def test_a_disk_that_is_full_at_the_end_keeps_whole_versions_only(root: Path, memory: Path):
    relay = DirectoryRelay(root)
    with ExitStack() as full, in_memory(root, memory):
        for key, size in (("1/delta-0.json", 1), ("1/delta-0.bin", 1), ("2/delta-1.bin", 2 << 20)):
            relay.put(f"versions/{key}", bytes(size))
        full.enter_context(small_files(1 << 20))
    assert relay.list_keys() == ["versions/1/delta-0.bin"], "no manifest without its blob"
    assert [path for path in root.rglob("*") if path.is_symlink()] == []
    assert list(memory.iterdir()) == []


KILLED = """
import os, signal, sys
from pathlib import Path
from elastic.weights.directory import DirectoryRelay
from elastic.weights.shared_memory import in_memory
root, memory = map(Path, sys.argv[1:])
with in_memory(root, memory):
    DirectoryRelay(root).put("v/1", b"of a killed process")
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def killed(root: Path, memory: Path) -> DirectoryRelay:
    """Of a run whose process was killed: version 0 is on the disk, version 1 was in memory."""
    DirectoryRelay(root).put("v/0", b"on the disk")
    process = subprocess.run([sys.executable, "-c", KILLED, str(root), str(memory)], timeout=60)
    assert process.returncode == -signal.SIGKILL
    return DirectoryRelay(root)


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """Of another run."""
    other = tmp_path / "other"
    other.mkdir()
    return other


def test_what_a_killed_run_left_is_removed_and_counts_as_deleted(
    killed: DirectoryRelay, root: Path, other: Path, memory: Path
):
    assert contents(killed) == {"v/0": b"on the disk", "v/1": b"of a killed process"}, "until somebody comes"
    with in_memory(other, memory):
        assert in_files(memory) == []
        assert killed.list_keys() == ["v/0"]
        with pytest.raises(BlobNotFound):
            killed.get("v/1")
        with in_memory(root, memory):
            killed.put("v/1", b"of the resumed run")
            DirectoryRelay(other).put("v/1", b"of the other run")
            assert in_files(memory) == [b"of the other run", b"of the resumed run"], "the living are let be"
    assert contents(killed) == {"v/0": b"on the disk", "v/1": b"of the resumed run"}
    assert list(memory.iterdir()) == []


def test_a_killed_runs_next_process_goes_on_with_what_is_in_memory(killed: DirectoryRelay, root: Path, memory: Path):
    (place,) = memory.iterdir()
    with in_memory(root, memory):
        assert list(memory.iterdir()) == [place]
        assert contents(killed) == {"v/0": b"on the disk", "v/1": b"of a killed process"}
        killed.put("v/2", b"of its successor")
        assert in_files(memory) == [b"of a killed process", b"of its successor"]
    assert len(contents(killed)) == 3
    assert list(memory.iterdir()) == []


def test_what_is_kept_is_no_leftover_until_nobody_keeps_it(
    killed: DirectoryRelay, root: Path, other: Path, memory: Path
):
    with kept_in_memory(root), in_memory(other, memory):
        assert killed.get("v/1") == b"of a killed process"
        killed.put("v/2", b"of whoever keeps it")
        assert in_files(memory) == [b"of a killed process", b"of whoever keeps it"]
        with kept_in_memory(root):
            pass
        assert killed.list_keys() == ["v/0", "v/1", "v/2"], "another one keeps it"
    assert list(memory.iterdir()) == []
    assert killed.list_keys() == ["v/0"]


def test_whoever_keeps_it_takes_nothing_from_a_run_that_goes_on(killed: DirectoryRelay, root: Path, memory: Path):
    with kept_in_memory(root), in_memory(root, memory):
        with kept_in_memory(root):
            pass
        assert killed.list_keys() == ["v/0", "v/1"]
    assert list(memory.iterdir()) == [], "a run that ends leaves nothing to keep"
    assert killed.list_keys() == ["v/0", "v/1"]


def test_where_nothing_is_in_memory_nothing_is_kept(root: Path):
    with kept_in_memory(root):
        DirectoryRelay(root).put("v/1", b"one")
    assert DirectoryRelay(root).list_keys() == ["v/1"]
