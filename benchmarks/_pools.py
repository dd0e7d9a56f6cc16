"""Pools of the command line on this machine: started, given jobs, disturbed by kills, and judged."""

import asyncio
import contextlib
import importlib.util
import json
import random
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec

from benchmarks import ROOT
from benchmarks._processes import processes_in
from benchmarks._runs import RunFailed, elastic, sets
from benchmarks._waiting import until
from elastic.compose.pool_config import POOL_CONFIG, load_pool
from elastic.core.cluster import Cluster
from elastic.core.cluster.commands import ClusterCommand
from elastic.core.cluster.events import ClusterEvent
from elastic.core.cluster.history import decoded, replay
from elastic.core.cluster.types import NS_PER_HOUR, Permit
from elastic.core.events import LeaseGranted, TokensReceived
from elastic.core.types import WorkerId
from elastic.pool.control_messages import PoolControl
from elastic.pool.journal import read_records
from elastic.protocol.run_control import ControlError
from elastic.runtime.journal import RunDirectory
from policies.clusters import CLUSTER_POLICIES

JOBS = ROOT / "examples" / "jobs"
POOL = """
[pool]
name = "lab"
directory = "{directory}"
policy = "{policy}"
devices = "cpu"
{pool}
[pool.rollout]
nodes = {rollout_nodes}
usd_per_gpu_hour = 1.85
{rollout}
[pool.train]
nodes = {train_nodes}
gpus = {train_gpus}
usd_per_gpu_hour = 5.28
memory_gb = 12
[limits]
start_s = 120
{limits}
"""
Keys = Mapping[str, str | float]
ROLLOUT_NODES: Keys = {"memory_gb": 12}
ENDED = ("finished", "failed", "cancelled", "rejected")


def _example() -> ModuleType:
    """`make jobs`, which knows a pool's processes."""
    spec = importlib.util.spec_from_file_location("elastic_jobs_live_example", JOBS / "live.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


example = _example()


class LivePool:
    """A pool by its directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def submit(self, config: Path, name: str, runs: Path, settings: Sequence[str] = ()) -> Path:
        """Returns the directory of the job's run."""
        arguments = ["jobs", "submit", str(config), "--name", name, "--pool", str(self.directory), "--json"]
        elastic(*arguments, *sets([f"run.directory={runs}", *settings]))
        return Path(self.job(name)["directory"])

    def submit_at_once(self, jobs: Mapping[str, tuple[Path, Sequence[str]]], runs: Path) -> dict[str, Path]:
        """Submit these jobs by their configurations and settings, in whatever order they arrive; their runs'
        directories."""
        with ThreadPoolExecutor(len(jobs)) as threads:
            found = {name: threads.submit(self.submit, file, name, runs, more) for name, (file, more) in jobs.items()}
        return {name: path.result() for name, path in found.items()}

    def status(self, within_s: float = 60.0) -> dict[str, Any]:
        """How the pool stands, once its process answers. Raises `ControlError`."""
        until_s = time.monotonic() + within_s
        while True:
            try:
                reply = asyncio.run(PoolControl(self.directory, 5.0).status())
            except ControlError:
                if time.monotonic() > until_s:
                    raise
                time.sleep(0.01)
            else:
                return {**msgspec.to_builtins(reply.status), "pid": reply.pid}

    def jobs(self) -> list[dict[str, Any]]:
        """Once the pool's process answers."""
        return self.status()["jobs"]

    def job(self, name: str) -> dict[str, Any]:
        return next(job for job in self.jobs() if job["name"] == name)

    def until(
        self, what: str, done: Callable[[dict[str, Any]], object], within_s: float, every_s: float = 0.2
    ) -> dict[str, Any]:
        """Its status, once this holds of it. Raises `TimeoutError`, which says how the jobs stand."""
        until_s = time.monotonic() + within_s
        while not done(status := self.status()):
            if time.monotonic() > until_s:
                raise TimeoutError(f"not within {within_s:g} s: {what}; {json.dumps(status['jobs'])[:2000]}")
            time.sleep(every_s)
        return status

    def wait_over(self, names: Sequence[str], within_s: float) -> None:
        over: Callable[[dict[str, Any]], bool] = lambda now: all(j["over"] for j in now["jobs"] if j["name"] in names)  # noqa: E731
        self.until("the jobs' ends", over, within_s)

    def kill(self, kind: str, rng: random.Random, of: Sequence[str] = ()) -> int | None:
        """SIGKILL one process of this kind, of these jobs; its id, None where there is none."""
        jobs = [job for job in self.jobs() if not of or job["name"] in of]
        found = example.victims(kind, self.directory, jobs)
        if not found:
            return None
        victim = rng.choice(found)
        victim.send_signal(signal.SIGKILL)
        return int(victim.pid)

    def stop(self) -> None:
        """At once, unless it is over."""
        with contextlib.suppress(RunFailed):
            elastic("pool", "stop", str(self.directory), "--now")

    def report(self) -> dict[str, Any]:
        return json.loads(elastic("report", str(self.directory), "--json").splitlines()[-1])


def write_pool(
    directory: Path,
    policy: str,
    nodes: tuple[int, int],
    *,
    train_gpus: int = 1,
    pool: Keys | None = None,
    rollout: Keys = ROLLOUT_NODES,
    limits: Keys | None = None,
) -> Path:
    """Write the configuration of a pool with so many rollout and training nodes, these with so many devices each, and
    more keys of its sections."""
    directory.mkdir(parents=True, exist_ok=True)
    file = directory / "pool.toml"
    sections = {"pool": pool or {}, "rollout": rollout, "limits": limits or {}}
    lines = {
        name: "\n".join(f"{key} = {json.dumps(value)}" for key, value in keys.items())
        for name, keys in sections.items()
    }
    counts = {"rollout_nodes": nodes[0], "train_nodes": nodes[1], "train_gpus": train_gpus}
    text = POOL.format(directory=directory / "pools", policy=policy, **counts, **lines)
    file.write_text(text, encoding="utf-8")
    return file


@contextlib.contextmanager
def live_pool(
    directory: Path, policy: str, rollout: int, train: int, limits: Keys | None = None, train_gpus: int = 1
) -> Iterator[LivePool]:
    """Starts a pool, and stops it with everything it has."""
    file = write_pool(directory, policy, (rollout, train), train_gpus=train_gpus, limits=limits)
    with started_pool(file) as pool:
        yield pool


@contextlib.contextmanager
def started_pool(file: Path, within: Sequence[str] = ()) -> Iterator[LivePool]:
    """Starts the pool of this configuration, by the command `within` if there is one, and stops it with everything it
    has."""
    started = json.loads(elastic("pool", "start", str(file), "--json", within=within).splitlines()[-1])
    pool = LivePool(Path(started["directory"]))
    try:
        yield pool
    finally:
        pool.stop()


@contextlib.contextmanager
def at_once(pools: Sequence[contextlib.AbstractContextManager[LivePool]]) -> Iterator[Sequence[LivePool]]:
    """Pools that start at the same time and stop at the same time."""
    with ThreadPoolExecutor(len(pools)) as threads, contextlib.ExitStack() as stops:
        starting = [threads.submit(pool.__enter__) for pool in pools]
        wait(starting)
        begun = [pool for pool, start in zip(pools, starting, strict=True) if start.exception() is None]
        stops.callback(
            lambda: [stop.result() for stop in [threads.submit(p.__exit__, None, None, None) for p in begun]]
        )
        yield [start.result() for start in starting]


def residual_nano_usd(pool: LivePool) -> int:
    """What bills and the pool's own part miss of what the pool pays, by its journal replayed: 0."""
    config = load_pool(pool.directory / POOL_CONFIG)
    cluster = replay(read_records(pool.directory), CLUSTER_POLICIES[config.pool.policy])
    state, now_ns = cluster.state, cluster.now_ns
    unbilled = sum(
        cluster.kind(node.id).nano_usd_per_hour
        * (now_ns - (node.own_since_ns if node.group is None else state.billed_ns[node.group]))
        for node in state.nodes.values()
    )
    billed = state.pool_billed + sum(record.billed for record in state.jobs.values())
    return round((cluster.books.paid(now_ns) - billed - unbilled) / NS_PER_HOUR)


def slice_starts_s(run: Path) -> list[float]:
    """From each grant of a time slice of rollouts until the first token under it was accepted, by the run's journal."""
    granted_ns, found = dict[WorkerId, int](), list[float]()
    with RunDirectory(run).newest_journal() as journal:
        for at_ns, event in journal.events():
            if isinstance(event, LeaseGranted) and event.lease.startswith("pool-"):
                granted_ns |= dict.fromkeys(event.workers, at_ns)
            elif isinstance(event, TokensReceived) and event.worker in granted_ns:
                found.append((at_ns - granted_ns.pop(event.worker)) / 1e9)
    return found


@dataclass(frozen=True)
class Moment:
    """An event of a pool: at what time of the pool, in seconds, what followed, and whose the devices were then."""

    at_s: float
    event: ClusterEvent
    commands: Sequence[ClusterCommand]
    permits: Mapping[int, Permit]


def moments(pool: LivePool) -> list[Moment]:
    """All that has happened, by the pool's journal."""
    config = load_pool(pool.directory / POOL_CONFIG)
    opening, entries = decoded(read_records(pool.directory))
    cluster = Cluster(opening.spec, CLUSTER_POLICIES[config.pool.policy], opening.limits, opening.now_ns)
    found: list[Moment] = []
    for entry in entries:
        commands = cluster.handle(entry.event, entry.now_ns)
        found.append(Moment(cluster.now_ns / 1e9, entry.event, commands, dict(cluster.permits)))
    return found


def left_over(directory: Path, within_s: float = 10.0) -> int:
    """Processes that have to do with a directory once its pool has stopped; those that are ending get some time."""
    until("their ends", lambda: not processes_in(directory), within_s, 0.2, must=False)
    return len(processes_in(directory))
