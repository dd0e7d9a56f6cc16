"""What every benchmark shares: how it is run from the command line, and how it prints."""

import argparse
import importlib.util
import json
import logging
import os
import platform
import sys
import time
import tomllib
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import structlog
from rich.console import Console
from rich.table import Table

from benchmarks import HERE, ROOT
from benchmarks._processes import scratch_directory

TRAINERS_PYTHON = ROOT / ".cache" / "trainers" / "bin" / "python"
WITHOUT_PEFT = "peft is not installed in .cache/trainers: `make .cache/trainers/installed`"
PRINTED: Mapping[str, Any] = tomllib.loads((HERE / "printed.toml").read_text())
"""What papers print."""
Figures: TypeAlias = dict[str, Any]
"""What a benchmark, or a part of it, comes to, by name."""
Measured: TypeAlias = Figures | Coroutine[Any, Any, Figures]


class Arguments(argparse.Namespace):
    """The two flags of every benchmark, and its own options. `scratch` is an empty directory, gone afterwards."""

    quick: bool
    json: bool
    scratch: Path


Option: TypeAlias = Callable[[argparse.ArgumentParser], object]


def option(*names: str, **settings: Any) -> Option:
    """An option of a benchmark's own, with the arguments of `add_argument`."""
    return lambda parser: parser.add_argument(*names, **settings)


def benchmark(
    description: str | None,
    measure: Callable[[Arguments], Measured],
    *own: Option,
) -> Figures:
    """Run a benchmark by its command line: print the figures that `measure` comes to, and return them.

    Nothing that it starts outlives it. It logs faults alone.
    """
    began_s = time.monotonic()
    options = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--quick", action="store_true", help="under 50 s on two cores; what does not fit is null")
    options.add_argument("--json", action="store_true", help="one JSON object as the last line of standard output")
    for add in own:
        add(options)
    arguments = options.parse_args(namespace=Arguments())
    log_faults_only()
    with scratch_directory() as arguments.scratch:
        figures = measure(arguments)
        if isinstance(figures, Coroutine):
            from benchmarks._live import run_to_end

            figures = run_to_end(figures)
    emit(figures, arguments, began_s)
    return figures


def log_faults_only() -> None:
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )


def multiple_of(least: int) -> Callable[[str], int]:
    """Reads a command line's number, which is a positive multiple of `least`."""

    def read(text: str) -> int:
        if not (text.isascii() and text.isdecimal() and int(text) and int(text) % least == 0):
            wanted = "a positive number" if least == 1 else f"a positive multiple of {least}"
            raise argparse.ArgumentTypeError(f"{text!r} is not {wanted}")
        return int(text)

    return read


def skipped_without_vllm() -> str:
    """Why what needs vLLM is skipped; empty where vLLM is installed. `benchmarks/vllm.py` is not it."""
    found = importlib.util.find_spec("vllm")
    if found is not None and Path(found.origin or HERE).parent != HERE:
        return ""
    return "vLLM is not installed here: `make test-vllm` sets up an environment that has it"


def emit(figures: Figures, arguments: argparse.Namespace, began_s: float) -> None:
    """Print the figures: a JSON object with `--json`, else a table. With `--quick` standard error says how long they
    took since `began_s`, a monotonic time."""
    if arguments.quick:
        print(f"{Path(sys.argv[0]).name} --quick: {time.monotonic() - began_s:.1f} s", file=sys.stderr)
    if arguments.json:
        print(json.dumps(figures), flush=True)
        return
    table = Table(
        box=None, show_header=False, title=f"{platform.machine()}, {os.cpu_count()} cores", title_justify="left"
    )
    for key, value in flattened(figures):
        table.add_row(key, shown(value))
    Console().print(table)


def flattened(figures: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Figures with those within others, whose keys have dots."""
    rows: list[tuple[str, Any]] = []
    for key, value in figures.items():
        name = f"{prefix}{key}"
        rows += flattened(value, f"{name}.") if isinstance(value, Mapping) else [(name, value)]
    return rows


def shown(value: object) -> str:
    """A figure as tables have it; of texts each has a line."""
    if isinstance(value, list) and all(isinstance(one, str) for one in value):
        return "\n".join(value)
    return f"{value:,.4g}" if isinstance(value, float) else str(value)
