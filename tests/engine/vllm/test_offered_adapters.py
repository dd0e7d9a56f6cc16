"""Trainers of other people offer adapters to a live run on vLLM, by the calls that each makes."""

import pytest

from benchmarks import bring_trainer

pytest.importorskip("vllm")


pytestmark = pytest.mark.timeout(1800)


def test_what_workers_pull_after_each_peers_last_update_is_that_adapter(tmp_path):
    played = bring_trainer.measured_adapters(tmp_path)
    assert "skyrl" in played
    assert {name: one["passed"] for name, one in played.items()} == dict.fromkeys(played, True), played
