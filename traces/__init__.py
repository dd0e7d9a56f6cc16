"""Readers for traces of spot availability and of serving load, and small real traces as data."""

from importlib import resources
from pathlib import Path

from elastic.system.given import expanded
from traces.errors import TraceError

__all__ = ["TraceError", "data_path", "find", "settled", "shipped"]


def shipped() -> dict[str, Path]:
    """The traces that come with the package, by name (`rlboost-a`, …); `data/SOURCE.md` says where from."""
    data = Path(str(resources.files(__name__) / "data"))
    return {path.name.partition(".")[0]: path for path in sorted(data.glob("*.csv*"))}


def data_path(name: str) -> Path:
    """Where the shipped trace `name` lies. Raises `TraceError` for any other name."""
    paths = shipped()
    if name not in paths:
        raise TraceError(f"no trace is called {name!r}; there are: {', '.join(paths)}")
    return paths[name]


def settled(trace: str) -> str:
    """A shipped trace's name, or the absolute path of another: a run or a pool may go on from another directory. Raises
    `TraceError`."""
    return trace if trace in shipped() else str(find(trace).absolute())


def find(trace: str) -> Path:
    """A trace as users name it: by a shipped trace's name, or else by a path to an existing file."""
    if trace in shipped():
        return data_path(trace)
    try:
        path = expanded(Path(trace))
    except ValueError as error:
        raise TraceError(f"trace {trace!r}: {error}") from error
    if path.is_file():
        return path
    raise TraceError(f"no trace {trace!r}: neither a file nor one of {', '.join(shipped())}")
