"""inspect-ai: a task of two samples whose solver has a tool, by its providers `vllm` and `openai-api`."""

import importlib
import os
from typing import Any

from _told import MODEL, QUESTION, added, made

inspect: Any = importlib.import_module("inspect_ai")
tools: Any = importlib.import_module("inspect_ai.tool")
solvers: Any = importlib.import_module("inspect_ai.solver")


@tools.tool
def add() -> Any:
    async def execute(a: int, b: int) -> str:
        """Adds two numbers.

        Args:
            a: The first number.
            b: The second number.
        """
        return added({"a": a, "b": b})

    return execute


def main() -> None:
    dataset: Any = importlib.import_module("inspect_ai.dataset")
    scorers: Any = importlib.import_module("inspect_ai.scorer")
    os.environ["RUN_API_KEY"] = os.environ["OPENAI_API_KEY"]
    for provider in ("vllm", "openai-api/run"):
        samples = [dataset.Sample(input=f"{QUESTION}{name}", target="s") for name in ("First", "Second")]
        task = inspect.Task(
            dataset=samples, solver=[solvers.use_tools(add()), solvers.generate()], scorer=scorers.includes()
        )
        (log,) = inspect.eval(
            task,
            model=f"{provider}/{MODEL}",
            model_base_url=os.environ["OPENAI_BASE_URL"],
            model_args={"api_key": os.environ["OPENAI_API_KEY"]} if provider == "vllm" else {},
            display="none",
            log_dir="logs",
            max_connections=2,
        )
        made(f"{provider}: evaluation", status=log.status == "success", scores=bool(log.results.scores))
        for sample in log.samples:
            said = [event.output for event in sample.events if event.event == "model"]
            made(f"{provider}: sample {sample.id}", answers=len(said) == 2)
            for output in said:
                (choice,) = output.choices
                (call,) = choice.message.tool_calls or (None,)
                made(
                    f"{provider}: sample {sample.id}, {choice.stop_reason}",
                    output.response_id,
                    text=None if call else choice.message.text,
                    tool=None if call is None else (call.function, call.arguments),
                    stop=choice.stop_reason == ("tool_calls" if call else "stop"),
                    usage=output.usage.output_tokens > 0,
                )


if __name__ == "__main__":
    main()
