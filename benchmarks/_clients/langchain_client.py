"""LangChain's ChatOpenAI, by chats and by responses: a tool, invoked and streamed."""

import importlib
from typing import Any

from _told import MODEL, QUESTION, added, made


def add(a: int, b: int) -> str:
    """Adds two numbers."""
    return added({"a": a, "b": b})


def main() -> None:
    messages: Any = importlib.import_module("langchain_core.messages")
    chat: Any = importlib.import_module("langchain_openai").ChatOpenAI
    for responses in (False, True):
        name = "responses" if responses else "chat"
        model = chat(model=MODEL, use_responses_api=responses, stream_usage=True).bind_tools([add])
        said: list[Any] = [messages.HumanMessage(f"{QUESTION}({name})")]
        answer = model.invoke(said)
        (call,) = answer.tool_calls
        made(
            f"{name}, tool",
            answer.response_metadata["id"],
            tool=(call["name"], call["args"]),
            usage=answer.usage_metadata["output_tokens"] > 0,
        )
        said += [answer, messages.ToolMessage(add(**call["args"]), tool_call_id=call["id"])]
        whole: Any = None
        for chunk in model.stream(said):
            whole = chunk if whole is None else whole + chunk
        text = whole.text if isinstance(whole.text, str) else whole.text()
        made(f"{name}, streamed", text=text, usage=whole.usage_metadata["output_tokens"] > 0)


if __name__ == "__main__":
    main()
