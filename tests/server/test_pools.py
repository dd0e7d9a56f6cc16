"""Pools over the API: jobs go to the pool's socket, each project sees its own, scripts stay outside."""

import contextlib
import dataclasses
import hashlib
import json
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import sqlalchemy as sa
from pydantic import BaseModel

from elastic.compose.runs import load_run_config
from elastic.config import Config
from elastic.core.cluster import events as e
from elastic.core.cluster.types import PhaseKind
from elastic.protocol.api import AccessRole, RunPhase
from elastic.protocol.api_client import ApiError, Client
from elastic.server.api.app import create_app
from elastic.server.api.job_limits import BEHIND, WAITING_MAX, admit_waiting, waiting_projects
from elastic.server.pools import settle_jobs
from elastic.server.quotas.budgets import US_PER_DAY
from elastic.server.retention import records as retention
from elastic.server.retention.rules import REMOVING, RUN
from elastic.server.runner.retiring import retire
from elastic.server.store import jobs as stored_jobs
from elastic.server.store import people, runs, tables, uploads, webhooks
from elastic.server.store.database import now_us
from elastic.server.store.tables import metadata
from elastic.system.isolation import IsolatedLoop, LoopFaults
from tests.pool.stand_in import POOL, StandIn
from tests.server.conftest import CONFIG, Site, Submission, served
from tests.server.test_streams import journal_of, sse, write
from tests.server.test_uploads import announce, send

JOBS = "/v1/pools/lab/jobs"
JOB = {"rollout_memory_gb": 1, "train_memory_gb": 1, "slo": 2.0, "plan": {"rollout_s": 10, "train_s": 10}}


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[StandIn]:
    file = tmp_path / "pool.toml"
    file.write_text(POOL.format(directory=tmp_path))
    with StandIn(file) as found:
        yield found


@pytest.fixture
def pooled(site: Site, pool: StandIn) -> Site:
    settings = dataclasses.replace(site.settings, pools=(pool.directory,))
    return dataclasses.replace(site, settings=settings, app=create_app(site.store, settings))


@pytest.fixture
def ours(pooled: Site) -> httpx.Client:
    """Somebody who may run jobs in a project."""
    return pooled.member(AccessRole.RUNNER)


def limit(site: Site, **limits: Any) -> None:
    """Give the project a quota."""
    where = f"/v1/projects/{site.projects['ours']}/quota"
    answer = site.client().patch(where, json=limits, headers={"if-match": "*"})
    assert answer.status_code == 200, answer.text


@pytest.fixture
def job(submission: Submission) -> dict[str, Any]:
    body = submission()
    return {"config": {**body["config"], "job": JOB}, "providers": ["spot"]}


def test_a_job_goes_to_the_pool_and_its_project_alone_sees_it(pooled: Site, pool: StandIn, job: dict[str, Any]) -> None:
    ours, theirs = (pooled.member(AccessRole.RUNNER, name) for name in ("ours", "theirs"))
    made = ours.post(JOBS, json=job | {"slo": 1.5})
    assert made.status_code == 201, made.text
    name = made.json()["id"]
    (sent,) = pool.submitted
    assert (sent.request.id, sent.request.slo, sent.entry.providers, sent.entry.script) == (name, 1.5, ("spot",), ())
    run_dir = Path(sent.entry.directory)
    assert run_dir.parent.name == pooled.projects["ours"]
    assert load_run_config(run_dir).model.checkpoint.is_absolute()
    assert made.headers["location"] == f"{JOBS}/{name}"
    assert made.json()["project"] == pooled.projects["ours"]
    assert [one["id"] for one in ours.get(JOBS).json()["data"]] == [name]
    assert theirs.get(JOBS).json()["data"] == []
    for path in (f"{JOBS}/{name}", f"{JOBS}/{name}/cancel", f"{JOBS}/{name}/resubmit"):
        method = "GET" if path.endswith(name) else "POST"
        assert theirs.request(method, path).json()["type"] == "/problems/not-found"
    assert ours.get("/v1/pools").json()["data"][0]["groups"][0]["members"] == [name]
    pool.tell(e.PhaseAsked(job=name, phase=PhaseKind.ROLLOUT), at_s=3.0)
    (permit,) = pool.cluster.permits
    pool.tell(e.PermitYielded(job=name, permit=permit, finished=True), at_s=13.0)
    for client, called in ((ours, name), (theirs, "another project's")):
        (turn,) = client.get("/v1/pools/lab/turns").json()["data"]
        assert turn == {"node": "rollout-1", "job": called, "since_s": 3.0, "until_s": 13.0}
    assert ours.get("/v1/pools/lab/turns?after_s=13").json()["data"] == []
    seen = theirs.get("/v1/pools/lab").json()
    assert seen["groups"][0]["members"] == ["another project's"]
    assert name not in str(seen)
    assert pooled.client().get(JOBS).json()["data"][0]["id"] == name


def test_what_is_repeated_under_its_key_is_done_once(pool: StandIn, ours: httpx.Client, job: dict[str, Any]) -> None:
    first, second = (ours.post(JOBS, json=job, headers={"idempotency-key": "k"}) for _ in range(2))
    assert first.json()["id"] == second.json()["id"]
    assert len(pool.cluster.jobs) == 1
    other = ours.post(JOBS, json=job | {"slo": 3.0}, headers={"idempotency-key": "k"})
    assert other.json()["type"] == "/problems/idempotency-mismatch"


def test_a_dry_run_starts_nothing(pool: StandIn, ours: httpx.Client, job: dict[str, Any]) -> None:
    ours.post(JOBS, json=job)
    found = ours.post(f"{JOBS}/dry-run", json=job | {"slo": 1.01}).json()
    assert found["placement"]["planned_slowdown"] <= 1.01
    assert found["placement"]["members"] is None
    assert len(pool.submitted) == 1


@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        ({"slo": 0.5}, "invalid-request", "#/slo"),
        ({"script": ["python", "train.py"]}, "invalid-request", "#/script"),
        ({"providers": ["moon"]}, "invalid-configuration", "unknown"),
        ({"job": {**JOB, "train_nodes": 2}}, "job-rejected", "needed 2 train nodes; largest: 1"),
        ({"job": {**JOB, "rollout_memory_gb": 3}}, "job-rejected", "needed 3000000000 bytes"),
        ({"engine": {"kind": "vllm", "vllm": {"tensor_parallel": 2}}}, "job-rejected", "needed 2 GPUs for a worker"),
        ({"job": {**JOB, "slo": 0}}, "invalid-configuration", "job.slo"),
        ({"run": {"directory": "/tmp"}}, "invalid-configuration", "run/directory"),
    ],
)
def test_what_is_no_job_leaves_nothing(
    pooled: Site, pool: StandIn, ours: httpx.Client, job: dict[str, Any], change: dict[str, Any], kind: str, words: str
) -> None:
    for section in ("job", "run", "engine"):
        if section in change:
            job["config"][section] = job["config"].get(section, {}) | change.pop(section)
    answer = ours.post(JOBS, json=job | change)
    assert answer.json()["type"] == f"/problems/{kind}", answer.text
    assert words.replace(".", "/") in answer.text or words in answer.text
    assert not pool.submitted
    assert not list(pooled.settings.pooled.glob("*/*"))


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ({"runs": 0}, "the project may have no runs"),
        ({"gpus": {"trainer": 0}}, "its trainer takes 1 GPUs; the project may have 0 in trainers"),
        ({"gpus": {"spot-replay": 0}}, "a lease has 1 GPUs of spot-replay; the project may have 0"),
    ],
)
def test_a_job_that_its_project_s_quota_never_allows_is_refused(
    pooled: Site, pool: StandIn, ours: httpx.Client, job: dict[str, Any], limits: dict[str, Any], words: str
) -> None:
    limit(pooled, **limits)
    for path in (JOBS, f"{JOBS}/dry-run"):
        refused = ours.post(path, json=job)
        assert (refused.status_code, refused.json()["type"]) == (409, "/problems/quota-exceeded"), refused.text
        assert words in refused.json()["detail"]
    assert not pool.commands


def admit(site: Site) -> None:
    """Let jobs of all projects begin, as far as their quotas allow."""
    for project in waiting_projects(site.store, site.settings):
        admit_waiting(site.store, site.settings, project)


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ({"runs": 1}, "the project has 1 of 1 runs and jobs at once"),
        ({"gpus": {"trainer": 1}}, "the job trains on 1 GPUs; the project has 1 of 1 in trainers"),
        ({"budget_usd": 1.0}, "the project's $1 are spent by jobs, or spent by runs or allotted to them"),
    ],
)
def test_jobs_beyond_their_project_s_quota_wait_and_begin_in_their_order(
    pooled: Site, pool: StandIn, job: dict[str, Any], limits: dict[str, Any], words: str
) -> None:
    ours, theirs = (pooled.member(AccessRole.RUNNER, name) for name in ("ours", "theirs"))

    def now(name: str) -> tuple[str, str, int | None]:
        admit(pooled)
        found = ours.get(f"{JOBS}/{name}").json()
        return found["state"], found["reason"], found["queue_place"]

    first = ours.post(JOBS, json=job).json()["id"]
    pool.tell(e.TimePassed(), at_s=3600.0)
    limit(pooled, **limits)
    assert ours.post(f"{JOBS}/dry-run", json=job).json()["why"] == f"it would wait for its quota: {words}"
    second, third = (ours.post(JOBS, json=job).json() for _ in range(2))
    assert (second["state"], second["reason"], second["beyond_quota"]) == ("queued", words, True)
    third = third["id"]
    assert theirs.post(JOBS, json=job).json()["state"] == "running"
    assert (now(second["id"]), now(third)) == (("queued", words, 1), ("queued", BEHIND, 2))
    with pooled.store.writing() as tx:
        # As of two that came at once, of which the pool heard the other way round.
        stored_jobs.note_again(tx, second["id"])
    if "budget_usd" in limits:
        limit(pooled, budget_usd=100.0)
        assert [now(name)[0] for name in (second["id"], third)] == ["running", "running"]
        return
    assert ours.post(f"{JOBS}/{first}/cancel").status_code == 200
    assert [now(name)[0] for name in (second["id"], third)] == ["running", "queued"]
    assert ours.post(f"{JOBS}/{second['id']}/cancel").status_code == 200
    assert now(third)[0] == "running"


def test_only_so_many_jobs_of_a_project_wait_for_its_quota(
    pooled: Site, pool: StandIn, ours: httpx.Client, job: dict[str, Any]
) -> None:
    limit(pooled, runs=1)
    with pooled.store.writing() as tx:
        for number in range(WAITING_MAX):
            stored_jobs.insert(tx, f"job_{number}", pooled.projects["ours"], "lab", "", "{}", 1, BEHIND)
    refused = ours.post(JOBS, json=job)
    assert (refused.status_code, refused.json()["type"]) == (409, "/problems/quota-exceeded")
    assert refused.json()["detail"] == "1000 jobs of the project wait for it; allowed: 1000"
    assert pooled.member(AccessRole.RUNNER, "theirs").post(JOBS, json=job).json()["state"] == "running"


def test_roles_and_names(pooled: Site, pool: StandIn, job: dict[str, Any]) -> None:
    viewer = pooled.member(AccessRole.VIEWER)
    assert viewer.get(JOBS).status_code == 200
    assert viewer.post(JOBS, json=job).json()["type"] == "/problems/forbidden"
    assert viewer.get("/v1/pools/other").json()["type"] == "/problems/not-found"
    assert viewer.get(f"{JOBS}/nobody").json()["type"] == "/problems/not-found"
    admin = pooled.member(AccessRole.ADMIN)
    assert admin.post(JOBS, json=job).json()["state"] == "running"
    for empty in ("", "%20"):
        for path in (f"{JOBS}/{empty}/cancel", f"{JOBS}/{empty}/resubmit", f"/v1/pools/lab/nodes/{empty}/drain"):
            assert pooled.client().post(path).status_code == 404
        assert viewer.get(f"{JOBS}/{empty}/logs").status_code == 404
    assert [one["state"] for one in viewer.get(JOBS).json()["data"]] == ["running"]


def test_who_looks_after_the_server_drains_a_pool_s_node(pooled: Site, pool: StandIn) -> None:
    place = "/v1/pools/lab/nodes/rollout-2/drain"
    refused = pooled.member(AccessRole.ADMIN).post(place)
    assert (refused.status_code, refused.json()["type"]) == (403, "/problems/forbidden")
    client = pooled.client()
    first, second = (client.post(place, headers={"idempotency-key": "k"}) for _ in range(2))
    assert (first.status_code, second.text) == (200, first.text), first.text
    assert [node["name"] for node in first.json()["nodes"]] == ["rollout-1", "train-1"]
    assert len(pool.commands) == 1
    noted = [entry for entry in client.get("/v1/audit").json()["data"] if entry["resource"] == place]
    assert [entry["status"] for entry in noted] == [200, 403]
    gone = client.post(place)
    assert (gone.status_code, gone.json()["type"]) == (404, "/problems/not-found")
    assert "is no node of another machine" in gone.json()["detail"]


def test_a_project_with_a_user_of_its_own_has_no_jobs_here(pooled: Site, job: dict[str, Any]) -> None:
    with pooled.store.writing() as tx:
        project = people.new_project(tx, "apart", "nobody")["id"]
    answer = pooled.client().post(JOBS, json=job | {"project": project})
    assert answer.json()["type"] == "/problems/untrusted-neighbours"


def test_the_client_submits_cancels_and_resubmits(pooled: Site, pool: StandIn, job: dict[str, Any]) -> None:
    with served(pooled.app) as url, Client(url, pooled.key("ours", AccessRole.RUNNER)) as api:
        one = api.submit_job("lab", job["config"], slo=1.5)
        assert api.dry_run_job("lab", job["config"], slo=1.5).slo == 1.5
        assert [pool.id for pool in api.pools()] == ["lab"]
        with pytest.raises(ApiError, match="has not failed") as found:
            api.resubmit_job("lab", one.id)
        assert found.value.kind == "job-conflict"
        pool.tell(e.JobFailed(job=one.id, cause="killed"))
        assert api.job("lab", one.id).state == "failed"
        assert api.resubmit_job("lab", one.id).resubmissions == 1
        assert api.cancel_job("lab", one.id).state == "cancelled"
        assert [job.state for job in api.jobs("lab")] == ["cancelled"]


def test_a_job_s_events_and_logs_are_streams_as_a_run_s(pooled: Site, pool: StandIn, job: dict[str, Any]) -> None:
    ours, theirs = (pooled.member(AccessRole.RUNNER, name) for name in ("ours", "theirs"))
    name = ours.post(JOBS, json=job).json()["id"]
    place, run_dir = f"{JOBS}/{name}", Path(pool.submitted[0].entry.directory)
    with contextlib.closing(journal_of(run_dir, "a")) as journal:
        write(journal, "one", "two")
    (run_dir / "logs" / "process.log").write_text("first\nhalf")
    (run_dir / "logs" / "orchestrator.log").write_text("other\n")
    for part in ("events", "logs", "log-sources"):
        for client, where in ((theirs, place), (ours, f"/v1/pools/other/jobs/{name}"), (ours, f"{JOBS}/nobody")):
            assert client.get(f"{where}/{part}", params={"follow": "false"}).json()["type"] == "/problems/not-found"
        assert ours.get(f"{JOBS}/{'a' * 200}/{part}").json()["type"] == "/problems/invalid-request"
    assert ours.get(f"{place}/log-sources").json() == ["orchestrator", "process"]
    assert sse(ours.get(f"{place}/logs?follow=false&source=orchestrator").text)[-1]["data"] == '{"line":"other"}'
    first, last = sse(ours.get(f"{place}/events?follow=false").text)
    assert sse(ours.get(f"{place}/events?follow=false&after={first['id']}").text) == [last]
    begin, newest = sse(ours.get(f"{place}/events?follow=false&tail=1").text)
    assert (begin["event"], newest) == ("begin", last)
    assert ours.get(f"{place}/events?follow=false&after={last['id']}").status_code == 200, "more may come"
    gone = ours.get(f"{place}/events?after=b-1").json()
    assert (gone["type"], gone["detail"]) == ("/problems/events-gone", "no event 'b-1' is in the journals")
    pool.tell(e.JobFailed(job=name, cause="killed"))
    settle_jobs(pooled.store, pooled.settings)
    *told, end = sse(ours.get(f"{place}/events").text)
    assert (told, end["event"], json.loads(end["data"])["state"]) == ([first, last], "job.ended", "failed")
    assert "killed" in json.loads(end["data"])["cause"]
    assert [one["data"] for one in sse(ours.get(f"{place}/logs").text)] == ['{"line":"first"}', '{"line":"half"}', "{}"]
    assert ours.get(f"{place}/events", headers={"last-event-id": last["id"]}).status_code == 204
    without = dataclasses.replace(pooled, app=create_app(pooled.store, dataclasses.replace(pooled.settings, pools=())))
    *told, end = sse(without.client().get(f"{place}/events").text)
    assert (told, json.loads(end["data"])["state"]) == ([first, last], None), "what its pool does not say"


def test_a_pool_whose_process_is_away(site: Site, tmp_path: Path, job: dict[str, Any]) -> None:
    file = tmp_path / "pool.toml"
    file.write_text(POOL.format(directory=tmp_path))
    away = StandIn(file).directory
    settings = dataclasses.replace(site.settings, pools=(away,))
    there = dataclasses.replace(site, settings=settings, app=create_app(site.store, settings))
    client = there.client()
    assert client.get("/v1/pools/lab").json()["away"]
    answer = client.post(JOBS, json=job)
    assert (answer.status_code, answer.json()["type"]) == (503, "/problems/pool-away")
    assert "retry-after" in answer.headers


def files_in(site: Site) -> dict[Path, bytes]:
    """Every file of the server but its database's."""
    home = site.settings.home
    return {path: path.read_bytes() for path in home.rglob("*") if path.is_file() and "sqlite" not in path.name}


def test_a_job_keeps_every_key_of_its_submission(pool: StandIn, ours: httpx.Client, job: dict[str, Any]) -> None:
    """Each key with a number or a switch, set to another value than its default, is in the job's configuration, or the
    submission is refused and names it."""
    changes = dict(other_values(Config.model_validate(tomllib.loads(CONFIG) | {"job": JOB})))
    there_were = len(changes)
    while True:
        config = json.loads(json.dumps(job["config"]))
        for place, value in changes.items():
            table = config
            for part in place[:-1]:
                table = table.setdefault(part, {})
            table[place[-1]] = value
        answer = ours.post(JOBS, json=job | {"config": config})
        if answer.status_code == 201:
            break
        rejected = answer.json()["type"] == "/problems/job-rejected"
        named = {place for place in changes if place[-1] in answer.text or (rejected and place[0] == "job")}
        assert named, answer.text
        changes = {place: value for place, value in changes.items() if place not in named}
    kept = load_run_config(Path(pool.submitted[-1].entry.directory))
    for place, value in changes.items():
        found: Any = kept
        for part in place:
            found = found[part] if isinstance(found, dict) else getattr(found, part)
        assert found == value, place
    assert {("run", "budget_usd"), ("run", "caps")} <= changes.keys()
    assert len(changes) > 0.5 * there_were > 20


def other_values(model: BaseModel, at: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Each place of a number or a switch, with a value that is not there now."""
    for name in type(model).model_fields:
        value, place = getattr(model, name), (*at, name)
        if isinstance(value, BaseModel):
            yield from other_values(value, place)
        elif isinstance(value, bool):
            yield place, not value
        elif isinstance(value, int):
            yield place, value + 1
        elif isinstance(value, float):
            yield place, value * 0.75 or 0.5
    if at == ("run",):
        yield ("run", "budget_usd"), 5.0
        yield ("run", "caps"), {"spot": 1}


def test_what_a_job_names_stays_until_it_is_over(
    pooled: Site, pool: StandIn, ours: httpx.Client, job: dict[str, Any]
) -> None:
    upload, name = market_job(ours, job)
    refused = ours.delete(f"/v1/uploads/{upload}")
    assert (refused.status_code, refused.json()["type"], refused.json()["run"]) == (
        409,
        "/problems/upload-in-use",
        name,
    )
    with pooled.store.reading() as connection:
        assert uploads.user_of(connection, pooled.projects["ours"], upload) == name
    ours.post(f"{JOBS}/{name}/cancel")
    assert ours.delete(f"/v1/uploads/{upload}").status_code == 204


def test_what_goes_before_a_job_has_its_row_is_missed(
    pooled: Site, pool: StandIn, ours: httpx.Client, job: dict[str, Any]
) -> None:
    upload, _ = market_job(ours, job)
    with pooled.store.writing() as tx:
        uploads.remove(tx, upload)
    refused = ours.post(JOBS, json=job)
    assert (refused.status_code, refused.json()["detail"]) == (400, f"upload {upload} was deleted meanwhile")


def test_a_job_does_not_go_on_without_what_it_names(
    pooled: Site, pool: StandIn, ours: httpx.Client, job: dict[str, Any]
) -> None:
    upload, name = market_job(ours, job)
    pool.tell(e.JobFailed(job=name, cause="killed"))
    settle_jobs(pooled.store, pooled.settings)
    assert ours.delete(f"/v1/uploads/{upload}").status_code == 204
    told = len(pool.commands)
    refused = ours.post(f"{JOBS}/{name}/resubmit")
    assert (refused.status_code, refused.json()["detail"]) == (400, f"upload {upload} was deleted meanwhile")
    assert len(pool.commands) == told


def test_retention_leaves_what_a_job_names(
    pooled: Site, pool: StandIn, ours: httpx.Client, job: dict[str, Any]
) -> None:
    name = ours.post(JOBS, json=job).json()["id"]
    run = ours.post("/v1/runs", json={"config": job["config"], "providers": job["providers"]}).json()["id"]
    with pooled.store.writing() as tx:
        runs.observe(tx, run, phase=RunPhase.STOPPED.value, managed=False, ended_us=1)
        config = json.dumps({"model": {"checkpoint": str(pooled.settings.run_dir(run))}})
        tx.execute(sa.update(tables.jobs).where(tables.jobs.c.id == name).values(config=config))
        retention.change(tx, retention.SERVER, {"runs_days": 1})
    with pooled.store.reading() as connection:
        assert [*retention.over(connection, None, now_us())] == []
    ours.post(f"{JOBS}/{name}/cancel")
    settle_jobs(pooled.store, pooled.settings, pooled.projects["ours"])
    with pooled.store.reading() as connection:
        assert [one.id for one, _ in retention.over(connection, None, now_us())] == [run]


def test_what_a_job_leaves_goes_as_a_run_s_does(
    pooled: Site, pool: StandIn, ours: httpx.Client, job: dict[str, Any]
) -> None:
    """A job that its pool has go on again is left; one without its parts, or that is gone, is not resubmitted."""
    names = [ours.post(JOBS, json=job).json()["id"] for _ in range(3)]
    whole, parts, again = names
    project = pooled.projects["ours"]
    places = {name: pooled.settings.job_dir(project, name) for name in names}
    pool.tell(e.TimePassed(), at_s=3600.0)
    for name, place in places.items():
        (place / "checkpoints").mkdir()
        (place / "checkpoints" / "00000001.safetensors").write_bytes(b"x" * 1000)
        pool.tell(e.JobFailed(job=name, cause="killed"))
    settle_jobs(pooled.store, pooled.settings)
    with pooled.store.writing() as tx:
        spent_usd = stored_jobs.use(tx, project).usd
        for name, days in ((whole, 40), (parts, 20), (again, 40)):
            ended_us = now_us() - days * US_PER_DAY
            tx.execute(sa.update(tables.jobs).where(tables.jobs.c.id == name).values(ended_us=ended_us))
        retention.change(tx, retention.SERVER, {"runs_days": 30, "checkpoints_days": 10})
    assert spent_usd > 0.0
    plan = ours.get("/v1/projects/ours/retention/dry-run").json()
    assert {one["job"]: one["removes"] for one in plan["jobs"]} == {
        whole: ["run"],
        parts: ["checkpoints"],
        again: ["run"],
    }
    assert [one["bytes"] for one in plan["jobs"] if one["job"] == parts] == [1000]
    assert (plan["runs"], plan["items"]) == (0, [])
    pool.tell(e.ResubmitRequested(job=again))
    without = dataclasses.replace(pooled.settings, pools=())
    retire(pooled.store, without, IsolatedLoop("retention", LoopFaults()))
    assert all((place / "checkpoints").exists() for place in places.values()), "nobody can say whether they go on"
    retire(pooled.store, pooled.settings, IsolatedLoop("retention", LoopFaults()))
    assert not places[whole].exists()
    assert {found.name for found in places[parts].iterdir()} & {"checkpoints", "logs"} == {"logs"}
    assert (places[again] / "checkpoints").exists()
    settle_jobs(pooled.store, pooled.settings)
    with pooled.store.reading() as connection:
        assert stored_jobs.find(connection, whole) is None
        assert stored_jobs.use(connection, project).usd == pytest.approx(spent_usd)
    told = len(pool.commands)
    for name, words in ((whole, "is kept no longer"), (parts, "has no checkpoints any more")):
        refused = ours.post(f"{JOBS}/{name}/resubmit").json()
        assert (refused["type"], refused["detail"]) == ("/problems/run-retired", f"{name} {words}")
        assert (refused["job"], "run" in refused, "run" in refused["title"]) == (name, False, False)
    assert len(pool.commands) == told
    audit = pooled.client().get("/v1/audit", params={"limit": 100}).json()["data"]
    assert sorted(one["resource"] for one in audit if one["actor"] == "retention") == sorted(
        [f"{JOBS}/{whole}: run", f"{JOBS}/{parts}: checkpoints"]
    )


def test_a_job_that_is_half_removed_goes_the_rest_of_the_way(
    pooled: Site, pool: StandIn, ours: httpx.Client, job: dict[str, Any]
) -> None:
    name = ours.post(JOBS, json=job).json()["id"]
    pool.tell(e.JobFailed(job=name, cause="killed"))
    settle_jobs(pooled.store, pooled.settings)
    with pooled.store.writing() as tx:
        stored_jobs.note_retired(tx, name, {RUN: REMOVING})
        stored_jobs.insert(tx, "broken", pooled.projects["ours"], "lab", "", "{}", 1, None)
        if pooled.store.is_sqlite:
            tx.execute(sa.text("UPDATE jobs SET retired = '{removing' WHERE id = 'broken'"))
    assert ours.post(f"{JOBS}/{name}/resubmit").json()["type"] == "/problems/run-retired"
    retire(pooled.store, pooled.settings, IsolatedLoop("retention", LoopFaults()))
    assert not pooled.settings.job_dir(pooled.projects["ours"], name).exists()
    with pooled.store.reading() as connection:
        assert stored_jobs.find(connection, name) is None


def test_a_pool_that_is_away_holds_up_nothing_of_another_s_jobs(
    pooled: Site, pool: StandIn, ours: httpx.Client, job: dict[str, Any], tmp_path: Path
) -> None:
    name, project = ours.post(JOBS, json=job).json()["id"], pooled.projects["ours"]
    pool.tell(e.JobFailed(job=name, cause="killed"))
    settle_jobs(pooled.store, pooled.settings)
    with pooled.store.writing() as tx:
        stored_jobs.insert(tx, "other", project, "away", "", "{}", 1, None)
        stored_jobs.settle(tx, "other", usd=0.0, over=True)
        retention.change(tx, retention.SERVER, {"runs_days": 0})
    settings = dataclasses.replace(pooled.settings, pools=(tmp_path / "away", pool.directory))
    retire(pooled.store, settings, IsolatedLoop("retention", LoopFaults()))
    with pooled.store.reading() as connection:
        assert stored_jobs.find(connection, name) is None
        assert stored_jobs.find(connection, "other") is not None, "nobody can say whether it goes on"


def test_jobs_that_come_at_once_are_within_the_quota(
    pooled: Site, pool: StandIn, ours: httpx.Client, job: dict[str, Any]
) -> None:
    limit(pooled, runs=2)
    with ThreadPoolExecutor(6) as threads:
        codes = [answer.status_code for answer in threads.map(lambda _: ours.post(JOBS, json=job), range(6))]
    assert codes == [201] * 6
    states = [one["state"] for one in ours.get(JOBS).json()["data"]]
    assert sorted(states) == ["queued"] * 4 + ["running"] * 2


def test_who_resubmits_needs_as_many_gpus_as_before(
    pooled: Site, pool: StandIn, ours: httpx.Client, job: dict[str, Any]
) -> None:
    pool.tell(e.NodeJoined(node="train-2", kind=PhaseKind.TRAIN))
    wide = job | {"config": {**job["config"], "job": {**JOB, "train_nodes": 2}}}
    name = ours.post(JOBS, json=wide).json()["id"]
    pool.tell(e.JobFailed(job=name, cause="killed"))
    for gpus, status in ((1, 409), (2, 200)):
        limit(pooled, gpus={"trainer": gpus})
        assert ours.post(f"{JOBS}/{name}/resubmit").status_code == status
    pool.tell(e.JobFailed(job=name, cause="killed"))
    limit(pooled, runs=1)
    other = ours.post(JOBS, json=job).json()["id"]
    assert ours.post(f"{JOBS}/{name}/resubmit").json()["beyond_quota"]
    limit(pooled, runs=None, gpus={"trainer": 2})
    assert ours.post(JOBS, json=job).json()["reason"] == BEHIND
    assert ours.post(f"{JOBS}/{other}/cancel").status_code == 200
    admit(pooled)
    assert ours.get(f"{JOBS}/{name}").json()["state"] == "running"


def test_jobs_come_in_pages(pooled: Site, pool: StandIn, job: dict[str, Any]) -> None:
    ours, theirs = (pooled.member(AccessRole.RUNNER, name) for name in ("ours", "theirs"))
    made = [client.post(JOBS, json=job).json()["id"] for client in (ours, theirs, ours, ours)]
    first = ours.get(JOBS, params={"limit": 2}).json()
    assert ([one["id"] for one in first["data"]], first["has_more"]) == ([made[3], made[2]], True)
    rest = ours.get(JOBS, params={"limit": 2, "starting_after": made[2]}).json()
    assert ([one["id"] for one in rest["data"]], rest["has_more"]) == ([made[0]], False)
    for unknown in (made[1], "nobody", "/"):
        wrong = ours.get(JOBS, params={"starting_after": unknown})
        assert wrong.json()["type"] == "/problems/invalid-cursor"


def test_no_route_has_an_effect_under_a_key_that_was_another_request_s(
    pooled: Site, pool: StandIn, submission: Submission, job: dict[str, Any]
) -> None:
    """Every route that writes, with a body that it would take: neither a row, nor a file, nor the pool changes."""
    client, headers = pooled.client(), {"idempotency-key": "k"}
    content = b"data"
    upload = announce(client, data_txt=content)["id"]
    places = {
        "run": client.post("/v1/runs", json=submission()).json()["id"],
        "job": client.post(JOBS, json=job).json()["id"],
        "key": client.post("/v1/keys", json={"name": "other"}).json()["id"],
        "webhook": client.post("/v1/webhooks", json={"url": "https://example.com/"}).json().get("id", "hook_1"),
        "pool": "lab",
        "upload": upload,
        "digest": hashlib.sha256(content).hexdigest(),
        "project": pooled.projects["ours"],
        "kind": "ec2",
        "name": "TOKEN",
    }
    bodies: dict[str, Any] = {
        "post /v1/runs": submission(),
        "post /v1/pools/{pool}/jobs": job | {"slo": 3.0},
        "post /v1/keys": {"name": "second"},
        "post /v1/projects": {"name": "new"},
        "post /v1/uploads": {"name": "more", "files": []},
        "post /v1/webhooks": {"url": "https://example.com/"},
        "put /v1/secrets/{name}": {"value": "secret"},
    }
    made = pooled.app.openapi()
    pool.tell(e.JobFailed(job=places["job"], cause="killed"))
    assert client.post("/v1/keys", json={"name": "first"}, headers=headers).status_code == 201
    before = everything(pooled), list(pool.commands)
    mismatched, refused = list[str](), list[str]()
    for path, methods in made["paths"].items():
        for method, operation in methods.items():
            if method == "get" or path.endswith("dry-run") or not operation.get("x-action", "").endswith(":write"):
                continue
            url = path.format_map(defaultdict(lambda: "mem_1", places))
            body = bodies.get(f"{method} {path}", {} if "requestBody" in operation else None)
            kind: dict[str, Any] = {"content": content} if "digest" in path else {"json": body}
            answer = client.request(method, url, headers={**headers, "if-match": "*"}, **kind)
            assert (everything(pooled), list(pool.commands)) == before, (method, path, answer.text)
            assert 400 <= answer.status_code < 500, (method, path, answer.text)
            (mismatched if answer.status_code == 422 else refused).append(f"{method} {path} {answer.status_code}")
    assert len(mismatched) > len(refused), (mismatched, refused)


def everything(site: Site) -> tuple[dict[Path, bytes], dict[str, list[str]]]:
    """All files and all rows of a server."""
    with site.store.reading() as connection:
        rows = {name: sorted(map(str, connection.execute(sa.select(table)))) for name, table in metadata.tables.items()}
    return files_in(site), rows


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"restart_s": 1e15}, "job/restart_s"),
        ({"plan": {"rollout_s": 1e-12, "train_s": 10}}, "job/plan/rollout_s"),
        ({"plan": {"rollout_s": 10, "train_s": 10, "sync_s": 1e15}}, "job/plan/sync_s"),
        ({"max_resubmissions": 2**62}, "max_resubmissions"),
    ],
)
def test_a_number_that_no_journal_holds_is_refused_by_name(
    pool: StandIn, ours: httpx.Client, job: dict[str, Any], change: dict[str, Any], words: str
) -> None:
    job["config"]["job"] = JOB | change
    for path in (f"{JOBS}/dry-run", JOBS):
        answer = ours.post(path, json=job)
        assert (answer.status_code, answer.json()["type"]) == (400, "/problems/invalid-configuration"), answer.text
        assert words in answer.text
    assert not pool.commands


def test_a_server_without_its_pool_lets_nothing_go_that_the_pool_s_jobs_name(
    pooled: Site, pool: StandIn, job: dict[str, Any]
) -> None:
    key = pooled.key("ours", AccessRole.RUNNER)
    upload, name = market_job(pooled.client(key), job)
    alone = dataclasses.replace(pooled.settings, pools=())
    without = dataclasses.replace(pooled, settings=alone, app=create_app(pooled.store, alone)).client(key)
    for client in (without, pooled.client(key)):
        refused = client.delete(f"/v1/uploads/{upload}")
        assert (refused.status_code, refused.json().get("run")) == (409, name)


def test_a_job_that_was_resubmitted_elsewhere_counts_again(
    pooled: Site, pool: StandIn, ours: httpx.Client, job: dict[str, Any]
) -> None:
    """`elastic jobs resubmit` goes to the pool and not to the server."""
    limit(pooled, runs=1)
    upload, name = market_job(ours, job)
    pool.tell(e.JobFailed(job=name, cause="killed"))
    settle_jobs(pooled.store, pooled.settings)
    pool.tell(e.ResubmitRequested(job=name))
    assert ours.delete(f"/v1/uploads/{upload}").status_code == 409
    assert ours.post(JOBS, json=job).json()["beyond_quota"]


def test_webhooks_are_told_once_whenever_a_job_is_over(
    pooled: Site, pool: StandIn, ours: httpx.Client, job: dict[str, Any]
) -> None:
    events = ["job.failed", "job.cancelled"]
    with pooled.store.writing() as tx:
        webhooks.insert(tx, pooled.projects["ours"], "https://example.com/jobs", events, b"secret")
        webhooks.insert(tx, pooled.projects["theirs"], "https://example.com/jobs", events, b"secret")
    name = ours.post(JOBS, json=job).json()["id"]
    pool.tell(e.JobFailed(job=name, cause="killed"))
    settle_jobs(pooled.store, pooled.settings)
    settle_jobs(pooled.store, pooled.settings)
    ours.post(f"{JOBS}/{name}/resubmit")
    settle_jobs(pooled.store, pooled.settings)
    ours.post(f"{JOBS}/{name}/cancel")
    settle_jobs(pooled.store, pooled.settings)
    with pooled.store.writing() as tx:
        tx.execute(sa.update(tables.jobs).values(ended_us=7))
    assert ours.post(f"{JOBS}/{name}/resubmit").json()["type"] == "/problems/job-conflict"
    with pooled.store.reading() as connection:
        ended_us = connection.execute(sa.select(tables.jobs.c.ended_us)).scalars().all()
    assert ended_us == [7], "a refused resubmission begins no days of retention"
    with pooled.store.writing() as tx:  # As by a server whose pool's answer is older.
        stored_jobs.settle(tx, name, usd=0.0, over=False)
    settle_jobs(pooled.store, pooled.settings)
    with pooled.store.reading() as connection:
        bodies = connection.execute(sa.select(tables.deliveries.c.body)).scalars().all()
    sent = [json.loads(body) for body in bodies]
    assert [one["type"] for one in sent] == ["job.failed", "job.cancelled"]
    assert sent[0]["data"] == {"job": name, "pool": "lab", "state": "failed", "cause": "killed", "usd": 0.0}


def test_what_is_known_of_jobs_is_not_written_again(pooled: Site, pool: StandIn, job: dict[str, Any]) -> None:
    for _ in range(3):
        assert pooled.client().post(JOBS, json=job).status_code == 201
    settle_jobs(pooled.store, pooled.settings)
    with pooled.store.writing():  # Nobody else could write now.
        settle_jobs(pooled.store, pooled.settings)


def market_job(client: httpx.Client, job: dict[str, Any]) -> tuple[str, str]:
    """Upload a market, and submit a job that names it; returns the ids of both."""
    content = b"time_s,event,instance_id\n0,add,a\n9,remove,a\n"
    upload = announce(client, market_csv=content)["id"]
    assert send(client, upload, content).status_code == 200
    job["config"]["providers"]["spot"]["trace"] = f"upload:{upload}/market.csv"
    return upload, client.post(JOBS, json=job).json()["id"]
