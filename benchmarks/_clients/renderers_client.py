"""The package `renderers`: a chat's tokens are made by the client, and answered by /inference/v1/generate."""

import asyncio
import importlib
import os
from typing import Any

from _told import MODEL, QUESTION, made


async def play() -> None:
    renderers: Any = importlib.import_module("renderers")
    asked: Any = importlib.import_module("renderers.client")
    base: Any = importlib.import_module("renderers.base")
    renderer = renderers.create_renderer(base.load_tokenizer(os.environ["CLIENT_POLICY"]))
    client = importlib.import_module("openai").AsyncOpenAI(max_retries=0)
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    for number in range(4):
        answer = await asked.generate(
            client=client, renderer=renderer, messages=messages, model=MODEL, sampling_params={"max_tokens": 24}
        )
        ids = answer["completion_ids"]
        made(
            f"turn {number}",
            answer["request_id"],
            ids=ids,
            text=answer["content"],
            logprobs=len(answer["completion_logprobs"]) == len(ids),
            finish=answer["finish_reason"] == "stop",
        )
        messages += [{"role": "assistant", "content": answer["content"]}, {"role": "user", "content": "Once more?"}]


def main() -> None:
    asyncio.run(play())


if __name__ == "__main__":
    main()
