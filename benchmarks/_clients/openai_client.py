"""OpenAI's client, of the major that the interpreter has: chats, completions and responses, whole and streamed."""

import importlib
from typing import Any

from _told import ADD, CHAT_TOOLS, IDS, MODEL, QUESTION, added, made, valid


def chats(client: Any) -> None:
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    answer = client.chat.completions.create(
        model=MODEL, messages=messages, tools=CHAT_TOOLS, logprobs=True, extra_body=IDS
    )
    (choice,) = answer.choices
    (call,) = choice.message.tool_calls
    made(
        "chat with a tool",
        answer.id,
        ids=choice.token_ids,
        tool=(call.function.name, call.function.arguments),
        valid=valid(answer),
        finish=choice.finish_reason == "tool_calls",
        logprobs=len(choice.logprobs.content) == len(choice.token_ids) == answer.usage.completion_tokens,
    )
    result = {"role": "tool", "tool_call_id": call.id, "content": added(call.function.arguments)}
    messages += [choice.message, result]
    streamed(client, messages)
    answer = client.chat.completions.create(model=MODEL, messages=messages, n=2, extra_body=IDS)
    for number, choice in enumerate(answer.choices):
        said = choice.message.content
        made(f"choice {number}", ids=choice.token_ids, text=said, valid=valid(answer), place=choice.index == number)


def streamed(client: Any, messages: list[Any]) -> None:
    chunks = list(
        client.chat.completions.create(
            model=MODEL,
            messages=messages,
            tools=CHAT_TOOLS,
            stream=True,
            stream_options={"include_usage": True},
            extra_body=IDS,
        )
    )
    *parts, last = chunks
    choices = [choice for chunk in parts for choice in chunk.choices]
    made(
        "streamed chat",
        parts[0].id,
        ids=[token for choice in choices for token in choice.token_ids],
        text="".join(choice.delta.content or "" for choice in choices),
        valid=all(map(valid, chunks)),
        finish=choices[-1].finish_reason == "stop",
        usage=not last.choices and last.usage.total_tokens == last.usage.prompt_tokens + last.usage.completion_tokens,
    )


def completions(client: Any) -> None:
    answer = client.completions.create(model=MODEL, prompt="The sum is", logprobs=0, extra_body=IDS)
    (choice,) = answer.choices
    same = len(choice.logprobs.token_logprobs) == len(choice.token_ids)
    made("completion", answer.id, ids=choice.token_ids, text=choice.text, valid=valid(answer), logprobs=same)
    chunks = list(client.completions.create(model=MODEL, prompt="The sum was", stream=True, extra_body=IDS))
    choices = [choice for chunk in chunks for choice in chunk.choices]
    made(
        "streamed completion",
        chunks[0].id,
        ids=[token for choice in choices for token in choice.token_ids],
        text="".join(choice.text for choice in choices),
        valid=valid(chunks[-1]),  # Its own type of chunks has no room for those before the end.
        finish=choices[-1].finish_reason == "stop",
    )


def responses(client: Any) -> None:
    tools: list[Any] = [{"type": "function", "strict": False, **ADD}]
    answer = client.responses.create(model=MODEL, input=f"{QUESTION}Tell me.", tools=tools)
    (item,) = (item for item in answer.output if item.type == "function_call")
    made(
        "response with a tool",
        answer.id,
        tool=(item.name, item.arguments),
        valid=valid(answer),
        status=answer.status == "completed",
    )
    result = {"type": "function_call_output", "call_id": item.call_id, "output": added(item.arguments)}
    with client.responses.stream(model=MODEL, input=[result], tools=tools, previous_response_id=answer.id) as stream:
        events = list(stream)
        final = stream.get_final_response()
    made(
        "streamed response behind it",
        final.id,
        text=final.output_text,
        valid=valid(final),
        deltas="".join(event.delta for event in events if event.type == "response.output_text.delta")
        == final.output_text,
    )


def main() -> None:
    client = importlib.import_module("openai").OpenAI()
    made("models", models=MODEL in [model.id for model in client.models.list() if valid(model)])
    chats(client)
    completions(client)
    responses(client)


if __name__ == "__main__":
    main()
