"""Reading what a relay does not have yet, or cannot give just now, until a deadline; a relay that is asked so."""

from collections.abc import Callable
from typing import TypeVar

from tenacity import Retrying, retry_if_exception_type, wait_exponential

from elastic.system.host import here
from elastic.weights.blobs import Buffer
from elastic.weights.errors import BlobNotFound, RelayUnavailable
from elastic.weights.relay import Relay

T = TypeVar("T")

RETRY_S = 0.05
"""Until a relay that is unavailable is first asked again; twice as long each time after that, up to a second."""

POLL_S, POLL_MAX_S = 0.005, 0.25
"""How often one looks for what is under way: at first, and at last, since a relay has many readers."""

POLL_SHARE = 1 / 16
"""The share of the time waited so far after which a waiter looks again. It notices a change late by at most as much."""


class PatientRelay:
    """`elastic.weights.relay.Relay` that may be away for `patience_s`, and come back elsewhere."""

    def __init__(self, relay: Relay, patience_s: float) -> None:
        self._relay = relay
        self._patience_s = patience_s

    def follow(self, relay: Relay) -> None:
        """The same blobs are there from now on. Calls to the former relay ask this one next."""
        self._relay = relay

    def put(self, key: str, *parts: Buffer) -> None:
        self._ask(f"put {key}", lambda: self._relay.put(key, *parts))

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        return self._ask(f"get {key}", lambda: self._relay.get(key, start, length))

    def list_keys(self, prefix: str = "") -> list[str]:
        return self._ask(f"list {prefix}", lambda: self._relay.list_keys(prefix))

    def delete(self, key: str) -> None:
        self._ask(f"delete {key}", lambda: self._relay.delete(key))

    def close(self) -> None:
        self._relay.close()

    def _ask(self, what: str, ask: Callable[[], T]) -> T:
        return patiently(here().monotonic() + self._patience_s, what, ask)


def fetch(relay: Relay, key: str, deadline_s: float, start: int = 0, length: int | None = None) -> bytes:
    """`Relay.get`, again and again while the relay is unavailable, until `deadline_s` (monotonic)."""
    return patiently(deadline_s, f"{key}, byte {start}", lambda: relay.get(key, start, length))


def patiently(deadline_s: float, what: str, ask: Callable[[], T]) -> T:
    """What `ask` returns, again and again while the relay is unavailable, until `deadline_s` (monotonic)."""
    if here().monotonic() >= deadline_s:
        raise RelayUnavailable(f"{what}: not pulled in time")
    try:
        # Those who poll ask hundreds of times a second; preparing to ask again takes longer than asking.
        return ask()
    except RelayUnavailable:
        here().sleep(min(RETRY_S, max(deadline_s - here().monotonic(), 0.0)))
    attempts = Retrying(
        retry=retry_if_exception_type(RelayUnavailable),
        sleep=here().sleep,
        stop=lambda _: here().monotonic() >= deadline_s,
        wait=wait_exponential(multiplier=2 * RETRY_S, max=1.0),
        reraise=True,
    )
    return attempts(ask)


def awaited(
    relay: Relay,
    key: str,
    deadline_s: float,
    start: int = 0,
    length: int | None = None,
    *,
    absent: Callable[[], object] = lambda: None,
) -> bytes:
    """`fetch` of what may not be there yet; says `absent` whenever it was not. Raises `BlobNotFound` after all."""
    begun_s = here().monotonic()
    while True:
        try:
            return fetch(relay, key, deadline_s, start, length)
        except BlobNotFound:
            if not look_again(begun_s, deadline_s):
                raise
            absent()


def look_again(begun_s: float, deadline_s: float) -> bool:
    """Wait a little for what has not been there since `begun_s` (monotonic); whether there is time for that."""
    now_s = here().monotonic()
    pause_s = pause_after_s(now_s - begun_s)
    if now_s + pause_s > deadline_s:
        return False
    here().sleep(pause_s)
    return True


def pause_after_s(waited_s: float) -> float:
    """Until one looks again."""
    return min(max(waited_s * POLL_SHARE, POLL_S), POLL_MAX_S)
