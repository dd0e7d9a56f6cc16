"""The command line as a user has it: `elastic …` in this process, or in one of its own that can be sent signals."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from elastic.cli import main

CONFIG = """
[run]
name = "small"
directory = "{directory}/runs"
steps = 2
[model]
checkpoint = "{checkpoint}"
[rollout]
groups = 2
group_size = 4
max_turns = 3
max_tokens_per_turn = 8
[trainer]
updates_per_step = 1
checkpoint_every_steps = 1
[seeding]
window_s = 0.2
reserved_engines = 2
[engine]
max_batch = 4
max_context_tokens = 192
[engine.pacing]
prefill_tokens_per_s = 8000
decode_step_s = {{ 1 = 0.02 }}
[providers.spot]
trace = "{directory}/market.csv"
max_workers = 1
usd_per_gpu_hour = 2.0
[providers.serving]
hosts = 1
max_workers = 1
"""


class Ended(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def refused() -> Callable[..., None]:
    """The command ended with exit code 2 and one message, which has these words."""

    def check(ended: Ended, *words: str) -> None:
        code, out, err = ended
        assert code == 2, err
        assert out == ""
        assert "Traceback" not in err
        for word in words:
            assert word in err

    return check


@pytest.fixture
def config(tmp_path: Path, checkpoint: Path) -> Path:
    """A small run's configuration file; its runs go to `runs` beside it."""
    (tmp_path / "market.csv").write_text("time_s,event,instance_id\n0,add,a\n86400,remove,a\n")
    path = tmp_path / "small.toml"
    path.write_text(CONFIG.format(directory=tmp_path, checkpoint=checkpoint))
    return path


@pytest.fixture
def elastic(capsys: pytest.CaptureFixture[str]) -> Callable[..., Ended]:
    """`elastic` with these arguments, in this process."""

    def run(*arguments: object) -> Ended:
        with pytest.raises(SystemExit) as exit_:
            main([str(argument) for argument in arguments])
        code = exit_.value.code
        assert isinstance(code, int | None)
        return Ended(code or 0, *capsys.readouterr())

    return run


@pytest.fixture
def start() -> Iterator[Callable[..., "subprocess.Popen[str]"]]:
    """`elastic` in a process of its own, killed at the latest when the test ends."""
    started: list[subprocess.Popen[str]] = []

    def run(*arguments: object, preexec: Callable[[], None] | None = None) -> "subprocess.Popen[str]":
        command = [sys.executable, "-m", "elastic.cli", *map(str, arguments)]
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        environment = {**os.environ, "COLUMNS": "200"}
        process = subprocess.Popen(
            command, text=True, start_new_session=True, preexec_fn=preexec, env=environment, **pipes
        )
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()
        process.communicate()


def living_processes(run: str) -> list[psutil.Process]:
    """Processes that are tagged as this run's."""
    found: list[psutil.Process] = []
    for process in psutil.process_iter():
        try:
            if process.status() != psutil.STATUS_ZOMBIE and process.environ().get("ELASTIC_RUN") == run:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


@pytest.fixture
def processes_of() -> Callable[[str], list[psutil.Process]]:
    return living_processes
