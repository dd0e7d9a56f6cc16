"""`elastic run --providers ec2` against an AWS that is on this machine (`tests/clouds/aws_server`), disturbed."""

import asyncio
import contextlib
import random
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks._clouds import skipped_without_aws, start_figures, starts_of
from benchmarks._common import Figures
from benchmarks._crashes import CrashingRun
from benchmarks._runs import EXAMPLE
from benchmarks._shapes import write_policy
from benchmarks._waiting import until
from elastic.core import events as e
from elastic.core.ids import lease_of
from elastic.report import summarise
from elastic.runtime.journal import JournalError, RunDirectory
from tests.proof import check_tokens

SEED = 7
WORKERS = 2
FULL_LEASES, FULL_KILLS, FULL_ORCHESTRATORS = 50, 20, 5
QUICK_LEASES, QUICK_KILLS = 4, 2
LEASES_OF_A_RUN = 8
NOTICE_S = 4.0
PATIENCE_S = 120.0
POOLS = {("p4d.24xlarge", "us-east-1a"): 3, ("p4d.24xlarge", "us-east-1b"): 3, ("p5.48xlarge", "us-east-1a"): 3}
GPUS = 8
SETTINGS = (
    "run.steps=100000",
    "rollout.groups=64",
    "rollout.group_size=4",
    "rollout.max_turns=2",
    "rollout.max_tokens_per_turn=16",
    "seeding.window_s=0.0",
    "seeding.bound_workers=false",
    'provisioning.policy="take_all"',
    "scheduler.boot_timeout_s=240",
    "scheduler.retry_base_s=0.5",
    "engine.max_batch=8",
    "engine.max_context_tokens=512",
    'engine.pacing={prefill_tokens_per_s=8000, decode_step_s={"1"=0.03, "16"=0.04}}',
)
KINDS = ("notice", "none", "worker", "rebalance")


def measure(quick: bool) -> Figures:
    if why := skipped_without_aws():
        return {"skipped_because": why}
    from tests.clouds.aws_server.cloud import cloud

    rng, totals = random.Random(SEED), Totals()
    leases = QUICK_LEASES if quick else FULL_LEASES
    kills = QUICK_KILLS if quick else FULL_KILLS
    orchestrators = 1 if quick else FULL_ORCHESTRATORS
    with tempfile.TemporaryDirectory() as name, cloud(Path(name) / "aws", dict(POOLS), boot_s=0.5) as aws:
        policy = write_policy(Path(name) / "policy")
        number = 0
        while totals.leases < leases or totals.kills < kills or totals.orchestrators < orchestrators:
            directory = Path(name) / f"run-{number}"
            number += 1
            one = Disturbed(directory, aws, policy)
            with one.run:
                one.go(rng, totals, min(LEASES_OF_A_RUN, leases - totals.leases), kills, orchestrators)
                one.end()
            one.check(totals)
        return totals.figures(aws)


class Totals:
    def __init__(self) -> None:
        self.leases = self.tokens_lost = self.orphans = 0
        self.by: Counter[str] = Counter()
        self.usd = self.overhead_s = self.gpu_s = 0.0
        self.starts: list[Mapping[str, int]] = []

    @property
    def kills(self) -> int:
        return self.by.total()

    @property
    def orchestrators(self) -> int:
        return self.by["orchestrator"]

    def figures(self, aws: Any) -> Figures:
        return {
            "leases": self.leases,
            "kills": self.kills,
            "kills_by": dict(self.by),
            "tokens_lost": self.tokens_lost,
            "orphans": self.orphans,
            **start_figures(self.starts),
            "allocation_overhead": self.overhead_s / self.gpu_s if self.gpu_s else None,
            "usd": self.usd,
            "usd_by_their_bill": aws.books.usd(),
        }


class Disturbed:
    """One run, whose instances are those of a cloud with nothing else on it."""

    def __init__(self, directory: Path, aws: Any, policy: Path) -> None:
        self._aws = aws
        from tests.clouds.together import sets

        ec2 = aws.settings(max_workers=WORKERS, gpus_per_worker=GPUS)
        own = sets({"ec2": ec2}, f"model.checkpoint={policy}", *SETTINGS)
        arguments = [str(EXAMPLE), "--providers", "ec2", *own]
        directory.mkdir(parents=True)
        self.run = CrashingRun(directory / "runs", arguments)

    # What is done to it

    def go(self, rng: random.Random, totals: Totals, leases: int, kills: int, orchestrators: int) -> None:
        had = totals.leases
        before = totals.kills
        while True:
            self.run.until("a token", self.run.has_gone_on, PATIENCE_S)
            there = len(self._granted())
            totals.leases = had + there
            if there >= leases and (totals.kills > before or totals.kills >= kills):
                return
            time.sleep(rng.uniform(0.2, 1.5))
            if totals.orchestrators < orchestrators and totals.kills >= before + (kills <= 2 or before == 0):
                self._kill_orchestrator(rng, between=totals.orchestrators % 2 == 0)
                totals.by["orchestrator"] += 1
            else:
                kind = KINDS[totals.kills % len(KINDS)]
                if self._disturb(kind, rng):
                    totals.by[kind] += 1

    def _disturb(self, kind: str, rng: random.Random) -> bool:
        ready = [one for one in self._aws.living() if one.tags.get("elastic:lease") in self._joined()]
        if not ready:
            time.sleep(0.2)
            return False
        victim = rng.choice(ready)
        if kind == "rebalance":
            self._aws.advise(victim.id)
            time.sleep(1.0)
        if kind in ("notice", "rebalance"):
            self._aws.take_back(victim.id, NOTICE_S)
        elif kind == "none":
            self._aws.take(victim.id)
        else:
            for process in self._aws.machines.processes(victim.id):
                with contextlib.suppress(Exception):
                    if "worker" in process.cmdline():
                        process.kill()
        self.run.until("its lease's end", lambda: victim.tags["elastic:lease"] in self._ended(), PATIENCE_S)
        return True

    def _kill_orchestrator(self, rng: random.Random, *, between: bool) -> None:
        """`between` its order of an instance and the answer, which an instance's end has it make."""
        if between and (living := self._aws.living()):
            killed = False

            async def kill(action: str) -> None:
                nonlocal killed
                if action == "CreateFleet" and not killed:
                    killed = True
                    await asyncio.to_thread(self.run.kill, "orchestrator")

            self._aws.proxy.hold = kill
            self._aws.take(rng.choice(living).id)
            until("the order of another instance", lambda: killed, PATIENCE_S)
            self._aws.proxy.hold = None
            self.run.process.wait()
        else:
            self.run.kill("orchestrator")
        self.run.resume()

    def end(self) -> None:
        self.run.process.send_signal(signal.SIGINT)
        self.run.process.wait(PATIENCE_S)

    # What came of it

    def check(self, totals: Totals) -> None:
        kept = RunDirectory(self.run.run_dir)
        totals.tokens_lost += sum(check_tokens(kept))  # What is generated again was lost, too.
        totals.orphans += len(self._aws.living())
        usage = summarise(kept).providers["ec2"]
        totals.usd += usage.usd
        totals.overhead_s += usage.overhead_share * usage.gpu_s
        totals.gpu_s += usage.gpu_s
        totals.starts += starts_of(kept, "ec2")

    def _events(self, *kinds: str) -> list[e.Event]:
        with contextlib.suppress(JournalError, ValueError), RunDirectory(self.run.run_dir).journals() as journals:
            return [event for journal in journals for _, event in journal.events_of(*kinds)]
        return []

    def _granted(self) -> set[str]:
        return {x.lease for x in self._events("LeaseGranted") if isinstance(x, e.LeaseGranted) and x.lease[:3] == "ec2"}

    def _ended(self) -> set[str]:
        return {x.lease for x in self._events("LeaseEnded") if isinstance(x, e.LeaseEnded)}

    def _joined(self) -> set[str]:
        return {lease_of(x.worker) for x in self._events("WeightsApplied") if isinstance(x, e.WeightsApplied)}
