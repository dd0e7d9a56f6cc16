"""What a trainer's first rank has of its other nodes: who is let in, and when devices are used and given back."""

import os
import queue
import resource
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from elastic.pool.messages import RankPlaces
from elastic.worker.trainer.transformers import rank_messages as m
from elastic.worker.trainer.transformers.rank_nodes import UNPROVEN_MAX, OtherNodes

TOKEN = "of this trainer"
WITHIN_S = 20.0


class FirstRank:
    """The first rank of a trainer with one rank here and two on another node."""

    def __init__(self) -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        self.address = listener.getsockname()
        self.lost = queue.SimpleQueue[str]()
        self.nodes = OtherNodes(RankPlaces(counts=(1, 2), token=TOKEN, descriptor=listener.detach()), self.lost.put)
        self.joined = queue.SimpleQueue[int]()
        threading.Thread(target=lambda: self.joined.put(len(self.nodes.join())), daemon=True).start()

    def dialled(self, opened: m.LineOpened) -> m.RankLine:
        """The other end of a line."""
        line = m.RankLine.of_node(m.kept(socket.create_connection(self.address), 20))
        line.prove(TOKEN, dials=True)
        line.send(opened)
        return line


@pytest.fixture
def first() -> Iterator[FirstRank]:
    first = FirstRank()
    yield first
    first.nodes.close()


STRANGERS = f"""
import socket, sys
held = [socket.create_connection(("127.0.0.1", int(sys.argv[1]))) for _ in range({3 * UNPROVEN_MAX})]
for one in held[:5]:
    one.sendall(b"\\0\\0\\0\\5never" * 9)
held[-1].sendall(b"\\x7f\\xff\\xff\\xff" + b"endless" * 9)
print(flush=True)
sys.stdin.read()
"""


def test_ranks_get_in_among_strangers_of_whom_few_are_waited_for(first: FirstRank) -> None:
    """With fewer descriptors than there are strangers."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = max(map(int, os.listdir("/proc/self/fd"))) + 2 * UNPROVEN_MAX
    command = [sys.executable, "-c", STRANGERS, str(first.address[1])]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as strangers:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, most), hard))
        try:
            assert strangers.stdout is not None
            strangers.stdout.readline()
            opened = [m.LineOpened(1), *(m.LineOpened(1, rank, which) for rank in (1, 2) for which in (False, True))]
            lines = [first.dialled(one) for one in opened]
            assert first.joined.get(timeout=WITHIN_S) == 2
            for other in (m.LineOpened(1), m.NodeGiven(1)):  # One that is there, and none that opens a line.
                with pytest.raises((EOFError, OSError)):
                    first.dialled(other).receive()  # type: ignore[arg-type]
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            strangers.kill()
    lines[0].cut()
    assert first.lost.get(timeout=WITHIN_S) == "the ranks of the trainer's node 2 are gone"


def test_a_node_is_free_once_no_rank_computes_and_all_compute_under_one_permit(first: FirstRank) -> None:
    opened = [m.LineOpened(1), *(m.LineOpened(1, rank, which) for rank in (1, 2) for which in (False, True))]
    node, *_ranks = (first.dialled(one) for one in opened)
    assert first.joined.get(timeout=WITHIN_S) == 2
    free = queue.SimpleQueue[m.NodeLeft]()
    threading.Thread(target=lambda: [free.put(node.receive()) for _ in range(2)], daemon=True).start()
    node.send(m.NodeGiven(1))
    first.nodes.wait_for_devices()
    node.send(m.NodeTaken())
    with pytest.raises(queue.Empty):
        free.get(timeout=0.05)
    first.nodes.left()
    assert free.get(timeout=WITHIN_S) == m.NodeLeft()
    node.send(m.NodeTaken())
    assert free.get(timeout=WITHIN_S) == m.NodeLeft(), "at once, as nobody computes"
