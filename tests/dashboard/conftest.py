"""A server on a port of its own, and a Chromium that looks at it."""

import asyncio
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from elastic.protocol.http_server import serving
from elastic.server.api.app import create_app
from elastic.server.serving import listen
from tests.server.conftest import Site, make_site, submission

__all__ = ["submission"]
sync_api = pytest.importorskip("playwright.sync_api", reason="`make test-dashboard` brings Playwright")
CHROMIUM = shutil.which("chromium")
HANGS_S = 120.0
"""After so long something waits for what will not come, however slow the machine is."""


class Served:
    """A site behind a port, on a loop and a thread of its own; it may go down and come up again."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.port = 0
        self.url = ""
        self._over: tuple[asyncio.AbstractEventLoop, asyncio.Event, threading.Thread] | None = None

    def up(self) -> None:
        """Serve, as another process of the server would after the last one."""
        loop, over, up = asyncio.new_event_loop(), asyncio.Event(), threading.Event()
        app = self.site.app = create_app(self.site.store, self.site.settings) if self.port else self.site.app

        async def serve() -> None:
            with listen("127.0.0.1", self.port) as listener:
                async with serving(app, listener) as url:
                    self.url = url
                    self.port = int(url.rpartition(":")[2])
                    up.set()
                    await over.wait()

        thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
        thread.start()
        assert up.wait(HANGS_S)
        self._over = loop, over, thread

    def down(self) -> None:
        if self._over is not None:
            loop, over, thread = self._over
            loop.call_soon_threadsafe(over.set)
            thread.join(HANGS_S)
            loop.close()
            self._over = None


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    served = Served(make_site(tmp_path))
    served.up()
    yield served
    served.down()
    served.site.store.close()


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("there is no chromium: apt install chromium")
    with sync_api.sync_playwright() as playwright:
        # Chromium's sandbox cannot be had by root.
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


def opened(browser: Any, **settings: Any) -> Any:
    """A fresh profile, whose pages wait as long as it takes."""
    context = browser.new_context(viewport={"width": 1200, "height": 900}, **settings)
    context.set_default_timeout(1e3 * HANGS_S)
    return context


AXE = Path(__file__).parents[2] / ".cache/dashboard/axe.min.js"


@pytest.fixture(params=["light", "dark"])
def audited(browser: Any, request: pytest.FixtureRequest) -> Iterator[Any]:
    """A tab into which axe-core may come; its `violations` are what is found of the page as it is."""
    context = opened(browser, bypass_csp=True, color_scheme=request.param)
    page = context.new_page()
    yield page
    context.close()


def violations(page: Any) -> list[str]:
    """What axe-core finds wrong: contrast, names, roles, order."""
    page.evaluate(AXE.read_text())
    found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")["violations"]
    return [f"{one['id']}: {node['html'][:200]} {node['failureSummary']}" for one in found for node in one["nodes"]]


@pytest.fixture
def faults() -> list[str]:
    """What a page failed at, or its policy forbade."""
    return []


def is_unkeyed(request: Any) -> bool:
    """Whether a request that changes something would be carried out as often as it is sent."""
    return request.method not in ("GET", "HEAD") and "idempotency-key" not in request.headers


@pytest.fixture
def tab(browser: Any, faults: list[str]) -> Iterator[Any]:
    """A tab of a fresh profile, whose faults fail the test."""
    context = opened(browser)
    page = context.new_page()
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("request", lambda request: faults.append(f"no key: {request.url}") if is_unkeyed(request) else None)
    page.on("console", lambda message: faults.append(message.text) if "Content Security" in message.text else None)
    yield page
    context.close()
    assert faults == []
