"""A run's processes outlive its orchestrator, and the next one takes over what is the run's and ends the rest.

The earlier orchestrator is a process that is killed (SIGKILL), wherever it is; see `first_incarnation`.
"""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from structlog.testing import capture_logs

from elastic.core.events import LeaseEnded, LeaseGranted, LeaseNotice
from elastic.core.types import NS_PER_S, EndCause
from elastic.testing.providers import CAPACITY, TIMEOUT_S, ProviderRecorder, eventually, lease_request, processes_with
from elastic.worker.serving_host import END_TIMEOUT_S
from providers.base import KnownLease, Provider
from tests.providers.conftest import context_of, provider_of
from tests.providers.first_incarnation import DEATHS, forks, main

WITH_PROCESSES = ["reserved", "trainer", "serverless", "spot"]
KINDS = [*WITH_PROCESSES, "serving", "pool"]
without_hosts = pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=[pytest.mark.nightly] if kind == "serving" else []) for kind in KINDS],
    indirect=True,
)
"""Hosts, which take seconds to start, are tried nightly: what becomes of them with every change is shown by those that
live on, that nobody speaks to, and whose worker has ended."""

pytestmark = pytest.mark.usefixtures("stub_pool")


class Incarnations:
    """A run in a directory, whose first orchestrator has died by the time that `first` returns."""

    def __init__(self, kind: str, run_dir: Path, opened: list[Provider]) -> None:
        self.kind = kind
        self.began_ns = time.monotonic_ns()
        self.context = context_of(f"test-{os.getpid()}-{run_dir.name}", run_dir, self.began_ns)
        self._opened = opened

    async def first(self, leases: int = 1, death: str = "none", **settings: Any) -> None:
        """Killed once all the leases' workers run, unless it has died by itself before."""
        heard, told = forks().Pipe(duplex=False)
        process = forks().Process(
            target=main,
            daemon=True,
            args=(self.context.run, self.context.run_dir, self.began_ns),
            kwargs={
                "kind": self.kind,
                "leases": leases,
                "death": death,
                "settings": settings,
                "variables": {name: value for name, value in os.environ.items() if name.startswith("ELASTIC_")},
                "told": told,
            },
        )
        process.start()
        told.close()
        if death == "none":
            for _ in range(leases):
                assert await asyncio.to_thread(heard.poll, TIMEOUT_S)
                assert heard.recv().startswith("lease-")
            if not (settings.get("boot_delay_s") or settings.get("cold_start_s")):
                await eventually(lambda: all(len(self.pids(number + 1)) == self.width for number in range(leases)))
            process.kill()
        await asyncio.to_thread(process.join, TIMEOUT_S)
        assert process.exitcode == -signal.SIGKILL
        process.close()
        heard.close()

    @property
    def width(self) -> int:
        """Processes of a lease: the worker and its child; a host has none for a loan, and the pool's stub no child."""
        return {"serving": 0, "pool": 1}.get(self.kind, 2)

    def pids(self, number: int = 0) -> list[int]:
        worker = {"ELASTIC_WORKER": f"worker-{number}"} if number else {}
        return sorted(processes_with(ELASTIC_RUN=self.context.run, **worker))

    def next(self, **settings: Any) -> Any:
        provider = provider_of(self.kind, self.context, **settings)
        self._opened.append(provider)
        return provider

    def boots_at_ns(self) -> int:
        record = msgspec.json.decode((self.context.run_dir / "leases" / "lease-1.json").read_bytes())
        return int(record["kept"]["boots_at_ns"])

    def left(self) -> list[str]:
        return [path.name for path in (self.context.run_dir / "leases").glob("*")]


def known(number: int = 1, *, granted: bool = True, expires_at_ns: int | None = None) -> KnownLease:
    return KnownLease(request=lease_request(number), granted=granted, expires_at_ns=expires_at_ns)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
async def incarnations(
    kind: str, stub_pool: None, tmp_path: Path, opened: list[Provider]
) -> AsyncIterator[Incarnations]:
    incarnations = Incarnations(kind, tmp_path, opened)
    yield incarnations
    for pid in incarnations.pids():
        os.kill(pid, signal.SIGKILL)


async def test_what_lives_goes_on_as_it_is_and_is_given_back_by_the_next(
    incarnations: Incarnations, recorder: ProviderRecorder
) -> None:
    await incarnations.first(leases=2)
    before = incarnations.pids()
    provider = incarnations.next()
    assert await provider.adopt([known(1), known(2)], recorder.emit) == []
    await provider.start(recorder.emit)
    assert incarnations.pids() == before
    for number in (1, 2):
        assert recorder.of(LeaseEnded) == []
        await provider.acquire(lease_request(9))
        assert not isinstance(await recorder.answered("lease-9"), LeaseGranted)
        recorder.events.clear()
        await provider.release(f"lease-{number}")
        assert (await recorder.ended(f"lease-{number}")).cause is EndCause.RELEASED
        assert incarnations.pids(number) == []
        await provider.acquire(lease_request(number + 2))
        assert isinstance(await recorder.answered(f"lease-{number + 2}"), LeaseGranted)
        recorder.events.clear()
    await provider.aclose()
    assert (incarnations.pids(), incarnations.left()) == ([], [])


@without_hosts
async def test_what_the_run_does_not_know_is_ended_and_named(
    incarnations: Incarnations, recorder: ProviderRecorder
) -> None:
    await incarnations.first(leases=2)
    with capture_logs() as logs:
        provider = incarnations.next()
        assert await provider.adopt([known(2)], recorder.emit) == []
    named = [line["what"] for line in logs if line["event"] == "left over from an earlier process"]
    assert named in (["lease-1"], ["worker-1"])
    assert incarnations.pids(1) == []
    await provider.start(recorder.emit)
    await recorder.until(lambda r: r.available == CAPACITY - 1)
    assert recorder.of(LeaseEnded) == []


@without_hosts
async def test_another_run_and_another_provider_touch_nothing(
    incarnations: Incarnations, recorder: ProviderRecorder
) -> None:
    await incarnations.first()
    before = incarnations.pids()
    foreign = msgspec.structs.replace(incarnations.context, run="another run")
    await provider_of(incarnations.kind, foreign).adopt([], recorder.emit)
    assert incarnations.pids() == before


@without_hosts
async def test_what_died_meanwhile_ends_with_its_cause(incarnations: Incarnations, recorder: ProviderRecorder) -> None:
    """Real processes die while no provider looks, and the next one must say why."""
    await incarnations.first()
    for pid in incarnations.pids(1) or incarnations.pids():
        os.kill(pid, signal.SIGKILL)
    await eventually(lambda: not incarnations.pids(1))
    provider = incarnations.next()
    assert await provider.adopt([known()], recorder.emit) == []
    await provider.start(recorder.emit)
    ended = await recorder.ended("lease-1")
    assert ended.cause is EndCause.LOST
    assert ended.detail
    assert "status" not in ended.detail
    await recorder.until(lambda r: r.available == CAPACITY)


@without_hosts
async def test_what_dies_later_is_noticed(incarnations: Incarnations, recorder: ProviderRecorder) -> None:
    await incarnations.first()
    provider = incarnations.next()
    await provider.adopt([known()], recorder.emit)
    await provider.start(recorder.emit)
    assert recorder.of(LeaseEnded) == []
    for pid in incarnations.pids(1) or incarnations.pids():
        os.kill(pid, signal.SIGKILL)
    assert (await recorder.ended("lease-1")).cause is EndCause.LOST
    assert incarnations.pids(1) == []


@without_hosts
async def test_what_nothing_is_left_of_is_over_or_may_be_asked_for_again(
    incarnations: Incarnations, recorder: ProviderRecorder
) -> None:
    provider = incarnations.next()
    late = known(3, expires_at_ns=incarnations.context.now_ns())
    assert await provider.adopt([known(1), known(2, granted=False), late], recorder.emit) == ["lease-2"]
    assert [(e.lease, e.cause) for e in recorder.of(LeaseEnded)] == [
        ("lease-1", EndCause.LOST),
        ("lease-3", EndCause.EXPIRED),
    ]
    await recorder.offered(provider, CAPACITY)
    await recorder.leased(provider, 2)


@without_hosts
@pytest.mark.parametrize("death", DEATHS)
async def test_wherever_it_is_killed_a_lease_is_had_once_or_not_at_all(
    incarnations: Incarnations, recorder: ProviderRecorder, death: str
) -> None:
    """Real processes of each kind of provider are killed at each point, and adopted by the next one."""
    await incarnations.first(death=death)
    provider = incarnations.next()
    unheard = await provider.adopt([known(granted=False)], recorder.emit)
    await provider.start(recorder.emit)
    if unheard:
        assert unheard == ["lease-1"]
        assert incarnations.pids(1) == []
        await recorder.until(lambda r: r.available == CAPACITY)
        await recorder.leased(provider)
    await eventually(lambda: len(incarnations.pids(1)) == incarnations.width)
    assert len(recorder.of(LeaseGranted)) == 1
    if incarnations.kind == "serving":
        assert (
            len([pid for pid in incarnations.pids() if "stub_host" in " ".join(psutil.Process(pid).cmdline())])
            == CAPACITY
        )
    await provider.aclose()
    assert (await recorder.ended("lease-1")).cause is EndCause.RELEASED
    assert (incarnations.pids(), incarnations.left()) == ([], [])


@pytest.mark.parametrize("ended_before", [False, True])
@without_hosts
async def test_what_a_byzantine_worker_stood_on_stays_out_for_the_next(
    incarnations: Incarnations, recorder: ProviderRecorder, *, ended_before: bool
) -> None:
    """Whether its lease had ended, or goes on for a while. Where each lease is another machine, all is to be had, and
    the trainer's is that of a run which somebody has resumed."""
    first = incarnations.next()
    await recorder.offered(first, CAPACITY)
    await recorder.leased(first)
    first.bar("lease-1")
    if ended_before:
        await first.release("lease-1")
        await recorder.ended("lease-1")
    provider, heard = incarnations.next(), ProviderRecorder()
    await provider.adopt([] if ended_before else [known()], heard.emit)
    await provider.start(heard.emit)
    if not ended_before:
        await provider.release("lease-1")
        await heard.ended("lease-1")
    left = CAPACITY if incarnations.kind in ("serverless", "trainer", "pool") else CAPACITY - 1
    await heard.until(lambda r: r.available == left)
    for number in range(2, 2 + left):
        await heard.leased(provider, number)
    assert heard.available == 0


@pytest.mark.parametrize("kind", ["spot", "serverless"], indirect=True)
async def test_a_worker_that_had_yet_to_boot_does_so_when_it_would_have(
    incarnations: Incarnations, recorder: ProviderRecorder
) -> None:
    delay: dict[str, Any] = {"boot_delay_s" if incarnations.kind == "spot" else "cold_start_s": 2.0}
    await incarnations.first(**delay)
    assert incarnations.pids() == []
    boots_at_ns, died_ns = incarnations.boots_at_ns(), incarnations.context.now_ns()
    assert boots_at_ns < died_ns + 2 * NS_PER_S
    await incarnations.next(**delay).adopt([known()], recorder.emit)
    await eventually(lambda: len(incarnations.pids(1)) == incarnations.width)
    assert incarnations.context.now_ns() > boots_at_ns
    assert incarnations.boots_at_ns() == boots_at_ns
    assert recorder.of(LeaseEnded) == []


@pytest.mark.parametrize("kind", ["serverless"], indirect=True)
@pytest.mark.parametrize("left_s", [-1.0, 0.2])
async def test_a_call_ends_when_it_would_have_whoever_listens(
    incarnations: Incarnations, recorder: ProviderRecorder, left_s: float
) -> None:
    await incarnations.first()
    provider = incarnations.next()
    expires_at_ns = incarnations.context.now_ns() + round(left_s * NS_PER_S)
    await provider.adopt([known(expires_at_ns=expires_at_ns)], recorder.emit)
    assert (await recorder.ended("lease-1")).cause is EndCause.EXPIRED
    assert incarnations.context.now_ns() >= expires_at_ns
    assert incarnations.pids() == []


@pytest.mark.parametrize("kind", ["spot"], indirect=True)
@pytest.mark.parametrize("notice_s", [0.0, 600.0])
async def test_the_market_goes_on_without_the_run(
    incarnations: Incarnations, recorder: ProviderRecorder, notice_s: float
) -> None:
    await incarnations.first(leases=2, notice_s=notice_s)
    removed_ms = incarnations.context.now_ns() * 1000 // NS_PER_S
    # Nobody could have known before: what the earlier process read had the instance for longer.
    market = f"0,add,a\n0,add,b\n{removed_ms},remove,a\n600000000,add,c\n"
    (incarnations.context.run_dir / "market.csv").write_text(market)
    removed_ns = removed_ms * NS_PER_S // 1000
    survivors = incarnations.pids(2)
    provider = incarnations.next(notice_s=notice_s)
    assert await provider.adopt([known(1), known(2)], recorder.emit) == []
    await provider.start(recorder.emit)
    if notice_s:
        (notice,) = recorder.of(LeaseNotice)
        assert notice.deadline_ns == removed_ns + notice_s * NS_PER_S
        await provider.release("lease-1")
    ended = await recorder.ended("lease-1")
    assert ended.cause is EndCause.PREEMPTED
    assert "instance a back while nobody listened" in ended.detail
    assert incarnations.pids() == survivors
    assert recorder.available == 0


@pytest.mark.parametrize("kind", ["serving"], indirect=True)
async def test_a_loan_whose_worker_ended_meanwhile_has_its_own_cause(
    incarnations: Incarnations, recorder: ProviderRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ELASTIC_STUB_AGENT", "fail")
    await incarnations.first()
    provider = incarnations.next()
    assert await provider.adopt([known()], recorder.emit) == []
    assert "out of luck" in (await recorder.ended("lease-1")).detail


@pytest.mark.parametrize("kind", ["serving"], indirect=True)
async def test_a_host_that_nobody_speaks_to_ends_with_its_worker(incarnations: Incarnations) -> None:
    await incarnations.first(orchestrator_timeout_s=1.0)
    await eventually(lambda: not incarnations.pids())


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["serving"], indirect=True)
async def test_a_host_that_nobody_speaks_to_ends_even_if_its_worker_will_not(
    incarnations: Incarnations, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ELASTIC_STUB_AGENT", "stubborn")
    await incarnations.first(orchestrator_timeout_s=1.0)
    async with asyncio.timeout(2 * END_TIMEOUT_S):
        while incarnations.pids():  # noqa: ASYNC110 - processes, which cannot tell us
            await asyncio.sleep(0.1)
