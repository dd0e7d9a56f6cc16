"""Rights on a relay over HTTP.

- The trainer's token reads, writes and deletes.
- Each worker has a token of its own, which reads and asks for keyframes. It can be revoked. A pool's residents share
  one of their job's, since they read between their leases, too.
- Other requests are refused.

A directory knows no tokens: a process that can write its files can put anything there. Signatures are for that
(`elastic.weights.signing`).
"""

from dataclasses import dataclass, field
from hashlib import sha256

from elastic.system.host import new_secret

REQUESTS_OPEN = 8
"""A worker's requests that the trainer has not answered yet; an honest one has one or two."""

REQUEST_BYTES = 256
"""The largest request in bytes. Requests are empty so far."""


@dataclass
class Bearer:
    """The holder of a token, with its requests that are not answered yet."""

    name: str
    owner: bool
    requests: set[str] = field(default_factory=set[str])


class RelayRights:
    """The tokens of one relay. Only digests of them are kept, but for the owner's."""

    def __init__(self, owner: str | None = None) -> None:
        self.owner = new_secret() if owner is None else owner
        """The token that may do everything: the trainer's."""
        if not self.owner:
            raise ValueError("relay: needs a token; without one anybody could delete the weights")
        self._bearers = {_digest(self.owner): Bearer("owner", owner=True)}
        self._issued: dict[str, bytes] = {}
        self.served_bytes = 0
        """The bytes that were served to workers, in all."""

    def issue(self, worker: str, token: str = "") -> str:
        """Let `worker` read, and ask for keyframes, with `token`, a new one unless it is given; returns that.

        One it had before counts no more.
        """
        self.revoke(worker)
        token = token or new_secret()
        self._issued[worker] = _digest(token)
        self._bearers[_digest(token)] = Bearer(worker, owner=False)
        return token

    def revoke(self, worker: str) -> None:
        """`worker` has no rights from now on, if it had any."""
        if (issued := self._issued.pop(worker, None)) is not None:
            del self._bearers[issued]

    def bearer(self, token: str) -> Bearer | None:
        """Return the bearer of this token. Digests are compared, so that the time it takes says nothing of any
        token."""
        return self._bearers.get(_digest(token))


def _digest(token: str) -> bytes:
    return sha256(token.encode(errors="surrogateescape")).digest()
