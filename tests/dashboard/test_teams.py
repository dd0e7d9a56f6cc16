"""Pools, providers and projects in Chromium: what a team shares, and what who may changes there."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from elastic.core.cluster import events as e
from elastic.core.cluster.types import PhaseKind
from elastic.protocol.api import AccessRole
from tests.dashboard.conftest import Served, violations
from tests.dashboard.test_page import sign_in
from tests.pool.stand_in import POOL, StandIn
from tests.server.conftest import Submission

pytestmark = pytest.mark.dashboard
JOB = {"rollout_memory_gb": 1, "train_memory_gb": 1, "slo": 2.0, "plan": {"rollout_s": 10, "train_s": 10}}
PLACES = ("/#/pools", "/#/providers", "/#/projects")


@pytest.fixture
def job(served: Served, submission: Submission, tmp_path: Path) -> Iterator[str]:
    """A job of a pool that the server has, in its second turn for 30 s."""
    file = tmp_path / "pool.toml"
    file.write_text(POOL.format(directory=tmp_path))
    state = served.site.app.state.server
    with StandIn(file) as pool:
        state.settings = replace(state.settings, pools=(pool.directory,))
        body = submission()
        asked = {"config": {**body["config"], "job": JOB}, "providers": ["spot"]}
        made = served.site.member(AccessRole.RUNNER).post("/v1/pools/lab/jobs", json=asked).json()["id"]
        pool.tell(e.PhaseAsked(job=made, phase=PhaseKind.ROLLOUT), at_s=60.0)
        (permit,) = pool.cluster.permits
        pool.tell(e.PermitYielded(job=made, permit=permit, finished=False), at_s=80.0)
        pool.tell(e.PhaseAsked(job=made, phase=PhaseKind.ROLLOUT), at_s=100.0)
        pool.tell(e.TimePassed(), at_s=130.0)
        yield made


def settled(tab: Any) -> None:
    tab.wait_for_selector("main:not([aria-busy]) h1")


def test_a_pool_shows_who_computes_and_a_job_is_cancelled(tab: Any, served: Served, job: str) -> None:
    sign_in(tab, served, at="/#/pools")
    row = tab.locator("#jobs tbody tr", has_text=job)
    row.wait_for()
    tab.wait_for_selector(f"#groups >> text={job}")
    for turn in ("1:00 to 1:20", "1:40 to 2:10"):
        tab.wait_for_selector(f"#pool-lanes [title='slice for {job}, {turn}']")
    colour = "(part) => /provider-[0-9]/.exec(part.className)[0]"
    colours = [
        tab.locator(one).first.evaluate(colour) for one in ("#pool-lanes .band", "#nodes .swatch", "#groups .swatch")
    ]
    assert [row.locator(".swatch").evaluate(colour)] * 3 == colours, "a job has its colour wherever it is named"
    row.locator("text=Cancel").click()
    tab.wait_for_selector("dialog >> text=Everything of it ends now.")
    tab.click("dialog button[type=submit]")
    tab.wait_for_selector("#jobs >> text=cancelled")
    sign_out_and_in(tab, served, AccessRole.VIEWER)
    tab.goto(f"{served.url}/#/pools")
    row.wait_for()
    assert tab.locator("main button:visible").count() == 0


def test_who_looks_after_the_server_drains_a_node_of_another_machine(tab: Any, served: Served, job: str) -> None:
    """This pool's nodes are of one machine; what it answers says otherwise."""

    def answer(route: Any) -> None:
        told = route.fetch()
        pool = told.json()
        route.fulfill(response=told, json=pool | {"nodes": [node | {"joined": True} for node in pool["nodes"]]})

    tab.route("**/v1/pools/lab", answer)
    sign_in(tab, served, AccessRole.ADMIN, at="/#/pools")
    tab.wait_for_selector("#nodes >> text=rollout-2")
    assert tab.locator("#nodes button").count() == 0, "a project's admin may not"
    tab.click("#sign-out")
    tab.wait_for_selector("#key")
    sign_in(tab, served, at="/#/pools", key=served.site.admin)
    node = tab.locator("#nodes tbody tr", has_text="rollout-2")
    node.locator("text=Drain").click()
    tab.wait_for_selector("dialog >> text=go on elsewhere from their step's end")
    tab.click("dialog button[type=submit]")
    node.wait_for(state="detached")


def test_a_job_is_submitted_after_a_look_at_where_it_would_go(tab: Any, served: Served, job: str) -> None:
    sign_in(tab, served, at="/#/pools")
    tab.wait_for_selector("#pool-lanes >> text=rollout-1")
    tab.click("text=Submit a job")
    tab.wait_for_selector("#config")
    assert tab.input_value("#where") == "lab"
    text = tab.input_value("#config")
    assert "[job.plan]" in text, "what is missing in the example is as a file would say it"
    tab.fill("#config", text.replace("slo = 2", "slo = "))
    tab.click("#check")
    tab.wait_for_selector("#found >> text=is no TOML")
    tab.fill("#config", text)
    tab.click("#check")
    tab.wait_for_selector("#found >> text=It would go to group")
    tab.click("#submit")
    tab.locator("#jobs tbody tr").nth(1).wait_for()


def sign_out_and_in(tab: Any, served: Served, role: AccessRole) -> None:
    tab.click("#sign-out")
    tab.wait_for_selector("#key")
    sign_in(tab, served, role)


def test_a_project_shows_its_own_to_who_may(tab: Any, served: Served) -> None:
    sign_in(tab, served, AccessRole.ADMIN, at="/#/projects")
    tab.wait_for_selector("#quota >> text=Runs at once")
    tab.click("text=Make a key")
    tab.fill("dialog [name=name]", "nightly")
    tab.click("dialog button[type=submit]")
    secret = tab.inner_text("#secret")
    assert served.site.client(secret).get("/v1/me").json()["name"] == "nightly"
    tab.click("dialog >> text=Close")
    row = tab.locator("#keys tbody tr", has_text="nightly")
    row.locator("text=Revoke").click()
    tab.click("dialog button[type=submit]")
    row.get_by_text("revoked").wait_for()
    assert served.site.client(secret).get("/v1/me").status_code == 401
    tab.click("text=Set a secret")
    tab.fill("dialog [name=name]", "HF_TOKEN")
    tab.fill("dialog [name=value]", "hidden-value")
    tab.click("dialog button[type=submit]")
    tab.wait_for_selector("#secrets >> text=HF_TOKEN")
    assert "hidden-value" not in tab.content()
    tab.click("text=Add somebody")
    tab.fill("dialog [name=email]", "ada@example.com")
    tab.click("dialog button[type=submit]")
    tab.wait_for_selector("#members >> text=ada@example.com")
    tab.reload()
    done = tab.locator("#audit tbody tr", has_text="secrets:write")
    assert "ours-admin" in done.inner_text(), "who did it, by name"
    sign_out_and_in(tab, served, AccessRole.VIEWER)
    tab.goto(f"{served.url}/#/projects")
    tab.wait_for_selector("#members")
    assert tab.locator("#keys, #secrets, #audit, main button:visible").count() == 0


def test_who_is_of_no_project_sees_each_by_itself_and_all_together(tab: Any, served: Served) -> None:
    served.site.member(AccessRole.ADMIN).post("/v1/keys", json={"name": "nightly"})
    sign_in(tab, served, at="/#/projects?project=theirs", key=served.site.admin)
    tab.wait_for_selector("h1 >> text=Project theirs")
    tab.wait_for_selector("#keys >> text=theirs-viewer")
    assert "ours" not in tab.inner_text("#keys") + tab.inner_text("main section:last-child")
    tab.select_option("#chosen", label="The whole server")
    tab.wait_for_selector("h1 >> text=The whole server")
    for whose in ("ours", "theirs"):
        tab.locator("#keys tbody tr", has_text=f"{whose}-viewer").get_by_text(whose, exact=True).wait_for()
    tab.locator("#audit tbody tr", has_text="keys:write").get_by_text("ours", exact=True).wait_for()


def test_they_are_for_all_who_read_them(audited: Any, served: Served, job: str) -> None:
    sign_in(audited, served, AccessRole.ADMIN)
    for width in (1200, 400):
        audited.set_viewport_size({"width": width, "height": 800})
        for place in PLACES:
            audited.goto(served.url + place)
            settled(audited)
            assert audited.evaluate("document.documentElement.scrollWidth") <= width, place
            assert violations(audited) == [], place
