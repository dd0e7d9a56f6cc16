"""Code that is misspelt ends a live run at the first start of an env worker, with status 2 and one message."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks._configurations import written
from benchmarks._shapes import write_chat_policy
from elastic.runtime.journal import RunDirectory
from tests.envs.installed_environment import install_environment

pytestmark = pytest.mark.environments

RAISING = "raise ValueError('not today')\n"
BAD = {
    "interrupting": "raise KeyboardInterrupt\n",
    "exiting": "import os\nos.write(2, b'not today')\nos._exit(7)\n",
    "hanging": "import time\ntime.sleep(10**6)\n",
}


CHAT = """
[environment]
name = "chat"
data = {{ source = "{here}/rows.jsonl", answer = "answer" }}
settings = {{ rewards = ["CODE"] }}
"""
THEIRS = '[environment]\nname = "theirs"\nkind = "raising"\n'


@pytest.mark.parametrize(
    ("environments", "told"),
    [
        (
            CHAT.replace("CODE", "{here}/mine.py:rigth"),
            "environment.settings.rewards.0: {here}/mine.py:rigth: {here}/mine.py has no 'rigth'; it has right",
        ),
        (
            CHAT.replace("CODE", "no_such:right"),
            "environment.settings.rewards.0: no_such:right: cannot be loaded by {python}: ModuleNotFoundError",
        ),
        (CHAT.replace("CODE", "{here}/mine.py:right"), "rows.jsonl: row 1 has no column 'answer'"),
        (
            CHAT.replace("CODE", "{here}/interrupting.py:right"),
            "environment.settings: cannot be loaded by {python}: KeyboardInterrupt ({here}/interrupting.py, line 1)",
        ),
        (
            CHAT.replace("CODE", "{here}/exiting.py:right"),
            "environment.settings: env worker chat_0 could not begin: exited with status 7; it said not today; allowed",
        ),
        (
            CHAT.replace("CODE", "{here}/hanging.py:right").replace("data =", "start_timeout_s = 15\ndata ="),
            "environment.start_timeout_s: env worker chat_0 could not begin: it did not dial the run within 15 s; it "
            "said its code is still being loaded: at={here}/hanging.py, line 2; allowed: a longer time",
        ),
        (
            THEIRS,
            "environment.kind: found 'raising' of the package raising-package 1.0, whose raising_package:Saying "
            "cannot be loaded by {python}: Value",
        ),
    ],
    ids=["a name", "a module", "a column", "an interrupt", "an exit", "an endless import", "a class"],
)
def test_the_first_start_ends_the_run(
    environments: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text("def right(completions, **columns):\n    return [0.0]\n")
    for name, code in BAD.items():
        (tmp_path / f"{name}.py").write_text(code)
    rows = [{"prompt": "2+2=", "answer": "4"}, {"prompt": "2+3="}]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    install_environment(tmp_path, "raising", RAISING)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    config = written(tmp_path / "agents.toml", "agents", policy=write_chat_policy(tmp_path / "policy"))
    sections = config.read_text() + environments.format(here=tmp_path)
    config.write_text(sections if "chat" in environments else sections.replace("front.processes = 2\n", ""))
    given = [f"--set=run.directory={tmp_path}/runs", "--set=run.pass_env=['PYTHONPATH']"]
    command = [sys.executable, "-m", "elastic.cli", "run", str(config), "--providers", "reserved", *given]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 2, ended.stderr
    (message,) = [line for line in ended.stderr.splitlines() if line.startswith("error:")]
    assert told.format(here=tmp_path, python=sys.executable) in message
    (run_dir,) = (tmp_path / "runs").iterdir()
    said = (run_dir / "logs" / "orchestrator.log").read_text()
    assert said.count("an env worker has ended") == 1, "it was started once"
    with RunDirectory(run_dir).newest_journal() as journal:
        assert journal.meta()["status"].startswith("failed: ")
