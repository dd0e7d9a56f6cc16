"""Agents of a live run whose processes are killed with SIGKILL in the middle of a streamed and of a whole call.

- What a client was given whole is what the journal has as that turn's tokens, and is trained, each token once.
- A call that is made again joins its turn: nothing is asked of the run twice.
- A stream that cannot go on is torn; it never ends cleanly before its answer does.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from benchmarks import _agents
from benchmarks._agents import AgentsRun
from elastic.runtime.journal import RunDirectory
from tests import proof
from tests.front.live import Agent, Answer

pytestmark = pytest.mark.slow

SETTINGS = (
    "run.steps=1",
    "rollout.groups=1",
    "rollout.group_size=2",
    "seeding.policy=fixed",
    "seeding.window_s=0",
)
WAIT_S = 120


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Any]:
    """A run of one step with one group of two, a dedicated worker, and the trainer's device while there is no other."""
    with AgentsRun(tmp_path, *SETTINGS) as under_way:
        yield under_way


@asynccontextmanager
async def playing(run: Any) -> AsyncIterator[list[Agent]]:
    url = await asyncio.to_thread(run.url)
    async with httpx.AsyncClient(base_url=url, timeout=WAIT_S, trust_env=False) as client:
        yield [await Agent.begin(client, run.driver_key(), "one") for _ in range(2)]


class Calls:
    """A streamed call of the first agent and a whole one of the second, which are both generated now."""

    def __init__(self, run: Any, agents: list[Agent]) -> None:
        self.run, self.streaming = run, agents[0]
        self.turns = {f"{agent.id.replace('-', '/')}/{len(agent.messages) // 2}" for agent in agents}
        self._asked = [
            asyncio.create_task(agent.say(f"What is {len(agent.messages)}?", stream=agent is self.streaming))
            for agent in agents
        ]

    async def under_way(self) -> None:
        while self.streaming.port is None or not self.turns <= await asyncio.to_thread(self.run.accepted):
            assert not any(asked.done() for asked in self._asked)
            await asyncio.sleep(0.02)

    async def answers(self) -> list[Answer]:
        async with asyncio.timeout(WAIT_S):
            return await asyncio.gather(*self._asked)


def proven(run: Any, answers: list[Answer], turns: int) -> None:
    """The run has asked for so many turns, and each is one of these answers, which are trained as they are."""
    kept = RunDirectory(run.run_dir)
    found = _agents.played(kept)
    assert len(answers) == turns
    assert {answer.turn for answer in answers} == found.asked == found.answers.keys()
    assert found.generated == turns
    assert found.twice == 0
    for answer in answers:
        assert answer.ids == list(found.answers[answer.turn].ids)
        assert answer.logprobs == pytest.approx(found.answers[answer.turn].logprobs)
    assert _agents.wrongly_trained(kept, found.answers) == 0
    verdict = proof.check_run(kept)
    assert verdict.tokens_lost == verdict.tokens_duplicated == verdict.groups_twice == 0
    assert verdict.turns_repeated == verdict.ledger_imbalance_ns == 0


async def ended(run: Any, agents: list[Agent]) -> None:
    """The trajectories get rewards, and the run comes to its end."""
    for reward, agent in enumerate(agents):
        await agent.told("reward", reward=reward)
        status = await agent.told("end")
        assert (status["state"], status["reward"]) == ("finished", reward)
    await asyncio.to_thread(run.wait)
    assert run.leftovers() == []


async def asked(run: Any, agents: list[Agent], strike: Callable[[], object]) -> list[Answer]:
    """The answers to two calls, under which something is struck."""
    calls = Calls(run, agents)
    await calls.under_way()
    await asyncio.to_thread(strike)
    return await calls.answers()


@pytest.mark.nightly
async def test_fronts_a_worker_and_the_orchestrator_are_killed(run: Any) -> None:
    """A live run whose processes are killed while agents play: each must find its way back to the others."""

    def orchestrator() -> None:
        run.kill("orchestrator")
        run.resume()

    async with playing(run) as agents:
        fronts = run.fronts()
        answers = told = await asked(run, agents, lambda: run.kill_processes("front", fronts))
        assert all(isinstance(answer.torn[0], httpx.RemoteProtocolError | httpx.ReadError) for answer in told)
        assert set(run.fronts()).isdisjoint(fronts)

        answers += await asked(run, agents, lambda: run.kill_processes("worker", run.workers()))
        assert [answer.torn for answer in answers[2:]] == [[], []]

        fronts = run.fronts()
        answers += await asked(run, agents, orchestrator)
        assert run.fronts() == fronts

        await ended(run, agents)
    assert run.kills == {"front": 2, "worker": 1, "orchestrator": 1}
    proven(run, answers, turns=6)


@pytest.mark.nightly
@pytest.mark.parametrize("victim", ["trainer", "both"])
async def test_the_trainers_process_is_killed(run: Any, victim: str) -> None:
    """By itself, and together with the orchestrator."""

    def kill_processes() -> None:
        run.kill(victim)
        if victim == "both":
            run.resume()

    async with playing(run) as agents:
        answers = await asked(run, agents, kill_processes)
        answers += await asked(run, agents, lambda: run.kill_processes("front", run.fronts()))
        await ended(run, agents)
    proven(run, answers, turns=4)


@pytest.mark.nightly
async def test_a_supervised_run_goes_on_by_itself(tmp_path: Path) -> None:
    with AgentsRun(tmp_path, *SETTINGS, options=["--supervise"]) as run:

        def kill_processes() -> None:
            run.kill_processes("orchestrator", [child.pid for child in psutil.Process(run.process.pid).children()])

        async with playing(run) as agents:
            answers = await asked(run, agents, kill_processes)
            answers += await asked(run, agents, kill_processes)
            await ended(run, agents)
        assert run.kills == {"orchestrator": 2}
        assert len(RunDirectory(run.run_dir).journal_paths()) == 3
        proven(run, answers, turns=4)
