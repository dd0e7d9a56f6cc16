"""Entry points of what is installed: ours and third parties' alike."""

import functools
import importlib.metadata
import sys
from collections.abc import Mapping
from types import MappingProxyType


def installed(group: str) -> Mapping[str, importlib.metadata.EntryPoint]:
    """Return the entry points of one group by name. For one `sys.path` they are read once: it takes milliseconds."""
    return _read(group, tuple(sys.path))


@functools.lru_cache(64)
def _read(group: str, path: tuple[str, ...]) -> Mapping[str, importlib.metadata.EntryPoint]:
    return MappingProxyType({point.name: point for point in importlib.metadata.entry_points(group=group)})
