"""A live run of a third party's token-level environment, whose env workers are killed, and its orchestrator."""

import random
from pathlib import Path
from typing import Any

import pytest

from benchmarks import _crashes
from benchmarks._shapes import write_chat_policy
from elastic.runtime.journal import RunDirectory
from tests import proof
from tests.envs.installed_environment import install_environment

pytestmark = pytest.mark.environments

STEPS, GROUPS, SIZE = 2, 3, 4
ADDING = '''
import time

from pydantic import BaseModel

from elastic.environments.base import StepResult


class Saying:
    """Four turns, each answered by what was said so far; the reward says whether that is even."""

    class Settings(BaseModel):
        words: int

    vocabulary = tuple("abcdefgh")
    stop_token_ids = (3, 4, 5)

    def __init__(self, settings):
        self.settings, self.turns = settings, 0

    async def reset(self, seed):
        self.said = [seed]
        return [1 + seed % self.settings.words, 2]

    async def step(self, token_ids):
        time.sleep(0.05)
        self.turns += 1
        self.said += token_ids
        return StepResult([sum(self.said) % self.settings.words], self.turns == 4, float(sum(self.said) % 2))

    async def truncate(self):
        return 0.5

    async def aclose(self):
        pass
'''
CONFIG = """
[run]
name = "hosted"
steps = {steps}
seed = 5
pass_env = ["PYTHONPATH"]
[model]
checkpoint = "{checkpoint}"
[environment]
name = "theirs"
kind = "saying"
processes = 2
max_restarts = 50
settings = {{ words = 8 }}
[rollout]
groups = {groups}
group_size = {size}
max_turns = 6
max_tokens_per_turn = 12
[trainer]
updates_per_step = 1
checkpoint_every_steps = 1
max_restarts = 1000
[engine]
max_batch = 16
max_context_tokens = 256
[engine.pacing]
prefill_tokens_per_s = 8000
decode_step_s = {{ 1 = 0.04 }}
[providers.reserved]
max_workers = 1
"""


@pytest.fixture
def begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Begins a run in a directory of its own."""
    install_environment(tmp_path, "saying", ADDING)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    monkeypatch.syspath_prepend(tmp_path)
    checkpoint = write_chat_policy(tmp_path / "policy")
    runs: list[Any] = []

    def start(name: str) -> Any:
        config = tmp_path / f"{name}.toml"
        config.write_text(CONFIG.format(steps=STEPS, groups=GROUPS, size=SIZE, checkpoint=checkpoint))
        runs.append(_crashes.CrashingRun(tmp_path / name, [str(config), "--providers", "reserved"]))
        return runs[-1]

    yield start
    for run in runs:
        run.discard()


def test_a_run_comes_to_the_same_whatever_is_killed(begin: Any) -> None:
    undisturbed, worker = begin("undisturbed"), "theirs_*.json"
    undisturbed.wait()
    run = begin("disturbed")
    run.kill_in_turn(random.Random(7), [worker, worker, "orchestrator", worker, worker])
    assert run.leftovers() == []
    assert run.kills["env worker"] > 0
    rows, wanted = (proof.trajectories(RunDirectory(one.run_dir)) for one in (run, undisturbed))
    verdict = proof.check_run(RunDirectory(run.run_dir))
    assert len(rows) == STEPS * GROUPS * SIZE
    came = {name: (row.token_ids, row.reward, row.cause, row.turns) for name, row in rows.items()}
    assert came == {name: (row.token_ids, row.reward, row.cause, row.turns) for name, row in wanted.items()}
    assert (verdict.tokens_lost, verdict.tokens_duplicated, verdict.turns_repeated, verdict.groups_twice) == (
        0,
        0,
        0,
        0,
    )
