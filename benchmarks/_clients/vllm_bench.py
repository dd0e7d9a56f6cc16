"""vLLM's benchmark of servers, by completions and by chats: it counts what came back, and keeps the texts."""

import json
import os
import subprocess
import sys
from pathlib import Path

from _told import MODEL, ROOT, made

PROMPTS = 8
ROUTES = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}


def main() -> None:
    for backend, route in ROUTES.items():
        result = Path(f"{backend}.json")
        arguments = {
            "backend": backend,
            "base-url": ROOT,
            "endpoint": route,
            "model": MODEL,
            "tokenizer": os.environ["CLIENT_POLICY"],
            "dataset-name": "random",
            "random-input-len": "32",
            "random-output-len": "16",
            "num-prompts": str(PROMPTS),
            "request-rate": "8",
            "result-filename": str(result),
        }
        flags = [part for name, value in arguments.items() for part in (f"--{name}", value)]
        program = [sys.executable, "-m", "vllm.entrypoints.cli.main", "bench", "serve", *flags]
        program += ["--save-result", "--save-detailed", "--disable-tqdm"]
        subprocess.run(program, check=True, stdout=sys.stderr)
        told = json.loads(result.read_text())
        whole = told["completed"] == PROMPTS and not any(told["errors"])
        made(f"{backend}: benchmark", completed=whole, tokens=told["total_output_tokens"] == 16 * PROMPTS)
        for number, text in enumerate(told["generated_texts"]):
            made(f"{backend}: prompt {number}", text=text)


if __name__ == "__main__":
    main()
