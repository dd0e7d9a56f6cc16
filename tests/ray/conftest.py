"""A real cluster on this machine: a head and two nodes, of which tests take what they need, and kill some."""

import importlib.util
from collections.abc import Iterator

import pytest

from benchmarks._ray_nodes import RayNodes, ray_nodes

CPUS = 2


@pytest.fixture(scope="session")
def shared_nodes() -> Iterator[RayNodes]:
    if importlib.util.find_spec("ray") is None:
        pytest.skip("Ray is not installed")
    with ray_nodes(2, cpus=CPUS, end_together=True) as nodes:
        yield nodes


@pytest.fixture
def nodes(shared_nodes: RayNodes) -> Iterator[RayNodes]:
    """Two nodes with nothing taken; whatever a test kills, adds or keeps, the next one has the same."""
    yield shared_nodes
    taken = shared_nodes.restore()
    assert not taken, f"the test has not given back: {taken}"
