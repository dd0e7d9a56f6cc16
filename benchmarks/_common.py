"""What every benchmark shares: its two flags, and how it prints."""

import argparse
import importlib.util
import json
import os
import platform
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent

# A script's own directory comes first on the path, where `providers.py` would hide the package of that name.
sys.path[:] = [*(path for path in sys.path if Path(path).resolve() != HERE), str(HERE)]


@dataclass(frozen=True)
class Arguments:
    quick: bool
    json: bool


def parser(description: str | None) -> argparse.ArgumentParser:
    """With the two flags that every benchmark has."""
    options = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--quick", action="store_true", help="under 50 s on two cores; what does not fit is null")
    options.add_argument("--json", action="store_true", help="one JSON object as the last line of standard output")
    return options


def parse_arguments(description: str | None) -> Arguments:
    parsed = parser(description).parse_args()
    return Arguments(quick=parsed.quick, json=parsed.json)


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


def emit(figures: Mapping[str, Any], arguments: Arguments | argparse.Namespace) -> None:
    """Print the figures: a JSON object with `--json`, else a table."""
    if arguments.json:
        print(json.dumps(figures), flush=True)
        return
    table = Table(
        box=None, show_header=False, title=f"{platform.machine()}, {os.cpu_count()} cores", title_justify="left"
    )
    for key, value in _flatten("", figures):
        table.add_row(key, f"{value:,.4g}" if isinstance(value, float) else str(value))
    Console().print(table)


def _flatten(prefix: str, figures: Mapping[str, Any]) -> list[tuple[str, Any]]:
    rows: list[tuple[str, Any]] = []
    for key, value in figures.items():
        name = f"{prefix}{key}"
        rows += _flatten(f"{name}.", value) if isinstance(value, Mapping) else [(name, value)]
    return rows
