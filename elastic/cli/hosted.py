"""Commands around the hosted control API, with options and one example each:
`api, logs, projects, runner, runs, serve, stop, uploads`.

A run whose name begins with `run_` is the server's; others are on disk, unless `--remote` is given.
"""

from pathlib import Path
from typing import Annotated

import typer

from elastic.cli import deferred
from elastic.cli.whole_help import WholeHelp
from elastic.config import ConfigError

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")]
Remote = Annotated[bool, typer.Option("--remote", help="On the server of `elastic api login`.")]
RunsDirectory = Annotated[Path, typer.Option("--directory", help="Where runs are kept.")]
HostedName = Annotated[str, typer.Argument(metavar="RUN", help="A run's id on the server, or `latest` there.")]
Follow = Annotated[bool, typer.Option("--follow", "-f", help="Wait for more until the run ends; Ctrl-C detaches.")]
RunsListen = Annotated[
    str, typer.Option(metavar="HOST", help="Where runs listen for workers on other machines, on free ports, by TLS.")
]
RunsAdvertise = Annotated[
    str, typer.Option(metavar="HOST", help="How those workers reach this machine, if by another name.")
]
FairSharePeriod = Annotated[
    float,
    typer.Option(
        "--fair-share-period-s", min=1, help="Within it each run gets a lease of what is scarce: more runs take turns."
    ),
]
Home = Annotated[Path, typer.Option(help="Where the server keeps runs, projects' files and its database.")]
Database = Annotated[
    str, typer.Option(metavar="URL", help="postgresql://USER@HOST/NAME; else SQLite in the server's home.")
]

_API_HELP = """Log in to a server.

Example: elastic api login http://127.0.0.1:7430
"""

api = typer.Typer(cls=WholeHelp, name="api", help=_API_HELP, no_args_is_help=True, rich_markup_mode=None)
runs = typer.Typer(cls=WholeHelp, name="runs", rich_markup_mode=None)


@api.command()
def login(
    url: Annotated[str, typer.Argument(metavar="URL", help="Such as http://127.0.0.1:7430.")],
    with_key: Annotated[bool, typer.Option("--key", help="Ask for a key, although people can sign in.")] = False,
) -> None:
    """Log in, and keep a key for this user alone.

    Where people sign in with an identity provider: prints a page to open, in a browser on whatever machine. Else a key
    is asked for, or taken from ELASTIC_API_KEY.

    Example: elastic api login http://127.0.0.1:7430
    """
    deferred.remote.login_command(url, with_key=with_key)


@api.command()
def logout() -> None:
    """Forget the key.

    Example: elastic api logout
    """
    deferred.remote.logout_command()


@api.command()
def info(as_json: AsJson = False) -> None:
    """Show which server this is, and what the key may do.

    Example: elastic api info --json
    """
    deferred.remote.info_command(as_json=as_json)


@runs.callback(invoke_without_command=True)
def list_runs(
    context: typer.Context,
    remote: Remote = False,
    as_json: AsJson = False,
    directory: RunsDirectory = Path("runs"),
) -> None:
    """List the runs there are, oldest first; with --remote those on the server.

    Example: elastic runs --json
    """
    if context.invoked_subcommand is not None:
        return
    if remote:
        deferred.remote.list_command(as_json=as_json)
    else:
        deferred.report.runs_command(directory, as_json=as_json)


@runs.command("list")
def list_hosted_runs(
    phase: Annotated[str, typer.Option(help="Only those in this phase, such as running.")] = "",
    project: Annotated[str, typer.Option(metavar="NAME", help="Only this project's.")] = "",
    as_json: AsJson = False,
) -> None:
    """List the runs on the server, oldest first.

    Example: elastic runs list --phase running --json
    """
    deferred.remote.list_command(phase, project, as_json=as_json)


@runs.command()
def show(
    name: Annotated[str, typer.Argument(metavar="RUN", help="A run's name or path, its id, or `latest`.")] = "latest",
    remote: Remote = False,
    as_json: AsJson = False,
    directory: RunsDirectory = Path("runs"),
) -> None:
    """Show how a run stands: its status and figures; on a server its conditions, too.

    Example: elastic runs show latest
    """
    if remote or deferred.remote.is_hosted(name):
        deferred.remote.show_command(name, as_json=as_json)
    else:
        deferred.report.show_run_command(name, directory, as_json=as_json)


@runs.command()
def resume(
    name: HostedName,
    steps: Annotated[int | None, typer.Option(min=1, help="Train up to this many steps.")] = None,
    budget_usd: Annotated[float | None, typer.Option(min=0, help="What it may cost in all from now on.")] = None,
    as_json: AsJson = False,
) -> None:
    """Go on with a run on the server that has ended.

    Example: elastic runs resume latest --steps 200
    """
    deferred.remote.resume_command(name, steps, budget_usd, as_json=as_json)


@runs.command()
def delete(name: Annotated[str, typer.Argument(metavar="RUN", help="A run's id on the server.")]) -> None:
    """Delete a run on the server that has ended, with its journal and checkpoints.

    Example: elastic runs delete run_01JD3K5T7WQ8M2N4P6R8S0V2X4
    """
    deferred.remote.delete_command(name)


@runs.command()
def events(
    name: HostedName = "latest",
    follow: Follow = False,
    after: Annotated[str, typer.Option(metavar="ID", help="Begin behind the event with this id.")] = "",
) -> None:
    """Print what happens in a run on the server, one JSON object a line.

    Example: elastic runs events latest -f
    """
    deferred.remote.events_command(name, after, follow=follow)


@runs.command()
def trajectories(
    name: HostedName = "latest",
    step: Annotated[int | None, typer.Option(min=0, help="Only those of this training step.")] = None,
    reward_min: Annotated[float | None, typer.Option(help="Only those with this reward or more.")] = None,
    reward_max: Annotated[float | None, typer.Option(help="Only those with this reward or less.")] = None,
) -> None:
    """Print a run's trajectories, the best rewarded first, one JSON object a line.

    Example: elastic runs trajectories latest --step 3 | head
    """
    asked = {"step": step, "reward_min": reward_min, "reward_max": reward_max}
    filters = {key: value for key, value in asked.items() if value is not None}
    deferred.remote.lines_command(lambda client, run: client.trajectories(run, order="reward", **filters), name)


@runs.command()
def trajectory(
    name: HostedName,
    trajectory: Annotated[
        str, typer.Argument(metavar="TRAJECTORY", help="Its id, as `elastic runs trajectories` has it.")
    ],
    as_json: AsJson = False,
) -> None:
    """Print what was said in a trajectory.

    Example: elastic runs trajectory latest 3/0/2
    """
    deferred.remote.trajectory_command(name, trajectory, as_json=as_json)


@runs.command()
def workers(name: HostedName = "latest") -> None:
    """Print a run's workers, past and present, with their GPU time by account, one JSON object a line.

    Example: elastic runs workers latest
    """
    deferred.remote.lines_command(lambda client, run: client.workers(run), name)


@runs.command()
def checkpoints(name: HostedName = "latest") -> None:
    """Print a run's checkpoints, one JSON object a line.

    Example: elastic runs checkpoints latest
    """
    deferred.remote.lines_command(lambda client, run: client.checkpoints(run), name)


@runs.command()
def leases(name: HostedName = "latest") -> None:
    """Print a run's leases, past and present, one JSON object a line.

    Example: elastic runs leases latest
    """
    deferred.remote.lines_command(lambda client, run: client.leases(run), name)


@runs.command()
def metrics(name: HostedName = "latest") -> None:
    """Print a run's finished steps, one JSON object a line.

    Example: elastic runs metrics latest
    """
    deferred.remote.lines_command(lambda client, run: client.metrics(run).steps, name)


_PROJECTS_HELP = """List, make and share projects on a server.

Example: elastic projects members add ada@example.com --role runner
"""
_MEMBERS_HELP = """Who may do what in a project.

Example: elastic projects members list
"""

projects = typer.Typer(cls=WholeHelp, name="projects", help=_PROJECTS_HELP, no_args_is_help=True, rich_markup_mode=None)
members = typer.Typer(cls=WholeHelp, name="members", help=_MEMBERS_HELP, no_args_is_help=True, rich_markup_mode=None)
projects.add_typer(members)
ProjectOption = Annotated[
    str, typer.Option("--project", metavar="NAME", help="Its name or id; the key's own unless given.")
]
RoleOption = Annotated[str, typer.Option(help="viewer, runner or admin.")]
MemberName = Annotated[str, typer.Argument(metavar="MEMBER", help="An e-mail address, or a member's id.")]


@projects.command("list")
def list_projects(as_json: AsJson = False) -> None:
    """List the projects that the key sees.

    Example: elastic projects list
    """
    deferred.tenancy.projects_command(as_json=as_json)


@projects.command("create")
def create_project(
    name: Annotated[str, typer.Argument(metavar="NAME")],
    unix_user: Annotated[
        str | None, typer.Option(metavar="USER", help="Whose processes its runs are; needs a runner that is root.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Make a project; only a key of no project may.

    Example: elastic projects create agents --unix-user elastic-agents
    """
    deferred.tenancy.create_project_command(name, unix_user, as_json=as_json)


@projects.command("set")
def set_project(
    project: Annotated[str, typer.Argument(metavar="PROJECT", help="Its name or id.")],
    name: Annotated[str | None, typer.Option(help="What it is called from now on.")] = None,
    unix_user: Annotated[str | None, typer.Option(metavar="USER", help="Whose processes its runs are.")] = None,
    as_json: AsJson = False,
) -> None:
    """Rename a project, or give it a Unix user; only a key of no project may.

    Example: elastic projects set agents --unix-user elastic-agents
    """
    deferred.tenancy.change_project_command(project, name, unix_user, as_json=as_json)


@members.command("list")
def list_members(project: ProjectOption = "", as_json: AsJson = False) -> None:
    """List a project's members.

    Example: elastic projects members list --json
    """
    deferred.tenancy.members_command(project, as_json=as_json)


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
    deferred.tenancy.add_member_command(email, role, project, as_json=as_json)


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
    deferred.tenancy.set_member_command(name, role, project, as_json=as_json)


@members.command("remove")
def remove_member(name: MemberName, project: ProjectOption = "") -> None:
    """End a membership, with its keys and sessions; runs go on.

    Example: elastic projects members remove ada@example.com
    """
    deferred.tenancy.remove_member_command(name, project)


_UPLOADS_HELP = """Checkpoints and data in a project's storage on a server.

Example: elastic uploads put .cache/frozenlake-base
"""

uploads = typer.Typer(cls=WholeHelp, name="uploads", help=_UPLOADS_HELP, no_args_is_help=True, rich_markup_mode=None)
UploadName = Annotated[str, typer.Argument(metavar="UPLOAD", help="An upload's id.")]


@uploads.command("put")
def put_upload(
    source: Annotated[Path, typer.Argument(metavar="PATH", help="A file, or a directory with files.")],
    name: Annotated[str, typer.Option(help="What lists call it; else the file's own name.")] = "",
    project: ProjectOption = "",
    as_json: AsJson = False,
) -> None:
    """Send a file or a directory. Repeated after a failure, it goes on with what is missing.

    Example: elastic uploads put .cache/frozenlake-base
    """
    deferred.uploads.put_command(source, name, project, as_json=as_json)


@uploads.command("list")
def list_uploads(as_json: AsJson = False) -> None:
    """List the uploads there are, the newest first.

    Example: elastic uploads list
    """
    deferred.uploads.list_command(as_json=as_json)


@uploads.command("get")
def get_upload(
    upload: UploadName,
    target: Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="Where to write its files.")] = Path(),
) -> None:
    """Fetch an upload's files.

    Example: elastic uploads get upl_01JD3K5T7WQ8M2N4P6R8S0V2X4 -o base
    """
    deferred.uploads.get_command(upload, target)


@uploads.command("delete")
def delete_upload(upload: UploadName) -> None:
    """Delete an upload that no run which goes on names.

    Example: elastic uploads delete upl_01JD3K5T7WQ8M2N4P6R8S0V2X4
    """
    deferred.uploads.delete_upload_command(upload)


CommandIdOption = Annotated[
    str,
    typer.Option(
        "--id",
        metavar="ID",
        help="Of a run on disk: the command's id, under which it is done once.",
    ),
]


def logs(
    name: Annotated[str, typer.Argument(metavar="RUN", help="A run's name or path, its id, or `latest`.")] = "latest",
    follow: Follow = False,
    source: Annotated[str, typer.Option(help="Whose: `process`, `orchestrator`, a worker's name, …")] = "",
    tail: Annotated[int | None, typer.Option("--tail", "-n", min=0, help="Only the last lines.")] = None,
    remote: Remote = False,
    directory: RunsDirectory = Path("runs"),
) -> None:
    """Print a run's log.

    Example: elastic logs latest -f
    """
    if remote or deferred.remote.is_hosted(name):
        deferred.remote.logs_command(name, source or "process", tail, follow=follow)
    else:
        deferred.disk_logs.disk_logs_command(name, directory, source or "orchestrator", tail, follow=follow)


def stop(
    name: Annotated[str, typer.Argument(metavar="RUN", help="A run's name or path, its id, or `latest`.")],
    force: Annotated[
        bool, typer.Option("--force", help="On a server: kill what it has, without a checkpoint.")
    ] = False,
    reason: Annotated[
        str, typer.Option(help="Of a run on disk: why; it stands in its report.")
    ] = "stopped from the command line",
    command_id: CommandIdOption = "",
    remote: Remote = False,
    as_json: AsJson = False,
    directory: RunsDirectory = Path("runs"),
) -> None:
    """Stop a run: it makes a checkpoint, gives everything back and ends; it can be resumed.

    Example: elastic stop latest --reason "the GPUs are needed"
    """
    if remote or deferred.remote.is_hosted(name):
        deferred.remote.stop_command(name, force=force, as_json=as_json)
        return
    if force:
        raise ConfigError("elastic stop: --force is for runs on a server")
    raise typer.Exit(
        deferred.control.disk_stop_command(
            deferred.account.run_on_disk(directory, name), reason, command_id, as_json=as_json
        )
    )


def serve(
    host: Annotated[str, typer.Option(help="Address to listen on; beyond loopback put TLS in front.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 7430,
    home: Home = Path("elastic-server"),
    database: Database = "",
    models: Annotated[
        list[Path] | None,
        typer.Option(metavar="DIR", help="Base policies that every project may start from; .cache unless given."),
    ] = None,
    host_name: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="A name, besides addresses, that this server goes by.")
    ] = None,
    trusted_proxies: Annotated[
        list[str] | None,
        typer.Option(metavar="NETWORK", help="Proxies in front, whose x-forwarded-for says who asks; may be repeated."),
    ] = None,
    runner: Annotated[bool, typer.Option(help="Look after the runs too, or leave it to `elastic runner`.")] = True,
    shared_trust: Annotated[
        bool, typer.Option("--shared-trust", help="Let several projects' runs be processes of one Unix user.")
    ] = False,
    uploads_gb: Annotated[int, typer.Option(min=0, help="What a project's uploads may take of the disk.")] = 256,
    oidc_issuer: Annotated[
        str, typer.Option(metavar="URL", help="People sign in with this OpenID Connect provider.")
    ] = "",
    oidc_client_id: Annotated[str, typer.Option(metavar="ID", help="What the provider calls this server.")] = "",
    oidc_client_secret_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Has the client's secret; else ELASTIC_OIDC_CLIENT_SECRET, or there is none."
        ),
    ] = None,
    oidc_member: Annotated[
        list[str] | None,
        typer.Option(
            metavar="CLAIM=VALUE:PROJECT:ROLE",
            help="Who is a member by what the provider says, such as groups=rl:agents:runner.",
        ),
    ] = None,
    oidc_scope: Annotated[
        list[str] | None, typer.Option(metavar="SCOPE", help="To ask for besides openid, email, profile: groups.")
    ] = None,
    oidc_name: Annotated[str, typer.Option(metavar="NAME", help="What the page calls the provider.")] = "",
    oidc_sign_in_hours: Annotated[
        float, typer.Option(min=0.1, max=8760, help="After so long people sign in again, unless it has said so since.")
    ] = 24.0,
    oidc_recheck_minutes: Annotated[
        float, typer.Option(min=0.1, max=1440, help="How often it is asked again, where it gives refresh tokens.")
    ] = 15.0,
    pool: Annotated[
        list[Path] | None,
        typer.Option(metavar="POOL.toml", help="A pool to keep up, whose jobs come over the API; may be repeated."),
    ] = None,
    webhook_network: Annotated[
        list[str] | None, typer.Option(metavar="CIDR", help="A private network that webhooks may lead into.")
    ] = None,
    price: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KIND=USD",
            help="Least price of a GPU for an hour, by kind of provider and of the trainer; may be repeated.",
        ),
    ] = None,
    fair_share_period_s: FairSharePeriod = 600.0,
    runs_listen: RunsListen = "",
    runs_advertise: RunsAdvertise = "",
) -> None:
    """Serve the control API: many runs, many people. Runs outlive it; a server that is started again finds them.

    On a fresh home it makes a project and prints the first admin key, once.

    Example: elastic serve --home /var/lib/elastic
    """
    deferred.serve.serve_command(
        host,
        port,
        home,
        database,
        models or [Path(".cache")],
        host_name or [],
        runner=runner,
        shared_trust=shared_trust,
        pools=pool or [],
        webhook_networks=webhook_network or [],
        trusted_proxies=trusted_proxies or [],
        prices=price or [],
        oidc=deferred.serve.OidcOptions(
            oidc_issuer,
            oidc_client_id,
            oidc_client_secret_file,
            oidc_member or [],
            oidc_scope or [],
            oidc_name,
            oidc_sign_in_hours * 3600,
            oidc_recheck_minutes * 60,
        ),
        uploads_gb=uploads_gb,
        fair_share_period_s=fair_share_period_s,
        runs=deferred.serve.RunsPlace(runs_listen, runs_advertise),
    )


def runner(
    home: Home = Path("elastic-server"),
    database: Database = "",
    fair_share_period_s: FairSharePeriod = 600.0,
    runs_listen: RunsListen = "",
    runs_advertise: RunsAdvertise = "",
) -> None:
    """Look after a server's runs in a process of its own, beside `elastic serve --no-runner`.

    Example: elastic runner --home /var/lib/elastic
    """
    runs = deferred.serve.RunsPlace(runs_listen, runs_advertise)
    deferred.serve.runner_command(home, database, fair_share_period_s, runs)


def support_bundle(
    home: Home = Path("elastic-server"),
    database: Database = "",
    url: Annotated[str, typer.Option(help="Where the server listens: asks whether it is ready.")] = "",
    log: Annotated[
        list[Path] | None, typer.Option(metavar="FILE", help="The server's or the runner's own log; its end is taken.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Where to; a new file here unless given.")
    ] = None,
) -> None:
    """Gather what somebody needs who is to help with a server: versions, health, runs' conditions, logs; no secrets.

    Example: elastic support-bundle --home /var/lib/elastic --log /var/log/elastic.log
    """
    deferred.serve.support_command(home, database, url, log or [], output)


# Under `elastic runs`, too, where some look for them.
runs.command()(logs)
runs.command()(stop)
