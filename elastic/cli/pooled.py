"""Commands around pools that many jobs share, with options and one example each: `jobs, pool`."""

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from elastic.cli import deferred
from elastic.cli.whole_help import WholeHelp
from elastic.config import ConfigError

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")]
PoolName = Annotated[
    str, typer.Argument(metavar="POOL", help="A pool's name, directory or POOL.toml; else the only one there is.")
]
PoolOption = Annotated[
    str, typer.Option("--pool", metavar="POOL", help="A pool's name, directory or POOL.toml; else the only one.")
]
PoolsDirectory = Annotated[Path, typer.Option("--directory", help="Where pools are kept.")]
JobName = Annotated[str, typer.Argument(metavar="JOB", help="A job's name; a part of it will do if only one has it.")]
CommandIdOption = Annotated[
    str, typer.Option("--id", metavar="ID", help="The command's id, under which it is done once.")
]
JobConfigPath = Annotated[
    Path | None, typer.Argument(metavar="CONFIG", help="The job's TOML file.", show_default=False)
]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a key, such as run.steps=10.")
]

_POOL_HELP = """Have devices that many jobs share, phase by phase: see docs/jobs.md.

Example: elastic pool start examples/pool.toml
"""
_JOBS_HELP = """Submit jobs to a pool and look after them.

Example: elastic jobs submit examples/jobs/one.toml --slo 1.5
"""

pool = typer.Typer(cls=WholeHelp, name="pool", help=_POOL_HELP, no_args_is_help=True, rich_markup_mode=None)
jobs = typer.Typer(cls=WholeHelp, name="jobs", help=_JOBS_HELP, no_args_is_help=True, rich_markup_mode=None)

SCRIPT = "script"


class ScriptCommand(TyperCommand):
    """A command that takes another program's command line behind `--`, as it is."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if "--" in args:
            at = args.index("--")
            ctx.meta[SCRIPT] = tuple(args[at + 1 :])
            args = args[:at]
        return super().parse_args(ctx, args)

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [*super().collect_usage_pieces(ctx), "[-- COMMAND…]"]


@pool.command("start")
def start_pool(
    config: Annotated[Path, typer.Argument(metavar="POOL.toml", help="The pool's file.", show_default=False)],
    foreground: Annotated[
        bool, typer.Option("--foreground", help="Stay here: the pool stops with this command, by Ctrl-C or SIGTERM.")
    ] = False,
    max_restarts: Annotated[
        int, typer.Option(min=0, help="How often its process is started again within its first minute.")
    ] = 10,
    wait_s: Annotated[float, typer.Option(min=0.1, help="How long to wait until it is up.")] = 60.0,
    as_json: AsJson = False,
) -> None:
    """Start a pool: its process, started again whenever it dies, and a keeper on each node. Jobs and the pool outlive
    the terminal.

    Example: elastic pool start examples/pool.toml
    """
    raise typer.Exit(deferred.pool.start_command(config, max_restarts, wait_s, foreground=foreground, as_json=as_json))


@pool.command("status")
def pool_status(
    name: PoolName = "",
    watch: Annotated[bool, typer.Option("--watch", help="Again and again, until Ctrl-C.")] = False,
    every_s: Annotated[float, typer.Option(min=0.1, help="With --watch.")] = 1.0,
    as_json: AsJson = False,
    directory: PoolsDirectory = Path("pools"),
) -> None:
    """Show a pool's nodes, groups and jobs: who computes where, who waits for what, what it costs.

    With --watch and --json one object a line.

    Example: elastic pool status --watch
    """
    raise typer.Exit(deferred.pool.status_command(name, directory, every_s if watch else None, as_json=as_json))


@pool.command("stop")
def stop_pool(
    name: PoolName = "",
    now: Annotated[bool, typer.Option("--now", help="End everything at once, without checkpoints.")] = False,
    wait_s: Annotated[float, typer.Option(min=0, help="How long to wait until it has ended.")] = 600.0,
    command_id: CommandIdOption = "",
    as_json: AsJson = False,
    directory: PoolsDirectory = Path("pools"),
) -> None:
    """Stop a pool: its jobs stop at their step's end and keep their checkpoints; then everything of it ends.

    Example: elastic pool stop
    """
    raise typer.Exit(deferred.pool.stop_command(name, directory, wait_s, command_id, now=now, as_json=as_json))


@jobs.command("submit", cls=ScriptCommand)
def submit_job(
    context: typer.Context,
    config: JobConfigPath = None,
    slo: Annotated[
        float | None, typer.Option(help="Largest slowdown that it accepts: a step's time over that alone (job.slo).")
    ] = None,
    providers: Annotated[
        str, typer.Option(metavar="NAMES", help="Its own besides the pool, comma-separated: spot. Not planned with.")
    ] = "",
    overrides: Overrides = None,
    seed: Annotated[int | None, typer.Option(help="Same as --set run.seed=N.")] = None,
    name: Annotated[str, typer.Option(help="What the job is called; else as its run's directory.")] = "",
    phases: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Of a script: which of its functions are which phases (TOML)."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say where it would go, at what cost, and why not elsewhere; no more.")
    ] = False,
    pool: PoolOption = "",
    command_id: CommandIdOption = "",
    as_json: AsJson = False,
    directory: PoolsDirectory = Path("pools"),
) -> None:
    """Submit a job: a run, by its TOML file, or a script of yours with phases, by its command line behind `--`.

    What it asks for is in the file's [job] section. A script's file has [job], and of [run] its name and steps.

    Example: elastic jobs submit examples/jobs/one.toml --slo 1.5 --dry-run
    """
    changed = [*(overrides or []), *([f"run.seed={seed}"] if seed is not None else [])]
    submission = deferred.jobs.AskedJob(
        config=config,
        overrides=changed,
        slo=slo,
        providers=[one.strip() for one in providers.split(",") if one.strip()],
        name=name,
        phases=phases,
        script=script_of(context),
        command_id=command_id,
    )
    raise typer.Exit(deferred.jobs.submit_command(submission, pool, directory, dry_run=dry_run, as_json=as_json))


def script_of(context: typer.Context) -> tuple[str, ...] | None:
    """What stood behind `--`; None where there was none. Raises `ConfigError` for nothing behind it."""
    found: Any = context.meta.get(SCRIPT)
    if found is not None and not found:
        raise ConfigError("elastic jobs submit: nothing stands behind --; allowed: a command, such as python train.py")
    return found


@jobs.command("list")
def list_jobs(
    pool: PoolOption = "",
    everything: Annotated[bool, typer.Option("--all", help="Those that are over, too.")] = False,
    as_json: AsJson = False,
    directory: PoolsDirectory = Path("pools"),
) -> None:
    """List a pool's jobs, in the order in which they came.

    Example: elastic jobs list --all
    """
    raise typer.Exit(deferred.jobs.list_command(pool, directory, everything=everything, as_json=as_json))


@jobs.command("show")
def show_job(
    name: JobName, pool: PoolOption = "", as_json: AsJson = False, directory: PoolsDirectory = Path("pools")
) -> None:
    """Show a job: where it is, what it waits for, how it came there, what it has cost.

    Example: elastic jobs show one
    """
    raise typer.Exit(deferred.jobs.show_command(name, pool, directory, as_json=as_json))


@jobs.command("logs")
def job_logs(
    name: JobName,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Wait for more until the job is over; Ctrl-C detaches.")
    ] = False,
    source: Annotated[str, typer.Option(help="Whose: `orchestrator`, a worker's name, …")] = "",
    tail: Annotated[int | None, typer.Option("--tail", "-n", min=0, help="Only the last lines.")] = None,
    pool: PoolOption = "",
    directory: PoolsDirectory = Path("pools"),
) -> None:
    """Print a job's log.

    Example: elastic jobs logs one -f
    """
    raise typer.Exit(deferred.jobs.logs_command(name, pool, directory, source, tail, follow=follow))


@jobs.command("wait")
def wait_for_job(
    name: JobName,
    timeout_s: Annotated[float | None, typer.Option(min=0, help="Give up after so long, with exit code 1.")] = None,
    pool: PoolOption = "",
    as_json: AsJson = False,
    directory: PoolsDirectory = Path("pools"),
) -> None:
    """Wait until a job is over; the exit code is 0 if it has finished, 3 if it was cancelled, else 1.

    Example: elastic jobs wait one
    """
    raise typer.Exit(deferred.jobs.wait_command(name, pool, directory, timeout_s, as_json=as_json))


@jobs.command("cancel")
def cancel_job(
    name: JobName,
    pool: PoolOption = "",
    command_id: CommandIdOption = "",
    as_json: AsJson = False,
    directory: PoolsDirectory = Path("pools"),
) -> None:
    """Cancel a job: everything of it ends now.

    Example: elastic jobs cancel one
    """
    raise typer.Exit(deferred.jobs.cancel_command(name, pool, directory, command_id, as_json=as_json))


@jobs.command("resubmit")
def resubmit_job(
    name: JobName,
    pool: PoolOption = "",
    command_id: CommandIdOption = "",
    as_json: AsJson = False,
    directory: PoolsDirectory = Path("pools"),
) -> None:
    """Submit a job that has failed once more: it goes on from its last checkpoint.

    Example: elastic jobs resubmit one
    """
    raise typer.Exit(deferred.jobs.resubmit_command(name, pool, directory, command_id, as_json=as_json))


@jobs.command("profile")
def profile_job(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="The job's TOML file.", show_default=False)],
    overrides: Overrides = None,
    steps: Annotated[int, typer.Option(min=1, help="To be timed, besides a first one that does not count.")] = 2,
    as_json: AsJson = False,
) -> None:
    """Time a few steps of a job alone, on this machine, and print the plan that a pool would make of them: without one
    in the job's file a pool does this first.

    Example: elastic jobs profile examples/jobs/one.toml
    """
    raise typer.Exit(deferred.jobs.profile_command(config, overrides or [], steps, as_json=as_json))


def pool_run(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="The pool's directory.")],
    supervise: Annotated[int | None, typer.Option(min=0, help="Instead: keep such a process up.")] = None,
) -> None:
    """Be the process of a pool, or its supervisor.

    Example: elastic pool-run pools/lab
    """
    if supervise is not None:
        raise typer.Exit(deferred.pool.supervise_pool(directory, supervise))
    from elastic.compose.pool import run_pool

    raise typer.Exit(run_pool(directory))


def pool_host() -> None:
    """Be the keeper of a pool's node, as the environment says.

    Example: elastic pool-host
    """
    from elastic.compose.pool import run_pool_host

    raise typer.Exit(run_pool_host())
