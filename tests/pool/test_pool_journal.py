"""A pool's journal: a start goes on from a snapshot to the same state, and jobs that are over are found in it."""

from collections.abc import Sequence
from pathlib import Path
from typing import TypeGuard

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.core.cluster import Cluster, ClusterPolicies, JobRequest, NodeKind, PhasePlan, PoolSpec, WaitLimits
from elastic.core.cluster import events as e
from elastic.core.cluster.history import ClusterEntry, cluster_digest, encode
from elastic.pool.journal import SNAPSHOT_EVERY, PoolJournal, PoolJournalError
from elastic.pool.ports import DoneCommand, ForgottenJob, JobEntry
from elastic.testing.faults.pool.pool_worlds import PoolSetting, PoolWorld, Unexpected
from policies.clusters import CLUSTER_POLICIES
from tests.seeds import examples

S = 1_000_000_000
KIND = NodeKind(gpus=8, memory_bytes=100, nano_usd_per_hour=S)
SPEC = PoolSpec.uniform(rollout=KIND, train=KIND, rollout_nodes=2, train_nodes=2)
POLICIES = CLUSTER_POLICIES["ours"]


def request(job: str) -> JobRequest:
    return JobRequest(id=job, slo=2.0, plan=PhasePlan(rollout_ns=10 * S, train_ns=10 * S))


class Pool:
    """A pool's process without its processes: a cluster, and its journal."""

    def __init__(self, directory: Path) -> None:
        self.journal = PoolJournal(directory)
        self.cluster, self.now_ns = self.journal.open_pool(SPEC, WaitLimits(), POLICIES, "ours")

    def tell(self, event: e.ClusterEvent) -> None:
        self.now_ns += S
        entry = JobEntry(job=event.request.id, directory=f"/jobs/{event.request.id}") if is_new(event) else None
        leaving = event.jobs if isinstance(event, e.JobsForgotten) else ()
        forgotten = [ForgottenJob(entry=None, record=self.cluster.jobs[job]) for job in leaving]
        self.journal.append(encode(ClusterEntry(self.now_ns, event)), entry, None, forgotten)
        self.cluster.handle(event, self.now_ns)

    def live_through(self, job: str) -> None:
        self.tell(e.JobSubmitted(request=request(job)))
        self.tell(e.CancelRequested(job=job))


def is_new(event: e.ClusterEvent) -> TypeGuard[e.JobSubmitted]:
    return isinstance(event, e.JobSubmitted)


def test_a_start_begins_at_the_last_snapshot(tmp_path: Path) -> None:
    """What is before the snapshot is not read: it may even be gone."""
    pool = Pool(tmp_path)
    for number in range(SNAPSHOT_EVERY // 2 + 50):
        pool.live_through(f"job-{number}")
        pool.journal.note_state(pool.cluster)
        if len(pool.cluster.state.over) > 20:
            pool.tell(e.JobsForgotten(jobs=tuple(pool.cluster.state.over)[:10]))
    pool.tell(e.JobSubmitted(request=request("stays")))
    digest = cluster_digest(pool.cluster)
    pool.journal.close()
    again = Pool(tmp_path)
    assert cluster_digest(again.cluster) == digest
    assert len(again.cluster.jobs) < 32
    assert {entry.job for entry in again.journal.entries()} == again.cluster.jobs.keys()
    kept = again.journal.count_forgotten() + len(again.cluster.jobs)
    assert kept == SNAPSHOT_EVERY // 2 + 51
    again.journal.close()


def test_a_pool_goes_on_with_no_other_nodes_than_it_began_with(tmp_path: Path) -> None:
    Pool(tmp_path).live_through("job")
    far = msgspec.structs.replace(KIND, name="far", site="b")
    other = msgspec.structs.replace(SPEC, rollout=(*SPEC.rollout, far))
    with pytest.raises(PoolJournalError, match=r"2 rollout, 2 train.; found 2 rollout, 1 far, 2 train; allowed"):
        PoolJournal(tmp_path).open_pool(other, WaitLimits(), POLICIES, "ours")


def test_another_program_is_noticed_behind_a_snapshot(tmp_path: Path) -> None:
    pool = Pool(tmp_path)
    pool.live_through("first")
    pool.journal.note_state(pool.cluster, at_once=True)
    pool.tell(e.JobSubmitted(request=request("second")))
    pool.cluster.handle(e.CancelRequested(job="second"), pool.now_ns)
    pool.journal.append(encode(ClusterEntry(pool.now_ns, e.TimePassed())))
    pool.journal.note_state(pool.cluster, at_once=True)
    pool.journal._db.execute("DELETE FROM snapshots")
    pool.journal.close()
    with pytest.raises(PoolJournalError, match="another program"):
        Pool(tmp_path)


@settings(max_examples=examples(12, 30), deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 2)), max_size=24), st.integers(1, 5))
def test_pages_hold_each_forgotten_job_once(
    tmp_path_factory: pytest.TempPathFactory, named: list[tuple[str, int]], most: int
) -> None:
    pool = Pool(tmp_path_factory.mktemp("pool"))
    jobs = [f"{letter}{kind}-{number}" for number, (letter, kind) in enumerate(named)]
    for job in jobs:
        pool.live_through(job)
        pool.tell(e.JobsForgotten(jobs=(job,)))
    for like in ("", "a", "b1"):
        found: list[str] = []
        before = len(jobs) + 1
        while page := pool.journal.forgotten_jobs(before, most, like):
            found += [one.record.request.id for one in page]
            before = page[-1].record.arrival
        assert found == [job for job in reversed(jobs) if like in job]
    assert not pool.cluster.jobs
    pool.journal.close()


def test_a_failed_job_comes_back_with_what_it_owed(tmp_path: Path) -> None:
    pool = Pool(tmp_path)
    pool.tell(e.JobSubmitted(request=request("one")))
    pool.tell(e.JobStarted(job="one", placement=pool.cluster.jobs["one"].placement))
    pool.now_ns += 3600 * S
    pool.tell(e.JobFailed(job="one", cause="killed"))
    owed = pool.cluster.jobs["one"].billed
    assert owed > 0
    pool.tell(e.JobsForgotten(jobs=("one",)))
    assert (pool.cluster.state.forgotten_billed, pool.cluster.jobs) == (owed, {})
    kept = pool.journal.forgotten("one")
    assert kept is not None
    pool.tell(e.ResubmitRequested.of_forgotten(kept.record))
    record = pool.cluster.jobs["one"]
    assert (record.resubmissions, record.billed, pool.cluster.state.forgotten_billed) == (1, owed, 0)
    digest = cluster_digest(pool.cluster)
    pool.journal.close()
    again = Pool(tmp_path)
    assert cluster_digest(again.cluster) == digest
    again.journal.close()


class _Unplaceable(PoolWorld):
    """A pool whose placement policy fails at one job, with a journal on disk."""

    def __init__(self, directory: Path) -> None:
        self.on_disk = PoolJournal(directory)
        super().__init__(PoolSetting(seed=0, policy="ours", spec=SPEC, jobs=(), unplaceable="poisoned"))
        self.on_disk.open_pool(SPEC, self.limits, self.policies, "ours")

    def append(
        self,
        record: bytes,
        entry: JobEntry | None = None,
        command: DoneCommand | None = None,
        forgotten: Sequence[ForgottenJob] = (),
    ) -> None:
        super().append(record, entry, command, forgotten)
        self.on_disk.append(record, entry, command, forgotten)

    def start_job(self, entry: JobEntry, placement: int, restarts: int) -> None: ...

    def replayed(self, policies: ClusterPolicies) -> Cluster:
        return self.on_disk.replayed(policies)[0]


def test_an_event_that_the_cluster_cannot_take_leaves_nothing_behind_and_the_pool_starts_again(tmp_path: Path) -> None:
    pool = _Unplaceable(tmp_path)
    shell = pool.shell
    assert shell is not None
    shell.submit(request("one"), JobEntry(job="one", directory="/jobs/one"))
    before = cluster_digest(shell.cluster)
    with pytest.raises(Unexpected, match="poisoned"):
        shell.submit(request("poisoned"), JobEntry(job="poisoned", directory="/jobs/poisoned"))
    assert cluster_digest(shell.cluster) == before
    assert {*shell.entries} == {*shell.cluster.jobs} == {"one"}
    shell.submit(request("two"), JobEntry(job="two", directory="/jobs/two"))
    digest = cluster_digest(shell.cluster)
    assert {*shell.cluster.jobs} == {"one", "two"}
    pool.on_disk.close()
    again = PoolJournal(tmp_path)
    assert cluster_digest(again.replayed(pool.policies)[0]) == digest
    again.close()
