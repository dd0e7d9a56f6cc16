"""Each view in Chromium: with data, without, with hostile texts, live, and as those see it who see no colours."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from elastic.protocol.api import AccessRole, RunFigures, RunPhase
from elastic.server.api.routes.page import HEADERS
from tests.dashboard.conftest import Served, violations
from tests.dashboard.test_page import chat, seen, sign_in, submitted
from tests.server.conftest import Submission
from tests.server.written_runs import status_at, write_run

__all__ = ["chat"]
pytestmark = pytest.mark.dashboard
PAGE = Path(__file__).parents[2] / "elastic/server/api/page"
MARKUP = "<img src=x onerror=document.title='run'>\u202e\x1b[2J"
CONTROLS = "a[href], button, input, select, textarea, summary, [role=img][tabindex], [role=region][tabindex]"
VISIBLE = "(one) => one.checkVisibility({ visibilityProperty: true }) && !one.disabled && one.tabIndex >= 0"
OUTLINED = (
    "document.activeElement === document.body || getComputedStyle(document.activeElement).outlineStyle !== 'none'"
)
"""What can be used, is there to be used, and is marked while one is there."""
LISTENS = """() => {
    const place = "/page/live_worker.js";
    const policy = trustedTypes.createPolicy("elastic", { createScriptURL: () => place });
    window.pages = Array.from({ length: 97 }, () => {
        const worker = new SharedWorker(policy.createScriptURL(place), { type: "module", name: "elastic" });
        const page = { heard: [], port: worker.port };
        page.port.onmessage = ({ data }) => page.heard.push(data);
        page.port.start();
        page.port.postMessage({ seen: true, follows: false });
        return page;
    });
}"""
"""As many pages more as the browser's worker hears of it."""
PARTS = ("", "/workers", "/trajectories", "/events", "/logs", "/configuration")


@pytest.fixture
def run(served: Served, submission: Submission) -> str:
    """A run of thirty steps with losses, whose texts are hostile."""
    made = submitted(served, submission(labels={"team": "agents"}))
    directory = served.site.settings.run_dir(made)
    write_run(directory, steps=30, events=300, name=MARKUP, cause=MARKUP)
    (directory / "logs").mkdir()
    (directory / "logs/process.log").write_text(f"step 1\n{MARKUP}\n")
    stands = RunFigures.model_validate(msgspec.to_builtins(status_at(30, 100)))
    seen(served, made, RunPhase.RUNNING, cause=MARKUP, **stands.model_dump(exclude={"steps", "providers", "phase"}))
    return made


def places(run: str) -> Iterator[str]:
    yield "/#/"
    yield from (f"/#/runs/{run}{part}" for part in PARTS)
    yield f"/#/compare/{run},{run}"
    yield "/#/submit"


def settled(tab: Any) -> None:
    tab.wait_for_selector("main:not([aria-busy]) h1")


def test_nothing_of_the_page_makes_markup_of_texts() -> None:
    forbidden = re.compile(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|\beval\(|new Function|srcdoc"
    )
    modules = sorted(PAGE.glob("*.js"))
    for module in modules:
        text = module.read_text()
        assert not forbidden.search(text), module.name
        assert "http://www.w3.org/2000/svg" in text or "//" not in re.sub(
            r"^\s*//.*|\s//\s.*|\"//\"", "", text, flags=re.M
        )
        assert len(text.splitlines()) < 300, module.name
    assert len(modules) > 20
    assert "unsafe" not in HEADERS["content-security-policy"]


def test_every_view_shows_a_run_whose_texts_are_hostile(tab: Any, served: Served, run: str, tmp_path: Path) -> None:
    sign_in(tab, served)
    for number, place in enumerate(places(run)):
        tab.goto(served.url + place)
        settled(tab)
        shown = tab.locator("main").inner_text()
        assert not set(shown) & set("\x1b\x00\x07\x9b\u202e\u2066"), place
        assert tab.locator("main img").count() == 0
        assert "cannot be shown" not in shown, (place, shown)
        assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth"), place
        tab.screenshot(path=str(tmp_path / f"{number}.png"), full_page=True)


def test_every_view_is_narrow_too_and_says_what_it_lacks(tab: Any, served: Served, submission: Submission) -> None:
    """On a telephone, of a run that has not begun: what there is not is said."""
    bare = submitted(served, submission())
    sign_in(tab, served)
    tab.set_viewport_size({"width": 400, "height": 800})
    for place in places(bare):
        tab.goto(served.url + place)
        settled(tab)
        assert tab.evaluate("document.documentElement.scrollWidth") <= 400, place
    tab.goto(f"{served.url}/#/runs/{bare}")
    tab.wait_for_selector("text=There are no figures yet")
    tab.goto(f"{served.url}/#/runs/{bare}/events")
    tab.wait_for_selector("text=Nothing has happened yet.")
    tab.goto(f"{served.url}/#/runs/run_00000000000000000000000000")
    tab.wait_for_selector("text=There is no such run")


def test_every_view_is_for_all_who_read_it(audited: Any, served: Served, run: str, chat: str) -> None:
    audited.goto(served.url)
    audited.wait_for_selector("#key")
    assert violations(audited) == []
    sign_in(audited, served)
    spoken = f"/#/runs/{chat}"
    said = (f"{spoken}/trajectories", f"{spoken}/trajectories/2/1/0", f"{spoken}/beside/2/1/0,2/1/1")
    for place in (*places(run), *said, f"/#/submit/{run}", f"/#/login/{64 * '0'}/here", "/#/nowhere"):
        audited.goto(served.url + place)
        settled(audited)
        assert violations(audited) == [], place
    for way in ("Tokens", "Versions"):
        audited.goto(f"{served.url}{said[1]}")
        audited.click(f"button:text-is('{way}') >> nth=0")
        assert violations(audited) == [], way
    audited.goto(f"{served.url}/#/runs/{run}")
    audited.click("button:text-is('Stop')")
    audited.wait_for_selector("dialog")
    assert violations(audited) == []


def test_losses_are_told_with_what_followed(tab: Any, served: Served, run: str, tmp_path: Path) -> None:
    sign_in(tab, served, AccessRole.VIEWER, at=f"/#/runs/{run}/workers")
    tab.wait_for_selector("#losses >> text=preempted")
    assert tab.locator("#losses tbody tr").count() == 3
    assert tab.locator("#lanes li").count() == 4
    tab.wait_for_selector("[aria-label='Asked for a GPU-hour. spot: last $3.10, lowest $2.40, highest $3.10']")
    tab.locator("#leases tbody tr").first.wait_for()
    shown = tab.locator("#leases tbody tr").last.inner_text().split("\t")
    assert shown[5:] == ["$0.600", "50.0 %", "$4.80", "goes on"]
    tab.goto(f"{served.url}/#/providers")
    tab.wait_for_selector("[aria-label='GPUs to be had besides those held. spot: last 1, lowest 1, highest 4']")
    tab.screenshot(path=str(tmp_path / "providers.png"), full_page=True)
    tab.goto(f"{served.url}/#/runs/{run}/events")
    tab.wait_for_selector("text=/Lease .* was preempted/")
    assert tab.locator("#events li:visible").count() == 43
    tab.fill("[type=search]", "granted")
    assert tab.locator("#events li:visible").count() == 3
    tab.fill("[type=search]", "")
    tab.check("text=Routine too")
    tab.wait_for_selector("text=/Trajectory .* ends with reward/")


def test_a_log_is_followed(tab: Any, served: Served, run: str) -> None:
    asked: list[str] = []
    tab.on("request", lambda request: asked.append(request.url) if "/logs?" in request.url else None)
    sign_in(tab, served, AccessRole.VIEWER, at=f"/#/runs/{run}/logs")
    tab.wait_for_selector("#log >> text=step 1")
    with (served.site.settings.run_dir(run) / "logs/process.log").open("a") as log:
        for step in range(2, 5):
            log.write(f"step {step} of the test\n")
            log.flush()
            tab.wait_for_selector(f"#log >> text=step {step} of the test")
    assert len(asked) == 2, "what there is, and a stream of what follows"


def test_many_runs_are_found_ordered_and_compared(tab: Any, served: Served, submission: Submission) -> None:
    for number in range(130):
        made = submitted(served, submission(labels={"team": "math" if number % 2 else "agents", "n": str(number)}))
        seen(served, made, RunPhase.FAILED if number % 10 == 0 else RunPhase.RUNNING, step=number, usd=float(number))
    sign_in(tab, served)
    tab.wait_for_selector("text=100+ runs")
    assert tab.locator("#runs tr[data-key]").count() < 60, "what is not seen is not there"
    tab.evaluate("document.getElementById('runs').scrollTo(0, 1e6)")
    tab.wait_for_selector("text=130 runs")
    tab.click("text=Cost")
    tab.wait_for_selector("#runs tr[data-key] >> nth=0 >> text=$129.00")
    tab.click("button:has-text('Cost')")
    tab.wait_for_selector("#runs tr[data-key] >> nth=0 >> text=$0.00")
    tab.select_option("#phase", "failed")
    tab.wait_for_selector("text=13 runs")
    tab.fill("#label", "n=20")
    tab.wait_for_selector("text=/^1 run$/")
    assert "label=n%3D20" in tab.url
    tab.goto(served.url + "/#/?search=math")
    tab.wait_for_selector("text=65 runs")
    for box in tab.locator("#runs input[type=checkbox]").all()[:3]:
        box.check()
    tab.click("text=Compare 3 runs")
    tab.wait_for_selector("#runs-compared tbody tr >> nth=2")


def open_now(served: Served) -> int:
    """How many streams the server has of all browsers."""
    streams = served.site.app.state.server.streams
    return sum(len(one) for _, one in streams._open.values())


def test_a_hundred_pages_of_a_browser_have_one_stream(tab: Any, served: Served, run: str) -> None:
    """Two of them are whole; of the others there is what they hear by. A few may follow a log besides."""
    asked: list[str] = []
    tab.context.on("request", lambda request: asked.append(request.url))
    sign_in(tab, served, at=f"/#/runs/{run}")
    other, light = tab.context.new_page(), tab.context.new_page()
    other.goto(f"{served.url}/#/runs/{run}")
    light.goto(f"{served.url}/page/icon.svg")
    light.evaluate(LISTENS)
    for page in (tab, other):
        page.wait_for_selector("#figures >> text=30/100")
    assert open_now(served) == 1
    seen(served, run, RunPhase.RUNNING, step=31)
    for page in (tab, other):
        page.wait_for_selector("#figures >> text=31/100")
    light.wait_for_function(
        "() => pages.every((page) => page.heard.some((told) => told.kind === 'run' && told.run.figures.step === 31))"
    )
    assert not [url for url in asked if "/figures" in url]
    light.evaluate("for (const page of pages) page.port.postMessage({ seen: true, follows: true })")
    light.wait_for_function("() => pages.every((page) => page.heard.some((told) => told.kind === 'follow'))")
    assert light.evaluate("pages.filter((page) => page.heard.at(-1).granted).length") == 3
    other.goto(f"{served.url}/#/runs/{run}/logs")
    other.wait_for_selector("text=Other windows follow logs already")
    other.wait_for_selector("#log >> text=step 1")
    assert open_now(served) == 1
    light.evaluate("for (const page of pages) page.port.postMessage({ seen: false, follows: true })")
    other.wait_for_selector("text=Other windows follow logs already", state="detached")
    while open_now(served) < 2:
        tab.wait_for_timeout(50)


def test_pages_that_are_hidden_ask_for_nothing_until_they_are_seen(tab: Any, served: Served, run: str) -> None:
    sign_in(tab, served)
    pages = [tab.context.new_page() for _ in range(3)]
    for page, place in zip(pages, (f"/#/runs/{run}/logs", "/#/pools", f"/#/runs/{run}"), strict=True):
        page.clock.install()
        page.goto(served.url + place)
        settled(page)
    pages[0].wait_for_selector("#log >> text=step 1")
    hide = "(hidden) => { Object.defineProperty(document, 'hidden', { configurable: true, value: hidden }); "
    hide += "document.dispatchEvent(new Event('visibilitychange')); }"
    asked: list[str] = []
    for page in (tab, *pages):
        page.evaluate(hide, True)
    while open_now(served):
        tab.wait_for_timeout(50)
    tab.context.on("request", lambda request: asked.append(request.url))
    for page in pages:
        page.clock.run_for(60_000)
    seen(served, run, RunPhase.RUNNING, step=31)
    assert asked == []
    pages[-1].evaluate(hide, False)
    pages[-1].wait_for_selector("#figures >> text=31/100")
    with (served.site.settings.run_dir(run) / "logs/process.log").open("a") as log:
        log.write("step 31\n")
    pages[0].evaluate(hide, False)
    pages[0].wait_for_selector("#log >> text=step 31")


def test_everything_is_reached_by_the_tabulator_key_and_is_seen_to_be(
    tab: Any, served: Served, run: str, chat: str
) -> None:
    sign_in(tab, served, AccessRole.ADMIN)
    spoken = f"/#/runs/{chat}"
    for place in (*places(run), "/#/pools", "/#/providers", "/#/projects", f"{spoken}/trajectories/2/1/0"):
        tab.goto(served.url + place)
        settled(tab)
        tab.evaluate("document.activeElement.blur()")
        wanted = tab.evaluate(
            f"window.left = [...document.querySelectorAll({CONTROLS!r})].filter({VISIBLE}); left.length"
        )
        for _ in range(2 * wanted + 10):
            tab.keyboard.press("Tab")
            if not tab.evaluate("left = left.filter((one) => one !== document.activeElement), left.length"):
                break
            assert tab.evaluate(OUTLINED), (place, tab.evaluate("document.activeElement.outerHTML.slice(0, 200)"))
        assert tab.evaluate("left.map((one) => one.outerHTML.slice(0, 200))") == [], place


def test_a_run_is_submitted_after_a_look_at_what_it_will_do(tab: Any, served: Served, run: str) -> None:
    sign_in(tab, served, at=f"/#/runs/{run}")
    tab.click("text=Submit another")
    tab.wait_for_selector("#config")
    assert not tab.locator("#submit").is_visible()
    tab.click("#check")
    tab.wait_for_selector("text=It would run for 2 steps as small.")
    tab.fill("#budget", "5")
    assert not tab.locator("#submit").is_visible(), "what was checked is what is submitted"
    tab.fill("#config", "{")
    tab.click("#check")
    tab.wait_for_selector("text=The configuration is no JSON")
    tab.go_back()
    tab.click("text=Submit another")
    tab.fill("#budget", "5")
    tab.click("#check")
    tab.wait_for_selector("text=$5.00 in all")
    tab.click("#submit")
    tab.wait_for_selector("#figures >> text=of $5.00")


def test_the_example_is_of_this_server_or_says_what_it_needs(tab: Any, served: Served, run: str) -> None:
    policy = served.site.settings.models[0] / "policy/config.json"
    policy.touch()
    sign_in(tab, served, at="/#/submit")
    tab.wait_for_selector("text=base policies of this server: policy")
    tab.click("#check")
    tab.wait_for_selector("text=It would run for 100 steps as frozenlake.")
    policy.unlink()
    tab.reload()
    tab.wait_for_selector("main code >> text=/^elastic prepare/")
    tab.goto(f"{served.url}/#/runs/{run}/configuration")
    tab.wait_for_selector("text=/Submitted .* by ours-runner/")


def test_a_budget_and_caps_are_set_by_keyboard(tab: Any, served: Served, run: str) -> None:
    sign_in(tab, served, at=f"/#/runs/{run}")
    tab.focus("button:text-is('Budget')")
    tab.keyboard.press("Enter")
    tab.wait_for_selector("dialog >> text=Once what it costs")
    tab.keyboard.type("12.5")
    tab.keyboard.press("Enter")
    tab.wait_for_selector("#figures >> text=of $12.50")
    tab.focus("button:text-is('Caps')")
    tab.keyboard.press("Enter")
    tab.wait_for_selector("dialog >> text=0 drains the provider.")
    tab.keyboard.type("0")
    tab.keyboard.press("Enter")
    tab.wait_for_selector("dialog", state="detached")
    shown = served.site.client().get(f"/v1/runs/{run}").json()
    assert (shown["budget_usd"], shown["caps"]) == (12.5, {"spot": 0})
    audit = served.site.client().get("/v1/audit?limit=10").json()["data"]
    assert [one["resource"] for one in audit].count(f"/v1/runs/{run}") == 3, "its submission, too"
