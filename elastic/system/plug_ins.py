"""What code of other packages answers in a process of ours, checked where it enters.

Policies and markets of other packages are asked through here. One that raises, or answers what is not allowed, ends
with one message: whose code it is, what was asked, what was found and what is allowed.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from elastic.system.named_code import where
from elastic.system.plain_values import plain, shown, told, with_article

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class AskedPlugIn:
    """Code of another package. `whose` names it and its package; `fault` makes the error of a message."""

    whose: str
    fault: Callable[[str], Exception]

    def ask(self, name: str, call: Callable[[], T], *passed: type[Exception]) -> T:
        """Return what the function `call` returns. What it raises is a fault, but for errors that are `passed` on."""
        try:
            return call()
        except (KeyboardInterrupt, *passed):
            raise
        except BaseException as error:  # Also `SystemExit`.
            raise self.raised(name, error, __file__, call.__code__.co_filename) from error

    def raised(self, name: str, error: BaseException, *ours: str) -> Exception:
        """Return the fault of code that has raised, below these files."""
        return self.fault(f"{self.whose}: {name} raised {told(error)}{where(error, *ours)}")

    def made(self, name: str, answer: object, kind: type[T], allowed: str = "") -> T:
        """Return the answer as a value of this type, of Python's own numbers. `allowed` are words for the type."""
        try:
            return msgspec.convert(msgspec.to_builtins(answer, enc_hook=_plain), type=kind)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            raise self.wrong(name, answer, allowed or f"{_words(kind)} ({told(error)})") from error

    def wrong(self, name: str, answer: object, allowed: str) -> Exception:
        return self.fault(f"{self.whose}: {name} returned {shown(answer)}; allowed: {allowed}")


def _plain(value: Any) -> Any:
    """What encoders do not know, as Python's own. Raises `TypeError`."""
    if isinstance(value, str):
        return str.__str__(value)
    return dict(value) if isinstance(value, Mapping) else plain(value)


def _words(kind: Any) -> str:
    named = str(kind).replace("collections.abc.", "").replace("elastic.core.", "")
    return with_article(kind.__name__) if isinstance(kind, type) else named
