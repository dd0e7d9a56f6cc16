"""Workers of one site share what crosses the slow link: of everything, one copy does.

Who needs a piece that the site does not have claims it, fetches it from the far relay and puts it on the near one;
the others wait for it there, and claim other pieces meanwhile. A claim is renewed while its piece comes in, however
slow the link is, and expires otherwise, so that a worker may die with it, and joining or leaving takes nobody's
consent. A newcomer gets its keyframe from the near relay as everybody does.
Source: the two-stage transfer of RollMux §5.2 (Weave §5.2), without a fixed group.

The near relay is any relay that all workers of the site reach fast: a directory in shared memory on one host, or an
HTTP relay on one of them. Pieces are what is asked for, so workers have to ask for the same ranges.
"""

import time
from collections.abc import Callable

import structlog

from elastic.weights.errors import BlobConflict, BlobNotFound, RelayError, RelayUnavailable
from elastic.weights.manifest import version_of
from elastic.weights.relay import Buffer, Relay
from elastic.weights.waiting import POLL_S

log = structlog.get_logger(__name__)

CLAIM_S = 10.0
"""How long a worker may take for a part of a piece; the next one's wait if it died."""

PART_BYTES = 1 << 20
"""What is fetched of a claimed piece before the claim is looked at again."""

PATIENCE, PATIENCE_MAX = 3, 60
"""How many times as long as a claim lasts one waits for a claim that is not renewed, and for one that is."""


class SiteRelay:
    """`elastic.weights.relay.Relay` for the workers of a site. `worker` names this one; it must be unique."""

    def __init__(
        self,
        far: Relay,
        near: Relay,
        worker: str,
        *,
        claim_s: float = CLAIM_S,
        clock: Callable[[], float] = time.time,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._far = far
        self._near = near
        self._worker = worker
        self._claim_s = claim_s
        self._clock = clock
        self._sleep = sleep

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        """From the site if it is there, else over the link, by this worker or whoever was faster.

        A near relay that fails is done without.
        """
        piece = f"{key}/{start}-{'' if length is None else length}"
        begun_s = renewed_s = self._clock()
        latest = 0
        try:
            while self._clock() < min(renewed_s + PATIENCE * self._claim_s, begun_s + PATIENCE_MAX * self._claim_s):
                try:
                    return self._near.get(piece)
                except BlobNotFound:
                    number, mine = self._claim(piece)
                    if mine:
                        return self._fetch(number, piece, key, start, length)
                if number > latest:
                    latest, renewed_s = number, self._clock()
                self._sleep(POLL_S)
        except BlobNotFound:
            raise
        except RelayUnavailable as error:
            log.warning("site not used", piece=piece, reason=str(error))
        return self._far.get(key, start, length)

    def put(self, key: str, *parts: Buffer) -> None:
        self._far.put(key, *parts)

    def list_keys(self, prefix: str = "") -> list[str]:
        return self._far.list_keys(prefix)

    def delete(self, key: str) -> None:
        self._far.delete(key)

    def close(self) -> None:
        self._far.close()
        self._near.close()

    def _fetch(self, number: int, piece: str, key: str, start: int, length: int | None) -> bytes:
        """`number` is the claim's under which this worker does so."""
        claims = [number]
        renew_s = self._clock() + self._claim_s / 2
        content = bytearray()
        try:
            while length is None or len(content) < length:
                wanted = None if length is None else min(length - len(content), PART_BYTES)
                part = self._far.get(key, start + len(content), wanted)
                content += part
                if wanted is None or len(part) < wanted:
                    break
                if self._clock() > renew_s and self._write(_claim_key(piece, claims[-1] + 1)):
                    claims.append(claims[-1] + 1)
                    renew_s = self._clock() + self._claim_s / 2
        except BaseException:
            for each in reversed(claims):
                self._near.delete(_claim_key(piece, each))
            raise
        try:
            self._near.put(piece, content)
        except RelayError as error:
            log.warning("piece not shared", piece=piece, reason=str(error))
        if key.endswith(".json"):
            self._forget()
        return bytes(content)

    def _claim(self, piece: str) -> tuple[int, bool]:
        """The number of the claim that holds, and whether it is this worker's now. An expired one gives way."""
        number = 0
        while True:
            try:
                until_s = float(self._near.get(_claim_key(piece, number)).partition(b" ")[0])
            except BlobNotFound:
                return number, self._write(_claim_key(piece, number))
            except ValueError:
                until_s = 0.0
            if until_s > self._clock():
                return number, False
            number += 1

    def _write(self, claim: str) -> bool:
        try:
            self._near.put(claim, f"{self._clock() + self._claim_s} {self._worker}".encode())
        except BlobConflict:
            return False
        return True

    def _forget(self) -> None:
        """Delete pieces of versions that the far relay no longer has."""
        try:
            there = {version_of(key) for key in self._far.list_keys("versions/")}
            for key in self._near.list_keys():
                if version_of("/".join(key.removeprefix("claims/").split("/")[:3])) not in there:
                    self._near.delete(key)
        except RelayError as error:
            log.warning("site not cleaned up", reason=str(error))


def _claim_key(piece: str, number: int) -> str:
    return f"claims/{piece}/{number}"
