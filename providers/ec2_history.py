"""What runs have seen of EC2's pools, kept between them: one line for each instance that is over.

The file lies beside the runs' directories. Lines are appended whole, so that several runs may write at once; what
cannot be read counts for nothing, and what is older than `KEPT_S` is dropped now and then.
"""

import contextlib
import fcntl
import os
import time
from collections.abc import Iterable
from pathlib import Path

import msgspec
import structlog

from providers.ec2_market import PoolHistory, SpotPool

log = structlog.get_logger(__name__)

FILE = "ec2-history.jsonl"
KEPT_S = 7 * 86_400.0
"""Instances that ended longer ago than a week say little about the next interruptions."""
MOST_BYTES = 1 << 20
"""A larger file is rewritten without old lines, or with its newer half if that is not enough."""


class PastInstance(msgspec.Struct, frozen=True):
    """An instance that has ended, at `at_s` (Unix time). `endpoint` is empty for AWS's own."""

    at_s: float
    endpoint: str
    instance_type: str
    zone: str
    held_s: float
    taken: bool


class Ec2History:
    """The file of ended instances. Its methods block briefly. Errors of the disk are logged and do not stop a run."""

    def __init__(self, directory: Path, endpoint: str, bytes_max: int = MOST_BYTES) -> None:
        self._path, self._endpoint, self._bytes_max = directory / FILE, endpoint, bytes_max

    def pools(self) -> dict[SpotPool, PoolHistory]:
        """Return what each pool has shown in the last week at this endpoint."""
        since_s = time.time() - KEPT_S
        found: dict[SpotPool, PoolHistory] = {}
        for one in self._read():
            if one.endpoint == self._endpoint and one.at_s >= since_s and one.held_s >= 0:
                seen = found.setdefault(SpotPool(one.instance_type, one.zone), PoolHistory())
                seen.held_s += one.held_s
                seen.interruptions += one.taken
        return found

    def add(self, pool: SpotPool, held_s: float, *, taken: bool) -> None:
        one = PastInstance(time.time(), self._endpoint, pool.instance_type, pool.zone, held_s, taken)
        try:
            with self._path.open("ab", buffering=0) as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                if file.tell() > self._bytes_max:
                    self._shorten(file.fileno())
                file.write(msgspec.json.encode(one) + b"\n")
        except OSError as error:
            log.warning("an instance's life is not known to later runs", path=str(self._path), error=str(error))

    def _shorten(self, descriptor: int) -> None:
        """Rewrite the file in place, under its lock, since other processes append to the same file."""
        since_s = time.time() - KEPT_S
        kept = [msgspec.json.encode(one) + b"\n" for one in self._read() if one.at_s >= since_s]
        while sum(map(len, kept)) > self._bytes_max // 2:
            kept = kept[len(kept) // 2 :]
        os.ftruncate(descriptor, 0)
        os.write(descriptor, b"".join(kept))

    def _read(self) -> Iterable[PastInstance]:
        try:
            lines = self._path.read_bytes().splitlines()
        except OSError:
            return
        for line in lines:
            with contextlib.suppress(msgspec.DecodeError):
                yield msgspec.json.decode(line, type=PastInstance)
