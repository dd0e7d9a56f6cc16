"""A real cluster of this machine: a head and two nodes, of which some are killed."""

import contextlib
import socket
from collections.abc import Iterator
from typing import Any

import pytest

STORE_BYTES = 80 << 20


@contextlib.contextmanager
def ray_cluster(nodes: int) -> Iterator[Any]:
    cluster_utils = pytest.importorskip("ray.cluster_utils")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    head = {"num_cpus": 0, "include_dashboard": False, "include_log_monitor": False, "no_monitor": True}
    head |= {"ray_client_server_port": port, "object_store_memory": STORE_BYTES}
    cluster = cluster_utils.Cluster(head_node_args=head, initialize_head=True)
    cluster.client_address = f"ray://127.0.0.1:{port}"
    for _ in range(nodes):
        cluster.add_node(num_cpus=2, resources={"place": 1}, object_store_memory=STORE_BYTES)
    yield cluster
    cluster.shutdown()


@pytest.fixture(scope="session")
def cluster() -> Iterator[Any]:
    with ray_cluster(nodes=2) as cluster:
        yield cluster
