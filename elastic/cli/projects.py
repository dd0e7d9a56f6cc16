"""`elastic projects`: projects of a server, their members, and what each may have, spend and keep."""

from typing import Annotated, Any

import typer

from elastic.cli.options import NONE, AsJson, ProjectOption, RoleOption, dollars_of, gpus_of, group
from elastic.cli.output import bad_input, console, duration, emit, say, tell
from elastic.cli.remote import server, validated
from elastic.cli.tables import show_listing, show_objects
from elastic.config import ConfigError
from elastic.protocol.api import AccessRole, ProjectChange, ProjectQuota, QuotaChange, RetentionChange
from elastic.protocol.api_client import Client

projects = group(
    "projects",
    "List, make and share projects on a server.\n\nExample: elastic projects members add ada@example.com --role runner",
)
members = group("members", "Who may do what in a project.\n\nExample: elastic projects members list")
projects.add_typer(members)
ProjectName = Annotated[str, typer.Argument(metavar="PROJECT", help="A project's name or id.")]
DaysOption = Annotated[str | None, typer.Option(metavar="DAYS", help="Days, or `none`.")]
MemberName = Annotated[str, typer.Argument(metavar="MEMBER", help="An e-mail address, or a member's id.")]


@projects.command("list")
def list_projects(as_json: AsJson = False) -> None:
    """List the projects that the key sees.

    Example: elastic projects list
    """
    with server() as client:
        show_objects(client.projects(), ("id", "name", "unix_user", "created_at"), as_json=as_json)


@projects.command("create")
def create_project(
    name: Annotated[str, typer.Argument(metavar="NAME")],
    unix_user: Annotated[
        str | None,
        typer.Option(metavar="USER", help="The Unix user of the project's runs; needs a runner that is root."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Make a project; only a key of no project may.

    Example: elastic projects create agents --unix-user elastic-agents
    """
    with server() as client:
        project = client.create_project(name, unix_user)
    tell(project, f"made project {project.name!r}, {project.id}", as_json=as_json)


@projects.command("set")
def set_project(
    project: Annotated[str, typer.Argument(metavar="PROJECT", help="Its name or id.")],
    name: Annotated[str | None, typer.Option(help="The new name.")] = None,
    unix_user: Annotated[str | None, typer.Option(metavar="USER", help="The Unix user of the project's runs.")] = None,
    as_json: AsJson = False,
) -> None:
    """Rename a project, or give it a Unix user; only a key of no project may.

    Example: elastic projects set agents --unix-user elastic-agents
    """
    said = {key: value for key, value in (("name", name), ("unix_user", unix_user)) if value is not None}
    if not said:
        bad_input("elastic projects set: say what to change: --name, --unix-user")
    change = validated(ProjectChange, said, "--")
    with server() as client:
        made = client.change_project(project, change)
    user = made.unix_user or "the runner's own user"
    tell(made, f"project {made.name!r}, {made.id}: its runs are processes of {user}", as_json=as_json)


@members.command("list")
def list_members(project: ProjectOption = "", as_json: AsJson = False) -> None:
    """List a project's members.

    Example: elastic projects members list --json
    """
    columns = ("id", "email", "name", "role", "source", "created_at")
    with server() as client:
        show_objects(client.members(own_project(client, project)), columns, as_json=as_json)


@members.command("add")
def add_member(
    email: Annotated[str, typer.Argument(metavar="EMAIL")],
    role: RoleOption = "runner",
    project: ProjectOption = "",
    as_json: AsJson = False,
) -> None:
    """Make somebody a member, by the address that they sign in with, now or later.

    Example: elastic projects members add ada@example.com --role runner
    """
    with server() as client:
        member = client.add_member(own_project(client, project), email, role_of(role))
    tell(member, f"{member.email} is {member.role} from their next sign-in on", as_json=as_json)


@members.command("set")
def set_member(
    name: MemberName,
    role: Annotated[str, typer.Argument(metavar="ROLE", help="viewer, runner or admin.")],
    project: ProjectOption = "",
    as_json: AsJson = False,
) -> None:
    """Give a member another role; their keys do no more than it allows from then on.

    Example: elastic projects members set ada@example.com viewer
    """
    with server() as client:
        project = own_project(client, project)
        member = client.change_member(project, _member(client, project, name), role_of(role))
    tell(member, f"{member.email or member.name} is now {member.role}", as_json=as_json)


@members.command("remove")
def remove_member(name: MemberName, project: ProjectOption = "") -> None:
    """End a membership, with its keys and sessions; runs go on.

    Example: elastic projects members remove ada@example.com
    """
    with server() as client:
        project = own_project(client, project)
        client.remove_member(project, _member(client, project, name))
    say(f"{name} is no member any more; their keys and sessions have ended")


@projects.command()
def quota(
    project: ProjectName = "default",
    gpus: Annotated[
        list[str] | None,
        typer.Option(metavar="KIND=GPUS", help="GPUs at once of a kind of provider, or of `trainer`; `none` lifts it."),
    ] = None,
    runs: Annotated[str | None, typer.Option(metavar="RUNS", help="Runs at once, or `none`.")] = None,
    usd_per_day: Annotated[str | None, typer.Option(metavar="USD", help="Dollars a day (UTC), or `none`.")] = None,
    budget_usd: Annotated[str | None, typer.Option(metavar="USD", help="Dollars in all, or `none`.")] = None,
    weight: Annotated[
        float | None, typer.Option(min=0.001, max=1000, help="The project's weight where projects share capacity.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show, or with options set, what a project may have at once and spend; and what it uses.

    Example: elastic projects quota agents --gpus spot-replay=8 --runs 4 --usd-per-day 100
    """
    changes: dict[str, Any] = {}
    if runs is not None:
        changes["runs"] = _whole("--runs", runs)
    if usd_per_day is not None:
        changes["usd_per_day"] = dollars_of("--usd-per-day", usd_per_day)
    if budget_usd is not None:
        changes["budget_usd"] = dollars_of("--budget-usd", budget_usd)
    if weight is not None:
        changes["weight"] = weight
    limits = dict(gpus_of("--gpus", one) for one in gpus or ())
    with server() as client:
        if limits:
            kept = {**client.quota(project).gpus, **limits}
            changes["gpus"] = {kind: most for kind, most in kept.items() if most is not None}
        found = client.change_quota(project, QuotaChange(**changes)) if changes else client.quota(project)
    if as_json:
        emit(found.model_dump(mode="json"))
    else:
        _show_quota(found)


@projects.command()
def retention(
    project: ProjectName = "default",
    of_server: Annotated[
        bool, typer.Option("--server", help="The server's policy, for projects without one of their own.")
    ] = False,
    runs_days: DaysOption = None,
    trajectories_days: DaysOption = None,
    checkpoints_days: DaysOption = None,
    logs_days: DaysOption = None,
    uploads_days: DaysOption = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would go now; nothing is removed.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show, or with options set, for how many days files of runs and jobs are kept after their end.

    Example: elastic projects retention agents --checkpoints-days 30 --logs-days 14
    """
    said = {
        "runs_days": runs_days,
        "trajectories_days": trajectories_days,
        "checkpoints_days": checkpoints_days,
        "logs_days": logs_days,
        "uploads_days": uploads_days,
    }
    changes = {name: _whole(f"--{name.replace('_', '-')}", days) for name, days in said.items() if days is not None}
    whose = None if of_server else project
    with server() as client:
        policy = client.change_retention(whose, RetentionChange(**changes)) if changes else client.retention(whose)
        plan = client.retention_plan(whose) if dry_run else None
    if as_json:
        emit((plan or policy).model_dump(mode="json"))
    elif plan is None:
        for name in RetentionChange.model_fields:
            days = getattr(policy, name)
            kept = f"{days} days" if days is not None else "for ever" if whose is None else "as the server's"
            console().print(f"{name.removesuffix('_days')}: {kept}", highlight=False)
    else:
        rows = [(one.run, one.name, one.ended_at, ", ".join(one.removes), f"{one.bytes:,}") for one in plan.items]
        show_listing(("run", "name", "ended", "removes", "bytes"), rows)
        if plan.jobs:
            rows = [(one.job, one.pool, one.ended_at, ", ".join(one.removes), f"{one.bytes:,}") for one in plan.jobs]
            show_listing(("job", "pool", "ended", "removes", "bytes"), rows)
        if plan.uploads:
            rows = [(one.upload, one.name, one.last_used_at, one.state, f"{one.bytes:,}") for one in plan.uploads]
            show_listing(("upload", "name", "last used", "state", "bytes"), rows)
        words = f"{plan.runs} runs, {len(plan.jobs)} jobs and {len(plan.uploads)} uploads, {plan.bytes:,} bytes"
        console().print(f"{words}; nothing was removed", highlight=False)


def _show_quota(quota: ProjectQuota) -> None:
    use = quota.use
    rows = [("runs at once", str(use.runs), _limit(quota.runs), "")]
    rows += [
        (f"GPUs of {kind}", str(use.gpus.get(kind, 0)), _limit(quota.gpus.get(kind)), "")
        for kind in sorted(quota.gpus.keys() | use.gpus.keys())
    ]
    for what, used, allotted, limit, ends_in_s in (
        ("today", use.usd_today, use.allotted_today_usd, quota.usd_per_day, use.day_ends_in_s),
        ("in all", use.usd, use.allotted_usd, quota.budget_usd, use.budget_ends_in_s),
    ):
        words = f"${allotted:.2f} allotted" + ("" if ends_in_s is None else f"; ends in {duration(ends_in_s)}")
        rows.append((what, f"${used:.2f}", "no limit" if limit is None else f"${limit:.2f}", words))
    show_listing(("", "used", "of", ""), rows)
    console().print(f"${use.usd_per_hour:.2f} an hour lately; weight {quota.weight:g}", highlight=False)


def _limit(limit: int | None) -> str:
    return "no limit" if limit is None else str(limit)


def _whole(what: str, said: str) -> int | None:
    if said == NONE:
        return None
    if not (said.isdecimal() and said.isascii()):
        raise ConfigError(f"{what}: found {said!r}; allowed: a whole number, or {NONE}")
    return int(said)


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
