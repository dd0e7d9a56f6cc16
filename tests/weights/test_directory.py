import errno
import os
from pathlib import Path

import pytest

from elastic.weights.directory import DirectoryRelay
from elastic.weights.errors import BlobNotFound, RelayError, RelayUnavailable


def test_a_full_disk_is_named_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    relay = DirectoryRelay(tmp_path)
    write = os.write

    def write_until_full(descriptor: int, data: memoryview) -> int:
        if data.nbytes < 1000:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, data[:1000])

    with monkeypatch.context() as patched:
        patched.setattr("elastic.weights.directory.os.write", write_until_full)
        with pytest.raises(RelayError, match=r"v/1: No space left on device") as caught:
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
