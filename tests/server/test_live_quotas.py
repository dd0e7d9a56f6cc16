"""Real runs under one runner: they take turns on what is scarce, and live on slices of their project's budget."""

import asyncio
import contextlib
import dataclasses
import os
import signal
import tomllib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from elastic.core.ledger import NANO_USD_PER_USD
from elastic.protocol.api import RunPhase
from elastic.server.quotas import needs
from elastic.server.runner import RunnerLoop
from elastic.server.settings import ServerSettings
from elastic.server.store import runs
from elastic.server.store.runs import HostedRunRow
from elastic.system.processes import identity
from tests.server.conftest import CONFIG, Site, make_site

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.slow,
    pytest.mark.alone,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore:subprocess .* is still running:ResourceWarning"),
]
PERIOD_S = 24.0
WAIT_S = 240.0


@pytest.fixture
def live(tmp_path: Path, checkpoint: Path) -> Iterator[Site]:
    made = make_site(tmp_path, "")
    made = dataclasses.replace(
        made, settings=dataclasses.replace(made.settings, tick_s=0.1, observe_s=0.3, fair_share_period_s=PERIOD_S)
    )
    made.app.state.server.settings = dataclasses.replace(made.settings, models=(checkpoint.parent,))
    yield made
    with made.store.reading() as connection:
        known = [run.identity for run in runs.managed(connection)]
    for process in known:
        if process is not None and identity(process.pid) == process:
            os.kill(process.pid, signal.SIGTERM)
    made.store.close()


@contextlib.asynccontextmanager
async def attended(site: Site, settings: ServerSettings) -> AsyncIterator[None]:
    task = asyncio.create_task(RunnerLoop(site.store, settings).run())
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def submit(site: Site, checkpoint: Path, **sections: dict[str, Any]) -> str:
    config = tomllib.loads(CONFIG.replace('"policy"', f'"{checkpoint.name}"').replace("steps = 2", "steps = 100000"))
    for name, section in sections.items():
        config.setdefault(name, {}).update(section)
    answer = site.client().post("/v1/runs", json={"config": config, "providers": ["spot"], "project": "ours"})
    assert answer.status_code == 201, answer.text
    return answer.json()["id"]


def row(site: Site, run: str) -> HostedRunRow:
    with site.store.reading() as connection:
        found = runs.find(connection, run)
    assert found is not None
    return found


async def until(holds: Any, within_s: float = WAIT_S) -> Any:
    async with asyncio.timeout(within_s):
        while not (found := holds()):  # noqa: ASYNC110 - other processes are waited for
            await asyncio.sleep(0.1)
        return found


async def stopped(site: Site, *names: str) -> None:
    for run in names:
        site.client().post(f"/v1/runs/{run}/stop")
    await until(lambda: all(row(site, run).ended for run in names))


async def test_three_runs_take_turns_on_one_gpu(live: Site, checkpoint: Path) -> None:
    client = live.client()
    where = "/v1/providers/spot-replay"
    etag = client.get(where).headers["etag"]
    assert client.patch(where, json={"gpus": 1}, headers={"if-match": etag}).status_code == 200
    begins = {"spot": {"trace": "rlboost-a", "max_workers": 1, "start_s": 700.0}}
    names = [submit(live, checkpoint, providers=begins) for _ in range(3)]
    most: list[int] = []

    def all_served() -> bool:
        with live.store.reading() as connection:
            found = {run.id: run for run in runs.managed(connection)}
        known = [said.caps.get("spot", 1) for run in found.values() for said in [run.told or run.limits] if said]
        most.append(sum(known))
        return all(client.get(f"/v1/runs/{run}/leases").text.count('"spot-') for run in names)

    async with attended(live, live.settings):
        await until(lambda: all(row(live, run).phase is RunPhase.RUNNING for run in names))
        await until(all_served)
        assert max(most) <= 1
        reasons = {one["reason"] for run in names for one in client.get(f"/v1/runs/{run}").json()["conditions"]}
        assert "FairShare" in reasons
        await stopped(live, *names)


async def test_a_project_budget_is_given_in_slices_and_never_exceeded(
    live: Site, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(needs, "SLICE_S", 1.0)
    quick = {"drain_timeout_s": 2.0, "release_timeout_s": 2.0}
    run = submit(live, checkpoint, scheduler=quick, trainer={"usd_per_gpu_hour": 36.0}, providers={})
    slice_usd = row(live, run).needs.slice_nano_usd / NANO_USD_PER_USD
    client, where = live.client(), f"/v1/projects/{live.projects['ours']}/quota"
    budget_usd = round(5 * slice_usd, 4)
    client.patch(where, json={"budget_usd": budget_usd}, headers={"if-match": "*"})
    numbers: set[int] = set()

    def waits() -> bool:
        now = row(live, run)
        numbers.add(now.limits_number)
        assert (now.allotted_nano_usd or 0) <= budget_usd * NANO_USD_PER_USD
        return now.phase is RunPhase.PENDING and now.waits is not None and now.attempt > 0

    async with attended(live, live.settings):
        await until(lambda: row(live, run).phase is RunPhase.RUNNING)
    async with attended(live, live.settings):  # Another server: what is told is told once.
        await until(waits)
        assert len(numbers) >= 3
        use = client.get(where).json()["use"]
        assert 0.3 * budget_usd < use["allotted_usd"] <= budget_usd
        assert client.get(f"/v1/runs/{run}").json()["figures"]["usd"] <= budget_usd
        step = row(live, run).figures.step
        client.patch(where, json={"budget_usd": 10 * budget_usd}, headers={"if-match": "*"})
        await until(lambda: row(live, run).figures.step > step)
        assert row(live, run).restarts == 0
        await stopped(live, run)
    final = row(live, run)
    assert final.allotted_nano_usd == final.cost_nano_usd >= final.figures.usd * NANO_USD_PER_USD - 1
