"""The suite that every function pool passes, on Modal's client and containers."""

from collections.abc import Callable
from typing import Any

import pytest

from functions.modal import ModalFunctionPool
from tests.clouds.modal_server import Bench
from tests.functions.conftest import calls, make_pool, prices
from tests.functions.test_conformance import *  # noqa: F403

__all__ = ["calls", "make_pool", "prices"]

pytestmark = [pytest.mark.clouds, pytest.mark.filterwarnings("ignore::DeprecationWarning:modal")]


@pytest.fixture
def pool_type(platform: Bench) -> Callable[..., Any]:
    return ModalFunctionPool
