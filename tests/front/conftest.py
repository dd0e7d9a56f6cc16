from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from elastic.front.rendering.tokenizer import Tokenizer
from elastic.front.tiny import write_tokenizer
from tests.front.fronted import Served, fronted, says


@pytest.fixture(scope="session")
def tiny_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the tiny tokenizer, and nothing else."""
    directory = tmp_path_factory.mktemp("tiny")
    write_tokenizer(directory)
    return directory


@pytest.fixture(scope="session")
def tiny(tiny_directory: Path) -> Tokenizer:
    return Tokenizer(tiny_directory)


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    """A front whose run's turns all say `hi there`."""
    async with fronted(tmp_path, answer=says("hi there")) as under_test:
        yield under_test
