"""Live runs of kind `chat`: a policy without training, tools that are plain functions, and figures by step."""

import json
from pathlib import Path

import pytest

from benchmarks._agents import AgentsRun
from elastic.report import summarise
from elastic.runtime.journal import RunDirectory

pytestmark = pytest.mark.environments

FUNCTIONS = '''
import asyncio

import httpx


def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


async def length(messages, task, trajectory) -> float:
    assert trajectory.base_url.endswith("/v1") and task.prompt in (one["content"] for one in messages)
    return float(len(messages))


async def judged(messages, trajectory) -> float:
    """The policy is asked itself, and that is no turn of the trajectory."""
    asked = {"model": trajectory.model, "messages": [{"role": "user", "content": "Is it good?"}]}
    key = {"authorization": f"Bearer {trajectory.chat_key}"}
    async with httpx.AsyncClient(base_url=trajectory.base_url, headers=key, timeout=120, trust_env=False) as calls:
        while (answer := await calls.post("/chat/completions", json=asked)).status_code in (429, 503):
            await asyncio.sleep(0.2)
    assert answer.status_code == 200, answer.text
    return float(answer.headers["x-elastic-trained"] == "false")


def digits(completions, answer, **columns):
    assert answer == ["4"]
    return [sum(letter.isdigit() for letter in said) for said in completions]
'''


def test_a_run_with_tools_ends_with_metrics_of_each_step(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(FUNCTIONS)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "2+2=", "answer": "4"}))
    settings = (
        *("run.steps=2", "rollout.groups=2", "rollout.group_size=2", "front.tool_parser=hermes"),
        *("environment.name=chat", f"environment.data.source={tmp_path}/rows.jsonl", "environment.data.answer=answer"),
        *('environment.settings.tools=["mine.py:add"]', "environment.settings.system=You can add."),
        'environment.settings.rewards=["mine.py:length", "mine.py:digits", "mine.py:judged"]',
        "front.chats_max=64",
    )
    with AgentsRun(tmp_path, *settings) as run:
        run.wait()
        assert run.leftovers() == []
        summary = summarise(RunDirectory(run.run_dir))
    assert (summary.outcome, len(summary.steps)) == ("finished", 2)
    for step in summary.steps:
        assert list(step.metrics) == ["rewards/digits", "rewards/judged", "rewards/length"]
        assert step.metrics["rewards/judged"] == 1.0
        assert step.metrics["rewards/length"] >= 3, "a system prompt, a question, and an answer"
        assert step.mean_reward == pytest.approx(sum(step.metrics.values()))
