"""`elastic simulate`: display around simulated runs, and around worlds full of faults."""

import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import typer

from elastic import compose, simulation
from elastic.cli.app import EXIT_BAD_INPUT, EXIT_FAILED, EXIT_INTERRUPTED, emit
from elastic.cli.output import console, say
from elastic.cli.progress import Progress
from elastic.cli.run import conclude
from elastic.config import Config, ConfigError
from elastic.runtime.journal import JournalError
from elastic.sim.performance import SimulationError
from elastic.sim.world import WorldFailed
from elastic.sim.world import simulate as live_through


def split_profiles(options: Sequence[str]) -> tuple[str, dict[str, str]]:
    """What `--profile` says of everybody, and of providers by their names."""
    default, by_provider = "", dict[str, str]()
    for option in options:
        provider, equals, name = option.partition("=")
        if equals and provider.isidentifier():
            by_provider[provider] = name
        elif default:
            raise ConfigError(f"--profile {option}: {default} is for all already; allowed: PROVIDER={option}")
        else:
            default = option
    return default, by_provider


def simulate_command(
    config: Config, names: list[str], where: str, experiment: simulation.Experiment, *, as_json: bool
) -> int:
    """Simulate to the end and report; returns the exit code."""
    plan = compose.resolve(config, names, where)
    experiment = simulation.settled(config, experiment)
    run_dir = compose.new_run_dir(config)
    progress = Progress(console(stderr=True))
    try:
        with compose.claimed(run_dir), _stoppable() as stopped, progress.context:
            outcome = simulation.simulate(
                plan,
                run_dir,
                experiment,
                observe=progress.observe,
                stopped=stopped,
                note=lambda text: progress.say(f"note: {text}"),
            )
    except ConfigError as error:
        compose.discard_run(run_dir)
        say(f"error: {error}")
        return EXIT_BAD_INPUT
    except (SimulationError, JournalError) as error:
        say(f"error: the simulation failed: {error}")
        return EXIT_FAILED
    conclude(run_dir, as_json=as_json)
    if outcome.failed:
        say(f"error: the simulated run failed: {outcome.failed}")
    return EXIT_INTERRUPTED if outcome.interrupted else EXIT_FAILED if outcome.failed else 0


@contextmanager
def _stoppable() -> Iterator[Callable[[], bool]]:
    """Whether Ctrl-C was pressed; the second time it interrupts as usual."""
    asked: list[int] = []

    def note(number: int, _: object) -> None:
        asked.append(number)
        signal.signal(signal.SIGINT, signal.default_int_handler)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: bool(asked)
    finally:
        signal.signal(signal.SIGINT, before)


def faults_command(first: int, worlds: int, *, as_json: bool) -> int:
    """Live through worlds of consecutive seeds, every invariant checked after every event; 1 if one failed."""
    began_s = time.monotonic()
    events, faults, failures, histories = 0, 0, [], []
    for seed in range(first, first + worlds):
        try:
            outcome = live_through(seed)
        except WorldFailed as failure:
            failures.append({"seed": seed, "error": str(failure)})
            say(f"error: {failure}")
            continue
        events += outcome.events
        faults += outcome.faults
        histories.append({"seed": seed, "history": outcome.history, "state": outcome.state})
    body = {
        "seeds": worlds,
        "events": events,
        "faults": faults,
        "failed_seeds": failures,
        "histories": histories,
        "events_per_s": events / (time.monotonic() - began_s),
    }
    if as_json:
        emit(body)
    else:
        typer.echo(f"{worlds} worlds from seed {first}: {events:,} events, {faults:,} faults, {len(failures)} failed")
        if worlds == 1 and histories:
            typer.echo(f"history {histories[0]['history']}  state {histories[0]['state']}")
    return EXIT_FAILED if failures else 0
