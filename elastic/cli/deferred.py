"""The modules that carry commands out. Each is imported when a command first uses it, so that `--help` is quick."""

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    pass


def __getattr__(name: str) -> ModuleType:
    try:
        return importlib.import_module(f"elastic.cli.{name}")
    except ModuleNotFoundError as error:
        if error.name != f"elastic.cli.{name}":
            raise
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from error
