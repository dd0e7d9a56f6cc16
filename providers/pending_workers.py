"""Workers that dialled in by themselves, with tickets, and wait until a lease is wanted.

The gateway lets them in here; the provider `joined` leases them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from elastic.core.types import WorkerId
from elastic.protocol.tickets import TicketRefused, TicketTerms

Admit = Callable[[WorkerId], None]
"""Opens the session of this worker on the connection that waits."""


@dataclass(frozen=True, eq=False)
class Applicant:
    """A machine that waits: what its ticket says, and how to let it in or turn it away."""

    terms: TicketTerms
    admit: Admit
    turn_away: Callable[[str], None]


class Tickets(Protocol):
    """A run's tickets, as `elastic.protocol.ticket_store` keeps them."""

    def check(self, ticket: str, token: str) -> TicketTerms: ...

    def spend(self, ticket: str, worker: WorkerId) -> None:
        """Raises `TicketRefused` for one that is not valid any more."""
        ...

    def is_spent_on(self, worker: WorkerId) -> bool: ...


class PendingWorkers:
    """A run's applicants by their tickets. `on_change` hears who comes and goes; before that nobody is let in."""

    def __init__(self, tickets: Tickets) -> None:
        self.on_change: Callable[[], None] | None = None
        self.applicants: dict[str, Applicant] = {}
        self._tickets = tickets

    def check(self, ticket: str, token: str) -> TicketTerms:
        """Whether somebody may wait here, and on which terms. Raises `TicketRefused`."""
        if self.on_change is None:
            raise TicketRefused("this run takes nobody who joins by ticket; it would with --providers joined")
        return self._tickets.check(ticket, token)

    def enter(self, applicant: Applicant) -> None:
        """Let an applicant wait. If it waits already, by the same ticket, that connection was lost, and is closed."""
        former = self.applicants.pop(applicant.terms.ticket, None)
        if former is not None:
            former.turn_away("it came again with the same ticket")
        self.applicants[applicant.terms.ticket] = applicant
        self._changed()

    def leave(self, applicant: Applicant) -> None:
        if self.applicants.get(applicant.terms.ticket) is applicant:
            del self.applicants[applicant.terms.ticket]
            self._changed()

    def admit(self, ticket: str, worker: WorkerId) -> TicketTerms:
        """Let an applicant in as this worker; its ticket is spent. One whose ticket was revoked or has expired while it
        waited is turned away.

        Raises `LookupError` where it is gone or turned away, and where somebody was let in as this worker before: by a
        process of the run that died before its journal knew. That one has the session's key, and may come back with it.
        """
        if self._tickets.is_spent_on(worker):
            raise LookupError(f"{worker} was somebody else already")
        applicant = self.applicants.pop(ticket, None)
        if applicant is None:
            raise LookupError(f"the worker that came with ticket {ticket} has gone again")
        try:
            self._tickets.spend(ticket, worker)
        except TicketRefused as error:
            applicant.turn_away(str(error))
            raise LookupError(str(error)) from error
        applicant.admit(worker)
        return applicant.terms

    def close(self) -> None:
        """Turn everybody away, now and later."""
        self.on_change = None
        for applicant in self.applicants.values():
            applicant.turn_away("the run takes nobody any more")
        self.applicants.clear()

    def _changed(self) -> None:
        if self.on_change is not None:
            self.on_change()
