from pathlib import Path

import pytest

from elastic.front.tiny import write_tokenizer
from elastic.front.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def tiny_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the tiny tokenizer, and nothing else."""
    directory = tmp_path_factory.mktemp("tiny")
    write_tokenizer(directory)
    return directory


@pytest.fixture(scope="session")
def tiny(tiny_directory: Path) -> Tokenizer:
    return Tokenizer(tiny_directory)
