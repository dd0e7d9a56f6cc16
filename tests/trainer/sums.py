"""An agent that asks for sums, and rewards them: what a real chat model is trained on here."""

import itertools
import random
import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx

GROUP_SIZE = 4
AT_ONCE = 8
ASK_AGAIN_S = 0.5
NUMBER = re.compile(r"-?\d+")


class Sums:
    """Plays trajectories at `url` until the run is over, each group on a sum of its own."""

    def __init__(self, url: str, key: str) -> None:
        self._url, self._key = url, key
        self._client = httpx.Client(timeout=900.0)
        self._over = threading.Event()
        self.rewards: list[float] = []

    def play(self) -> None:
        numbers = itertools.count()
        with ThreadPoolExecutor(AT_ONCE) as threads:
            for one in [threads.submit(self._work, numbers) for _ in range(AT_ONCE)]:
                one.result()

    def stop(self) -> None:
        self._over.set()

    def _work(self, numbers: Iterator[int]) -> None:
        while not self._over.is_set():
            number = next(numbers)
            name, rng = f"sum-{number // GROUP_SIZE}", random.Random(number // GROUP_SIZE)
            task = rng.randrange(2, 10), rng.randrange(2, 10)
            opened = self._post("/trajectories", self._key, {"task": list(task), "group": name})
            if opened is not None:
                self._answer(opened, *task)

    def _answer(self, opened: dict[str, Any], a: int, b: int) -> None:
        asked = {"role": "user", "content": f"What is {a} + {b}? Answer with the number only."}
        said = self._post("/v1/chat/completions", opened["key"], {"messages": [asked]})
        if said is None:
            return
        reward = worth(said["choices"][0]["message"]["content"] or "", a + b)
        if self._post(f"/trajectories/{opened['id']}/reward", self._key, {"reward": reward}) is not None:
            self._post(f"/trajectories/{opened['id']}/end", self._key, {})
            self.rewards.append(reward)

    def _post(self, path: str, key: str, body: dict[str, Any]) -> dict[str, Any] | None:
        """The answer, asked again while the run is busy or away; None for what the run does not want any more."""
        while not self._over.is_set():
            try:
                answer = self._client.post(self._url + path, json=body, headers={"authorization": f"Bearer {key}"})
            except httpx.TransportError:
                time.sleep(ASK_AGAIN_S)
                continue
            if answer.status_code == 200:
                return answer.json()
            if answer.status_code not in (429, 503):
                return None
            time.sleep(ASK_AGAIN_S)
        return None


def worth(text: str, expected: int) -> float:
    """1 for the right number, less the farther the last one is from it, and the more is said besides."""
    found = NUMBER.findall(text)
    if not found:
        return -0.01 * len(text)
    return 1.0 / (1.0 + abs(int(found[-1][:9]) - expected)) - 0.01 * len(text)
