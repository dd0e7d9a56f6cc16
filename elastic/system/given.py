"""What people give: paths, which may begin with `~`, and text files, which editors save in several encodings."""

import codecs
import errno
import json
from pathlib import Path
from typing import Any, TypeVar

_P = TypeVar("_P", str, Path)


class OtherEncoding(ValueError):
    """A file is not text in UTF-8."""


def expanded(path: _P) -> _P:
    """The path with the home directory that a leading `~` or `~user` stands for. Raises `ValueError` where there is
    none."""
    if not str(path).startswith("~"):
        return path
    try:
        return type(path)(Path(path).expanduser())
    except RuntimeError:
        name = str(path).partition("/")[0]
        raise ValueError(
            f"no home directory is known for {name}; a file of that name is known by its absolute path"
        ) from None


def read_text(path: Path) -> str:
    """A UTF-8 file's text, without a byte-order mark. Raises `OSError`, and `OtherEncoding`."""
    return as_text(path.read_bytes())


def read_json(path: Path) -> Any:
    """What a JSON file says, infinities included, which models' configs have. Raises `OSError`, and `ValueError` for
    what is no JSON."""
    if path.exists() and not path.is_dir() and not path.is_file():
        raise OSError(errno.EINVAL, "not a file")  # Reading a pipe would wait for its writer.
    try:
        return json.loads(read_text(path), parse_constant=_constant)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _constant(name: str) -> float:
    if name == "NaN":
        raise ValueError("it has a NaN, which is no number")
    return float(name)


def as_text(content: bytes) -> str:
    """As `read_text`, of what has been read already."""
    check_encoding(content[:4])
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise OtherEncoding(f"it is not UTF-8 (byte {error.start}); save it as UTF-8") from None


def check_encoding(start: bytes) -> None:
    """Raises `OtherEncoding` if a text that begins with these four bytes is UTF-16 or UTF-32."""
    if start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) or b"\0" in start:
        raise OtherEncoding("it is UTF-16 or UTF-32, or no text; save it as UTF-8")
