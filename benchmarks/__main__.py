"""Benchmarks one after the other, and one table of all: `python benchmarks --quick`, or with the names of some.

Exits with 1 where one of them failed; the others are run all the same. SIGTERM and SIGINT end them with a table of
those before. With `--kept FILE` the next time goes on from there: each is kept in that file as it ends, and those that
have ended well, as short or as long, are not run again.
"""

import json
import resource
import subprocess
import sys
import time
from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from rich.console import Console
from rich.table import Table

from benchmarks import HERE
from benchmarks._common import flattened, shown
from benchmarks._processes import program
from elastic.system.signals import TERMINATION, handled

NAMES = sorted(path.stem for path in HERE.glob("[a-z]*.py"))
FIGURES_SHOWN = 3
QUICK_LIMIT_S = 300
"""For a benchmark in short, on a machine that is busy with other things."""
BEGINS = '{"name": "'
"""How each line begins that is kept."""


class Played(NamedTuple):
    """A benchmark that was run. `cpu_s` is that of its processes but for those that outlived it; `failed` says how it
    ended, empty where it ended well; `quick` whether it was run in short."""

    name: str
    wall_s: float
    cpu_s: float
    figures: Mapping[str, Any]
    failed: str = ""
    quick: bool = True


def play(name: str, quick: bool) -> Played:
    began_s, used_s = time.monotonic(), _children_s()
    command = [sys.executable, str(HERE / f"{name}.py"), "--json", *(["--quick"] if quick else [])]
    figures: dict[str, Any] = {}
    with program(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            said, _ = process.communicate(timeout=QUICK_LIMIT_S if quick else None)
            failed = f"exited with {process.returncode}" if process.returncode else "" if said else "printed nothing"
            figures = {} if failed else _object(said.splitlines()[-1])
        except ValueError as error:
            failed = f"printed no figures: {error}"
        except subprocess.TimeoutExpired:
            failed = f"not within {QUICK_LIMIT_S} s"
    return Played(name, time.monotonic() - began_s, _children_s() - used_s, figures, failed, quick)


def _children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _object(line: str) -> dict[str, Any]:
    """A line of JSON that is an object. Raises `ValueError`."""
    if not isinstance(found := json.loads(line), dict):
        raise ValueError(f"found {line[:40]!r}; allowed: a JSON object")
    return found


def read_kept(file: Path | None, *, quick: bool = True) -> dict[str, Played]:
    """By name, the last of each that ended well, of those in short or of the others. What was cut as it was written is
    left out. Raises `ValueError` for a file that is none of ours, and `OSError`."""
    kept: dict[str, Played] = {}
    lines = file.read_text().splitlines(keepends=True) if file is not None and file.exists() else []
    for number, line in enumerate(lines, 1):
        try:
            one = msgspec.convert(Played(**_object(line)), Played)
        except (TypeError, ValueError) as error:
            if not line.endswith("\n") and line.startswith(BEGINS[: len(line)]):
                break
            raise ValueError(f"line {number} is no benchmark's that ended ({error})") from error
        if not one.failed and one.quick == quick:
            kept[one.name] = one
    return kept


def keep(file: Path, one: Played) -> None:
    """Add a line, in place of one that was cut as it was written."""
    with file.open("a+b") as kept:
        kept.seek(0)
        kept.truncate(kept.read().rfind(b"\n") + 1)
        kept.write(json.dumps(one._asdict()).encode() + b"\n")


def table(played: Sequence[Played]) -> Table:
    """A row for each benchmark, with the first of its figures, or why it was skipped."""
    made = Table("benchmark", "wall s", "CPU s", "figures", box=None, pad_edge=False)
    for one in played:
        figures = [(key, value) for key, value in flattened(one.figures) if value is not None]
        words = ", ".join(f"{key} {shown(value)}" for key, value in figures[:FIGURES_SHOWN])
        more = f", … ({len(figures)})" if len(figures) > FIGURES_SHOWN else ""
        skipped = one.figures.get("skipped_because")
        if isinstance(skipped, str):
            words, more = f"skipped: {skipped}", ""
        made.add_row(one.name, f"{one.wall_s:.1f}", f"{one.cpu_s:.1f}", one.failed or words + more)
    made.add_row(f"{len(played)} in all", f"{sum(p.wall_s for p in played):.1f}", f"{sum(p.cpu_s for p in played):.1f}")
    return made


def main() -> None:
    options = ArgumentParser(prog="benchmarks", description=__doc__)
    options.add_argument("names", nargs="*", metavar="NAME", help="these alone")
    options.add_argument("--quick", action="store_true", help="each short: most take under a minute on two cores")
    options.add_argument("--json", action="store_true", help="one JSON object as the last line of standard output")
    options.add_argument("--kept", type=Path, metavar="FILE", help="go on from what this file keeps")
    given = options.parse_args()
    if unknown := [name for name in given.names if name not in NAMES]:
        options.error(f"found {', '.join(unknown)}; allowed: {', '.join(NAMES)}")
    names = given.names or NAMES
    try:
        played = {name: one for name, one in read_kept(given.kept, quick=given.quick).items() if name in names}
        if given.kept:
            given.kept.open("a").close()
    except (OSError, ValueError) as error:
        options.error(f"--kept {given.kept}: {error}; allowed: a file that --kept has made, or a new one")
    try:
        with handled(TERMINATION, lambda number, _: sys.exit(128 + number)):
            for name in names:
                if name not in played:
                    print(name, file=sys.stderr)
                    played[name] = play(name, given.quick)
                    if given.kept:
                        keep(given.kept, played[name])
    finally:
        if given.json:
            print(json.dumps({name: one._asdict() for name, one in played.items()}))
        else:
            Console().print(table(sorted(played.values())))
    sys.exit(any(one.failed for one in played.values()))


if __name__ == "__main__":
    main()
