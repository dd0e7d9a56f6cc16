"""All routes of a run's fronts, as their OpenAPI describes them, under requests that schemathesis makes up.

A live run that agents drive, with its fronts and a worker as processes, and trajectories that are open, over, or full.
Requests show a driver's key. All phases and default checks, as in `api_fuzz.py`; of requests that the description
allows, these answers count as accepted, too: what no schema says (400: a model's name, a parameter that would change
the answer), trajectories and sessions that are not there (404), that are over or were given something else before (409,
410, 422), and groups that are not wanted now (429).

- `requests`: that were made up; `operations`: of the description, tested.
- `failures`: kinds of failures by operation, and errors of the fuzzer; `alive`: whether a call was answered at the end.
"""

import sys
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from benchmarks._agents import AgentsRun
from benchmarks._common import Arguments, Figures, benchmark, option
from benchmarks._fuzzer import FUZZER, REQUEST_TIMEOUT_S, SEED, WITHOUT, Fuzzed, failures, fuzz, tested
from elastic.protocol.http_clients import sync_client

ROUNDS = 8
ACCEPTED = ["2xx", "400", "401", "403", "404", "409", "410", "413", "422", "429"]
RUN = ("run.steps=1", "rollout.groups=40", "rollout.group_size=4", "environment.settings.idle_s=86400")
HELLO = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}


def play(directory: Path, seed: int, *, quick: bool) -> Figures:
    found, figures = Counter[str](), Figures({"requests": 0, "operations": 0})
    with AgentsRun(directory, *RUN) as run:
        url, key = run.url(), run.driver_key()
        known = _opened(run, url, key)
        for number in range(1 if quick else ROUNDS):
            report = fuzz(Fuzzed(url, key, known, ACCEPTED), directory, seed + number, quick=quick)
            figures["operations"] = max(figures["operations"], tested(report))
            figures["requests"] += report["test_cases"]["generated"]
            found += failures(report)
        figures["failures"] = len(found)
        figures["alive"] = _answers(url, key, known["id"][0])
    for failure, count in found.most_common():
        print(f"{count} x {failure}", file=sys.stderr)
    return figures


def _opened(run: AgentsRun, url: str, key: str) -> dict[str, Sequence[str]]:
    """Trajectories for requests to be about: values of path parameters."""
    with sync_client(url, by_proxy=False, base_url=url, headers=_shows(key), timeout=REQUEST_TIMEOUT_S) as client:

        def opens(group: str) -> str | None:
            answer = client.post("/trajectories", json={"group": group})
            return answer.json()["id"] if answer.status_code == 200 else None

        opened = [run.until("a trajectory", partial(opens, f"g-{number // 2}")) for number in range(8)]
        client.post(f"/trajectories/{opened[-1]}/end", json={"cause": "over"}).raise_for_status()
        model = client.get("/v1/models").raise_for_status().json()["data"][0]["id"]
    return {"id": opened, "name": [model]}


def _answers(url: str, key: str, trajectory: str) -> bool:
    with sync_client(url, by_proxy=False, base_url=url, headers=_shows(key), timeout=60.0) as client:
        return client.post(f"/t/{trajectory}/v1/chat/completions", json=HELLO).status_code in (200, 410)


def _shows(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def main(arguments: Arguments) -> Figures:
    if not FUZZER.exists():
        return {"skipped_because": WITHOUT}
    return play(arguments.scratch, arguments.seed, quick=arguments.quick)


if __name__ == "__main__":
    benchmark(__doc__, main, option("--seed", type=int, default=SEED, help="of what is made up first"))
