"""`elastic simulate`: display around simulated runs."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from elastic.cli.output import EXIT_BAD_INPUT, EXIT_FAILED, EXIT_INTERRUPTED, EXIT_STOPPED, console, say
from elastic.cli.progress import ProgressDisplay
from elastic.cli.run import conclude
from elastic.compose.plan import resolve
from elastic.compose.runs import claimed, discard_run, new_run_dir, private
from elastic.config import Config, ConfigError
from elastic.runtime.journal import JournalError
from elastic.simulation import run as simulation
from elastic.simulation.performance import SimulationError
from elastic.system.signals import INTERRUPT, handled


def split_profiles(options: Sequence[str]) -> tuple[str, dict[str, str]]:
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
def simulate_command(
    config: Config, names: list[str], where: str, experiment: simulation.Experiment, *, as_json: bool
) -> int:
    """Simulate to the end and report; returns the exit code."""
    plan = resolve(config, names, where)
    experiment = simulation.settled(config, experiment)
    run_dir = new_run_dir(config)
    progress = ProgressDisplay(console(stderr=True), learns=False)
    try:
        with claimed(run_dir), _stoppable() as stopped, progress.context:
            outcome = simulation.simulate(
                plan,
                run_dir,
                experiment,
                observe=progress.observe,
                stopped=stopped,
                note=lambda text: progress.say(f"note: {text}"),
            )
    except ConfigError as error:
        discard_run(run_dir)
        say(f"error: {error}")
        return EXIT_BAD_INPUT
    except (SimulationError, JournalError) as error:
        say(f"error: the simulation failed: {error}")
        return EXIT_FAILED
    conclude(run_dir, as_json=as_json)
    if outcome.failed:
        say(f"error: the simulated run failed: {outcome.failed}")
    elif outcome.stopped:
        say(f"stopped: {outcome.stopped}")
        return EXIT_STOPPED
    elif outcome.interrupted:
        say("interrupted; the figures are of what had been simulated by then")
    return EXIT_INTERRUPTED if outcome.interrupted else EXIT_FAILED if outcome.failed else 0


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
