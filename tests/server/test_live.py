"""A real server on a real run: killed with SIGKILL, both of them, and everything goes on."""

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from elastic.cli import main
from elastic.protocol.api import ENDED
from elastic.protocol.api_client import ApiError, Client
from elastic.runtime.journal import RunDirectory
from tests.server.conftest import CONFIG

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
WAIT_S = 180.0


def until(holds: Callable[[], Any]) -> Any:
    end_s = time.monotonic() + WAIT_S
    while not (found := holds()):
        assert time.monotonic() < end_s
        time.sleep(0.05)
    return found


class Served:
    """`elastic serve` in a process of its own."""

    def __init__(self, home: Path, checkpoint: Path) -> None:
        self.home = home
        self._models = checkpoint.parent
        self.secret = ""
        self._port = 0

    def start(self) -> None:
        where = ("--home", self.home / "server", "--models", self._models, "--port", self._port)
        errors = (self.home / "server.log").open("a+")
        self.process = subprocess.Popen(
            self._command("serve", *where), stdout=subprocess.PIPE, stderr=errors, text=True
        )
        log = self.home / "server.log"
        before = log.stat().st_size
        said = until(lambda: re.search(r"elastic serves (http://\S+);", log.read_text()[before:]))
        errors.close()
        self.url = said[1]
        self._port = int(self.url.rpartition(":")[2])
        if not self.secret:
            assert self.process.stdout is not None
            self.secret = self.process.stdout.readline().rpartition(" ")[2].strip()

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()

    def _command(self, *arguments: object) -> list[str]:
        return [sys.executable, "-m", "elastic.cli", *map(str, arguments)]


@pytest.fixture
def served(tmp_path: Path, checkpoint: Path) -> Iterator[Served]:
    made = Served(tmp_path, checkpoint)
    yield made
    made.kill()
    for process in psutil.process_iter():
        try:
            if str(tmp_path) in " ".join(process.cmdline()):
                process.kill()
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue


@pytest.fixture
def elastic(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[str, str]]:
    """`elastic` in this process, as a user has it: what it said on standard output and error."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("COLUMNS", "120")

    def run(*arguments: object, code: int = 0) -> tuple[str, str]:
        with pytest.raises(SystemExit) as exit_:
            main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        assert (exit_.value.code or 0) == code, err
        return out, err

    return run


@pytest.mark.nightly
def test_whatever_is_killed_goes_on(served: Served, checkpoint: Path, elastic: Callable[..., tuple[str, str]]) -> None:
    """The server, its runner and a live run are killed in turn: the only test of all three as processes."""
    served.start()
    login = [sys.executable, "-m", "elastic.cli", "api", "login", served.url]
    logged = subprocess.run(login, input=f"{served.secret}\n", capture_output=True, text=True, timeout=120, check=False)
    assert "logged in" in logged.stderr
    config = served.home / "small.toml"
    config.write_text(CONFIG.replace('"policy"', f'"{checkpoint.name}"').replace("steps = 2", "steps = 100000"))
    shown = json.loads(elastic("run", config, "--remote", "--dry-run", "--json")[0])
    assert shown["would_acquire"][0]["provider"] == "trainer"
    run = json.loads(elastic("run", config, "--remote", "--detach", "--json")[0])["id"]
    with Client(served.url, served.secret) as client:
        until(lambda: client.run(run).figures.step >= 1)
        first = next(client.events(run)).id
        directory = RunDirectory(served.home / "server" / "runs" / run)
        (process,) = processes(run)
        served.kill()
        assert process.is_running()
        served.start()
        step = client.run(run).figures.step
        until(lambda: client.run(run).figures.step > step)
        assert processes(run) == [process]
        process.send_signal(signal.SIGKILL)
        again = until(
            lambda: len(directory.journal_paths()) == 2 and (found := client.run(run)).phase == "running" and found
        )
        (second,) = processes(run)
        assert second != process
        assert "killed by SIGKILL" in again.cause or again.cause == "its process died"
        with pytest.raises(ApiError, match="is running"):
            client.delete(run)
        assert "is stopping" in elastic("stop", run)[1]
        ended = until(lambda: (found := client.run(run)).phase in ENDED and found)
        assert ended.phase == "stopped"
        assert ended.restarts <= 1, "since its last step"
        told = [event.id for event in client.events(run)]
        assert told[0] == first
        assert told[:-1] == list(dict.fromkeys(told[:-1]))
        assert [event.id for event in client.events(run, first)] == told[1:]
        report = json.loads(elastic("report", run, "--json")[0])
        assert (report["run"], report["outcome"]) == (run, "stopped")
        assert "overhead" in elastic("report", run)[0]
        assert run in elastic("runs", "--remote")[0]
        assert "step 1/100000" in elastic("logs", run)[0]
        assert "Ended" in elastic("runs", "show", run)[0]
        elastic("runs", "delete", run)
        until(lambda: not directory.path.exists())
        assert "no run" in elastic("runs", "show", run, code=2)[1]


def processes(run: str) -> list[psutil.Process]:
    """The orchestrators of a run."""
    found: list[psutil.Process] = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("ELASTIC_SERVED", "").startswith(f"{run}:"):
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found
