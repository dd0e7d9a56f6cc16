"""A vLLM engine that takes turns on its device with other jobs, and keeps its process meanwhile."""

import contextlib
import time
from typing import Any

import msgspec

from elastic.core.types import Account, WeightMode
from elastic.engine.base import EngineStatistics
from elastic.engine.vllm import messages as m
from elastic.engine.vllm.engine import VllmEngine
from elastic.system.parking import Switch
from elastic.weights.source import WeightsSource


class ParkableVllmEngine(VllmEngine):
    """`VllmEngine` that is `Parkable`, by vLLM's own sleep: running turns end, the prefix cache is emptied, and on a
    GPU the memory of weights and KV is freed.

    A GPU belongs to another job meanwhile, so a version that is ordered then is put in force as the engine resumes, and
    a vLLM process that dies then has no successor: the engine is of no further use. On a CPU a version is put in force
    at once, and the memory of KV stays allocated.
    """

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._ordered: tuple[WeightsSource, WeightMode] | None = None

    def park(self) -> Switch:
        with self._changed:
            if self._resting is not None:
                return Switch(0.0, 0)
        begun_s = time.monotonic()
        self._rest(Account.SWITCHING)
        reply = self._call(m.SleepNow)
        self._rest(Account.PARKED)
        return Switch(time.monotonic() - begun_s, reply.state_bytes)

    def resume(self) -> Switch:
        with self._changed:
            if self._resting is None:
                return Switch(0.0, 0)
        begun_s = time.monotonic()
        self._rest(Account.SWITCHING)
        try:
            reply = self._call(m.WakeUp)
            if self._ordered is not None:
                super().load_version(*self._ordered)
                self._ordered = None
            if self._asleep:
                self._call(m.SleepNow)
        except BaseException:
            with contextlib.suppress(RuntimeError):
                self._call(m.SleepNow)
            self._rest(Account.PARKED)
            raise
        self._rest(None)
        return Switch(time.monotonic() - begun_s, reply.state_bytes)

    def load_version(self, source: WeightsSource, mode: WeightMode) -> float:
        if self._resting is not None and self._up.device != "cpu":
            self._ordered = source, mode
            return 0.0
        return super().load_version(source, mode)

    def statistics(self) -> EngineStatistics:
        found, ordered = super().statistics(), self._ordered
        return found if ordered is None else msgspec.structs.replace(found, weights_version=ordered[0].version)

    def sleep(self) -> None:
        if self._resting is None:
            super().sleep()
        else:
            self._asleep = True

    def wake(self) -> None:
        if self._resting is None:
            super().wake()
        else:
            self._asleep = False

    def _rest(self, account: Account | None) -> None:
        with self._changed:
            self._resting = account
            self._charge()
