"""`elastic run --providers ec2` on the stand-in: instances are taken back, and the orchestrator is killed between its
order of an instance and the answer."""

import pytest

from benchmarks import _clouds_ec2

pytestmark = [pytest.mark.clouds, pytest.mark.timeout(900)]


def test_a_disturbed_run_loses_nothing_leaves_nothing_and_costs_what_is_billed() -> None:
    found = _clouds_ec2.measure(quick=True)
    assert found["leases"] >= 4
    assert found["kills"] >= 2
    assert found["kills_by"]["orchestrator"] == 1
    assert (found["tokens_lost"], found["orphans"]) == (0, 0)
    assert found["usd"] == pytest.approx(found["usd_by_their_bill"], rel=1e-3)
