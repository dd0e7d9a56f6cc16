"""The suite that every provider passes, on Modal's client and containers."""

from typing import Any

import pytest

from elastic.testing.provider_conformance import *  # noqa: F403
from elastic.testing.provider_conformance import MakeProvider
from elastic.testing.providers import *  # noqa: F403
from elastic.testing.providers import CAPACITY
from providers.base import ProviderContext
from providers.modal import ModalProvider, ModalSettings
from tests.clouds.modal_server import Bench

pytestmark = [pytest.mark.clouds]

SMALL = {"max_workers": CAPACITY, "overlap": 0, "cores": 0.125, "memory_mb": 256, "answer_timeout_s": 20.0}


def modal_provider(context: ProviderContext, **settings: Any) -> ModalProvider:
    return ModalProvider("provider", ModalSettings.model_validate({**SMALL, **settings}), context)


@pytest.fixture
def kind() -> str:
    return "modal"


@pytest.fixture
def make_provider(kind: str, platform: Bench) -> MakeProvider:
    return modal_provider
