"""A live run whose env workers are killed with SIGKILL while they play, and its orchestrator with them."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks._agents import AgentsRun
from elastic.core import events as e
from elastic.protocol.run_secrets import RunSecrets
from elastic.runtime.agents import notes
from elastic.runtime.journal import RunDirectory
from tests import proof

pytestmark = pytest.mark.environments

STEPS, GROUPS, SIZE = 3, 4, 4
FUNCTION = '''
import asyncio

import httpx

from elastic.environments.agent import EpisodeTask, Outcome, PlayedTrajectory


async def repeated(calls, body):
    """The answer to a call, which is made again where it breaks, as clients of OpenAI's do."""
    while True:
        try:
            answer = await calls.post("/chat/completions", json=body)
        except httpx.TransportError:
            answer = None
        if answer is not None and answer.status_code not in (429, 500, 503):
            answer.raise_for_status()
            return answer
        await asyncio.sleep(0.2)


async def play(task: EpisodeTask, client: object, trajectory: PlayedTrajectory) -> Outcome:
    """Two turns; the reward says which task it was."""
    messages = [{"role": "user", "content": f"Task {task.number}"}]
    key = {"authorization": f"Bearer {trajectory.key}"}
    async with httpx.AsyncClient(base_url=trajectory.base_url, headers=key, timeout=120, trust_env=False) as calls:
        for _ in range(2):
            body = {"model": trajectory.model, "messages": messages}
            answer = await repeated(calls, body)
            messages += [answer.json()["choices"][0]["message"], {"role": "user", "content": "More."}]
    return Outcome(reward=100 * task.number + trajectory.member)
'''


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Any]:
    (tmp_path / "mine.py").write_text(FUNCTION)
    settings = (
        *(f"run.steps={STEPS}", f"rollout.groups={GROUPS}", f"rollout.group_size={SIZE}"),
        *("environment.name=agent", "environment.processes=2", "environment.settings.rollout=mine.py:play"),
        *("environment.settings.client=none", "environment.settings.concurrency=4", "environment.max_restarts=50"),
    )
    with AgentsRun(tmp_path, *settings) as under_way:
        yield under_way


def test_every_trajectory_is_scored_once_whatever_is_killed(run: Any) -> None:
    run.url()
    worker = "agent_*.json"
    run.kill_in_turn(random.Random(7), [worker, worker, "orchestrator", worker, worker, worker])
    assert run.leftovers() == []
    assert run.kills["env worker"] > 0
    kept = RunDirectory(run.run_dir)
    rows = proof.trajectories(kept)
    again: dict[str, int] = {}
    with kept.journals() as journals:
        for journal in journals:
            for _, event in journal.events_of(e.AgentNoted.__name__):
                assert isinstance(event, e.AgentNoted)
                if isinstance(note := notes.decode_note(event.note), notes.BegunAgain):
                    again[note.trajectory] = again.get(note.trajectory, 0) + 1
    scored = {name: row.reward for name, row in rows.items() if row.reward is not None}
    assert len(rows) == STEPS * GROUPS * SIZE
    for name, reward in scored.items():
        step, group, member = map(int, name.split("/"))
        assert reward == 100 * (GROUPS * step + group) + member, name
    failed = {name: row.cause for name, row in rows.items() if name not in scored and again.get(name, 0) < 3}
    assert failed == {}, "only what was begun too often has failed"
    logs = "".join(path.read_text() for path in (run.run_dir / "logs").glob("*.log"))
    secrets = RunSecrets.of(run.run_dir)
    keys = {secrets.driver_key("agent_0"), *(secrets.agent_key(name, restart) for name in rows for restart in range(4))}
    assert not [key for key in keys if key in logs]
