"""A live run of two environments, whose env workers are killed as they play, and its orchestrator with them."""

import json
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks._agents import AgentsRun
from elastic.runtime.journal import GroupRow, RunDirectory, StepRow
from tests import proof
from tests.envs.test_live_env_workers import FUNCTION

pytestmark = pytest.mark.environments

STEPS, GROUPS, SIZE, ROWS = 3, 2, 2, 3
PLAY_ROW = FUNCTION.replace('f"Task {task.number}"', "task.prompt").replace(
    "reward=100 * task.number + trajectory.member", "reward=1000 * task.row['n'] + trajectory.member"
)
ENVIRONMENTS = """
[[environments]]
name = "rows"
kind = "agent"
ratio = 2
redundancy = 1.5
max_restarts = 50
settings = {{ rollout = "rows.py:play", client = "none", concurrency = 5 }}
data = {{ source = "{rows}", order = "by_difficulty" }}
[[environments]]
name = "tasks"
kind = "agent"
max_restarts = 50
settings = {{ rollout = "tasks.py:play", client = "none", concurrency = 5 }}
"""


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Any]:
    (tmp_path / "tasks.py").write_text(FUNCTION)
    (tmp_path / "rows.py").write_text(PLAY_ROW)
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"Row {n}", "n": n}) + "\n" for n in range(ROWS)))
    settings = (f"run.steps={STEPS}", f"rollout.groups={GROUPS}", f"rollout.group_size={SIZE}")
    with AgentsRun(tmp_path, *settings, environments=ENVIRONMENTS.format(rows=rows)) as under_way:
        yield under_way


def test_each_environment_has_its_share_and_each_row_comes_once_a_pass(run: Any) -> None:
    run.url()
    run.kill_in_turn(random.Random(7), ["rows_*.json", "orchestrator", "tasks_*.json"])
    assert run.leftovers() == []
    kept = RunDirectory(run.run_dir)
    trajectories = proof.trajectories(kept)
    groups: dict[str, GroupRow] = {}
    steps: dict[int, StepRow] = {}
    with kept.journals() as journals:
        for journal in journals:
            groups |= {row.group: row for row in journal.rows(GroupRow)}
            steps |= {row.step: row for row in journal.rows(StepRow)}
    assert Counter(row.environment for row in groups.values()) == {"rows": 4, "tasks": 2}
    rows_had: dict[int, set[str]] = {}
    for row in trajectories.values():
        step, index, member = map(int, row.trajectory.split("/"))
        if row.reward is None:
            continue
        if row.environment == "tasks":
            assert row.reward == 100 * (GROUPS * step + index) + member
        else:
            about, of = divmod(int(row.reward), 1000)
            assert of == member
            rows_had.setdefault(about, set()).add(row.group)
    assert sorted(len(groups) for groups in rows_had.values()) == [1, 1, 2], "a pass, and one row of the next"
    for row in steps.values():
        assert sum(one.groups_trained + one.groups_dropped for one in row.environments.values()) == GROUPS
    scored = Counter(row.group for row in trajectories.values() if row.reward is not None and row.environment == "rows")
    assert max(scored.values()) <= SIZE, "what runs beyond the wanted members is cut off"
