"""What is kept no longer goes, the rest of it too after a crash, and nothing else; a dry run changes nothing."""

import hashlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from elastic.protocol.api import AccessRole, RunPhase
from elastic.protocol.best_checkpoint import keep_best
from elastic.runtime.journal import EvaluatedRow, RunDirectory, SqliteJournal
from elastic.runtime.journal.records import EventRow, TrajectoryRow
from elastic.server.intake.upload_files import UploadStorage
from elastic.server.quotas.budgets import US_PER_DAY
from elastic.server.retention import rules
from elastic.server.runner import retiring
from elastic.server.runner.retiring import retire
from elastic.server.store import runs
from elastic.server.store.database import now_us
from elastic.server.store.runs import HostedRunRow
from elastic.server.store.tables import runs as runs_table
from elastic.server.store.tables import uploads
from elastic.system.isolation import IsolatedLoop, LoopFaults
from tests.server.conftest import Site, Submission


def row(site: Site, run: str) -> HostedRunRow:
    with site.store.reading() as connection:
        found = runs.find(connection, run)
    assert found is not None
    return found


@pytest.fixture
def ended(site: Site, submission: Submission) -> Callable[..., str]:
    """A run that ended so many days ago, with something of everything."""

    def make(days: float, project: str = "ours", phase: RunPhase = RunPhase.STOPPED) -> str:
        run = site.client().post("/v1/runs", json=submission(project=project)).json()["id"]
        path = site.settings.run_dir(run)
        for name in ("logs/process.log", "checkpoints/00000001.safetensors", "weights/blob"):
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            (path / name).write_bytes(b"x" * 1000)
        journal = SqliteJournal(path / "journal.sqlite", 0.01)
        journal.append(EventRow(t_ns=1, kind="frame", body=b"f" * 500))
        journal.append(EventRow(t_ns=2, kind="other", body=b"{}"))
        journal.append(TrajectoryRow("t1", 0, "g", 0, 1, 1.0, "", 1, 3, token_ids=b"t" * 300, sampled=b"s" * 200))
        journal.close()
        with site.store.writing() as tx:
            at_us = now_us() - round(days * US_PER_DAY)
            runs.observe(tx, run, phase=phase.value, managed=False, ended_us=at_us)
        return run

    return make


def left(site: Site, run: str) -> set[str]:
    path = site.settings.run_dir(run)
    return {found.name for found in path.iterdir()} if path.exists() else set()


def said(site: Site, run: str) -> list[bytes]:
    (trajectory,) = RunDirectory(site.settings.run_dir(run)).trajectories(["t1"]).values()
    return [trajectory.token_ids, trajectory.sampled]


def keep(site: Site, where: str, **days: int) -> None:
    client = site.client()
    etag = client.get(where).headers["etag"]
    assert client.patch(where, json=days, headers={"if-match": etag}).status_code == 200


def test_parts_go_apart_and_what_goes_on_is_left(site: Site, ended: Callable[..., str]) -> None:
    old, young, theirs = ended(40), ended(3), ended(40, project="theirs")
    going = ended(40)
    with site.store.writing() as tx:
        runs.observe(tx, going, phase=RunPhase.RUNNING.value, managed=True)
    ours = f"/v1/projects/{site.projects['ours']}/retention"
    keep(site, ours, checkpoints_days=30, trajectories_days=30)
    keep(site, "/v1/retention", logs_days=2)
    plan = site.client().get("/v1/retention/dry-run").json()
    assert {item["run"]: item["removes"] for item in plan["items"]} == {
        old: ["trajectories", "checkpoints", "logs"],
        young: ["logs"],
        theirs: ["logs"],
    }
    assert {item["run"]: item["bytes"] for item in plan["items"]} == {old: 4000, young: 1000, theirs: 1000}
    own = site.member(AccessRole.VIEWER).get(f"{ours}/dry-run").json()
    assert (own["runs"], {item["run"] for item in own["items"]}) == (2, {old, young})
    everything = {"logs", "checkpoints", "weights", "journal.sqlite"}
    assert left(site, old) >= everything
    assert not retire(site.store, site.settings, IsolatedLoop("retention", LoopFaults()))
    assert left(site, old) & everything == {"journal.sqlite"}
    assert left(site, young) & everything == everything - {"logs"}
    assert left(site, going) >= everything
    assert said(site, old) == [b"", b""]
    assert said(site, young) == [b"t" * 300, b"s" * 200]
    assert site.client().get("/v1/retention/dry-run").json()["items"] == []
    refused = site.client().post(f"/v1/runs/{old}/resume").json()
    assert (refused["type"], refused["status"]) == ("/problems/run-retired", 409)
    assert site.client().post(f"/v1/runs/{young}/resume").status_code == 200
    told = [
        e for e in site.client().get("/v1/audit", params={"limit": 100}).json()["data"] if e["actor"] == "retention"
    ]
    assert sorted(e["resource"].rpartition("/")[2] for e in told) == sorted(
        [f"{old}: trajectories, checkpoints, logs", f"{young}: logs", f"{theirs}: logs"]
    )


def test_the_best_checkpoint_stays_and_of_evaluations_nothing_that_was_said(
    site: Site, ended: Callable[..., str]
) -> None:
    run = ended(40)
    path = site.settings.run_dir(run)
    for name in ("00000002.safetensors", "00000003.shards/rank0"):
        (path / "checkpoints" / name).parent.mkdir(exist_ok=True)
        (path / "checkpoints" / name).write_bytes(b"x" * 100)
    keep_best(path / "checkpoints", 3)
    journal = SqliteJournal(path / "journal.2.sqlite", 0.01)
    told = EvaluatedRow("e2/0/0", 2, "e2/0", 0, 1, 1.0, "", 1, 3, token_ids=b"t", sampled=b"s")
    journal.append(msgspec.structs.replace(told, branches=b"b", task=b"{}"))
    journal.close()
    keep(site, "/v1/retention", checkpoints_days=1, trajectories_days=1)
    (item,) = site.client().get("/v1/retention/dry-run").json()["items"]
    assert item["bytes"] == 2 * 1000 + 100 + 1000 + 5, "checkpoints and weights, and what was said"
    retire(site.store, site.settings, IsolatedLoop("retention", LoopFaults()))
    assert sorted(found.name for found in (path / "checkpoints").iterdir()) == ["00000003.shards", "best.json"]
    assert (path / "checkpoints" / "00000003.shards" / "rank0").read_bytes() == b"x" * 100
    (episode,) = RunDirectory(path).trajectories(["e2/0/0"]).values()
    assert (episode.token_ids, episode.sampled, episode.branches, episode.task) == (b"",) * 4
    assert episode.reward == 1.0
    assert row(site, run).retired == {"checkpoints": "removed", "trajectories": "removed"}


def test_what_is_half_removed_goes_the_rest_of_the_way(
    site: Site, ended: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = ended(40)
    keep(site, "/v1/retention", checkpoints_days=1, logs_days=1)

    class Killed(BaseException):
        pass

    def die(path: Path, part: str) -> None:
        if part == rules.LOGS:
            raise Killed
        rules.remove(path, part)

    with monkeypatch.context() as patched:
        patched.setattr(retiring, "remove", die)
        with pytest.raises(Killed):
            retire(site.store, site.settings, IsolatedLoop("retention", LoopFaults()))
    assert "logs" in left(site, run)
    assert site.client().post(f"/v1/runs/{run}/resume").json()["type"] == "/problems/run-retired"
    keep(site, "/v1/retention", checkpoints_days=1000, logs_days=1000)
    retire(site.store, site.settings, IsolatedLoop("retention", LoopFaults()))
    assert not left(site, run) & {"logs", "checkpoints", "weights"}
    assert row(site, run).retired == {"checkpoints": "removed", "logs": "removed"}
    once = [e for e in site.client().get("/v1/audit").json()["data"] if e["actor"] == "retention"]
    assert len(once) == 1


def test_a_whole_run_goes_unless_another_needs_it(
    site: Site, ended: Callable[..., str], submission: Submission
) -> None:
    parent, other = ended(40), ended(40)
    going = site.submitted(submission(project="ours"))
    with site.store.writing() as tx:
        config = json.loads(row(site, going).config)
        config["model"]["checkpoint"] = str(site.settings.run_dir(parent) / "checkpoints")
        runs.want(tx, going, config=json.dumps(config))
    keep(site, "/v1/retention", runs_days=30)
    retire(site.store, site.settings, IsolatedLoop("retention", LoopFaults()))
    assert row(site, parent).wanted != runs.DELETE
    assert site.client().get(f"/v1/runs/{other}").status_code == 404
    with site.store.reading() as connection:
        (gone,) = [run for run in runs.managed(connection) if run.id == other]
    assert gone.wanted == runs.DELETE


def test_uploads_that_nobody_completes_or_uses_go(site: Site, submission: Submission) -> None:
    """The dry run names them first; what a run names that may go on is kept, and days count from a run's last use."""
    client, project = site.member(AccessRole.RUNNER), site.projects["ours"]
    storage = UploadStorage(site.settings)

    def upload(content: bytes, *, complete: bool = True, days: float = 0.0) -> str:
        file = {"path": "a", "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        other = {"path": "b", "bytes": 1, "sha256": hashlib.sha256(b"b").hexdigest()}
        body = {"name": "base", "files": [file] if complete else [file, other]}
        made = client.post("/v1/uploads", json=body).json()["id"]
        assert client.put(f"/v1/uploads/{made}/files/{file['sha256']}", content=content).status_code == 200
        at_s = time.time() - days * 86_400
        top = storage.place(project, made) if complete else site.settings.incoming / made
        for path in (*top.rglob("*"), top):
            os.utime(path, (at_s, at_s))
        with site.store.writing() as tx:
            tx.execute(uploads.update().where(uploads.c.id == made).values(created_us=int(at_s * 1e6)))
        return made

    def plan() -> dict[str, str]:
        found = client.get("/v1/projects/ours/retention/dry-run").json()["uploads"]
        return {one["upload"]: one["state"] for one in found}

    def there() -> set[str]:
        return {one["id"] for one in client.get("/v1/uploads").json()["data"]}

    never, fresh = upload(b"1", complete=False, days=8), upload(b"2", complete=False, days=6)
    unused, used, once = upload(b"3", days=90), upload(b"4", days=90), upload(b"5", days=90)
    young = upload(b"6", days=1)
    assert plan() == {never: "open"}
    runs_of: list[str] = []
    for one in (used, once):
        run = client.post("/v1/runs", json=submission()).json()["id"]
        runs_of.append(run)
        with site.store.writing() as tx:
            tx.execute(
                runs_table.update().where(runs_table.c.id == run).values(config=json.dumps({"x": f"upload:{one}"}))
            )
    with site.store.writing() as tx:
        ended_us = now_us() - 50 * US_PER_DAY
        runs.observe(tx, runs_of[1], phase=RunPhase.STOPPED.value, managed=False, ended_us=ended_us)
    keep(site, "/v1/retention", uploads_days=60)
    assert plan() == {never: "open", unused: "ready"}
    assert there() == {never, fresh, unused, used, once, young}
    retire(site.store, site.settings, IsolatedLoop("retention", LoopFaults()))
    assert there() == {fresh, used, once, young}
    assert not storage.place(project, unused).exists()
    assert not (site.settings.incoming / never).exists()
    keep(site, "/v1/projects/ours/retention", uploads_days=40)
    retire(site.store, site.settings, IsolatedLoop("retention", LoopFaults()))
    assert there() == {fresh, used, young}
    noted = site.client().get("/v1/audit", params={"limit": 100}).json()["data"]
    assert {one["resource"] for one in noted if one["actor"] == "retention"} == {
        f"/v1/uploads/{one}" for one in (never, unused, once)
    }
