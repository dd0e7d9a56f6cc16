"""Keys, secrets, webhooks and the audit log of the server of `elastic api login`."""

import itertools
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NoReturn

import typer
from pydantic import BaseModel, SecretStr, ValidationError

from elastic.cli.output import EXIT_FAILED, bad_input, emit, say, tell
from elastic.cli.remote import server
from elastic.cli.tenancy import own_project, role_of, show_objects
from elastic.protocol.api import VENDORS, NewKey, NewOwnKey, NewWebhook, SecretValue, WebhookChange
from elastic.protocol.api_client import Client
from elastic.system.given import read_text

_DAY_S = 86_400


def create_key_command(
    name: str,
    role: str,
    scopes: list[str],
    expires_days: int | None,
    project: str,
    *,
    server_wide: bool,
    mine: bool,
    as_json: bool,
) -> None:
    if mine and (project or server_wide):
        bad_input("--mine: one's own key is of the project that one is in; leave out --project and --server-wide")
    said: dict[str, Any] = {"name": name, "role": role_of(role), "scopes": scopes}
    if expires_days is not None:
        said["expires_in_s"] = expires_days * _DAY_S
    try:
        if mine:
            key = NewOwnKey.model_validate(said)
        else:
            key = NewKey.model_validate({**said, "project": project or None, "server_wide": server_wide})
    except ValidationError as error:
        _not_allowed(error)
    with server() as client:
        made = client.create_own_key(key) if isinstance(key, NewOwnKey) else client.create_key(key)
    if made.secret is None:
        say(f"error: the answer with the secret was lost; elastic keys revoke {made.id}, and make another")
        raise SystemExit(EXIT_FAILED)
    if as_json:
        emit(made.model_dump(mode="json"))
        return
    where = f"of project {made.project}" if made.project else "of all projects"
    until = f", until {made.expires_at}" if made.expires_at else ""
    say(f"made key {made.id}, {made.role} {where}{until}; its secret, shown this once:")
    typer.echo(made.secret)


def keys_command(*, mine: bool, as_json: bool) -> None:
    with server() as client:
        found = list(client.own_keys() if mine else client.keys())
    columns = ("id", "name", "project", "role", "hint", "expires_at", "revoked_at")
    show_objects(found, columns, as_json=as_json)


def revoke_key_command(name: str, *, mine: bool) -> None:
    with server() as client:
        key = name if name.startswith("key_") else _key_named(client, name, mine=mine)
        if mine:
            client.revoke_own_key(key)
        else:
            client.revoke_key(key)
    say(f"revoked {name}")


def _key_named(client: Client, name: str, *, mine: bool) -> str:
    keys = client.own_keys() if mine else client.keys()
    found = [key.id for key in keys if key.name == name and key.revoked_at is None]
    if len(found) != 1:
        bad_input(f"{len(found)} keys are called {name!r}; `elastic keys list` has their ids")
    return found[0]


def set_secret_command(name: str, source: Path | None, project: str) -> None:
    asks = source is None and sys.stdin.isatty()
    text = typer.prompt(name, hide_input=True, err=True) if asks else _read(source)
    try:
        secret = SecretValue(value=SecretStr(text.removesuffix("\n")))
    except ValidationError as error:
        _not_allowed(error)
    with server() as client:
        client.put_secret(own_project(client, project), name, secret)
    say(f"kept {name}; runs that begin or resume from now on have it")


def set_credentials_command(vendor: str, source: Path | None, project: str) -> None:
    if vendor not in VENDORS:
        bad_input(f"VENDOR: found {vendor!r}; allowed: {', '.join(VENDORS)}")
    try:
        credentials = VENDORS[vendor].model_validate_json(_read(source))
    except ValidationError as error:
        _not_allowed(error)
    with server() as client:
        client.put_credentials(own_project(client, project), credentials)
    say(f"kept the credentials for {vendor}; runs that begin or resume from now on use them")


def _read(source: Path | None) -> str:
    """Return what a file has, or else standard input."""
    try:
        return sys.stdin.read() if source is None else read_text(source)
    except (OSError, ValueError) as error:
        bad_input(f"--from-file: {source} cannot be read ({error})")


def secrets_command(project: str, *, of_vendors: bool, as_json: bool) -> None:
    with server() as client:
        found = (client.credentials if of_vendors else client.secrets)(own_project(client, project))
    show_objects(found, ("id", "updated_at"), as_json=as_json)


def delete_secret_command(name: str, project: str, *, of_vendor: bool) -> None:
    with server() as client:
        (client.delete_credentials if of_vendor else client.delete_secret)(own_project(client, project), name)
    say(f"removed the credentials for {name}" if of_vendor else f"removed {name}")


def add_webhook_command(url: str, events: list[str], project: str, *, as_json: bool) -> None:
    chosen: dict[str, Any] = {"project": project or None, **({"events": events} if events else {})}
    try:
        new = NewWebhook.model_validate({"url": url, **chosen})
    except ValidationError as error:
        _not_allowed(error)
    with server() as client:
        made = client.create_webhook(new)
    if made.secret is None:
        say(f"error: the answer with the secret was lost; elastic webhooks delete {made.id}, and make another")
        raise SystemExit(EXIT_FAILED)
    if as_json:
        emit(made.model_dump(mode="json"))
        return
    say(f"made webhook {made.id}, told of {', '.join(made.events)}; the secret of its signatures, shown this once:")
    typer.echo(made.secret)


def webhooks_command(*, as_json: bool) -> None:
    with server() as client:
        found = list(client.webhooks())
    show_objects(found, ("id", "url", "events", "enabled", "disabled_because", "circuit"), as_json=as_json)


def try_webhook_command(webhook: str, *, as_json: bool) -> None:
    with server() as client:
        made = client.try_webhook(webhook)
    tell(made, f"{made.id} is sent; what came of it: elastic webhooks deliveries {webhook}", as_json=as_json)


def deliveries_command(webhook: str, *, as_json: bool) -> None:
    with server() as client:
        found = list(client.deliveries(webhook))
    show_objects(found, ("id", "type", "state", "attempts", "answer", "created_at"), as_json=as_json)


def switch_webhook_command(webhook: str, *, enabled: bool, as_json: bool) -> None:
    with server() as client:
        made = client.change_webhook(webhook, WebhookChange(enabled=enabled))
    tell(made, f"{made.id} is {'told again' if enabled else 'told nothing for now'}", as_json=as_json)


def delete_webhook_command(webhook: str) -> None:
    with server() as client:
        client.delete_webhook(webhook)
    say(f"removed {webhook}")


def audit_command(limit: int, *, as_json: bool) -> None:
    with server() as client:
        found: Iterable[BaseModel] = list(itertools.islice(client.audit(), limit))
    show_objects(found, ("at", "actor", "action", "resource", "project", "status"), as_json=as_json)


def _not_allowed(error: ValidationError) -> NoReturn:
    """What cannot be said is not sent."""
    first = error.errors(include_input=False)[0]
    bad_input(f"{'.'.join(map(str, first['loc'])) or 'value'}: {first['msg']}")
