"""Entry points of what is installed: ours and third parties' alike."""

import functools
import importlib.metadata
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from elastic.system.named_code import CodeUnusable, where
from elastic.system.plain_values import told

CHECKOUT = Path(__file__).parents[2] / "pyproject.toml"
"""Ours, where this package is used from a checkout."""
OWN_PACKAGE = __name__.partition(".")[0]


def installed(group: str) -> Mapping[str, importlib.metadata.EntryPoint]:
    """Return the entry points of one group by name. For one `sys.path` they are read once: it takes milliseconds.

    A checkout names its own entry points itself: what was noted as it was installed may be older.
    """
    return _read(group, tuple(sys.path))


def is_ours(point: importlib.metadata.EntryPoint) -> bool:
    """Whether an entry point leads into this package, so that loading it imports no code of others."""
    return point.module.partition(".")[0] == OWN_PACKAGE


def load_point(point: importlib.metadata.EntryPoint) -> Any:
    """Import what an entry point names. Raises `CodeUnusable`."""
    try:
        return point.load()
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        problem = f"found {point.name!r}, whose {point.value} cannot be loaded by {sys.executable}"
        raise CodeUnusable(f"{problem}: {told(error)}{where(error, __file__)}") from error


@functools.lru_cache(64)
def _read(group: str, path: tuple[str, ...]) -> Mapping[str, importlib.metadata.EntryPoint]:
    found = {point.name: point for point in importlib.metadata.entry_points(group=group)}
    own = _of_checkout().get(group, {})
    return MappingProxyType(
        found | {name: importlib.metadata.EntryPoint(name, value, group) for name, value in own.items()}
    )


@functools.cache
def _of_checkout() -> Mapping[str, Mapping[str, str]]:
    """The entry points by group that the checkout's pyproject.toml names; none where there is no checkout."""
    try:
        return tomllib.loads(CHECKOUT.read_text())["project"]["entry-points"]
    except (OSError, KeyError, ValueError):
        return {}
