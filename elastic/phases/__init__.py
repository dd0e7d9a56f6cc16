"""Phases of a script that takes turns with other jobs on a pool: `@elastic.phase("rollout", state=[model])`.

In a pool a phase waits for its permit, brings its states to the device, runs, takes them off the device and gives the
nodes back. Outside of a pool all of this does nothing, so that the script runs alone as ever.

- Phases follow one another: rollout, train, rollout, … In a pool a phase within a phase, and training before any
  rollout, raise `PhaseError`.
- A phase cannot be interrupted. When it is recalled it gives way at its end, or where the script calls `give_way`; at
  the deadline the script's processes are killed.
- A state is on the device during its phases only. Used outside of them, a torch module or optimiser raises.
- One process of a script speaks for it: the one that enters the phases.

Source: docs/jobs.md, `A script of your own`.
"""

import atexit
import functools
import inspect
import os
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar, cast

if TYPE_CHECKING:
    from elastic.phases.session import PhaseSession

PHASES = ("rollout", "train", "sync")
POOL_VARIABLE = "ELASTIC_POOL"

PhaseName: TypeAlias = Literal["rollout", "train", "sync"]
States: TypeAlias = Sequence[Any] | Callable[[], Iterable[Any]]
F = TypeVar("F", bound=Callable[..., Any])


class PhaseError(RuntimeError):
    """A phase that cannot be, or that the pool does not give; the message names it."""


class ScriptPhase:
    """A phase, as a decorator or a context manager. Only in a pool it does anything."""

    def __init__(self, kind: str, state: States, *, both: bool, name: str, inner: bool = False) -> None:
        if kind not in PHASES:
            raise PhaseError(f"phase {kind!r}: allowed: {', '.join(PHASES)}")
        if kind == "sync" and not both and (callable(state) or state):
            raise PhaseError(
                f"phase {kind!r} ({name}) has a state, and holds no device: allowed: no state, or both=True"
            )
        self.kind = kind
        self.both = both
        self.name = name
        self.inner = inner
        """Within a phase of the same kind it is a part of that one, instead of an error."""
        self.origin = self
        self._state = state

    def of(self, state: States) -> "ScriptPhase":
        """The same phase with other states: whoever ends the one ends the other."""
        other = ScriptPhase(self.kind, state, both=self.both, name=self.name, inner=self.inner)
        other.origin = self.origin
        return other

    def __str__(self) -> str:
        return f"phase {self.kind!r} ({self.name})"

    def states(self) -> list[Any]:
        return list(self._state() if callable(self._state) else self._state)

    def begin(self, *, lingers: bool = False) -> bool:
        """Enter the phase. One that `lingers` lasts until `end`, or until another phase begins. Raises `PhaseError`.

        Returns whether `end` is to follow: not outside of a pool, nor where it is a part of the phase under way.
        """
        session = _session()
        return session is not None and session.begin(self, lingers=lingers)

    def end(self, *, finished: bool = True) -> None:
        """Leave the phase. Does nothing where it is not under way."""
        if (session := _session()) is not None:
            session.end(self, finished=finished)

    def __enter__(self) -> "ScriptPhase":
        self.begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end(finished=error is None)

    def __call__(self, function: F) -> F:
        code = inspect.unwrap(function)
        where = f"{getattr(code, '__qualname__', code)}, {_place_of(code)}"
        this = self.of(self._state)
        this.name = where
        if inspect.isgeneratorfunction(code) or inspect.isasyncgenfunction(code):
            raise PhaseError(f"{this}: a generator would end the phase before it has begun; allowed: a function")
        if inspect.iscoroutinefunction(code):

            @functools.wraps(function)
            async def in_thread(*args: Any, **kwargs: Any) -> Any:
                if _session() is None:
                    return await function(*args, **kwargs)
                import asyncio

                began, finished = await asyncio.to_thread(this.begin), False
                try:
                    result = await function(*args, **kwargs)
                    finished = True
                    return result
                finally:
                    if began:
                        await asyncio.to_thread(this.end, finished=finished)

            return cast(F, in_thread)

        @functools.wraps(function)
        def inside(*args: Any, **kwargs: Any) -> Any:
            began, finished = this.begin(), False
            try:
                result = function(*args, **kwargs)
                finished = True
                return result
            finally:
                if began:
                    this.end(finished=finished)

        return cast(F, inside)


def phase(kind: PhaseName, *, state: States = (), both: bool = False, name: str = "") -> ScriptPhase:
    """A phase of the script, as a decorator or a context manager. Raises `PhaseError`, also for another `kind`.

    - `state` names what is on the device during the phase: torch modules and optimisers, which are moved in place;
      anything with `park` and `resume`; or an engine with `sleep` and `wake_up`. It may be a function
      that returns them.
    - With `both` the phase has the nodes of rollouts and of training at once, or waits.
    - A `sync` phase without `both` holds no device: it is only told from the others.
    """
    caller = sys._getframe(1)
    place = f"{os.path.basename(caller.f_code.co_filename)}:{caller.f_lineno}"
    return ScriptPhase(kind, state, both=both, name=name or place)


def progress(done: int, of: int) -> None:
    """Tell how many of the rollout's responses are done: by that a pool decides when to take some of its nodes."""
    if (session := _session()) is not None:
        session.progress(done, of)


def on_consolidate(callback: Callable[[tuple[str, ...]], None]) -> None:
    """Have `callback` called, on a thread of its own, when the rollout's last responses are to move to these of its
    nodes. The others count as left once it returns; if it raises, or where there is none, they are kept."""
    if (session := _session()) is not None:
        session.on_consolidate(callback)


def should_yield() -> bool:
    """Whether the phase under way was recalled: it should end soon, or call `give_way`."""
    return (session := _session()) is not None and session.recalled


def give_way() -> None:
    """Take the states off the device, let others have their turn, and return once this phase may go on. Does nothing
    outside of a phase. Whatever else the script has on the device stays there, so call it where that is little."""
    if (session := _session()) is not None:
        session.give_way()


def steps_done(steps: int) -> None:
    """Tell how many steps are done in all. Else every training phase that ends counts as one."""
    if (session := _session()) is not None:
        session.steps_done(steps)


_live: "PhaseSession | None" = None
_beginning = threading.Lock()


def _session() -> "PhaseSession | None":
    global _live
    if _live is not None or not os.environ.get(POOL_VARIABLE):
        return _live
    with _beginning:
        if _live is None:
            from elastic.phases.session import PhaseSession

            _live = PhaseSession.of_environment(os.environ)
            atexit.register(_live.close)
    return _live


def _place_of(function: Any) -> str:
    code = getattr(function, "__code__", None)
    return "?" if code is None else f"{os.path.basename(code.co_filename)}:{code.co_firstlineno}"
