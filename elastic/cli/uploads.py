"""`elastic uploads`: checkpoints and data on a server, that a project's runs may name."""

from pathlib import Path
from typing import Annotated

import typer

from elastic.cli.options import AsJson, ProjectOption, group
from elastic.cli.output import bad_input, console, emit, say
from elastic.cli.remote import server
from elastic.cli.tables import show_listing
from elastic.protocol.api import NAME

uploads = group(
    "uploads",
    "Keep checkpoints and data in a project's storage on a server.\n\n"
    "Example: elastic uploads put .cache/frozenlake-base",
)
UploadName = Annotated[str, typer.Argument(metavar="UPLOAD", help="An upload's id.")]


@uploads.command("put")
def put_upload(
    source: Annotated[Path, typer.Argument(metavar="PATH", help="A file, or a directory with files.")],
    name: Annotated[str, typer.Option(help="Name in lists; by default the file's name.")] = "",
    project: ProjectOption = "",
    as_json: AsJson = False,
) -> None:
    """Send a file or a directory. Repeated after a failure, it goes on with what is missing.

    Example: elastic uploads put .cache/frozenlake-base
    """
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


@uploads.command("list")
def list_uploads(as_json: AsJson = False) -> None:
    """List the uploads there are, the newest first.

    Example: elastic uploads list
    """
    with server() as client:
        found = list(client.uploads())
    if as_json:
        emit([one.model_dump(mode="json") for one in found])
        return
    rows = [(one.id, one.name, one.state, str(len(one.files)), str(one.bytes), one.created_at) for one in found]
    show_listing(("id", "name", "state", "files", "bytes", "created_at"), rows)


@uploads.command("get")
def get_upload(
    upload: UploadName,
    target: Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="Where to write its files.")] = Path(),
) -> None:
    """Fetch an upload's files.

    Example: elastic uploads get upl_01JD3K5T7WQ8M2N4P6R8S0V2X4 -o base
    """
    with server() as client:
        for path in client.fetch_upload(upload.removeprefix("upload:"), target):
            say(f"wrote {path}")


@uploads.command("delete")
def delete_upload(upload: UploadName) -> None:
    """Delete an upload that no living run names.

    Example: elastic uploads delete upl_01JD3K5T7WQ8M2N4P6R8S0V2X4
    """
    with server() as client:
        client.delete_upload(upload.removeprefix("upload:"))
    say(f"deleted {upload}")
