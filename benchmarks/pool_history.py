"""What a pool pays for the jobs that it has had: with that many over, how fast its process is up again and tells its
status, and what an event costs.

Live: the production shell, cluster and journal live through the jobs one after another: each is submitted, gets a place
and a process, and fails or is cancelled. Nodes and processes are stand-ins that do nothing. Then the pool's real
process is started on this journal as `elastic pool start` starts it, and is asked through its socket. `start_s` counts
from exec to its first answer. `event_us_first` and `event_us_last` are medians, over the first and the last tenth of
the jobs, of an event's CPU time in a block of jobs. `status_ms` is the median by the wall clock of requests that a new
connection carries. The jobs are lived through in memory where there is `/dev/shm`, since no disk's speed is judged.
"""

import asyncio
import contextlib
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import msgspec

from benchmarks._common import Arguments, Figures, benchmark
from benchmarks._pools import LivePool
from benchmarks._processes import IN_MEMORY, program
from benchmarks._runs import ELASTIC
from elastic.compose.pool_config import POOL_CONFIG, PoolConfig, load_pool, save_pool
from elastic.core.cluster import Cluster, ClusterPolicies, JobRequest, PhasePlan
from elastic.core.cluster.types import JobId, Nanoseconds, NodeId, PhaseKind
from elastic.pool import messages as w
from elastic.pool.control_messages import PoolControl
from elastic.pool.journal import JOURNAL, PoolJournal
from elastic.pool.ports import DoneCommand, ForgottenJob, JobEnding, JobEntry, PoolTimes
from elastic.pool.shell import PoolShell
from elastic.system.isolation import ItemAttempt
from policies.clusters import CLUSTER_POLICIES

S = 1_000_000_000
JOBS, QUICK_JOBS = 100_000, 10_000
BLOCK = 10
"""Jobs at a time whose CPU time is read: reading it has a cost, too."""
QUESTIONS = 20
UP_S = 60.0
POOL = """
[pool]
name = "lab"
directory = "{directory}"
[pool.rollout]
nodes = 2
usd_per_gpu_hour = 1.85
memory_gb = 8
[pool.train]
nodes = 1
usd_per_gpu_hour = 5.28
memory_gb = 8
"""
_PLAN = PhasePlan(rollout_ns=60 * S, train_ns=30 * S)


class Surroundings:
    """`PoolPorts` of a pool whose nodes and processes do nothing. The journal is a real one."""

    def __init__(self, journal: PoolJournal) -> None:
        self._journal = journal
        self.clock_ns: Nanoseconds = 0
        self.started: list[tuple[JobId, int]] = []
        self.shell: PoolShell | None = None

    def now_ns(self) -> Nanoseconds:
        return self.clock_ns

    def slept_ns(self) -> Nanoseconds:
        return 0

    def append(
        self,
        record: bytes,
        entry: JobEntry | None = None,
        command: DoneCommand | None = None,
        forgotten: Sequence[ForgottenJob] = (),
    ) -> None:
        self._journal.append(record, entry, command, forgotten)

    def attempting(self, item: str) -> AbstractContextManager[ItemAttempt]:
        return nullcontext(ItemAttempt())

    def replayed(self, policies: ClusterPolicies) -> Cluster:
        return self._journal.replayed(policies)[0]

    def settled(self) -> None:
        assert self.shell is not None
        self._journal.note_state(self.shell.cluster)

    def start_job(self, entry: JobEntry, placement: int, restarts: int) -> None:
        self.started.append((entry.job, placement))

    def died(self, node: NodeId, job: JobId, what: str) -> None: ...

    def start_node_agent(self, node: NodeId, phase: PhaseKind, devices: Sequence[str]) -> None: ...

    def note_set_aside(self, devices: Mapping[str, str]) -> None: ...

    def end_node_agent(self, node: NodeId) -> None: ...

    def send_to_node_agent(self, node: NodeId, message: msgspec.Struct) -> None: ...

    def send_to_job(self, job: JobId, message: msgspec.Struct) -> None: ...

    def cut_job(self, job: JobId) -> None: ...

    def resident(
        self,
        entry: JobEntry,
        placement: int,
        node: NodeId,
        phase: PhaseKind,
        ticket: w.WorkerTicketFrame | None,
        ranks: w.RankPlaces | None = None,
    ) -> w.StartResidentFrame:
        raise AssertionError("no node agent is connected")

    def stop_job(self, job: JobId, reason: str) -> None: ...

    def kill_job(self, job: JobId) -> None: ...

    def profile(self, entry: JobEntry) -> None: ...

    def end_profile(self, job: JobId) -> None: ...


def live_through(config: PoolConfig, directory: Path, jobs: int) -> list[float]:
    """Have a pool live through so many jobs; returns an event's CPU time in each block of them, in microseconds."""
    journal = PoolJournal(directory)
    policies = CLUSTER_POLICIES[config.pool.policy]
    cluster, _ = journal.open_pool(config.spec(), config.wait_limits(), policies, config.pool.policy)
    ports = Surroundings(journal)
    times = PoolTimes(silence_ns=10**18, park_ns=10**18, node_agent_start_ns=10**18)
    shell = ports.shell = PoolShell(cluster, ports, times)
    shell.begin({}, {}, anew=True)
    costs_us: list[float] = []
    before, cpu_ns = shell.events, time.process_time_ns()
    for number in range(jobs):
        ports.clock_ns += 10 * S
        shell.pass_time()
        name = f"job-{number}"
        request = JobRequest(id=name, slo=2.0, plan=_PLAN, steps=10, rollout_bytes=1, train_bytes=1)
        shell.submit(request, JobEntry(job=name, directory=f"/nowhere/{name}"), DoneCommand(name, f"submit {name}"))
        ports.clock_ns += 90 * S
        job, placement = ports.started.pop()
        assert job == name
        if number % 2:
            shell.cancel(name, DoneCommand(f"cancel {name}", f"cancel {name}"))
            shell.job_ended(name, placement, JobEnding("died"))
        else:
            shell.job_ended(name, placement, JobEnding("failed", "no space left on device"))
        if number % BLOCK == BLOCK - 1:
            events, now_ns = shell.events, time.process_time_ns()
            costs_us.append((now_ns - cpu_ns) / 1e3 / (events - before))
            before, cpu_ns = events, now_ns
    journal.close()
    return costs_us


@contextlib.contextmanager
def process_of(directory: Path) -> Any:
    """A context: the pool's process; its value is how many seconds passed from exec to its first status."""
    pool, began_s = LivePool(directory), time.monotonic()
    with program([*ELASTIC, "pool-run", str(directory)], UP_S, stdout=subprocess.DEVNULL):
        pool.status(UP_S)
        yield time.monotonic() - began_s
        pool.stop()


def main(arguments: Arguments) -> Figures:
    jobs = QUICK_JOBS if arguments.quick else JOBS
    pool_file = arguments.scratch / "pool.toml"
    pool_file.write_text(POOL.format(directory=arguments.scratch))
    directory = save_pool(load_pool(pool_file))
    (directory / "logs").mkdir(mode=0o700, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=IN_MEMORY) as memory:
        costs_us = live_through(load_pool(directory / POOL_CONFIG), Path(memory), jobs)
        shutil.copy(Path(memory) / JOURNAL, directory / JOURNAL)
    journal_mb = (directory / JOURNAL).stat().st_size / 1e6
    status_ms: list[float] = []
    with process_of(directory) as start_s:
        for _ in range(QUESTIONS):
            began_s = time.monotonic()
            asyncio.run(PoolControl(directory).status())
            status_ms.append(1e3 * (time.monotonic() - began_s))
        ended_jobs = asyncio.run(PoolControl(directory).status()).status.jobs_over
    tenth = len(costs_us) // 10
    return {
        "ended_jobs": ended_jobs,
        "status_ms": statistics.median(status_ms),
        "start_s": start_s,
        "event_us_first": statistics.median(costs_us[:tenth]),
        "event_us_last": statistics.median(costs_us[-tenth:]),
        "journal_mb": journal_mb,
    }


if __name__ == "__main__":
    benchmark(__doc__, main)
