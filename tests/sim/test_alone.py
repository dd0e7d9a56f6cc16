"""What a job costs alone: what it is billed on nodes of its own, whenever it arrives."""

from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.simulation.jobs.simulate import PoolNodes, Workload, WorkloadJob, WorkloadPool, simulate_jobs

SECONDS = st.integers(1, 600).map(float)


@st.composite
def jobs(draw: st.DrawFn) -> list[WorkloadJob]:
    found: list[WorkloadJob] = []
    at_s = 0.0
    for number in range(draw(st.integers(1, 3))):
        at_s += draw(st.sampled_from((0.0, 0.0, 1.0, 60.0, 5000.0)))
        found.append(
            WorkloadJob(
                name=f"job-{number}",
                at_s=at_s,
                slo=10.0,
                steps=draw(st.integers(1, 4)),
                rollout_s=draw(SECONDS),
                train_s=draw(SECONDS),
                sync_s=draw(st.sampled_from((0.0, 7.0))),
                rollout_switch_s=draw(st.sampled_from((0.0, 3.0))),
                rollout_cold_s=draw(st.sampled_from((0.0, 20.0))),
                rollout_parks=draw(st.booleans()),
                train_switch_s=draw(st.sampled_from((0.0, 2.0))),
                rollout_nodes=draw(st.integers(1, 2)),
                train_nodes=draw(st.integers(1, 2)),
                shortest=draw(st.sampled_from((0.3, 1.0))),
            )
        )
    return found


@settings(max_examples=40, deadline=None)
@given(jobs(), st.integers(2, 8), st.integers(0, 2**32))
def test_a_workload_under_solo_costs_what_its_jobs_cost_alone_whenever_they_arrive(
    wanted: list[WorkloadJob], nodes: int, seed: int
) -> None:
    nodes_of_each = PoolNodes(nodes=nodes, usd_per_gpu_hour=1.85)
    workload = Workload(
        seed=seed,
        pool=WorkloadPool(
            rollout=(nodes_of_each,), train=(nodes_of_each.model_copy(update={"usd_per_gpu_hour": 5.28}),)
        ),
        jobs=wanted,
    )
    report, _ = simulate_jobs(workload, "solo", "workload")
    assert [job.state for job in report.jobs] == ["finished"] * len(wanted)
    assert [job.usd for job in report.jobs] == [job.usd_alone for job in report.jobs]
    assert abs(report.usd - report.usd_alone) < 1e-9 * report.usd
    for job, one in zip(wanted, report.jobs, strict=True):
        if job.shortest == 1.0:
            first = workload.model_copy(update={"jobs": [job.model_copy(update={"at_s": 0.0})]})
            assert simulate_jobs(first, "solo", "workload")[0].usd == one.usd
