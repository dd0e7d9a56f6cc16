"""What token-level environments cost a run in env workers, and on its own event loop; and what becomes of killed ones.

The run's side is the orchestrator's own: rollout loops, env workers' connections, and who keeps these processes, on the
event loop of production. Env workers are processes of `elastic env-worker`, at their lower priority. The policy
answers at once.

- loop_lag_ms_p99: how late a timer of the run's loop is, with no trajectories, and with 64 whose steps compute for
  50 ms each, on the loop and in one env worker. loop_held_ms_p99: for how long, of that, the loop's own thread
  computed, which does not depend on what else the machine does;
- us_per_step: CPU of a step that does nothing, of all processes together;
- restart_s: from `kill -9` of one of four env workers until each of its trajectories has had an answer again;
- trajectories under random kills of four env workers, each once all four are there: those that were scored twice are
  repeated, those without an end lost. Failed are those of whose steps four env workers in a row died, as
  `elastic.runtime.blame` has it.

`--quick` measures the same with fewer trajectories, and two env workers in the place of four.
"""

import asyncio
import contextlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import psutil

from benchmarks import HERE, ROOT
from benchmarks._common import Figures, benchmark
from benchmarks._computing import WORDS, Computing
from benchmarks._waiting import awaited
from elastic.core import commands as c
from elastic.core import events as e
from elastic.core.ids import env_worker_id
from elastic.core.types import SamplingParameters
from elastic.environments.base import Environment
from elastic.environments.run_link import KEY_VARIABLE
from elastic.protocol.run_secrets import RunSecrets
from elastic.protocol.sampled import pack_ids, pack_logprobs
from elastic.runtime.agents import EPISODE_HOSTS, Doorkeeper, EnvWorkerOrder, EnvWorkersOrder, ServingHosts
from elastic.runtime.episodes import RolloutLimits
from elastic.runtime.hosted import EpisodeHosts
from elastic.runtime.rollout import Rollouts
from elastic.system.processes import inherited
from elastic.system.supervision import records

NAME = "computing"
TRAJECTORIES, COMPUTES_MS = 64, 50
KILLED_TRAJECTORIES, KILLED_COMPUTES_MS, KILLED_TURNS = 500, 20, 5
WORKERS = 4
BETWEEN_KILLS_S = 0.5, 2.5
LAG_SLEEP_S = 0.002
EMPTY_STEPS = 400
"""Of each trajectory."""
PATIENCE_S = 240.0
ENDLESS = 1_000_000


class PolicyAtOnce:
    """Rollout loops, whose turns are this one `token` as soon as they are asked for; what they come to is counted."""

    def __init__(self, make: Callable[[], Environment], token: int, turns: int = ENDLESS) -> None:
        self._turn = pack_ids([token])
        self.asked = Counter[str]()
        """Turns, by trajectory."""
        self.scored = Counter[str]()
        self.failed = Counter[str]()
        self._tasks: set[asyncio.Task[None]] = set()
        sampling = SamplingParameters(max_new_tokens=1, noise_seed=0)
        limits = RolloutLimits(turns, ENDLESS, None, sampling, WORDS)
        self.rollouts = Rollouts(7, limits, make, self._feed, lambda: 0, self._spawn)

    @property
    def ended(self) -> int:
        return len(self.scored.keys() | self.failed.keys())

    def begin(self, trajectories: int) -> list[str]:
        names = [f"0/{number}/0" for number in range(trajectories)]
        for number, name in enumerate(names):
            self.rollouts.start(c.StartGroup(step=0, group=f"0/{number}", index=number, trajectories=(name,)))
        return names

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _feed(self, event: e.Event, payload: Any = None) -> None:
        match event:
            case e.TurnRequested():
                self.asked[event.trajectory] += 1
                asyncio.get_running_loop().call_soon(self._answer, event.turn)
            case e.TrajectoryFinished():
                self.scored[event.trajectory] += 1
            case e.TrajectoryFailed():
                self.failed[event.trajectory] += 1
            case _:
                pass

    def _answer(self, turn: str) -> None:
        asked = self.rollouts.prompt(turn)
        if asked is not None:
            asked.accept(self._turn, pack_logprobs([-1.0]), 0, "worker")
            self.rollouts.finish_turn(turn)


class EnvWorkersThere(NamedTuple):
    """Env workers that are there."""

    hosts: EpisodeHosts
    run_dir: Path
    workers: int

    def make(self) -> Environment:
        return cast(Environment, self.hosts.make(NAME))

    def pids(self) -> list[int]:
        """Of those that are there."""
        found = list[int]()
        for driver, host in self.hosts.connected.items():
            if host.facts is not None:
                record = json.loads((records(self.run_dir) / f"{driver}.json").read_bytes())
                found += (process["pid"] for process in record["processes"].values())
        return found


@contextlib.asynccontextmanager
async def hosted(workers: int) -> AsyncIterator[EnvWorkersThere]:
    """A context with so many env workers, once all are there."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder, "run")
        (run_dir / "logs").mkdir(parents=True)
        records(run_dir).mkdir()
        install(Path(folder))
        config = {"model": {"checkpoint": "."}, "environment": {"name": NAME}}
        (run_dir / "config.json").write_text(json.dumps(config))
        secrets, failed = RunSecrets.of(run_dir), list[str]()

        def fail(cause: str, *, bad_input: bool = False) -> None:
            failed.append(cause)

        hosts = EpisodeHosts((NAME,), WORDS, fail)
        doorkeeper = Doorkeeper("benchmark", secrets, lambda: bool(failed), hosts)
        names = [env_worker_id(NAME, number) for number in range(workers)]
        path = {"PYTHONPATH": os.pathsep.join((folder, str(ROOT)))}
        order = EnvWorkersOrder(
            run_dir=run_dir,
            workers={
                name: EnvWorkerOrder(
                    command=(sys.executable, "-m", "elastic.cli", "env-worker", str(run_dir), "--environment", NAME),
                    variables={**inherited(), **path, KEY_VARIABLE: secrets.driver_key(name)},
                    start_timeout_s=120.0,
                    step_timeout_s=60.0,
                    max_restarts=ENDLESS,
                )
                for name in names
            },
            secrets=(),
            owner=EPISODE_HOSTS,
        )
        serving = ServingHosts(order, False, hosts, doorkeeper, fail)
        await serving.start()
        try:
            there = EnvWorkersThere(hosts, run_dir, workers)
            await awaited("env workers", lambda: len(there.pids()) == workers, PATIENCE_S)
            yield there
        finally:
            await serving.aclose()
        if failed:
            raise RuntimeError(failed[0])


def install(folder: Path) -> None:
    """As `pip install` would have the environment."""
    shutil.copy(HERE / "_computing.py", folder)
    about = folder / f"{NAME}-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {NAME}\nVersion: 1\n")
    (about / "entry_points.txt").write_text(f"[elastic.environments]\n{NAME} = _computing:Computing\n")


class LoopLag(NamedTuple):
    lag_ms: float
    held_ms: float


async def lag(window_s: float) -> LoopLag:
    """The 99th percentile of how late timers are, and of for how long the loop's thread computed meanwhile."""
    late, held = list[float](), list[float]()
    ends_s = time.monotonic() + window_s
    while time.monotonic() < ends_s:
        began_s, computed_s = time.monotonic(), time.thread_time()
        await asyncio.sleep(LAG_SLEEP_S)
        late.append(time.monotonic() - began_s - LAG_SLEEP_S)
        held.append(time.thread_time() - computed_s)
    return LoopLag(*(float(np.percentile(found, 99)) * 1e3 for found in (late, held)))


async def lag_under(make: Callable[[], Environment], window_s: float, trajectories: int) -> LoopLag:
    policy = PolicyAtOnce(make, COMPUTES_MS)
    async with policy.rollouts.ending():
        policy.begin(trajectories)
        await awaited("a turn of each", lambda: len(policy.asked) == trajectories, PATIENCE_S)
        return await lag(window_s)


async def empty_steps(environments: list[Environment], steps: int) -> None:
    async def play(environment: Environment) -> None:
        for _ in range(steps):
            await environment.step([0, 1, 2])

    await asyncio.gather(*(play(environment) for environment in environments))


async def us_per_step(make: Callable[[], Environment], steps: int, pids: list[int]) -> float:
    """CPU of a step, of this process and these."""
    environments = [make() for _ in range(TRAJECTORIES)]
    for environment in environments:
        await environment.reset(1)
    await empty_steps(environments, 10)
    before_s = cpu_s(pids)
    await empty_steps(environments, steps)
    return (cpu_s(pids) - before_s) / (steps * TRAJECTORIES) * 1e6


def cpu_s(pids: list[int]) -> float:
    return time.process_time() + sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids)


async def restart_s(there: EnvWorkersThere) -> float:
    policy = PolicyAtOnce(there.make, 1)
    async with policy.rollouts.ending():
        names = policy.begin(TRAJECTORIES)
        await awaited("a turn of each", lambda: all(policy.asked[name] > 1 for name in names), PATIENCE_S)
        os.kill(there.pids()[0], signal.SIGKILL)
        killed_s, before = time.monotonic(), dict(policy.asked)
        # Two turns, for the answer to one may have been on its way.
        await awaited(
            "an answer to each", lambda: all(policy.asked[name] > before[name] + 1 for name in names), PATIENCE_S
        )
        return time.monotonic() - killed_s


async def under_kills(there: EnvWorkersThere, trajectories: int) -> dict[str, int]:
    rng = random.Random(7)
    policy, kills = PolicyAtOnce(there.make, KILLED_COMPUTES_MS, KILLED_TURNS), 0
    async with policy.rollouts.ending():
        names = policy.begin(trajectories)
        while policy.ended < trajectories:
            await asyncio.sleep(rng.uniform(*BETWEEN_KILLS_S))
            if len(pids := there.pids()) == there.workers and policy.ended < trajectories:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(rng.choice(pids), signal.SIGKILL)
                    kills += 1
    ends = policy.scored + policy.failed
    return {
        "trajectories": trajectories,
        "repeated": sum(count - 1 for count in ends.values()),
        "lost": len(set(names) - ends.keys()),
        "failed": len(policy.failed),
        "kills": kills,
    }


def in_process() -> Environment:
    return cast(Environment, Computing())


class Size(NamedTuple):
    """How much is measured."""

    window_s: float
    computing: int
    """Trajectories whose steps compute."""
    steps: int
    workers: int
    """Of which some are killed."""
    killed: int


FULL = Size(15.0, TRAJECTORIES, EMPTY_STEPS, WORKERS, KILLED_TRAJECTORIES)
QUICK = Size(1.5, TRAJECTORIES // 4, EMPTY_STEPS // 4, WORKERS // 2, KILLED_TRAJECTORIES // 20)


async def measure(size: Size) -> Figures:
    lags = {"none": await lag(size.window_s), "in_process": await lag_under(in_process, size.window_s, size.computing)}
    per_step = {"in_process": await us_per_step(in_process, size.steps, [])}
    async with hosted(1) as there:
        lags["process"] = await lag_under(there.make, size.window_s, size.computing)
        per_step["process"] = await us_per_step(there.make, size.steps, there.pids())
    async with hosted(size.workers) as there:
        restarted_s = await restart_s(there)
        killed = await under_kills(there, size.killed)
    return {
        "loop_lag_ms_p99": {name: one.lag_ms for name, one in lags.items()},
        "loop_held_ms_p99": {name: one.held_ms for name, one in lags.items()},
        "us_per_step": per_step,
        "restart_s": restarted_s,
        **killed,
    }


if __name__ == "__main__":
    benchmark(__doc__, lambda arguments: measure(QUICK if arguments.quick else FULL))
