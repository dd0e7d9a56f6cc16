"""The key of the tests' trainer, who believes it, what they ask of pullers, damage, and a disk that is full."""

import errno
import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from elastic.system.host import Host, on
from elastic.weights.peer_cache import PeerCacheRelay
from elastic.weights.puller import Puller
from elastic.weights.records import DeltaManifest, open_update
from elastic.weights.relay import Relay
from elastic.weights.signing import SigningKey, Trust
from elastic.weights.staging import StagedVersion

KEY = SigningKey()
TRUST = KEY.trust("run")


def pull(relay: Relay, trust: Trust, version: int, timeout_s: float = 30.0, **options: Any) -> dict[str, Tensor]:
    """From a keyframe on, holding nothing before."""
    return Puller(relay, trust, **options).pull(version, timeout_s)


def opened(relay: Relay, version: int, base: int) -> DeltaManifest:
    """The manifest of a delta that is complete."""
    manifest = open_update(relay.get, version, base, TRUST)
    assert isinstance(manifest, DeltaManifest)
    return manifest


def put_in_force(puller: Puller, version: int, *args: Any, **options: Any) -> StagedVersion:
    """As `Puller.pull`; which way it took, and what."""
    staged = puller.stage(version, *args, **options)
    puller.apply(staged)
    return staged


def sharing(cache: PeerCacheRelay, trust: Trust = TRUST, **options: Any) -> Puller:
    """A puller that reads by way of a site."""
    return Puller(cache, trust, another_copy=cache.refuse, **options)


def assert_same(found: Mapping[str, Any], expected: Mapping[str, Tensor]) -> None:
    """The same tensors by the same names, of the same types, bit for bit."""
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(*(each.contiguous().view(-1).view(torch.int16) for each in (found[name], tensor))), name


def damage(relay: Relay, key: str, change: Callable[[bytes], bytes]) -> None:
    """What is under `key` is another content from now on."""
    overwrite(relay, key, change(relay.get(key)))


def overwrite(relay: Relay, key: str, content: bytes) -> None:
    relay.delete(key)
    relay.put(key, content)


def flip(content: bytes) -> bytes:
    """One bit differs, in front of what pads a bucket."""
    return content[:-9] + bytes([content[-9] ^ 1]) + content[-8:]


def on_disk(write: Callable[[int, memoryview], int]) -> AbstractContextManager[None]:
    """While it lasts this writes what relays put into directories, given the descriptor and the bytes."""
    return on(Host(write=write))


def full_disk(room_bytes: int = 0, below: Path = Path("/")) -> AbstractContextManager[None]:
    """What is put into directories finds no room `below` for more than the first so many bytes of each blob."""

    def write(descriptor: int, data: memoryview) -> int:
        if below not in Path(f"/proc/self/fd/{descriptor}").readlink().parents:
            return os.write(descriptor, data)
        if left := room_bytes - os.lseek(descriptor, 0, os.SEEK_CUR):
            return os.write(descriptor, data[:left])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    return on_disk(write)
