"""LiteLLM as a library, by its providers `openai` and `hosted_vllm`: whole and streamed, with a tool."""

import importlib
import os
from typing import Any

from _told import CHAT_TOOLS, IDS, MODEL, QUESTION, added, made


def main() -> None:
    litellm: Any = importlib.import_module("litellm")
    litellm.telemetry = False
    for provider in ("openai", "hosted_vllm"):
        more: dict[str, Any] = {
            "model": f"{provider}/{MODEL}",
            "api_base": os.environ["OPENAI_BASE_URL"],
            "api_key": os.environ["OPENAI_API_KEY"],
            "tools": CHAT_TOOLS,
            "extra_body": IDS,
        }
        messages: list[Any] = [{"role": "user", "content": f"{QUESTION}({provider})"}]
        answer = litellm.completion(messages=messages, logprobs=True, **more)
        (choice,) = answer.choices
        (call,) = choice.message.tool_calls
        ids = choice.provider_specific_fields["token_ids"]
        made(
            f"{provider}, tool",
            answer.id,
            ids=ids,
            tool=(call.function.name, call.function.arguments),
            finish=choice.finish_reason == "tool_calls",
            prompt=len(answer.prompt_token_ids) == answer.usage.prompt_tokens,
            logprobs=len(choice.logprobs.content) == len(ids),
        )
        messages += [
            choice.message.model_dump(),
            {"role": "tool", "tool_call_id": call.id, "content": added(call.function.arguments)},
        ]
        chunks = list(litellm.completion(messages=messages, stream=True, **more))
        whole = litellm.stream_chunk_builder(chunks, messages=messages)
        (choice,) = whole.choices
        finish = choice.finish_reason == "stop"
        made(f"{provider}, streamed", whole.id, text=choice.message.content, finish=finish)


if __name__ == "__main__":
    main()
