"""What an env worker makes of users' functions: an outcome, or a cause; nothing else ends it."""

import asyncio
import contextlib
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import structlog

from elastic.environments.agent import AgentSettings, BadOutcome, EpisodeTask, Outcome, PlayedTrajectory, outcome_of
from elastic.environments.env_worker import (
    EnvWork,
    FunctionPlayer,
    load_client,
    load_rollout,
)
from elastic.environments.rows import DataSource, Rows, read_rows
from elastic.front.tiny import write_tokenizer
from elastic.protocol import front_messages as m
from elastic.protocol.run_secrets import RunSecrets
from elastic.system.named_code import CodeUnusable
from elastic.testing.environments import DRIVER_KEY, EnvironmentUnderTest, EnvWorkerUnderTest, StandInRun

KEY = RunSecrets(b"0" * 32).agent_key("3/1/2", 1)
SETTINGS = AgentSettings.model_validate({"rollout": "mine.py:rollout", "client": "none"})


class Told:
    """The run's side of a link: it gives one trajectory, and remembers what it is told."""

    def __init__(self) -> None:
        self.holds: set[str] = set()
        self.said: list[m.FromFront] = []
        self.over = asyncio.Event()

    async def ask(self, request: Callable[[int], m.FromFront]) -> Any:
        said = request(1)
        if isinstance(said, m.BeginTrajectory):
            if self.said:
                await asyncio.Event().wait()
            return m.TrajectoryBegun(1, "3/1/2", 1, number=25, key=KEY, base_url="http://here/v1", place=15)
        self.said.append(said)
        if isinstance(said, m.EndTrajectory):
            self.over.set()
        status = m.TrajectoryStatus(trajectory="3/1/2", group="25", state="open", turns=0, tokens=0, branches=0)
        return m.TrajectoryShown(1, status)


async def played(rollout: Any, rows: Rows | None = None, **more: Any) -> list[m.FromFront]:
    link = Told()
    work = EnvWork(run_dir=Path(), settings=SETTINGS, model="tiny", seed=7, away_s=1.0)
    player = FunctionPlayer(link, rollout, load_client(SETTINGS), work, rows, **more)  # type: ignore[arg-type]
    playing = asyncio.create_task(player.play_on())
    async with asyncio.timeout(30):
        await link.over.wait()
    playing.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await playing
    return link.said


async def test_code_that_cannot_be_loaded_is_told_to_the_run_and_inherits_no_key(tmp_path: Path) -> None:
    code = tmp_path / "mine.py"
    code.write_text(f"import os\nraise ValueError([n for n, v in os.environ.items() if v == {DRIVER_KEY!r}])\n")
    write_tokenizer(tmp_path / "policy")
    settings = {"rollout": f"{code}:rollout", "client": "none"}
    run = StandInRun(tmp_path / "run", tmp_path / "policy", {"name": "agent", "settings": settings})
    async with run.serving():
        under_test = EnvironmentUnderTest(name="agent", write=lambda *_: {}, python=Path(sys.executable))
        worker = EnvWorkerUnderTest(run, under_test)
        assert await worker.ended() == 2
    problem = f"cannot be loaded by {sys.executable}: ValueError: [] ({code}, line 2)"
    told = f"environment.settings.rollout: {code}:rollout: {problem}"
    assert run.unusable == told
    assert worker.words().splitlines()[-1] == f"error: {told}"


async def test_a_function_gets_its_task_and_its_reward_is_told() -> None:
    got: list[tuple[EpisodeTask, Any, PlayedTrajectory]] = []

    async def rollout(task: EpisodeTask, client: Any, trajectory: PlayedTrajectory) -> Outcome:
        got.append((task, client, trajectory))
        return Outcome(reward=0.5, truncated=True, rewards={"solver": 1}, metrics={"calls": True})

    own = m.AgentCaller(named="3-1-2")
    assert await played(rollout) == [
        m.GiveReward(1, own, 0.5),
        m.GiveReward(1, own, 1.0, "solver"),
        m.EndTrajectory(1, own, "", True, {"calls": 1.0}),
    ]
    await played(rollout)
    (task, client, trajectory), (same, _, _) = got
    assert task == same, "members of a group, and whoever plays one again, have the same task"
    assert (task.number, client) == (25, None)
    where = {"id": "3-1-2", "base_url": "http://here/v1", "key": KEY, "model": "tiny", "member": 2}
    assert trajectory == PlayedTrajectory(**where)


async def test_the_row_of_a_task_follows_from_its_groups_place(tmp_path: Path) -> None:
    got: list[EpisodeTask] = []

    async def rollout(task: EpisodeTask, client: Any, trajectory: PlayedTrajectory) -> float:
        got.append(task)
        return 0.0

    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"q": f"{n}?", "a": {"b": n}}) + "\n" for n in range(10)))
    source = DataSource(source=file, prompt="q", answer="a.b", order="in_order", seed=7)
    await played(rollout, read_rows(source))
    (task,) = got
    assert (task.prompt, task.answer, task.row) == ("5?", 5, {"q": "5?", "a": {"b": 5}})


def raises(error: BaseException) -> Any:
    async def rollout(task: EpisodeTask, client: Any, trajectory: PlayedTrajectory) -> float:
        raise error

    return rollout


@pytest.mark.parametrize(
    ("rollout", "cause"),
    [
        (raises(ValueError("no such tool")), "the environment raised ValueError: no such tool"),
        (raises(SystemExit(0)), "the environment raised SystemExit: 0"),
        (raises(TimeoutError()), "the environment raised TimeoutError"),
        (raises(asyncio.CancelledError()), "the environment raised CancelledError"),
        (lambda *_: math.nan, "found nan"),
        (lambda *_: "1.0", "found '1.0'"),
        (lambda *_: 10**400, "allowed: a finite number, or an Outcome"),
        (lambda *_: None, "found None"),
        (lambda *_: Outcome(), "found None"),
        (lambda *_: Outcome(reward=1.0, failed="the sandbox is gone"), "the sandbox is gone"),
        (lambda *_: Outcome(failed="x" * 10_000), "x" * 1000),
        (lambda *_: Outcome(failed="half a pair: \ud800"), "half a pair: \N{REPLACEMENT CHARACTER}"),
        (lambda *_: Outcome(rewards={"\ud800": 1.0}), "found a reward of the policy"),
        (lambda *_: Outcome(rewards={"x" * 1000: 1.0}), "allowed: a name of `front.policies`"),
        (lambda *_: Outcome(reward=1.0, metrics={"calls": math.nan}), "metric 'calls': found nan"),
        (lambda *_: Outcome(reward=1.0, metrics={"": 1}), "allowed: a name of 1 to 64 characters"),
        (
            lambda *_: Outcome(reward=1.0, metrics={str(n): n for n in range(65)}),
            "found 65 metrics; allowed: at most 64",
        ),
        (lambda: 1.0, "the environment raised TypeError"),
    ],
)
async def test_what_is_no_outcome_fails_its_trajectory_and_is_never_a_reward(rollout: Any, cause: str) -> None:
    (ended,) = await played(rollout)
    assert isinstance(ended, m.EndTrajectory)
    assert cause in ended.cause
    assert len(ended.cause) <= 2000


def test_rewards_are_numbers() -> None:
    assert outcome_of(True).reward == 1.0
    with pytest.raises(BadOutcome):
        outcome_of(Outcome(reward=1.0, rewards={"solver": math.inf}))


def test_what_is_no_function_is_told_at_once(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("rollout = 3")
    with pytest.raises(CodeUnusable, match="found int; allowed: an async function"):
        load_rollout(f"{tmp_path}/mine.py:rollout")


async def test_a_cause_tells_no_key() -> None:
    async def rollout(task: EpisodeTask, client: Any, trajectory: PlayedTrajectory) -> float:
        raise ValueError(f"no answer for {trajectory.key}")

    with structlog.testing.capture_logs() as logged:
        (ended,) = await played(rollout)
    assert isinstance(ended, m.EndTrajectory)
    assert ended.cause == "the environment raised ValueError: no answer for [removed]"
    (trace,) = [one["trace"] for one in logged]
    assert trace.endswith("ValueError: no answer for [removed]\n")
