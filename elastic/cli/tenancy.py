"""Projects and their members on the server of `elastic api login`."""

from collections.abc import Iterable, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError

from elastic.cli.output import bad_input, emit, say, tell
from elastic.cli.remote import server
from elastic.cli.tables import show_listing
from elastic.protocol.api import AccessRole, ProjectChange
from elastic.protocol.api_client import Client


def projects_command(*, as_json: bool) -> None:
    with server() as client:
        projects = client.projects()
    show_objects(projects, ("id", "name", "unix_user", "created_at"), as_json=as_json)


def create_project_command(name: str, unix_user: str | None, *, as_json: bool) -> None:
    with server() as client:
        project = client.create_project(name, unix_user)
    tell(project, f"made project {project.name!r}, {project.id}", as_json=as_json)


def change_project_command(project: str, name: str | None, unix_user: str | None, *, as_json: bool) -> None:
    said = {key: value for key, value in (("name", name), ("unix_user", unix_user)) if value is not None}
    if not said:
        bad_input("elastic projects set: say what to change: --name, --unix-user")
    try:
        change = ProjectChange(**said)
    except ValidationError as error:
        first = error.errors(include_input=False)[0]
        bad_input(f"--{str(first['loc'][0]).replace('_', '-')}: {first['msg']}")
    with server() as client:
        made = client.change_project(project, change)
    if as_json:
        emit(made.model_dump(mode="json"))
    else:
        user = made.unix_user or "the runner's own user"
        say(f"project {made.name!r}, {made.id}: its runs are processes of {user}")


def members_command(project: str, *, as_json: bool) -> None:
    with server() as client:
        found = list(client.members(own_project(client, project)))
    show_objects(found, ("id", "email", "name", "role", "source", "created_at"), as_json=as_json)


def add_member_command(email: str, role: str, project: str, *, as_json: bool) -> None:
    with server() as client:
        member = client.add_member(own_project(client, project), email, role_of(role))
    tell(member, f"{member.email} is {member.role} from their next sign-in on", as_json=as_json)


def set_member_command(name: str, role: str, project: str, *, as_json: bool) -> None:
    with server() as client:
        project = own_project(client, project)
        member = client.change_member(project, _member(client, project, name), role_of(role))
    tell(member, f"{member.email or member.name} is now {member.role}", as_json=as_json)


def remove_member_command(name: str, project: str) -> None:
    with server() as client:
        project = own_project(client, project)
        client.remove_member(project, _member(client, project, name))
    say(f"{name} is no member any more; their keys and sessions have ended")


def own_project(client: Client, wanted: str) -> str:
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


def role_of(text: str) -> AccessRole:
    try:
        return AccessRole(text)
    except ValueError:
        bad_input(f"role: found {text!r}; allowed: {', '.join(AccessRole)}")


def show_objects(found: Iterable[BaseModel], columns: Sequence[str], *, as_json: bool) -> None:
    """A table of some of their fields, or all of them as JSON."""
    rows = [one.model_dump(mode="json") for one in found]
    if as_json:
        emit(rows)
        return
    show_listing(columns, [[_cell(row[column]) for column in columns] for row in rows])


def _cell(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else "-" if value in (None, "") else str(value)
