"""A pool's rollout nodes on other machines: network namespaces, whose node agents see no file of the pool's machine.

Needs root and `ip`; `make test-netns`.
"""

import json
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

from benchmarks._pools import LivePool as OnePool
from benchmarks._pools import residual_nano_usd
from elastic.report import summarise
from elastic.runtime.journal import RunDirectory
from tests.pool.live import STEPS, LivePool
from tests.pool.test_pool_process import leftovers
from tests.trainer.test_ranks_in_pool import RANKS

pytestmark = [pytest.mark.netns, pytest.mark.timeout(600)]

SCRIPT = """
import pathlib, elastic
for step in range(2):
    with elastic.phase("rollout"):
        pass
    with elastic.phase("train"):
        pathlib.Path("done").write_text(str(step + 1))
"""
OF_SCRIPT = """
[run]
steps = 2
[job]
slo = 4.0
plan = { rollout_s = 10, train_s = 10 }
"""
POOL_HOST, NODE_HOSTS = "10.77.3.254", ("10.77.3.1", "10.77.3.2")


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@pytest.fixture
def machines() -> Iterator[list[str]]:
    """The names of two namespaces with cables to one switch, to which this one has one, too."""
    mark = f"el{os.getpid() % 100_000}"
    names = [f"elastic-node-{os.getpid()}-{number}" for number in range(len(NODE_HOSTS))]
    ip("link", "add", f"{mark}b", "type", "bridge")
    try:
        ip("addr", "add", f"{POOL_HOST}/24", "dev", f"{mark}b")
        ip("link", "set", f"{mark}b", "up")
        for number, (name, host) in enumerate(zip(names, NODE_HOSTS, strict=True)):
            cable = f"{mark}c{number}"
            ip("netns", "add", name)
            ip("link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", name)
            ip("link", "set", cable, "master", f"{mark}b", "up")
            ip("-n", name, "addr", "add", f"{host}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
        ip("link", "del", f"{mark}b")


def join(machine: str, hidden: Path, directory: Path, ticket: Path, device: str = "cpu:0") -> "subprocess.Popen[bytes]":
    """Start a node agent there, to which an empty file system hides a folder of this machine, and which has a name of
    its own. Its device is one of this machine, which no two nodes share."""
    words = (
        f"hostname {machine} && mount -t tmpfs none {hidden} && "
        f'exec {sys.executable} -P -m elastic.cli pool join --ticket-file "$0" --devices {device}'
    )
    alone = ["unshare", "--mount", "--uts", "--propagation", "private", "sh", "-c", words]
    with (directory / "node.log").open("ab") as log:
        command = ["ip", "netns", "exec", machine, *alone, str(ticket)]
        return subprocess.Popen(command, cwd=directory, stderr=log, start_new_session=True)


def test_a_job_rolls_out_on_a_machine_without_the_pool_s_files_though_the_pool_s_process_is_killed(
    tmp_path: Path, checkpoint: Path, machines: list[str]
) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    shutil.copytree(checkpoint, here / "checkpoint")
    there.mkdir()
    pool = LivePool(here, here / "checkpoint", within_s=400)
    pool.start(reached=f'host = "0.0.0.0"\nadvertise = "{POOL_HOST}"', rollout='kind = "joined"', start_s=200)
    node_agent: subprocess.Popen[bytes] | None = None
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
        node_agent = join(machines[0], here, there, there / "ticket")
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
        if node_agent is not None:
            assert node_agent.wait(60) == 0, (there / "node.log").read_text()
    deadline = time.monotonic() + 10
    while leftovers(there):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_a_job_and_a_script_have_all_that_they_need_on_machines_without_the_pool_s_files(
    tmp_path: Path, checkpoint: Path, machines: list[str]
) -> None:
    """The trainer is elsewhere, too: policy and configuration go there, its checkpoints come back."""
    here, there = tmp_path / "here", tmp_path / "there"
    shutil.copytree(checkpoint, here / "checkpoint")
    there.mkdir()
    pool = LivePool(here, here / "checkpoint", within_s=500)
    reached = f'host = "0.0.0.0"\nadvertise = "{POOL_HOST}"'
    pool.start(reached=reached, rollout='kind = "joined"', train='kind = "joined"', start_s=300)
    node_agents: list[subprocess.Popen[bytes]] = []
    try:
        for number, (kind, machine) in enumerate(zip(("train", "rollout"), machines, strict=True)):
            ticket = there / f"{kind}.ticket"
            pool.elastic("pool", "ticket", pool.path, "--kind", kind, "-o", ticket)
            node_agents.append(join(machine, here, there, ticket, f"cpu:{number}"))
        pool.submit("one", 1, "--set", "run.host=0.0.0.0", "--set", f"run.advertise={POOL_HOST}")
        script = here / "script"
        script.mkdir()
        (script / "steps.py").write_text(SCRIPT)
        (script / "steps.toml").write_text(OF_SCRIPT)
        words = ("jobs", "submit", script / "steps.toml", "--name", "two", "--pool", pool.path)
        pool.elastic(*words, cwd=script, script=("python", "steps.py"))
        jobs = pool.until(lambda jobs: all(job["over"] for job in jobs.values()))
        assert {name: (job["state"], job["steps_done"]) for name, job in jobs.items()} == {
            "one": ("finished", STEPS),
            "two": ("finished", 2),
        }
        assert f"{STEPS:08d}.safetensors" in {path.name for path in (pool.run_dir("one") / "checkpoints").iterdir()}
        assert summarise(RunDirectory(pool.run_dir("one"))).providers["pool"].tokens > 0
        place = there / "nodes" / "lab-train-1"
        assert (next(place.glob("jobs/one/*/one*")) / "model.checkpoint" / "config.json").is_file()
        assert next(place.glob("jobs/two/*/script/done")).read_text() == "2"
    finally:
        pool.stop()
        for node_agent in node_agents:
            assert node_agent.wait(60) == 0, [log.read_text() for log in there.glob("*.log")]


def test_a_trainer_whose_machine_is_lost_goes_on_on_another_from_the_checkpoint_that_came_back(
    tmp_path: Path, checkpoint: Path, machines: list[str]
) -> None:
    here, places = tmp_path / "here", [tmp_path / machine for machine in machines]
    shutil.copytree(checkpoint, here / "checkpoint")
    pool = LivePool(here, here / "checkpoint", within_s=500)
    reached = f'host = "0.0.0.0"\nadvertise = "{POOL_HOST}"'
    pool.start(reached=reached, train='kind = "joined"', start_s=300)
    node_agents: list[subprocess.Popen[bytes]] = []

    def join_to_train(number: int) -> None:
        places[number].mkdir()
        pool.elastic("pool", "ticket", pool.path, "-o", places[number] / "ticket")
        ticket = places[number] / "ticket"
        node_agents.append(join(machines[number], here, places[number], ticket, f"cpu:{number}"))

    try:
        join_to_train(0)
        changes = ("run.host=0.0.0.0", f"run.advertise={POOL_HOST}", "run.steps=9", "trainer.checkpoint_every_steps=1")
        pool.submit("one", 1, *(word for change in changes for word in ("--set", change)), train_s=200)
        kept = pool.run_dir("one") / "checkpoints"
        pool.until(lambda _: list(kept.glob("*.safetensors")))
        node_agents[0].kill()
        pool.until(lambda jobs: jobs["one"]["state"] == "queued")
        pool.elastic("pool", "drain", "train-1", pool.path)
        join_to_train(1)
        jobs = pool.until(lambda jobs: jobs["one"]["over"])
        assert (jobs["one"]["state"], jobs["one"]["steps_done"]) == ("finished", 9)
        said = (places[1] / "nodes" / "lab-train-1" / "logs" / "resident-one.log").read_text()
        assert '"event": "resuming"' in said
        assert '"checkpoint": "none"' not in said, "it began where the other had come to"
    finally:
        pool.stop()
        for node_agent in node_agents:
            node_agent.wait(60)


def test_a_trainer_s_ranks_on_two_machines_meet_on_their_network_and_go_on_after_one_was_killed(
    tmp_path: Path, checkpoint: Path, machines: list[str]
) -> None:
    here, places = tmp_path / "here", [tmp_path / machine for machine in machines]
    shutil.copytree(checkpoint, here / "checkpoint")
    pool = LivePool(here, here / "checkpoint", within_s=560)
    reached = f'host = "0.0.0.0"\nadvertise = "{POOL_HOST}"'
    pool.start(reached=reached, train='kind = "joined"\ninterface = "eth0"', train_nodes=2, start_s=300)
    node_agents: list[subprocess.Popen[bytes]] = []
    try:
        for number, (machine, place) in enumerate(zip(machines, places, strict=True)):
            place.mkdir()
            pool.elastic("pool", "ticket", pool.path, "-o", place / "ticket")
            node_agents.append(join(machine, here, place, place / "ticket", f"cpu:{number}"))
        changes = ("run.host=0.0.0.0", f"run.advertise={POOL_HOST}")
        settings = [word for change in changes for word in ("--set", change)]
        pool.submit("ranks", 1, *settings, beside=RANKS, train_s=200)
        kept = pool.run_dir("ranks") / "checkpoints"
        pool.until(lambda _: list(kept.glob("*.shards")))
        (rank,) = pool.processes("elastic.worker.trainer.transformers.rank")
        has = rank.environ()
        assert has["GLOO_SOCKET_IFNAME"] == "eth0"
        ranks = json.loads(has["ELASTIC_RANKS"])
        assert (ranks["counts"], ranks["interface"]) == ([1, 1], "eth0")
        assert ranks["at"].partition(":")[0] in NODE_HOSTS
        rank.kill()
        jobs = pool.until(lambda jobs: jobs["ranks"]["over"])
        assert (jobs["ranks"]["state"], jobs["ranks"]["steps_done"]) == ("finished", STEPS)
        logs = [next(place.glob("nodes/*/logs/resident-ranks.log")).read_text() for place in places]
        begun = [line for log in logs for line in log.splitlines() if '"event": "resuming"' in line]
        assert ['"checkpoint": "none"' in line for line in begun] == [True, False]
        (job,) = pool.elastic("report", pool.path)["jobs"]
        assert job["usd"] > 0
        shares = {node["name"]: node["slice_share"] for node in pool.elastic("report", pool.path)["nodes"]}
        assert min(shares["train-1"], shares["train-2"]) > 0
        assert residual_nano_usd(OnePool(pool.path)) == 0
    finally:
        pool.stop()
        for node_agent in node_agents:
            node_agent.wait(60)


def test_one_copy_of_a_version_crosses_to_a_site_of_two_machines(
    tmp_path: Path, checkpoint: Path, machines: list[str]
) -> None:
    here = tmp_path / "here"
    shutil.copytree(checkpoint, here / "checkpoint")
    pool = LivePool(here, here / "checkpoint", within_s=400)
    pool.start(
        reached=f'host = "0.0.0.0"\nadvertise = "{POOL_HOST}"', rollout='kind = "joined"', start_s=200, rollout_nodes=2
    )
    node_agents: list[subprocess.Popen[bytes]] = []
    try:
        for number, machine in enumerate(machines):
            there = tmp_path / machine
            there.mkdir()
            pool.elastic("pool", "ticket", pool.path, "-o", there / "ticket")
            node_agents.append(join(machine, here, there, there / "ticket", f"cpu:{number}"))
        until_s = time.monotonic() + 120
        while len(used := relays(pool)) < len(machines):
            assert time.monotonic() < until_s, [(tmp_path / machine / "node.log").read_text() for machine in machines]
            time.sleep(0.2)
        places = [tmp_path / machine / "nodes" / f"lab-rollout-{n}" / "site" for n, machine in enumerate(machines, 1)]
        assert used[0] == str(places[0] / "blobs")
        assert used[1].startswith(f"https://{NODE_HOSTS[0]}:")
        pool.submit(
            "one",
            1,
            *("--set", "run.host=0.0.0.0", "--set", f"run.advertise={POOL_HOST}", "--set", "job.rollout_nodes=2"),
        )
        shared: set[str] = set()
        while not pool.jobs()["one"]["over"]:
            shared |= {path.name for path in (places[0] / "blobs" / "site").glob("*/*/versions/*")}
            time.sleep(0.1)
        assert (pool.jobs()["one"]["state"], pool.jobs()["one"]["steps_done"]) == ("finished", STEPS)
        assert len(shared) >= STEPS, "versions that have crossed to the site"
        for n, machine in enumerate(machines, 1):
            (log,) = (tmp_path / machine / "nodes" / f"lab-rollout-{n}" / "logs").iterdir()
            assert "site not used" not in log.read_text()
    finally:
        pool.stop()
        for node_agent in node_agents:
            assert node_agent.wait(60) == 0


def relays(pool: LivePool) -> list[str]:
    """The relays of their site that the nodes use."""
    nodes: list[dict[str, Any]] = pool.elastic("pool", "status", pool.path)["nodes"]
    return [node["machine"]["relay"] for node in nodes if node["machine"] and node["machine"]["relay"]]
