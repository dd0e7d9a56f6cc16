"""`elastic evaluate`: how well a policy does, or which of two is better, on the capacity that runs have."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from elastic.cli.options import AsJson, Overrides, RunsDirectory, names_in, refuse_all_but
from elastic.cli.output import EXIT_FAILED, console, emit, say
from elastic.cli.run import carry_out, check_run, check_taken_up, write_report
from elastic.cli.tables import show_listing
from elastic.compose.evaluating import (
    ChosenPolicy,
    ComparedPolicies,
    Evaluated,
    EvaluatedPolicy,
    EvaluationNote,
    compared,
    evaluated,
    evaluation_note,
    evaluation_of,
    is_policy,
    policy_of_run,
    run_to_evaluate,
    with_policy,
)
from elastic.compose.incarnations import PastIncarnations, past_incarnations
from elastic.compose.plan import RunPlan, resolve
from elastic.compose.runs import discard_run, load_run_config, new_run_dir, private, save_run_config
from elastic.compose.tokenizers_compared import tokenizers_remark
from elastic.config import Config, ConfigError, given_path, load_config
from elastic.core.scores import Estimate
from elastic.report.units import LONG_REWARD
from elastic.runtime.journal import DirectoryStore, RunDirectory


@dataclass(frozen=True)
class _PolicyRun:
    """A policy's evaluation: the run that it has, and the plan of it, None where it has come to its end."""

    words: str
    run_dir: Path
    plan: RunPlan | None
    resumed: bool = False


def evaluate(
    context: typer.Context,
    target: Annotated[
        str,
        typer.Argument(
            metavar="CONFIG|RUN",
            help="A run's TOML file, whose model.checkpoint is evaluated; or a run's name, its path or `latest`.",
            show_default=False,
        ),
    ] = "",
    step: Annotated[
        int | None,
        typer.Option(
            min=0,
            metavar="N",
            help="For a run: the step whose policy is evaluated; by default the newest that is saved.",
        ),
    ] = None,
    against: Annotated[
        str,
        typer.Option(
            metavar="RUN|DIR",
            help="Evaluate another policy on the same tasks and seeds: a run's newest, or a Hugging Face directory.",
        ),
    ] = "",
    providers: Annotated[
        str | None, typer.Option(metavar="NAMES", help="Comma-separated, as for `elastic run`; of a run those it had.")
    ] = None,
    overrides: Overrides = None,
    resume: Annotated[
        str,
        typer.Option(
            metavar="RUN",
            help="Go on with an evaluation that did not end: name its run, with --against either (a name, a path "
            "or `latest`).",
        ),
    ] = "",
    directory: RunsDirectory = Path("runs"),
    as_json: AsJson = False,
) -> int:
    """Evaluate a policy on the tasks of [evaluation], with the providers of a run and without training.

    Each policy has a run of its own, with a journal and a report, that trains no step. Two are compared task by task.

    Example: elastic evaluate latest --against .cache/frozenlake-base --providers serving
    """
    chosen = None if providers is None else names_in(providers)
    with private():
        if resume:
            refuse_all_but(context, "--resume", "--providers", "--directory", "--json")
            parts, remarks = _taken_up(DirectoryStore(directory).find(resume), chosen)
        elif target:
            parts, remarks = _begun(target, step, against, chosen, overrides or [], directory)
        else:
            raise ConfigError("elastic evaluate: give a configuration file, a run, or --resume RUN")
        return _carried_out(parts, remarks, as_json=as_json)


def _begun(
    target: str, step: int | None, against: str, providers: list[str] | None, overrides: list[str], directory: Path
) -> tuple[list[_PolicyRun], list[str]]:
    """Each policy's part, and what is to be known of them. Raises `ConfigError`, and then there is none."""
    config, policy, had = _of_target(target, step, directory, overrides)
    names = had if providers is None else providers
    parts: list[_PolicyRun] = []
    try:
        for one in (policy, *([_other(against, directory)] if against else [])):
            plan, run_dir = _planned(config, one, names, target)
            parts.append(_PolicyRun(one.words, run_dir, plan))
        remarks = _remarks([part.plan for part in parts if part.plan is not None])
        policies = [EvaluatedPolicy(part.words, part.run_dir.name) for part in parts]
        EvaluationNote(policies=policies, providers=names, remarks=remarks).write(parts[0].run_dir.parent)
    except ConfigError:
        for part in parts:
            discard_run(part.run_dir)
        raise
    return parts, remarks


def _taken_up(run: RunDirectory, providers: list[str] | None) -> tuple[list[_PolicyRun], list[str]]:
    """What was begun with the run. Raises `ConfigError`."""
    note = evaluation_note(run)
    names, parts = note.providers if providers is None else providers, list[_PolicyRun]()
    for one in note.policies:
        own = RunDirectory(run.path.parent / one.run)
        plan, begun = None, bool(own.journal_paths())
        if evaluated(own.path, one.words) is None:
            plan = resolve(load_run_config(own.path), names, str(own.path))
            resumed = own.path if begun else None
            check_taken_up(plan, str(own.path), resumed, past_incarnations(own) if begun else PastIncarnations())
        parts.append(_PolicyRun(one.words, own.path, plan, resumed=begun))
    return parts, note.remarks


def _carried_out(parts: Sequence[_PolicyRun], remarks: Sequence[str], *, as_json: bool) -> int:
    for remark in remarks:
        say(f"note: {remark}")
    found: list[Evaluated] = []
    for part in parts:
        run_dir = part.run_dir
        if part.plan is not None:
            say(f"evaluating {part.words}, in {run_dir}")
            then = partial(write_report, run_dir)
            if code := carry_out(part.plan, run_dir, resume=part.resumed, then=then, command="evaluate"):
                return code
        result = evaluated(run_dir, part.words)
        if result is None:
            say(f"error: the evaluation of {part.words} has come to no end; its report and logs are in {run_dir}")
            return EXIT_FAILED
        found.append(result)
    results = compared(found, remarks)
    if as_json:
        emit(results)
    else:
        _show(results)
    return 0


def _of_target(
    target: str, step: int | None, directory: Path, overrides: list[str]
) -> tuple[Config, ChosenPolicy, list[str]]:
    """The configuration, the policy and the providers. Raises `ConfigError`."""
    path = given_path(target)
    if path.suffix == ".toml":
        if step is not None:
            raise ConfigError(f"--step: is for a run, and {target} is a configuration, whose policy has no steps")
        config = load_config(path, overrides)
        return config, ChosenPolicy(words=str(config.model.checkpoint), directory=config.model.checkpoint), []
    run = run_to_evaluate(DirectoryStore(directory), target)
    if is_policy(run.path):
        raise ConfigError(
            f"{target}: is a policy, and no run; allowed: elastic evaluate CONFIG --set model.checkpoint={target}"
        )
    return load_run_config(run.path, overrides), policy_of_run(run, step), list(past_incarnations(run).providers)


def _other(named: str, directory: Path) -> ChosenPolicy:
    path = given_path(named)
    if is_policy(path):
        return ChosenPolicy(words=named, directory=path)
    if path.is_dir() and not (path / "config.json").is_file():
        raise ConfigError(f"--against: {named} has no config.json; allowed: a run, or a directory of a policy")
    return policy_of_run(run_to_evaluate(DirectoryStore(directory), named), None)


def _planned(config: Config, policy: ChosenPolicy, names: list[str], where: str) -> tuple[RunPlan, Path]:
    """A run that evaluates the policy, and its directory. Raises `ConfigError`, and then there is none."""
    own = evaluation_of(config, f"{config.run.name}-evaluation"[:64])
    run_dir = new_run_dir(own)
    try:
        own = with_policy(own, policy.placed(run_dir))
        save_run_config(run_dir, own)
        plan = resolve(own, names, where)
        check_run(plan, where)
    except BaseException:
        discard_run(run_dir)
        raise
    return plan, run_dir


def _remarks(plans: Sequence[RunPlan]) -> list[str]:
    places = [plan.config.model.checkpoint for plan in plans]
    remark = tokenizers_remark(*places) if len(places) == 2 else ""
    return [remark] if remark else []


def _show(found: ComparedPolicies) -> None:
    columns = ("metric", "mean", "± error", "95 %", "tasks")
    for one in found.policies:
        outcomes = list(one.sets.values())
        failed, cut_off = sum(each.failed for each in outcomes), sum(each.cut_off for each in outcomes)
        left_out = f"; {failed} failed and {cut_off} were cut off, which are left out" if failed + cut_off else ""
        console().print(
            f"{one.policy}: {sum(each.finished for each in outcomes)} episodes in {one.seconds:.1f} s{left_out}"
            + ("; its time was up before the others ended" if one.timed_out else ""),
            soft_wrap=True,
            highlight=False,
        )
        named = one.metrics.items()
        if len(one.sets) > 1:
            named = [*named, *((f"{name}/{m}", v) for name, each in one.sets.items() for m, v in each.metrics.items())]
        show_listing(columns, [_row(name, value) for name, value in named], right=columns[1:])
    if found.differences:
        first, second = found.policies
        console().print(f"{first.policy} less {second.policy}, task by task:", soft_wrap=True, highlight=False)
        rows = [_row(name, difference.estimate) for name, difference in found.differences.items()]
        show_listing(("tasks of", *columns[1:]), rows, right=columns[1:])
    told = [*(value for one in found.policies for value in one.metrics.values())]
    told += [difference.estimate for difference in found.differences.values()]
    if any(value.interval is None for value in told):
        console().print("one task alone says nothing of others: it has no error and no interval", highlight=False)


def _row(name: str, value: Estimate) -> tuple[str, ...]:
    error = "–" if value.error is None else _figure(value.error)
    interval = "–" if value.interval is None else " to ".join(map(_figure, value.interval))
    return name, _figure(value.mean), error, interval, str(value.tasks)


def _figure(value: float) -> str:
    return f"{value:.4f}" if abs(value) < LONG_REWARD else f"{value:.4g}"
