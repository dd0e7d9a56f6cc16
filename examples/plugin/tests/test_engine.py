"""The suite of engines."""

import pytest

from elastic.testing.conformance import *  # noqa: F403
from elastic.testing.engines import *  # noqa: F403
from elastic.testing.engines import EngineUnderTest


@pytest.fixture
def engine_under_test() -> EngineUnderTest:
    return EngineUnderTest("plain", timeout_s=300.0)
