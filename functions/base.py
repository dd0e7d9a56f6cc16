"""The contract of a function pool: stateless functions, called by key, metered by the call.

A function is named by its entry point (`module:attribute`); it takes one value and returns one, both of what
msgpack knows, and keeps nothing between calls. Source: docs/design.md, `FunctionPool`; RollArt, mechanism 3.

    FunctionError            retry_helps
    ├── FunctionUnavailable  yes: no process ran it to its end, for a cause that is not the function's
    │   └── FunctionMissing  no: there is no such function, or it cannot be loaded
    ├── FunctionTimedOut     yes: no answer in time; whatever ran is dead
    ├── FunctionRaised       yes: what it depends on may have come back
    └── BadResult            no: it answered, with what the contract does not know
"""

from collections.abc import Callable
from enum import StrEnum
from typing import Any, ClassVar, Protocol, TypeAlias

import msgspec


class CallOutcome(StrEnum):
    """How a call ended."""

    OK = "ok"
    UNAVAILABLE = "unavailable"
    TIMED_OUT = "timed_out"
    RAISED = "raised"
    BAD_RESULT = "bad_result"


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """One metered call. `queued_s` is not billed; `cold_start_s` (0 on a warm process) and `duration_s` are, and so is
    `idle_s` where a platform bills the time that a process is kept between calls."""

    function: str
    key: str
    outcome: CallOutcome
    queued_s: float
    cold_start_s: float
    duration_s: float
    usd: float
    idle_s: float = 0.0

    @property
    def billed_s(self) -> float:
        return self.cold_start_s + self.duration_s + self.idle_s


Meter: TypeAlias = Callable[[Call], None]
"""Called once for every call that ran or tried to; a repeat that joins another or finds its result is none."""


class FunctionError(Exception):
    """A call without a result. The message names the function and the cause."""

    outcome: ClassVar[CallOutcome]
    retry_helps: ClassVar[bool]


class FunctionUnavailable(FunctionError):
    outcome = CallOutcome.UNAVAILABLE
    retry_helps = True


class FunctionMissing(FunctionUnavailable):
    retry_helps = False


class FunctionTimedOut(FunctionError):
    outcome = CallOutcome.TIMED_OUT
    retry_helps = True


class FunctionRaised(FunctionError):
    outcome = CallOutcome.RAISED
    retry_helps = True


class BadResult(FunctionError):
    outcome = CallOutcome.BAD_RESULT
    retry_helps = False


class FunctionPool(Protocol):
    """Runs one function, many calls at once. A result is kept by its key: the function runs once for it.

    A repeat of a key joins the call that runs or returns the recorded result; a call that failed is not
    recorded, and its repeat runs again.
    """

    async def start(self) -> None:
        """Make sure that the function can run at all. Raises `FunctionError`, having left nothing running."""
        ...

    async def invoke(self, key: str, payload: Any, timeout_s: float) -> Any:
        """The function's result of `payload`, within `timeout_s` from now, wait and cold start included.

        Raises `FunctionError`.
        """
        ...

    def most_usd(self, timeout_s: float) -> float:
        """What a call that may take `timeout_s` costs at the most."""
        ...

    async def aclose(self) -> None:
        """End every call as unavailable and leave nothing running. Safe to call twice."""
        ...
