"""Our GRPO script in plain torch: alone, in a pool, and from its checkpoint it learns the same."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from elastic.core.cluster.types import PhaseKind
from elastic.pool import messages as w
from tests.phases.stub_pool import StubPool

ROOT = Path(__file__).parents[2]


def run(directory: Path, steps: int, **environment: str) -> list[dict[str, object]]:
    done = subprocess.run(
        [sys.executable, "examples/jobs/grpo_script.py", "--directory", str(directory), "--steps", str(steps)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        env={"PATH": "/usr/bin:/bin", **environment},
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.nightly
def test_it_learns_the_same_alone_in_a_pool_and_from_its_checkpoint(tmp_path: Path) -> None:
    alone = run(tmp_path / "alone", 4)
    with StubPool() as pool:
        assert run(tmp_path / "shared", 2, **pool.environment()) == alone[:2]
        assert run(tmp_path / "shared", 4, **pool.environment()) == alone[2:]
        pool.until(lambda stub: stub.held is None)
        assert [ask.phase for ask in pool.said(w.AskPhase)] == [PhaseKind.ROLLOUT, PhaseKind.TRAIN] * 4
        assert pool.said(w.StepsDone)[-1].steps == 4
        assert [message.done for message in pool.said(w.PhaseProgress)][-1] > 0
