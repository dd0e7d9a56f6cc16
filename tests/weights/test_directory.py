import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from elastic.weights.directory import INCOMING, DirectoryRelay
from elastic.weights.errors import BlobNotFound, RelayError, RelayUnavailable
from tests.weights.signed import full_disk, on_disk


def test_a_full_disk_is_named_and_leaves_nothing(tmp_path: Path):
    relay = DirectoryRelay(tmp_path)
    with full_disk(1000), pytest.raises(RelayError, match=r"v/1: No space left on device") as caught:
        relay.put("v/1", bytes(2500))
    assert str(tmp_path) in str(caught.value)
    assert not isinstance(caught.value, RelayUnavailable)
    assert relay.list_keys() == []
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    relay.put("v/1", bytes(2500))
    assert relay.get("v/1") == bytes(2500)


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(RelayError, match="file"):
        DirectoryRelay(tmp_path / "file").put("k", b"")


def test_reading_makes_nothing(tmp_path: Path):
    relay = DirectoryRelay(tmp_path / "relay")
    assert relay.list_keys() == []
    with pytest.raises(BlobNotFound):
        relay.get("k")
    assert not (tmp_path / "relay").exists()


def test_deleting_leaves_no_empty_directories(tmp_path: Path):
    relay = DirectoryRelay(tmp_path)
    relay.put("versions/1/blob", b"")
    relay.put("versions/2/blob", b"")
    relay.delete("versions/1/blob")
    assert sorted(path.name for path in (tmp_path / "versions").iterdir()) == ["2"]


def test_a_blob_is_put_also_while_its_neighbours_go(tmp_path: Path):
    relay = DirectoryRelay(tmp_path)
    barrier = threading.Barrier(3)

    def come_and_go(writer: int) -> None:
        barrier.wait(timeout=10)
        for number in range(300):
            relay.put(f"claims/deep/{writer}-{number}", b"1")
            relay.delete(f"claims/deep/{writer}-{number}")

    with ThreadPoolExecutor(3) as threads:
        list(threads.map(come_and_go, range(3)))
    assert relay.list_keys() == []


def test_a_directory_that_is_removed_before_its_blob_is_there_is_made_again(tmp_path: Path):
    left = [3]

    def remove_amid(descriptor: int, data: memoryview) -> int:
        if left[0]:
            left[0] -= 1
            (tmp_path / "v").rmdir()
        return os.write(descriptor, data)

    relay = DirectoryRelay(tmp_path)
    with on_disk(remove_amid):
        relay.put("v/1", b"content")
    assert (relay.get("v/1"), left) == (b"content", [0])


KILLED = """
import os, signal, sys
from pathlib import Path
from elastic.system.host import Host, on
from elastic.weights.directory import DirectoryRelay
def die(descriptor, data):
    os.write(descriptor, data)
    os.kill(os.getpid(), signal.SIGKILL)
with on(Host(write=die)):
    DirectoryRelay(Path(sys.argv[1])).put("v/1", bytes(1000))
"""


def test_what_a_killed_writer_left_goes_and_what_others_are_writing_stays(tmp_path: Path):
    killed = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], timeout=60)
    assert killed.returncode == -signal.SIGKILL
    (left,) = (tmp_path / INCOMING).iterdir()
    begun, go_on = threading.Event(), threading.Event()

    def wait_amid(descriptor: int, data: memoryview) -> int:
        begun.set()
        assert go_on.wait(10)
        return os.write(descriptor, data)

    def put_slowly() -> None:
        with on_disk(wait_amid):
            DirectoryRelay(tmp_path).put("v/2", bytes(2000))

    with ThreadPoolExecutor(1) as threads:
        writing = threads.submit(put_slowly)
        assert begun.wait(10)
        DirectoryRelay(tmp_path).put("v/3", b"")
        assert not left.exists()
        go_on.set()
        writing.result(10)
    relay = DirectoryRelay(tmp_path)
    assert relay.list_keys() == ["v/2", "v/3"]
    assert relay.get("v/2") == bytes(2000)
    assert list((tmp_path / INCOMING).iterdir()) == []
