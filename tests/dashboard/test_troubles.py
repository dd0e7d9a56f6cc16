"""The pages in trouble: a server that goes, a session that ends, texts of any kind and size, and what is not there."""

import json
import shutil
from typing import Any

import pytest
import sqlalchemy as sa
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from elastic.protocol.api import AccessRole, ProviderFigures, RunPhase
from elastic.server.store.tables import runs, sessions
from tests.dashboard.conftest import Served
from tests.dashboard.test_page import chat, seen, sign_in, submitted
from tests.dashboard.test_teams import PLACES, job
from tests.dashboard.test_views import PARTS, places, run, settled
from tests.server.conftest import Submission
from tests.server.written_runs import write_run

__all__ = ["chat", "job", "run"]
pytestmark = pytest.mark.dashboard
NAMED = ("labels", "differences", "providers", "caps", "rewards", "metrics", "trainer", "config", "gpus")
"""Fields whose own fields are called as somebody likes."""
MEANS_SOMETHING = ("object", "actions", "csrf_token", "version", "role", "type", "url")
"""Fields whose values the page goes by: those of its own server."""
HOSTILE = (
    "<img src=x onerror=document.title='ran'>",
    "javascript:alert(1)",
    "\u202e\u2066\x1b[2J\x00",
    "__proto__",
    "${1}",
    "",
)


def test_a_page_goes_on_once_its_server_is_back(tab: Any, served: Served, submission: Submission) -> None:
    run = submitted(served, submission())
    seen(served, run, RunPhase.RUNNING, step=3)
    sign_in(tab, served, at=f"/#/runs/{run}")
    tab.wait_for_selector("#figures >> text=3/100")
    served.down()
    tab.wait_for_selector("#notice >> text=The server does not answer. Runs go on")
    seen(served, run, RunPhase.RUNNING, step=4)
    served.up()
    tab.wait_for_selector("#figures >> text=4/100")
    tab.wait_for_selector("#notice", state="hidden")
    seen(served, run, RunPhase.RUNNING, step=5)
    tab.wait_for_selector("#figures >> text=5/100")


def test_a_page_of_which_a_part_does_not_come_is_loaded_anew(tab: Any, served: Served) -> None:
    for part in ("runs.js", "page.css"):
        tab.route(f"**/page/{part}", lambda route: route.abort(), times=1)
    tab.goto(served.url)
    tab.wait_for_selector("#key")
    tab.clock.install()
    tab.route("**/page/runs.js", lambda route: route.abort())
    tab.reload()
    while not tab.locator("main", has_text="A part of this page does not come from the server.").count():
        tab.clock.run_for(20_000)


def test_a_session_that_ends_asks_to_sign_in_and_leads_back(tab: Any, served: Served, run: str) -> None:
    sign_in(tab, served, at=f"/#/runs/{run}/workers")
    tab.wait_for_selector("#lanes li")
    with served.site.store.writing() as tx:
        tx.execute(sa.update(sessions).values(expires_us=1))
    tab.wait_for_selector("text=Your session is over. Sign in again.")
    assert tab.locator("#lanes").count() == 0, "nothing stays of what one may see no more"
    tab.fill("#key", served.site.key("ours", AccessRole.VIEWER))
    tab.click("text=Sign in >> nth=-1")
    tab.wait_for_selector("#lanes li")


def test_a_hundred_times_as_much_is_bounded_and_said(tab: Any, served: Served, submission: Submission) -> None:
    run = submitted(served, submission())
    write_run(served.site.settings.run_dir(run), steps=3_000, events=30_000, members=2)
    seen(served, run, RunPhase.RUNNING, step=3_000)
    sign_in(tab, served, AccessRole.VIEWER, at=f"/#/runs/{run}")
    tab.locator("[role=img][aria-label^='Reward.']").wait_for()
    tab.goto(f"{served.url}/#/runs/{run}/workers")
    tab.locator("#lanes li").nth(79).wait_for()
    assert tab.locator("#lanes li").count() == 80
    tab.wait_for_selector("text=Older workers are not shown; their leases stand below.")
    tab.goto(f"{served.url}/#/runs/{run}/events")
    tab.locator("#events li").nth(199).wait_for()
    first = tab.locator("#events li").last.inner_text()
    tab.click("button:text-is('Older')")
    tab.locator("#events li").nth(399).wait_for()
    assert tab.locator("#events li").nth(199).inner_text() == first
    tab.goto(f"{served.url}/#/runs/{run}/trajectories")
    settled(tab)
    assert tab.locator("#trajectories tbody tr").count() == 20
    assert tab.locator("main *").count() < 3_000


def test_texts_of_any_size_are_cut_and_said_to_be(tab: Any, served: Served, submission: Submission) -> None:
    run = submitted(served, submission())
    write_run(served.site.settings.run_dir(run), steps=3, name="w" * 2_000, cause="c" * 200_000)
    seen(served, run, RunPhase.FAILED, cause="x" * 10_000_000)
    sign_in(tab, served, AccessRole.VIEWER)
    for place in places(run):
        tab.goto(served.url + place)
        settled(tab)
        assert len(tab.locator("main").inner_text()) < 200_000, place
        assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth"), place
    tab.goto(f"{served.url}/#/runs/{run}")
    tab.wait_for_selector("text=9,980,000 more characters are not shown")


def test_a_clock_that_is_off_shows_the_rest(tab: Any, served: Served, run: str) -> None:
    tab.clock.set_fixed_time("2001-09-09")
    with served.site.store.writing() as tx:
        tx.execute(sa.update(runs).values(created_us=-(10**15), started_us=4 * 10**15))
    seen(served, run, RunPhase.RUNNING, step=3, elapsed_s=-5.0)
    sign_in(tab, served, AccessRole.VIEWER)
    for place in places(run):
        tab.goto(served.url + place)
        settled(tab)
        assert "NaN" not in tab.locator("main").inner_text(), place


def test_a_run_whose_journal_is_gone_shows_what_there_is(tab: Any, served: Served, run: str) -> None:
    shutil.rmtree(served.site.settings.run_dir(run))
    sign_in(tab, served, AccessRole.VIEWER)
    for part in PARTS:
        tab.goto(f"{served.url}/#/runs/{run}{part}")
        settled(tab)
    for part, said in {
        "": "There are no figures yet",
        "/workers": "No workers yet.",
        "/trajectories": "No such trajectories.",
        "/events": "Nothing has happened yet.",
        "/logs": "Nothing is in this log.",
        "/configuration": "No checkpoints yet.",
    }.items():
        tab.goto(f"{served.url}/#/runs/{run}{part}")
        tab.wait_for_selector(f"text={said}")
    (served.site.settings.run_dir(run)).mkdir()
    (served.site.settings.run_dir(run) / "journal.sqlite").write_bytes(b"no journal")
    tab.goto(f"{served.url}/#/runs/{run}")
    tab.reload()
    tab.wait_for_selector("text=This cannot be shown: the journal cannot be read now")
    tab.wait_for_selector("#figures >> text=30/100")


def test_a_provider_of_a_plug_in_and_a_reward_below_zero(tab: Any, served: Served, run: str) -> None:
    ours = {"marsupial": ProviderFigures(ready=2, gpus=2, usd=1.0, usd_per_hour=3.0)}
    seen(served, run, RunPhase.RUNNING, step=3, last_mean_reward=-0.25, last_success_rate=0.0, providers=ours)
    sign_in(tab, served, AccessRole.VIEWER, at=f"/#/runs/{run}")
    tab.wait_for_selector("#figures >> text=−0.250")
    tab.wait_for_selector("#figures >> text=0 %")
    tab.wait_for_selector("#providers >> text=marsupial")
    colours = "import('/page/charts.js').then((it) => it.providerColours(['marsupial', 'spot', 'wombat']))"
    found = tab.evaluate(colours)
    assert found["spot"] == "provider-3"
    assert len(set(found.values())) == 3


def mutated(value: Any, texts: list[str], field: str = "") -> Any:
    """An answer with each of its texts in the place of another; where there is none, there is none."""
    if isinstance(value, dict):
        named = (lambda key: texts[len(key) % len(texts)] + key) if field in NAMED else str
        return {named(key): mutated(inner, texts, key) for key, inner in value.items()}
    if isinstance(value, list):
        return [mutated(inner, texts, field) for inner in value]
    if value and isinstance(value, str) and field not in MEANS_SOMETHING:
        return texts[len(value) % len(texts)]
    return value


def told_otherwise(content_type: str, body: str, texts: list[str]) -> str:
    """An answer, or the events of a stream up to now, with other texts."""
    if "json" in content_type:
        return json.dumps(mutated(json.loads(body), texts))
    lines = body.split("\n")
    data = "data: "
    return "\n".join(
        data + json.dumps(mutated(json.loads(line[len(data) :]), texts)) if line.startswith(data) else line
        for line in lines
    )


@pytest.mark.timeout(900)
def test_texts_of_answers_never_become_markup(
    tab: Any, served: Served, run: str, chat: str, job: str, faults: list[str]
) -> None:
    """Whatever the server's answers say: every view shows it as text, and runs nothing of it."""
    texts: list[str] = ["x"]

    def answer(route: Any) -> None:
        if "/logs" in route.request.url and "follow=false" not in route.request.url:
            route.abort()  # A stream has no end that one could wait for.
            return
        found = route.fetch()
        told = found.headers.get("content-type", "")
        if found.status == 200 and ("json" in told or "event-stream" in told):
            route.fulfill(response=found, body=told_otherwise(told, found.text(), texts))
        else:
            route.fulfill(response=found)

    def holds(place: str) -> None:
        assert tab.locator("img, body script, iframe, [onerror], main [style*=url]").count() == 0, place
        assert tab.locator("a[href^=javascript]").count() == 0, place
        assert not set(tab.locator("body").inner_text()) & set("\x1b\x00\x07\x9b\u202e\u2066"), place
        assert tab.evaluate("document.title") != "ran", place
        assert faults == [], place

    sign_in(tab, served, AccessRole.ADMIN)
    for place in (
        "/v1/runs*",
        "/v1/runs/**",
        "/v1/pools*",
        "/v1/pools/**",
        "/v1/providers*",
        "/v1/projects*",
        "/v1/projects/**",
        "/v1/keys*",
        "/v1/audit*",
    ):
        tab.route(f"**{place}", answer)
    spoken = f"/#/runs/{chat}"
    everywhere = [
        *places(run),
        *PLACES,
        f"/#/submit/{run}",
        f"{spoken}/trajectories",
        f"{spoken}/trajectories/2/1/0",
        f"{spoken}/beside/2/1/1,2/1/2",
    ]

    @settings(
        max_examples=1,
        deadline=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
        database=None,
    )
    @given(st.lists(st.one_of(st.sampled_from(HOSTILE), st.text(max_size=30)), min_size=1, max_size=5))
    @example(list(HOSTILE))
    def hold(said: list[str]) -> None:
        texts[:] = said
        tab.goto(served.url + "/#/login/" + 64 * "0" + "/here")
        for place in everywhere:
            tab.goto(served.url + place)
            settled(tab)
            holds(place)
        tab.goto(f"{served.url}{spoken}/trajectories")
        tab.fill("#said", "It is")
        tab.press("#said", "Enter")
        tab.wait_for_selector("#found mark", state="attached")
        holds("what was found")
        tab.goto(f"{served.url}/#/runs/{run}")
        settled(tab)
        for button in tab.locator("[aria-label=Actions] button:not(:text('another'))").all():
            button.click()
            tab.wait_for_selector("dialog")
            holds(button.inner_text())
            tab.keyboard.press("Escape")
            tab.wait_for_selector("dialog", state="detached")

    hold()


def test_labels_and_caps_stay_as_they_are_whatever_they_are_called(tab: Any, served: Served, run: str) -> None:
    labels = {"note": "a, b=c\\", "team": "agents"}
    with served.site.store.writing() as tx:
        tx.execute(sa.update(runs).values(labels=labels, providers=["spot", "length"]))
    sign_in(tab, served, at=f"/#/runs/{run}")
    tab.click("button:text-is('Labels')")
    tab.fill("dialog [name=labels]", tab.input_value("dialog [name=labels]") + ", more=1")
    tab.click("dialog button[type=submit]")
    tab.wait_for_selector("dialog", state="detached")
    assert served.site.client().get(f"/v1/runs/{run}").json()["labels"] == {**labels, "more": "1"}
    tab.click("button:text-is('Caps')")
    tab.fill("dialog [name=length]", "3")
    tab.click("dialog button[type=submit]")
    tab.wait_for_selector("dialog", state="detached")
    assert served.site.client().get(f"/v1/runs/{run}").json()["caps"] == {"length": 3}


def test_a_dialog_ends_with_its_view_and_its_session(tab: Any, served: Served, run: str) -> None:
    sign_in(tab, served)
    tab.click(f"a[href='#/runs/{run}']")
    tab.click("button:text-is('Stop')")
    tab.go_back()
    tab.wait_for_selector("#runs tr[data-key]")
    tab.wait_for_selector("dialog", state="detached")
    tab.go_forward()
    tab.click("button:text-is('Stop')")
    with served.site.store.writing() as tx:
        tx.execute(sa.update(sessions).values(expires_us=1))
    tab.wait_for_selector("text=Your session is over. Sign in again.")
    tab.wait_for_selector("dialog", state="detached")


def test_addresses_and_filters_of_nothing_say_so(tab: Any, served: Served, run: str) -> None:
    sign_in(tab, served, at=f"/#/runs/{run}/trajectories")
    tab.locator("#trajectories tbody tr").nth(19).wait_for()
    tab.fill("#of-group", "<b>")
    tab.press("#of-group", "Enter")
    tab.wait_for_selector("text=This cannot be shown: query/group")
    assert tab.locator("#trajectories tbody tr").count() == 0, "what was there is of another question"
    tab.fill("#jump", "3/0/2")
    tab.press("#jump", "Enter")
    tab.wait_for_selector("h1 >> text=Trajectory 3/0/2")
    for place in (f"/#/runs/{run}/trajectories/all", "/#/pools/..", "/#/nowhere"):
        tab.goto(served.url + place)
        tab.wait_for_selector("text=There is nothing at this address")
    tab.goto(f"{served.url}/#/submit")
    tab.fill("#config", '[model]\ncheckpoint = "nowhere"')
    tab.click("#check")
    tab.locator("#found span", has_text="no base policy").wait_for()
    assert tab.locator("#found span", has_text="no base policy").count() == 1, "a fault is told once"
    tab.goto(f"{served.url}/#/submit/run_0")
    tab.wait_for_selector("text=This cannot be shown")


def test_a_run_that_goes_back_is_drawn_as_it_is_now(tab: Any, served: Served, run: str) -> None:
    sign_in(tab, served, AccessRole.VIEWER, at=f"/#/runs/{run}")
    reward = tab.locator("figure", has_text="mean reward")
    reward.get_by_text("at 29").wait_for()
    shutil.rmtree(served.site.settings.run_dir(run))
    write_run(served.site.settings.run_dir(run), steps=10)
    seen(served, run, RunPhase.RUNNING, step=10)
    reward.get_by_text("at 9").wait_for()
