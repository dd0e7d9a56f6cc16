"""A function pool on this machine: real processes, started when a call finds none, ended after some idle time.

A process takes one call at a time. Its start is measured and billed, as a platform bills it; waiting for a free
place is not. A call that runs out of time, a process that dies under a call, and an answer that is too large or makes
no sense take the process with them, and whatever it has started. Processes inherit what `processes.py` names, and
are recorded, so that none outlives the run.
"""

import asyncio
import contextlib
import os
import secrets
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import UnionType
from typing import Any, NamedTuple

import msgspec
import structlog

from elastic.system.processes import inherited
from elastic.system.supervision import RecordedProcesses
from functions.base import (
    BadResult,
    Call,
    CallOutcome,
    FunctionError,
    FunctionRaised,
    FunctionTimedOut,
    FunctionUnavailable,
    Meter,
)
from functions.keyed import UNDECODABLE, KeyedPool, value_of
from functions.process import ANSWER_BYTES_MAX, HEADER, Answer, Loaded, Missing, Raised, Returned, Unsendable

log = structlog.get_logger(__name__)

FUNCTIONS = "functions"
"""The owner of their processes in a run's records."""
END_TIMEOUT_S = 10.0
"""How long a killed process and its children may take to end. Beyond that its record stays."""
START_TIMEOUT_S = 60.0
"""How long the first start may take. Later ones have the time of the call that waits for them."""

_decode_answer = msgspec.msgpack.Decoder(Answer).decode


class Place(NamedTuple):
    """Where a pool's processes run: what their output goes to, who they are recorded for, what they inherit besides."""

    log: Path | None = None
    run: str = ""
    records: Path | None = None
    pass_env: Sequence[str] = ()


class Prices(NamedTuple):
    """What a platform charges. A paced call takes at least `pacing_s`: a real result, at a modelled speed."""

    usd_per_s: float = 0.0
    usd_per_call: float = 0.0
    pacing_s: float = 0.0


class _Process:
    """One process with the function loaded, in a session and process group of its own."""

    def __init__(self, function: str, place: Place) -> None:
        self._function = function
        self._place = place
        name = f"function-{secrets.token_hex(8)}"
        self._recorded = RecordedProcesses(place.records, place.run, FUNCTIONS, name)
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Raises `FunctionError`. However it ends, `kill` leaves nothing behind."""
        spawning = asyncio.create_task(self._spawn())
        try:
            await asyncio.shield(spawning)
        except asyncio.CancelledError:
            # Cut short, the event loop would kill the process without telling anyone when it is dead.
            await asyncio.gather(spawning, return_exceptions=True)
            raise
        value_of(self._function, await self._hear(Loaded | Missing))

    async def _spawn(self) -> None:
        with contextlib.ExitStack() as files:
            output = self._place.log
            try:
                errors: Any = asyncio.subprocess.DEVNULL if output is None else files.enter_context(output.open("ab"))
                self._process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-m", "functions.process", str(os.getpid()), self._function),
                    env=inherited(*self._place.pass_env) | self._recorded.marks,
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=errors,
                    start_new_session=True,
                )
                self._recorded.add(self._function, self._process.pid)
            except OSError as error:
                raise FunctionUnavailable(f"{self._function}: no process could be started: {error}") from error

    async def call(self, payload: bytes) -> Any:
        process = self._running()
        assert process.stdin is not None
        try:
            process.stdin.write(HEADER.pack(len(payload)) + payload)
            await process.stdin.drain()
        except OSError as error:
            raise FunctionUnavailable(f"{self._function}: its process died before the call") from error
        return value_of(self._function, await self._hear(Returned | Raised | Unsendable))

    async def kill(self) -> None:
        """SIGKILL the process and whatever it started; returns once it is reaped and that is gone."""
        process, self._process = self._process, None
        if process is None:
            return
        # Also when it has ended by itself: what it started may still be there.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        if process.stdin is not None:
            process.stdin.close()
        try:
            async with asyncio.timeout(END_TIMEOUT_S):
                await process.wait()
                await self._recorded.end()
                # What nobody read would keep the pipe open.
                while process.stdout is not None and await process.stdout.read(ANSWER_BYTES_MAX):
                    pass
        except TimeoutError:
            log.warning("function's processes do not die", function=self._function, pid=process.pid)
        finally:
            # Otherwise the pipes stay open until they have been read to their ends.
            process._transport.close()  # type: ignore[attr-defined]

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def _hear(self, expected: UnionType) -> Answer:
        process = self._running()
        assert process.stdout is not None
        try:
            (size_bytes,) = HEADER.unpack(await process.stdout.readexactly(HEADER.size))
            if size_bytes > ANSWER_BYTES_MAX:
                raise OversizedAnswer(
                    f"{self._function}: an answer of {size_bytes} bytes; at most {ANSWER_BYTES_MAX} are taken"
                )
            answer = _decode_answer(await process.stdout.readexactly(size_bytes))
        except (asyncio.IncompleteReadError, OSError) as error:
            status = await process.wait()
            raise FunctionUnavailable(f"{self._function}: its process ended with status {status}") from error
        except UNDECODABLE as error:
            raise FunctionUnavailable(f"{self._function}: its process answered nonsense: {error}") from error
        if not isinstance(answer, expected):
            raise FunctionUnavailable(f"{self._function}: its process spoke out of turn")
        return answer

    def _running(self) -> asyncio.subprocess.Process:
        assert self._process is not None
        return self._process


class OversizedAnswer(BadResult):
    """An answer was too large and was not read, so the pipe is of no further use."""


class _Meterings:
    """The times of one call, filled in as they become known."""

    def __init__(self) -> None:
        self._asked_s = _now_s()
        self._placed_s: float | None = None
        self._cold_start_s = 0.0

    def placed(self) -> None:
        self._placed_s = _now_s()

    @contextlib.contextmanager
    def cold_start(self) -> Iterator[None]:
        begun_s = _now_s()
        try:
            yield
        finally:
            self._cold_start_s = _now_s() - begun_s

    def end(self, function: str, key: str, outcome: CallOutcome, prices: Prices) -> Call:
        now_s = _now_s()
        placed_s = now_s if self._placed_s is None else self._placed_s
        billed_s = now_s - placed_s
        return Call(
            function=function,
            key=key,
            outcome=outcome,
            queued_s=placed_s - self._asked_s,
            cold_start_s=self._cold_start_s,
            duration_s=billed_s - self._cold_start_s,
            usd=0.0 if self._placed_s is None else billed_s * prices.usd_per_s + prices.usd_per_call,
        )


class LocalFunctionPool(KeyedPool):
    """`functions.base.FunctionPool` over processes; at most `concurrency` of them, none after `idle_s` without a call.

    `log` takes what the function prints, `records` the record of each process of the `run`; `pass_env` names
    environment variables that they inherit besides. `meter` hears of every call.
    """

    def __init__(
        self,
        function: str,
        *,
        concurrency: int = 4,
        idle_s: float = 30.0,
        prices: Prices = Prices(),  # noqa: B008 - an immutable default
        log: Path | None = None,
        meter: Meter = lambda _: None,
        run: str = "",
        records: Path | None = None,
        pass_env: Sequence[str] = (),
    ) -> None:
        super().__init__(function, meter)
        self._idle_s = idle_s
        self._prices = prices
        self._place = Place(log, run, records, pass_env)
        self._places = asyncio.Semaphore(concurrency)
        self._idle: dict[_Process, asyncio.TimerHandle] = {}

    async def start(self) -> None:
        process = _Process(self.function, self._place)
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                await process.start()
        except TimeoutError:
            await process.kill()
            raise FunctionTimedOut(f"{self.function}: not loaded within {START_TIMEOUT_S:g} s") from None
        except BaseException:
            await process.kill()
            raise
        self._rest(process)

    def most_usd(self, timeout_s: float) -> float:
        return self._prices.usd_per_call + self._prices.usd_per_s * timeout_s

    async def aclose(self) -> None:
        self._closed = True
        for process in list(self._idle):
            self._retire(process)
        await self._end_calls()

    async def _call(self, key: str, payload: bytes, timeout_s: float) -> Any:
        times = _Meterings()
        outcome = CallOutcome.UNAVAILABLE
        try:
            async with asyncio.timeout(timeout_s), self._places:
                times.placed()
                result = await self._run(payload, times)
            outcome = CallOutcome.OK
        except TimeoutError:
            outcome = CallOutcome.TIMED_OUT
            raise self._timed_out(timeout_s) from None
        except FunctionError as error:
            outcome = error.outcome
            raise
        finally:
            self._meter(times.end(self.function, key, outcome, self._prices))
        return result

    async def _run(self, payload: bytes, times: _Meterings) -> Any:
        """Run a call on a warm process or a new one. Only a process that has answered is used again."""
        process = self._warm_process()
        answered = False
        try:
            if process is None:
                process = _Process(self.function, self._place)
                with times.cold_start():
                    await process.start()
            begun_s = _now_s()
            result = await process.call(payload)
            await asyncio.sleep(begun_s + self._prices.pacing_s - _now_s())
            answered = True
            return result
        except OversizedAnswer:
            raise
        except (FunctionRaised, BadResult):
            answered = True
            raise
        finally:
            if process is not None and answered and not self._closed:
                self._rest(process)
            elif process is not None:
                await asyncio.shield(self._own(process.kill(), "kill"))

    def _warm_process(self) -> _Process | None:
        """The idle process that was used last, so that the others can reach their idle limit and end."""
        while self._idle:
            process, timer = self._idle.popitem()
            timer.cancel()
            if process.alive:
                return process
            self._own(process.kill(), "reap")
        return None

    def _rest(self, process: _Process) -> None:
        self._idle[process] = asyncio.get_running_loop().call_later(self._idle_s, self._retire, process)

    def _retire(self, process: _Process) -> None:
        self._idle.pop(process).cancel()
        self._own(process.kill(), "scale down")


def _now_s() -> float:
    return time.monotonic()
