"""The control API under load: reads at a rate that does not wait for answers, streams, and many runs in the store.

For each database a server of its own, and its runner. `RUNS` runs (a tenth with `--quick`) are in the store, one of
them with a long history; `SSE_CLIENTS` streams over one shared client follow the events of the jobs that go on, and
`PAGES` browsers have the server's pages open: each has its stream of changes, and asks what its view asks of a run that
changes all the time. Reads of other clients come at `READS_PER_S`: mostly single runs and pages of them, some of what
is in journals (trajectories, workers, metrics, a report). The load comes from a process of its own, and each read
counts from the moment at which it was due: what a slow answer holds up counts as slow, too.

- `p50_ms`, `p99_ms`: until a read is answered whole; `late_ms_p99` of that is the load's own, from due to sent.
- `event_delay_ms_p99`: from the moment at which a job made an event until a client has read it.
- `pages`, `pages_per_s`, `pages_p99_ms`: browsers whose stream of changes still stands at the end, what they asked, and
  until that was answered.
- `server_cores`, `load_cores`: processors that the server, and the load itself, kept busy on average.
- `viewer_streams`, `viewer_refused`, `others_p99_ms`: of `VIEWER_STREAMS` streams that one viewer opens, those that
  stand and those that are refused, and until a read of others, of whom `OTHERS_PER_S` come, is answered after that;
  `viewer_opened_s`: until they were.
- `rss_mb_warm`, `rss_mb_end`: the server's memory after the first part of the load, and at its end.
"""

import asyncio
import contextlib
import itertools
import random
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import msgspec
import numpy as np
import psutil
import sqlalchemy as sa

from benchmarks._common import Arguments, Figures, benchmark
from benchmarks._hosted import CONFIG, HOST, HostedSite
from benchmarks._http_load import EventStream, ReadPool, ServerHungUp, request
from benchmarks._waiting import until
from elastic.compose.processes import run_loop
from elastic.config import Config, JournalConfig, validate
from elastic.core import events as e
from elastic.core.ledger import DeviceBook
from elastic.core.types import NS_PER_S, Account, EndCause
from elastic.protocol.api import RunPhase
from elastic.protocol.http_clients import sync_client
from elastic.runtime.journal import BookRow, RunDirectory, SampleRow, StepRow, event_row
from elastic.runtime.status import ProviderStatus
from elastic.server.serving import open_store
from elastic.server.store import people, runs
from elastic.server.store.tables import runs as table
from tests.journal_rows import run_status, step_record, trajectory_row
from tests.server.postgres import cluster, skipped_without_postgresql

RUNS, RUNS_QUICK = 10_000, 1_000
SSE_CLIENTS = 200
PAGES = 50
JOBS = 10
EVERY_S = 0.5
"""Between two events of a job."""
SAMPLE_EVERY_S = 1.0
"""Between two moments of a job's figures, as a run has them."""
READS_PER_S, OTHERS_PER_S = 200.0, 50.0
"""Of the load, which may be more than a small machine's server can answer, and of the others beside the viewer."""
CONNECTIONS = 40
LOAD_S, LOAD_QUICK_S = 600.0, 8.0
"""For each database; the quick one's two together take 16 s."""
VIEWER_STREAMS, VIEWER_ADDRESS = 1_000, "127.0.0.2"
VIEWER_S, VIEWER_QUICK_S = 60.0, 2.0
WARM_SHARE = 0.25
"""The part of the load before `rss_mb_warm`, in which the server uses everything for the first time."""
READ_TIMEOUT_S = 30.0
UP_S = 60.0
SEED = 18
STEPS, TRAJECTORIES_A_STEP, SAMPLES, WORKERS = 200, 32, 2_000, 60
"""Of the long history."""


@dataclass
class LoadMeasured:
    """What the clients saw."""

    answers_ms: list[float] = field(default_factory=list[float])
    late_ms: list[float] = field(default_factory=list[float])
    delays_ms: list[float] = field(default_factory=list[float])
    failures: int = 0
    rss_mb_warm: float = 0.0
    rss_mb_end: float = 0.0
    load_s: float = 0.0
    server_cpu_s: float = 0.0
    load_cpu_s: float = 0.0
    streams_lost: int = 0
    pages: int = 0
    pages_ms: list[float] = field(default_factory=list[float])
    others_ms: list[float] = field(default_factory=list[float])
    viewer_streams: int = 0
    viewer_refused: int = 0
    viewer_opened_s: float = 0.0


class ToldEvent(msgspec.Struct):
    """When a job made an event, of all that is told of it."""

    at_s: float


class DueRead(NamedTuple):
    """When a read is due, in seconds since the load began, and whose it is."""

    due_s: float
    request: bytes
    of_page: bool = False


class FollowedJob(NamedTuple):
    """A job as pages have it open: how long it went on, and its last event, when the load begins."""

    id: str
    elapsed_s: float
    journal: str
    event: int

    def asked(self, view: int, other: "FollowedJob", at_s: float) -> Iterator[tuple[float, str]]:
        """What a page with this view asks then, and in how many seconds again: as `elastic/server/api/page` does, and
        Chromium's requests to a server show, of a run that changes every second. A list of runs asks nothing more."""
        run, since_s = f"/v1/runs/{self.id}", self.elapsed_s + at_s - 2.0
        news = f"metrics?samples=600&steps=600&after_s={max(0.0, since_s):.3f}"
        event = f"{self.journal}-{self.event + int(max(0.0, at_s - 2.0) / EVERY_S)}"
        match view:
            case 0:  # The run.
                yield 2.0, f"{run}/budget"
                yield 2.0, f"{run}/{news}"
            case 1:  # Its workers.
                yield 2.0, f"{run}/workers?limit=100"
                yield 2.0, f"{run}/offers?limit=100"
            case 2:  # Its events.
                yield 2.0, f"{run}/events?routine=false&after={event}&follow=false"
            case 3:  # Its logs.
                yield 1.5, f"{run}/logs?source=process&tail=1000&follow=false"
                yield 2.0, f"{run}/log-sources"
            case 4:  # Two compared.
                yield 3.0, f"{run}/{news}"
                yield 3.0, f"/v1/runs/{other.id}/{news}"
            case 5:  # Providers.
                phases = "&".join(f"phase={one}" for one in ("starting", "running", "restarting", "stopping"))
                yield 5.0, "/v1/providers"
                yield 5.0, f"/v1/runs?limit=100&{phases}"
                yield 5.0, f"{run}/offers?limit=100"
            case _:
                return


VIEWS = 7


decode = msgspec.json.Decoder(ToldEvent).decode


def main(arguments: Arguments) -> Figures:
    load_s, count = (LOAD_QUICK_S, RUNS_QUICK) if arguments.quick else (LOAD_S, RUNS)
    with tempfile.TemporaryDirectory(prefix="elastic-control-") as place:
        history = Path(place) / "long"
        write_history(history)
        figures: Figures = {"sqlite": measure("", load_s, count, history)}
        if skipped := skipped_without_postgresql():
            figures["postgresql"] = {"skipped_because": skipped}
        else:
            with cluster() as servers:
                figures["postgresql"] = measure(servers.new_database(), load_s, count, history)
    return figures


def measure(database: str, load_s: float, count: int, history: Path) -> Figures:
    outlasts_s = 4 * UP_S + 2 * load_s
    with HostedSite.up(outlasts_s, outlasts_s, EVERY_S, database, sample_every_s=SAMPLE_EVERY_S) as site:
        long_run = fill(site, count, history)
        with sync_client(site.url, by_proxy=False, base_url=site.url, headers=_headers(site), timeout=UP_S) as client:
            jobs = _begun(client)
            viewer, browsers = (_key(client, name) for name in ("viewer", "browsers"))
            followed = [_followed(client, job) for job in jobs]
            measured = run_loop(load(site, followed, long_run, load_s, viewer, browsers))
            listed = sum(1 for _ in _listed(client))
    answers, late, delays = (np.array(one) for one in (measured.answers_ms, measured.late_ms, measured.delays_ms))
    return {
        "requests_per_s": len(answers) / measured.load_s,
        "failures": measured.failures,
        "server_cores": measured.server_cpu_s / measured.load_s,
        "load_cores": measured.load_cpu_s / measured.load_s,
        "p50_ms": float(np.percentile(answers, 50)),
        "p99_ms": float(np.percentile(answers, 99)),
        "late_ms_p99": float(np.percentile(late, 99)),
        "sse_clients": SSE_CLIENTS - measured.streams_lost,
        "pages": measured.pages,
        "pages_per_s": len(measured.pages_ms) / measured.load_s,
        "pages_p99_ms": float(np.percentile(measured.pages_ms, 99)),
        "events": len(delays),
        "event_delay_ms_p99": float(np.percentile(delays, 99)) if len(delays) else None,
        "viewer_streams": measured.viewer_streams,
        "viewer_refused": measured.viewer_refused,
        "viewer_opened_s": measured.viewer_opened_s,
        "others_p99_ms": float(np.percentile(measured.others_ms, 99)),
        "runs_listed": listed,
        "rss_mb_warm": measured.rss_mb_warm,
        "rss_mb_end": measured.rss_mb_end,
    }


def fill(site: HostedSite, count: int, history: Path) -> str:
    """Put so many runs that are over into the store, one of them with a long `history`: its id."""
    store, config = open_store(site.settings), validate(Config, CONFIG, "a job")
    long_run = ""
    with store.writing() as tx:
        project = people.project(tx, people.DEFAULT_PROJECT)
        assert project is not None
        for number in range(count):
            labels = {"n": str(number)}
            old = runs.NewRun(project=project["id"], name="old", config=config, providers=["spot"], labels=labels)
            long_run = runs.insert(tx, old, "nobody", []).id
        tx.execute(sa.update(table).values(phase=RunPhase.FINISHED.value, managed=False))
    store.close()
    shutil.copytree(history, site.settings.run_dir(long_run))
    return long_run


def write_history(run_dir: Path) -> None:
    """The journal of a run that trained for a while."""
    run_dir.mkdir(parents=True)
    journal = RunDirectory(run_dir).begin_journal(validate(JournalConfig, {}, "a job"), notes={"run": run_dir.name})
    token_ids = msgspec.msgpack.encode(list(range(500)))
    end_ns = STEPS * 10 * NS_PER_S
    for step in range(STEPS):
        t_ns = (step + 1) * 10 * NS_PER_S
        record = step_record(
            step, duration_ns=10 * NS_PER_S, seeding_ns=NS_PER_S, rollout_ns=8 * NS_PER_S, groups_trained=4
        )
        journal.append(
            StepRow(step=step, t_ns=t_ns, record=record, success_rate=0.5, trainer={"loss": 0.1}),
            *(
                trajectory_row(
                    step,
                    number // 8,
                    number % 8,
                    started_ns=t_ns - 9 * NS_PER_S,
                    ended_ns=t_ns - NS_PER_S,
                    reward=float(number % 3),
                    turns=3,
                    policy_tokens=500,
                    token_ids=token_ids,
                )
                for number in range(TRAJECTORIES_A_STEP)
            ),
        )
    for number in range(SAMPLES):
        status = run_status(
            step=number * STEPS // SAMPLES,
            steps=STEPS,
            elapsed_s=float(number),
            success_rate=0.5,
            last_success_rate=0.5,
            trajectories_running=32,
            tokens_per_s=1000.0,
            usd=number * 0.01,
            providers={"spot": ProviderStatus(ready=4, tokens=1000 * number)},
        )
        journal.append(SampleRow(t_ns=number * NS_PER_S, status=status))
    for number in range(WORKERS):
        opened_ns = number * 30 * NS_PER_S
        closed_ns = min(end_ns, opened_ns + 300 * NS_PER_S)
        book = DeviceBook(
            lease=f"l{number}",
            worker=f"w{number}",
            provider="spot",
            gpus=1,
            nano_usd_per_gpu_hour=2 * 10**9,
            opened_ns=opened_ns,
            cursor_ns=opened_ns,
        )
        book.add(Account.DECODE, closed_ns - opened_ns)
        book.closed_ns = closed_ns
        ended = e.LeaseEnded(lease=book.lease, cause=EndCause.PREEMPTED)
        journal.append(BookRow(worker=book.worker, book=book), event_row(ended, closed_ns))
    journal.durable().result()
    journal.close()


def _headers(site: HostedSite) -> dict[str, str]:
    return {"authorization": f"Bearer {site.secret}"}


def _begun(client: httpx.Client) -> list[str]:
    """Jobs that go on."""
    submission = {"config": CONFIG, "providers": ["spot"]}
    jobs = [client.post("/v1/runs", json=submission).raise_for_status().json()["id"] for _ in range(JOBS)]
    for job in jobs:
        until("a job under way", partial(_is_under_way, client, job), UP_S)
    return jobs


def _key(client: httpx.Client, name: str) -> str:
    """A new key that reads all: its secret."""
    new_key = {"name": name, "role": "viewer", "server_wide": True}
    return client.post("/v1/keys", json=new_key).raise_for_status().json()["secret"]


def _followed(client: httpx.Client, job: str) -> FollowedJob:
    run = client.get(f"/v1/runs/{job}").raise_for_status().json()
    journal, event = until("a job's first event", partial(_last_events, client, job), UP_S)[-1]
    return FollowedJob(job, run["figures"]["elapsed_s"], journal, int(event))


def _last_events(client: httpx.Client, job: str) -> list[tuple[str, str]]:
    told = client.get(f"/v1/runs/{job}/events?follow=false&tail=1").raise_for_status().text
    return re.findall(r"^id: (.+)-(\d+)$", told, re.MULTILINE)


def _is_under_way(client: httpx.Client, job: str) -> bool:
    return client.get(f"/v1/runs/{job}").json()["phase"] != RunPhase.PENDING


def _listed(client: httpx.Client) -> Iterator[dict[str, Any]]:
    after = ""
    while True:
        page = client.get("/v1/runs", params={"limit": 100, **({"starting_after": after} if after else {})}).json()
        yield from page["data"]
        if not page["has_more"]:
            return
        after = page["data"][-1]["id"]


def _paths(jobs: list[str], long_run: str) -> list[str]:
    """What is read, each as often as any other."""
    whole = ["/v1/runs?limit=20", "/v1/me", "/v1/runs?phase=running", *(f"/v1/runs/{job}" for job in jobs)]
    parts = [
        *("trajectories?limit=20", "trajectories?limit=20&order=reward", f"trajectories?step={STEPS // 2}"),
        *("workers?limit=20", "leases?limit=20", "metrics?samples=100", "report"),
    ]
    histories = [f"/v1/runs/{long_run}/{part}" for part in parts]
    return [*whole, *whole, *histories]


def _reads_of(requests: list[bytes], per_s: float, for_s: float) -> list[DueRead]:
    """Reads that come evenly, each of them one of these."""
    chance = random.Random(SEED)
    return [DueRead(number / per_s, chance.choice(requests)) for number in range(round(per_s * for_s))]


def _pages_reads(jobs: list[FollowedJob], host: str, key: str, from_s: float, for_s: float) -> Iterator[DueRead]:
    """What the pages ask within a part of the load, which begins so many seconds after its beginning."""
    chance = random.Random(SEED)
    for number in range(PAGES):
        job, other = chance.sample(jobs, 2)
        for asked, (every_s, _) in enumerate(job.asked(number % VIEWS, other, 0.0)):
            due_s = chance.uniform(0.0, every_s)
            while due_s < for_s:
                path = [path for _, path in job.asked(number % VIEWS, other, from_s + due_s)][asked]
                yield DueRead(due_s, request(path, host, key), of_page=True)
                due_s += every_s


async def load(
    site: HostedSite, jobs: list[FollowedJob], long_run: str, load_s: float, viewer: str, browsers: str
) -> LoadMeasured:
    """Streams and reads, for a while. Browsers have a key of their own: a key has 256 requests in work at most."""
    measured, server = LoadMeasured(), psutil.Process(site.processes["api"].pid)
    host, loop = f"{HOST}:{site.port}", asyncio.get_running_loop()
    up = [asyncio.Event() for _ in range(SSE_CLIENTS)]

    def follower(job: FollowedJob, up: asyncio.Event) -> EventStream:
        def told(data: bytes) -> None:
            up.set()
            measured.delays_ms.append(1e3 * (time.time() - decode(data).at_s))

        return EventStream(request(f"/v1/runs/{job.id}/events", host, site.secret), told)

    streams = [
        await loop.create_connection(partial(follower, job, one), HOST, site.port)
        for job, one in zip(itertools.cycle(jobs), up, strict=False)
    ]
    changes = partial(EventStream, request("/v1/changes", host, browsers), lambda _: None)
    pages = [await loop.create_connection(changes, HOST, site.port) for _ in range(PAGES)]
    async with asyncio.timeout(UP_S):
        for one in up:
            await one.wait()
        for _, page in pages:
            await page.answered.wait()
    pool = ReadPool(HOST, site.port)
    reads = [request(path, host, site.secret) for path in _paths([job.id for job in jobs], long_run)]
    from_s = 0.0
    async with pool.opened(CONNECTIONS):
        for share in (WARM_SHARE, 1.0 - WARM_SHARE):
            for kept in (measured.answers_ms, measured.late_ms, measured.delays_ms, measured.pages_ms):
                kept.clear()
            began_s, used_s, own_s = time.monotonic(), _cpu_s(server), time.process_time()
            of_pages = _pages_reads(jobs, host, browsers, from_s, share * load_s)
            await _read_openly(pool, [*_reads_of(reads, READS_PER_S, share * load_s), *of_pages], measured)
            from_s += share * load_s
            measured.load_s = time.monotonic() - began_s
            measured.server_cpu_s, measured.load_cpu_s = _cpu_s(server) - used_s, time.process_time() - own_s
            measured.rss_mb_warm, measured.rss_mb_end = measured.rss_mb_end, server.memory_info().rss / 2**20
        measured.streams_lost = sum(stream.over for _, stream in streams)
        measured.pages = sum(not page.over for _, page in pages)
        for transport, _ in (*streams, *pages):
            transport.abort()
        await _beside_a_viewer(site, jobs[0].id, viewer, pool, reads, measured, load_s)
    return measured


async def _beside_a_viewer(
    site: HostedSite,
    job: str,
    viewer: str,
    pool: ReadPool,
    reads: list[bytes],
    measured: LoadMeasured,
    load_s: float,
) -> None:
    """Read while one viewer has as many streams as it is given."""
    loop, asked = asyncio.get_running_loop(), request(f"/v1/runs/{job}/events", f"{HOST}:{site.port}", viewer)

    def follower() -> EventStream:
        return EventStream(asked, lambda _: None, may_be_refused=True)

    began_s = time.monotonic()
    opened: list[tuple[asyncio.Transport, EventStream]] = []
    for _ in range(VIEWER_STREAMS):
        with contextlib.suppress(OSError):
            opened.append(await loop.create_connection(follower, HOST, site.port, local_addr=(VIEWER_ADDRESS, 0)))
    async with asyncio.timeout(UP_S):
        for _, stream in opened:
            await stream.answered.wait()
    measured.viewer_opened_s = time.monotonic() - began_s
    others = LoadMeasured()
    for_s = VIEWER_S if load_s > VIEWER_S else VIEWER_QUICK_S
    await _read_openly(pool, _reads_of(reads, OTHERS_PER_S, for_s), others)
    measured.others_ms = others.answers_ms
    measured.failures += others.failures
    measured.viewer_streams = sum(not stream.over and not stream.refused for _, stream in opened)
    measured.viewer_refused = VIEWER_STREAMS - measured.viewer_streams
    for transport, _ in opened:
        transport.abort()


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


async def _read_openly(pool: ReadPool, reads: list[DueRead], measured: LoadMeasured) -> None:
    """Reads at their times, whether or not others have been answered."""
    began_s = time.monotonic()

    async def read(one: DueRead) -> None:
        due_s = began_s + one.due_s
        measured.late_ms.append(1e3 * (time.monotonic() - due_s))
        try:
            measured.failures += await pool.get(one.request, READ_TIMEOUT_S) not in (200, 204)
        except (ServerHungUp, TimeoutError, OSError):
            measured.failures += 1
        kept = measured.pages_ms if one.of_page else measured.answers_ms
        kept.append(1e3 * (time.monotonic() - due_s))

    async with asyncio.TaskGroup() as tasks:
        for one in sorted(reads):
            await asyncio.sleep(max(0.0, began_s + one.due_s - time.monotonic()))
            tasks.create_task(read(one))


if __name__ == "__main__":
    benchmark(__doc__, main)
