"""Modal's real client, and Elastic's app deployed by it to a server of this machine."""

import asyncio
import warnings
from collections.abc import Callable, Iterator, Mapping

import pytest
import uvloop

from elastic.compose.modal_deployment import deploy
from elastic.system.modal import modal
from tests.clouds.modal_server import Bench, bench

APP = "elastic"


def pytest_asyncio_loop_factories(item: pytest.Item) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture(scope="session")
def platform(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """The server, with the app deployed."""
    with bench(tmp_path_factory.mktemp("modal")) as server, pytest.MonkeyPatch.context() as patch:
        for name, value in server.environment.items():
            patch.setenv(name, value)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            deploy(APP)
        yield server
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            modal().Client.from_env().close()


@pytest.fixture(autouse=True)
def no_faults(platform: Bench) -> Iterator[None]:
    yield
    platform.faults()
    platform.refuse_token(False)
