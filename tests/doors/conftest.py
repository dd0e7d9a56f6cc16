from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.doors.served import ServedDoors, served_doors


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[ServedDoors]:
    """All doors, onto a run in memory."""
    async with served_doors(tmp_path) as under_test:
        yield under_test
