"""The client over a real socket and a bad line: nothing is done twice, nothing is missed, refusals say why."""

import random
from collections.abc import Iterator

import httpx
import pytest
import sqlalchemy as sa

from elastic.protocol import api_client as client_module
from elastic.protocol.api import AccessRole, NewKey, RunPhase
from elastic.protocol.api_client import ApiError, Client, ServerUnreachable
from elastic.server.store.tables import runs
from elastic.system.host import Host, on
from tests.server.conftest import Site, Submission, served
from tests.server.test_streams import journal_of, write


@pytest.fixture
def url(site: Site) -> Iterator[str]:
    with served(site.app) as address:
        yield address


class BadLine(httpx.BaseTransport):
    """Loses requests, answers, and the rest of streams, as its dice say; every so often all goes well."""

    def __init__(self, seed: int) -> None:
        self._real = httpx.HTTPTransport()
        self._dice = random.Random(seed)
        self._failed = 0
        self.losses = 0

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        fate = self._dice.choice(["fine", "no request", "no answer", "cut"]) if self._failed < 3 else "fine"
        self._failed = self._failed + 1 if fate in ("no request", "no answer") else 0
        self.losses += fate != "fine"
        if fate == "no request":
            raise httpx.ConnectError("lost", request=request)
        answer = self._real.handle_request(request)
        if fate == "no answer":
            answer.close()
            raise httpx.ReadError("lost", request=request)
        if fate == "cut" and answer.headers["content-type"].startswith("text/event-stream"):
            return httpx.Response(200, headers=answer.headers, stream=_Cut(answer, self._dice.randint(20, 400)))
        return answer

    def close(self) -> None:
        self._real.close()


class _Cut(httpx.SyncByteStream):
    def __init__(self, answer: httpx.Response, size: int) -> None:
        self._answer = answer
        self._left = size

    def __iter__(self) -> Iterator[bytes]:
        for part in self._answer.iter_raw():
            yield part[: self._left]
            self._left -= len(part)
            if self._left <= 0:
                self._answer.close()
                raise httpx.ReadError("cut")

    def close(self) -> None:
        self._answer.close()


@pytest.fixture
def bad_line(url: str, site: Site) -> Iterator[tuple[Client, BadLine]]:
    line = BadLine(7)
    with on(Host(sleep=lambda _: None)), Client(url, site.admin, transport=line) as client:
        yield client, line


def test_submissions_over_a_bad_line_are_made_once(bad_line: tuple[Client, BadLine], submission: Submission) -> None:
    client, line = bad_line
    made = [client.submit(submission()["config"], ["spot"]).id for _ in range(12)]
    assert line.losses > 4
    assert [run.id for run in client.runs()] == sorted(made, reverse=True)


def test_streams_over_a_bad_line_are_whole(
    bad_line: tuple[Client, BadLine], site: Site, submission: Submission
) -> None:
    client, line = bad_line
    run = client.submit(submission()["config"], ["spot"]).id
    journal = journal_of(site.settings.run_dir(run), "a")
    names = [str(number) for number in range(200)]
    write(journal, *names)
    journal.close()
    logs = site.settings.run_dir(run) / "logs"
    logs.mkdir()
    (logs / "process.log").write_text("".join(f"{name}\n" for name in names))
    with site.store.writing() as tx:
        tx.execute(sa.update(runs).values(phase=RunPhase.STOPPED.value, managed=False))
    for follow in (True, False):
        told = list(client.events(run, follow=follow))
        assert [event.data["reason"] for event in told if event.id] == names
        assert [one.line for one in client.logs(run, follow=follow)] == names
    assert [event.data["reason"] for event in client.events(run, told[99].id) if event.id] == names[100:]
    assert [one.line for one in client.logs(run, tail=3, follow=False)] == names[-3:]
    assert line.losses > 3


def test_what_is_refused_says_why(url: str, site: Site, submission: Submission) -> None:
    with Client(url, site.key("ours", AccessRole.VIEWER)) as viewer, Client(url, site.admin) as admin:
        with pytest.raises(ApiError, match="runs:write is not allowed") as refused:
            viewer.submit(submission()["config"])
        assert refused.value.kind == "forbidden"
        with pytest.raises(ApiError, match="no run 'run_x'"):
            admin.run("run_x")
        made = admin.create_key(NewKey(name="k", project="ours", role=AccessRole.VIEWER))
        assert made.secret
        admin.revoke_key(made.id)
        with Client(url, made.secret) as revoked, pytest.raises(ApiError) as gone:
            revoked.me()
        assert gone.value.kind == "unauthenticated"


def test_what_is_no_server_is_said() -> None:
    nobody = Client("http://127.0.0.1:1", "k", patience_s=0.02)
    with nobody, pytest.raises(ServerUnreachable, match=r"127\.0\.0\.1:1"):
        nobody.me()
    page = httpx.MockTransport(lambda _: httpx.Response(200, html="<p>another site</p>"))
    with (
        Client("http://other", "k", transport=page) as other,
        pytest.raises(ServerUnreachable, match="no elastic server"),
    ):
        other.me()


@pytest.mark.parametrize("said", ["5", "page", '{"line": 5}', '{"line": "\\ud800"}'])
def test_a_stream_that_is_none_of_the_api_s_is_said(said: str) -> None:
    page = httpx.MockTransport(lambda _: httpx.Response(200, text=f"data: {said}\n\n"))
    with (
        Client("http://other", "k", transport=page) as other,
        pytest.raises(ServerUnreachable, match="jobs/one/logs is no elastic server"),
    ):
        [*other.job_logs("lab", "one")]


def test_a_server_that_starts_anew_is_waited_for() -> None:
    """By time, not by count; no sooner than it says; and not for ever."""
    slept: list[float] = []
    now_s = [0.0]

    def sleep(for_s: float) -> None:
        slept.append(for_s)
        now_s[0] += for_s

    waits: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        if now_s[0] < 20:
            raise httpx.ConnectError("refused", request=request)
        if now_s[0] < 45:
            return httpx.Response(503, headers={"retry-after": "7"})
        return httpx.Response(200, json={"version": "1"})

    host = Host(monotonic=lambda: now_s[0], sleep=sleep)
    starting = Client("http://starting", "k", transport=httpx.MockTransport(answer), on_wait=waits.append)
    with on(host), starting:
        assert starting.info().version == "1"
    assert len(slept) > 5, "five refusals in a row are no reason to give up"
    assert slept[-1] == 7
    assert waits[0] == "http://starting: refused"
    assert len(waits) == len(slept)
    now_s[0], slept[:] = -1_000.0, []
    with (
        on(host),
        Client("http://starting", "k", transport=httpx.MockTransport(answer), patience_s=30) as impatient,
        pytest.raises(ServerUnreachable, match="refused"),
    ):
        impatient.info()
    assert sum(slept) <= 30 < sum(slept) + client_module.RETRY_MAX_S


def test_what_is_refused_for_good_is_asked_once() -> None:
    asked: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request.method)
        return httpx.Response(429, json={})

    with Client("http://full", "k", transport=httpx.MockTransport(answer)) as client, pytest.raises(ApiError):
        client.info()
    assert asked == ["GET"]
