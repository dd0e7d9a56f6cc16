"""Tickets with which somebody's machine joins a run: what they say, and what is known of them."""

from typing import Annotated

import msgspec

Price = Annotated[float, msgspec.Meta(ge=0)]


class TicketRefused(Exception):
    """The ticket does not let anybody in; the message says why, and what would help."""


class JoinTicket(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a machine needs to join a run, as its ticket file has it. Never log it.

    `join` (host:port) is where to dial, `fingerprint` that of the certificate there; empty for plain text on loopback.
    """

    run: str
    join: str
    fingerprint: str
    ticket: str
    token: str


class TicketTerms(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a ticket; `worker` is on whom it has been spent, times are Unix time."""

    ticket: str
    digest: str
    label: str
    expires_s: float
    usd_per_gpu_hour: Price | None = None
    revoked: bool = False
    worker: str = ""

    def state(self, now_s: float) -> str:
        if self.worker:
            return f"spent on worker {self.worker}"
        if self.revoked:
            return "revoked"
        return "expired" if now_s >= self.expires_s else "valid"


def read_ticket(content: bytes) -> JoinTicket:
    """Raises `TicketRefused` for what is no ticket."""
    try:
        return msgspec.json.decode(content, type=JoinTicket)
    except msgspec.DecodeError as error:
        raise TicketRefused(f"not a ticket as `elastic ticket` writes it: {error}") from error
