"""The time slices of a script: which phase is under way, the order of phases, and the states that move with them."""

import logging
import os
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

from elastic.core.cluster.types import Permit, PhaseKind
from elastic.pool.client import PoolMembership, PoolUnavailable
from elastic.pool.messages import UNFIT_STATUS
from elastic.pool.phases import PhaseError, ScriptPhase
from elastic.pool.phases.client import Consolidate, PhaseClient
from elastic.pool.phases.states import StateArena
from elastic.system.devices import mismatch

_log = logging.getLogger("elastic.pool.phases")


class PhaseSession:
    """The phases of one process. Any thread may enter and leave phases, one at a time."""

    def __init__(self, client: PhaseClient) -> None:
        self._client = client
        self._arena = StateArena()
        self._lock = threading.Lock()
        self._current: ScriptPhase | None = None
        self._lingers = False
        self._permit: Permit | None = None
        self._resume_s = 0.0
        self._rolled_out = False
        self._steps: int | None = 0
        """Counted here; None once the script tells them."""

    @classmethod
    def of_environment(cls, environment: Mapping[str, str]) -> "PhaseSession":
        """Make the session from environment variables. Raises `PhaseError` if one is missing or no number.

        Ends a process that sees other devices than its node has: it must not compute on them.
        """
        torch = sys.modules.get("torch")
        if differs := mismatch(environment, None if torch is None else torch.cuda.device_count()):
            sys.stderr.write(f"this script sees other devices than its node has: {differs}\n")
            sys.stderr.flush()
            os._exit(UNFIT_STATUS)
        try:
            membership = PoolMembership.of(environment)
        except PoolUnavailable as error:
            raise PhaseError(str(error)) from error
        assert membership is not None, "a script without a pool has no session"
        return cls(PhaseClient(membership))

    @property
    def recalled(self) -> bool:
        return self._permit is not None and self._client.recalled

    def begin(self, phase: ScriptPhase, *, lingers: bool = False) -> bool:
        """Enter the phase; returns once it has its nodes and its states are on the device. Raises `PhaseError`.

        Returns False if the phase is a part of the phase under way; leaving it then does not end that phase.
        """
        with self._lock:
            states = phase.states()
            if self._current is not None:
                if self._is_part(phase, lingers=lingers):
                    self._arena.learn(states, str(phase))
                    self._arena.resume(states)
                    return False
                if not self._lingers:
                    raise PhaseError(f"{phase} begins within {self._current}: one phase ends before another begins")
                self._end(finished=True)
            if phase.kind == "train" and not phase.both and not self._rolled_out:
                raise PhaseError(f"{phase} comes before any phase 'rollout': a step begins with its rollouts")
            self._arena.learn(states, str(phase))
            if phase.kind != "sync" or phase.both:
                self._take_device(phase, states)
            self._current, self._lingers = phase, lingers
            return True

    def end(self, phase: ScriptPhase, *, finished: bool = True) -> None:
        """Take every state off the device and give the nodes back. Does nothing for a phase that is over."""
        with self._lock:
            if self._current is not None and self._current.origin is phase.origin:
                self._end(finished=finished)

    def yield_device(self) -> None:
        with self._lock:
            phase = self._current
            if phase is None or self._permit is None:
                return
            self._leave(finished=False)
            self._take_device(phase, phase.states())

    def progress(self, done: int, of: int) -> None:
        if not 0 <= done <= of:
            raise PhaseError(f"progress: found {done} of {of}; allowed: from 0 to as many as there are")
        self._client.progress(done, of)

    def steps_done(self, steps: int) -> None:
        if steps < 0:
            raise PhaseError(f"steps_done: found {steps}; allowed: at least 0")
        self._steps = None
        self._client.steps_done(steps)

    def on_consolidate(self, callback: Consolidate) -> None:
        self._client.on_consolidate(callback)

    def close(self) -> None:
        """End the session at the script's end, with a lingering phase. Does not wait for a phase of another thread."""
        if self._lock.acquire(blocking=False):
            try:
                if self._current is not None and self._permit is not None:
                    self._leave(finished=True)
            finally:
                self._lock.release()
        self._client.close()

    def _is_part(self, phase: ScriptPhase, *, lingers: bool) -> bool:
        """Return whether the phase continues the phase under way: it lingers under the same kind, or may be a part
        of it."""
        assert self._current is not None
        same = self._current.kind == phase.kind and self._current.both >= phase.both
        return same and (phase.inner or (lingers and self._lingers))

    def _take_device(self, phase: ScriptPhase, states: list[Any]) -> None:
        """Take all of the script's states off the device, wait for a time slice, and bring this phase's states to the
        device."""
        self._arena.park()
        kind = PhaseKind.ROLLOUT if phase.kind == "rollout" and not phase.both else PhaseKind.TRAIN
        asked_s = time.monotonic()
        self._permit = self._client.ask(kind, both=phase.both)
        started_s = time.monotonic()
        _log.info("%s begins under permit %d after %.3f s", phase, self._permit.number, started_s - asked_s)
        try:
            self._arena.resume(states)
        except BaseException:
            self._leave(finished=False)
            raise
        self._resume_s = time.monotonic() - started_s

    def _end(self, *, finished: bool) -> None:
        phase = self._current
        assert phase is not None
        if self._permit is not None:
            self._leave(finished=finished)
        self._current, self._lingers = None, False
        if phase.both or phase.kind == "rollout":
            self._rolled_out = True
        if phase.kind == "train" and finished and self._steps is not None:
            self._steps += 1
            self._client.steps_done(self._steps)

    def _leave(self, *, finished: bool) -> None:
        started_s = time.monotonic()
        self._arena.park()
        self._permit = None
        switch_s = self._resume_s + time.monotonic() - started_s
        self._client.yield_permit(finished=finished, switch_s=switch_s)
        self._resume_s = 0.0
