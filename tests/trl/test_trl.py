"""TRL's `GRPOTrainer`, unmodified, takes turns: by a phases file, and by the callback for Transformers' trainers."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from elastic.core.cluster.types import PhaseKind
from elastic.pool import messages as w
from elastic.pool.phases.files import wrapped
from tests.phases.stub_pool import StubPool

pytestmark = [pytest.mark.trl, pytest.mark.timeout(2700)]

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "examples/jobs/trl_grpo.py"
STEPS = 4
WITH_CALLBACK = """
import sys
import trl
from elastic.pool.phases.transformers import ElasticCallback

class Trainer(trl.GRPOTrainer):
    def __init__(self, **settings):
        super().__init__(callbacks=[ElasticCallback()], **settings)

trl.GRPOTrainer = Trainer
sys.path.insert(0, {examples!r})
import trl_grpo
trl_grpo.main()
"""


def run(command: tuple[str, ...], directory: Path, pool: StubPool | None) -> dict[str, object]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ELASTIC_")}
    environment["PYTHONPATH"] = str(ROOT)
    if pool is not None:
        environment |= pool.environment()
    done = subprocess.run(
        [*command, "--directory", str(directory), "--steps", str(STEPS)],
        capture_output=True,
        text=True,
        timeout=900,
        env=environment,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    return run((sys.executable, str(PROGRAM)), tmp_path_factory.mktemp("alone"), None)


def turns(pool: StubPool) -> list[PhaseKind]:
    pool.until(lambda stub: stub.held is None)
    held = [message.phase for message in pool.said(w.AskPhase)]
    assert len(held) == len(pool.said(w.YieldPhase))
    assert all(message.switch_s > 0 for message in pool.said(w.YieldPhase))
    return held


def test_by_a_phases_file_it_learns_what_it_learns_alone(alone: dict[str, object], tmp_path: Path) -> None:
    command = wrapped((sys.executable, str(PROGRAM)), ROOT / "examples/jobs/trl_phases.toml")
    with StubPool() as pool:
        assert run(command, tmp_path / "pool", pool) == alone
        assert turns(pool) == [PhaseKind.ROLLOUT, PhaseKind.TRAIN] * STEPS
    assert run(command, tmp_path / "outside", None) == alone
    assert (tmp_path / "pool/last/model.safetensors").read_bytes() == (
        tmp_path / "outside/last/model.safetensors"
    ).read_bytes()


def test_by_the_callback_it_learns_what_it_learns_alone(alone: dict[str, object], tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(WITH_CALLBACK.format(examples=str(PROGRAM.parent)))
    with StubPool() as pool:
        assert run((sys.executable, str(program)), tmp_path / "pool", pool) == alone
        assert turns(pool) == [PhaseKind.ROLLOUT, PhaseKind.TRAIN] * STEPS
        assert [message.steps for message in pool.said(w.StepsDone)] == list(range(1, STEPS + 1))
