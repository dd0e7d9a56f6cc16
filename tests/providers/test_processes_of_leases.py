"""What every provider promises whose leases are processes of this machine, besides the conformance suite."""

from collections.abc import Callable

import psutil
import pytest

from elastic.core.types import EndCause
from elastic.testing.provider_conformance import MakeProvider, grant, recorded
from elastic.testing.providers import CAPACITY, ProviderRecorder, eventually, processes_with
from providers.base import Provider, ProviderContext
from tests.providers.test_conformance import kind, make_provider

__all__ = ["kind", "make_provider"]

WITH_PROCESSES = ["reserved", "serverless", "spot"]
"""Whose leases are processes; a serving host's are inside a process that goes on without them, a pool's are its own."""


def booted(context: ProviderContext) -> Callable[[], bool]:
    """Whether the first lease's worker runs, with the child it starts."""
    return lambda: len(processes_with(ELASTIC_RUN=context.run, ELASTIC_WORKER="worker-1")) == 2


@pytest.mark.parametrize("kind", WITH_PROCESSES, indirect=True)
async def test_no_process_outlives_its_lease(
    provider: Provider, context: ProviderContext, recorder: ProviderRecorder
) -> None:
    lease = await grant(provider, recorder)
    await eventually(booted(context))
    await provider.release(lease)
    await recorder.ended(lease)
    assert processes_with(ELASTIC_WORKER="worker-1", ELASTIC_RUN=context.run) == []


@pytest.mark.parametrize("kind", [*WITH_PROCESSES, "trainer"], indirect=True)
async def test_a_worker_that_dies_is_reported_lost(
    provider: Provider, context: ProviderContext, recorder: ProviderRecorder
) -> None:
    lease = await grant(provider, recorder)
    await eventually(booted(context))
    workers = [psutil.Process(pid) for pid in processes_with(ELASTIC_RUN=context.run, ELASTIC_WORKER="worker-1")]
    min(workers, key=lambda worker: worker.create_time()).kill()
    end = await recorder.ended(lease)
    assert end.cause is EndCause.LOST
    assert "SIGKILL" in end.detail
    assert "log" in end.detail
    assert processes_with(ELASTIC_RUN=context.run) == []
    await recorder.until(lambda r: r.available == CAPACITY)


@pytest.mark.parametrize("kind", [*WITH_PROCESSES, "serving"], indirect=True)
async def test_secrets_are_not_in_any_command_line_or_record(
    provider: Provider, context: ProviderContext, recorder: ProviderRecorder
) -> None:
    """A real worker starts: its command line is read from the system."""
    await grant(provider, recorder)
    await eventually(lambda: recorded(context))
    for process in psutil.process_iter(["cmdline"]):
        assert "secret-1" not in " ".join(process.info["cmdline"] or [])
    written = [path for path in context.run_dir.rglob("*") if path.is_file()]
    assert recorded(context)[0] in written
    assert not any(b"secret-1" in path.read_bytes() for path in written)


@pytest.mark.parametrize("kind", WITH_PROCESSES, indirect=True)
async def test_a_worker_that_leaves_by_itself_has_given_its_lease_back(
    make_provider: MakeProvider,
    make_context: Callable[..., ProviderContext],
    recorder: ProviderRecorder,
    opened: list[Provider],
) -> None:
    provider = make_provider(make_context(worker="pass"))
    opened.append(provider)
    await recorder.offered(provider, CAPACITY)
    lease = await grant(provider, recorder)
    assert (await recorder.ended(lease)).cause is EndCause.RELEASED
