"""Code of an environment that holds the event loop: it is named, a signal interrupts it, and its trajectory fails."""

import asyncio
import json
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, cast

import pytest
import structlog
import uvloop

from elastic.core import commands as c
from elastic.core import events as e
from elastic.core.types import PolicyFault, SamplingParameters
from elastic.environments import answers, frozenlake
from elastic.environments.base import StepResult
from elastic.protocol import wire
from elastic.runtime import recorder, rollout
from elastic.runtime.episodes import RolloutLimits
from elastic.runtime.loop_watch import LoopWatch, asked_plug_in, holder_of
from elastic.runtime.rollout import Rollouts
from elastic.system.plug_ins import AskedPlugIn
from elastic.system.signals import TERMINATION, act_on

HELD_S = 0.4
EXECUTION = str(Path(__file__).parents[2] / "elastic" / "compose" / "execution.py")
"""Not imported for its path alone, by processes that start often."""


class Sleeping:
    """Its reset holds the loop for `reset_s`, in one piece or computing."""

    def __init__(self, reset_s: float, how: str) -> None:
        self._reset_s, self._how = reset_s, how

    async def reset(self, seed: int) -> list[int]:
        print("begun", flush=True)
        ends_s = time.monotonic() + self._reset_s
        if self._how == "sleeps":
            time.sleep(self._reset_s)  # noqa: ASYNC251 - what this is about
        while time.monotonic() < ends_s:
            if self._how == "swallows":
                try:
                    sum(range(1000))
                except Exception:
                    continue
        return [1]

    async def step(self, token_ids: list[int]) -> StepResult:
        return StepResult([], True, 1.0)

    async def truncate(self) -> float:
        return 0.0

    async def aclose(self) -> None: ...


async def live(reset_s: float, how: str, timeout_s: float) -> dict[str, Any]:
    """Play one trajectory under watch; returns what was said, and what the core was told."""
    said: list[str] = []
    told: list[e.Event] = []
    ended = asyncio.Event()
    limits = RolloutLimits(4, 64, timeout_s, SamplingParameters(max_new_tokens=8, noise_seed=0), 8)

    def feed(event: e.Event, payload: Any = None) -> None:
        if isinstance(event, e.TurnRequested):
            asyncio.get_running_loop().call_soon(rollouts.finish_turn, event.turn)
        else:
            told.append(event)
            ended.set()

    watch = LoopWatch(said.append, held_s=HELD_S)
    stopped = asyncio.Event()
    act_on(TERMINATION, stopped.set, watch.told_to_end)
    with watch.watching():
        async with asyncio.TaskGroup() as tasks:
            rollouts = Rollouts(
                *(1, limits, lambda: cast("Any", Sleeping(reset_s, how)), feed, time.monotonic_ns),
                lambda work, name: tasks.create_task(work, name=name),
            )
            rollouts.start(c.StartGroup(step=0, group="0/0", index=0, trajectories=("0/0/0",)))
            await ended.wait()
        await asyncio.sleep(2 * HELD_S)
    return {"said": said, "told": [str(event) for event in told], "stopped": stopped.is_set()}


def main() -> None:
    loop, reset_s, how, timeout_s = sys.argv[1:]
    factory = uvloop.new_event_loop if loop == "uvloop" else asyncio.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        print(json.dumps(runner.run(live(float(reset_s), how, float(timeout_s)))))


def played(loop: str, reset_s: float, how: str, timeout_s: float, *, ends: bool) -> tuple[dict[str, Any], float]:
    """What a process of its own comes to, and how long that took from its signal on."""
    command = [sys.executable, "-m", "tests.runtime.test_loop_watch", loop, str(reset_s), how, str(timeout_s)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        began_s = time.monotonic()
        if ends:
            process.send_signal(signal.SIGTERM)
        return json.loads(process.stdout.read().splitlines()[-1]), time.monotonic() - began_s


@pytest.mark.parametrize(("loop", "how"), [("uvloop", "sleeps"), ("asyncio", "swallows")])
def test_a_signal_interrupts_what_holds_the_loop(loop: str, how: str) -> None:
    """A process whose loop is really held, and a real signal."""
    found, took_s = played(loop, 60.0, how, 100.0, ends=True)
    assert took_s < 30.0
    assert found["stopped"]
    (failed,) = found["told"]
    assert "TrajectoryFailed" in failed
    assert "Interrupted" in failed


def test_who_holds_the_loop_is_named_and_its_trajectory_fails_once_the_loop_is_back() -> None:
    """A process whose loop is really held for longer than the watch bears."""
    found, _ = played("uvloop", 3 * HELD_S, "sleeps", HELD_S, ends=False)
    held, free = found["said"]
    assert held.startswith("warning: environment Sleeping.reset (")
    assert "test_loop_watch.py:" in held
    assert "holds the event loop since" in held
    assert "the event loop goes on" in free
    (failed,) = found["told"]
    assert "did not answer within 0.4 s" in failed
    assert not found["stopped"]


@pytest.mark.parametrize(
    ("files", "named"),
    [
        (["/home/me/game.py"], "environment called_0 (/home/me/game.py:1)"),
        (["/home/me/game.py", json.__file__], f"environment called_0 ({json.__file__}:1 in called_1)"),
        ([EXECUTION, "/home/me/game.py"], "environment called_1 (/home/me/game.py:1)"),
        ([frozenlake.__file__], f"environment called_0 ({frozenlake.__file__}:1)"),
        ([answers.__file__, wire.__file__], ""),
        ([recorder.__file__, sqlite3.__file__], ""),
        ([wire.__file__], ""),
        ([structlog.stdlib.__file__], ""),
        ([], ""),
    ],
)
def test_only_code_of_environments_is_blamed(files: list[str], named: str) -> None:
    """What a rollout loop calls stands in these files, each called by the one before."""
    innermost: Any = sys._getframe
    for number, file in reversed([*enumerate(files)]):
        scope = {"inner": innermost}
        exec(compile(f"def called_{number}(): return inner()", file, "exec"), scope)
        innermost = scope[f"called_{number}"]
    scope = {"inner": innermost}
    exec(compile("def play(): return inner()", rollout.__file__, "exec"), scope)
    assert holder_of(scope["play"]()) == named


async def test_a_plug_in_that_holds_the_loop_beyond_its_limit_is_named_and_interrupted() -> None:
    theirs, said = AskedPlugIn("lab of theirs", PolicyFault), list[str]()

    def free() -> None:
        while True:
            time.sleep(0.05)

    assert theirs.ask("free", lambda: asked_plug_in(sys._getframe())).startswith(f"lab of theirs: free ({__file__}:")
    assert asked_plug_in(sys._getframe()) == ""
    with LoopWatch(said.append, limit_s=HELD_S, held_s=HELD_S / 2).watching(), pytest.raises(PolicyFault) as fault:
        theirs.ask("free", free)
    assert f"free raised Interrupted: this held the event loop for more than 0.4 s, at {__file__}:" in str(fault.value)
    assert said[0].startswith(f"warning: lab of theirs: free ({__file__}:")


if __name__ == "__main__":
    main()
