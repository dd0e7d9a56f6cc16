"""A run's tickets, kept beside the run: each is good for one worker.

- Only a digest of a ticket's token is kept: the ticket itself is shown once, to the person who has it made.
- A ticket ends by its time, by being revoked, or by being spent on a worker. Only the orchestrator's clock counts.
- A file each, so that a command can mint and revoke while the run goes on.
"""

import contextlib
import fcntl
import hashlib
import hmac
import re
from collections.abc import Iterator
from pathlib import Path

import msgspec

from elastic.core.types import NS_PER_S
from elastic.protocol.tickets import TicketRefused, TicketTerms
from elastic.system.files import write_whole
from elastic.system.host import here, new_secret

DIRECTORY, LOCK = "tickets", "lock"
VALID_S = 3600.0
_ID = re.compile(r"[a-z0-9]{8}")


class TicketBook:
    """A run's tickets."""

    def __init__(self, run_dir: Path) -> None:
        self._directory = run_dir / DIRECTORY

    def mint(self, label: str, usd_per_gpu_hour: float | None, valid_s: float = VALID_S) -> tuple[TicketTerms, str]:
        """A new ticket and its token, which nobody can be told again. Raises `OSError`."""
        token = new_secret()
        alphabet = "abcdefghijklmnopqrstuvwxyz0123456789"
        terms = TicketTerms(
            ticket="".join(here().chance.choice(alphabet) for _ in range(8)),
            digest=_digest(token),
            label=label,
            expires_s=here().unix_ns() / NS_PER_S + valid_s,
            usd_per_gpu_hour=usd_per_gpu_hour,
        )
        self._directory.mkdir(mode=0o700, exist_ok=True)
        self._write(terms)
        return terms, token

    def check(self, ticket: str, token: str) -> TicketTerms:
        """Return the terms of a valid ticket. Raises `TicketRefused`, which does not say which of both is wrong."""
        terms = self._read(ticket)
        if terms is None or not hmac.compare_digest(terms.digest, _digest(token)):
            raise TicketRefused("unknown ticket or wrong token: is it of this run?")
        _check_valid(terms)
        return terms

    def spend(self, ticket: str, worker: str) -> None:
        """Have a valid ticket buy this worker's session, and no other. Raises `TicketRefused` and `OSError`."""
        with self._alone():
            terms = self._read(ticket)
            if terms is None:
                raise TicketRefused(f"ticket {ticket} is gone")
            _check_valid(terms)
            self._write(msgspec.structs.replace(terms, worker=worker))

    def is_spent_on(self, worker: str) -> bool:
        """Whether some ticket has bought this worker's session."""
        return any(terms.worker == worker for terms in self.all())

    def revoke(self, ticket: str) -> TicketTerms:
        """Have a ticket let nobody in any more; who came in by it stays. Raises `TicketRefused` if there is none."""
        if self._read(ticket) is None:
            there = ", ".join(terms.ticket for terms in self.all()) or "none"
            raise TicketRefused(f"no ticket {ticket!r}; there are: {there}")
        with self._alone():
            terms = self._read(ticket)
            assert terms is not None
            terms = msgspec.structs.replace(terms, revoked=True)
            self._write(terms)
        return terms

    def all(self) -> Iterator[TicketTerms]:
        """The oldest first."""
        paths = sorted(self._directory.glob("*.json"), key=lambda path: path.stat().st_mtime_ns)
        return (terms for path in paths if (terms := self._read(path.stem)) is not None)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """A context: no other process spends or revokes a ticket meanwhile."""
        with (self._directory / LOCK).open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _read(self, ticket: str) -> TicketTerms | None:
        if not _ID.fullmatch(ticket):
            return None
        try:
            return msgspec.json.decode(self._path(ticket).read_bytes(), type=TicketTerms)
        except (OSError, msgspec.DecodeError):
            return None

    def _write(self, terms: TicketTerms) -> None:
        write_whole(self._path(terms.ticket), msgspec.json.encode(terms))

    def _path(self, ticket: str) -> Path:
        return self._directory / f"{ticket}.json"


def _check_valid(terms: TicketTerms) -> None:
    if (state := terms.state(here().unix_ns() / NS_PER_S)) != "valid":
        raise TicketRefused(f"ticket {terms.ticket} is {state}; `elastic ticket RUN -o FILE` mints another")


def _digest(token: str) -> str:
    return hashlib.sha256(token.encode(errors="surrogateescape")).hexdigest()
