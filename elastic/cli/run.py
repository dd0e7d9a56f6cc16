"""`elastic run` and `elastic prepare`: options, and display around the composition root."""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from elastic.cli.capacity import vendor_prices
from elastic.cli.options import (
    AsJson,
    BudgetOption,
    Overrides,
    RunFile,
    names_in,
    refuse_all_but,
    with_budget,
    with_seed,
)
from elastic.cli.output import (
    EXIT_BAD_INPUT,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_STOPPED,
    bad_input,
    console,
    emit,
    program,
    say,
)
from elastic.cli.progress import ProgressDisplay, bar
from elastic.cli.supervise import supervise_run
from elastic.cli.tables import show_listing
from elastic.cli.track import check_logging
from elastic.compose.agents import check_front
from elastic.compose.containers import check_env_workers, container_words
from elastic.compose.evaluation import check_evaluation
from elastic.compose.execution import CANNOT_BEGIN, RunOutcome, execute
from elastic.compose.incarnations import PastIncarnations, past_incarnations
from elastic.compose.plan import (
    Acquisition,
    RewardCalls,
    RunPlan,
    acquisitions,
    check_live,
    check_policy,
    resolve,
    reward_calls,
)
from elastic.compose.preparation import Prepared
from elastic.compose.preparation import prepare as prepare_policy
from elastic.compose.processes import run_loop
from elastic.compose.reference import changed
from elastic.compose.runs import discard_run, load_run_config, new_run_dir, private
from elastic.compose.scheduling import short_limits
from elastic.config import Config, ConfigError, RunConfig, apply_override, load_config, validate
from elastic.core.controls import BUDGET_EXHAUSTED
from elastic.pool.client import TRAINS_VARIABLE
from elastic.protocol.endpoint import Address
from elastic.protocol.run_control import SERVED_VARIABLE
from elastic.runtime.journal import INTERRUPTED, RUNNING, DirectoryStore, JournalError, RunDirectory
from elastic.runtime.loop_watch import LoopWatch
from elastic.runtime.orchestrator import Orchestrator
from elastic.system.logs import STANDARD_ERROR, log_to
from elastic.system.outages import EXIT_OUTAGE, Outage
from elastic.system.signals import TERMINATION_OR_HANGUP, act_on

if TYPE_CHECKING:
    from elastic.report.summary import Summary


PREPARED = {
    Prepared.MADE: "made",
    Prepared.THERE: "is there already",
    Prepared.OF_OTHER_SETTINGS: "is there already, made for other environment.settings or by another version; "
    "used as it is, unless --force makes it anew",
}


def run(
    context: typer.Context,
    config: RunFile = None,
    providers: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES", help="Comma-separated: serving,spot. Without any, the trainer's own device does all."
        ),
    ] = None,
    overrides: Overrides = None,
    seed: Annotated[int | None, typer.Option(help="Same as --set run.seed=N.")] = None,
    listen: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT",
            help="Where workers join, such as 0.0.0.0:7433; beyond loopback by TLS, and weights by HTTPS, one port up.",
        ),
    ] = "",
    advertise: Annotated[
        str, typer.Option(metavar="HOST[:PORT]", help="Where workers elsewhere dial to get there.")
    ] = "",
    resume: Annotated[
        str,
        typer.Option(
            metavar="RUN",
            help="Go on with a run (its name, its path or `latest`) from its journal, or if it had ended from its last "
            "checkpoint, with its configuration and providers; CONFIG then only says where runs are kept.",
        ),
    ] = "",
    supervised: Annotated[
        bool, typer.Option("--supervise", help="Start the orchestrator again when it dies, and go on with the run.")
    ] = False,
    max_restarts: Annotated[int, typer.Option(min=0, help="How often, with --supervise.")] = 10,
    budget_usd: BudgetOption = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Show the resolved configuration and what would be acquired; start nothing."),
    ] = False,
    remote: Annotated[
        bool, typer.Option("--remote", help="Run on the server of `elastic api login`, and follow it; Ctrl-C detaches.")
    ] = False,
    detach: Annotated[bool, typer.Option("--detach", "-d", help="With --remote: submit, and do not follow.")] = False,
    as_json: AsJson = False,
) -> int:
    """Train a policy, with rollouts on borrowed and preemptible capacity.

    Example: elastic run examples/frozenlake.toml --providers serving,spot
    """
    overrides = overrides or []
    if remote:
        from elastic.cli.submission import submit

        allowed = ("CONFIG", "--providers", "--set", "--seed", "--budget-usd", "--dry-run", "--detach", "--json")
        refuse_all_but(context, "--remote", *allowed)
        if config is None:
            raise ConfigError(
                "elastic run --remote: give a configuration file; `elastic runs resume RUN` goes on with a run"
            )
        overrides = with_seed(with_budget(overrides, budget_usd), seed)
        return submit(config, names_in(providers), overrides, dry_run=dry_run, detach=detach, as_json=as_json)
    if detach:
        raise ConfigError("elastic run: --detach is for --remote")
    overrides = with_budget([*overrides, *_listening(listen, advertise)], budget_usd)
    settings, run_dir, names = run_settings(config, providers, overrides, seed, resume)
    where = str(config or run_dir)
    if dry_run:
        show_dry_run(settings, names, where, as_json=as_json)
        return 0
    if supervised:
        options = [word for change in with_seed(overrides, seed) for word in ("--set", change)]
        options += ["--json"] if as_json else []
        return supervise_run(settings, names, where, run_dir, options, max_restarts)
    return _run(settings, names, where, run_dir, as_json=as_json)


def _listening(listen: str, advertise: str) -> list[str]:
    """Return the settings of --listen and --advertise."""
    found = [f"run.advertise='{advertise}'"] if advertise else []
    if listen:
        try:
            host, port = Address.parse(listen)
        except ValueError as error:
            raise ConfigError(f"--listen: {error}, such as 0.0.0.0:7433 or [::]:7433") from None
        found += [f"run.host='{host}'", f"run.port={port}"]
    return found


def run_settings(
    config: Path | None, providers: str | None, overrides: list[str], seed: int | None, resume: str
) -> tuple[Config, Path | None, list[str]]:
    """The configuration, the directory of the run to resume (if any), and the providers' names."""
    overrides, names = with_seed(overrides, seed), names_in(providers)
    if resume:
        run = DirectoryStore(_kept_in(config, overrides)).find(resume)
        if providers is None:
            names = list(past_incarnations(run).providers)
        return load_run_config(run.path, overrides), run.path, names
    if config is None:
        raise ConfigError("elastic run: give a configuration file, or --resume RUN")
    return load_config(config, overrides), None, names


def _kept_in(config: Path | None, overrides: list[str]) -> Path:
    """Return the directory of runs: the last one on the command line, else the configuration's."""
    said = [override for override in overrides if override.partition("=")[0].strip() == "run.directory"]
    if config:
        return load_config(config, said).run.directory
    raw: dict[str, dict[str, object]] = {"run": {}}
    for override in said:
        apply_override(raw, override)
    return validate(RunConfig, raw["run"], "--set", "run").directory


def show_dry_run(config: Config, names: list[str], where: str, *, as_json: bool) -> None:
    plan = resolve(config, names, where)
    check_live(plan)
    check_policy(plan)
    check_front(plan)
    check_evaluation(plan.config, where)
    check_env_workers(plan)
    check_logging(config)
    asked_usd, unpriced = vendor_prices(plan)
    rows, calls = acquisitions(plan, asked_usd), reward_calls(plan)
    warnings = [*short_limits(config), *unpriced]
    for warning in warnings:
        say(f"warning: {warning}")
    for words in container_words(config):
        say(words)
    show_plan(plan.resolved(), rows, calls, warnings, as_json=as_json)


def show_plan(
    resolved: dict[str, Any],
    rows: list[Acquisition],
    calls: RewardCalls | None,
    warnings: list[str],
    *,
    as_json: bool,
) -> None:
    """What a run would be, and what it would hold and cost at most."""
    if as_json:
        emit({"config": resolved, "would_acquire": rows, "would_call": calls, "warnings": warnings})
        return
    shown = console()
    shown.print("what differs from the defaults:", highlight=False)
    for key, value in changed(resolved).items():
        shown.print(f"  {key} = {json.dumps(value, ensure_ascii=False)}", soft_wrap=True, highlight=False)
    shown.print("all of it:", highlight=False)
    shown.print_json(data=resolved)
    shown.print("would acquire, at most:", highlight=False)
    figures = ("workers", "GPUs each", "$/GPU-hour", "$/hour")
    cells = [
        (
            row.provider,
            str(row.max_workers),
            str(row.gpus_per_worker),
            *("not known" if usd is None else f"{usd:.2f}" for usd in (row.usd_per_gpu_hour, row.usd_per_hour_max)),
        )
        for row in rows
    ]
    show_listing(("provider", *figures), cells, right=figures)
    if calls is not None:
        shown.print(
            f"rewards by {calls.function}, at most {calls.concurrency} calls at once: "
            f"${calls.usd_per_s:g} a second and ${calls.usd_per_call:g} a call"
        )


@private()
def _run(config: Config, names: list[str], where: str, resumed: Path | None, *, as_json: bool) -> int:
    """Run to the end and report; returns the exit code."""
    plan = resolve(config, names, where)
    past = past_incarnations(RunDirectory(resumed)) if resumed else PastIncarnations()
    if resumed and past.status == "finished" and past.steps_done >= config.run.steps:
        say(f"all {past.steps_done} steps of {resumed} are done; --set run.steps=N asks for more")
        conclude(resumed, as_json=as_json)
        return 0
    check_taken_up(plan, where, resumed, past)
    run_dir = resumed or new_run_dir(config)
    return carry_out(plan, run_dir, resume=resumed is not None, then=lambda: conclude(run_dir, as_json=as_json))


def check_taken_up(plan: RunPlan, where: str, resumed: Path | None, past: PastIncarnations) -> None:
    """As `check_run`, for a run that may have had other processes. Of one that died what it began with has been
    checked; a pool's job does not have seconds at its start, where its trainer says the same."""
    if past.status == RUNNING:
        check_live(plan)
        check_logging(plan.config)
    else:
        check_run(plan, where, None if plan.in_turns else resumed)


def check_run(plan: RunPlan, where: str, resumed: Path | None = None) -> None:
    """Everything that can be checked before a run begins. Raises `ConfigError`."""
    check_live(plan)
    check_policy(plan, resumed, trains_here=not os.environ.get(TRAINS_VARIABLE))
    check_front(plan)
    check_evaluation(plan.config, where)
    check_env_workers(plan)
    check_logging(plan.config)


def carry_out(
    plan: RunPlan, run_dir: Path, *, resume: bool, then: Callable[[], object] = lambda: None, command: str = "run"
) -> int:
    """Carry out a run; returns the exit code. `then` tells what it has come to. `command` takes it up."""
    progress = ProgressDisplay(console(stderr=True))
    logs, go_on = _what_next(run_dir, command)
    try:
        with _logging_to(run_dir / "logs" / "orchestrator.log"), progress.context:
            outcome = run_loop(_execute(plan, run_dir, resume=resume, progress=progress))
    except CANNOT_BEGIN as error:
        if not resume:
            discard_run(run_dir)
        elif isinstance(error, Outage):
            say(f"error: {error}")
            say(f"hint: this may pass, and the run is as it was; {go_on}")
            return EXIT_OUTAGE
        bad_input(str(error))
    except JournalError as error:
        say(f"error: the run failed: {error}")
        say(f"hint: what is in its journal is kept; once that can be written again, {go_on}")
        return EXIT_FAILED
    except SystemExit as ended:
        say(f"error: the run failed: a task that an environment has started raised SystemExit: {ended.code}; {go_on}")
        return EXIT_FAILED
    try:
        then()
    except (JournalError, OSError) as error:
        say(f"warning: no report could be written: {error}")
    return tell_end(outcome, logs, go_on)


def _what_next(run_dir: Path, command: str) -> tuple[str, str]:
    """Where the run's logs are, and what takes it up; of a server's run in words for whom the server tells them."""
    if SERVED_VARIABLE in os.environ:
        return what_next_remotely(run_dir.name)
    return f"logs are in {run_dir / 'logs'}", f"go on with: {program()} {command} --resume {run_dir}"


def what_next_remotely(run: str) -> tuple[str, str]:
    """What shows the logs of a server's run, and what takes it up."""
    return f"its logs: elastic logs {run}", f"go on with: elastic runs resume {run}"


def tell_end(outcome: RunOutcome, logs: str, go_on: str) -> int:
    """Say how the run has ended; returns the exit code."""
    if outcome.interrupted:
        say(f"interrupted; {go_on.replace('go on', 'goes on', 1)}")
        return EXIT_INTERRUPTED
    if outcome.failed:
        say(f"error: {'' if outcome.bad_input else 'the run failed: '}{outcome.failed}")
        say(f"hint: {logs}; {go_on}")
        return EXIT_BAD_INPUT if outcome.bad_input else EXIT_FAILED
    if outcome.stopped:
        more = " --budget-usd USD" if outcome.stopped.startswith(BUDGET_EXHAUSTED) else ""
        say(f"stopped: {outcome.stopped}; {go_on}{more}")
        return EXIT_STOPPED
    if outcome.ended_early:
        say(f"ended before its last step, as evaluation.stop_when says: {outcome.ended_early}")
    return 0


async def _execute(plan: RunPlan, run_dir: Path, *, resume: bool, progress: ProgressDisplay) -> RunOutcome:
    def stop_on_signals(orchestrator: Orchestrator) -> None:
        signals = iter((_stop, _kill))

        def act() -> None:
            next(signals, _kill)(orchestrator, progress)

        act_on(TERMINATION_OR_HANGUP, act, watch.told_to_end)

    def tell_agents(url: str) -> None:
        if (doors := plan.config.doors) is not None:
            at, names = url.removesuffix("/v1"), ", ".join(doors.names)
            keys = f"{program()} agents key --control {run_dir}"
            progress.say(
                f"trainers ({names}): {at}, with the key of: {keys}, and weights below {', '.join(doors.roots)}"
            )
            return
        progress.say(f"agents: OPENAI_BASE_URL={url}, with the key of: {program()} agents key {run_dir}")

    watch = LoopWatch(progress.say, plan.config.scheduler.plug_in_timeout_s)
    with watch.watching():
        return await execute(
            plan,
            run_dir,
            resume=resume,
            observe=progress.observe,
            on_ready=stop_on_signals,
            on_agents=tell_agents,
        )


def _stop(orchestrator: Orchestrator, progress: ProgressDisplay) -> None:
    orchestrator.stop(INTERRUPTED)
    progress.say("stopping: workers hand over what they have; once more kills them at once")


def _kill(orchestrator: Orchestrator, progress: ProgressDisplay) -> None:
    orchestrator.kill(INTERRUPTED)
    progress.say("killing everything")


def write_report(run_dir: Path) -> "tuple[Summary, Path]":
    """Write what a run has come to as a page in its directory. Raises `JournalError`, and `OSError`."""
    from elastic.report import inspect_logs, summarise, write_html
    from elastic.report.texts import told_samples

    run = RunDirectory(run_dir)
    summary, path = summarise(run), run_dir / "report.html"
    write_html(summary, path, chosen=told_samples(run), logs=inspect_logs(run_dir))
    return summary, path


def conclude(run_dir: Path, *, as_json: bool) -> None:
    """The closing table and the report's path; with `--json` the same as one object."""
    # A run that is taken up is waited for, and has no report to write yet.
    from elastic.report import as_json as report_as_json
    from elastic.report import causes, closing_table

    summary, path = write_report(run_dir)
    if as_json:
        emit(report_as_json(summary) | {"report": str(path)})
    else:
        shown = console()
        shown.print(closing_table(summary))
        for cause in causes(summary):
            shown.print(cause, soft_wrap=isinstance(cause, Text))
        shown.print(f"report: {path}", soft_wrap=True, highlight=False)


@contextmanager
def _logging_to(path: Path) -> Iterator[None]:
    """Logs go to the run's own file, out of the way of the display."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab", buffering=0) as file:
        log_to(file.fileno())
        try:
            yield
        finally:
            log_to(STANDARD_ERROR)


def prepare(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="The run's TOML file.", show_default=False)],
    overrides: Overrides = None,
    force: Annotated[bool, typer.Option("--force", help="Make it again, even if it exists.")] = False,
) -> None:
    """Make an example's base policy by a short supervised warm-up, once.

    Example: elastic prepare examples/frozenlake.toml
    """
    plan = resolve(load_config(config, overrides or []), [], str(config))
    checkpoint = plan.config.model.checkpoint
    with bar("base policy") as show:
        prepared = prepare_policy(
            plan,
            lambda done, total, _: show(done, total, ""),
            begins=lambda takes: say(f"{checkpoint}: is being made, which takes {takes}"),
            force=force,
        )
    say(f"{checkpoint}: {PREPARED[prepared]}")
