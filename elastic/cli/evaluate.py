"""`elastic evaluate`: how well a policy does, or which of two is better, on the capacity that runs have."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from elastic.cli.options import AsJson, Overrides, RunsDirectory, names_in
from elastic.cli.output import EXIT_FAILED, console, emit, say
from elastic.cli.run import carry_out, check_run, write_report
from elastic.cli.tables import show_listing
from elastic.compose.evaluating import (
    ChosenPolicy,
    ComparedPolicies,
    Evaluated,
    compared,
    evaluated,
    evaluation_of,
    is_policy,
    policy_of_run,
    run_to_evaluate,
    same_tokenizer,
    with_policy,
)
from elastic.compose.incarnations import past_incarnations
from elastic.compose.plan import RunPlan, resolve
from elastic.compose.runs import discard_run, load_run_config, new_run_dir, save_run_config
from elastic.config import Config, ConfigError, given_path, load_config
from elastic.core.scores import Estimate
from elastic.runtime.journal import DirectoryStore


def evaluate(
    target: Annotated[
        str,
        typer.Argument(
            metavar="CONFIG|RUN",
            help="A run's TOML file, whose model.checkpoint is evaluated; or a run's name, its path or `latest`.",
        ),
    ],
    step: Annotated[
        int | None, typer.Option(min=0, metavar="N", help="Of a run: the step whose policy it is; the newest saved.")
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
    directory: RunsDirectory = Path("runs"),
    as_json: AsJson = False,
) -> int:
    """Evaluate a policy on the tasks of [evaluation], with the providers of a run and without training.

    Each policy has a run of its own, with a journal and a report, that trains no step. Two are compared task by task.

    Example: elastic evaluate latest --against .cache/frozenlake-base --providers serving
    """
    config, policy, names = _of_target(target, step, directory, overrides or [])
    policies = [policy, *([_other(against, directory)] if against else [])]
    names = names if providers is None else names_in(providers)
    made: list[tuple[ChosenPolicy, RunPlan, Path]] = []
    try:
        for one in policies:
            plan, run_dir = _planned(config, one, names, target)
            made.append((one, plan, run_dir))
    except ConfigError:
        for _, _, run_dir in made:
            discard_run(run_dir)
        raise
    remarks = _remarks([plan for _, plan, _ in made])
    for remark in remarks:
        say(f"note: {remark}")
    found: list[Evaluated] = []
    for one, plan, run_dir in made:
        say(f"evaluating {one.words}, in {run_dir}")
        if code := carry_out(plan, run_dir, resume=False, then=partial(write_report, run_dir)):
            return code
        result = evaluated(run_dir, one.words)
        if result is None:
            say(f"error: the evaluation of {one.words} has come to no end; its report and logs are in {run_dir}")
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
    if len(places) < 2 or same_tokenizer(*places):
        return []
    return ["the two policies have different tokenizers: tasks and answers are the same as texts, and not as tokens"]


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


def _row(name: str, value: Estimate) -> tuple[str, ...]:
    error = "–" if value.error is None else f"{value.error:.4f}"
    interval = "–" if value.interval is None else f"{value.interval[0]:.4f} to {value.interval[1]:.4f}"
    return name, f"{value.mean:.4f}", error, interval, str(value.tasks)
