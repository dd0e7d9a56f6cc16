"""A serving host's control endpoint: who may do what, and one worker at a time."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator

import httpx
import msgspec
import pytest

from elastic.config import ConfigError
from elastic.engine.base import DeviceShare
from elastic.worker.serving_device import ServingDevice
from elastic.worker.serving_host import MAX_ORDER_BYTES, ServingHost, create_app, parse_settings, serve_host
from providers.serving_load import ServingLoad
from providers.serving_messages import HostSettings, LendingSettings, LendOrder, LoadReport

TOKEN = "the host's own token"
ORDER = LendOrder(run="run", join="127.0.0.1:1", worker="w-1", token="one time")


class Agent:
    """A worker that does as it is told, by the test and then by nobody."""

    def __init__(self) -> None:
        self.orders: list[LendOrder] = []
        self.share: DeviceShare | None = None
        self.obstinate = False
        self.running = False
        self._end: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def __call__(self, order: LendOrder, share: DeviceShare) -> None:
        self.orders.append(order)
        self.share = share
        self.running = True
        while True:
            try:
                await asyncio.shield(self._end)
                break
            except asyncio.CancelledError:
                if not self.obstinate:
                    raise
            finally:
                self.running = self.obstinate

    def end(self, error: Exception | None = None) -> None:
        self.obstinate = False
        if error is None:
            self._end.set_result(None)
        else:
            self._end.set_exception(error)


@pytest.fixture
async def agent() -> Agent:
    return Agent()


@pytest.fixture
async def http(agent: Agent) -> AsyncIterator[httpx.AsyncClient]:
    settings = HostSettings(token=TOKEN, return_grace_s=0.0, return_timeout_s=0.1)  # type: ignore[arg-type]
    device = ServingDevice(ServingLoad(iter(()), settings.device), LendingSettings())
    host = ServingHost(settings, device, agent)
    transport = httpx.ASGITransport(create_app(host, TOKEN, host_names=["host"]))
    headers = {"Authorization": f"Bearer {TOKEN}"}
    async with httpx.AsyncClient(transport=transport, base_url="http://host", headers=headers) as client:
        yield client
    agent.obstinate = False
    await host.aclose()


async def order(http: httpx.AsyncClient, path: str, body: object = ORDER) -> httpx.Response:
    return await http.post(path, content=msgspec.json.encode(body))


async def load(http: httpx.AsyncClient) -> LoadReport:
    return msgspec.json.decode((await http.get("/load")).content, type=LoadReport)


async def test_nobody_without_the_token_learns_or_changes_anything(http: httpx.AsyncClient, agent: Agent) -> None:
    for headers in ({"Authorization": "Bearer guess"}, {"Authorization": TOKEN}, {"Authorization": ""}):
        assert (await http.get("/load", headers=headers)).status_code == 401
        answer = await http.post("/lend", content=msgspec.json.encode(ORDER), headers=headers)
        assert answer.status_code == 401
        assert json.loads(answer.content).keys() == {"error"}
    assert agent.orders == []


async def test_lends_to_one_worker_at_a_time(http: httpx.AsyncClient, agent: Agent) -> None:
    assert (await load(http)).lent_worker == ""
    for _ in range(2):
        assert (await order(http, "/lend")).status_code == 200
    report = await load(http)
    assert (report.lent_run, report.lent_worker) == ("run", "w-1")
    other = msgspec.structs.replace(ORDER, worker="w-2", run="other")
    assert (await order(http, "/lend", other)).status_code == 409
    await asyncio.sleep(0)
    assert agent.orders == [ORDER]


async def test_returning_ends_the_worker_and_nobody_elses(http: httpx.AsyncClient, agent: Agent) -> None:
    await order(http, "/lend")
    await asyncio.sleep(0)
    assert (await order(http, "/return", {"worker": "w-2"})).status_code == 200
    assert agent.running
    for _ in range(2):
        assert (await order(http, "/return", {"worker": "w-1"})).status_code == 200
    assert not agent.running
    assert agent.share is not None
    assert agent.share.hold_back()
    assert (await load(http)).lent_worker == ""


async def test_returning_before_the_worker_has_begun(http: httpx.AsyncClient, agent: Agent) -> None:
    lent, returned = await asyncio.gather(order(http, "/lend"), order(http, "/return", {"worker": "w-1"}))
    assert (lent.status_code, returned.status_code) == (200, 200)
    await order(http, "/return", {"worker": "w-1"})
    assert (await load(http)).lent_worker == ""


async def test_says_how_the_last_worker_ended(http: httpx.AsyncClient, agent: Agent) -> None:
    await order(http, "/lend")
    agent.end(RuntimeError("out of luck"))
    report = await load(http)
    async with asyncio.timeout(30):
        while report.lent_worker:
            await asyncio.sleep(0)
            report = await load(http)
    assert (report.ended_worker, report.ended_error) == ("w-1", "RuntimeError: out of luck")


async def test_a_worker_that_will_not_go_is_not_passed_over(http: httpx.AsyncClient, agent: Agent) -> None:
    agent.obstinate = True
    await order(http, "/lend")
    await asyncio.sleep(0)
    answer = await order(http, "/return", {"worker": "w-1"})
    assert answer.status_code == 504
    assert "w-1" in answer.text
    assert (await load(http)).lent_worker == "w-1"
    assert (await order(http, "/lend", msgspec.structs.replace(ORDER, worker="w-2"))).status_code == 409


@pytest.mark.parametrize(
    ("body", "status"),
    [(b"{", 400), (b'{"worker": 1}', 400), (b'{"worker": "w-1", "tokn": "x"}', 400), (b"x" * MAX_ORDER_BYTES * 2, 413)],
)
async def test_refuses_orders_it_does_not_understand(
    http: httpx.AsyncClient, agent: Agent, body: bytes, status: int
) -> None:
    answer = await http.post("/lend", content=body)
    assert answer.status_code == status
    assert json.loads(answer.content)["error"]
    assert agent.orders == []


@pytest.mark.parametrize(
    ("settings_json", "named"),
    [
        ("", "not set"),
        ("{}", "token"),
        ('{"token": "secret", "port": "http"}', "port"),
        ('{"token": "secret", "speed": 3}', "speed"),
        ('{"token": "secret", "load": {"trace": "absent"}}', "azure-conversation"),
    ],
)
def test_settings_that_cannot_be_used_are_named_without_the_token(settings_json: str, named: str) -> None:
    with pytest.raises(ConfigError, match="ELASTIC_SERVING_HOST") as error:
        parse_settings(settings_json)
    assert named in str(error.value)
    assert "secret" not in str(error.value)


def test_settings_survive_the_way_to_the_host_and_hide_the_token_elsewhere() -> None:
    settings = HostSettings(token=TOKEN, phase=3)  # type: ignore[arg-type]
    assert parse_settings(settings.to_json()) == settings
    assert TOKEN not in repr(settings) + settings.model_dump_json()


async def test_a_port_in_use_is_named(agent: Agent) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        settings = HostSettings(token=TOKEN, port=port)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=rf"127\.0\.0\.1:{port}: Address already in use"):
            await serve_host(settings, agent)
