"""A cache of answers that are computed from whole journals, which may take a second.

- An answer is served again while its run's journals are unchanged. For a run under way it is also served for `PATIENCE`
  times as long as it took to compute, so that a run's readers take only a small share of a core.
- Simultaneous requests for the same answer compute it once.
- The cache has a bounded size. It drops the answers that were least recently requested.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from elastic.server.history.journals import Version, version_of

ANSWERS_BYTES_MAX = 64 * 2**20
ENTRY_BYTES = 200
"""Memory of an entry besides its content."""
PATIENCE = 20.0
AT_ONCE_S = 0.02
"""Answers that are computed faster than this are computed anew for every change."""

Entries = Sequence[tuple[str, bytes]]
"""The entries of an answer: each entry's id, and the entry as JSON."""


@dataclass
class _Kept:
    entries: Entries | None = None
    size_bytes: int = 0
    version: Version | None = None
    until_s: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock)


class KeptAnswers:
    """Answers by run and question. Threads may share it."""

    def __init__(self, bytes_max: int = ANSWERS_BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._kept: OrderedDict[tuple[Path, str], _Kept] = OrderedDict()
        self._lock = threading.Lock()
        self.size_bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, run_dir: Path, what: str, make: Callable[[], Entries]) -> Entries:
        """Return the entries that `make` computes from the run's journals, from the cache if possible. Raises what
        `make` raises."""
        key = (run_dir, what)
        with self._lock:
            kept = self._kept.setdefault(key, _Kept())
            self._kept.move_to_end(key)
        with kept.lock:
            version = version_of(run_dir)
            if kept.entries is not None and (
                (version is not None and version == kept.version) or time.monotonic() < kept.until_s
            ):
                return kept.entries
            began_s = time.monotonic()
            try:
                entries = make()
            except BaseException:
                self._forget(key, kept)
                raise
            taken_s = time.monotonic() - began_s
            patience_s = PATIENCE * taken_s if taken_s > AT_ONCE_S else 0.0
            kept.entries, kept.version, kept.until_s = entries, version, began_s + taken_s + patience_s
            self._weigh(key, kept, sum(ENTRY_BYTES + len(id_) + len(content) for id_, content in entries))
            return entries

    def _forget(self, key: tuple[Path, str], kept: _Kept) -> None:
        """Drop an answer that cannot be computed, so that arbitrary questions leave nothing behind."""
        with self._lock:
            if self._kept.get(key) is kept:
                del self._kept[key]
                self.size_bytes -= kept.size_bytes
                kept.size_bytes = 0

    def _weigh(self, key: tuple[Path, str], kept: _Kept, size_bytes: int) -> None:
        with self._lock:
            if self._kept.get(key) is not kept:
                return
            self.size_bytes += size_bytes - kept.size_bytes
            kept.size_bytes = size_bytes
            while self.size_bytes > self._bytes_max:
                _, dropped = self._kept.popitem(last=False)
                self.size_bytes -= dropped.size_bytes
                dropped.size_bytes = 0
