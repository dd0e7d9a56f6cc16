"""Streams: whoever goes on behind any event gets exactly what follows, in order, live or not."""

import asyncio
import contextlib
import json
import os
import sqlite3
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
import sqlalchemy as sa
from hypothesis import given
from hypothesis import strategies as st

from elastic.config import JournalConfig
from elastic.core import events as e
from elastic.protocol.api import AccessRole, RunPhase
from elastic.protocol.http_server import serving
from elastic.report.log_files import LogFollower, LogGone
from elastic.runtime.journal import JournalError, RunDirectory, SqliteJournal, event_row
from elastic.runtime.journal.records import FRAME, FREQUENT
from elastic.server.api.auth import COOKIE
from elastic.server.api.streams import LOOK_S
from elastic.server.history.events import ROUTINE, SCANNED_AT_ONCE, UNREAD, EventLog, EventsGone, Position
from elastic.server.history.feeds import Feeds
from elastic.server.history.looks import SharedLooks
from elastic.server.permissions import Action
from elastic.server.serving import listen
from elastic.server.store.tables import keys, runs, sessions
from elastic.system.isolation import LoopFaults
from tests.server.conftest import Site, Submission, served
from tests.server.written_runs import write_run

QUIET = e.Tick()


def journal_of(run_dir: Path, name: str) -> SqliteJournal:
    run_dir.mkdir(parents=True, exist_ok=True)
    return RunDirectory(run_dir).begin_journal(JournalConfig(), notes={"incarnation": name, "run": run_dir.name})  # type: ignore[call-arg]


def write(journal: SqliteJournal, *names: str) -> None:
    """An event for each name, with a quiet one before it."""
    for name in names:
        journal.append(event_row(QUIET, 1), event_row(e.StopRequested(reason=name), 2))
    journal.durable().result()


def read_all(log: EventLog, after: str) -> list[str]:
    position, told, whole = log.after(after), list[str](), False
    while not whole:
        found, position, whole = log.read(position)
        told += [event.data["reason"] for _, event in found]
    return told


def test_after_any_event_comes_what_follows(tmp_path: Path) -> None:
    names = [f"{journal}{number}" for journal in "abc" for number in range(4)]
    for begin in range(0, 12, 4):
        with_name = journal_of(tmp_path, names[begin])
        write(with_name, *names[begin : begin + 4])
        with_name.close()
    ids, position, whole, log = [""], Position(0, 0), False, EventLog(tmp_path)
    while not whole:
        found, position, whole = log.read(position)
        ids += [event.id for _, event in found]
    assert [read_all(EventLog(tmp_path), after) for after in ids] == [names[n:] for n in range(13)]


@pytest.mark.parametrize("id_", ["x", "a-", "-1", "b-1", "a-1e3", "a-" + "9" * 30, "🙂-1"])
def test_what_is_no_place_is_gone(tmp_path: Path, id_: str) -> None:
    journal = journal_of(tmp_path, "a")
    write(journal, "one")
    journal.close()
    with pytest.raises(EventsGone):
        EventLog(tmp_path).after(id_)


def test_a_journal_that_came_to_nothing_is_not_taken_for_the_next(tmp_path: Path) -> None:
    journal_of(tmp_path, "a").close()
    discarded = journal_of(tmp_path, "b")
    write(discarded, "lost", "lost")
    discarded.close()
    log = EventLog(tmp_path)
    assert read_all(log, "") == ["lost", "lost"]
    RunDirectory(tmp_path).discard_journal(discarded.path)
    kept = journal_of(tmp_path, "c")
    assert kept.path == discarded.path
    write(kept, "kept")
    kept.close()
    assert read_all(log, "b-2") == ["kept"]
    with pytest.raises(EventsGone):
        EventLog(tmp_path).after("b-2")


def test_looks_are_shared_within_one_event_loop() -> None:
    """A loop that has ended keeps no look fresh."""
    looks, found = SharedLooks(60.0), iter(range(9))

    async def look() -> list[int]:
        return list(await asyncio.gather(*(looks.at("run", lambda: next(found)) for _ in range(3))))

    assert asyncio.run(look()) == [0, 0, 0]
    assert asyncio.run(look()) == [1, 1, 1]


async def test_followers_of_any_pace_get_all_in_order(tmp_path: Path) -> None:
    journal = journal_of(tmp_path, "a")
    over = asyncio.Event()
    feeds = Feeds(0.005, LoopFaults())

    async def ended() -> bool:
        return over.is_set()

    async def follow(after: str, pause_s: float) -> list[str]:
        told: list[str] = []
        async with feeds.following("run", tmp_path, ended, asyncio.to_thread) as feed:
            position = await asyncio.to_thread(feed.log.after, after)
            while True:
                last = feed.over
                sent, position, whole = await feed.after(position)
                told += [json.loads(one["data"])["reason"] for one in sse(sent.decode())]
                if not sent and whole:
                    if last:
                        return told
                    await feed.changed_behind(position, 5.0)
                await asyncio.sleep(pause_s)

    names = [str(number) for number in range(60)]
    write(journal, *names[:20])
    followers = [asyncio.create_task(follow("", pause_s)) for pause_s in (0, 0.001, 0.02)]
    late = asyncio.create_task(follow("a-20", 0))
    for begin in range(20, 60, 10):
        await asyncio.to_thread(write, journal, *names[begin : begin + 10])
    over.set()
    assert await asyncio.gather(*followers) == [names] * 3
    assert await late == names[10:]
    journal.close()


def sse(text: str) -> list[dict[str, str]]:
    """Events by their fields; comments are none."""
    blocks = [dict(line.split(": ", 1) for line in block.split("\n")) for block in text.split("\n\n") if block]
    return [block for block in blocks if "data" in block]


@pytest.fixture
def ended_run(site: Site, submission: Submission) -> str:
    run = site.submitted(submission())
    journal = journal_of(site.settings.run_dir(run), "a")
    write(journal, "one", "two")
    journal.close()
    logs = site.settings.run_dir(run) / "logs"
    logs.mkdir()
    (logs / "process.log").write_text("first\nsecond\nthird\nhalf")
    with site.store.writing() as tx:
        tx.execute(sa.update(runs).values(phase=RunPhase.FINISHED.value, managed=False))
    return run


def test_a_stream_refuses_a_filter_that_there_is_not(site: Site, ended_run: str) -> None:
    answer = site.client().get(f"/v1/runs/{ended_run}/events", params={"kind": "LeaseEnded", "follow": "false"})
    assert (answer.status_code, answer.json()["type"]) == (400, "/problems/invalid-request")
    assert answer.json()["detail"] == "query: found 'kind'; allowed: after, follow, routine, tail, until"


def test_streams_over_http(site: Site, ended_run: str) -> None:
    client, place = site.client(), f"/v1/runs/{ended_run}"
    for follow in ("true", "false"):
        told = sse(client.get(f"{place}/events", params={"follow": follow}).text)
        assert [json.loads(one["data"]).get("reason") for one in told if "id" in one] == ["one", "two"]
        assert [one["event"] for one in told][:2] == ["stop.requested", "stop.requested"]
        assert (told[-1]["event"] == "run.ended") == (follow == "true")
    first = told[0]["id"]
    for headers, params in (({"last-event-id": first}, {}), ({}, {"after": first})):
        (rest, _) = sse(client.get(f"{place}/events", headers=headers, params=params).text)
        assert rest["id"] == told[1]["id"]
    assert client.get(f"{place}/events", headers={"last-event-id": told[1]["id"]}).status_code == 204
    assert client.get(f"{place}/events", headers={"last-event-id": "b-1"}).json()["type"] == "/problems/events-gone"


def test_older_events_come_before_newer_ones_until_the_first(site: Site, submission: Submission) -> None:
    run, names = site.submitted(submission()), [f"{journal}{number}" for journal in "abc" for number in range(4)]
    for begin in range(0, 12, 4):
        journal = journal_of(site.settings.run_dir(run), names[begin])
        write(journal, *names[begin : begin + 4])
        journal.close()
    client, place = site.client(), f"/v1/runs/{run}/events"
    asked, told, older = {"follow": "false", "tail": "3"}, list[str](), True
    while older:
        begin, *rest = sse(client.get(place, params=asked).text)
        told = [json.loads(one["data"])["reason"] for one in rest] + told
        older, asked["until"] = json.loads(begin["data"])["older"], begin["id"]
    assert told == names
    assert client.get(place, params=asked | {"until": "nosuch-3"}).status_code == 410


def test_what_is_no_routine_is_indexed() -> None:
    assert {*FREQUENT} <= {FRAME, *UNREAD, *ROUTINE}


@pytest.mark.parametrize("follow", ["true", "false"])
def test_a_journal_that_cannot_be_read_is_a_problem_and_no_cut_stream(site: Site, ended_run: str, follow: str) -> None:
    place, path = f"/v1/runs/{ended_run}/events", site.settings.run_dir(ended_run) / "journal.sqlite"
    with contextlib.closing(sqlite3.connect(path)) as journal:
        journal.executemany(
            "INSERT INTO events (seq, t_ns, kind, body) VALUES (?, 3, 'StopRequested', x'c1')",
            [(5 + SCANNED_AT_ONCE,)],
        )
        journal.executemany(
            "INSERT INTO events (seq, t_ns, kind, body) VALUES (?, 3, 'Tick', x'c1')",
            [(5 + number,) for number in range(SCANNED_AT_ONCE)],
        )
        journal.commit()
    *told, last = sse(site.client().get(place, params={"follow": follow}).text)
    assert [one["event"] for one in told] == ["stop.requested"] * 2
    assert (last["event"], json.loads(last["data"])["type"]) == ("error", "/problems/journal-unreadable")


@pytest.mark.parametrize("follow", ["true", "false"])
def test_a_file_that_is_no_journal_is_a_problem(site: Site, ended_run: str, follow: str) -> None:
    """Also right after somebody has read the journal that it replaces."""
    path, client = site.settings.run_dir(ended_run) / "journal.sqlite", site.client()
    assert client.get(f"/v1/runs/{ended_run}/events", params={"follow": follow}).status_code == 200
    for suffix in ("", "-wal", "-shm"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)
    path.write_bytes(b"no journal")
    answer = client.get(f"/v1/runs/{ended_run}/events", params={"follow": follow})
    assert (answer.status_code, answer.headers["content-type"]) == (503, "application/problem+json")


def test_logs_over_http(site: Site, ended_run: str) -> None:
    client, place = site.client(), f"/v1/runs/{ended_run}/logs"
    *told, end = sse(client.get(place).text)
    assert end["event"] == "log.ended"
    assert [json.loads(one["data"])["line"] for one in told] == ["first", "second", "third", "half"]
    assert [
        json.loads(one["data"])["line"] for one in sse(client.get(place, params={"tail": 1, "follow": "false"}).text)
    ] == ["third", "half"]
    *again, _ = sse(client.get(place, headers={"last-event-id": told[0]["id"]}).text)
    assert again == told[1:]
    assert client.get(place, headers={"last-event-id": "process:999999"}).status_code == 410
    assert client.get(place, params={"source": "../process"}).status_code == 400
    assert client.get(place, params={"source": "nobody"}).status_code == 404


def test_a_log_that_was_cut_is_told_anew_and_the_last_words_of_one_that_is_over_too(tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    path.write_text("first\nsecond\n")
    follower = LogFollower("x", lambda: path.open("rb"))
    assert [one.line for one in follower.read()] == ["first", "second"]
    path.write_text("anew\nlast wo")
    assert [one.line for one in follower.read()] == ["anew"]
    assert follower.read() == []
    (last,) = follower.read(over=True)
    assert (last.line, last.id, follower.at_end(), follower.read(over=True)) == ("last wo", "x:12", True, [])


@given(
    lines=st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\n\r\0"), max_size=8), max_size=12),
    tail=st.integers(0, 14),
    resumed=st.integers(0, 12),
)
def test_lines_of_a_log(tmp_path_factory: pytest.TempPathFactory, lines: list[str], tail: int, resumed: int) -> None:
    path = tmp_path_factory.mktemp("log") / "x.log"
    path.write_text("".join(f"{line}\n" for line in lines) + "unfinished", encoding="utf-8", newline="")
    follower = LogFollower("x", lambda: path.open("rb"))
    told = follower.read()
    assert [one.line for one in told] == lines
    assert follower.read() == []
    if resumed < len(told):
        again = LogFollower("x", lambda: path.open("rb"))
        again.seek(told[resumed].id, None)
        assert [one.line for one in again.read()] == lines[resumed + 1 :]
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8", newline="")
    last = LogFollower("x", lambda: path.open("rb"))
    last.seek("", tail)
    assert [one.line for one in last.read()] == (lines[-tail:] if tail else [])
    with pytest.raises(LogGone):
        last.seek("y:0", None)


@pytest.mark.parametrize(
    ("what", "how"), [("events", "revoked"), ("logs", "demoted"), ("figures", "signed out"), ("logs", "expired")]
)
async def test_a_stream_ends_with_what_its_caller_may(site: Site, submission: Submission, what: str, how: str) -> None:
    """Within a second, and only that caller's: another one's goes on."""
    run = site.submitted(submission(project="ours"))
    secret = site.key("ours", AccessRole.VIEWER)
    headers = {"authorization": f"Bearer {secret}"}
    if how == "signed out":
        signed_in = site.client().post("/v1/session", json={"key": secret})
        assert signed_in.status_code in (200, 201), signed_in.text
        headers = {"cookie": f"{COOKIE}={signed_in.cookies[COOKIE]}"}

    def change() -> None:
        with site.store.writing() as tx:
            if how == "signed out":
                tx.execute(sa.delete(sessions))
                return
            changes: dict[str, dict[str, Any]] = {
                "revoked": {"revoked_us": 1},
                "demoted": {"scopes": [Action.AUDIT_READ.value]},
                "expired": {"expires_us": 1},
            }
            tx.execute(sa.update(keys).where(keys.c.name == "ours-viewer").values(changes[how]))

    with served(site.app) as url:
        async with httpx.AsyncClient(base_url=url, timeout=20) as client, asyncio.TaskGroup() as tasks:
            first = asyncio.Event()

            async def follow(shown: dict[str, str], begun: asyncio.Event) -> float:
                with contextlib.suppress(httpx.RemoteProtocolError):
                    async with client.stream("GET", f"/v1/runs/{run}/{what}", headers=shown) as answer:
                        assert answer.status_code == 200
                        async for _ in answer.aiter_raw():
                            begun.set()
                return time.monotonic()

            other = asyncio.Event()
            following = tasks.create_task(follow(headers, first))
            going_on = tasks.create_task(follow({"authorization": f"Bearer {site.admin}"}, other))
            await asyncio.gather(first.wait(), other.wait())
            await asyncio.sleep(LOOK_S)
            assert not following.done()
            change()
            changed_s = time.monotonic()
            async with asyncio.timeout(10):
                ended_s = await following
            assert ended_s - changed_s < 1.0
            assert not going_on.done()
            going_on.cancel()


async def test_streams_end_whole_with_their_server(site: Site, submission: Submission) -> None:
    run, headers = site.submitted(submission(project="ours")), {"authorization": f"Bearer {site.admin}"}
    begun = asyncio.Event()

    async def follow(url: str) -> None:
        client = httpx.AsyncClient(base_url=url, headers=headers, timeout=20)
        async with client, client.stream("GET", f"/v1/runs/{run}/events") as answer:
            async for _ in answer.aiter_raw():  # Raises if it is cut.
                begun.set()

    async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
        drained = site.app.state.server.streams.end
        async with serving(site.app, listen("127.0.0.1", 0), drained=drained) as url:
            tasks.create_task(follow(url))
            await begun.wait()


@pytest.mark.parametrize("revoked", [True, False])
async def test_a_download_ends_with_what_its_caller_may(site: Site, submission: Submission, *, revoked: bool) -> None:
    run = site.submitted(submission(project="ours"))
    checkpoint = site.settings.run_dir(run) / "checkpoints" / "3.safetensors"
    checkpoint.parent.mkdir(parents=True)
    length = 64 << 20
    with checkpoint.open("wb") as file:
        file.truncate(length)
    headers, got = {"authorization": f"Bearer {site.key('ours', AccessRole.VIEWER)}"}, 0
    with served(site.app) as url:
        async with httpx.AsyncClient(base_url=url, timeout=20) as client:
            with contextlib.suppress(httpx.RemoteProtocolError):
                async with client.stream("GET", f"/v1/runs/{run}/checkpoints/3", headers=headers) as answer:
                    assert (answer.status_code, answer.headers["content-length"]) == (200, str(length))
                    async for chunk in answer.aiter_raw():
                        if revoked and not got:
                            with site.store.writing() as tx:
                                tx.execute(sa.update(keys).where(keys.c.name == "ours-viewer").values(revoked_us=1))
                            await asyncio.sleep(1.0)  # As docs/server.md promises.
                        got += len(chunk)
    assert (got < length) is revoked


def told_by(log: EventLog, reads_max: int) -> list[int]:
    """The numbers of all events of a run with one journal, up to where it cannot be read."""
    position, told = Position(0, 0), list[int]()
    for _ in range(reads_max):
        try:
            batch = log.read(position)
        except JournalError:
            return told
        told += [at.number for at, _ in batch.events]
        if batch.whole:
            return told
        position = batch.position
    raise AssertionError(f"no end after {reads_max} reads, at {position}")


def test_of_a_journal_of_which_pages_have_changed_places_each_event_is_told_once_and_there_is_an_end(
    tmp_path: Path,
) -> None:
    path, page = tmp_path / "run/journal.sqlite", 4096
    write_run(path.parent, steps=25, events=400, members=3)
    with contextlib.closing(sqlite3.connect(path)) as journal:
        journal.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    whole = path.read_bytes()
    told = told_by(EventLog(path.parent), 2)
    pages = [whole[begin : begin + page] for begin in range(0, len(whole), page)]
    swaps = [(place, place + 1) for place in range(1, len(pages) - 1)] + [(3, place) for place in range(9, len(pages))]
    assert len(told) > 400
    for one, other in swaps:
        swapped = [*pages]
        swapped[one], swapped[other] = pages[other], pages[one]
        path.write_bytes(b"".join(swapped))
        found = told_by(EventLog(path.parent), 20)
        assert found == sorted({*found}), (one, other)


def test_of_a_journal_that_is_cut_the_events_before_are_told_and_then_why_no_more(site: Site, ended_run: str) -> None:
    path = site.settings.run_dir(ended_run) / "journal.sqlite"
    with contextlib.closing(sqlite3.connect(path)) as journal:
        many = [(10 + number,) for number in range(3_000)]
        body = event_row(e.StopRequested(reason="many"), 1).body.hex()
        journal.executemany(
            f"INSERT INTO events (seq, t_ns, kind, body) VALUES (?, 3, 'StopRequested', x'{body}')", many
        )
        journal.commit()
        journal.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    os.truncate(path, path.stat().st_size * 2 // 3)
    for asked in ({"tail": "200", "routine": "false"}, dict[str, str]()):
        answer = site.client().get(f"/v1/runs/{ended_run}/events", params={"follow": "false", **asked})
        *told, last = sse(answer.text)
        assert len([one for one in told if one["event"] == "stop.requested"]) > 300
        assert last["event"] == "error"
        problem = json.loads(last["data"])
        assert problem["type"] == "/problems/journal-unreadable"
        assert problem["detail"].startswith("the journal cannot be read now: journal.sqlite: database disk image")
        assert str(site.settings.home) not in answer.text
