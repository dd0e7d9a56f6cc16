"""Jobs on vLLM in a live pool: each starts its vLLM once, and has it from then on as soon as its time slice begins."""

import pytest

from benchmarks import switching

pytest.importorskip("vllm")

pytestmark = pytest.mark.timeout(900)

STEPS = 4


def test_vllm_stays_warm_while_other_jobs_have_its_node(tmp_path):
    found = switching.in_a_pool(tmp_path, "example", STEPS)
    assert found["steps_done"] == [STEPS, STEPS]
    assert found["vllm_processes"] == 2, "one a job"
    assert len(found["warm_s_all"]) >= 2 * (STEPS - 1)
    assert min(found["cold_s"]) > 5 * max(found["warm_s_all"])
    assert found["residual_nano_usd"] == 0
