"""`elastic jobs`: jobs of a pool, as its process knows them."""

import asyncio
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import typer
from pydantic import BaseModel, ConfigDict, Field
from rich.table import Table

from elastic.cli.output import EXIT_FAILED, EXIT_STOPPED, bad_input, console, emit, program, say
from elastic.cli.pool import asked, doing, find_pool, jobs_table
from elastic.compose.job_profile import JobProfileError, plan_of_run, profile_overrides
from elastic.compose.plan import RunPlan, check_live, check_policy, resolve
from elastic.compose.pool_config import job_request
from elastic.compose.runs import discard_run, new_run_dir, private
from elastic.config import (
    Config,
    ConfigError,
    JobConfig,
    RunConfig,
    apply_override,
    load_config,
    read_sections,
    validate,
)
from elastic.pool.control_messages import JOB_NAME, PoolControl, SubmitJob
from elastic.pool.ports import JobEntry
from elastic.protocol.run_control import ControlError, RunNotFound, RunSilent, new_command_id
from elastic.report.log_files import LogFollower, log_files
from elastic.runtime.journal import DirectoryStore, JournalError
from elastic.system.processes import inherited

PROFILED_ON = "reserved"
"""The provider of workers on this machine that stay."""
POLL_S = 0.25
NAMED_MOST = 5
"""Jobs that a message names."""
AWAY_S = 60.0
"""So long a pool's process may be away while a job is waited for: its supervisor starts it again."""


class AskedJob(NamedTuple):
    """What `elastic jobs submit` is told. `script` is a command line; None for a run."""

    config: Path | None
    overrides: list[str]
    slo: float | None
    providers: list[str]
    name: str
    phases: Path | None
    script: tuple[str, ...] | None
    command_id: str


class ScriptConfig(BaseModel):
    """The file of a script's job: of a run's, what is not a matter of the script."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    run: RunConfig = Field(default_factory=RunConfig)  # type: ignore[arg-type]
    job: JobConfig


@private()
def submit_command(said: AskedJob, pool: str, directory: Path, *, dry_run: bool, as_json: bool) -> int:
    """Check the job as `elastic run` does, ask the pool where it would go, submit it; returns the exit code."""
    if said.slo is not None and not said.slo >= 1:
        raise ConfigError(f"--slo: found {said.slo:g}; allowed: at least 1, a step's time over that alone")
    if said.name and not re.fullmatch(JOB_NAME, said.name):
        raise ConfigError(f"--name: found {said.name!r}; allowed: letters, digits, dots, dashes and underscores")
    overrides = [*said.overrides, *([] if said.slo is None else [f"job.slo={said.slo}"])]
    if said.script is None:
        config, steps, job, plan = _of_run(said, overrides)
        environment = {}
    else:
        script = _of_script(said, overrides)
        if said.phases is not None:
            said = said._replace(script=_with_phases(said.script, said.phases))
        config, steps, job, plan = None, script.run.steps, script.job, None
        environment = inherited(*script.run.pass_env)
    if plan is not None:
        check_policy(plan)
    path = find_pool(pool, directory)
    control = PoolControl(path)
    name = said.name or (config.run.name if config is not None else Path(said.script[0]).name if said.script else "job")
    found = asked(control.plan(job_request(name, job, steps, job.plan)))
    if dry_run:
        _show_plan(found, path, as_json=as_json)
        return 0
    if config is not None:
        where = new_run_dir(_from_anywhere(config)).resolve()
        name = said.name or where.name
    else:
        where = Path.cwd()
        name = said.name or f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    command_id = said.command_id or new_command_id()
    entry = JobEntry(
        job=name,
        directory=str(where),
        providers=tuple(said.providers),
        script=said.script or (),
        phases=str(said.phases.resolve()) if said.phases is not None else "",
        environment=environment,
        max_restarts=job.max_restarts,
    )
    command = SubmitJob(id=command_id, request=job_request(name, job, steps, job.plan), entry=entry)
    try:
        answer = asyncio.run(control.submit(command))
    except RunSilent as error:
        say(f"error: {error}")
        say(f"hint: it may have been done; {program()} jobs list shows whether job {name} is there")
        return EXIT_FAILED
    except ControlError as error:
        if config is not None:
            discard_run(where)
        return asked(_raised(error))
    if answer.repeated and config is not None:
        discard_run(where)
    placed = answer.placement or found
    if as_json:
        emit(
            {
                "job": name,
                "pool": path.name,
                "directory": str(where),
                "id": answer.id,
                "repeated": answer.repeated,
                "placement": placed,
            }
        )
    elif answer.repeated:
        say(f"job {name} had been submitted before under this id")
    else:
        say(f"job {name} is submitted to pool {path.name}: {placement_words(placed)}")
        say(f"follow it with: {program()} jobs logs {name} -f")
    return 0


async def _raised(error: ControlError) -> int:
    raise error


def _of_run(said: AskedJob, overrides: Sequence[str]) -> tuple[Config, int, JobConfig, RunPlan]:
    """Raises `ConfigError` for a run that could not be."""
    if said.config is None:
        raise ConfigError("elastic jobs submit: give a configuration file, or a command behind --")
    if said.phases is not None:
        raise ConfigError("--phases: is for a script, whose command stands behind --")
    config = load_config(said.config, overrides)
    plan = resolve(config, said.providers, str(said.config))
    check_live(plan)
    return config, config.run.steps, config.job, plan


def _from_anywhere(config: Config) -> Config:
    """The same wherever the pool's processes are: with the base policy's place in full."""
    model = config.model.model_copy(update={"checkpoint": config.model.checkpoint.resolve()})
    return config.model_copy(update={"model": model})


def _of_script(said: AskedJob, overrides: Sequence[str]) -> ScriptConfig:
    """Raises `ConfigError` for a script that could not be."""
    if said.providers:
        raise ConfigError("--providers: a script has none besides the pool")
    raw: dict[str, Any] = {} if said.config is None else read_sections(said.config)
    for override in overrides:
        apply_override(raw, override)
    return validate(ScriptConfig, raw, str(said.config or "elastic jobs submit"))


def _with_phases(script: tuple[str, ...], phases: Path) -> tuple[str, ...]:
    """The script's command line, with its functions wrapped. Raises `ConfigError` for a phases file that cannot be."""
    from elastic.pool.phases.files import PhasesFileError, load_phases, wrapped
    from elastic.pool.phases.sources import check_sources

    try:
        check_sources(load_phases(phases), script, Path.cwd())
        return wrapped(script, phases.resolve())
    except PhasesFileError as error:
        raise ConfigError(f"--phases: {error}") from error


def placement_words(plan: dict[str, Any]) -> str:
    """Where a job goes, at what marginal cost and planned slowdown."""
    place = plan.get("placement")
    if place is None:
        return plan.get("why", "") or "it is queued"
    if place["group"] is None:
        where = f"a group of its own ({place['new_rollout']} rollout and {place['new_train']} training nodes)"
    else:
        nodes = [*place["rollout"], *([f"{place['new_rollout']} more"] if place["new_rollout"] else [])]
        where = f"{place['group']} with {', '.join(place['members'])}, on {', '.join(nodes)} ({place['how']})"
    return (
        f"{where}, ${place['usd_per_hour']:.2f} an hour more, planned slowdown {place['planned_slowdown']:.3f} of at "
        f"most {plan['slo']:g} (cycle {place['cycle_s']:.1f} s)"
    )


def _show_plan(plan: dict[str, Any], pool: Path, *, as_json: bool) -> None:
    if as_json:
        emit({"pool": pool.name, **plan})
        return
    shown = console()
    words = placement_words(plan)
    shown.print(
        f"{plan['job']} would go to: {words}" if plan["placement"] else f"{plan['job']}: {words}", highlight=False
    )
    if plan["refusals"]:
        table = Table(box=None, header_style="dim")
        for column, side in (("not to", "left"), ("because of", "left"), ("needed", "right"), ("allowed", "right")):
            table.add_column(column, justify="right" if side == "right" else "left")
        for one in plan["refusals"]:
            table.add_row(one["group"], one["reason"], f"{one['needed']:.6g}", f"{one['allowed']:.6g}")
        shown.print(table)


def list_command(pool: str, directory: Path, *, everything: bool, as_json: bool) -> int:
    path = find_pool(pool, directory)
    rows = asked(PoolControl(path).all_jobs(going_on=not everything))
    if as_json:
        emit({"pool": path.name, "jobs": rows})
    else:
        console().print(jobs_table(rows) if rows else f"no jobs in pool {path.name}", crop=False)
    return 0


async def job_of(control: PoolControl, name: str) -> dict[str, Any]:
    """The job with this name, or the only one whose name has it in it. Raises `ConfigError` and `ControlError`."""
    if re.match(JOB_NAME, name) and (exactly := (await control.jobs(names=[name])).jobs):
        return exactly[0]
    alike = (await control.jobs(like=name, most=NAMED_MOST + 1)).jobs
    if len(alike) == 1:
        return alike[0]
    latest = alike or (await control.jobs(most=NAMED_MOST)).jobs
    there = ", ".join(job["name"] for job in reversed(latest[:NAMED_MOST])) or "none"
    which = "several jobs have it in their names" if alike else "the latest are"
    raise ConfigError(f"no job {name!r} in pool {control.directory.name}; {which}: {there}")


def show_command(name: str, pool: str, directory: Path, *, as_json: bool) -> int:
    path = find_pool(pool, directory)
    job = asked(job_of(PoolControl(path), name))
    if as_json:
        emit({"pool": path.name, **job})
        return 0
    shown = console()
    slowdown = f"{job['planned_slowdown']:.3f} of at most {job['slo']:g}" if job["planned_slowdown"] else "–"
    rows = [
        ("job", job["name"]),
        ("state", f"{job['state']}: {job['reason']}"),
        ("now", doing(job)),
        ("directory", str(job.get("directory", "–"))),
        ("steps", f"{job['steps_done']} of {job['steps']}"),
        ("group", job["group"] or "–"),
        ("nodes", ", ".join([*job["rollout"], *job["train"]]) or "–"),
        ("planned slowdown", slowdown),
        ("cost so far", f"${job['usd']:.4f}"),
        ("saved if it left", f"${job['saved_if_left_usd_per_hour']:.2f} an hour"),
        ("moves, resubmissions", f"{job['moves']}, {job['resubmissions']}"),
    ]
    table = Table(box=None, show_header=False)
    for row in rows:
        table.add_row(*row)
    shown.print(table, highlight=False)
    for chapter in job["story"]:
        shown.print(f"  {chapter['at_s']:>10.1f} s  {chapter['state']}: {chapter['cause']}", highlight=False)
    return 0


def logs_command(name: str, pool: str, directory: Path, source: str, tail: int | None, *, follow: bool) -> int:
    control = PoolControl(find_pool(pool, directory))
    job = asked(job_of(control, name))
    logs = Path(job.get("logs") or Path(str(job.get("directory", ""))) / "logs")
    source = source or ("orchestrator" if (logs / "orchestrator.log").is_file() else "script")
    path = logs / f"{source}.log"
    if not path.is_file() and not follow:
        bad_input(
            f"--source: job {job['name']} has no log {source!r}; there are: {', '.join(log_files(logs)) or 'none'}"
        )
    follower = LogFollower(source, lambda: path.open("rb"))
    follower.seek("", tail)
    looked_s, over = time.monotonic(), not follow
    try:
        while True:
            lines = follower.read()
            for one in lines:
                typer.echo(one.line)
            if not lines:
                if over:
                    return 0
                if time.monotonic() - looked_s > 1.0:
                    looked_s = time.monotonic()
                    over = _is_over(control, job["name"])
                time.sleep(0.1)
    except KeyboardInterrupt:
        return 0


def _is_over(control: PoolControl, job: str) -> bool:
    try:
        return bool(asyncio.run(job_of(control, job))["over"])
    except (ControlError, ConfigError):
        return False


def wait_command(name: str, pool: str, directory: Path, timeout_s: float | None, *, as_json: bool) -> int:
    control = PoolControl(find_pool(pool, directory))
    began_s, heard_s, told = time.monotonic(), time.monotonic(), False
    job = asked(job_of(control, name))
    while not job["over"]:
        if timeout_s is not None and time.monotonic() - began_s > timeout_s:
            say(f"error: job {job['name']} is not over after {timeout_s:g} s: {job['state']}, {doing(job)}")
            return EXIT_FAILED
        time.sleep(POLL_S)
        try:
            job = asyncio.run(job_of(control, job["name"]))
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
        emit(job)
    else:
        say(f"job {job['name']}: {job['state']} after {job['steps_done']} of {job['steps']} steps: {job['reason']}")
    return {"finished": 0, "cancelled": EXIT_STOPPED}.get(job["state"], EXIT_FAILED)


def cancel_command(name: str, pool: str, directory: Path, command_id: str, *, as_json: bool) -> int:
    return _command("cancel", PoolControl.cancel, name, pool, directory, command_id, "is cancelled", as_json=as_json)


def resubmit_command(name: str, pool: str, directory: Path, command_id: str, *, as_json: bool) -> int:
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
    job = str(asked(job_of(control, name))["name"])
    command_id = command_id or new_command_id()
    answer = asked(send(control, job, command_id), command_id)
    if as_json:
        emit({"job": job, "command": what, "id": answer.id, "repeated": answer.repeated})
    say(f"job {job} {words}{' (as it was told before)' if answer.repeated else ''}")
    return 0


@private()
def profile_command(path: Path, overrides: list[str], steps: int, *, as_json: bool) -> int:
    """Run a few steps in a directory of their own, which is gone afterwards; returns the exit code."""
    config = load_config(path, overrides)
    with tempfile.TemporaryDirectory(prefix="elastic-profile-") as directory:
        changed = [*overrides, *profile_overrides(config, steps + 1), f"run.directory='{directory}'"]
        plan = resolve(load_config(path, changed), [PROFILED_ON], str(path))
        check_live(plan)
        check_policy(plan)
        options = [word for change in changed for word in ("--set", change)]
        command = [
            sys.executable,
            "-m",
            "elastic.cli",
            "run",
            str(path),
            "--providers",
            PROFILED_ON,
            *options,
            "--json",
        ]
        ended = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, check=False)
        if ended.returncode:
            say(f"error: the steps of {path} could not be timed")
            return ended.returncode
        (run,) = DirectoryStore(Path(directory)).runs()
        try:
            found = plan_of_run(run, config)
        except (JobProfileError, JournalError) as error:
            say(f"error: {error}")
            return EXIT_FAILED
    body = found.model_dump()
    if as_json:
        emit({"job": config.run.name, "plan": body})
    else:
        where = "at the token limit" if config.job.plan_quantile is None else f"at {config.job.plan_quantile:g}"
        say(f"{config.run.name}, {where}, from {steps} steps; what switching takes is not in it")
        typer.echo("[job]")
        typer.echo("plan = { " + ", ".join(f"{key} = {value:.3g}" for key, value in body.items()) + " }")
    return 0
