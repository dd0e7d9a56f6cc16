"""`elastic simulate`: options, and display around simulated runs."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from elastic.cli.options import GIVEN, AsJson, BudgetOption, Overrides, RunFile, refuse_all_but, with_budget
from elastic.cli.output import EXIT_BAD_INPUT, EXIT_FAILED, EXIT_INTERRUPTED, EXIT_STOPPED, console, say
from elastic.cli.progress import ProgressDisplay
from elastic.cli.run import conclude, run_settings
from elastic.compose.plan import resolve
from elastic.compose.runs import claimed, discard_run, new_run_dir, private
from elastic.config import Config, ConfigError
from elastic.core.types import PolicyFault
from elastic.runtime.journal import JournalError
from elastic.runtime.loop_watch import LoopWatch
from elastic.simulation import run as simulation
from elastic.simulation.performance import SimulationError
from elastic.system.signals import INTERRUPT, handled


def simulate(
    context: typer.Context,
    config: RunFile = None,
    providers: Annotated[
        str | None,
        typer.Option(metavar="NAMES", help="Comma-separated: serving,spot. Without any, those of [simulation]."),
    ] = None,
    overrides: Overrides = None,
    seed: Annotated[int | None, typer.Option(help="Same as --set run.seed=N; with --faults the first seed.")] = None,
    profile: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[PROVIDER=]NAME",
            help="Devices: H100/Qwen3-8B, H20/Qwen3-32B:tp2, …, `local`, or a file; for one provider, or `trainer`, "
            "with its name before: spot=H20/Qwen3-8B.",
        ),
    ] = None,
    turns_from: Annotated[
        str, typer.Option(metavar="RUN", help="Take turn lengths from a live run, or from `claude-code-sessions`.")
    ] = "",
    environment_times: Annotated[
        bool, typer.Option("--environment-times", help="With --turns-from RUN: environments take as long as there.")
    ] = False,
    budget_usd: BudgetOption = None,
    frame_s: Annotated[float | None, typer.Option(help="Longest that tokens wait to be sent.", hidden=True)] = None,
    hours: Annotated[float, typer.Option(help="Virtual hours after which a run without an end is given up.")] = 2160.0,
    faults: Annotated[
        bool, typer.Option(help="Instead of CONFIG: small worlds full of faults drawn from seeds.")
    ] = False,
    worlds: Annotated[int, typer.Option(min=1, help="With --faults: how many seeds, from --seed on.")] = 1,
    world: Annotated[
        str,
        typer.Option(metavar="NAME", help="With --faults: core, run, outside, pool, pool-shell (docs/simulation.md)."),
    ] = "core",
    only: Annotated[
        str, typer.Option(metavar="KINDS", help="With --world run, outside or pool: draw only faults of these kinds.")
    ] = "",
    keep: Annotated[
        str,
        typer.Option(
            metavar="NUMBERS",
            help="With --world run, outside, pool: let only these of the drawn faults happen, or none.",
        ),
    ] = "",
    shrink_within: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            help="With --world run, outside, pool: for so long leave out faults that the failure does not need.",
        ),
    ] = 0.0,
    log: Annotated[
        bool, typer.Option("--log", help="With --world run, outside or pool: print what processes log.")
    ] = False,
    jobs: Annotated[
        Path | None,
        typer.Option(
            metavar="WORKLOAD",
            help="Instead of CONFIG: many jobs on one pool, as a TOML file says.",
            show_default=False,
        ),
    ] = None,
    policy: Annotated[
        str, typer.Option(metavar="NAME", help="With --jobs: ours, weave, solo, gavel, random, most_idle, naive.")
    ] = "ours",
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="With --jobs: the page to write, an HTML file.", show_default=False),
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Simulate a run: what it would cost and how fast it would be, by the same scheduler on virtual time.

    Example: elastic simulate examples/frozenlake.toml --providers serving,spot
    Example: elastic simulate --jobs examples/jobs.toml --policy ours
    """
    if jobs is not None:
        from elastic.cli.job_simulation import simulate_jobs_command

        refuse_all_but(context, "--jobs", "--policy", "--output", "--json")
        return simulate_jobs_command(jobs, policy, output, as_json=as_json)
    _refuse(context, "--jobs", "policy", "output")
    if faults:
        from elastic.cli.faults import faults_command
        from elastic.testing.faults.worlds import WorldOptions

        of_faults = ("--seed", "--worlds", "--world", "--only", "--keep", "--shrink-within", "--log")
        refuse_all_but(context, "--faults", *of_faults, "--json")
        options = WorldOptions(only=only, keep=keep, shrink_s=shrink_within, tell=say if log else None)
        return faults_command(world, seed or 0, worlds, options, as_json=as_json)
    if config is None:
        raise ConfigError("elastic simulate: give a configuration file, or --faults")
    _refuse(context, "--faults", "worlds", "world", "only", "keep", "shrink_within", "log")
    settings, _, names = run_settings(config, providers, with_budget(overrides or [], budget_usd), seed, "")
    if providers is None:
        names = list(settings.simulation.providers)
    default, by_provider = _split_profiles(profile or [])
    experiment = simulation.Experiment(
        profile=default,
        profiles=by_provider,
        turns=turns_from,
        environment_times=environment_times,
        frame_s=frame_s,
        horizon_s=hours * 3600,
    )
    return _simulate(settings, names, str(config), experiment, as_json=as_json)


def _refuse(context: typer.Context, mode: str, *options: str) -> None:
    """Refuse options that have no meaning without the option `mode`."""
    for option in options:
        source = context.get_parameter_source(option)
        if source is not None and source.name in GIVEN:
            raise ConfigError(f"elastic simulate: --{option.replace('_', '-')} is for {mode}")


def _split_profiles(options: Sequence[str]) -> tuple[str, dict[str, str]]:
    """What `--profile` says of everybody, and of providers by their names."""
    default, by_provider = "", dict[str, str]()
    for option in options:
        provider, equals, name = option.partition("=")
        if equals and not {"/", "."} & set(provider):
            by_provider[provider] = name
        elif default:
            raise ConfigError(f"--profile {option}: {default} is for all already; allowed: PROVIDER={option}")
        else:
            default = option
    return default, by_provider


@private()
def _simulate(config: Config, names: list[str], where: str, experiment: simulation.Experiment, *, as_json: bool) -> int:
    """Simulate to the end and report; returns the exit code."""
    plan = resolve(config, names, where)
    experiment = simulation.settled(config, experiment)
    run_dir = new_run_dir(config)
    progress = ProgressDisplay(console(stderr=True), learns=False)
    watch = LoopWatch(progress.say, config.scheduler.plug_in_timeout_s)
    try:
        with claimed(run_dir), _stoppable() as stopped, progress.context, watch.watching_plug_ins():
            outcome = simulation.simulate(
                plan,
                run_dir,
                experiment,
                observe=progress.observe,
                stopped=stopped,
                note=lambda text: progress.say(f"note: {text}"),
            )
    except (ConfigError, PolicyFault) as error:
        discard_run(run_dir)
        say(f"error: {error}")
        return EXIT_BAD_INPUT
    except (SimulationError, JournalError) as error:
        say(f"error: the simulation failed: {error}")
        return EXIT_FAILED
    conclude(run_dir, as_json=as_json)
    if outcome.interrupted:
        say("interrupted; the figures are of what had been simulated by then")
        return EXIT_INTERRUPTED
    if outcome.failed:
        say(f"error: the simulated run failed: {outcome.failed}")
        return EXIT_FAILED
    if outcome.stopped:
        say(f"stopped: {outcome.stopped}")
        return EXIT_STOPPED
    return 0


@contextmanager
def _stoppable() -> Iterator[Callable[[], bool]]:
    """Whether Ctrl-C was pressed; the second time it interrupts as usual."""
    asked: list[int] = []

    def note(number: int, _: object) -> None:
        if asked:
            raise KeyboardInterrupt
        asked.append(number)

    with handled(INTERRUPT, note):
        yield lambda: bool(asked)
