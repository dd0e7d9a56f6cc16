"""Phases of a script that takes turns with other jobs on a pool: `@elastic.phase("rollout", state=[model])`.

In a pool a phase waits for its permit, brings its states to the device, runs, takes them off the device and gives the
nodes back. Outside of a pool all of this does nothing, so that the script runs alone as ever.

- Phases follow one another: rollout, train, rollout, … In a pool a phase within a phase, and training before any
  rollout, raise `PhaseError`.
- A phase cannot be interrupted. When it is recalled it gives way at its end, or where the script calls `yield_device`;
  at the deadline the script's processes are killed.
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
    from elastic.pool.phases.session import PhaseSession

PHASES = ("rollout", "train", "sync")
POOL_VARIABLE = "ELASTIC_POOL"

PhaseName: TypeAlias = Literal["rollout", "train", "sync"]
States: TypeAlias = Sequence[Any] | Callable[[], Iterable[Any]]
F = TypeVar("F", bound=Callable[..., Any])


class PhaseError(RuntimeError):
    """A phase cannot begin or go on: it is declared wrongly, or the pool does not grant it. The message names the
    phase."""


class ScriptPhase:
    """A phase, as a decorator or a context manager. It has an effect in a pool only."""

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
        """Return this phase with other states. Ending either of the two ends both."""
        other = ScriptPhase(self.kind, state, both=self.both, name=self.name, inner=self.inner)
        other.origin = self.origin
        return other

    def __str__(self) -> str:
        return f"phase {self.kind!r} ({self.name})"

    def states(self) -> list[Any]:
        return list(self._state() if callable(self._state) else self._state)

    def begin(self, *, lingers: bool = False) -> bool:
        """Enter the phase. A phase that `lingers` lasts until `end`, or until another phase begins. Raises
        `PhaseError`.

        Returns whether the caller must call `end`. It must not outside of a pool, nor within a phase of the same kind.
        """
        session = _session()
        return session is not None and session.begin(self, lingers=lingers)

    def end(self, *, finished: bool = True) -> None:
        """Leave the phase. Does nothing if the phase is not under way."""
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
    """Declare a phase of the script, as a decorator or a context manager. Raises `PhaseError`, also for an unknown
    `kind`.

    - `state` names what is on the device during the phase: torch modules and optimisers, which are moved in place;
      objects with `park` and `resume`; or an engine with `sleep` and `wake_up`. `state` may be a function that returns
      these objects.
    - With `both` the phase waits until it has the nodes of rollouts and of training at once.
    - A `sync` phase without `both` holds no device: it only separates the other phases.
    """
    caller = sys._getframe(1)
    place = f"{os.path.basename(caller.f_code.co_filename)}:{caller.f_lineno}"
    return ScriptPhase(kind, state, both=both, name=name or place)


def progress(done: int, of: int) -> None:
    """Tell the pool how many of the rollout's responses are done. The pool uses this to decide when to take nodes
    back."""
    if (session := _session()) is not None:
        session.progress(done, of)


def on_consolidate(callback: Callable[[tuple[str, ...]], None]) -> None:
    """Register `callback`, which the pool calls on a thread of its own to move the rollout's last responses to fewer
    nodes.

    `callback` gets the nodes to keep. The other nodes count as left when it returns. If it raises, or if no callback is
    registered, the script keeps all of its nodes.
    """
    if (session := _session()) is not None:
        session.on_consolidate(callback)


def should_yield() -> bool:
    """Return whether the pool has recalled the phase under way. The phase should then end soon, or call
    `yield_device`."""
    return (session := _session()) is not None and session.recalled


def yield_device() -> None:
    """Take the states off the device, let other jobs have their time slice, and return once this phase may go on.

    Does nothing outside of a phase. Anything else that the script has on the device stays there, so call this where
    little is left.
    """
    if (session := _session()) is not None:
        session.yield_device()


def steps_done(steps: int) -> None:
    """Tell the pool how many steps are done in all. Without this call every training phase that ends counts as one
    step."""
    if (session := _session()) is not None:
        session.steps_done(steps)


def leave() -> None:
    """End this process's session with the pool, if it has one. The next phase opens another."""
    global _live
    with _beginning:
        session, _live = _live, None
    if session is not None:
        session.close()


_live: "PhaseSession | None" = None
_beginning = threading.Lock()


def _session() -> "PhaseSession | None":
    global _live
    if _live is not None or not os.environ.get(POOL_VARIABLE):
        return _live
    with _beginning:
        if _live is None:
            from elastic.pool.phases.session import PhaseSession

            _live = PhaseSession.of_environment(os.environ)
            atexit.register(leave)
    return _live


def _place_of(function: Any) -> str:
    code = getattr(function, "__code__", None)
    return "?" if code is None else f"{os.path.basename(code.co_filename)}:{code.co_firstlineno}"
