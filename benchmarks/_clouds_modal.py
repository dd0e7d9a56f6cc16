"""A run on Modal's protocol, with the real client: leases that end by time, containers and the orchestrator killed."""

import contextlib
import importlib.util
import os
import random
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks._clouds import figures_of
from benchmarks._common import Figures
from benchmarks._crashes import CrashingRun
from benchmarks._runs import POLL_S, elastic
from benchmarks._shapes import write_policy
from benchmarks._waiting import until
from elastic.core.events import LeaseGranted, TokensReceived
from elastic.core.ids import tagged
from elastic.protocol.run_secrets import RunSecrets
from elastic.runtime.journal import JournalError, JournalReader, RunDirectory

LEASES, CONTAINER_KILLS, ORCHESTRATOR_KILLS = 50, 15, 5
QUICK_LEASES, QUICK_CONTAINER_KILLS, QUICK_ORCHESTRATOR_KILLS = 4, 1, 1
PROVIDER = "modal"
LEASE_S, QUICK_LEASE_S = 60, 25
TOKENS_TIMEOUT_S, GONE_TIMEOUT_S = 240.0, 60.0
KILLS: Sequence[str] = ("kill", "preempt")
SETTINGS = (
    "run.steps=100000",
    "rollout.groups=4",
    "rollout.group_size=4",
    "trainer.checkpoint_every_steps=1",
    "seeding.policy=none",
    'provisioning.policy="take_all"',
    'engine.pacing={prefill_tokens_per_s=8000, decode_step_s={"1"=0.02}}',
    "engine.max_batch=4",
    "providers.modal.max_workers=2",
    "providers.modal.overlap=1",
    "providers.modal.cores=4",
    "providers.modal.memory_mb=32768",
    "providers.modal.gpu=B200",
    "providers.modal.gpus_per_worker=8",
    "providers.modal.cold_start_s=5",
    "providers.modal.ask_s=10",
    "providers.modal.reconcile_s=10",
)
"""Whole nodes of B200, of which minutes cost dollars."""


def why_not() -> str:
    """Why this cannot be measured here; empty where it can."""
    if importlib.util.find_spec("modal") is not None:
        return ""
    return "Modal's client is not installed here: `make test-clouds` sets up an environment that has it"


def measure(quick: bool) -> Figures:
    if why := why_not():
        return {"skipped_because": why}
    from tests.clouds.modal_server import bench

    wanted = (
        (QUICK_LEASES, QUICK_CONTAINER_KILLS, QUICK_ORCHESTRATOR_KILLS)
        if quick
        else (LEASES, CONTAINER_KILLS, ORCHESTRATOR_KILLS)
    )
    with tempfile.TemporaryDirectory() as name, bench(Path(name) / "modal") as platform:
        os.environ.update(platform.environment)
        elastic("modal", "deploy")
        return _run(Path(name), platform, *wanted, lease_s=QUICK_LEASE_S if quick else LEASE_S)


def _run(
    directory: Path, platform: Any, leases: int, container_kills: int, orchestrator_kills: int, lease_s: float
) -> Figures:
    policy = write_policy(directory / "policy")
    settings = [*SETTINGS, f"model.checkpoint={policy}", f"providers.modal.lease_s={lease_s}"]
    chance = random.Random(7)
    kills = [chance.choice(KILLS) for _ in range(container_kills)] + ["orchestrator"] * orchestrator_kills
    chance.shuffle(kills)
    left, done = deque(kills), 0
    with CrashingRun.of_example(directory / "runs", *settings, providers="modal") as run:
        followed = _Followed(run)
        run.until("the run has gone on", run.has_gone_on, TOKENS_TIMEOUT_S)
        secret = RunSecrets.of(run.run_dir).host_token(f"modal {PROVIDER}")
        name = f"{tagged(run.run_dir.name, secret)}/{PROVIDER}"
        while left or len(followed.leases) < leases:
            followed.more_tokens()
            if not left:
                time.sleep(POLL_S)
                continue
            kill = left.popleft()
            if kill == "orchestrator":
                run.kill("orchestrator")
                run.resume()
                run.until("the run has gone on", run.has_gone_on, TOKENS_TIMEOUT_S)
            elif running := platform.running(name):
                getattr(platform, kill)(chance.choice(running)["task"])
            else:
                left.append(kill)
                continue
            done += 1
        # What a container costs that starts for a call which is given up before it begins, Modal tells nobody.
        run.until("all containers have begun", lambda: all(one["calls"] for one in platform.running(name)))
        elastic("stop", str(run.run_dir))
        with contextlib.suppress(Exception):
            run.process.wait(GONE_TIMEOUT_S)
    until("the end of all containers", lambda: not platform.running(), GONE_TIMEOUT_S, must=False)
    orphans = platform.running()
    record = platform.record()
    ours = [one for one in record["containers"] if one["run"] == name]
    figures = figures_of(run.run_dir, PROVIDER)
    return {
        "leases": figures["leases"],
        "kills": done,
        "tokens_lost": figures["tokens_lost"],
        "orphans": len(orphans) + len(record["unfinished_calls"]),
        "boot_s_p50": figures["boot_s_p50"],
        "first_token_s": figures["first_token_s"],
        "allocation_overhead": figures["allocation_overhead"],
        "usd": figures["usd"],
        "usd_by_their_bill": sum(one["usd"] for one in ours),
    }


class _Followed:
    """What a run that goes on has come to on Modal: leases granted, tokens accepted."""

    def __init__(self, run: CrashingRun) -> None:
        self._run = run
        self._heard: dict[str, int] = {}
        self.leases: set[str] = set()
        self.tokens = 0

    def hear(self) -> "_Followed":
        """What there is that is new."""
        with contextlib.suppress(JournalError):
            for path in RunDirectory(self._run.run_dir).journal_paths():
                with JournalReader(path) as journal:
                    for _, event, _ in journal.entries(self._heard.get(path.name, 0)):
                        self._heard[path.name] = self._heard.get(path.name, 0) + 1
                        if isinstance(event, LeaseGranted) and event.lease.startswith(PROVIDER):
                            self.leases.add(event.lease)
                        elif isinstance(event, TokensReceived) and event.worker.startswith(PROVIDER):
                            self.tokens += sum(event.chunks.counts)
        return self

    def more_tokens(self) -> None:
        """Of workers on Modal, since now."""
        had = self.hear().tokens
        self._run.until("tokens of Modal's workers", lambda: self.hear().tokens > had, TOKENS_TIMEOUT_S)
