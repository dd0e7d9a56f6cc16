"""`elastic profile`: options, and display around what is measured."""

from pathlib import Path
from typing import Annotated

import typer

from elastic.cli.options import AsJson, Overrides, RunsDirectory
from elastic.cli.output import bad_input, emit, say
from elastic.cli.progress import bar
from elastic.compose.plan import resolve
from elastic.config import Config, ConfigError, load_config
from elastic.runtime.journal import DirectoryStore
from elastic.simulation.calibration import (
    CalibrationError,
    Measured,
    measure_engine,
    profile_engine,
    profile_run,
)
from elastic.simulation.performance import ProfileError


def profile(
    output: Annotated[
        Path,
        typer.Option("--output", "-o", help="The profile to write, a TOML file for `elastic simulate --profile`."),
    ],
    name: Annotated[
        str,
        typer.Argument(metavar="RUN", help="A live run's name or path, or `latest`: the latest live one."),
    ] = "",
    engine: Annotated[
        Path | None,
        typer.Option(metavar="CONFIG", help="Start the engine of this TOML file and measure its speed."),
    ] = None,
    overrides: Overrides = None,
    base: Annotated[
        str, typer.Option(metavar="NAME", help="A profile whose numbers stand in, as estimates, for what was not seen.")
    ] = "local",
    as_json: AsJson = False,
    directory: RunsDirectory = Path("runs"),
) -> None:
    """Measure a machine, as a profile to simulate runs with: its engine, everything around it in a live run, or both.

    With RUN alone the engine's speeds are those of the run's `engine.pacing`, or fitted to what its workers reported.

    Example: elastic profile latest --engine examples/frozenlake.toml -o machine.toml
    """
    if not name and engine is None:
        raise ConfigError("elastic profile: give a RUN, --engine CONFIG, or both")
    if overrides and engine is None:
        raise ConfigError("elastic profile: --set overrides keys of --engine CONFIG, which is not given")
    config = load_config(engine, overrides or []) if engine else None
    if config is not None:
        resolve(config, [], str(engine))
    try:
        measured = _measure(name, directory, config, output, base)
    except (CalibrationError, ProfileError) as error:
        bad_input(str(error))
    estimates = measured.estimates
    if as_json:
        emit(
            {
                "profile": str(output),
                "numbers": measured.numbers,
                "decode_step_s": measured.decode_step_s,
                "estimates": list(estimates),
            }
        )
        return
    for key, number in estimates.items():
        say(f"estimate: {key} = {number.value:g} ({number.low:g} to {number.high:g}): {number.estimate}")
    count = len(measured.numbers) + len(measured.decode_step_s)
    typer.echo(f"profile: {output} ({count - len(estimates)} numbers, {len(estimates)} estimates)")


def _measure(name: str, directory: Path, config: Config | None, output: Path, base: str) -> Measured:
    run_dir = DirectoryStore(directory).find(name).path if name else None
    if config is None:
        assert run_dir is not None
        return profile_run(run_dir, output, base=base)
    with bar("engine") as observe:
        if run_dir is None:
            return profile_engine(config, output, base=base, observe=observe)
        return profile_run(run_dir, output, engine=measure_engine(config, observe=observe), base=base)
