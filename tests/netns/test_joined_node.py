"""A pool's rollout node on another machine: a network namespace, whose keeper sees no file of the pool's machine.

Needs root and `ip`; `make test-netns`.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from elastic.report import summarise
from elastic.runtime.journal import RunDirectory
from tests.pool.live import STEPS, LivePool
from tests.pool.test_pool_process import leftovers

pytestmark = [pytest.mark.netns, pytest.mark.timeout(600)]

POOL_HOST, NODE_HOST = "10.77.3.2", "10.77.3.1"


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@pytest.fixture
def machine() -> Iterator[str]:
    """The name of a namespace with a cable to this one."""
    name, cable = f"elastic-node-{os.getpid()}", f"el{os.getpid() % 100_000}n"
    ip("netns", "add", name)
    try:
        ip("link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", name)
        ip("addr", "add", f"{POOL_HOST}/24", "dev", cable)
        ip("link", "set", cable, "up")
        ip("-n", name, "addr", "add", f"{NODE_HOST}/24", "dev", "eth0")
        ip("-n", name, "link", "set", "eth0", "up")
        ip("-n", name, "link", "set", "lo", "up")
        yield name
    finally:
        ip("netns", "del", name)


def join(machine: str, hidden: Path, directory: Path, ticket: Path) -> "subprocess.Popen[bytes]":
    """Start a keeper there, to which an empty file system hides a folder of this machine."""
    words = f'mount -t tmpfs none {hidden} && exec {sys.executable} -P -m elastic.cli pool join --ticket-file "$0"'
    command = ["ip", "netns", "exec", machine, "unshare", "--mount", "--propagation", "private", "sh", "-c", words]
    with (directory / "node.log").open("ab") as log:
        return subprocess.Popen([*command, str(ticket)], cwd=directory, stderr=log, start_new_session=True)


def test_a_job_rolls_out_on_a_machine_without_the_pool_s_files_though_the_pool_s_process_is_killed(
    tmp_path: Path, checkpoint: Path, machine: str
) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    shutil.copytree(checkpoint, here / "checkpoint")
    there.mkdir()
    pool = LivePool(here, here / "checkpoint", within_s=400)
    pool.start(reached=f'host = "0.0.0.0"\nadvertise = "{POOL_HOST}"', rollout='kind = "joined"', start_s=200)
    keeper: subprocess.Popen[bytes] | None = None
    try:
        refused = subprocess.run(
            [sys.executable, "-m", "elastic.cli", "jobs", "submit", pool.write_job("near", 1), "--pool", pool.path],
            capture_output=True,
            text=True,
            check=False,
        )
        assert refused.returncode == 2
        assert "run.host: found 127.0.0.1, which the pool's rollout nodes" in refused.stderr
        pool.submit("one", 1, "--set", "run.host=0.0.0.0", "--set", f"run.advertise={POOL_HOST}")
        pool.elastic("pool", "ticket", pool.path, "-o", there / "ticket")
        keeper = join(machine, here, there, there / "ticket")
        pool.until(lambda jobs: jobs["one"]["steps_done"])
        status: dict[str, Any] = pool.elastic("pool", "status", pool.path)
        (node,) = [node for node in status["nodes"] if node["phase"] == "rollout"]
        assert node["devices"] == ["cpu:0@rollout-1"]
        os.kill(status["pid"], signal.SIGKILL)
        jobs = pool.until(lambda jobs: jobs["one"]["over"])
        assert (jobs["one"]["state"], jobs["one"]["steps_done"]) == ("finished", STEPS)
        assert summarise(RunDirectory(pool.run_dir("one"))).providers["pool"].tokens > 0
        assert list((there / "nodes" / "lab-rollout-1" / "logs").iterdir())
    finally:
        pool.stop()
        if keeper is not None:
            assert keeper.wait(60) == 0, (there / "node.log").read_text()
    deadline = time.monotonic() + 10
    while leftovers(there):
        assert time.monotonic() < deadline
        time.sleep(0.1)
