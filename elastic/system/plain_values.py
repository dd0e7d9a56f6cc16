"""Values of users' code, made plain where they enter: numpy's and torch's scalars become Python's, once, and what their
errors say becomes text that every record and terminal can hold.

Nothing here imports numpy or torch: their scalars are known by the methods of Python's own data model.
"""

import contextlib
import math
import operator
from typing import Any

SHOWN_CHARACTERS = 60
TOLD_CHARACTERS = 2000


def whole(value: Any) -> int | None:
    """Return an integer of Python, numpy or torch as a Python integer; None for anything else, `True` included."""
    if type(value) is int:
        return value
    if is_switch(value):
        return None
    with contextlib.suppress(Exception):
        return int(operator.index(value))  # What is a subclass of `int` is its own index.
    return None


def number(value: Any) -> float | None:
    """Return a finite number of Python, numpy or torch as a Python float; None for anything else.

    `True` is 1.0. A text, a complex number and an array of several elements are no numbers.
    """
    if isinstance(value, str | bytes | bytearray):
        return None
    with contextlib.suppress(Exception):
        if getattr(value, "ndim", 0):
            return None
        found = float(value)
        return found if math.isfinite(found) else None
    return None


def switch(value: Any) -> bool | None:
    """Return a truth value of Python, numpy or torch as a Python bool; None for anything else."""
    with contextlib.suppress(Exception):
        return bool(value) if is_switch(value) else None
    return None


def is_switch(value: Any) -> bool:
    return isinstance(value, bool) or type(value).__name__ in ("bool", "bool_") or _dtype(value).endswith("bool")


def plain(value: Any) -> Any:
    """Return a scalar of numpy or torch as Python's, for encoders that know only those. Raises `TypeError`."""
    for taken in (switch, whole):
        if (found := taken(value)) is not None:
            return found
    with contextlib.suppress(Exception):
        if _dtype(value):
            return float(value)  # Not finite, too: what it may be is for the receiver to say.
    raise TypeError(f"{type(value).__name__} is no value that can be sent")


def shown(value: Any) -> str:
    """Return the value and its type as a message may hold them."""
    try:
        text = repr(value)
    except BaseException as error:  # Also `SystemExit`, as of an error's words.
        text = f"a value whose repr raises {type(error).__name__}"
    return f"{_clipped(text, SHOWN_CHARACTERS)} ({printable(type(value).__name__)})"


def told(error: BaseException, characters: int = TOLD_CHARACTERS) -> str:
    """Return what an exception says, its type first, as one line of so many characters at most. Never raises."""
    try:
        text = str(error)
    except BaseException as another:  # Also `SystemExit`: code that reports an error is not ended by its words.
        text = f"a message whose str raises {type(another).__name__}"
    said = [printable(type(error).__name__), _clipped(" ".join(text.split()), characters)]
    return ": ".join(part for part in said if part)


def printable(text: str) -> str:
    """`text` on one line, with what no encoding has, or what could steer a terminal, reorder letters or break XML,
    made visible."""
    return "".join(c if c.isprintable() else " " if c.isspace() else "\N{REPLACEMENT CHARACTER}" for c in text)


def _clipped(text: str, characters: int) -> str:
    return printable(text if len(text) <= characters else f"{text[:characters]}…")


def _dtype(value: Any) -> str:
    """Return the name of the type of an array's elements; empty for what is no array and no scalar of one."""
    with contextlib.suppress(Exception):
        return str(value.dtype)
    return ""


def with_article(noun: str) -> str:
    return f"{'an' if noun[:1] in 'AEIOUaeiou' else 'a'} {noun}"
