"""Rows of a data set of Hugging Face's hub, read by the package `datasets`: from its cache, else over the network."""

import importlib
import importlib.util
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, cast

from elastic.system.plain_values import told

HUB = "hf:"
"""How the names of such data sets begin."""
TOLD_CHARACTERS = 300


class HubSource(NamedTuple):
    """A split of a data set; `subset` is one of its configurations, empty for the only one."""

    name: str
    subset: str
    split: str

    def __str__(self) -> str:
        subset = f", subset {self.subset!r}" if self.subset else ""
        return f"{HUB}{self.name}{subset}, split {self.split!r}"


class HubUnreadable(Exception):
    """A data set cannot be read. The message says why, and not which."""


def check_hub() -> None:
    """Raises `HubUnreadable` where the package is not installed; nothing is imported."""
    if importlib.util.find_spec("datasets") is None:
        allowed = "`pip install -e '.[hub]'` in a clone of elastic, or a file of rows"
        raise HubUnreadable(f"needs the package 'datasets', which is not installed; allowed: {allowed}")


def hub_rows(source: HubSource) -> Iterator[Mapping[str, Any]]:
    """Yield a split's rows, in its order. Raises `HubUnreadable`."""
    check_hub()
    try:
        datasets = importlib.import_module("datasets")
        # Code of a data set's own is run by no version from 4 on.
        found = datasets.load_dataset(source.name, source.subset or None, split=source.split)
        yield from cast("Iterator[Mapping[str, Any]]", found)
    except Exception as error:
        allowed = "a split of a data set that is cached, or reached over the network (run.pass_env = ['HF_*'])"
        raise HubUnreadable(f"cannot be loaded: {told(error, TOLD_CHARACTERS)}; allowed: {allowed}") from error
