"""An environment of verifiers: its tasks are sums, and its harness asks twice in this process."""

import importlib
from collections.abc import Iterable
from typing import Any

from _told import MODEL, QUESTION

vf: Any = importlib.import_module("verifiers.v1")
openai: Any = importlib.import_module("openai")

TASKS, TURNS = 1, 2


class SumTask(vf.Task[vf.TaskData, vf.State]):
    @vf.reward
    async def words(self, trace: Any) -> float:
        return float(len(trace.last_reply.split()))


class SumTaskset(vf.Taskset[SumTask]):
    def load(self) -> Iterable[SumTask]:
        for number in range(TASKS):
            yield SumTask(vf.TaskData(prompt=f"{QUESTION}{number}"), self.config.task)


class AskingHarness(vf.Harness[vf.HarnessConfig]):
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: Any, data: Any
    ) -> Any:
        client = openai.AsyncOpenAI(base_url=endpoint, api_key=secret)
        messages: list[Any] = [{"role": "user", "content": data.prompt}]
        for _ in range(TURNS):
            answer = await client.chat.completions.create(model=MODEL, messages=messages)
            messages += [answer.choices[0].message, {"role": "user", "content": "Once more?"}]
        return vf.ProgramResult(0, "", "")


__all__ = ["AskingHarness", "SumTaskset"]
