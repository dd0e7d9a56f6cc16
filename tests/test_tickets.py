"""Tickets: whom they let in, until when, and what is kept of them."""

from pathlib import Path

import msgspec
import pytest

from elastic.protocol.ticket_store import TicketBook
from elastic.protocol.tickets import TicketRefused, read_ticket
from providers.pending_workers import Applicant, PendingWorkers


def test_a_ticket_is_good_once_and_nothing_of_it_is_kept_that_is_good(tmp_path: Path) -> None:
    book = TicketBook(tmp_path)
    terms, token = book.mint("the lab", 1.5)
    (path,) = (tmp_path / "tickets").iterdir()
    assert token.encode() not in path.read_bytes()
    assert path.stat().st_mode & 0o077 == 0
    again = TicketBook(tmp_path)
    assert again.check(terms.ticket, token) == terms
    assert (terms.label, terms.usd_per_gpu_hour) == ("the lab", 1.5)
    again.spend(terms.ticket, "joined-1/w")
    with pytest.raises(TicketRefused, match=r"spent on worker joined-1/w.*mints another"):
        book.check(terms.ticket, token)


def test_wrong_expired_and_revoked_tickets_let_nobody_in(tmp_path: Path) -> None:
    book = TicketBook(tmp_path)
    valid, token = book.mint("", None)
    expired, late = book.mint("", None, valid_s=0)
    revoked, taken = book.mint("", None)
    book.revoke(revoked.ticket)
    for ticket, shown, why in (
        (valid.ticket, "wrong", "wrong token"),
        (valid.ticket, late, "wrong token"),
        ("nosuch00", token, "unknown ticket"),
        ("../../secret", token, "unknown ticket"),
        (expired.ticket, late, "expired"),
        (revoked.ticket, taken, "revoked"),
    ):
        with pytest.raises(TicketRefused, match=why):
            book.check(ticket, shown)
    with pytest.raises(TicketRefused, match=f"no ticket 'nosuch00'; there are: .*{valid.ticket}"):
        book.revoke("nosuch00")
    assert {terms.ticket for terms in book.all()} == {valid.ticket, expired.ticket, revoked.ticket}
    assert book.check(valid.ticket, token) == valid


@pytest.mark.parametrize("content", [b"", b"not JSON", b"{}", b'{"run": 3}', b"\xff"])
def test_what_is_no_ticket_is_refused(content: bytes) -> None:
    with pytest.raises(TicketRefused, match="not a ticket as `elastic ticket` writes it"):
        read_ticket(content)


def test_a_run_without_tickets_has_none(tmp_path: Path) -> None:
    assert list(TicketBook(tmp_path).all()) == []
    assert msgspec.json.encode(list(TicketBook(tmp_path).all())) == b"[]"


def test_nobody_is_let_in_as_a_worker_that_somebody_was_before(tmp_path: Path) -> None:
    """An earlier process of the run let one in, and died before its journal knew: that one may come back."""
    book, let_in = TicketBook(tmp_path), list[str]()
    (first, _), (second, token) = book.mint("", None), book.mint("", None)
    book.spend(first.ticket, "joined-1/w")
    room = PendingWorkers(TicketBook(tmp_path))
    room.on_change = lambda: None
    room.enter(Applicant(room.check(second.ticket, token), let_in.append, lambda _: None))
    with pytest.raises(LookupError, match="somebody else"):
        room.admit(second.ticket, "joined-1/w")
    room.admit(second.ticket, "joined-2/w")
    assert let_in == ["joined-2/w"]


@pytest.mark.parametrize("how", ["revoked", "expired"])
def test_a_ticket_that_ends_while_its_holder_waits_lets_nobody_in(tmp_path: Path, how: str) -> None:
    book, let_in, told = TicketBook(tmp_path), list[str](), list[str]()
    terms, token = book.mint("", None)
    room = PendingWorkers(TicketBook(tmp_path))
    room.on_change = lambda: None
    room.enter(Applicant(room.check(terms.ticket, token), let_in.append, told.append))
    if how == "revoked":
        book.revoke(terms.ticket)
    else:
        past = msgspec.structs.replace(terms, expires_s=0.0)
        (tmp_path / "tickets" / f"{terms.ticket}.json").write_bytes(msgspec.json.encode(past))
    with pytest.raises(LookupError, match=how):
        room.admit(terms.ticket, "joined-1/w")
    assert (let_in, room.applicants) == ([], {})
    assert how in told[0]
    assert not book.is_spent_on("joined-1/w")
