"""Workers of one site share what crosses the slow link: of everything, one copy does.

- A worker that needs a piece which the site lacks claims it, fetches it from the far relay and puts it on the near one.
  The other workers find it there, a newcomer its keyframe as well.
- A waiting worker takes over a claim when the piece takes several times as long as its own pieces take. The claim's
  worker may have died, or have a slow link.
- A worker fetches one piece at a time, so that pieces are there soon, one after the other; the link is full of the
  pieces of all workers.
- The slower worker notices that between two parts of its piece. It takes the other's copy, and lets others claim first
  from then on.
- So workers join and leave without anybody's consent.

Source: the two-stage transfer of RollMux §5.2 (Weave §5.2), without a fixed group.

The near relay is any relay that all workers of the site reach fast: a directory in shared memory on one host, or an
HTTP relay on one of them. Other data may share it: pieces lie below `site/`, by the key that signed them, so other
runs and resumed trainers do not meet them. If the near relay fails, or a piece does not verify, the worker fetches
another copy, and at last reads from the far relay alone. A piece is a range that a worker asks for, so workers have
to ask for the same ranges.
"""

import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress

import structlog

from elastic.weights.blobs import Buffer
from elastic.weights.digest import digest_of
from elastic.weights.errors import BlobConflict, BlobNotFound, RelayError
from elastic.weights.records import version_of
from elastic.weights.relay import Relay, WaitingRelay
from elastic.weights.signing import Trust
from elastic.weights.waiting import pause_after_s

log = structlog.get_logger(__name__)

CLAIM_S = 10.0
"""How long one waits for another's piece without knowing how long such a piece takes, and does without a near relay
that failed."""

PATIENCE, PATIENCE_S = 4, 0.1
"""How long one waits for another's piece: so many times what such a piece takes oneself, and at least this.

Each further claim on the piece is waited for twice as long, so that a link that got slow is not loaded with copies."""

COPIES = 2
"""The copies of a version that a site has. If neither verifies, a worker does without the site for that version."""

CLAIMS = 6
"""On a piece; when all of them came to nothing one fetches it for oneself."""

CLAIM_LOOKS = 4
"""Looks for a piece that is waited for to one at its claim, which may have been withdrawn."""

WAIT_S = 1.0
"""How long a near relay that lets its readers wait is asked to, at most, until one looks at a claim."""

REST = 4
"""Times as long as looking for a piece took until one looks again: a relay that is asked by many has work to do."""

PART_S, PART_BYTES_MIN = 0.25, 64 << 10
"""A claimed piece is fetched in parts of about this time, none smaller than this, to see in between whether another
worker was faster."""

_NAME = 32
"""Characters of a digest or a key that are enough to name it by."""

MEMORY = 0.8
"""The factor by which the longest time of a piece fades from one piece to the next."""


class PeerCacheRelay:
    """`elastic.weights.relay.Relay` for the workers of a site, all of which believe what `trust` says.

    `worker` names this one; it must be unique.
    """

    def __init__(
        self,
        far: Relay,
        near: Relay,
        worker: str,
        trust: Trust,
        *,
        claim_s: float = CLAIM_S,
        patience_s: float = PATIENCE_S,
        part_bytes_min: int = PART_BYTES_MIN,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._far = far
        self._near = near
        self._waits = isinstance(near, WaitingRelay)
        self._worker = worker
        self._run_place = f"site/{digest_of(trust.run.encode())[:_NAME]}/"
        self._place = f"{self._run_place}{trust.public[:_NAME]}/"
        self._claim_s = claim_s
        self._patience_least_s = patience_s
        self._part_bytes = self._part_bytes_min = part_bytes_min
        self._clock = clock
        self._sleep = sleep
        self._numbers = itertools.count()
        self._refused: Counter[int | None] = Counter()
        self._took_s: dict[int, float] = {}
        """How long a piece lately took this worker, by the power of two that is above the length it asked for."""
        self._lock = threading.Lock()
        self._fetching = False
        self._overtaken = False
        """Whether another worker was faster with the last piece that this one fetched."""
        self._without_until_s = 0.0

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        """Return a part of a blob from the site, or else over the link, by this worker or a faster one."""
        copy = self._refused[version_of(key)]
        if copy >= COPIES or self._clock() < self._without_until_s:
            return self._far.get(key, start, length)
        piece = f"{self._place}{key}/{start}-{'' if length is None else length}"
        if copy:
            piece += f".copy-{copy}"
        try:
            content, claim = self._awaited(piece, length)
        except RelayError as error:
            self._do_without(error)
            return self._far.get(key, start, length)
        return self._fetch(piece, claim, key, start, length) if content is None else content

    def put(self, key: str, *parts: Buffer) -> None:
        self._far.put(key, *parts)

    def list_keys(self, prefix: str = "") -> list[str]:
        """Return the keys of the far relay."""
        return self._far.list_keys(prefix)

    def delete(self, key: str) -> None:
        self._far.delete(key)

    def close(self) -> None:
        self._far.close()
        self._near.close()

    def refuse(self, version: int) -> bool:
        """What was read of `version` did not verify. Whether it came from the site; the next time it is another copy,
        off the far relay."""
        self._refused[version] += 1
        return self._refused[version] <= COPIES

    def _awaited(self, piece: str, length: int | None) -> tuple[bytes | None, str | None]:
        """The piece, or none and the claim on it under which this worker is to fetch it."""
        number, holder, looks, patience_s, pause_s = 0, None, 0, self._patience_s(length), 0.0
        begun_s = since_s = self._clock()
        while True:
            looked_s = self._clock()
            if (content := self._found(piece, pause_s)) is not None:
                return content, None
            waited_s, took_s = self._clock() - begun_s, self._clock() - looked_s - pause_s
            looks += 1
            overdue = self._clock() - since_s >= patience_s * 2**number
            looks_at_claim = self._waits or holder is None or overdue or looks % CLAIM_LOOKS == 0
            if looks_at_claim and (not self._overtaken or waited_s >= self._patience_least_s):
                if number == CLAIMS:
                    return None, None
                claim = f"{piece}.claim-{number}"
                found = self._found(claim)
                if found is None and self._claim(claim):
                    return None, claim
                if found != holder:
                    holder, since_s = found, self._clock()
                elif found is not None and self._clock() - since_s >= patience_s * 2**number:
                    number, holder, pause_s = number + 1, None, 0.0
                    continue
            pause_s = max(pause_after_s(waited_s), REST * took_s)
            if self._waits and holder is not None:
                pause_s = min(max(pause_s, since_s + patience_s * 2**number - self._clock()), WAIT_S)

    def _found(self, key: str, within_s: float = 0.0) -> bytes | None:
        """What is there, now or after a wait, which ends early where the relay lets its readers wait."""
        looked_s = self._clock()
        with suppress(BlobNotFound):
            if isinstance(self._near, WaitingRelay):
                return self._near.get_within(key, within_s)
            if within_s:
                self._sleep(within_s)
            return self._near.get(key)
        # A relay with many waiting readers answers the others at once.
        took_s = self._clock() - looked_s
        if took_s < within_s:
            self._sleep(min(within_s - took_s, max(pause_after_s(within_s), REST * took_s)))
        return None

    def _claim(self, claim: str) -> bool:
        """Claim a piece, and return whether this worker has it now. It fetches one at a time."""
        with self._lock:
            if self._fetching:
                return False
            self._fetching = True
        try:
            self._near.put(claim, f"{self._worker} {next(self._numbers)}".encode())
        except RelayError as error:
            self._end_fetching()
            if not isinstance(error, BlobConflict):
                raise
            return False
        return True

    def _end_fetching(self) -> None:
        with self._lock:
            self._fetching = False

    def _patience_s(self, length: int | None) -> float:
        """By the pieces lately fetched: a piece takes no longer than a larger one did; of a smaller one one infers."""
        power, known = _power(length), sorted(self._took_s)
        if not known:
            return self._claim_s
        nearest = next((each for each in known if each >= power), known[-1])
        fair_s = PATIENCE * self._took_s[nearest]
        if nearest < power:
            fair_s = min(fair_s * 2 ** (power - nearest), self._claim_s)
        return max(fair_s, self._patience_least_s)

    def _fetch(self, piece: str, claim: str | None, key: str, start: int, length: int | None) -> bytes:
        begun_s = self._clock()
        content = bytearray()
        try:
            while length is None or len(content) < length:
                wanted = None if length is None else min(length - len(content), self._part_bytes)
                part_s = self._clock()
                part = self._far.get(key, start + len(content), wanted)
                content += part
                if wanted is None or len(part) < wanted:
                    break
                fast = self._clock() - part_s < PART_S
                self._part_bytes = max(self._part_bytes * 2 if fast else self._part_bytes // 2, self._part_bytes_min)
                if len(content) != length and (faster := self._faster(piece)) is not None:
                    self._overtaken = True
                    return faster
        except BaseException:
            self._give_up(claim)
            raise
        finally:
            if claim is not None:
                self._end_fetching()
        power, took_s = _power(length), self._clock() - begun_s
        self._took_s[power] = max(took_s, MEMORY * self._took_s.get(power, 0.0))
        self._overtaken = False
        try:
            self._near.put(piece, content)
            if key.endswith(".json"):
                self._forget()
        except RelayError as error:
            self._do_without(error)
            self._give_up(claim)
        return bytes(content)

    def _faster(self, piece: str) -> bytes | None:
        """Returns the piece if another worker has put it into the site's cache by now."""
        with suppress(RelayError):
            return self._found(piece)
        return None

    def _give_up(self, claim: str | None) -> None:
        """Withdraws the claim: workers that wait for the piece fetch it now."""
        if claim is not None:
            with suppress(RelayError):
                self._near.delete(claim)

    def _do_without(self, error: RelayError) -> None:
        log.warning("site not used", reason=str(error))
        self._without_until_s = self._clock() + self._claim_s

    def _forget(self) -> None:
        """Deletes pieces of versions that the far relay no longer has, and of this run's former publishers."""
        there = {version_of(key) or 0 for key in self.list_keys("versions/")}
        for key in self._near.list_keys(self._run_place):
            version = version_of("/".join(key.removeprefix(self._place).split("/")[:3]))
            if version is None or (version not in there and version < max(there, default=0)):
                self._near.delete(key)


def _power(length: int | None) -> int:
    return 0 if length is None else length.bit_length()
