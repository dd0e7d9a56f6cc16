"""Decoders keep to the memory that they promise, whatever they are given.

Run as a program it decodes what each of its arguments says, in a process that it forks for it, and in no more address
space than it is told; that also counts what compiled code and zstd take.
"""

import os
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import zstandard

from elastic.weights.codecs import CODECS, warm_up
from elastic.weights.codecs.base import PADDING, CodecError

LARGE, SMALL = 1 << 22, 5000
PROMISED_BYTES = {"worst": 32 * LARGE + (2 << 20), "bombs": 32 * SMALL + (2 << 20)}
BOMBED = ["dense", "gap8_zstd"]
LIMITED = "exponent_class"
"""Is also decoded in less than it needs."""
BOMBS = ["plain", "silent", "lying", "cut"]


def worst(name: str) -> tuple[bytes, bytes, np.ndarray, np.ndarray, np.ndarray]:
    """Every element changes, to anything."""
    rng = np.random.default_rng(0)
    old, new = (rng.integers(0, 1 << 16, LARGE, dtype=np.uint16) for _ in range(2))
    ends = np.arange(1 << 20, LARGE + 1, 1 << 20)
    bucket = CODECS[name].encode(old, new, ends)
    return bucket.shared, bucket.payload, bucket.payload_ends, old, ends


def bomb(kind: str) -> tuple[bytes, bytes, np.ndarray, np.ndarray, np.ndarray]:
    """A few kilobytes of zstd that are 32 MiB: which say so, or nothing of it, or something else, or break off."""
    frame = bytearray(zstandard.ZstdCompressor(1, write_content_size=kind != "silent").compress(bytes(32 << 20)))
    if kind in ("lying", "cut"):
        assert frame[4] >> 5 == 0b100, "four bytes of size, after one that tells the window"
        frame[6:10] = (2 * SMALL).to_bytes(4, "little")
    if kind == "cut":
        del frame[-3:]
    old, ends = np.zeros(SMALL, np.uint16), np.array([SMALL])
    return b"", bytes(frame) + bytes(PADDING), np.array([len(frame)]), old, ends


def decode_within(name: str, what: str, allowed_bytes: int) -> None:
    cases = [worst(name)] if what == "worst" else [bomb(kind) for kind in BOMBS]
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + allowed_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    for case in cases:
        try:
            CODECS[name].decode(*case)
        except CodecError:
            print(name, what, allowed_bytes, "refused", flush=True)
        except MemoryError:
            print(name, what, allowed_bytes, "too much", flush=True)
        else:
            print(name, what, allowed_bytes, "decoded", flush=True)


def main(jobs: list[str]) -> None:
    warm_up()
    for job in jobs:
        name, what, allowed = job.split()
        pid = os.fork()
        if pid == 0:
            try:
                decode_within(name, what, int(allowed))
            finally:
                os._exit(0)
        os.waitpid(pid, 0)


if __name__ == "__main__":
    main(sys.argv[1:])


@pytest.fixture(scope="module")
def told() -> list[str]:
    jobs = [f"{name} worst {PROMISED_BYTES['worst']}" for name in CODECS]
    jobs += [f"{name} bombs {PROMISED_BYTES['bombs']}" for name in BOMBED]
    arguments = [sys.executable, __file__, *jobs, f"{LIMITED} worst {LARGE}"]
    return subprocess.run(arguments, check=True, capture_output=True, text=True, timeout=300).stdout.splitlines()


def outcomes(told: list[str], name: str, what: str, allowed_bytes: int) -> list[str]:
    job = f"{name} {what} {allowed_bytes} "
    return [line.removeprefix(job) for line in told if line.startswith(job)]


@pytest.mark.skipif(sys.platform != "linux", reason="address space is limited and read as on Linux")
@pytest.mark.parametrize("name", sorted(CODECS))
def test_the_worst_update_is_decoded_in_what_is_promised(told: list[str], name: str):
    """A process under a real memory limit decodes the worst update."""
    assert outcomes(told, name, "worst", PROMISED_BYTES["worst"]) == ["decoded"]
    if name == LIMITED:
        assert outcomes(told, name, "worst", LARGE) == ["too much"], "the limit is one"


@pytest.mark.skipif(sys.platform != "linux", reason="address space is limited and read as on Linux")
@pytest.mark.parametrize("name", BOMBED)
def test_a_bomb_is_refused_in_what_is_promised(told: list[str], name: str):
    assert outcomes(told, name, "bombs", PROMISED_BYTES["bombs"]) == ["refused"] * len(BOMBS)
