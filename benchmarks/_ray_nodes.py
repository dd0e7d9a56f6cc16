"""A real run on a real Ray cluster of this machine, whose nodes are killed one after the other."""

import asyncio
import contextlib
import importlib
import importlib.util
import os
import random
import secrets
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
STORE_BYTES, MEMORY_BYTES = 80 << 20, 16_000_000_000
STARTS_WITHIN_S, EVERY_S = 240.0, 0.2
"""For a node to start on a machine that has much else to do."""
QUICK_TO_MISS = {
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "3000",
    "RAY_health_check_failure_threshold": "3",
}
"""A killed node is lost after 3 s in place of 15, and one that does not answer after 12."""
OF_AGENTS = ("metrics_agent_port", "metrics_export_port", "runtime_env_agent_port")
AGENT = "--dashboard_agent_command="
AS_OTHERS = {
    "RAY_worker_niceness": "0",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_agent_register_timeout_ms": f"{STARTS_WITHIN_S * 1000:.0f}",
    "GRPC_ENABLE_FORK_SUPPORT": "0",
}
"""Actors, and all that they start, have the same priority as what they are measured beside, and none starts in
advance; the programs beside a raylet may take as long as it. A process that uses gRPC, as the head's client server
does, lost one child of thirty before that had begun, to what gRPC does at a fork."""
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
    """A head, on which nothing runs, and so many nodes, to which more may be added, each with one `place` and so many
    `cpus`. With a place for its `storage` the head can be restarted, and looks for lost nodes more often than by
    default. All of it ends with the thread that starts it, if they `end_together`."""

    def __init__(self, count: int, storage: Path | None = None, cpus: int = 1, *, end_together: bool = False) -> None:
        if storage is not None:
            os.environ |= {"RAY_gcs_storage": "rocksdb", "RAY_gcs_storage_path": str(storage), **QUICK_TO_MISS}
        os.environ |= AS_OTHERS
        self._count, self._cpus = count, cpus
        cluster_utils: Any = importlib.import_module("ray.cluster_utils")
        _adapt(importlib.import_module("ray._private.services"))
        head = {
            "num_cpus": 0,
            "include_dashboard": False,
            "include_log_monitor": False,
            "no_monitor": True,
            "object_store_memory": STORE_BYTES,
            "session_name": f"session_{time.time_ns()}",
            **_ports("ray_client_server_port", "gcs_server_port"),
        }
        sessions = importlib.import_module("ray._common.utils").get_default_ray_temp_dir()
        self._session = Path(sessions) / head["session_name"]
        head |= _not_waiting(self._session)
        self.cluster = cluster_utils.Cluster(True, head_node_args=head, shutdown_at_exit=end_together)
        self.address = f"ray://127.0.0.1:{head['ray_client_server_port']}"
        self.add(count)

    def add(self, count: int = 1) -> None:
        for _ in range(count):
            self.add_other(num_cpus=self._cpus, resources={"place": 1})

    def add_other(self, **has: Any) -> Any:
        """Add a node that has this, in Ray's words; returns it."""
        known = {"object_store_memory": STORE_BYTES, "memory": MEMORY_BYTES, **_not_waiting(self._session)}
        return self.cluster.add_node(wait=False, **known, **has)

    def restore(self, within_s: float = GONE_TIMEOUT_S) -> str:
        """Have as many nodes as at first, with nothing of them taken. Returns what was taken all this time, empty if
        nothing was: those nodes are killed, too."""
        state = self.cluster.global_state
        until("all is free", lambda: not _taken(state), within_s, EVERY_S, must=False)
        taken = _taken(state)
        alive = {node["NodeID"] for node in state.node_table() if node["Alive"]} - taken.keys()
        for node in [one for one in self.cluster.worker_nodes if one.node_id not in alive]:
            self.kill(node)
        self.add(self._count - len(self.cluster.worker_nodes))
        return str(taken or "")

    def with_worker(self, run: str) -> list[Any]:
        """Nodes that have a worker of this run."""
        ancestors = {parent.pid for process in processes_of(run) for parent in _parents(process)}
        return [node for node in self.cluster.worker_nodes if raylet(node).pid in ancestors]

    def with_words(self, words: str) -> list[Any]:
        """Nodes that have a process with these words in its command."""
        return [node for node in self.cluster.worker_nodes if _has_words(raylet(node), words)]

    def restart_head(self) -> None:
        """Kill the processes of the head to which nodes and clients speak, and start them again, as the next head."""
        self.kill_head()
        self.start_head()

    def kill_head(self) -> None:
        head = self.cluster.head_node
        (server,) = head.all_processes.pop("ray_client_server")
        client_server = psutil.Process(server.process.pid)
        for process in [client_server, *client_server.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        server.process.wait()
        head.kill_gcs_server()

    def start_head(self) -> None:
        head = self.cluster.head_node
        head.start_gcs_server()
        head.start_ray_client_server()

    def kill(self, node: Any) -> None:
        """All of its processes at once, as when a machine is gone."""
        with contextlib.suppress(psutil.NoSuchProcess):  # It may have ended by itself.
            for process in processes_on(node):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        self.cluster.remove_node(node, allow_graceful=False)

    def actors_left(self, within_s: float = GONE_TIMEOUT_S) -> list[str]:
        """Names of actors, in any namespace, and of placement groups that do not end in time."""
        state = self.cluster.global_state
        until("their ends", lambda: not _named(state), within_s, 0.5, must=False)
        return _named(state)


def _not_waiting(session: Path) -> dict[str, Any]:
    """With what a node is started whose raylet waits for none of the programs beside it, as it does by itself, for 15 s
    at most: their ports, and the file in which one of them says that it has none."""
    node = secrets.token_hex(28)
    session.mkdir(parents=True, exist_ok=True)
    (session / f"dashboard_agent_listen_port_{node}").write_text("-1")
    return {"env_vars": {"RAY_OVERRIDE_NODE_ID_FOR_TESTING": node}, **_ports(*OF_AGENTS)}


def _ports(*names: str) -> dict[str, int]:
    """A free port for each of these."""
    with contextlib.ExitStack() as taken:
        sockets = [taken.enter_context(listening_socket("127.0.0.1", 0)) for _ in names]
        return {name: one.getsockname()[1] for name, one in zip(names, sockets, strict=True)}


def raylet(node: Any) -> psutil.Process:
    """The process of Ray's on a node that starts all others there."""
    return psutil.Process(node.all_processes["raylet"][0].process.pid)


def processes_on(node: Any) -> list[psutil.Process]:
    """All processes of a node."""
    return [raylet(node), *raylet(node).children(recursive=True)]


def _adapt(services: Any) -> None:
    """Have Ray start what is needed here, and wait for it as this machine needs.

    - It pauses between two looks for a node that it starts, and looks for as long as it may take. By itself it looks
      without a pause, and gives the node up after 30 s.
    - It starts no process for a dashboard, for whose start it waits even where there is to be none, and none on each
      node that speaks to it. A raylet must have the latter: `cat`, which ends with it, takes its place.
    """
    look, start = services.get_node, services.start_ray_process
    if look.__name__ == "patient":
        return

    def patient(gcs_address: str, node_id: str) -> Any:
        until_s = time.monotonic() + STARTS_WITHIN_S
        while True:
            try:
                return look(gcs_address, node_id)
            except RuntimeError:
                if time.monotonic() > until_s:
                    raise
                time.sleep(EVERY_S)

    def without_agents(command: list[str], *arguments: Any, **further: Any) -> Any:
        words = [AGENT + "cat" if word.startswith(AGENT) else word for word in command]
        return start(words, *arguments, **further)

    services.get_node, services.start_ray_process = patient, without_agents
    services.start_api_server = lambda *_, **__: (None, None)


def _taken(state: Any) -> dict[str, dict[str, float]]:
    """What of living nodes' resources is taken, by the nodes' ids."""
    free = state.available_resources_per_node()
    taken: dict[str, dict[str, float]] = {}
    for node, amounts in state.total_resources_per_node().items():
        its = {name: amount - free.get(node, {}).get(name, 0.0) for name, amount in amounts.items()}
        if its := {name: amount for name, amount in its.items() if amount > 0 and name in ("CPU", "GPU", "place")}:
            taken[node] = its
    return taken


def _named(state: Any) -> list[str]:
    groups = [one["name"] for one in state.placement_group_table().values() if one["state"] != "REMOVED"]
    return [one["Name"] for one in state.actor_table(None).values() if one["Name"] and one["State"] != "DEAD"] + groups


@contextlib.contextmanager
def ray_nodes(
    count: int, storage: Path | None = None, cpus: int = 1, *, end_together: bool = False
) -> Iterator[RayNodes]:
    before = set(os.environ)
    nodes = RayNodes(count, storage, cpus, end_together=end_together)
    try:
        yield nodes
    finally:
        nodes.cluster.shutdown()
        for name in os.environ.keys() - before:
            del os.environ[name]


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
