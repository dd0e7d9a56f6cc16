"""`elastic ticket`: mints, lists and revokes the tickets with which machines join a run."""

import socket
import time
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from elastic.cli.options import AsJson, RunName, RunsDirectory
from elastic.cli.output import bad_input, console, emit, say
from elastic.cli.tables import show_listing
from elastic.cli.ticket_files import check_output, hand_out
from elastic.compose.plan import kind_of
from elastic.compose.runs import is_claimed, load_run_config
from elastic.protocol.endpoint import Address, Endpoint
from elastic.protocol.ticket_store import TicketBook
from elastic.protocol.tickets import JoinTicket, TicketRefused, TicketTerms
from elastic.runtime.journal import DirectoryStore, RunDirectory

DIAL_TIMEOUT_S = 3.0
COLUMNS = ("ticket", "label", "state", "usd_per_gpu_hour")


def ticket(
    name: RunName,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write the ticket here; else it is printed.")
    ] = None,
    label: Annotated[str, typer.Option(help="Whose machine it is for.")] = "",
    usd_per_gpu_hour: Annotated[
        float | None, typer.Option(min=0, help="The worker's price; by default that of the provider of kind `joined`.")
    ] = None,
    minutes: Annotated[float, typer.Option(min=0.1, max=10_080, help="Until when it must be used.")] = 60.0,
    revoke: Annotated[str, typer.Option(metavar="TICKET", help="Make this ticket void, instead.")] = "",
    listed: Annotated[bool, typer.Option("--list", help="Instead: list the run's tickets.")] = False,
    as_json: AsJson = False,
    directory: RunsDirectory = Path("runs"),
) -> None:
    """Make a ticket, with which one worker joins a living run from any machine. It is shown once.

    Example: elastic ticket latest -o machine.ticket --label "the lab's 4090"
    """
    run = DirectoryStore(directory).find(name)
    if listed:
        _list_tickets(run, as_json=as_json)
    elif revoke:
        _revoke_ticket(run, revoke, as_json=as_json)
    else:
        _mint_ticket(run, output, label, usd_per_gpu_hour, minutes * 60, as_json=as_json)


def _mint_ticket(
    run: RunDirectory, output: Path | None, label: str, usd_per_gpu_hour: float | None, valid_s: float, *, as_json: bool
) -> None:
    check_output(output)
    endpoint = _endpoint(run)
    terms, token = TicketBook(run.path).mint(label, usd_per_gpu_hour, valid_s)
    minted = JoinTicket(
        run=run.name, join=endpoint.address, fingerprint=endpoint.fingerprint, ticket=terms.ticket, token=token
    )
    hand_out(minted, output, _told(terms) if as_json else None)
    for line in (
        f"ticket {terms.ticket} is good for one worker within {valid_s / 60:g} min; it is not shown again",
        f"there: elastic worker --ticket-file {output or 'FILE'}",
    ):
        say(line)
    if endpoint.fingerprint and (why := unreachable(endpoint.address)):
        say(f"warning: {endpoint.address}, where the ticket's holder will dial, cannot be reached from here: {why}")
    if not endpoint.fingerprint:
        say("only workers on this machine can dial this run; others could with elastic run --listen HOST:PORT")


def unreachable(address: str) -> str:
    """Why nobody answers at `HOST:PORT`, as seen from this machine; empty where somebody does."""
    try:
        with socket.create_connection(Address.parse(address), timeout=DIAL_TIMEOUT_S):
            return ""
    except (OSError, ValueError) as error:
        return str(error)


def _list_tickets(run: RunDirectory, *, as_json: bool) -> None:
    rows = [_told(terms) for terms in TicketBook(run.path).all()]
    if as_json:
        emit({"tickets": rows})
        return
    if not rows:
        console().print(f"{run.name} has no tickets")
        return
    show_listing(COLUMNS, [[str("" if row[key] is None else row[key]) for key in COLUMNS] for row in rows])


def _revoke_ticket(run: RunDirectory, ticket: str, *, as_json: bool) -> None:
    try:
        terms = TicketBook(run.path).revoke(ticket)
    except TicketRefused as error:
        bad_input(f"elastic ticket --revoke: {error}")
    if as_json:
        emit(_told(terms))
    say(f"ticket {ticket} is {terms.state(time.time())}")


def _endpoint(run: RunDirectory) -> Endpoint:
    """Where a run that goes on hears the workers that join it."""
    with run.newest_journal() as journal:
        meta = journal.meta()
    if not is_claimed(run.path) or "endpoint" not in meta:
        bad_input(
            f"run {run.name} does not go on now: nobody would answer a worker that joins it; `elastic run` starts one"
        )
    config = load_run_config(run.path)
    if not any(kind_of(config.providers, name) == "joined" for name in meta.get("providers", "").split(",")):
        bad_input(f"run {run.name} takes nobody who joins by ticket; it would with --providers joined")
    return msgspec.json.decode(meta["endpoint"], type=Endpoint)


def _told(terms: TicketTerms) -> dict[str, object]:
    return {
        "ticket": terms.ticket,
        "label": terms.label,
        "state": terms.state(time.time()),
        "usd_per_gpu_hour": terms.usd_per_gpu_hour,
        "expires_s": terms.expires_s,
        "worker": terms.worker,
    }
