"""A trainer with one rank on each of two nodes learns what two ranks of one node do, bit for bit.

It computes only while both nodes have their devices, and ends with either of them.
"""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import torch

from elastic.compose.runs import save_run_config
from elastic.config import Config
from elastic.pool import messages as w
from elastic.pool.connection import encoded
from elastic.system.processes import lives
from elastic.worker.trainer.checkpoint import read_all
from tests.trainer.hugging_face import write_model
from tests.trainer.ranks import RankedProcess, config_of

pytestmark = pytest.mark.trainers

TOKEN = "of this trainer"
SOON_S = 300.0


class TwoNodes:
    """A trainer's first rank, and the resident of its second node, whose node agent this is."""

    def __init__(self, config: dict[str, Any], run_dir: Path) -> None:
        run_dir.mkdir()
        save_run_config(run_dir, Config.model_validate(config))
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.address = listener.getsockname()
            places = w.RankPlaces(counts=(1, 1), token=TOKEN, interface="lo", descriptor=listener.fileno())
            there = msgspec.structs.replace(places, place=1, at="{}:{}".format(*self.address), descriptor=-1)
            self._agent, theirs = socket.socketpair()
            self._agent.settimeout(SOON_S)
            with theirs:
                variables = {w.NODE_AGENT_VARIABLE: str(theirs.fileno()), w.RANKS_VARIABLE: told(there)}
                variables[w.BEAT_VARIABLE] = "1"
                self.resident = subprocess.Popen(
                    [sys.executable, "-m", "elastic.cli", "worker", "--trainer", str(run_dir)],
                    env=os.environ | variables,
                    pass_fds=[theirs.fileno()],
                )
            assert isinstance(self.heard(), w.Warm)
            self._start(config, places, listener)

    def _start(self, config: dict[str, Any], places: w.RankPlaces, listener: socket.socket) -> None:
        self.tell(w.Resume(1))
        assert isinstance(self.heard(), w.DeviceResumed)
        self.trainer = RankedProcess(config, [listener.fileno()], **{w.RANKS_VARIABLE: told(places)})

    def tell(self, message: w.ToResident) -> None:
        self._agent.sendall(encoded(message))

    def heard(self, within_s: float = SOON_S) -> w.FromResident:
        self._agent.settimeout(within_s)
        while True:
            body = self._received(int.from_bytes(self._received(4), "big"))
            message = msgspec.msgpack.decode(body, type=w.FromResident)
            if not isinstance(message, w.StillHere):
                return message

    def _received(self, count: int) -> bytes:
        found = b""
        while len(found) < count:
            part = self._agent.recv(count - len(found))
            if not part:
                raise ConnectionError
            found += part
        return found

    def close(self) -> None:
        self.trainer.close()
        self._agent.close()
        self.resident.wait(SOON_S)


def told(places: w.RankPlaces) -> str:
    return msgspec.json.encode(places).decode()


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    pytest.importorskip("transformers")
    return config_of(write_model(tmp_path_factory.mktemp("llama"), "llama"), 2)


@pytest.fixture
def nodes(config: dict[str, Any], tmp_path: Path) -> Iterator[TwoNodes]:
    nodes = TwoNodes(config, tmp_path / "run")
    yield nodes
    nodes.close()


def test_a_rank_on_each_of_two_nodes_has_the_bits_of_two_on_one(
    nodes: TwoNodes, config: dict[str, Any], tmp_path: Path
) -> None:
    """Four processes import torch: the same bits can be seen nowhere else."""
    one = RankedProcess(config)
    try:
        for seed in range(2):
            assert nodes.trainer.ask("train", seed) == one.ask("train", seed)
        for trainer, name in ((nodes.trainer, "two.shards"), (one, "one.shards")):
            trainer.ask("save", str(tmp_path / name))
        (found, counters), (expected, _) = read_all(tmp_path / "two.shards"), read_all(tmp_path / "one.shards")
        assert counters.version == 2
        assert found.keys() == expected.keys()
        assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())
        # What the one has kept the other goes on from.
        assert nodes.trainer.ask("load", str(tmp_path / "one.shards")) == 2
        assert nodes.trainer.ask("train", 2) == one.ask("train", 2)
    finally:
        one.close()


def test_all_ranks_park_before_any_node_is_free_and_resume_once_all_have_their_devices(nodes: TwoNodes) -> None:
    nodes.tell(w.Park(1))
    with pytest.raises(TimeoutError):
        nodes.heard(within_s=0.5)  # The first rank has not parked them.
    nodes.trainer.ask("park")
    assert isinstance(nodes.heard(), w.Parked)
    nodes.tell(w.Resume(2))
    assert isinstance(nodes.heard(), w.DeviceResumed)
    nodes.trainer.ask("resume")
    assert nodes.trainer.ask("train", 0)["unusable"] == {}


def test_a_rank_that_is_stopped_ends_its_node_and_so_all_ranks(nodes: TwoNodes) -> None:
    """Its node's agent hears the resident, and not the rank."""
    (rank,) = psutil.Process(nodes.resident.pid).children()
    rank.suspend()
    assert nodes.resident.wait(SOON_S) == 1
    with pytest.raises(ConnectionError, match="status 137"):
        nodes.trainer.ask("train", 0)
    assert not lives(rank.pid)
