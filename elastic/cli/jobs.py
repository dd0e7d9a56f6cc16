"""`elastic jobs`: jobs of a pool, as its process knows them."""

import asyncio
import contextlib
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from pydantic import BaseModel, ConfigDict, Field
from rich.table import Table
from typer.core import TyperCommand

from elastic.cli.options import (
    AsJson,
    JobCommandIdOption,
    Overrides,
    PoolsDirectory,
    Remote,
    Tail,
    given_name,
    group,
    names_in,
    with_seed,
)
from elastic.cli.output import EXIT_FAILED, EXIT_STOPPED, bad_input, console, emit, program, say
from elastic.cli.pool import asked, doing, find_pool, jobs_table, refused
from elastic.cli.tables import show_listing
from elastic.compose.job_files import OUTPUTS, run_files, script_files
from elastic.compose.job_profile import JobProfileError, plan_of_run, profile_overrides
from elastic.compose.plan import check_live, check_policy, resolve, rollout_gpus
from elastic.compose.pool_config import POOL_CONFIG, job_request, load_pool
from elastic.compose.runs import discard_run, new_run_dir, private
from elastic.config import (
    Config,
    ConfigError,
    EnvironmentConfig,
    JobConfig,
    RunConfig,
    apply_override,
    load_config,
    read_sections,
    validate,
)
from elastic.pool.control_messages import JOB_NAME, PoolControl, SubmitJob
from elastic.pool.ports import JobEntry
from elastic.pool.status import JobStatus, PlacementPlan
from elastic.protocol.run_control import ControlError, RunNotFound, RunSilent, new_command_id
from elastic.runtime.journal import DirectoryStore, JournalError
from elastic.system.processes import inherited, named

PROFILED_ON = "reserved"
"""The provider of workers on this machine that stay."""
POLL_S = 0.25
NAMED_MOST = 5
"""Jobs that a message names."""
AWAY_S = 60.0
"""How long a pool's process may be away while a job is waited for: its supervisor starts it again."""


jobs = group(
    "jobs",
    "Submit jobs to a pool and look after them.\n\nExample: elastic jobs submit examples/jobs/one.toml --slo 1.5",
)
PoolOption = Annotated[
    str,
    typer.Option(
        "--pool",
        metavar="POOL",
        help="A pool's name, directory or POOL.toml; else the only one.",
        callback=given_name,
    ),
]
JobName = Annotated[
    str,
    typer.Argument(metavar="JOB", help="A job's name; a part of it will do if only one has it.", callback=given_name),
]
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


class ScriptConfig(BaseModel):
    """The file of a script's job: of a run's, what is not a matter of the script."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    run: RunConfig = Field(default_factory=RunConfig)  # type: ignore[arg-type]
    job: JobConfig


@jobs.command("submit", cls=ScriptCommand)
@private()
def submit_job(
    context: typer.Context,
    config: Annotated[
        Path | None, typer.Argument(metavar="CONFIG", help="The job's TOML file.", show_default=False)
    ] = None,
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
        typer.Option(metavar="FILE", help="For a script: the TOML file that says which functions are which phases."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say where it would go, at what cost, and why not elsewhere; no more.")
    ] = False,
    pool: PoolOption = "",
    command_id: JobCommandIdOption = "",
    as_json: AsJson = False,
    directory: PoolsDirectory = Path("pools"),
) -> int:
    """Submit a job: a run, by its TOML file, or a script of yours with phases, by its command line behind `--`.

    What it asks for is in the file's [job] section. A script's file has [job], and of [run] its name and steps.

    Example: elastic jobs submit examples/jobs/one.toml --slo 1.5 --dry-run
    """
    script = _script_of(context)
    if slo is not None and not slo >= 1:
        raise ConfigError(f"--slo: found {slo:g}; allowed: at least 1, a step's time over that alone")
    if name and not re.fullmatch(JOB_NAME, name):
        raise ConfigError(f"--name: found {name!r}; allowed: letters, digits, dots, dashes and underscores")
    changes = with_seed(overrides or [], seed) + ([] if slo is None else [f"job.slo={slo}"])
    path = find_pool(pool, directory)
    of_pool = load_pool(path / POOL_CONFIG)
    run: Config | None = None
    environment: dict[str, str] = {}
    if script is None:
        run = _of_run(config, changes, names_in(providers), phases, trains_here=not of_pool.trains_elsewhere)
        steps, job, called = run.run.steps, run.job, name or run.run.name
        gpus = run.trainer.gpus, rollout_gpus(run)
        environment = named(*run.run.pass_env)
    else:
        settings = _of_script(config, changes, names_in(providers))
        steps, job, called = settings.run.steps, settings.job, name or Path(script[0]).name
        gpus = 1, 1
        environment = inherited(*settings.run.pass_env)
        if phases is not None:
            script = _with_phases(script, phases)
    control = PoolControl(path)
    found = asked(control.plan(job_request(called, job, steps, job.plan, *gpus)))
    if dry_run:
        _show_plan(found, path, as_json=as_json)
        return 0
    if run is not None:
        where = new_run_dir(_from_anywhere(run)).resolve()
        called = name or where.name
    else:
        where = Path.cwd()
        called = name or f"{called}-{time.strftime('%Y%m%d-%H%M%S')}"
    entry = JobEntry(
        job=called,
        directory=str(where),
        providers=tuple(names_in(providers)),
        script=script or (),
        phases=str(phases.resolve()) if phases is not None else "",
        environment=environment,
        max_restarts=job.max_restarts,
    )
    if of_pool.joins:
        try:
            files = script_files(where, job.files, phases) if run is None else run_files(run)
        except ConfigError:
            if run is not None:
                discard_run(where)
            raise
        outputs = job.outputs if run is None else ()
        entry = msgspec.structs.replace(entry, files=files, outputs=outputs)
    request = job_request(called, job, steps, job.plan, *gpus)
    command = SubmitJob(id=command_id or new_command_id(), request=request, entry=entry)
    try:
        answer = asyncio.run(control.submit(command))
    except RunSilent as error:
        say(f"error: {error}")
        say(f"hint: it may have been done; {program()} jobs list shows whether job {called} is there")
        return EXIT_FAILED
    except ControlError as error:
        if run is not None:
            discard_run(where)
        refused(error)
    if answer.repeated and run is not None:
        discard_run(where)
    placed = answer.placement or found
    if as_json:
        emit(
            {
                "job": called,
                "pool": path.name,
                "directory": str(where),
                "id": answer.id,
                "repeated": answer.repeated,
                "placement": msgspec.to_builtins(placed),
            }
        )
    elif answer.repeated:
        say(f"job {called} had been submitted before under this id")
    else:
        say(f"job {called} is submitted to pool {path.name}: {placement_words(placed)}")
        if script is not None and of_pool.trains_elsewhere:
            say(f"it writes its log where it trains: {_log_elsewhere(path, called)}")
            if job.outputs:
                say(f"its outputs come back to {path / OUTPUTS / called}, a directory for each placement")
        else:
            say(f"follow it with: {program()} jobs logs {called} -f")
    return 0


def _log_elsewhere(pool: Path, job: str) -> str:
    where = f"logs/script-{job}.log in nodes/{pool.name}-NODE of its training node's machine"
    return f"{where}; its end comes back every few seconds, for {program()} jobs logs"


def _script_of(context: typer.Context) -> tuple[str, ...] | None:
    """What stood behind `--`; None where there was none. Raises `ConfigError` for nothing behind it."""
    found: Any = context.meta.get(SCRIPT)
    if found is not None and not found:
        raise ConfigError("elastic jobs submit: nothing stands behind --; allowed: a command, such as python train.py")
    return found


def _of_run(
    config: Path | None, overrides: Sequence[str], providers: list[str], phases: Path | None, *, trains_here: bool
) -> Config:
    """Raises `ConfigError` for a run that could not be."""
    if config is None:
        raise ConfigError("elastic jobs submit: give a configuration file, or a command behind --")
    if phases is not None:
        raise ConfigError("--phases: is for a script, whose command stands behind --")
    found = load_config(config, overrides)
    plan = resolve(found, providers, str(config))
    check_live(plan, for_pool=True)
    check_policy(plan, trains_here=trains_here)
    return found


def _from_anywhere(config: Config) -> Config:
    """The same wherever the pool's processes are: with the places of the base policy and of data in full."""
    changed: dict[str, Any] = {
        "model": config.model.model_copy(update={"checkpoint": config.model.checkpoint.resolve()})
    }
    return config.with_mixture([_with_rows_in_full(one) for one in config.mixture]).model_copy(update=changed)


def _with_rows_in_full(environment: EnvironmentConfig) -> EnvironmentConfig:
    if (data := environment.data) is None:
        return environment
    where = data.source.resolve() if isinstance(data.source, Path) else data.source
    rows = data.model_copy(update={"source": where})
    return environment.model_copy(update={"data": rows})


def _of_script(config: Path | None, overrides: Sequence[str], providers: list[str]) -> ScriptConfig:
    """Raises `ConfigError` for a script that could not be."""
    if providers:
        raise ConfigError("--providers: a script has none besides the pool")
    raw: dict[str, Any] = {} if config is None else read_sections(config)
    for override in overrides:
        apply_override(raw, override)
    return validate(ScriptConfig, raw, str(config or "elastic jobs submit"))


def _with_phases(script: tuple[str, ...], phases: Path) -> tuple[str, ...]:
    """The script's command line, with its functions wrapped. Raises `ConfigError` for a phases file that cannot be."""
    from elastic.pool.phases.files import PhasesFileError, load_phases, wrapped
    from elastic.pool.phases.sources import check_sources

    try:
        check_sources(load_phases(phases), script, Path.cwd())
        return wrapped(script, phases.resolve())
    except PhasesFileError as error:
        raise ConfigError(f"--phases: {error}") from error


def placement_words(plan: PlacementPlan) -> str:
    """Where a job goes, at what marginal cost and planned slowdown."""
    place = plan.placement
    if place is None:
        return plan.why or "it is queued"
    if place.group is None:
        where = f"a group of its own ({place.new_rollout} rollout and {place.new_train} training nodes)"
    else:
        nodes = [*place.rollout, *([f"{place.new_rollout} more"] if place.new_rollout else [])]
        where = f"{place.group} with {', '.join(place.members)}, on {', '.join(nodes)} ({place.how})"
    return (
        f"{where}, ${place.usd_per_hour:.2f} an hour more, planned slowdown {place.planned_slowdown:.3f} of at "
        f"most {plan.slo:g} (cycle {place.cycle_s:.1f} s){_cold_words(plan)}"
    )


def _cold_words(plan: PlacementPlan) -> str:
    if not plan.cold_s:
        return ""
    when = "its first rollout" if plan.parks else "each rollout, as its engine cannot park"
    return f"; a cold start of {plan.cold_s:.1f} s is in {when}"


def _show_plan(plan: PlacementPlan, pool: Path, *, as_json: bool) -> None:
    if as_json:
        emit({"pool": pool.name, **msgspec.to_builtins(plan)})
        return
    shown = console()
    words = placement_words(plan)
    shown.print(f"{plan.job} would go to: {words}" if plan.placement else f"{plan.job}: {words}", highlight=False)
    if plan.refusals:
        rows = [(one.group, one.reason, f"{one.needed:.6g}", f"{one.allowed:.6g}") for one in plan.refusals]
        show_listing(("not to", "because of", "needed", "allowed"), rows, right=("needed", "allowed"))


@jobs.command("list")
def list_jobs(
    pool: PoolOption = "",
    everything: Annotated[bool, typer.Option("--all", help="Those that are over, too.")] = False,
    as_json: AsJson = False,
    directory: PoolsDirectory = Path("pools"),
) -> int:
    """List a pool's jobs, in the order in which they came.

    Example: elastic jobs list --all
    """
    path = find_pool(pool, directory)
    rows = asked(PoolControl(path).all_jobs(going_on=not everything))
    if as_json:
        emit({"pool": path.name, "jobs": msgspec.to_builtins(rows)})
    else:
        console().print(jobs_table(rows) if rows else f"no jobs in pool {path.name}", crop=False)
    return 0


async def job_of(control: PoolControl, name: str) -> JobStatus:
    """The job with this name, or the only one whose name has it in it. Raises `ConfigError` and `ControlError`."""
    if re.match(JOB_NAME, name) and (exactly := (await control.jobs(names=[name])).jobs):
        return exactly[0]
    alike = (await control.jobs(like=name, most=NAMED_MOST + 1)).jobs
    if len(alike) == 1:
        return alike[0]
    latest = alike or (await control.jobs(most=NAMED_MOST)).jobs
    there = ", ".join(job.name for job in reversed(latest[:NAMED_MOST])) or "none"
    which = "several jobs have it in their names" if alike else "the latest are"
    raise ConfigError(f"no job {name!r} in pool {control.directory.name}; {which}: {there}")


@jobs.command("show")
def show_job(
    name: JobName, pool: PoolOption = "", as_json: AsJson = False, directory: PoolsDirectory = Path("pools")
) -> int:
    """Show a job: where it is, what it waits for, how it came there, what it has cost.

    Example: elastic jobs show one
    """
    path = find_pool(pool, directory)
    job = asked(job_of(PoolControl(path), name))
    if as_json:
        emit({"pool": path.name, **msgspec.to_builtins(job)})
        return 0
    shown = console()
    slowdown = f"{job.planned_slowdown:.3f} of at most {job.slo:g}" if job.planned_slowdown else "–"
    rows = [
        ("job", job.name),
        ("state", f"{job.state}: {job.reason}"),
        ("now", doing(job)),
        ("directory", job.directory or "–"),
        ("steps", f"{job.steps_done} of {job.steps}"),
        ("group", job.group or "–"),
        ("nodes", ", ".join([*job.rollout, *job.train]) or "–"),
        ("planned slowdown", slowdown),
        ("cost so far", f"${job.usd:.4f}"),
        ("saved if it left", f"${job.saved_if_left_usd_per_hour:.2f} an hour"),
        ("moves, resubmissions", f"{job.moves}, {job.resubmissions}"),
    ]
    table = Table(box=None, show_header=False)
    for row in rows:
        table.add_row(*row)
    shown.print(table, highlight=False)
    for chapter in job.story:
        shown.print(f"  {chapter.at_s:>10.1f} s  {chapter.state}: {chapter.cause}", highlight=False)
    return 0


@jobs.command("logs")
def job_logs(
    name: JobName,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Wait for more until the job is over; Ctrl-C detaches.")
    ] = False,
    source: Annotated[str, typer.Option(help="Whose: `orchestrator`, `process`, a worker's name, …")] = "",
    tail: Tail = None,
    remote: Remote = False,
    pool: PoolOption = "",
    directory: PoolsDirectory = Path("pools"),
) -> int:
    """Print a job's log. With --remote JOB is its id on the server, and POOL a pool there.

    Example: elastic jobs logs one -f
    """
    from elastic.report.log_files import LogFollower, log_files

    if remote:
        return _print_hosted_logs(name, pool, source or "process", tail, follow=follow)
    at = find_pool(pool, directory)
    control = PoolControl(at)
    job = asked(job_of(control, name))
    logs = Path(job.logs or Path(job.directory) / "logs")
    source = source or ("orchestrator" if (logs / "orchestrator.log").is_file() else "script")
    path = logs / f"{source}.log"
    if source == "script" and not path.is_file() and load_pool(at / POOL_CONFIG).trains_elsewhere:
        bad_input(f"job {job.name} writes its log where it trains: {_log_elsewhere(at, job.name)}")
    if not path.is_file() and not follow:
        bad_input(f"--source: job {job.name} has no log {source!r}; there are: {', '.join(log_files(logs)) or 'none'}")
    follower = LogFollower(source, lambda: path.open("rb"))
    follower.seek("", tail)
    looked_s, over = time.monotonic(), not follow
    try:
        while True:
            lines = follower.read(over=over)
            for one in lines:
                typer.echo(one.line)
            if not lines:
                if over:
                    return 0
                if time.monotonic() - looked_s > 1.0:
                    looked_s = time.monotonic()
                    over = _is_over(control, job.name)
                time.sleep(0.1)
    except KeyboardInterrupt:
        return 0


def _print_hosted_logs(job: str, pool: str, source: str, tail: int | None, *, follow: bool) -> int:
    from elastic.cli.remote import server

    with server() as client, contextlib.suppress(KeyboardInterrupt):
        there = [pool] if pool else [one.id for one in client.pools()]
        if len(there) != 1:
            raise ConfigError(f"--pool: found none; allowed, of {client.url}: {', '.join(there) or 'none is there'}")
        for line in client.job_logs(there[0], job, source=source, tail=tail, follow=follow):
            typer.echo(line.line)
    return 0


def _is_over(control: PoolControl, job: str) -> bool:
    try:
        return asyncio.run(job_of(control, job)).over
    except (ControlError, ConfigError):
        return False


@jobs.command("wait")
def wait_for_job(
    name: JobName,
    timeout_s: Annotated[float | None, typer.Option(min=0, help="Give up after so long, with exit code 1.")] = None,
    pool: PoolOption = "",
    as_json: AsJson = False,
    directory: PoolsDirectory = Path("pools"),
) -> int:
    """Wait until a job is over; the exit code is 0 if it has finished, 3 if it was cancelled, else 1.

    Example: elastic jobs wait one
    """
    control = PoolControl(find_pool(pool, directory))
    began_s, heard_s, told = time.monotonic(), time.monotonic(), False
    job = asked(job_of(control, name))
    while not job.over:
        if timeout_s is not None and time.monotonic() - began_s > timeout_s:
            say(f"error: job {job.name} is not over after {timeout_s:g} s: {job.state}, {doing(job)}")
            return EXIT_FAILED
        time.sleep(POLL_S)
        try:
            job = asyncio.run(job_of(control, job.name))
            heard_s, told = time.monotonic(), False
        except (RunNotFound, RunSilent) as error:
            if time.monotonic() - heard_s > AWAY_S:
                say(f"error: {error}")
                return EXIT_FAILED
            if not told:
                say(f"{error}; waiting for it for up to {AWAY_S:g} s")
                told = True
        except KeyboardInterrupt:
            return EXIT_STOPPED
    if as_json:
        emit(msgspec.to_builtins(job))
    else:
        say(f"job {job.name}: {job.state} after {job.steps_done} of {job.steps} steps: {job.reason}")
    return {"finished": 0, "cancelled": EXIT_STOPPED}.get(job.state, EXIT_FAILED)


@jobs.command("cancel")
def cancel_job(
    name: JobName,
    pool: PoolOption = "",
    command_id: JobCommandIdOption = "",
    as_json: AsJson = False,
    directory: PoolsDirectory = Path("pools"),
) -> int:
    """Cancel a job: everything of it ends now.

    Example: elastic jobs cancel one
    """
    return _command("cancel", PoolControl.cancel, name, pool, directory, command_id, "is cancelled", as_json=as_json)


@jobs.command("resubmit")
def resubmit_job(
    name: JobName,
    pool: PoolOption = "",
    command_id: JobCommandIdOption = "",
    as_json: AsJson = False,
    directory: PoolsDirectory = Path("pools"),
) -> int:
    """Submit a job that has failed once more: it goes on from its last checkpoint.

    Example: elastic jobs resubmit one
    """
    words = "comes again, and goes on from its last checkpoint"
    return _command("resubmit", PoolControl.resubmit, name, pool, directory, command_id, words, as_json=as_json)


def _command(
    what: str,
    send: Callable[..., Any],
    name: str,
    pool: str,
    directory: Path,
    command_id: str,
    words: str,
    *,
    as_json: bool,
) -> int:
    control = PoolControl(find_pool(pool, directory))
    job = asked(job_of(control, name)).name
    command_id = command_id or new_command_id()
    answer = asked(send(control, job, command_id), command_id)
    if as_json:
        emit({"job": job, "command": what, "id": answer.id, "repeated": answer.repeated})
    say(f"job {job} {words}{' (as it was told before)' if answer.repeated else ''}")
    return 0


@jobs.command("profile")
@private()
def profile_job(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="The job's TOML file.", show_default=False)],
    overrides: Overrides = None,
    steps: Annotated[int, typer.Option(min=1, help="To be timed, besides a first one that does not count.")] = 2,
    as_json: AsJson = False,
) -> int:
    """Time a few steps of a job alone, on this machine, and print the plan that a pool would make of them: without one
    in the job's file a pool does this first.

    Example: elastic jobs profile examples/jobs/one.toml
    """
    settings, overrides = load_config(config, overrides or []), overrides or []
    with tempfile.TemporaryDirectory(prefix="elastic-profile-") as directory:
        changed = [*overrides, *profile_overrides(settings, steps + 1), f"run.directory='{directory}'"]
        plan = resolve(load_config(config, changed), [PROFILED_ON], str(config))
        check_live(plan)
        check_policy(plan)
        options = [word for change in changed for word in ("--set", change)]
        command = [
            sys.executable,
            "-m",
            "elastic.cli",
            "run",
            str(config),
            "--providers",
            PROFILED_ON,
            *options,
            "--json",
        ]
        ended = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, check=False)
        if ended.returncode:
            say(f"error: the steps of {config} could not be timed")
            return ended.returncode
        (run,) = DirectoryStore(Path(directory)).runs()
        try:
            found = plan_of_run(run, settings)
        except (JobProfileError, JournalError) as error:
            say(f"error: {error}")
            return EXIT_FAILED
    body = found.model_dump()
    if as_json:
        emit({"job": settings.run.name, "plan": body})
    else:
        where = "at the token limit" if settings.job.plan_quantile is None else f"at {settings.job.plan_quantile:g}"
        say(f"{settings.run.name}, {where}, from {steps} steps; of switching, a cold start alone is in it")
        typer.echo("[job]")
        typer.echo("plan = { " + ", ".join(f"{key} = {_shown(value)}" for key, value in body.items()) + " }")
    return 0


def _shown(value: float | bool) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value:.3g}"
