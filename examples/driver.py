"""An agent that trains from outside of its run: it asks by OpenAI's API, and says what each trajectory was worth.

The policy begins with random weights. What it is to learn is small enough for minutes: to write vowels.
"""

import itertools
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx

BASE_URL, KEY = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
ROOT = BASE_URL.removesuffix("/v1")
GROUP_SIZE, AT_ONCE = 8, 32
TURNS = 2

client = httpx.Client(headers={"authorization": f"Bearer {KEY}"}, timeout=120.0)


def begin(group: str) -> dict[str, Any] | None:
    """Open a trajectory in the group of this name; None once the run is over."""
    while True:
        try:
            answer = client.post(f"{ROOT}/trajectories", json={"task": {"say": "vowels"}, "group": group})
        except httpx.TransportError:
            return None
        if answer.status_code != 429:  # The step has all of its groups: the next one comes.
            answer.raise_for_status()
            return answer.json()
        time.sleep(float(answer.headers.get("retry-after", 1)) / 4)


def play(number: int) -> float | None:
    """Play one trajectory; return its reward."""
    trajectory = begin(f"group-{number // GROUP_SIZE}")
    if trajectory is None:
        return None
    key = {"authorization": f"Bearer {trajectory['key']}"}
    messages, said = [{"role": "user", "content": "Write vowels."}], ""
    for _ in range(TURNS):
        answer = client.post(f"{BASE_URL}/chat/completions", headers=key, json={"messages": messages})
        answer.raise_for_status()
        message = answer.json()["choices"][0]["message"]
        said += message["content"] or ""
        messages += [message, {"role": "user", "content": "More."}]
    reward = sum(letter in "aeiou" for letter in said) / max(1, len(said))
    where = f"{ROOT}/trajectories/{trajectory['id']}"
    client.post(f"{where}/reward", json={"reward": reward}).raise_for_status()
    client.post(f"{where}/end").raise_for_status()
    return reward


def work(numbers: Iterator[int], rewards: list[float]) -> None:
    """Play one trajectory after the other until the run is over."""
    while (reward := play(next(numbers))) is not None:
        rewards.append(reward)
        if len(rewards) % 64 == 0:
            print(f"{len(rewards)} trajectories, mean reward of the last 64: {sum(rewards[-64:]) / 64:.3f}")


def main() -> None:
    numbers, rewards = itertools.count(), list[float]()
    with ThreadPoolExecutor(AT_ONCE) as threads:
        for one in [threads.submit(work, numbers, rewards) for _ in range(AT_ONCE)]:
            one.result()


if __name__ == "__main__":
    main()
