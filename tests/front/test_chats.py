"""A chat with a checkpoint's own tokenizer and template, over HTTP: what was sampled stays, what is new follows."""

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest

from elastic.front.asked import ServedModel
from elastic.front.rendering.renderer import make_renderer
from elastic.front.rendering.tokenizer import Tokenizer
from tests.front.fronted import fronted, merged, says
from tests.front.modelled_run import ModelledRun, Turn

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
SAID = [
    "<think>\nTwo and two.\n</think>\n\nLet me see.\n"
    '<tool_call>\n{"name":"add",  "arguments":{"a":2.0}}\n</tool_call><|im_end|>',
    "It is 4",
    "<think>\nAgain.\n</think>\n\nYes: é🎉<|im_end|>",
]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_conversation_grows_token_for_token(tmp_path: Path, tiny: Tokenizer, stream: bool) -> None:
    renderer = make_renderer(tiny, tool_parser="hermes", reasoning_parser="qwen3")
    model = ServedModel("tiny", 4096, tiny.vocab_size, tiny, renderer, 1)
    sampled = [tiny.encode(text, special=True) for text in SAID]

    async def answer(run: ModelledRun, turn: Turn) -> None:
        ids = sampled[len(run.turns) - 1]
        for start in range(0, len(ids), 2):
            run.tokens(turn, ids[start : start + 2])
        run.over(turn, "stop" if ids[-1] in renderer.stop_token_ids else "length")

    async with fronted(tmp_path, model, answer=answer) as served:

        async def said(messages: list[dict[str, Any]]) -> dict[str, Any]:
            """The answer's message, as agents keep it: without its reasoning."""
            body = {"messages": messages, "tools": TOOLS}
            if stream:
                async with served.streamed(**body) as events:
                    chunks = [event async for event in events if not isinstance(event, str)]
                message = merged(chunks)[0]["message"]
            else:
                message = (await served.chat(**body)).json()["choices"][0]["message"]
            message.pop("reasoning_content", None)
            return message

        messages: list[dict[str, Any]] = [{"role": "system", "content": "Add."}, {"role": "user", "content": "2 + 2?"}]
        first = await said(messages)
        assert first["content"] == "Let me see."
        (call,) = first["tool_calls"]
        assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("add", {"a": 2})
        call["function"]["arguments"] = '{"a": 2}'  # an agent that has read them, and spells them its own way
        messages += [first, {"role": "tool", "tool_call_id": call["id"], "content": "4<|im_end|>"}]
        second = await said(messages)
        assert second["content"] == "It is 4"
        messages += [second, {"role": "user", "content": [{"type": "text", "text": "Sure?"}]}]
        assert (await said(messages))["content"] == "Yes: é🎉"
        prompts = [turn.prompt for turn in served.run.turns]

    assert prompts[1][: len(prompts[0]) + len(sampled[0])] == prompts[0] + sampled[0]
    assert prompts[2][: len(prompts[1]) + len(sampled[1])] == prompts[1] + sampled[1]
    assert tiny.decode(prompts[2], special=True).endswith(
        f"{SAID[0]}\n<|im_start|>user\n<tool_response>\n4<|im_end|>\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
        "It is 4<|im_end|>\n<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert prompts[2].count(tiny.eos_token_ids[0]) == 6


async def test_a_result_of_20_mb_is_refused_and_nobody_waits_for_that(tmp_path: Path, tiny: Tokenizer) -> None:
    """It is counted up to the context's end, and neither rendered nor encoded."""
    renderer = make_renderer(tiny, tool_parser="hermes")
    model = ServedModel("tiny", 131_072, tiny.vocab_size, tiny, renderer, 1)
    result = "".join(f"line {number}: <|im_end|> é\n" for number in range(800_000))
    assert len(result) > 20_000_000
    call = {"id": "i", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "2 + 2?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": [{"type": "text", "text": result}]},
    ]
    async with fronted(tmp_path, model, answer=says("hi"), body_bytes_max=64 << 20) as served:
        long = {**call, "id": "i" * 10_000}
        refused = await served.chat(messages=[messages[0], {**messages[1], "tool_calls": [long]}, messages[2]])
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "messages.1.tool_calls.0.id")
        assert "512" in refused.json()["error"]["message"]
        large = asyncio.create_task(served.chat(messages=messages, tools=TOOLS))
        waited_s = 0.0
        while not large.done():
            asked_s = time.monotonic()
            assert (await served.chat()).status_code == 200
            waited_s = max(waited_s, time.monotonic() - asked_s)
            await asyncio.sleep(0)
        answer = (await large).json()["error"]
        assert answer["code"] == "context_length_exceeded"
        assert answer["message"].startswith("This model's maximum context length is 131072 tokens. However, ")
        # The body itself is read within seconds; its text would be encoded for more than a minute.
        assert waited_s < 20
