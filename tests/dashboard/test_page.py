"""The page in Chromium: what is shown is what holds, a write needs its session, and nothing foreign is run."""

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from elastic.cli.login import code_of
from elastic.protocol.api import AccessRole, ProviderFigures, RunFigures, RunPhase
from elastic.server.identity.oidc import IdentityProvider
from elastic.server.settings import ClaimMapping, OidcSettings
from elastic.server.store import runs as runs_store
from elastic.server.store.tables import runs
from tests.dashboard.conftest import Served
from tests.report.chat_run import MARKUP, ChatRun
from tests.report.evaluated_run import evaluated_run, evaluation
from tests.server.conftest import Submission
from tests.server.issuer import CLIENT_ID, CLIENT_SECRET, serving_issuer

pytestmark = pytest.mark.dashboard


def submitted(served: Served, body: dict[str, Any], project: str = "ours") -> str:
    client = served.site.client(served.site.key(project, AccessRole.RUNNER))
    return client.post("/v1/runs", json=body).json()["id"]


def seen(served: Served, run: str, phase: RunPhase, *, cause: str = "", **figures: Any) -> None:
    """What a runner would write down."""
    usual: dict[str, Any] = {"steps": 100, "providers": {"spot": ProviderFigures(ready=3, usd=1.5)}}
    told = RunFigures(**usual | figures).model_dump()
    with served.site.store.writing() as tx:
        tx.execute(sa.update(runs).where(runs.c.id == run).values(phase=phase.value, cause=cause, figures=told))


def wanted(served: Served, run: str) -> str:
    with served.site.store.reading() as connection:
        found = runs_store.find(connection, run)
    assert found is not None
    return found.wanted


def stop(tab: Any) -> None:
    """Stop the run that is shown: what that does is said before."""
    tab.click("button:text-is('Stop')")
    tab.wait_for_selector("dialog >> text=It can be resumed from there.")
    tab.click("dialog button[type=submit]")
    tab.wait_for_selector("dialog", state="detached")


@pytest.fixture
def chat(served: Served, submission: Submission) -> str:
    """A run of conversations, with what was said in them."""
    body = submission()
    body["config"]["front"] = {"tool_parser": "hermes"}
    made = submitted(served, body)
    chats = ChatRun(served.site.settings.run_dir(made), served.site.settings.models[0] / "policy")
    chats.small()
    chats.close()
    seen(served, made, RunPhase.RUNNING, step=3)
    return made


def sign_in(tab: Any, served: Served, role: AccessRole = AccessRole.RUNNER, at: str = "/", key: str = "") -> None:
    tab.goto(served.url + at)
    tab.fill("#key", key or served.site.key("ours", role))
    tab.click("text=Sign in >> nth=-1")
    tab.wait_for_selector("#sign-out:visible")


def test_signing_in_and_out(tab: Any, served: Served, submission: Submission) -> None:
    submitted(served, submission(), "theirs")
    run = submitted(served, submission())
    tab.goto(served.url)
    tab.fill("#key", "elastic_nothing")
    tab.click("text=Sign in >> nth=-1")
    tab.wait_for_selector("text=the key is not valid")
    sign_in(tab, served)
    tab.wait_for_selector(f"a[href='#/runs/{run}']")
    assert tab.locator("#runs tr[data-key]").count() == 1, "only one's own project's runs"
    (cookie,) = tab.context.cookies()
    assert (cookie["httpOnly"], cookie["sameSite"]) == (True, "Strict")
    assert tab.evaluate("document.cookie") == ""
    tab.reload()
    tab.wait_for_selector(f"a[href='#/runs/{run}']")
    tab.click("#sign-out")
    tab.wait_for_selector("text=You have signed out.")
    tab.context.add_cookies([cookie])
    tab.reload()
    tab.wait_for_selector("#key")


def test_a_run_is_live(tab: Any, served: Served, submission: Submission, tmp_path: Path) -> None:
    run = submitted(served, submission())
    seen(served, run, RunPhase.RUNNING, step=3, usd=1.5, tokens_per_s=812.4, last_success_rate=0.25)
    sign_in(tab, served)
    row = tab.locator("#runs tr[data-key]")
    row.get_by_text("3/100").wait_for()
    shown = ["3/100", "–", "25.0 %", "812", "3", "0", "$1.50"]
    assert row.inner_text().split("\t")[3:10] == shown, "phases are words beside a mark"
    tab.click(f"a[href='#/runs/{run}']")
    tab.wait_for_selector("#figures >> text=3/100")
    seen(served, run, RunPhase.RUNNING, step=4, usd=1.75, tokens_per_s=900, last_success_rate=0.5)
    tab.wait_for_selector("#figures >> text=4/100")
    tab.wait_for_selector("#figures >> text=50.0 %")
    tab.screenshot(path=str(tmp_path / "run.png"), full_page=True)
    stop(tab)
    assert wanted(served, run) == runs_store.STOP


def test_what_the_server_tells_is_text(tab: Any, served: Served, submission: Submission, faults: list[str]) -> None:
    run = submitted(served, submission())
    markup = "<img src=x onerror=document.title='run'><script>document.title='run'</script>"
    seen(served, run, RunPhase.FAILED, cause=markup)
    sign_in(tab, served, at=f"/#/runs/{run}")
    tab.wait_for_selector("text=onerror=document")
    assert tab.title() == "small – Elastic"
    assert faults == []
    for code in ("document.body.innerHTML = '<b>x</b>'", "document.createElement('script').text = '1'"):
        assert tab.evaluate(f"() => {{ try {{ {code}; return 'ran' }} catch {{ return 'refused' }} }}") == "refused"
    tab.evaluate("() => document.body.setAttribute('style', 'color: red')")
    assert faults
    faults.clear()


def test_a_stale_page_says_so_and_changes_nothing(tab: Any, served: Served, submission: Submission) -> None:
    run = submitted(served, submission())
    seen(served, run, RunPhase.RUNNING, step=1)
    sign_in(tab, served, at=f"/#/runs/{run}")
    tab.wait_for_selector("text=Stop")
    key = served.site.key("ours", AccessRole.RUNNER)
    other = tab.context.new_page()
    other.goto(served.url)
    headers = json.dumps({"authorization": f"Bearer {key}"})
    assert other.evaluate(f"fetch('/v1/session', {{method: 'POST', headers: {headers}}}).then(a => a.status)") == 201
    tab.click("button:text-is('Stop')")
    tab.click("dialog button[type=submit]")
    tab.wait_for_selector("dialog >> text=this page is of another session")
    assert wanted(served, run) == runs_store.RUN
    tab.reload()
    stop(tab)
    assert wanted(served, run) == runs_store.STOP


def test_a_page_of_an_older_server_says_so(tab: Any, served: Served) -> None:
    tab.route("**/v1", lambda route: route.fulfill(json={"object": "server", "version": "99", "api": "v1"}))
    tab.goto(served.url)
    tab.wait_for_selector("text=The server is now of version 99")


def test_a_viewer_has_no_buttons_and_a_revoked_key_no_page(tab: Any, served: Served, submission: Submission) -> None:
    run = submitted(served, submission())
    sign_in(tab, served, AccessRole.VIEWER, at=f"/#/runs/{run}")
    tab.wait_for_selector("#figures")
    assert tab.locator("main button").count() == 0
    tab.goto(f"{served.url}/#/submit")
    tab.wait_for_selector("text=You are signed in as ours-viewer, viewer; this takes runs:write.")
    assert tab.locator("main form").count() == 0, "what one may not do is not asked for"
    tab.go_back()
    tab.wait_for_selector("#figures")
    admin = served.site.client()
    viewers = [one["id"] for one in admin.get("/v1/keys?limit=100").json()["data"] if one["name"] == "ours-viewer"]
    assert admin.delete(f"/v1/keys/{viewers[0]}").status_code == 204
    tab.wait_for_selector("text=Your session is over")


def test_people_sign_in_with_a_provider_and_let_a_terminal_in(tab: Any, served: Served) -> None:
    """From another site and back: the session's cookie is Strict, and the page has it nevertheless."""
    state, secret = served.site.app.state.server, "elastic_made-by-a-terminal"
    digest = hashlib.sha256(secret.encode()).hexdigest()
    with serving_issuer("localhost") as issuer:
        mapping = ClaimMapping(claim="email", value="*@example.com", project="ours", role=AccessRole.RUNNER)
        settings = OidcSettings(
            issuer=issuer.url, client_id=CLIENT_ID, client_secret=CLIENT_SECRET, name="Tests", mappings=(mapping,)
        )
        state.settings, state.provider = replace(state.settings, oidc=settings), IdentityProvider(settings)
        tab.goto(f"{served.url}/#/login/{digest}/laptop")
        tab.click("text=Sign in with Tests")
        tab.click("#go")
        tab.wait_for_selector(f"#code >> text={code_of(digest)}")
        assert tab.inner_text("#who") == "ada@example.com, runner"
        (cookie,) = tab.context.cookies()
        assert (cookie["httpOnly"], cookie["sameSite"]) == (True, "Strict")
        assert served.site.client(secret).get("/v1/me").status_code == 401
        tab.click("#allow")
        tab.wait_for_selector("text=The terminal is logged in")
        assert served.site.client(secret).get("/v1/me").json()["name"] == "laptop"
        tab.goto(f"{served.url}/#/projects")
        own = tab.locator("#own-keys tbody tr", has_text="laptop")
        own.locator("text=Revoke").click()
        tab.click("dialog button[type=submit]")
        own.get_by_text("revoked").wait_for()
        assert served.site.client(secret).get("/v1/me").status_code == 401
        tab.click("text=Make a key")
        assert tab.locator("dialog [name=role] option").all_inner_texts() == ["viewer", "runner"], (
            "no more than oneself"
        )
        tab.fill("dialog [name=name]", "desktop")
        tab.click("dialog button[type=submit]")
        made = tab.inner_text("#secret")
        assert served.site.client(made).get("/v1/me").json()["name"] == "desktop"
        tab.click("dialog >> text=Close")
        tab.reload()
        tab.wait_for_selector("#sign-out:visible")
        tab.click("#sign-out")
        issuer.broken = True
        state.provider = IdentityProvider(settings)
        tab.click("text=Sign in with Tests")
        tab.wait_for_selector("text=The identity provider does not answer")


def test_evaluations_are_drawn_by_version(tab: Any, served: Served, submission: Submission, tmp_path: Path) -> None:
    run = submitted(served, submission())
    rewards = ([[-1.0, 0.0]], [[1.0, 1.0]], [[0.5, 0.0]])
    rows = [evaluation(10 * n, 5.0 + n, {"sums": tasks}) for n, tasks in enumerate(rewards)]
    evaluated_run(served.site.settings.run_dir(run), *rows, status="running")
    seen(served, run, RunPhase.RUNNING, step=3)
    sign_in(tab, served, AccessRole.VIEWER, at=f"/#/runs/{run}")
    tab.wait_for_selector("[aria-label='Evaluation: avg@k. avg@2: last 0.250, lowest −0.500, highest 1.000']")
    passed = tab.locator("figure", has_text="Evaluation: pass@k")
    assert "pass@2 1.000" in passed.inner_text()
    passed.locator("[role=img]").press("Home")
    passed.get_by_text("at 0").wait_for()
    assert "pass@2 0.000" in passed.inner_text(), "the arrow keys go from value to value"
    tab.screenshot(path=str(tmp_path / "evaluations.png"), full_page=True)


def test_trajectories_are_found_and_read(tab: Any, served: Served, chat: str, tmp_path: Path) -> None:
    sign_in(tab, served, AccessRole.VIEWER, at=f"/#/runs/{chat}/trajectories")
    rows = tab.locator("#trajectories tbody tr")
    rows.nth(15).wait_for()
    tab.check("#failed")
    tab.wait_for_function("() => document.querySelectorAll('#trajectories tbody tr').length === 1")
    assert MARKUP in rows.first.inner_text(), "what failed it is text"
    tab.screenshot(path=str(tmp_path / "list.png"), full_page=True)
    tab.uncheck("#failed")
    tab.fill("#said", MARKUP.upper())
    tab.press("#said", "Enter")
    tab.wait_for_selector("text=All 17 of these trajectories are searched.")
    assert tab.locator("#found tbody tr").count() == 1
    assert tab.locator("#found mark").all_inner_texts() == [MARKUP, MARKUP], "of the question and of its answer"
    tab.screenshot(path=str(tmp_path / "found.png"), full_page=True)
    tab.fill("#said", "")
    tab.select_option("#order", "worst")
    tab.fill("#of-group", "2/1")
    tab.press("#of-group", "Enter")
    tab.wait_for_function("() => document.querySelectorAll('#trajectories tbody tr').length === 4")
    assert [row.split("\t")[1] for row in rows.all_inner_texts()] == ["2/1/1", "2/1/2", "2/1/0", "2/1/3"]
    tab.click("a:text-is('2/1/0')")
    tab.wait_for_selector("text=Rewards by part: right 1.00, short 0.100")
    assert tab.locator(".message header b").all_inner_texts()[:5] == [
        "system",
        "user",
        "assistant",
        "tool",
        "assistant",
    ]
    tab.wait_for_selector('text=add({"a": 1, "b": 1})')
    tab.wait_for_selector("text=Branch 1: policy critic, reward 0.250")
    tab.locator("button:text-is('Tokens') >> nth=-1").click()
    token = tab.locator(".message .token").first
    assert "log-probability" in token.get_attribute("title")
    tab.screenshot(path=str(tmp_path / "trajectory.png"), full_page=True)
    for name in ("2/1/1", "2/1/2", "2/1/3"):
        tab.goto(f"{served.url}/#/runs/{chat}/trajectories/{name}")
        tab.wait_for_selector(f"text=Trajectory {name}")
        tab.wait_for_selector(".message.policy")
        for button in tab.locator(".message button").all():
            button.click()
        shown = tab.locator("main").inner_text()
        assert not set(shown) & set("\x1b\x00\x07\x9b\u202e\u2066")
        assert tab.title() == "Elastic"
