"""`elastic keys`, `secrets`, `webhooks` and `audit`: who may do what on a server."""

import itertools
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from elastic.cli.options import AsJson, ProjectOption, RoleOption, group
from elastic.cli.output import bad_input, failed, say, tell
from elastic.cli.projects import own_project, role_of
from elastic.cli.remote import server, validated
from elastic.cli.tables import show_objects
from elastic.protocol.api import (
    VENDORS,
    CreatedKey,
    CreatedWebhook,
    NewKey,
    NewOwnKey,
    NewWebhook,
    SecretValue,
    WebhookChange,
)
from elastic.protocol.api_client import Client
from elastic.system.given import read_text

_DAY_S = 86_400

keys = group(
    "keys",
    "Make, list and revoke keys of a server.\n\nExample: elastic keys create nightly --role runner --expires-days 90",
)
secrets = group(
    "secrets",
    "Set secret variables of a project's runs; their values cannot be read again.\n\n"
    "Example: elastic secrets set HF_TOKEN",
)
webhooks = group(
    "webhooks",
    "Name the URLs that get messages about a project's runs.\n\n"
    "Example: elastic webhooks add https://example.com/elastic --event run.failed",
)
Mine = Annotated[bool, typer.Option("--mine", help="A personal key, which ends with the membership.")]
KeyName = Annotated[str, typer.Argument(metavar="KEY", help="A key's id, or its name if no other one has it.")]
SecretName = Annotated[
    str, typer.Argument(metavar="NAME", help="The variable: SECRET_ and what you like, or a known one as HF_TOKEN.")
]
VendorName = Annotated[str, typer.Argument(metavar="VENDOR", help="aws or modal.")]
WebhookName = Annotated[str, typer.Argument(metavar="WEBHOOK", help="A webhook's id.")]


@keys.command("create")
def create_key(
    name: Annotated[str, typer.Argument(metavar="NAME", help="What lists and the audit log call it.")],
    role: RoleOption = "runner",
    scope: Annotated[
        list[str] | None, typer.Option(metavar="ACTION", help="Limit the key to this action, such as runs:read.")
    ] = None,
    expires_days: Annotated[int | None, typer.Option(min=1, max=3660, help="Days for which the key is valid.")] = None,
    project: ProjectOption = "",
    server_wide: Annotated[
        bool, typer.Option("--server-wide", help="Make a key of no project, for all projects.")
    ] = False,
    mine: Mine = False,
    as_json: AsJson = False,
) -> None:
    """Make a key. Its secret is printed this once, alone on standard output, and kept nowhere.

    Example: elastic keys create nightly --role runner --expires-days 90 > nightly.key
    """
    if mine and (project or server_wide):
        bad_input("--mine: one's own key is of the project that one is in; leave out --project and --server-wide")
    said: dict[str, Any] = {"name": name, "role": role_of(role), "scopes": scope or []}
    if expires_days is not None:
        said["expires_in_s"] = expires_days * _DAY_S
    with server() as client:
        if mine:
            made = client.create_own_key(validated(NewOwnKey, said))
        else:
            said |= {"project": project or None, "server_wide": server_wide}
            made = client.create_key(validated(NewKey, said))
    where = f"of project {made.project}" if made.project else "of all projects"
    until = f", until {made.expires_at}" if made.expires_at else ""
    words = f"made key {made.id}, {made.role} {where}{until}; its secret, shown this once:"
    _tell_secret(made, words, f"elastic keys revoke {made.id}", as_json=as_json)


@keys.command("list")
def list_keys(mine: Mine = False, as_json: AsJson = False) -> None:
    """List keys, the newest first, without their secrets.

    Example: elastic keys list --json
    """
    columns = ("id", "name", "project", "role", "hint", "expires_at", "revoked_at")
    with server() as client:
        show_objects(client.own_keys() if mine else client.keys(), columns, as_json=as_json)


@keys.command("revoke")
def revoke_key(name: KeyName, mine: Mine = False) -> None:
    """Revoke a key: from now on it opens nothing.

    Example: elastic keys revoke nightly
    """
    with server() as client:
        key = name if name.startswith("key_") else _key_named(client, name, mine=mine)
        (client.revoke_own_key if mine else client.revoke_key)(key)
    say(f"revoked {name}")


@secrets.command("set")
def set_secret(
    name: SecretName,
    from_file: Annotated[
        Path | None,
        typer.Option(
            "--from-file", metavar="FILE", help="File with the value; else it is asked for, or comes from a pipe."
        ),
    ] = None,
    project: ProjectOption = "",
) -> None:
    """Keep a secret, or give it another value. Runs that begin or resume from now on have it as a variable.

    Example: elastic secrets set HF_TOKEN < token
    """
    if from_file is None and sys.stdin.isatty():
        value = typer.prompt(name, hide_input=True, err=True)
    else:
        value = _given(from_file)
    secret = validated(SecretValue, {"value": value.removesuffix("\n")})
    with server() as client:
        client.put_secret(own_project(client, project), name, secret)
    say(f"kept {name}; runs that begin or resume from now on have it")


@secrets.command("list")
def list_secrets(project: ProjectOption = "", as_json: AsJson = False) -> None:
    """Name a project's secrets, without their values.

    Example: elastic secrets list
    """
    with server() as client:
        found = client.secrets(own_project(client, project))
    show_objects(found, ("id", "updated_at"), as_json=as_json)


@secrets.command("delete")
def delete_secret(name: SecretName, project: ProjectOption = "") -> None:
    """Remove a secret. Processes that have it keep it until they end.

    Example: elastic secrets delete HF_TOKEN
    """
    with server() as client:
        client.delete_secret(own_project(client, project), name)
    say(f"removed {name}")


@secrets.command("set-vendor")
def set_credentials(
    vendor: VendorName,
    from_file: Annotated[
        Path | None,
        typer.Option("--from-file", metavar="FILE", help="File with the fields as JSON; else they come from a pipe."),
    ] = None,
    project: ProjectOption = "",
) -> None:
    """Keep a project's credentials for a vendor, which its runs' processes use.

    They are a JSON object: for aws access_key_id, secret_access_key, and if need be session_token and region; for modal
    token_id, token_secret, and if need be environment.

    Example: elastic secrets set-vendor modal --from-file modal.json
    """
    if vendor not in VENDORS:
        bad_input(f"VENDOR: found {vendor!r}; allowed: {', '.join(VENDORS)}")
    credentials = validated(VENDORS[vendor], _given(from_file))
    with server() as client:
        client.put_credentials(own_project(client, project), credentials)
    say(f"kept the credentials for {vendor}; runs that begin or resume from now on use them")


@secrets.command("list-vendors")
def list_credentials(project: ProjectOption = "", as_json: AsJson = False) -> None:
    """Name the vendors that a project has credentials for.

    Example: elastic secrets list-vendors
    """
    with server() as client:
        found = client.credentials(own_project(client, project))
    show_objects(found, ("id", "updated_at"), as_json=as_json)


@secrets.command("delete-vendor")
def delete_credentials(vendor: VendorName, project: ProjectOption = "") -> None:
    """Remove a project's credentials for a vendor. Processes that have them keep them until they end.

    Example: elastic secrets delete-vendor aws
    """
    with server() as client:
        client.delete_credentials(own_project(client, project), vendor)
    say(f"removed the credentials for {vendor}")


@webhooks.command("add")
def add_webhook(
    url: Annotated[str, typer.Argument(metavar="URL")],
    event: Annotated[
        list[str] | None, typer.Option(metavar="TYPE", help="Events to send; by default those of runs that end.")
    ] = None,
    project: ProjectOption = "",
    as_json: AsJson = False,
) -> None:
    """Have a URL told. The secret that messages are signed with is printed this once, alone on standard output.

    Example: elastic webhooks add https://example.com/elastic --event run.failed > webhook.secret
    """
    chosen: dict[str, Any] = {"project": project or None, **({"events": event} if event else {})}
    with server() as client:
        made = client.create_webhook(validated(NewWebhook, {"url": url, **chosen}))
    words = f"made webhook {made.id}, told of {', '.join(made.events)}; the secret of its signatures, shown this once:"
    _tell_secret(made, words, f"elastic webhooks delete {made.id}", as_json=as_json)


@webhooks.command("list")
def list_webhooks(as_json: AsJson = False) -> None:
    """List webhooks, the newest first, without their secrets.

    Example: elastic webhooks list
    """
    with server() as client:
        columns = ("id", "url", "events", "enabled", "disabled_because", "circuit")
        show_objects(client.webhooks(), columns, as_json=as_json)


@webhooks.command("test")
def try_webhook(webhook: WebhookName, as_json: AsJson = False) -> None:
    """Send a message of type `webhook.test`.

    Example: elastic webhooks test hook_01JD3K5T7WQ8M2N4P6R8S0V2X4
    """
    with server() as client:
        made = client.try_webhook(webhook)
    tell(made, f"{made.id} is sent; what came of it: elastic webhooks deliveries {webhook}", as_json=as_json)


@webhooks.command("deliveries")
def list_deliveries(webhook: WebhookName, as_json: AsJson = False) -> None:
    """List a webhook's messages of the last 30 days, sent or still to be sent.

    Example: elastic webhooks deliveries hook_01JD3K5T7WQ8M2N4P6R8S0V2X4
    """
    with server() as client:
        columns = ("id", "type", "state", "attempts", "answer", "created_at")
        show_objects(client.deliveries(webhook), columns, as_json=as_json)


@webhooks.command("enable")
def enable_webhook(webhook: WebhookName, as_json: AsJson = False) -> None:
    """Send messages to a webhook again; events of the meantime are not sent later.

    Example: elastic webhooks enable hook_01JD3K5T7WQ8M2N4P6R8S0V2X4
    """
    _switch(webhook, "told again", enabled=True, as_json=as_json)


@webhooks.command("disable")
def disable_webhook(webhook: WebhookName, as_json: AsJson = False) -> None:
    """Send a webhook nothing for now.

    Example: elastic webhooks disable hook_01JD3K5T7WQ8M2N4P6R8S0V2X4
    """
    _switch(webhook, "told nothing for now", enabled=False, as_json=as_json)


def _switch(webhook: str, words: str, *, enabled: bool, as_json: bool) -> None:
    with server() as client:
        made = client.change_webhook(webhook, WebhookChange(enabled=enabled))
    tell(made, f"{made.id} is {words}", as_json=as_json)


@webhooks.command("delete")
def delete_webhook(webhook: WebhookName) -> None:
    """Remove a webhook, with its messages that are still to be sent.

    Example: elastic webhooks delete hook_01JD3K5T7WQ8M2N4P6R8S0V2X4
    """
    with server() as client:
        client.delete_webhook(webhook)
    say(f"removed {webhook}")


def audit(
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, help="How many, at most.")] = 50,
    as_json: AsJson = False,
) -> None:
    """List who did what on a server, and what it refused, the newest first.

    Example: elastic audit -n 20 --json
    """
    with server() as client:
        columns = ("at", "actor", "action", "resource", "project", "status")
        show_objects(itertools.islice(client.audit(), limit), columns, as_json=as_json)


def _key_named(client: Client, name: str, *, mine: bool) -> str:
    keys = client.own_keys() if mine else client.keys()
    found = [key.id for key in keys if key.name == name and key.revoked_at is None]
    if len(found) != 1:
        bad_input(f"{len(found)} keys are called {name!r}; `elastic keys list` has their ids")
    return found[0]


def _given(source: Path | None) -> str:
    """What --from-file names, else standard input."""
    try:
        return sys.stdin.read() if source is None else read_text(source)
    except (OSError, ValueError) as error:
        bad_input(f"--from-file: {source} cannot be read ({error})")


def _tell_secret(made: CreatedKey | CreatedWebhook, words: str, undo: str, *, as_json: bool) -> None:
    """Print a secret this once, alone on standard output."""
    if made.secret is None:
        failed(f"the answer with the secret was lost; {undo}, and make another")
    tell(made, words, as_json=as_json)
    if not as_json:
        typer.echo(made.secret)
