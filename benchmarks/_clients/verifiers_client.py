"""verifiers: two rollouts of an environment of its own (`sums`), whose traces are what would be trained on there.

Each trace is a session of a trajectory; verifiers sends its id with every call.
"""

import asyncio
import importlib
import os
from typing import Any

from _told import MODEL, begin, made

ROLLOUTS = 2


async def play() -> None:
    vf: Any = importlib.import_module("verifiers.v1")
    loaders: Any = importlib.import_module("verifiers.v1.utils.loaders")
    config = loaders.resolve_env_config(
        {"taskset": {"id": "sums"}, "agent": {"harness": {"id": "sums"}, "runtime": {"type": "subprocess"}}}
    )
    environment = loaders.load_environment(config)
    client = vf.TrainClientConfig(
        base_url=os.environ["OPENAI_BASE_URL"],
        api_key_var="OPENAI_API_KEY",
        renderer_model_name=os.environ["CLIENT_POLICY"],
    )
    context = vf.ModelContext(MODEL, client=client)
    opened: dict[str, str] = {}

    def bind(trace: Any) -> None:
        opened[trace.id] = begin([trace.id])["id"]
        made("trajectory", trajectory=opened[trace.id])

    async with environment.serving():
        (task,) = environment.taskset
        slots = environment.slots(task, ROLLOUTS)
        for slot in slots:
            episode = await environment.run_slot(slot, context, on_trace=bind)
            made("episode", ok=episode.ok, errors=not episode.errors)
            for trace in episode.traces:
                note(trace, opened[trace.id])


def note(trace: Any, trajectory: str) -> None:
    """What a trace would be trained on: its nodes that were sampled. Each answer begins a branch, since the renderer
    reads the words of this policy as other tokens."""
    made("trace", trajectory=trajectory, reward=trace.reward > 0, branches=len(trace.branches) >= 1)
    said = {id(node): node for branch in trace.branches for node in branch.nodes if node.sampled}
    for node in said.values():
        ids = [token for token, sampled in zip(node.token_ids, node.mask, strict=True) if sampled]
        same = len(node.logprobs) == len(ids)
        made("turn", ids=ids, text=node.message.content, trajectory=trajectory, logprobs=same)


if __name__ == "__main__":
    asyncio.run(play())
