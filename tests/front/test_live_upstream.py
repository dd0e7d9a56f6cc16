"""A live run whose agents play two policies and ask a judge elsewhere, under kills of fronts and of the orchestrator.

- What calls of the judge came to is known for those that were answered, and is at its bound for those whose front died.
- Policies have rewards of their own, and the report tells both apart.
- The upstream's key is in no file, no argument and no answer.
"""

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from benchmarks._agents import AgentsRun
from elastic.report import as_markdown, summarise
from elastic.runtime.journal import RunDirectory
from tests.front.live import Agent, bearer
from tests.front.upstream_server import Exchange, upstream_server

pytestmark = [pytest.mark.slow, pytest.mark.nightly]

KEY, VARIABLE = "sk-the-upstreams-own-key", "TESTS_UPSTREAM_KEY"
JUDGED = {"choices": [{"message": {"content": "7"}}], "usage": {"prompt_tokens": 1000, "completion_tokens": 100}}
WAIT_S = 120


def settings(url: str) -> list[str]:
    front = {
        "policies": '["solver", "critic"]',
        "upstream": url,
        "upstream_key_env": VARIABLE,
        "upstream_usd_max": "1.0",
        "upstream_usd_per_million_in": "10.0",
        "upstream_usd_per_million_out": "100.0",
        "upstream_timeout_s": "60.0",
        "upstream_calls_max": "5",
    }
    return [
        *("run.steps=1", "rollout.groups=1", "rollout.group_size=2", "seeding.policy=fixed", "seeding.window_s=0"),
        *(f"front.{key}={value}" for key, value in front.items()),
    ]


async def test_two_policies_and_a_judge_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, KEY)
    answered = asyncio.Event()
    answered.set()

    async def answers(exchange: Exchange) -> None:
        await answered.wait()
        await exchange.answer(200, json.dumps(JUDGED).encode())

    async with upstream_server(answers) as server:
        with AgentsRun(tmp_path, *settings(server.url)) as run:
            url = await asyncio.to_thread(run.url)
            async with httpx.AsyncClient(base_url=url, timeout=WAIT_S, trust_env=False) as client:
                solvers = [await Agent.begin(client, run.driver_key(), "one", model="solver") for _ in range(2)]
                critics = [Agent(client, one.id, one.key, model="critic") for one in solvers]

                async def judged(agent: Agent, **body: Any) -> httpx.Response:
                    asked = {"model": "judge", "messages": [{"role": "user", "content": "?"}], "max_tokens": 100}
                    return await client.post("/v1/chat/completions", json=asked | body, headers=bearer(agent.key))

                for solver, critic in zip(solvers, critics, strict=True):
                    solved = await solver.say("Solve it.", stream=True)
                    critic.messages = [*solver.messages]
                    critique = await critic.say("What of that?", stream=False)
                    assert solved.ids != critique.ids
                assert (await judged(solvers[0])).json() == JUDGED

                # A call whose front dies.
                answered.clear()
                asking = asyncio.create_task(judged(solvers[0]))
                await server.until(lambda: len(server.asked) == 2)
                fronts = run.fronts()
                assert not any(KEY in part for pid in fronts for part in psutil.Process(pid).cmdline())
                await asyncio.to_thread(run.kill_processes, "front", fronts)
                with pytest.raises(httpx.TransportError):
                    await asking
                answered.set()

                # A call under which the run's process is another.
                answered.clear()
                asking = asyncio.create_task(_repeated(lambda: judged(solvers[1])))
                await server.until(lambda: len(server.asked) == 3)
                await asyncio.to_thread(run.kill, "orchestrator")
                answered.set()
                assert (await asking).json() == JUDGED
                await asyncio.to_thread(run.resume)

                # Beyond the bound of calls, which four have been of.
                assert (await _repeated(lambda: judged(solvers[1]))).status_code == 200
                assert (await _repeated(lambda: judged(solvers[1]))).status_code == 200
                refused = await _repeated(lambda: judged(solvers[1]))
                assert (refused.status_code, refused.json()["error"]["code"]) == (429, "upstream_calls_max")
                assert refused.headers["x-should-retry"] == "false"

                for number, agent in enumerate(solvers):
                    await agent.told("reward", reward=float(number), policy="solver")
                    status = await agent.told("reward", reward=1.0 - number, policy="critic")
                    assert {name: one["reward"] for name, one in status["policies"].items()} == {
                        "solver": float(number),
                        "critic": 1.0 - number,
                    }
                    status = await agent.told("end")
                    assert (status["state"], status["reward"]) == ("finished", 0.5)
                await asyncio.to_thread(run.wait)
            assert run.leftovers() == []
            summary = summarise(RunDirectory(run.run_dir))
            for path in (path for path in run.run_dir.rglob("*") if path.is_file()):
                assert KEY.encode() not in path.read_bytes(), path
    assert all(exchange.headers["authorization"] == f"Bearer {KEY}" for exchange in server.asked)
    assert {one.policy: (one.trajectories, one.turns, one.mean_reward) for one in summary.policies} == {
        "solver": (2, 2, 0.5),
        "critic": (2, 2, 0.5),
    }
    assert (summary.groups_trained, summary.groups_dropped) == (1, {}), "its trajectories are worth the same"
    assert sum(usage.calls for usage in summary.upstream) == 5
    assert sum(usage.bounded for usage in summary.upstream) == 1
    usd = sum(usage.usd for usage in summary.upstream)
    known = 4 * (1000 * 10.0 + 100 * 100.0) / 1e6
    assert known < usd < known + 0.03
    assert usd == pytest.approx(sum(usage.usd for usage in summary.functions))
    assert "Models elsewhere" in as_markdown(summary)


async def _repeated(ask: Any) -> httpx.Response:
    """The answer to a call that is made again while nobody is there to take it."""
    async with asyncio.timeout(WAIT_S):
        while True:
            try:
                answer = await ask()
                if answer.status_code != 503:
                    return answer
            except httpx.TransportError:
                pass
            await asyncio.sleep(0.1)
