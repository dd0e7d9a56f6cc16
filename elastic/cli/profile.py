"""`elastic profile`: display around what is measured."""

from pathlib import Path

import typer

from elastic.cli.output import bad_input, emit, say
from elastic.cli.progress import bar
from elastic.config import Config
from elastic.simulation.calibration import (
    CalibrationError,
    Measured,
    find_live_run,
    measure_engine,
    profile_engine,
    profile_run,
)
from elastic.simulation.performance import ProfileError


def profile_command(
    name: str, directory: Path, config: Config | None, output: Path, base: str, *, as_json: bool
) -> None:
    """Of the run `name` (if not empty), the engine of `config` (if given), or both."""
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
    run_dir = find_live_run(directory, name) if name else None
    if config is None:
        assert run_dir is not None
        return profile_run(run_dir, output, base=base)
    with bar("engine") as observe:
        if run_dir is None:
            return profile_engine(config, output, base=base, observe=observe)
        return profile_run(run_dir, output, engine=measure_engine(config, observe=observe), base=base)
