"""The sums of `sums.py` as a taskset for verifiers 0.4, and a harness that plays it in this process."""

from collections.abc import Iterable
from typing import Any

import verifiers.v1 as vf  # pyright: ignore[reportMissingImports]
from openai import AsyncOpenAI  # pyright: ignore[reportMissingImports]
from sums import rows

CLIENT = AsyncOpenAI(base_url="http://localhost", api_key="none")
"""One for all: each new one reads the certificates of all authorities."""


class SumConfig(vf.TasksetConfig):
    part: str = "trained"


class SumData(vf.TaskData):
    answer: str


class SumTask(vf.Task[SumData, vf.State]):
    @vf.reward
    async def right(self, trace: Any) -> float:
        """1 for a right answer, which stands last in what was said."""
        return float(trace.last_reply.split(" ")[-1] == self.data.answer)


class SumTaskset(vf.Taskset[SumTask, SumConfig]):
    def load(self) -> Iterable[SumTask]:
        for row in rows(self.config.part):
            yield SumTask(SumData(**row), self.config.task)


class Asking(vf.Harness[vf.HarnessConfig]):
    """Asks once, by OpenAI's client, and runs no code of the policy's."""

    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: Any, data: Any
    ) -> Any:
        client = CLIENT.with_options(base_url=endpoint, api_key=secret)
        messages: Any = [{"role": "user", "content": data.prompt}]
        await client.chat.completions.create(model=ctx.model, messages=messages)
        return vf.ProgramResult(0, "", "")


__all__ = ["Asking", "SumTaskset"]
