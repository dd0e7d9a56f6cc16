"""The server as tests and benchmarks hold it: a process of its own, and what can be asked of it."""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).resolve().parents[3]
TOKEN_ID, TOKEN_SECRET = "ak-local", "as-local"
ANSWER_TIMEOUT_S = 60.0


def client_environment(url: str) -> dict[str, str]:
    """By which Modal's client finds the server."""
    return {"MODAL_SERVER_URL": url, "MODAL_TOKEN_ID": TOKEN_ID, "MODAL_TOKEN_SECRET": TOKEN_SECRET}


class Bench:
    """A server that runs. `url` is where clients dial."""

    def __init__(self, url: str, http: httpx.Client, directory: Path) -> None:
        self.url = url
        self.directory = directory
        self._http = http

    @property
    def environment(self) -> Mapping[str, str]:
        return client_environment(self.url)

    def record(self) -> dict[str, Any]:
        """Its own record: containers with their starts, ends and prices; what runs; what was asked for."""
        return self._http.get("/record").raise_for_status().json()

    def running(self, run: str | None = None) -> list[dict[str, Any]]:
        """The containers that live, of one run's rollouts or of all."""
        record = self.record()
        return [one for one in record["containers"] if one["task"] in record["running"] and run in (None, one["run"])]

    def app(self, name: str) -> dict[str, Any]:
        """What was deployed: `tags`, `functions` by name and their `variants` as they were asked for, mounted `files`,
        and, of the whole workspace, `images` as the commands that build them and `volumes`' ids by name."""
        return self._http.get(f"/apps/{name}").raise_for_status().json()

    def faults(self, **faults: Any) -> None:
        self._http.put("/faults", json=faults).raise_for_status()

    def refuse_token(self, refuse: bool) -> None:
        self._http.put("/token", json={"refuse": refuse}).raise_for_status()

    def kill(self, task: str) -> None:
        self._http.post(f"/containers/{task}/kill").raise_for_status()

    def preempt(self, task: str) -> None:
        """Ends the container; its inputs start again in another."""
        self._http.post(f"/containers/{task}/preempt").raise_for_status()

    def retag(self, app: str, **tags: str) -> None:
        self._http.put(f"/apps/{app}/tags", json=tags).raise_for_status()

    def remove(self, app: str) -> None:
        self._http.delete(f"/apps/{app}").raise_for_status()


@contextlib.contextmanager
def bench(directory: Path, *, site: tuple[str, ...] = (str(ROOT),)) -> Iterator[Bench]:
    """A server with its files in `directory`; whatever it has started ends with it."""
    command = [sys.executable, "-m", "tests.clouds.modal_server", str(directory)]
    for path in site:
        command += ["--site", path]
    server = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=ROOT,
        text=True,
        env={name: value for name, value in os.environ.items() if not name.startswith("MODAL_")},
    )
    assert server.stdin is not None
    assert server.stdout is not None
    try:
        where = json.loads(server.stdout.readline())
        with httpx.Client(base_url=where["bench"], timeout=ANSWER_TIMEOUT_S) as http:
            yield Bench(where["url"], http, directory)
    finally:
        server.stdin.close()
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()
        server.stdout.close()
