"""The stand-in for AWS, one for all tests of a module, which begin with nothing rented; or AWS itself (`--real`)."""

import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.clouds.aws_server.cloud import Cloud, cloud
from tests.clouds.aws_server.proxy import Faults


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--real", metavar="CONFIG", help="the conformance suite on the account of its [providers.ec2]")
    parser.addoption("--usd-max", type=float, default=1.0, help="with --real: what each test may cost")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of AWS itself nobody can ask for bad days."""
    if config.getoption("--real"):
        mark = pytest.mark.skip(reason="only the stand-in can be told to do this")
        for item in items:
            if item.path.stem != "test_ec2_conformance" or "bad day" in item.name:
                item.add_marker(mark)


@pytest.fixture
def real(request: pytest.FixtureRequest) -> dict[str, Any] | None:
    """The settings with which AWS itself is asked; None where the stand-in is."""
    path = request.config.getoption("--real", None)
    if path is None:
        return None
    section = tomllib.loads(Path(path).read_text())["providers"]["ec2"]
    return section | {"usd_max": request.config.getoption("--usd-max"), "reconcile_s": 5.0}


@pytest.fixture(scope="module")
def standing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cloud]:
    pytest.importorskip("boto3")
    with cloud(tmp_path_factory.mktemp("aws")) as made:
        yield made


@pytest.fixture
def aws(request: pytest.FixtureRequest, real: dict[str, Any] | None) -> Iterator[Cloud | None]:
    if real is not None:
        yield None
        return
    standing: Cloud = request.getfixturevalue("standing")
    proxy, books = standing.proxy, standing.books
    former = dict(books.capacity)
    yield standing
    proxy.faults, proxy.keys, proxy.unseen_s, proxy.hold, proxy.account_scores = Faults(), None, 0.0, None, True
    proxy.denied, proxy.remembered_s, proxy.clock_s = set(), 3600.0, 0.0
    proxy.unknown, standing.machines.deaf, proxy.page = "AuthFailure", set(), None
    for one in standing.living():
        standing.take(one.id)
    books.capacity, books.quota = former, 64
