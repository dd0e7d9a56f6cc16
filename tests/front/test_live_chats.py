"""A viewer chats with a live run, beside an agent that trains it, while the chat's worker is killed."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks._agents import AgentsRun
from elastic.protocol.run_secrets import RunSecrets
from elastic.runtime.agents import CHATS_NOTE
from elastic.runtime.journal import RunDirectory, TurnRow
from tests.front.exposed import Exposed, exposed
from tests.front.live import bearer
from tests.front.test_live_agents import SETTINGS, WAIT_S, ended, playing, proven

pytestmark = [pytest.mark.nightly, pytest.mark.alone]

TOKENS = 80
CHAT = {"messages": [{"role": "user", "content": "Go on."}], "stream": True, "ignore_eos": True, "max_tokens": TOKENS}


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Any]:
    with AgentsRun(tmp_path, *SETTINGS, "providers.reserved.max_workers=2") as under_way:
        yield under_way


class Viewer:
    """Has a chat of so many tokens."""

    def __init__(self, run: Any, url: str) -> None:
        self._key = RunSecrets.of(run.run_dir).viewer_key()
        self._url = url
        self.begun = asyncio.Event()
        self.headers = httpx.Headers()

    async def chat(self) -> tuple[str, int]:
        """Its text, and how many tokens it has by the run's account."""
        text, usage = "", {}
        body = {**CHAT, "stream_options": {"include_usage": True}}
        async with (
            httpx.AsyncClient(base_url=self._url, timeout=WAIT_S, trust_env=False) as client,
            client.stream("POST", "/v1/chat/completions", json=body, headers=bearer(self._key)) as answer,
        ):
            self.headers = answer.headers
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line.removeprefix("data: "))
                    assert "error" not in event, event
                    usage = event.get("usage") or usage
                    text += "".join(choice["delta"].get("content") or "" for choice in event["choices"])
                    self.begun.set()
        return text, usage["completion_tokens"]

    async def metrics(self) -> dict[str, Exposed]:
        async with httpx.AsyncClient(base_url=self._url, timeout=WAIT_S, trust_env=False) as client:
            return exposed((await client.get("/metrics", headers=bearer(self._key))).text)


async def test_a_chat_outlives_its_worker_and_is_no_part_of_what_is_trained(run: Any) -> None:
    async with playing(run) as agents:
        viewer = Viewer(run, await asyncio.to_thread(run.url))
        chatting = asyncio.create_task(viewer.chat())
        await viewer.begun.wait()
        run.kill_processes("worker", run.workers())
        says = (agent.say("What is it?", stream=streams) for agent, streams in zip(agents, (True, False), strict=True))
        answers = await asyncio.gather(*says)
        text, tokens = await chatting
        assert viewer.headers["x-elastic-trained"] == "false"
        assert text
        assert tokens == TOKENS
        told = await viewer.metrics()
        assert told["elastic_chat_tokens_total"].of() == [TOKENS]
        finished = told["vllm:request_success_total"]
        assert sum(finished.of()) == len(answers), "those of rollouts alone"
        assert all(sample.labels["engine"] for sample in finished.samples)
        await ended(run, agents)
    proven(run, list(answers), turns=2)
    with RunDirectory(run.run_dir).newest_journal() as journal:
        totals = json.loads(journal.meta()[CHATS_NOTE])
        assert (totals["turns"], totals["tokens"]) == (1, TOKENS)
        assert totals["gpu_s"] > 0
        assert {row.turn for row in journal.rows(TurnRow)} == {answer.turn for answer in answers}
