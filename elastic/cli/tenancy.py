"""Projects and their members on the server of `elastic api login`."""

from typing import Any

from rich.table import Table

from elastic.cli.output import bad_input, console, emit, say
from elastic.cli.remote import server
from elastic.client import Client
from elastic.resources import AccessRole, ProjectMember


def projects_command(*, as_json: bool) -> None:
    with server() as client:
        projects = client.projects()
    rows = [project.model_dump(mode="json") for project in projects]
    _show(rows, ["id", "name", "unix_user", "created_at"], as_json=as_json)


def create_project_command(name: str, unix_user: str | None, *, as_json: bool) -> None:
    with server() as client:
        project = client.create_project(name, unix_user)
    if as_json:
        emit(project.model_dump(mode="json"))
    else:
        say(f"made project {project.name!r}, {project.id}")


def members_command(project: str, *, as_json: bool) -> None:
    with server() as client:
        rows = [one.model_dump(mode="json") for one in client.members(_project(client, project))]
    _show(rows, ["id", "email", "name", "role", "source", "created_at"], as_json=as_json)


def add_member_command(email: str, role: str, project: str, *, as_json: bool) -> None:
    with server() as client:
        member = client.add_member(_project(client, project), email, _role(role))
    _told(member, f"{member.email} is {member.role} from their next sign-in on", as_json=as_json)


def set_member_command(name: str, role: str, project: str, *, as_json: bool) -> None:
    with server() as client:
        project = _project(client, project)
        member = client.change_member(project, _member(client, project, name), _role(role))
    _told(member, f"{member.email or member.name} is now {member.role}", as_json=as_json)


def remove_member_command(name: str, project: str) -> None:
    with server() as client:
        project = _project(client, project)
        client.remove_member(project, _member(client, project, name))
    say(f"{name} is no member any more; their keys and sessions have ended")


def _project(client: Client, wanted: str) -> str:
    """The project that is meant: the one named, else the key's own."""
    own = wanted or client.me().project
    if own is None:
        bad_input("--project: this key is of no project; name one")
    return own


def _member(client: Client, project: str, name: str) -> str:
    """A member's id, by itself or by their e-mail address."""
    if "@" not in name:
        return name
    found = next((one.id for one in client.members(project) if one.email == name.lower()), None)
    if found is None:
        bad_input(f"no member {name!r}; `elastic projects members list` shows who is")
    return found


def _role(text: str) -> AccessRole:
    try:
        return AccessRole(text)
    except ValueError:
        bad_input(f"role: found {text!r}; allowed: {', '.join(AccessRole)}")


def _told(member: ProjectMember, words: str, *, as_json: bool) -> None:
    if as_json:
        emit(member.model_dump(mode="json"))
    else:
        say(words)


def _show(rows: list[dict[str, Any]], columns: list[str], *, as_json: bool) -> None:
    if as_json:
        emit(rows)
        return
    table = Table(*columns, box=None, pad_edge=False)
    for row in rows:
        table.add_row(*(str(row[column] if row[column] is not None else "-") for column in columns))
    console().print(table)
