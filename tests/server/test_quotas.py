"""Quotas: shown, set, refused where a run could never begin, and kept by the runner."""

import dataclasses
import os
import signal
from typing import Any

import pytest

from elastic.protocol.api import AccessRole, RunPhase
from elastic.server.settings import ServerSettings
from elastic.server.store import runs
from tests.server.conftest import Site, Submission
from tests.server.test_runner import process_of, quick, row, running, submitted, until

__all__ = ["quick", "submitted"]
pytestmark = pytest.mark.filterwarnings("ignore:subprocess .* is still running:ResourceWarning")


def place(site: Site, project: str = "ours") -> str:
    return f"/v1/projects/{site.projects[project]}/quota"


def allow(site: Site, project: str = "ours", **limits: Any) -> dict[str, Any]:
    client, where = site.client(), place(site, project)
    answer = client.patch(where, json=limits, headers={"if-match": client.get(where).headers["etag"]})
    assert answer.status_code == 200, answer.text
    return answer.json()


def conditions(site: Site, run: str) -> dict[str, str]:
    return {one["type"]: one["reason"] for one in site.client().get(f"/v1/runs/{run}").json()["conditions"]}


def test_a_quota_is_set_by_the_servers_admins_and_seen_by_its_project(site: Site) -> None:
    own = site.member(AccessRole.VIEWER)
    assert own.get(place(site)).json()["gpus"] == {}
    assert site.member(AccessRole.ADMIN).patch(place(site), json={"runs": 9}).status_code == 403
    allow(site, gpus={"spot-replay": 8, "trainer": 2}, runs=3, usd_per_day=10.5, budget_usd=100, weight=2)
    allow(site, runs=None, usd_per_day=0)
    shown = own.get(place(site)).json()
    assert {key: shown[key] for key in ("gpus", "runs", "usd_per_day", "budget_usd", "weight")} == {
        "gpus": {"spot-replay": 8, "trainer": 2},
        "runs": None,
        "usd_per_day": 0.0,
        "budget_usd": 100.0,
        "weight": 2.0,
    }
    stale = site.client().patch(place(site), json={"runs": 1}, headers={"if-match": '"1"'})
    assert (stale.status_code, stale.json()["type"]) == (412, "/problems/precondition-failed")
    unknown = site.client().patch(place(site), json={"gpus": {"spot": 1}}, headers={"if-match": "*"})
    assert (unknown.status_code, unknown.json()["errors"][0]["pointer"]) == (400, "#/gpus/spot")
    assert "spot-replay" in unknown.json()["detail"]
    told = site.client().get("/v1/audit").json()["data"]
    assert [e["status"] for e in told if e["resource"] == place(site) and e["action"] == "server:write"] == [
        200,
        200,
        403,
    ]


def test_capacity_is_set_by_the_servers_admins(site: Site) -> None:
    where, client = "/v1/providers/spot-replay", site.client()
    assert client.get(where).json()["gpus"] is None
    etag = client.get(where).headers["etag"]
    assert client.patch(where, json={"gpus": 4}, headers={"if-match": etag}).json()["gpus"] == 4
    assert client.patch(where, json={"gpus": 5}, headers={"if-match": etag}).status_code == 412
    assert client.get(where).json()["gpus"] == 4
    assert client.patch("/v1/providers/none", json={"gpus": 4}, headers={"if-match": "*"}).status_code == 404


@pytest.mark.parametrize(
    ("limits", "pointer"),
    [
        ({"runs": 0}, "#/project"),
        ({"gpus": {"trainer": 0}}, "#/config/trainer/gpus"),
        ({"gpus": {"spot-replay": 0}}, "#/config/providers/spot"),
    ],
)
def test_what_could_never_begin_is_refused(
    site: Site, submission: Submission, limits: dict[str, Any], pointer: str
) -> None:
    allow(site, **limits)
    for path in ("/v1/runs", "/v1/runs/dry-run"):
        refused = site.client().post(path, json=submission(project="ours"))
        assert (refused.status_code, refused.json()["type"]) == (409, "/problems/quota-exceeded")
        assert [one["pointer"] for one in refused.json()["errors"]] == [pointer]
    assert site.client().post("/v1/runs", json=submission(project="theirs")).status_code == 201


@pytest.mark.parametrize(
    "limits", [{"budget_usd": False}, {"runs": True}, {"gpus": {"trainer": False}}, {"weight": "1"}]
)
def test_a_limit_is_a_number(site: Site, limits: dict[str, Any]) -> None:
    refused = site.client().patch(place(site), json=limits, headers={"if-match": "*"})
    assert (refused.status_code, refused.json()["type"]) == (400, "/problems/invalid-request")
    assert site.client().patch(place(site), json={"runs": 1.0}, headers={"if-match": "*"}).json()["runs"] == 1


@pytest.mark.parametrize("limits", [{"runs": 1}, {"gpus": {"trainer": 1}}])
async def test_runs_beyond_the_quota_wait(
    site: Site, quick: ServerSettings, submitted: Any, limits: dict[str, Any]
) -> None:
    allow(site, **limits)
    first, second, third = submitted(project="ours"), submitted(project="ours"), submitted(project="theirs")
    async with running(site, quick):
        pid = await process_of(site, quick, first)
        await process_of(site, quick, third)
        await until(lambda: conditions(site, second).get("QuotaAvailable") in ("RunsAtOnce", "TrainerGpus"))
        assert (row(site, second).phase, row(site, second).attempt) == (RunPhase.PENDING, 0)
        assert site.client().get(place(site)).json()["use"]["runs"] == 1
        os.kill(pid, signal.SIGUSR1)
        await process_of(site, quick, second)
        await until(lambda: "QuotaAvailable" not in conditions(site, second))


@pytest.mark.parametrize("limits", [{"runs": 1}, {"gpus": {"trainer": 1}}])
async def test_a_quota_that_is_lowered_has_the_last_runs_make_room(
    site: Site, quick: ServerSettings, submitted: Any, limits: dict[str, Any]
) -> None:
    first, second, third = (submitted(project="ours") for _ in range(3))
    async with running(site, quick):
        pids = [await process_of(site, quick, run) for run in (first, second, third)]
        allow(site, **limits)
        await until(lambda: all(row(site, run).phase is RunPhase.PENDING for run in (second, third)))
        assert conditions(site, third)["QuotaAvailable"] in ("RunsAtOnce", "TrainerGpus")
        assert row(site, second).wanted == runs.RUN
        os.kill(pids[0], signal.SIGUSR1)
        again = await process_of(site, quick, second, other_than=pids[1])
        assert row(site, third).phase is RunPhase.PENDING
    async with running(site, quick):
        lifted: dict[str, Any] = dict.fromkeys(limits)
        allow(site, **lifted)
        await process_of(site, quick, third, other_than=pids[2])
        known = row(site, second).identity
        assert known is not None
        assert known.pid == again
    assert row(site, second).restarts == row(site, third).restarts == 0


async def test_a_run_waits_for_its_slice_and_no_more_than_there_is_is_given(
    site: Site, quick: ServerSettings, submitted: Any
) -> None:
    first, second = submitted(project="ours"), submitted(project="ours")
    slice_usd = row(site, first).needs.slice_nano_usd / 1e9
    allow(site, budget_usd=1.5 * slice_usd)
    async with running(site, quick):
        pid = await process_of(site, quick, first)
        await until(lambda: conditions(site, second).get("QuotaAvailable") == "ProjectBudget")
        use = site.client().get(place(site)).json()["use"]
        assert use["allotted_usd"] == pytest.approx(slice_usd)
        told = row(site, first).told
        assert told is not None
        assert told.budget_usd == pytest.approx(slice_usd)
        os.kill(pid, signal.SIGUSR1)
        # It has cost nothing, and its slice comes back.
        await process_of(site, quick, second)
    assert site.client().get(place(site)).json()["use"]["allotted_usd"] == pytest.approx(slice_usd)
    async with running(site, quick):
        allow(site, budget_usd=None)
        await until(lambda: row(site, second).allotted_nano_usd is None)


async def test_a_stop_takes_effect_while_the_process_is_down(site: Site, quick: ServerSettings, submitted: Any) -> None:
    """It is taken up to give back what it holds, long before it would have been resumed."""
    run = submitted()
    slow = dataclasses.replace(quick, restart_base_s=3600.0, restart_max_s=3600.0, stop_patience_s=1.0)
    async with running(site, slow):
        pid = await process_of(site, slow, run)
        os.kill(pid, signal.SIGKILL)
        await until(lambda: row(site, run).phase is RunPhase.RESTARTING)
        site.client().post(f"/v1/runs/{run}/stop")
        await until(lambda: row(site, run).phase is RunPhase.STOPPED)
    assert row(site, run).attempt >= 2
    assert row(site, run).wanted == runs.STOP
