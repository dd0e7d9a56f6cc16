"""A real run on a real Ray cluster of this machine, whose nodes are killed one after the other."""

import asyncio
import contextlib
import importlib
import importlib.util
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import psutil

from benchmarks._common import Figures
from benchmarks._configurations import endless
from benchmarks._live import Capacity, LiveRun, live_run, reserved
from benchmarks._paced import LimitedSettings, LimitedTask
from benchmarks._runs import processes_of
from benchmarks._shapes import write_policy
from benchmarks._waiting import until
from elastic.protocol.sockets import listening_socket
from elastic.report import summarise
from elastic.runtime.journal import RunDirectory
from providers.base import Provider
from providers.ray import RayProvider, RaySettings
from tests.proof import check_tokens

NODES, WORKERS = 3, 2
STORE_BYTES = 80 << 20
QUICK_TO_MISS = {
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "3000",
    "RAY_health_check_failure_threshold": "3",
}
"""A killed node is lost after 3 s in place of 15, and one that does not answer after 12."""
TURNS = 8
READY_TIMEOUT_S, GONE_TIMEOUT_S = 120.0, 60.0
LEFT_S = 15.0
"""What a run takes to end, with all its actors."""


def why_not() -> str:
    """Why this cannot be measured here; empty where it can."""
    if importlib.util.find_spec("ray") is not None:
        return ""
    return "Ray is not installed here: `make test-ray` sets up an environment that has it"


class RayNodes:
    """A head, on which nothing runs, and so many nodes, to which more may be added, with room for one worker each. With
    a place for its `storage` the head can be restarted, and looks for lost nodes more often than by default."""

    def __init__(self, count: int, storage: Path | None = None) -> None:
        if storage is not None:
            os.environ |= {"RAY_gcs_storage": "rocksdb", "RAY_gcs_storage_path": str(storage), **QUICK_TO_MISS}
        cluster_utils: Any = importlib.import_module("ray.cluster_utils")
        with listening_socket("127.0.0.1", 0) as one, listening_socket("127.0.0.1", 0) as other:
            port, gcs_port = one.getsockname()[1], other.getsockname()[1]
        head = {
            "num_cpus": 0,
            "include_dashboard": False,
            "include_log_monitor": False,
            "no_monitor": True,
            "object_store_memory": STORE_BYTES,
            "ray_client_server_port": port,
            "gcs_server_port": gcs_port,
        }
        self.cluster = cluster_utils.Cluster(initialize_head=True, shutdown_at_exit=False, head_node_args=head)
        self.address = f"ray://127.0.0.1:{port}"
        self.add(count)

    def add(self, count: int = 1) -> None:
        for _ in range(count):
            self.cluster.add_node(wait=False, num_cpus=1, resources={"place": 1}, object_store_memory=STORE_BYTES)

    def with_worker(self, run: str) -> list[Any]:
        """Nodes that have a worker of this run."""
        ancestors = {parent.pid for process in processes_of(run) for parent in _parents(process)}
        return [node for node in self.cluster.worker_nodes if _raylet(node) in ancestors]

    def with_words(self, words: str) -> list[Any]:
        """Nodes that have a process with these words in its command."""
        return [node for node in self.cluster.worker_nodes if _has_words(psutil.Process(_raylet(node)), words)]

    def restart_head(self) -> None:
        """Kill the processes of the head to which nodes and clients speak, and start them again, as the next head."""
        head = self.cluster.head_node
        (server,) = head.all_processes.pop("ray_client_server")
        client_server = psutil.Process(server.process.pid)
        for process in [client_server, *client_server.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        server.process.wait()
        head.kill_gcs_server()
        head.start_gcs_server()
        head.start_ray_client_server()

    def kill(self, node: Any) -> None:
        """All of its processes at once, as when a machine is gone."""
        raylet = psutil.Process(_raylet(node))
        for process in [raylet, *raylet.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.cluster.remove_node(node, allow_graceful=False)

    def actors_left(self) -> list[str]:
        """Names of actors, in any namespace, and of placement groups that do not end in time."""
        ray: Any = importlib.import_module("ray")
        ray.init(self.cluster.address, log_to_driver=False, logging_level="ERROR")
        try:
            until("their ends", lambda: not _named(ray.util), GONE_TIMEOUT_S, 0.5, must=False)
            return _named(ray.util)
        finally:
            ray.shutdown()


def _named(util: Any) -> list[str]:
    groups = [one["name"] for one in util.placement_group_table().values() if one["state"] != "REMOVED"]
    return [actor["name"] for actor in util.list_named_actors(all_namespaces=True)] + groups


@contextlib.contextmanager
def ray_nodes(count: int, storage: Path | None = None) -> Iterator[RayNodes]:
    nodes = RayNodes(count, storage)
    try:
        yield nodes
    finally:
        nodes.cluster.shutdown()


async def kill_nodes(directory: Path, kills: int, until_s: float) -> Figures:
    """As many kills, if there is time for them until `until_s` (monotonic)."""
    policy = write_policy(directory / "ray-policy")
    run_dir = directory / f"ray-{time.time_ns()}"
    with ray_nodes(NODES) as nodes:
        config = endless(policy=policy, turns=TURNS, weights={"relay": nodes.address, "pull_timeout_s": 60})
        given = {"address": nodes.address, "max_workers": WORKERS, "num_gpus": 0, "resources": {"place": 1.0}}
        providers: dict[str, Capacity] = {
            "ray": (cast(type[Provider], RayProvider), RaySettings.model_validate(given)),
            "near": reserved(1),
        }
        places = asyncio.Semaphore(TURNS * (WORKERS + 1))
        task = LimitedSettings(prompts={"a": 24}, turns=4, observations={"a": 4}, places=places)
        killed, under_turns = 0, 0
        chosen = random.Random(7)
        async with live_run(config, run_dir, providers, LimitedTask, task) as run:
            while killed < kills:
                if not await _at_work(run, run_dir.name, nodes, min(READY_TIMEOUT_S, until_s - time.monotonic())):
                    break
                held = sum(len(worker.turns) for worker in run.ready("ray"))
                await asyncio.to_thread(nodes.kill, chosen.choice(nodes.with_worker(run_dir.name)))
                await asyncio.to_thread(nodes.add)
                killed += 1
                under_turns += held > 0
        left = await asyncio.to_thread(nodes.actors_left)
        processes_left = len(processes_of(run_dir.name))
    lost, duplicated = check_tokens(RunDirectory(run_dir))
    summary = summarise(RunDirectory(run_dir))
    usage = summary.providers["ray"]
    return {
        "node_kills": killed,
        "kills_under_turns": under_turns,
        "tokens_lost": lost,
        "tokens_duplicated": duplicated,
        "trajectories_failed": sum(summary.trajectories_failed.values()),
        "actors_left": len(left),
        "processes_left": processes_left,
        "ledger_imbalance_ns": summary.ledger_imbalance_ns,
        "allocation_overhead": usage.overhead_share,
        "accounts": {
            account: spent_s / usage.gpu_s for account, spent_s in usage.accounts_s.items() if spent_s and usage.gpu_s
        },
        "leases": usage.leases,
        "lease_ends": usage.lease_ends,
        "tokens": usage.tokens,
        "wall_s": summary.wall_s,
    }


async def _at_work(run: LiveRun, name: str, nodes: RayNodes, timeout_s: float) -> bool:
    """Whether a worker of Ray has turns and a node, in time."""

    def at_work() -> bool:
        return any(worker.turns for worker in run.ready("ray")) and bool(nodes.with_worker(name))

    try:
        return await run.until("turns on Ray's workers", at_work, max(timeout_s, 0.1))
    except TimeoutError:
        return False


def _raylet(node: Any) -> int:
    return node.all_processes["raylet"][0].process.pid


def _has_words(raylet: psutil.Process, words: str) -> bool:
    for process in raylet.children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if any(words in word for word in process.cmdline()):
                return True
    return False


def _parents(process: psutil.Process) -> list[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.parents()
    return []
