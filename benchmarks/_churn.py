"""Requests to a run that others train, whose processes are killed while weights are offered to it."""

import asyncio
import itertools
import random
import re
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple

import httpx
import psutil

from benchmarks._common import Figures
from benchmarks._served import DoorsRun, write_version
from elastic.protocol.http_clients import async_client
from elastic.protocol.run_secrets import RunSecrets
from elastic.runtime.journal import RunDirectory, SampleRow

AT_ONCE = 16
TOKENS = 32
PROMPT_TOKENS = 8
VOCABULARY = 100
KILL_EVERY_S = 5.0
UPDATES = 5
ROUND = 200
"""Requests to each version where hours are measured."""
CALM = 4
"""A share of as many of the requests comes before anything is killed."""
WORKERS = 4
TIMEOUT_S = 120.0
GIVEN_UP_S = 180.0
"""How long a client asks again, as peers do."""
P = 0.99


@dataclass
class SeenRequests:
    """What clients have seen."""

    requests: int = 0
    failed: int = 0
    tokens: int = 0
    older: int = 0
    answered: int = 0
    """The number of the last directory whose offer was answered."""
    seconds: list[float] = field(default_factory=list[float])
    another: asyncio.Event = field(default_factory=asyncio.Event)
    """Set by each answer."""

    def p99_s(self) -> float:
        return sorted(self.seconds)[int(P * (len(self.seconds) - 1))]


async def _asked_once(http: httpx.AsyncClient, prompt: list[int], seen: SeenRequests, tokens: int) -> None:
    began_s, floor = time.monotonic(), seen.answered
    body = {"prompt": prompt, "max_tokens": tokens, "n": 1, "return_token_ids": True, "logprobs": 0, "ignore_eos": True}
    answer = await _repeated(lambda: http.post("/v1/completions", json=body))
    seen.requests += 1
    seen.another.set()
    seen.seconds.append(time.monotonic() - began_s)
    if answer is None or answer.status_code != 200 or len(answer.json()["choices"][0]["token_ids"]) != tokens:
        seen.failed += 1
        return
    seen.tokens += tokens
    spans = answer.json()["choices"][0]["weight_versions"]
    seen.older += any(_number(span["version"]) < floor for span in spans)


def _number(version: str) -> int:
    """Of the directory that a version was offered by, 0 for what was served before."""
    found = re.fullmatch(r"step_(\d+)", version)
    return int(found[1]) if found else 0


async def _repeated(ask: Callable[[], Any]) -> httpx.Response | None:
    """As peers do: once more after a 5xx, or where the connection breaks."""
    ends_s = time.monotonic() + GIVEN_UP_S
    while time.monotonic() < ends_s:
        try:
            answer = await ask()
        except httpx.TransportError:
            await asyncio.sleep(0.1)
            continue
        if answer.status_code < 500:
            return answer
        await asyncio.sleep(0.2)
    return None


async def asked(
    run: DoorsRun, requests: int, seen: SeenRequests, seed: int, *, at_once: int = AT_ONCE, tokens: int = TOKENS
) -> None:
    """So many requests, `at_once` at a time, each with a prompt of its own."""
    rng, numbers = random.Random(seed), itertools.count()
    key = RunSecrets.of(run.run_dir).requests_key()
    headers = {"authorization": f"Bearer {key}"}
    async with async_client(base_url=run.url(), headers=headers, timeout=TIMEOUT_S) as http:

        async def one_after_another() -> None:
            while next(numbers) < requests:
                await _asked_once(http, [rng.randrange(2, VOCABULARY) for _ in range(PROMPT_TOKENS)], seen, tokens)

        await asyncio.gather(*(one_after_another() for _ in range(at_once)))


async def _updated(run: DoorsRun, seen: SeenRequests, versions: Sequence[int], every: int) -> None:
    """Offer these versions, one after so many requests each."""
    headers = {"authorization": f"Bearer {run.control_key()}"}
    async with async_client(base_url=run.url(), headers=headers, timeout=TIMEOUT_S) as http:
        for place, number in enumerate(versions, 1):
            while seen.requests < place * every:
                await seen.another.wait()
                seen.another.clear()
            directory = await asyncio.to_thread(write_version, run, number)
            answer = await _repeated(
                lambda directory=directory: http.post("/update_weights", json={"weight_dir": str(directory)})
            )
            if answer is None or answer.status_code != 200:
                raise RuntimeError(f"update {number}: {None if answer is None else answer.text}")
            seen.answered = number


def _killing(run: DoorsRun, ended: threading.Event, seed: int) -> None:
    """A worker every few seconds; the importer and a front once, by then."""
    rng, rounds = random.Random(seed), itertools.count(1)
    while not ended.wait(KILL_EVERY_S):
        if workers := run.workers():
            run.kill_processes("worker", [rng.choice(workers)])
        match next(rounds):
            case 1:
                run.kill_processes("front", run.fronts()[:1])
            case 2:
                run.kill_processes("importer", run.importers()[:1])
            case _:
                pass


def measured_churn(run: DoorsRun, offered: int, requests: int) -> Figures:
    """A run with `WORKERS` workers, to which so many directories were offered before. Its workers stay killed."""
    warm, quiet, seen = SeenRequests(), SeenRequests(), SeenRequests()
    asyncio.run(asked(run, AT_ONCE, warm, 0))  # Until all are there.
    before = _accepted(run)
    asyncio.run(asked(run, requests // CALM, quiet, 1))
    _churned(run, offered, requests, seen)
    answered = quiet.tokens + seen.tokens
    return {
        "requests": seen.requests,
        "failed": warm.failed + quiet.failed + seen.failed,
        "repeated_tokens": _accepted(run) - before - answered,
        "older_than_answered": seen.older,
        "p99_over_calm": seen.p99_s() / quiet.p99_s(),
        "killed": dict(run.kills),
    }


class _Size(NamedTuple):
    """Of the run's own process, and of its journals."""

    memory_bytes: int
    journal_bytes: int


def measured_hours(run: DoorsRun, offered: int, hours: float) -> Figures:
    """Churn for so long, with a version to every `ROUND` requests. What has grown is the median of the last third of
    the rounds over that of the second; a worker that is killed leaves a few rows of leases and costs for ever."""
    seen, sizes, ends_s = SeenRequests(), list[_Size](), time.monotonic() + 3600 * hours
    ended = threading.Event()
    killer = threading.Thread(target=_killing, args=(run, ended, 2))
    killer.start()
    try:
        for number in itertools.count(1):
            asyncio.run(_round(run, seen, offered + number))
            sizes.append(_size(run))
            if time.monotonic() > ends_s:
                break
    finally:
        ended.set()
        killer.join()
    third = len(sizes) // 3
    before, after = (zip(*part, strict=True) for part in (sizes[third : 2 * third], sizes[2 * third :]))
    memory, journal = (median(last) / median(first) for first, last in zip(before, after, strict=True))
    return {
        "requests": seen.requests,
        "failed": seen.failed,
        "older_than_answered": seen.older,
        "updates": len(sizes),
        "killed": dict(run.kills),
        "memory_growth": memory,
        "journal_growth": journal,
        "memory_mb": sizes[-1].memory_bytes / 2**20,
        "journal_mb": sizes[-1].journal_bytes / 2**20,
    }


async def _round(run: DoorsRun, seen: SeenRequests, version: int) -> None:
    seen.another = asyncio.Event()  # Each round has a loop of its own.
    before = seen.requests
    updates = _updated(run, seen, [version], before + ROUND // 2)
    await asyncio.gather(asked(run, ROUND, seen, version), updates)


def _size(run: DoorsRun) -> _Size:
    files = run.run_dir.glob("journal*")
    return _Size(psutil.Process(run.process.pid).memory_info().rss, sum(path.stat().st_size for path in files))


def _churned(run: DoorsRun, offered: int, requests: int, seen: SeenRequests) -> None:
    ended = threading.Event()
    killer = threading.Thread(target=_killing, args=(run, ended, 2))
    killer.start()

    async def together() -> None:
        versions = range(offered + 1, offered + UPDATES + 1)
        updates = _updated(run, seen, versions, requests // (UPDATES + 1))
        await asyncio.gather(asked(run, requests, seen, 3), updates)

    try:
        asyncio.run(together())
    finally:
        ended.set()
        killer.join()


def _accepted(run: DoorsRun) -> int:
    """How many tokens the run has accepted, now that nobody asks for any."""

    def newest() -> SampleRow | None:
        with RunDirectory(run.run_dir).newest_journal() as journal:
            return journal.last(SampleRow)

    def later(than: SampleRow) -> SampleRow | None:
        found = newest()
        return found if found is not None and found.t_ns > than.t_ns else None

    sample = run.until("a sample", newest)
    for _ in range(2):  # The first of these may have been taken before the last answer.
        sample = run.until("a later sample", lambda sample=sample: later(sample))
    return sum(one.tokens for one in sample.status.providers.values())
