"""`elastic run` and `elastic prepare`: display around the composition root."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from elastic.cli.capacity import vendor_prices
from elastic.cli.output import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_STOPPED, bad_input, console, emit, program, say
from elastic.cli.progress import ProgressDisplay, bar
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
from elastic.compose.preparation import Prepared, prepare
from elastic.compose.processes import run_loop
from elastic.compose.reference import changed
from elastic.compose.runs import discard_run, new_run_dir, private
from elastic.compose.scheduling import short_limits
from elastic.config import Config
from elastic.core.controls import BUDGET_EXHAUSTED
from elastic.runtime.journal import INTERRUPTED, RUNNING, JournalError, RunDirectory
from elastic.runtime.loop_watch import LoopWatch
from elastic.runtime.orchestrator import Orchestrator
from elastic.system.logs import STANDARD_ERROR, log_to
from elastic.system.outages import EXIT_OUTAGE, Outage
from elastic.system.signals import TERMINATION_OR_HANGUP, act_on

PREPARED = {
    Prepared.MADE: "made",
    Prepared.THERE: "is there already",
    Prepared.OF_OTHER_SETTINGS: "is there already, made for other environment.settings or by another version; "
    "used as it is, unless --force makes it anew",
}


def dry_run_command(config: Config, names: list[str], where: str, *, as_json: bool) -> None:
    plan = resolve(config, names, where)
    check_live(plan)
    check_policy(plan)
    asked_usd, unpriced = vendor_prices(plan)
    rows, calls = acquisitions(plan, asked_usd), reward_calls(plan)
    warnings = [*short_limits(config), *unpriced]
    for warning in warnings:
        say(f"warning: {warning}")
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
    table = Table(title="would acquire, at most", title_justify="left", box=None, header_style="dim")
    for column in ("provider", "workers", "GPUs each", "$/GPU-hour", "$/hour"):
        table.add_column(column, justify="left" if column == "provider" else "right")
    for row in rows:
        table.add_row(
            row.provider,
            str(row.max_workers),
            str(row.gpus_per_worker),
            *("not known" if usd is None else f"{usd:.2f}" for usd in (row.usd_per_gpu_hour, row.usd_per_hour_max)),
        )
    shown.print(table)
    if calls is not None:
        shown.print(
            f"rewards by {calls.function}, at most {calls.concurrency} calls at once: "
            f"${calls.usd_per_s:g} a second and ${calls.usd_per_call:g} a call"
        )


@private()
def run_command(config: Config, names: list[str], where: str, resumed: Path | None, *, as_json: bool) -> int:
    """Run to the end and report; returns the exit code."""
    plan = resolve(config, names, where)
    past = past_incarnations(RunDirectory(resumed)) if resumed else PastIncarnations()
    if resumed and past.status == "finished" and past.steps_done >= config.run.steps:
        say(f"all {past.steps_done} steps of {resumed} are done; --set run.steps=N asks for more")
        conclude(resumed, as_json=as_json)
        return 0
    check_live(plan)
    if past.status != RUNNING:  # Of a process that died; what it began with has been checked.
        # A pool's job does not have seconds at its start, where its trainer says the same.
        check_policy(plan, None if plan.shared else resumed)
    run_dir = resumed or new_run_dir(config)
    progress = ProgressDisplay(console(stderr=True))
    go_on = f"go on with: {program()} run --resume {run_dir}"
    try:
        with _logging_to(run_dir / "logs" / "orchestrator.log"), progress.context:
            outcome = run_loop(_execute(plan, run_dir, resume=resumed is not None, progress=progress))
    except CANNOT_BEGIN as error:
        if not resumed:
            discard_run(run_dir)
        elif isinstance(error, Outage):
            say(f"error: {error}")
            say(f"hint: this may pass, and the run is as it was; go on with: {program()} run --resume {run_dir}")
            return EXIT_OUTAGE
        bad_input(str(error))
    except JournalError as error:
        say(f"error: the run failed: {error}")
        return EXIT_FAILED
    except SystemExit as ended:
        say(f"error: the run failed: a task that an environment has started raised SystemExit: {ended.code}; {go_on}")
        return EXIT_FAILED
    try:
        conclude(run_dir, as_json=as_json)
    except (JournalError, OSError) as error:
        say(f"warning: no report could be written: {error}")
    if outcome.interrupted:
        say(f"interrupted; {go_on.replace('go on', 'goes on', 1)}")
        return EXIT_INTERRUPTED
    if outcome.failed:
        say(f"error: the run failed: {outcome.failed}")
        say(f"hint: logs are in {run_dir / 'logs'}; {go_on}")
        return EXIT_FAILED
    if outcome.stopped:
        more = " --budget-usd USD" if outcome.stopped.startswith(BUDGET_EXHAUSTED) else ""
        say(f"stopped: {outcome.stopped}; {go_on}{more}")
        return EXIT_STOPPED
    return 0


async def _execute(plan: RunPlan, run_dir: Path, *, resume: bool, progress: ProgressDisplay) -> RunOutcome:
    def stop_on_signals(orchestrator: Orchestrator) -> None:
        signals = iter((_stop, _kill))

        def act() -> None:
            next(signals, _kill)(orchestrator, progress)

        act_on(TERMINATION_OR_HANGUP, act, watch.told_to_end)

    watch = LoopWatch(progress.say)
    with watch.watching():
        return await execute(plan, run_dir, resume=resume, observe=progress.observe, on_ready=stop_on_signals)


def _stop(orchestrator: Orchestrator, progress: ProgressDisplay) -> None:
    orchestrator.stop(INTERRUPTED)
    progress.say("stopping: workers hand over what they have; once more kills them at once")


def _kill(orchestrator: Orchestrator, progress: ProgressDisplay) -> None:
    orchestrator.kill(INTERRUPTED)
    progress.say("killing everything")


def conclude(run_dir: Path, *, as_json: bool) -> None:
    """The closing table and the report's path; with `--json` the same as one object."""
    # A run that is taken up is waited for, and has no report to write yet.
    from elastic.report import as_json as report_as_json
    from elastic.report import causes, closing_table, summarise, write_html

    summary = summarise(RunDirectory(run_dir))
    path = run_dir / "report.html"
    write_html(summary, path)
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


def prepare_command(config: Config, where: str, *, force: bool) -> None:
    plan = resolve(config, [], where)
    with bar("base policy") as show:
        prepared = prepare(plan, lambda done, total, _: show(done, total, ""), force=force)
    say(f"{config.model.checkpoint}: {PREPARED[prepared]}")
