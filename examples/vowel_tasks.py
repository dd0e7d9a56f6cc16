"""A taskset for verifiers 0.4, and a harness that plays it in this process. The policy is to write vowels."""

from collections.abc import Iterable
from typing import Any

import verifiers.v1 as vf  # pyright: ignore[reportMissingImports]
from openai import AsyncOpenAI

TASKS = 8


class VowelTask(vf.Task[vf.TaskData, vf.State]):
    @vf.reward
    async def vowels(self, trace: Any) -> float:
        """The share of vowels in what the policy says last."""
        said = trace.last_reply
        return sum(letter in "aeiou" for letter in said) / max(1, len(said))


class VowelTaskset(vf.Taskset[VowelTask]):
    def load(self) -> Iterable[VowelTask]:
        for number in range(TASKS):
            yield VowelTask(vf.TaskData(prompt=f"Write {number + 3} vowels."), self.config.task)


class Asking(vf.Harness[vf.HarnessConfig]):
    """Asks once, by OpenAI's client, and runs no code of the policy's."""

    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: Any, data: Any
    ) -> Any:
        client = AsyncOpenAI(base_url=endpoint, api_key=secret)
        messages: Any = [{"role": "user", "content": data.prompt}]
        await client.chat.completions.create(model=ctx.model, messages=messages)
        return vf.ProgramResult(0, "", "")


__all__ = ["Asking", "VowelTaskset"]
