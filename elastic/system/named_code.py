"""Code that a configuration names: `FILE.py:NAME`, relative to the configuration, or `MODULE:NAME`.

A process that reads a configuration takes the name apart and looks for the file; nothing is imported. Only the process
that is to run the code loads it. The orchestrator, a server and `--dry-run` never do.
"""

import functools
import importlib
import importlib.util
import keyword
import os
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import FrameType, ModuleType
from typing import Annotated, Any, NamedTuple

from pydantic import AfterValidator, WithJsonSchema

from elastic.system.given import expanded
from elastic.system.plain_values import told

FORMAT = "code"
"""In the JSON schema of settings: the format of a key that names code."""
KNOWN_OR_FORMAT = "known-or-code"
"""The format of a key that takes names of what is built in, or the name of code, which has a colon."""
ALLOWED = "FILE.py:NAME, relative to the configuration, or MODULE:NAME"
_SUFFIX = ".py"


class CodeUnusable(Exception):
    """Code cannot be loaded. The message has its name, the last line of its own traceback, and the interpreter."""


class NamedCode(NamedTuple):
    """`place` is a Python file or the dotted name of a module, `name` what of it is meant."""

    place: str
    name: str

    def __str__(self) -> str:
        return f"{self.place}:{self.name}"

    @property
    def in_file(self) -> bool:
        return self.place.endswith(_SUFFIX)


def parsed(text: str) -> NamedCode:
    """Take a name apart. Raises `ValueError`."""
    place, _, name = text.rpartition(":")
    code = NamedCode(place, name)
    is_place = code.in_file or all(map(_is_name, place.split(".")))
    if not (is_place and _is_name(name)):
        raise ValueError(f"must be {ALLOWED}")
    return code


def in_file(value: object) -> NamedCode | None:
    """The code of a file that a value of a configuration names; None if it names none, whatever else it says."""
    if not isinstance(value, str) or value.startswith("-"):
        return None
    place, _, name = value.rpartition(":")
    return NamedCode(place, name) if place.endswith(_SUFFIX) and _is_name(name) else None


def _checked(text: str) -> str:
    parsed(text)
    return text


GivenCode = Annotated[str, AfterValidator(_checked), WithJsonSchema({"type": "string", "format": FORMAT})]
"""The type of a key that names code."""
NAMES_CODE: dict[str, Any] = {"format": FORMAT}
"""In the JSON schema of a key that names code in words of its own, such as an image's."""
MAY_NAME_CODE: dict[str, Any] = {"format": KNOWN_OR_FORMAT}
"""In the JSON schema of a key that takes names of what is built in, too."""


def placed(value: Any, folder: Path) -> Any:
    """A configuration's value with the files of its code in full: they are relative to the configuration's folder."""
    if isinstance(value, dict):
        return {key: placed(inner, folder) for key, inner in value.items()}
    if isinstance(value, list):
        return [placed(inner, folder) for inner in value]
    code = in_file(value)
    return value if code is None else str(code._replace(place=os.path.abspath(folder / expanded(code.place))))


def missing(value: Any, key: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], NamedCode]]:
    """Yield the code of a configuration whose file is not there, each with its key."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from missing(inner, (*key, str(name)))
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            yield from missing(inner, (*key, str(index)))
    elif (code := in_file(value)) is not None and not Path(code.place).is_file():
        yield key, code


def keyed(problem: str, value: Any, key: tuple[str, ...]) -> str:
    """A problem of code behind the key that names it, where the problem begins with that name. `value` is that of the
    configuration's `key`."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
    for name, one in inner:
        if (found := keyed(problem, one, (*key, str(name)))) != problem:
            return found
    return f"{'.'.join(key)}: {problem}" if isinstance(value, str) and problem.startswith(f"{value}:") else problem


def load(text: str) -> Any:
    """Import what is named. Raises `CodeUnusable`.

    A file is run once in a process, as a module of its own. It may import what lies beside it.
    """
    try:
        code = parsed(text)
    except ValueError as error:
        raise CodeUnusable(f"found {text!r}, which {error}") from error
    try:
        module = _module_of_file(code.place) if code.in_file else importlib.import_module(code.place)
        if hasattr(module, code.name):  # Which may import, too: modules may have a `__getattr__`.
            return getattr(module, code.name)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # `SystemExit`, too: a file that was written to be run may end so.
        raise CodeUnusable(f"{code}: cannot be loaded by {sys.executable}: {told(error)}{where(error)}") from error
    there = ", ".join(sorted(name for name in vars(module) if not name.startswith("_"))) or "nothing"
    raise CodeUnusable(f"{code}: {code.place} has no {code.name!r}; it has {there}")


@functools.cache
def _module_of_file(place: str) -> ModuleType:
    path = Path(place).absolute()
    # Its own name, and stable: what it defines can be pickled between processes that have loaded it.
    name = f"{path.stem}_{zlib.crc32(os.fsencode(path)):08x}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    if (folder := str(path.parent)) not in sys.path:
        sys.path.append(folder)  # Last: no file beside it stands in for an installed package.
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def where(error: BaseException, *callers: str) -> str:
    """The last line of the traceback that is neither the import system's nor of this file or the `callers`', in words;
    empty where there is none."""
    trace, found = error.__traceback__, ""
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if file not in (__file__, *callers) and not _imports(file):
            found = f" ({file}, line {trace.tb_lineno})"
        trace = trace.tb_next
    return found


def current_line(innermost: FrameType | None) -> str:
    """Where a thread stands, by its innermost frame that is not the import system's."""
    frame = innermost
    while frame is not None and _imports(frame.f_code.co_filename):
        frame = frame.f_back
    return "nowhere" if frame is None else f"{frame.f_code.co_filename}, line {frame.f_lineno}"


def _imports(file: str) -> bool:
    """Whether a file is the import system's."""
    return file.startswith("<frozen") or os.sep + "importlib" + os.sep in file


def _is_name(text: str) -> bool:
    return text.isidentifier() and not keyword.iskeyword(text)
