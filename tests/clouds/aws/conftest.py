"""The stand-in for AWS, one for all tests of a module, which begin with nothing rented out."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clouds.aws_server.cloud import Cloud, cloud
from tests.clouds.aws_server.proxy import Faults


@pytest.fixture(scope="module")
def standing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cloud]:
    pytest.importorskip("boto3")
    with cloud(tmp_path_factory.mktemp("aws")) as made:
        yield made


@pytest.fixture
def aws(standing: Cloud) -> Iterator[Cloud]:
    proxy, books = standing.proxy, standing.books
    former = dict(books.capacity)
    yield standing
    proxy.faults, proxy.keys, proxy.unseen_s, proxy.hold, proxy.account_scores = Faults(), None, 0.0, None, True
    proxy.denied = set()
    for one in standing.living():
        standing.take(one.id)
    books.capacity, books.quota = former, 64


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return tmp_path
