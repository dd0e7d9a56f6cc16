"""mini-swe-agent as it is configured, by LiteLLM: its shell runs `./next`, which says at last that all is done."""

import importlib
import os
from pathlib import Path
from typing import Any

from _told import IDS, MODEL, made

STEPS = 4
NEXT = f"""#!/bin/sh
echo "$@" >> steps
test $(wc -l < steps) -ge {STEPS} && echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT
cat steps
"""


def main() -> None:
    os.environ["MSWEA_SILENT_STARTUP"] = "1"
    config: Any = importlib.import_module("minisweagent.config")
    mini = config.get_config_from_spec("mini.yaml")
    script = Path("next")
    script.write_text(NEXT)
    script.chmod(0o755)
    settings = {
        **mini["model"],
        "model_name": f"openai/{MODEL}",
        "model_kwargs": {"extra_body": IDS},
        "cost_tracking": "ignore_errors",
    }
    model = importlib.import_module("minisweagent.models.litellm_model").LitellmModel(**settings)
    shell = importlib.import_module("minisweagent.environments.local").LocalEnvironment(cwd=str(Path.cwd()))
    agent = importlib.import_module("minisweagent.agents.default").DefaultAgent(model, shell, **mini["agent"])
    ended = agent.run("Take all steps.")
    said = [message["extra"]["response"] for message in agent.messages if "response" in message.get("extra", {})]
    for number, answer in enumerate(said):
        (choice,) = answer["choices"]
        (call,) = choice["message"]["tool_calls"]
        made(
            f"step {number}",
            answer["id"],
            ids=choice["provider_specific_fields"]["token_ids"],
            tool=(call["function"]["name"], call["function"]["arguments"]),
            finish=choice["finish_reason"] == "tool_calls",
        )
    steps = Path("steps").read_text()
    made("submission", submitted=ended["exit_status"] == "Submitted", same=ended["submission"].strip() == steps.strip())
    made("all steps", steps=len(said) == STEPS)


if __name__ == "__main__":
    main()
