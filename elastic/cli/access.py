"""`elastic keys`, `secrets`, `webhooks` and `audit`: who may do what on a server, with options and one example each."""

from pathlib import Path
from typing import Annotated

import typer

from elastic.cli import deferred
from elastic.cli.hosted import AsJson, ProjectOption, RoleOption
from elastic.cli.whole_help import WholeHelp

_KEYS_HELP = """Make, list and revoke keys of a server.

Example: elastic keys create nightly --role runner --expires-days 90
"""
_SECRETS_HELP = """Variables that a project's runs have, whose values nobody reads again.

Example: elastic secrets set HF_TOKEN
"""
_WEBHOOKS_HELP = """URLs that are told what becomes of a project's runs.

Example: elastic webhooks add https://example.com/elastic --event run.failed
"""

keys = typer.Typer(cls=WholeHelp, name="keys", help=_KEYS_HELP, no_args_is_help=True, rich_markup_mode=None)
secrets = typer.Typer(cls=WholeHelp, name="secrets", help=_SECRETS_HELP, no_args_is_help=True, rich_markup_mode=None)
webhooks = typer.Typer(cls=WholeHelp, name="webhooks", help=_WEBHOOKS_HELP, no_args_is_help=True, rich_markup_mode=None)
Mine = Annotated[bool, typer.Option("--mine", help="One's own, as a person: it ends with the membership.")]
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
        list[str] | None, typer.Option(metavar="ACTION", help="Limit it to this action, such as runs:read.")
    ] = None,
    expires_days: Annotated[int | None, typer.Option(min=1, max=3660, help="Until when it is good.")] = None,
    project: ProjectOption = "",
    server_wide: Annotated[bool, typer.Option("--server-wide", help="Of no project: for all of them.")] = False,
    mine: Mine = False,
    as_json: AsJson = False,
) -> None:
    """Make a key. Its secret is printed this once, alone on standard output, and kept nowhere.

    Example: elastic keys create nightly --role runner --expires-days 90 > nightly.key
    """
    deferred.remote_access.create_key_command(
        name, role, scope or [], expires_days, project, server_wide=server_wide, mine=mine, as_json=as_json
    )


@keys.command("list")
def list_keys(mine: Mine = False, as_json: AsJson = False) -> None:
    """List keys, the newest first, without their secrets.

    Example: elastic keys list --json
    """
    deferred.remote_access.keys_command(mine=mine, as_json=as_json)


@keys.command("revoke")
def revoke_key(key: KeyName, mine: Mine = False) -> None:
    """Revoke a key: from now on it opens nothing.

    Example: elastic keys revoke nightly
    """
    deferred.remote_access.revoke_key_command(key, mine=mine)


@secrets.command("set")
def set_secret(
    name: SecretName,
    from_file: Annotated[
        Path | None, typer.Option("--from-file", metavar="FILE", help="Has the value; else it is asked for, or piped.")
    ] = None,
    project: ProjectOption = "",
) -> None:
    """Keep a secret, or give it another value. Runs that begin or resume from now on have it as a variable.

    Example: elastic secrets set HF_TOKEN < token
    """
    deferred.remote_access.set_secret_command(name, from_file, project)


@secrets.command("list")
def list_secrets(project: ProjectOption = "", as_json: AsJson = False) -> None:
    """Name a project's secrets, without their values.

    Example: elastic secrets list
    """
    deferred.remote_access.secrets_command(project, of_vendors=False, as_json=as_json)


@secrets.command("delete")
def delete_secret(name: SecretName, project: ProjectOption = "") -> None:
    """Remove a secret. Processes that have it keep it until they end.

    Example: elastic secrets delete HF_TOKEN
    """
    deferred.remote_access.delete_secret_command(name, project, of_vendor=False)


@secrets.command("set-vendor")
def set_credentials(
    vendor: VendorName,
    from_file: Annotated[
        Path | None, typer.Option("--from-file", metavar="FILE", help="Has the fields as JSON; else they are piped.")
    ] = None,
    project: ProjectOption = "",
) -> None:
    """Keep a project's credentials for a vendor, which its runs' processes use.

    They are a JSON object: for aws access_key_id, secret_access_key, and if need be session_token and region; for modal
    token_id, token_secret, and if need be environment.

    Example: elastic secrets set-vendor modal --from-file modal.json
    """
    deferred.remote_access.set_credentials_command(vendor, from_file, project)


@secrets.command("list-vendors")
def list_credentials(project: ProjectOption = "", as_json: AsJson = False) -> None:
    """Name the vendors that a project has credentials for.

    Example: elastic secrets list-vendors
    """
    deferred.remote_access.secrets_command(project, of_vendors=True, as_json=as_json)


@secrets.command("delete-vendor")
def delete_credentials(vendor: VendorName, project: ProjectOption = "") -> None:
    """Remove a project's credentials for a vendor. Processes that have them keep them until they end.

    Example: elastic secrets delete-vendor aws
    """
    deferred.remote_access.delete_secret_command(vendor, project, of_vendor=True)


@webhooks.command("add")
def add_webhook(
    url: Annotated[str, typer.Argument(metavar="URL")],
    event: Annotated[
        list[str] | None, typer.Option(metavar="TYPE", help="What it is told of; runs that end, unless given.")
    ] = None,
    project: ProjectOption = "",
    as_json: AsJson = False,
) -> None:
    """Have a URL told. The secret that messages are signed with is printed this once, alone on standard output.

    Example: elastic webhooks add https://example.com/elastic --event run.failed > webhook.secret
    """
    deferred.remote_access.add_webhook_command(url, event or [], project, as_json=as_json)


@webhooks.command("list")
def list_webhooks(as_json: AsJson = False) -> None:
    """List webhooks, the newest first, without their secrets.

    Example: elastic webhooks list
    """
    deferred.remote_access.webhooks_command(as_json=as_json)


@webhooks.command("test")
def try_webhook(webhook: WebhookName, as_json: AsJson = False) -> None:
    """Send a message of type `webhook.test`.

    Example: elastic webhooks test hook_01JD3K5T7WQ8M2N4P6R8S0V2X4
    """
    deferred.remote_access.try_webhook_command(webhook, as_json=as_json)


@webhooks.command("deliveries")
def list_deliveries(webhook: WebhookName, as_json: AsJson = False) -> None:
    """List what a webhook was told in the last 30 days, or is still to be told.

    Example: elastic webhooks deliveries hook_01JD3K5T7WQ8M2N4P6R8S0V2X4
    """
    deferred.remote_access.deliveries_command(webhook, as_json=as_json)


@webhooks.command("enable")
def enable_webhook(webhook: WebhookName, as_json: AsJson = False) -> None:
    """Go on telling it; what happened meanwhile is not told later.

    Example: elastic webhooks enable hook_01JD3K5T7WQ8M2N4P6R8S0V2X4
    """
    deferred.remote_access.switch_webhook_command(webhook, enabled=True, as_json=as_json)


@webhooks.command("disable")
def disable_webhook(webhook: WebhookName, as_json: AsJson = False) -> None:
    """Tell it nothing for now.

    Example: elastic webhooks disable hook_01JD3K5T7WQ8M2N4P6R8S0V2X4
    """
    deferred.remote_access.switch_webhook_command(webhook, enabled=False, as_json=as_json)


@webhooks.command("delete")
def delete_webhook(webhook: WebhookName) -> None:
    """Remove a webhook, with what it was still to be told.

    Example: elastic webhooks delete hook_01JD3K5T7WQ8M2N4P6R8S0V2X4
    """
    deferred.remote_access.delete_webhook_command(webhook)


def audit(
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, help="How many, at most.")] = 50,
    as_json: AsJson = False,
) -> None:
    """List who did what on a server, and who was not let, the newest first.

    Example: elastic audit -n 20 --json
    """
    deferred.remote_access.audit_command(limit, as_json=as_json)
