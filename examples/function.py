"""Episodes as a function, which the run calls for each in processes of its own. The policy is to write vowels."""

from typing import Any

from elastic.environments.agent import EpisodeTask, PlayedTrajectory

TURNS = 2


async def vowels(task: EpisodeTask, client: Any, trajectory: PlayedTrajectory) -> float:
    """Return the share of vowels in what the policy says in two turns; `client` is an `openai.AsyncOpenAI`."""
    said = ""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Write vowels."}]
    for _ in range(TURNS):
        answer = await client.chat.completions.create(model=trajectory.model, messages=messages)
        text = answer.choices[0].message.content or ""
        said += text
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "More."}]
    return sum(letter in "aeiou" for letter in said) / max(1, len(said))
