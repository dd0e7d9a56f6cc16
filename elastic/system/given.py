"""What people give: paths, which may begin with `~`, and text files, which editors save in several encodings."""

import codecs
from pathlib import Path
from typing import TypeVar

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
