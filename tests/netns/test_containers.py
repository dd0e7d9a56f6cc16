"""An environment in containers without network: its agents reach the model by their doors, and nothing else.

The containers are namespaces of the kernel (`docker_stand_in.py`): no engine and no image are needed. Needs root;
`make test-netns`.
"""

import contextlib
import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks._agents import AgentsRun
from elastic.environments.container import FOLDER
from elastic.report import summarise
from elastic.runtime.journal import RunDirectory
from elastic.system.last_words import RUN_KEY

pytestmark = [pytest.mark.netns, pytest.mark.timeout(600)]

FUNCTION = '''
import os
import socket
import subprocess

import httpx

from elastic.environments.agent import Outcome


async def play(task, client, trajectory):
    """Two turns. Nothing is reached but the model: not the fronts' own address, and no other."""
    reached = 0.0
    for where in (("127.0.0.1", int(os.environ["FRONT_PORT"])), ("192.0.2.1", 80)):
        try:
            socket.create_connection(where, timeout=2).close()
            reached += 1
        except OSError:
            pass
    calls = {"base_url": trajectory.base_url, "headers": {"authorization": f"Bearer {trajectory.key}"}}
    messages = [{"role": "user", "content": f"Task {task.number}"}]
    async with httpx.AsyncClient(**calls, timeout=120, trust_env=False) as client:
        for _ in range(2):
            while True:
                try:
                    answer = await client.post("/chat/completions", json={"messages": messages})
                except httpx.TransportError:
                    continue
                if answer.status_code not in (429, 503):
                    break
            messages += [answer.json()["choices"][0]["message"], {"role": "user", "content": "More."}]
    # Its key, by Python and by a child, with the key the wrong way round, by which the test knows it.
    print("Printed:", trajectory.key, trajectory.key[::-1], flush=True)
    subprocess.run(["sh", "-c", 'echo "Of a child: $0" >&2', trajectory.key], check=True)
    inside = sorted(os.listdir("/elastic"))
    return Outcome(reward=float(task.number), metrics={"reached": reached, "files": len(inside)})
'''
PORT = 17433


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    engine = tmp_path / "bin" / "docker"
    engine.parent.mkdir()
    engine.write_text(f"#!{sys.executable}\n{(Path(__file__).parent / 'docker_stand_in.py').read_text()}")
    engine.chmod(0o755)
    monkeypatch.setenv("PATH", f"{engine.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("FRONT_PORT", str(PORT))
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "mine.py").write_text(FUNCTION)
    settings = (
        *("run.steps=3", "rollout.groups=2", "rollout.group_size=2", f"front.port={PORT}"),
        *("environment.name=agent", f"environment.settings.rollout={tmp_path}/code/mine.py:play"),
        *("environment.settings.client=none", "environment.container=mine", f"environment.python={sys.executable}"),
        *("environment.max_restarts=20", "environment.settings.concurrency=2", 'run.pass_env=["FRONT_PORT"]'),
    )
    existed = Path(FOLDER).exists()
    with AgentsRun(tmp_path, *settings) as under_way:
        yield under_way
    if not existed:
        shutil.rmtree(FOLDER, ignore_errors=True)


def test_who_is_in_a_container_reaches_the_model_alone_and_leaves_no_key_in_logs(run: Any) -> None:
    run.url()
    run.until("a token, or the end", lambda: run.has_gone_on() or run.ended())
    with contextlib.suppress(IndexError):  # What starts the container: it ends with that.
        run.kill_processes("env worker", run.recorded("agent_*.json")[:1])
    run.wait()
    assert run.leftovers() == []
    summary = summarise(RunDirectory(run.run_dir))
    assert (summary.outcome, len(summary.steps)) == ("finished", 3)
    for step in summary.steps:
        assert step.metrics["reached"] == 0.0
        assert step.metrics["files"] == 3.0, "two sockets, and the environment's configuration"
    printed = "".join(log.read_text() for log in sorted((run.run_dir / "logs").glob("agent_*.log")))
    keys = [key[::-1] for key in re.findall(r"^Printed: \[key\] (\S+)$", printed, re.MULTILINE)]
    assert len(keys) >= 12, "three steps of two groups of two"
    assert all(RUN_KEY.fullmatch(key) for key in keys)
    assert printed.count("Of a child: [key]\n") >= 12
    assert RUN_KEY.search(printed) is None
