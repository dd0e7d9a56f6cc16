"""`elastic run` on real Ray clusters: nodes killed and held up under load, its orchestrator killed, the head lost."""

import contextlib
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks import _crashes, _runs
from benchmarks._ray_nodes import RayNodes, processes_on, ray_nodes, raylet
from elastic.compose.incarnations import replay
from elastic.core.events import LeaseEnded, LeaseGranted, TokensReceived
from elastic.runtime.journal import JournalError, RunDirectory
from elastic.weights.errors import RelayError
from elastic.weights.relay import open_relay
from tests import proof
from tests.cli.conftest import CONFIG
from tests.ray.conftest import CPUS

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900)]

PATIENCE_S = 240.0


class OnRay:
    """A run whose only rollout workers are on a cluster's nodes, and what its journal says of them."""

    def __init__(self, directory: Path, checkpoint: Path, nodes: RayNodes, *own: str) -> None:
        self._nodes = nodes
        config = directory / "small.toml"
        text = CONFIG.format(directory=directory, checkpoint=checkpoint).partition("[providers.spot]")[0]
        config.write_text(text.replace("window_s = 0.2", "window_s = 0.0"))
        settings = [
            "run.steps=100000",
            f"providers.ray.address={nodes.address}",
            "providers.ray.num_gpus=0",
            "providers.ray.resources={place=1}",
            "providers.ray.poll_s=0.5",
            f"providers.ray.answer_timeout_s={PATIENCE_S / 2}",
            *own,
        ]
        self.arguments = [str(config), "--providers", "ray", *_runs.sets(settings)]
        self.run = _crashes.CrashingRun(directory / "runs", self.arguments)

    def events(self) -> list[Any]:
        with contextlib.suppress(JournalError, ValueError), RunDirectory(self.run.run_dir).journals() as journals:
            return [event for journal in journals for _, event in journal.events()]
        return []

    def granted(self) -> dict[str, str]:
        """Leases on Ray by their workers."""
        grants = [e for e in self.events() if isinstance(e, LeaseGranted) and e.lease.startswith("ray")]
        return {worker: grant.lease for grant in grants for worker in grant.workers}

    def ended(self) -> set[str]:
        return {e.lease for e in self.events() if isinstance(e, LeaseEnded) and e.lease.startswith("ray")}

    def tokens(self) -> int:
        """Accepted of Ray's workers so far."""
        ours = self.granted()
        events = [e for e in self.events() if isinstance(e, TokensReceived) and e.worker in ours]
        return sum(chunk.count for event in events for chunk in event.chunks)

    def more_tokens(self) -> None:
        had = self.tokens()
        self.run.until("tokens of Ray's workers", lambda: self.tokens() > had)

    def workers(self) -> dict[str, psutil.Process]:
        """Processes of the workers that are on nodes, by the workers' names."""
        found: dict[str, psutil.Process] = {}
        for process in _runs.processes_of(self.run.run_dir.name):
            with contextlib.suppress(psutil.NoSuchProcess):
                worker = process.environ().get("ELASTIC_WORKER", "")
                if worker.startswith("ray") and any("raylet" in parent.name() for parent in process.parents()):
                    found[worker] = process
        return found

    def node_of(self, process: psutil.Process) -> Any:
        parents = {parent.pid for parent in process.parents()}
        return next(node for node in self._nodes.cluster.worker_nodes if raylet(node).pid in parents)

    def stop(self) -> None:
        """As by ^C; it ends in time."""
        self.run.process.send_signal(signal.SIGINT)
        self.run.process.wait(PATIENCE_S)

    def no_worker_is_left(self) -> None:
        deadline_s = time.monotonic() + PATIENCE_S
        while _runs.processes_of(self.run.run_dir.name):
            assert time.monotonic() < deadline_s, _runs.processes_of(self.run.run_dir.name)
            time.sleep(0.2)

    def nothing_was_lost(self) -> None:
        run = RunDirectory(self.run.run_dir)
        assert proof.check_tokens(run) == (0, 0)
        assert replay(run).ledger.imbalance_ns() == 0


def test_nodes_and_the_orchestrator_are_lost_under_load(tmp_path: Path, checkpoint: Path, nodes: RayNodes) -> None:
    relay = f"weights.relay={nodes.address}?answer_timeout_s={PATIENCE_S:g}"
    patient = f"run.orchestrator_timeout_s={PATIENCE_S}"
    live = OnRay(tmp_path, checkpoint, nodes, "providers.ray.max_workers=2", relay, patient)
    with contextlib.ExitStack() as undo:
        undo.callback(live.run.discard)
        live.more_tokens()

        worker, process = live.workers().popitem()
        nodes.kill(live.node_of(process))
        live.run.until("the lost node's lease has ended", lambda: live.granted()[worker] in live.ended())
        nodes.add()
        live.more_tokens()

        live.run.until("a worker on a node", live.workers)
        worker, process = live.workers().popitem()
        held_up = processes_on(live.node_of(process))
        for one in held_up:
            one.suspend()
        try:
            live.run.until("its lease has ended", lambda: live.granted()[worker] in live.ended())
            live.more_tokens()
        finally:
            for one in held_up:
                with contextlib.suppress(psutil.NoSuchProcess):
                    one.resume()
        live.run.until("the worker that came back has ended", lambda: not process.is_running())
        events = live.events()
        end = next(n for n, e in enumerate(events) if isinstance(e, LeaseEnded) and e.lease == live.granted()[worker])
        assert not [e for e in events[end:] if isinstance(e, TokensReceived) and e.worker == worker]

        live.run.until("a worker on a node", live.workers)
        live.more_tokens()
        before = live.workers()
        live.run.kill("orchestrator")
        live.run.resume()
        live.run.until("the run has gone on", live.run.has_gone_on)
        assert before.items() & live.workers().items(), "a worker outlived the process that had started it"
        live.more_tokens()
        live.stop()
        live.no_worker_is_left()
    live.nothing_was_lost()
    assert nodes.actors_left(PATIENCE_S) == []  # The relay's waits some seconds for another blob.


def test_a_head_that_is_lost_is_named_and_the_run_goes_on(tmp_path: Path, checkpoint: Path) -> None:
    with ray_nodes(1, cpus=CPUS, end_together=True) as nodes, contextlib.ExitStack() as undo:
        live = OnRay(tmp_path, checkpoint, nodes)
        undo.callback(live.run.discard)
        live.more_tokens()
        relay = open_relay(f"{nodes.address}/of-a-lost-head")
        undo.callback(relay.close)
        relay.put("k", b"content")
        nodes.cluster.head_node.kill_all_processes(check_alive=False, allow_graceful=False)

        def warnings() -> list[str]:
            logs = "".join(path.read_text() for path in (live.run.run_dir / "logs").glob("*.log"))
            return [line for line in logs.splitlines() if "cannot be asked: workers go on" in line]

        live.run.until("a warning", warnings)
        for part in (nodes.address, "tried", "a look every 0.5 s", "start its head again"):
            assert part in warnings()[0]
        live.more_tokens()
        with pytest.raises(RelayError, match=rf"{nodes.address}/of-a-lost-head: the Ray cluster at .* does not answer"):
            relay.get("k")
        again = subprocess.run(
            [sys.executable, "-m", "elastic.cli", "run", *live.arguments],
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )
        assert again.returncode == 2
        assert "does not answer" in again.stderr
        assert "is its head up" in again.stderr
        live.stop()
        assert len(warnings()) == 1
        live.no_worker_is_left()
    live.nothing_was_lost()
