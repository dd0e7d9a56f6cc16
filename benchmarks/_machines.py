"""A pool of several machines, on this one: network namespaces for its training site and its rollout machines.

Needs root and `ip`. Links between them are cut, and node agents killed, as machines and networks do.
"""

import contextlib
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks._pools import LivePool, started_pool, write_pool
from benchmarks._runs import elastic

NETWORK = "10.78.3"
TRAINING_SITE = f"{NETWORK}.1"
SILENCE_S = 4.0
CUT_S = 2.0, 7.0
"""For how long a link is cut: some cuts are shorter than what a pool waits for a node, some longer."""
REACHED = ("run.host=0.0.0.0", f"run.advertise={TRAINING_SITE}", "job.rollout_memory_gb=1.5")
"""What is set of jobs whose rollouts are on other machines; three find room on a node."""
COMMAND = (sys.executable, "-P", "-m", "elastic.cli")
KINDS = ("a node agent", "a link", "the pool's process")


def lacking() -> str:
    """Why there can be no namespaces here; empty if there can."""
    if os.geteuid() != 0:
        return "namespaces need root"
    found = subprocess.run(["ip", "-V"], capture_output=True, check=False) if _has_ip() else None
    return "" if found is not None and found.returncode == 0 else "iproute2 is not installed"


def _has_ip() -> bool:
    return any((Path(place) / "ip").exists() for place in os.environ.get("PATH", "").split(os.pathsep))


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@dataclass
class NodeAgent:
    """A node's agent on a rollout machine, by what starts it again."""

    machine: str
    directory: Path
    device: str
    node: str
    process: "subprocess.Popen[bytes] | None" = None

    def start(self) -> None:
        ticket = self.directory / f"{self.device.replace(':', '-')}.ticket"
        words = f'hostname {self.machine} && exec "$@"'
        join = [*COMMAND, "pool", "join", "--ticket-file", str(ticket), "--devices", self.device]
        command = ["ip", "netns", "exec", self.machine, "unshare", "--uts", "sh", "-c", words, "node_agent", *join]
        with (self.directory / f"{self.device}.log").open("ab") as log:
            self.process = subprocess.Popen(command, cwd=self.directory, stderr=log, start_new_session=True)


class Machines:
    """The namespaces of a training site and of rollout machines, with two devices each, and a switch between them."""

    def __init__(self, directory: Path, count: int) -> None:
        mark = f"em{os.getpid() % 100_000}"
        self._switch = f"{mark}b"
        self.training = f"{mark}-train"
        self.rollout = [f"{mark}-roll{number}" for number in range(1, count + 1)]
        self._directory = directory
        self.node_agents: list[NodeAgent] = []

    def __enter__(self) -> "Machines":
        _ip("link", "add", self._switch, "type", "bridge")
        _ip("link", "set", self._switch, "up")
        for number, name in enumerate((self.training, *self.rollout), 1):
            cable = f"{self._switch}{number}"
            _ip("netns", "add", name)
            _ip("link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", name)
            _ip("link", "set", cable, "master", self._switch, "up")
            _ip("-n", name, "addr", "add", f"{NETWORK}.{number}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "eth0", "up")
            _ip("-n", name, "link", "set", "lo", "up")
        return self

    def __exit__(self, *_: object) -> None:
        for node_agent in self.node_agents:
            if node_agent.process is not None:
                node_agent.process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    node_agent.process.wait(30)
                node_agent.process.kill()
        for name in (self.training, *self.rollout):
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
        subprocess.run(["ip", "link", "del", self._switch], check=False, capture_output=True)

    def join(self, pool: LivePool) -> None:
        """Have all machines join, with a node for each device, and wait until they are there."""
        for number, machine in enumerate(self.rollout):
            place = self._directory / machine
            place.mkdir(parents=True)
            # All of them are this machine's, and no two nodes share one.
            for device in (f"cpu:{2 * number}", f"cpu:{2 * number + 1}"):
                file = place / f"{device.replace(':', '-')}.ticket"
                told = elastic("pool", "ticket", str(pool.directory), "-o", str(file), "--json")
                self.node_agents.append(NodeAgent(machine, place, device, json.loads(told.splitlines()[-1])["node"]))
                self.node_agents[-1].start()
        wanted = len(self.node_agents)
        pool.until("all machines", lambda now: sum(one["phase"] == "rollout" for one in now["nodes"]) >= wanted, 120)

    def disturb(self, pool: LivePool, kind: str, rng: random.Random) -> set[str]:
        """Kill a node agent, which its machine starts again, or the pool's process; or cut a machine's link for a
        while. Returns the nodes that this strikes."""
        struck: list[NodeAgent] = []
        if kind == "a node agent":
            node_agent = rng.choice(self.node_agents)
            assert node_agent.process is not None
            node_agent.process.kill()
            node_agent.process.wait()
            node_agent.start()
            struck = [node_agent]
        elif kind == "a link":
            machine = rng.choice(self.rollout)
            _ip("-n", machine, "link", "set", "eth0", "down")
            time.sleep(rng.uniform(*CUT_S))
            _ip("-n", machine, "link", "set", "eth0", "up")
            struck = [node_agent for node_agent in self.node_agents if node_agent.machine == machine]
        else:
            os.kill(pool.status()["pid"], 9)
        return {node_agent.node for node_agent in struck}


@contextlib.contextmanager
def machines_pool(
    directory: Path, policy: str, machines: int, train: int, train_gpus: int
) -> Iterator[tuple[LivePool, Machines]]:
    """Starts a pool at a training site, whose nodes have so many devices each, with all devices of so many rollout
    machines, and ends all of it."""
    file = write_pool(
        directory,
        policy,
        (2 * machines, train),
        train_gpus=train_gpus,
        pool={"host": "0.0.0.0", "advertise": TRAINING_SITE},
        rollout={"kind": "joined", "memory_gb": 4.5},
        limits={"silence_s": SILENCE_S},
    )
    with (
        Machines(directory / "machines", machines) as those,
        started_pool(file, ("ip", "netns", "exec", those.training)) as pool,
    ):
        those.join(pool)
        yield pool, those
