"""Runs' changes as one stream, and lists in other orders: whoever reads on misses nothing of what they may see."""

import json
from typing import Any

import sqlalchemy as sa

from elastic.protocol.api import AccessRole, RunFigures, RunPhase
from elastic.server.store.tables import runs
from tests.server.conftest import Site, Submission

INVALID = "/problems/invalid-request"


def events(site: Site, role: AccessRole = AccessRole.VIEWER, project: str = "ours", **query: str) -> list[Any]:
    answer = site.member(role, project).get("/v1/changes", params={"follow": "false", **query})
    blocks = [dict(line.split(": ", 1) for line in block.splitlines()) for block in answer.text.split("\n\n") if block]
    return [(one["id"], one["event"], json.loads(one["data"])) for one in blocks]


def seen(site: Site, run: str, phase: RunPhase = RunPhase.RUNNING, **figures: Any) -> None:
    with site.store.writing() as tx:
        told = RunFigures(**figures).model_dump()
        tx.execute(sa.update(runs).where(runs.c.id == run).values(phase=phase.value, figures=told))


def settled(site: Site) -> None:
    """What streams share is looked at anew after a moment."""
    site.app.state.server.run_changes.look()


def test_whoever_comes_back_hears_what_changed_meanwhile(shared_site: Site, submission: Submission) -> None:
    site = shared_site
    ours = site.member(AccessRole.RUNNER).post("/v1/runs", json=submission()).json()["id"]
    theirs = site.member(AccessRole.RUNNER, "theirs").post("/v1/runs", json=submission()).json()["id"]
    settled(site)
    ((begun, kind, data),) = events(site)
    assert (kind, data) == ("begin", {"anew": False})
    seen(site, ours, step=3)
    seen(site, theirs, step=4)
    settled(site)
    _, (last, kind, run) = events(site, after=begun)
    assert (kind, run["id"], run["figures"]["step"]) == ("run", ours, 3)
    assert [run["id"] for _, kind, run in events(site, project="theirs", after=begun) if kind == "run"] == [theirs]
    seen(site, ours, RunPhase.FAILED, step=5)
    settled(site)
    assert events(site, after=last)[1][2]["phase"] == "failed"
    site.member(AccessRole.RUNNER).delete(f"/v1/runs/{ours}")
    settled(site)
    assert events(site, after=last)[1][1:] == ("deleted", {"id": ours})
    for unknown in ("0-1", f"{last}9", "nothing"):
        ((_, kind, data),) = events(site, after=unknown)
        assert (kind, data) == ("begin", {"anew": True})


def test_runs_come_in_the_order_that_is_asked_for(site: Site, submission: Submission) -> None:
    client = site.client()
    made = [
        client.post("/v1/runs", json=submission(labels={"n": str(n), "note": '50% à la "é"'})).json()["id"]
        for n in range(5)
    ]
    for n, run in enumerate(made):
        phase = RunPhase.FAILED if n == 2 else RunPhase.RUNNING
        seen(site, run, phase, usd=[2.0, 1.0, 2.0, 0.0, 5.0][n], last_mean_reward=None if n == 1 else -float(n))

    def walked(**query: Any) -> list[int]:
        found: list[str] = []
        more = True
        while more:
            after = {"starting_after": found[-1]} if found else {}
            page = client.get("/v1/runs", params={"limit": 2, **query, **after}).json()
            found += [run["id"] for run in page["data"]]
            more = page["has_more"]
        return [made.index(run) for run in found]

    assert walked(order="usd") == [4, 2, 0, 1, 3]
    assert walked(order="usd", ascending=True) == [3, 1, 2, 0, 4]
    assert walked(order="reward") == [0, 2, 3, 4, 1], "those that have none are last"
    assert walked(phase=["failed", "running"], label="n=2") == [2]
    assert walked(phase="running", order="name") == [4, 3, 1, 0]
    assert walked(label="n") == walked(search="50%") == walked(search='à la "é"') == [4, 3, 2, 1, 0]
    assert walked(search="5_%") == walked(label="n=9") == walked(label="m") == walked(search="\\") == []
    assert client.get(f"/v1/runs?order=usd&ending_before={made[0]}").json()["type"] == "/problems/invalid-cursor"
    assert client.get("/v1/runs", params={"label": 'a"b'}).status_code == 400
    assert client.get("/v1/runs?search=%00").json()["type"] == client.get("/v1/runs/%00").json()["type"] == INVALID
    assert client.post("/v1/runs", json=submission(labels={"note": "\0"})).json()["type"] == INVALID
    assert client.get("/v1/runs?order=colour").status_code == 400


def test_a_run_says_what_of_it_is_not_the_default(site: Site, submission: Submission) -> None:
    run = site.submitted(submission())
    found = site.client().get(f"/v1/runs/{run}").json()["differences"]
    assert found["run.steps"] == 2
    assert found["providers.spot.trace"] == "rlboost-a"
    assert "trainer.learning_rate" not in found
