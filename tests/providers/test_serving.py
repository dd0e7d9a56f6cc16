"""Borrowing from serving hosts: the one with the least KV in use, and never longer than it is there."""

import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from pydantic import ValidationError
from structlog.testing import capture_logs

from elastic.core.events import LeaseRefused
from elastic.core.types import EndCause
from elastic.testing.providers import ProviderRecorder, eventually, lease_request, processes_with
from providers.base import Provider, ProviderContext, ProviderUnavailable
from providers.serving import ServingProvider
from providers.serving_messages import ServingSettings

TRACE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:00:00,{prompt},1000
2023-11-16 18:00:00,1,1
2023-11-16 18:30:00,1,1
"""
"""Of two hosts with half of the requests each, the second gets the long one."""


@pytest.fixture
def cluster(tmp_path: Path, context: ProviderContext, opened: list[Provider]) -> Callable[..., ServingProvider]:
    def make(prompt: int = 1, name: str = "serving", **settings: object) -> ServingProvider:
        (tmp_path / "load.csv").write_text(TRACE.format(prompt=prompt))
        given = {"hosts": 1, "poll_s": 0.05, "load": {"trace": str(tmp_path / "load.csv"), "share": 0.5}, **settings}
        provider = ServingProvider(name, ServingSettings.model_validate(given), context)
        opened.append(provider)  # type: ignore[arg-type]
        return provider

    return make


def hosts(provider: ServingProvider) -> list[Any]:
    return list(provider.hosts.values())


def token_of(provider: ServingProvider) -> str:
    return hosts(provider)[0]._http.headers["Authorization"].removeprefix("Bearer ")


def host_pids(context: ProviderContext) -> list[int]:
    return [
        p for p in processes_with(ELASTIC_RUN=context.run) if "stub_host.py" in " ".join(psutil.Process(p).cmdline())
    ]


async def lent(provider: ServingProvider, recorder: ProviderRecorder) -> None:
    await provider.start(recorder.emit)
    await recorder.until(lambda r: r.available)
    await recorder.leased(provider)


async def test_lends_the_host_with_the_least_kv_in_use(
    cluster: Callable[..., ServingProvider], context: ProviderContext, recorder: ProviderRecorder
) -> None:
    """Hosts report the use of real seconds."""
    provider = cluster(prompt=50_000, hosts=2, device={"prefill_tokens_per_s": 1e6})
    await recorder.offered(provider, 2)
    await recorder.leased(provider)
    reports = [host.report for host in hosts(provider)]
    assert all(report is not None for report in reports)
    by_use = sorted(reports, key=lambda report: report.kv_used_share)  # type: ignore[union-attr]
    assert [report.lent_worker for report in by_use] == ["worker-1", ""]  # type: ignore[union-attr]


async def test_a_host_is_chosen_by_its_use_over_a_window_and_not_by_a_moment(
    cluster: Callable[..., ServingProvider], recorder: ProviderRecorder
) -> None:
    """Hosts average their use over real seconds."""
    provider = cluster(hosts=2, kv_window_s=1000.0)
    await recorder.offered(provider, 2)
    busy_of_late, idle_of_late = hosts(provider)
    busy_of_late.kv_used_shares.extend([0.5] * 100 + [0.0])
    idle_of_late.kv_used_shares.extend([0.0] * 100 + [0.3])
    await recorder.leased(provider)
    assert provider.market.lent == {idle_of_late.name: "lease-1"}  # type: ignore[attr-defined]


async def test_a_host_under_pressure_is_not_offered(
    cluster: Callable[..., ServingProvider], recorder: ProviderRecorder
) -> None:
    """Hosts report the use of real seconds."""
    provider = cluster(prompt=190_000, hosts=2, device={"prefill_tokens_per_s": 1e6})
    await provider.start(recorder.emit)
    await eventually(lambda: any(host.report and host.report.pressed for host in hosts(provider)))
    await recorder.until(lambda r: r.available == 1)


async def test_a_host_that_dies_takes_its_lease_with_it(
    cluster: Callable[..., ServingProvider], context: ProviderContext, recorder: ProviderRecorder
) -> None:
    await lent(cluster(), recorder)
    (pid,) = host_pids(context)
    os.kill(pid, signal.SIGKILL)
    end = await recorder.ended("lease-1")
    assert end.cause is EndCause.LOST
    assert "serving-host-0" in end.detail
    assert recorder.available == 0


async def test_a_frozen_host_is_lost_in_time_and_killed(
    cluster: Callable[..., ServingProvider], recorder: ProviderRecorder
) -> None:
    provider = cluster(lost_after_s=0.2)
    await lent(provider, recorder)
    (pid,) = host_pids(provider.context)
    os.kill(pid, signal.SIGSTOP)
    assert (await recorder.ended("lease-1")).cause is EndCause.LOST
    assert processes_with(ELASTIC_RUN=provider.context.run) == []


@pytest.mark.parametrize(("how", "cause"), [("end", EndCause.RELEASED), ("fail", EndCause.LOST)])
async def test_the_lease_ends_with_the_worker(
    cluster: Callable[..., ServingProvider],
    recorder: ProviderRecorder,
    monkeypatch: pytest.MonkeyPatch,
    how: str,
    cause: EndCause,
) -> None:
    monkeypatch.setenv("ELASTIC_STUB_AGENT", how)
    await lent(cluster(), recorder)
    end = await recorder.ended("lease-1")
    assert end.cause is cause
    assert ("out of luck" in end.detail) is (how == "fail")
    await recorder.until(lambda r: r.available == 1)


@pytest.mark.slow
async def test_a_host_whose_worker_will_not_go_is_killed(
    cluster: Callable[..., ServingProvider],
    context: ProviderContext,
    recorder: ProviderRecorder,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ELASTIC_STUB_AGENT", "stubborn")
    provider = cluster()
    await lent(provider, recorder)
    await provider.release("lease-1")
    assert (await recorder.ended("lease-1")).cause is EndCause.RELEASED
    assert host_pids(context) == []


async def test_hosts_that_are_there_already_are_borrowed_and_a_loan_of_nobody_is_returned(
    cluster: Callable[..., ServingProvider],
    context: ProviderContext,
    recorder: ProviderRecorder,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The hosts of one provider stand for a cluster that another one borrows from by URL."""
    owner = cluster(name="owner")
    await owner.start(lambda _: None)
    monkeypatch.setenv("ELASTIC_SERVING_TOKEN", token_of(owner))
    borrowed = {"hosts": 0, "urls": [str(hosts(owner)[0]._http.base_url)]}
    borrower = cluster(**borrowed)
    await lent(borrower, recorder)
    with capture_logs() as logs:
        assert await cluster(**borrowed).adopt([], recorder.emit) == []
    assert any(line.get("what") == "worker-1" for line in logs)
    assert (await recorder.ended("lease-1")).cause is EndCause.RELEASED
    await recorder.until(lambda r: r.available == 1)
    await borrower.aclose()
    assert len(host_pids(context)) == 1


async def test_a_host_that_is_not_there_is_no_capacity(
    cluster: Callable[..., ServingProvider], recorder: ProviderRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ELASTIC_SERVING_TOKEN", "anything")
    with socket.create_server(("127.0.0.1", 0)) as closed:
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
    provider = cluster(hosts=0, urls=[url])
    with capture_logs() as logs:
        await provider.adopt([], recorder.emit)
    assert [line["host"] for line in logs] == [url]
    await provider.start(recorder.emit)
    await provider.acquire(lease_request())
    assert isinstance(await recorder.answered("lease-1"), LeaseRefused)
    assert recorder.available == 0


async def test_settings_that_can_give_nothing_are_named(
    cluster: Callable[..., ServingProvider], recorder: ProviderRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ELASTIC_SERVING_TOKEN", raising=False)
    with pytest.raises(ProviderUnavailable, match="set hosts"):
        await cluster(hosts=0).start(recorder.emit)
    with pytest.raises(ProviderUnavailable, match="ELASTIC_SERVING_TOKEN"):
        await cluster(hosts=0, urls=["https://host"]).start(recorder.emit)
    with pytest.raises(ValidationError, match="https"):
        cluster(urls=["http://elsewhere:8077"])
    with pytest.raises(ValidationError, match="no trace 'absent'"):
        cluster(load={"trace": "absent"})
