"""The server's pages in Debian's Chromium, of a server that has much to show, and the server beneath many of them.

The server has 10,000 runs (1,000 with `--quick`), one of them with a journal of 10⁶ events (10⁵) that goes on, a pool
of 50 jobs and a trajectory of 100,000 tokens. Each view is opened in a browser that knows nothing of it yet:

- `first_paint_ms`: from then until what it is about is painted.
- `script_ms`: processor time of scripts until then, by Chromium's own count.
- `heap_mb`: what scripts have in memory then, after a collection of garbage.

Then all views that live are open while the run makes a step, twenty others change, and a job of the pool is cancelled
for another, every `EVERY_S`: ten times as often as steps come.

- `update_ms_p99`: processor time of scripts between two such moments; null for views that do not live.
- `heap_growth_mb`: what their heap has grown by at the end, after a collection of garbage.

At last `server`: one page that is real beside 49 whose requests and streams are those that real ones made before.

- `reads_per_s`, `reads_p50_ms`, `reads_p99_ms`: of the replayed pages; each read counts from when it was due.
- `slowest`: the kinds of reads whose own 99th percentile is highest, with it.
- `first_read_ms`: what the first read of a journal takes, for which the server starts a process; views come after it.

`--part views`, `--part updates` or `--part server` measures this part alone, where minutes of a quiet machine are rare.

Playwright is in the environment of `make test-dashboard`, by whose interpreter this goes on by itself. Where it or
Chromium is missing: `skipped_because`.
"""
# pyright: reportMissingImports=false, reportUnknownMemberType=false, reportUnknownVariableType=false

import asyncio
import importlib.util
import os
import random
import re
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import sqlalchemy as sa

from benchmarks import ROOT
from benchmarks._common import Arguments, Figures, benchmark, option
from benchmarks._hosted import CONFIG, HOST, HostedSite
from benchmarks._http_load import EventStream, ReadPool, ServerHungUp, request
from elastic.config import Config, validate
from elastic.protocol.api import RunFigures, RunPhase
from elastic.protocol.http_clients import sync_client
from elastic.server.serving import open_store
from elastic.server.store import Store, people, runs
from elastic.server.store.tables import runs as table
from tests.server.written_runs import WrittenRun

PYTHON = ROOT / ".cache" / "dashboard" / "bin" / "python"
JOBS = 50
TOKENS = 100_000
CHANGED = 20
"""Runs beside the long one that change at a time."""
EVERY_S = 3.0
PAGES = 49
CONNECTIONS = 60
TIMEOUT_S = 60.0
WIDTH, HEIGHT = 1400, 900
JOB = {"rollout_memory_gb": 1, "train_memory_gb": 1, "slo": 2.0, "plan": {"rollout_s": 10, "train_s": 10}}
LIVING = ("runs", "run", "workers", "events", "logs", "compare", "pools", "providers")
"""Views that show what happens as it happens."""
PARTS = ("views", "updates", "server")
SLOWEST = 5
_ID = re.compile(r"[a-z]+_[0-9A-HJKMNP-TV-Z]{26}")
# What a view is about is there once the shell says that it is no longer busy; two frames later it is painted.
PAINTED = """
window.painted = new Promise((resolve) => {
  const look = () => {
    const main = document.querySelector("main");
    if (!main?.querySelector("h1") || main.hasAttribute("aria-busy")) return setTimeout(look, 2);
    requestAnimationFrame(() => requestAnimationFrame(() => resolve(performance.now())));
  };
  look();
});
"""


@dataclass(frozen=True)
class PagesScale:
    """How much there is to show, and for how long it is looked at."""

    runs: int
    steps: int
    events: int
    updates: int
    replay_s: float


FULL = PagesScale(runs=10_000, steps=5_000, events=1_000_000, updates=120, replay_s=60.0)
QUICK = PagesScale(runs=1_000, steps=500, events=100_000, updates=2, replay_s=5.0)


@dataclass
class OpenView:
    """A view that is open, with what was asked for it of the server: when since its beginning, and what."""

    name: str
    page: Any
    counts: Any
    began_s: float = 0.0
    asked: list[tuple[float, str]] = field(default_factory=list[tuple[float, str]])
    script_ms: list[float] = field(default_factory=list[float])

    def scripts_ms(self) -> float:
        """Processor time of its scripts so far."""
        return 1e3 * self._counted("ScriptDuration")

    def heap_mb(self) -> float:
        """What its scripts have in memory, garbage apart."""
        self.counts.send("HeapProfiler.collectGarbage")
        return self._counted("JSHeapUsedSize") / 2**20

    def _counted(self, name: str) -> float:
        return {one["name"]: one["value"] for one in self.counts.send("Performance.getMetrics")["metrics"]}[name]


@dataclass
class PagesSite:
    """What is shown: a server, its long run that goes on, and what of it changes."""

    hosted: HostedSite
    store: Store
    client: httpx.Client
    long_run: str
    writer: WrittenRun
    others: list[str]
    chat: str
    trajectory: str

    def change(self) -> None:
        """A step of the long run, of some others too, and another job on the pool."""
        status = self.writer.grow()
        log = self.hosted.settings.run_dir(self.long_run) / "logs" / "process.log"
        with log.open("a") as lines:
            lines.write(f"step {status.step}/{status.steps}\n")
        figures = RunFigures.model_validate(_figures(status)).model_dump()
        with self.store.writing() as tx:
            for run in (self.long_run, *self.others):
                tx.execute(sa.update(table).where(table.c.id == run).values(figures=figures))
        going_on = self.client.get("/v1/pools/lab/jobs?limit=1").raise_for_status().json()["data"]
        self.client.post(f"/v1/pools/lab/jobs/{going_on[0]['id']}/cancel").raise_for_status()
        _submit(self.client)

    def places(self) -> dict[str, str]:
        """Where each view is."""
        run = f"/#/runs/{self.long_run}"
        return {
            "runs": "/#/",
            "run": run,
            "workers": f"{run}/workers",
            "trajectories": f"{run}/trajectories",
            "trajectory": f"/#/runs/{self.chat}/trajectories/{self.trajectory}",
            "events": f"{run}/events",
            "logs": f"{run}/logs",
            "configuration": f"{run}/configuration",
            "compare": f"/#/compare/{self.long_run},{self.others[0]}",
            "submit": "/#/submit",
            "pools": "/#/pools",
            "providers": "/#/providers",
            "projects": "/#/projects",
        }


def main(arguments: Arguments) -> Figures:
    if importlib.util.find_spec("playwright") is None and PYTHON.exists() and Path(sys.executable) != PYTHON:
        os.execv(PYTHON, [str(PYTHON), *sys.argv])
    if skipped := _missing():
        return {"skipped_because": skipped}
    scale = QUICK if arguments.quick else FULL
    with _site(scale) as site, _chromium() as browser:
        return measure(site, browser, scale, [arguments.part] if arguments.part else PARTS)


def _missing() -> str:
    if importlib.util.find_spec("playwright") is None:
        return "Playwright is not installed here: `make test-dashboard` sets up what has it"
    return "" if shutil.which("chromium") else "there is no chromium: apt-get install chromium"


@contextmanager
def _chromium() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        # Chromium's sandbox cannot be had by root.
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        yield browser
        browser.close()


@contextmanager
def _site(scale: PagesScale) -> Iterator[PagesSite]:
    from tests.pool.stand_in import POOL, StandIn
    from tests.report.chat_run import ChatRun

    with tempfile.TemporaryDirectory(prefix="elastic-pages-") as place:
        file = Path(place) / "pool.toml"
        file.write_text(POOL.format(directory=place))
        with (
            StandIn(file) as pool,
            HostedSite.up(1.0, 1.0, 1.0, pools=(pool.directory,), parts=("api",)) as hosted,
            sync_client(hosted.url, by_proxy=False, base_url=hosted.url, timeout=TIMEOUT_S) as client,
        ):
            client.headers["authorization"] = f"Bearer {hosted.secret}"
            store = open_store(hosted.settings)
            chat, long_run, *others = _filled(store, scale)
            writer = WrittenRun(hosted.settings.run_dir(long_run), steps=scale.steps, of=10**6, events=scale.events)
            (hosted.settings.run_dir(long_run) / "logs").mkdir()
            spoken = ChatRun(hosted.settings.run_dir(chat), hosted.settings.models[0] / "policy")
            spoken.trajectory("0/0/0", _long_talk(spoken), 1.0)
            spoken.close()
            for _ in range(JOBS):
                _submit(client)
            site = PagesSite(hosted, store, client, long_run, writer, others[:CHANGED], chat, "0/0/0")
            site.change()
            yield site
            writer.close()
            store.close()


def _filled(store: Store, scale: PagesScale) -> list[str]:
    """Put runs into the store, of which the newest are said to go on: their ids, the newest first."""
    config, made = validate(Config, CONFIG, "a job"), list[str]()
    with store.writing() as tx:
        project = people.project(tx, people.DEFAULT_PROJECT)
        assert project is not None
        for number in range(scale.runs):
            labels = {"n": str(number), "team": "agents" if number % 3 else "math"}
            new = runs.NewRun(
                project=project["id"], name=f"run {number}", config=config, providers=["spot"], labels=labels
            )
            made.append(runs.insert(tx, new, "nobody", []).id)
        tx.execute(sa.update(table).values(phase=RunPhase.FINISHED.value, managed=False))
        living = made[-CHANGED - 2 :]
        tx.execute(sa.update(table).where(table.c.id.in_(living)).values(phase=RunPhase.RUNNING.value, managed=True))
    return made[::-1]


def _long_talk(spoken: Any) -> Any:
    """A context of so many tokens that the policy sampled."""
    text = " ".join(f"{number} + {number} is {2 * number}." for number in range(100))
    own = len(spoken.answer(text))
    return spoken.spoken("What are these sums?", *[(text, ("And then?",))] * (TOKENS // own))


def _submit(client: httpx.Client) -> None:
    client.post("/v1/pools/lab/jobs", json={"config": {**CONFIG, "job": JOB}, "providers": ["spot"]}).raise_for_status()


def _figures(status: Any) -> dict[str, Any]:
    told = msgspec.to_builtins(status)
    return {name: value for name, value in told.items() if name in RunFigures.model_fields}


def measure(site: PagesSite, browser: Any, scale: PagesScale, parts: Sequence[str]) -> Figures:
    began_s = time.monotonic()
    site.client.get(f"/v1/runs/{site.long_run}/metrics?samples=1&steps=1").raise_for_status()
    first_read_ms = 1e3 * (time.monotonic() - began_s)
    signed_in = _signed_in(site)
    figures: Figures = {}
    shown: list[OpenView] = []
    for name, place in site.places().items():
        if "views" not in parts and name not in LIVING:
            continue
        one = _opened(browser, name, signed_in)
        figures[name] = _first(one, site.hosted.url + place)
        if name in LIVING:
            shown.append(one)
        else:
            one.page.context.close()
    if "updates" in parts or "server" in parts:
        _update(site, shown, scale.updates if "updates" in parts else round(scale.replay_s / EVERY_S))
    if "updates" in parts:
        for one in shown:
            figures[one.name]["update_ms_p99"] = float(np.percentile(one.script_ms, 99))
            figures[one.name]["heap_growth_mb"] = one.heap_mb() - figures[one.name]["heap_mb"]
    for one in shown[1:]:
        one.page.context.close()
    if "server" in parts:
        figures["server"] = {"first_read_ms": first_read_ms, **_replayed(site, shown, scale.replay_s)}
    return figures


def _signed_in(site: PagesSite) -> list[dict[str, Any]]:
    """The cookies of a browser that has signed in."""
    with sync_client(site.hosted.url, by_proxy=False, base_url=site.hosted.url, timeout=TIMEOUT_S) as client:
        headers = {"authorization": f"Bearer {site.hosted.secret}"}
        client.post("/v1/session", headers=headers).raise_for_status()
        return [{"name": one.name, "value": one.value, "url": site.hosted.url} for one in client.cookies.jar]


def _opened(browser: Any, name: str, cookies: list[dict[str, Any]]) -> OpenView:
    """A browser of its own, with nothing in it yet."""
    context = browser.new_context(viewport={"width": WIDTH, "height": HEIGHT})
    context.set_default_timeout(1e3 * TIMEOUT_S)
    context.add_cookies(cookies)
    context.add_init_script(PAINTED)
    page = context.new_page()
    counts = context.new_cdp_session(page)
    counts.send("Performance.enable", {"timeDomain": "threadTicks"})
    shown = OpenView(name, page, counts)

    def asked(sent: Any) -> None:
        path = sent.url.partition(f"{HOST}:")[2].partition("/")[2]
        if path.startswith("v1/") and not path.startswith("v1/changes") and sent.method == "GET":
            shown.asked.append((time.monotonic() - shown.began_s, f"/{path}"))

    page.on("request", asked)
    return shown


def _first(shown: OpenView, url: str) -> Figures:
    shown.began_s = time.monotonic()
    shown.page.goto(url, wait_until="commit")
    painted_ms = shown.page.evaluate("window.painted")
    found = {"first_paint_ms": painted_ms, "script_ms": shown.scripts_ms(), "heap_mb": shown.heap_mb()}
    return {**found, "update_ms_p99": None}


def _update(site: PagesSite, shown: list[OpenView], updates: int) -> None:
    """Change what is shown again and again, and count what that costs each view."""
    shown[0].page.wait_for_timeout(1e3 * EVERY_S)  # What follows their first moment is over.
    for one in shown:
        one.asked.clear()
        one.began_s = time.monotonic()
    for _ in range(updates):
        before = [one.scripts_ms() for one in shown]
        site.change()
        shown[0].page.wait_for_timeout(1e3 * EVERY_S)
        for one, was in zip(shown, before, strict=True):
            one.script_ms.append(one.scripts_ms() - was)


@dataclass
class ReadsAnswered:
    """How reads were answered: how long each kind took."""

    kinds: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    failures: int = 0
    streams: int = 0


def _replayed(site: PagesSite, shown: list[OpenView], for_s: float) -> Figures:
    """One real page stays open while others' requests are sent, each at its time."""
    answered = ReadsAnswered()
    traces = [[(at_s, path) for at_s, path in one.asked if at_s < for_s] for one in shown]
    over = threading.Thread(target=lambda: asyncio.run(_replay(site, traces, for_s, answered)))
    over.start()
    while over.is_alive():
        site.change()
        shown[0].page.wait_for_timeout(1e3 * EVERY_S)
    over.join()
    ms = [one for each in answered.kinds.values() for one in each]
    p99s = {kind: float(np.percentile(each, 99)) for kind, each in answered.kinds.items()}
    return {
        "reads_per_s": len(ms) / for_s,
        "reads_p50_ms": float(np.percentile(ms, 50)),
        "reads_p99_ms": float(np.percentile(ms, 99)),
        "slowest": dict(sorted(p99s.items(), key=lambda one: -one[1])[:SLOWEST]),
        "failures": answered.failures,
        "streams": answered.streams,
    }


async def _replay(
    site: PagesSite, traces: list[list[tuple[float, str]]], for_s: float, answered: ReadsAnswered
) -> None:
    host, loop, chance = f"{HOST}:{site.hosted.port}", asyncio.get_running_loop(), random.Random(PAGES)
    pool = ReadPool(HOST, site.hosted.port)
    stream = partial(EventStream, request("/v1/changes", host, site.hosted.secret), lambda _: None)
    streams = [await loop.create_connection(stream, HOST, site.hosted.port) for _ in range(PAGES)]
    async with asyncio.timeout(TIMEOUT_S):
        for _, one in streams:
            await one.answered.wait()

    async def read(path: str, due_s: float) -> None:
        await asyncio.sleep(max(0.0, due_s - time.monotonic()))
        try:
            answered.failures += await pool.get(request(path, host, site.hosted.secret), TIMEOUT_S) not in (200, 204)
        except (ServerHungUp, TimeoutError, OSError):
            answered.failures += 1
        kind = _ID.sub("ID", path.partition("?")[0])
        answered.kinds.setdefault(kind, []).append(1e3 * (time.monotonic() - due_s))

    async with pool.opened(CONNECTIONS):
        began_s = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            for number in range(PAGES):
                apart_s = chance.uniform(0.0, for_s)
                for at_s, path in traces[number % len(traces)]:
                    tasks.create_task(read(path, began_s + (at_s + apart_s) % for_s))
    answered.streams = sum(not one.over for _, one in streams)
    for transport, _ in streams:
        transport.abort()


if __name__ == "__main__":
    benchmark(__doc__, main, option("--part", choices=PARTS, help="measure this part alone"))
