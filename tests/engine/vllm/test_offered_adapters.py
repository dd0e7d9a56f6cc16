"""Trainers of other people offer adapters to a live run on vLLM, by the calls that each makes."""

import pytest

pytest.importorskip("vllm")

from tests.front.live import benchmark

pytestmark = pytest.mark.timeout(1800)


def test_what_workers_pull_after_each_peers_last_update_is_that_adapter(tmp_path):
    with benchmark("bring_trainer") as bring:
        played = bring.measured_adapters(tmp_path)
    assert "skyrl" in played
    assert {name: one["passed"] for name, one in played.items()} == dict.fromkeys(played, True), played
