"""Uploads on the server of `elastic api login`: checkpoints and data that a project's runs may name."""

from pathlib import Path

from elastic.cli.output import bad_input, console, emit, say
from elastic.cli.remote import server
from elastic.cli.tables import show_listing
from elastic.protocol.api import NAME


def put_command(source: Path, name: str, project: str, *, as_json: bool) -> None:
    if not source.exists():
        bad_input(f"{source}: there is no such file or directory")
    with server() as client:
        try:
            made = client.upload(source, name or source.resolve().name, project or None)
        except ValueError as error:
            bad_input(f"{error}; a name of an upload is such as {NAME}" if not name else str(error))
    if as_json:
        emit(made.model_dump(mode="json"))
        return
    inside = f"/{made.files[0].path}" if source.is_file() else ""
    say(f"uploaded {made.bytes} bytes; name it in a configuration as")
    console().print(f"upload:{made.id}{inside}", highlight=False, soft_wrap=True)


def list_command(*, as_json: bool) -> None:
    with server() as client:
        found = list(client.uploads())
    if as_json:
        emit([one.model_dump(mode="json") for one in found])
        return
    rows = [(one.id, one.name, one.state, str(len(one.files)), str(one.bytes), one.created_at) for one in found]
    show_listing(("id", "name", "state", "files", "bytes", "created_at"), rows)


def get_command(upload: str, target: Path) -> None:
    with server() as client:
        for path in client.fetch_upload(upload.removeprefix("upload:"), target):
            say(f"wrote {path}")


def delete_upload_command(upload: str) -> None:
    with server() as client:
        client.delete_upload(upload.removeprefix("upload:"))
    say(f"deleted {upload}")
