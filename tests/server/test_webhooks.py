"""Webhooks: signed as receivers check it, told until they answer, never to a private address, forgotten by no death."""

import asyncio
import contextlib
import ipaddress
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
import sqlalchemy as sa
from hypothesis import given
from hypothesis import strategies as st
from standardwebhooks.webhooks import Webhook as Verifier

from elastic.protocol.api import RunPhase
from elastic.server.store import runs
from elastic.server.store.tables import deliveries, webhooks
from elastic.server.store.vault import KEY_FILE
from elastic.server.store.webhooks import (
    GIVEN_UP_S,
    OPEN_BASE_S,
    OPEN_MAX_S,
    OPENS_AFTER,
    WAITS_S,
    DueWebhook,
    opens_for_s,
)
from elastic.server.webhooks import DeliveryLoop
from elastic.server.webhooks.addresses import UnsafeTarget, checked, resolved
from elastic.server.webhooks.sending import AT_ONCE, PROJECT_AT_ONCE, shared_out
from tests.server.conftest import Site, Submission

LOOPBACK = (ipaddress.ip_network("127.0.0.0/8"),)


@dataclass
class Receiver:
    """Answers with the next of `statuses`, the last one from then on, and keeps what came."""

    url: str
    statuses: list[int] = field(default_factory=lambda: [200])
    got: list[tuple[dict[str, str], bytes]] = field(default_factory=list[tuple[dict[str, str], bytes]])
    arrived: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            made.got.append(({name.lower(): value for name, value in self.headers.items()}, body))
            made.arrived.release()
            self.send_response(made.statuses.pop(0) if len(made.statuses) > 1 else made.statuses[0])
            self.send_header("location", made.url)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        made = Receiver(f"http://localhost:{server.server_port}/hook")
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield made
        server.shutdown()
        thread.join()


@pytest.fixture
def hooked(site: Site, submission: Submission, receiver: Receiver) -> tuple[str, str, str]:
    """A run, a webhook that is told of its end, and the webhook's secret."""
    client = site.client()
    run = client.post("/v1/runs", json=submission(project="ours")).json()["id"]
    for project in ("theirs", "ours"):
        made = client.post("/v1/webhooks", json={"url": receiver.url, "project": project})
        assert made.status_code == 201, made.text
    return run, made.json()["id"], made.json()["secret"]


def loop_of(site: Site, *, private: bool = True) -> DeliveryLoop:
    """As a server that has just been started has it."""
    return DeliveryLoop(site.store, replace(site.settings, webhook_networks=LOOPBACK if private else ()))


def becomes(site: Site, run: str, phase: RunPhase) -> None:
    with site.store.writing() as tx:
        runs.observe(tx, run, phase=phase.value)


def time_passes(site: Site) -> None:
    with site.store.writing() as tx:
        tx.execute(sa.update(deliveries).values(not_before_us=0))
        tx.execute(sa.update(webhooks).values(open_until_us=0, claimed_until_us=0))


def deliveries_of(site: Site, webhook: str) -> list[dict[str, Any]]:
    return site.client().get(f"/v1/webhooks/{webhook}/deliveries").json()["data"]


async def test_told_once_and_signed(site: Site, hooked: tuple[str, str, str], receiver: Receiver) -> None:
    run, hook, secret = hooked
    for phase in (RunPhase.RUNNING, RunPhase.FAILED, RunPhase.FAILED):
        becomes(site, run, phase)
    loop = loop_of(site)
    assert await loop.tick() == 1
    assert await loop.tick() == 0
    ((headers, body),) = receiver.got
    told = Verifier(secret).verify(body, headers)
    assert (told["type"], told["data"]["run"], told["data"]["phase"]) == ("run.failed", run, "failed")
    (delivery,) = deliveries_of(site, hook)
    assert (delivery["id"], delivery["state"], delivery["answer"]) == (headers["webhook-id"], "delivered", "status 200")


async def test_what_a_request_has_to_tell_is_told_at_once(
    site: Site, hooked: tuple[str, str, str], receiver: Receiver
) -> None:
    """However rarely the loop looks by itself."""
    loop = DeliveryLoop(site.store, replace(site.settings, webhook_networks=LOOPBACK, webhook_tick_s=600.0))
    site.app.state.server.wake = loop.wake
    running = asyncio.create_task(loop.run())
    try:
        for _ in range(2):
            answer = await asyncio.to_thread(site.client().post, f"/v1/webhooks/{hooked[1]}/test")
            assert answer.is_success, answer.text
            assert await asyncio.to_thread(receiver.arrived.acquire, timeout=10)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_repeated_with_growing_waits_by_whichever_server_lives(
    site: Site, hooked: tuple[str, str, str], receiver: Receiver
) -> None:
    """No status but 2xx is success, no redirect is followed; each server that tries dies before the next."""
    run, hook, _ = hooked
    receiver.statuses = [500, 302, 404, 429, 503]
    becomes(site, run, RunPhase.FINISHED)
    for attempt in range(len(WAITS_S) + 1):
        assert await loop_of(site).tick() == 1, attempt
        assert await loop_of(site).tick() == 0, attempt
        (delivery,) = deliveries_of(site, hook)
        assert delivery["state"] == ("waiting" if attempt < len(WAITS_S) else "failed")
        assert delivery["attempts"] == attempt + 1
        time_passes(site)
    assert await loop_of(site).tick() == 0
    assert len({headers["webhook-id"] for headers, _ in receiver.got}) == 1
    assert len(receiver.got) == len(WAITS_S) + 1
    assert list(WAITS_S) == sorted(set(WAITS_S))


async def test_what_two_servers_have_is_sent_by_one(
    site: Site, hooked: tuple[str, str, str], receiver: Receiver
) -> None:
    becomes(site, hooked[0], RunPhase.FINISHED)
    assert sum(await asyncio.gather(*(loop_of(site).tick() for _ in range(4)))) == 1
    assert len(receiver.got) == 1


async def test_gone_switches_it_off(site: Site, hooked: tuple[str, str, str], receiver: Receiver) -> None:
    run, hook, _ = hooked
    receiver.statuses = [410, 200]
    becomes(site, run, RunPhase.STOPPED)
    await loop_of(site).tick()
    client, place = site.client(), f"/v1/webhooks/{hook}"
    shown = client.get(place)
    assert not shown.json()["enabled"]
    assert "410" in shown.json()["disabled_because"]
    becomes(site, run, RunPhase.FINISHED)
    assert await loop_of(site).tick() == 0
    assert client.patch(place, json={"enabled": True}, headers={"if-match": '"1"'}).status_code == 412
    assert client.patch(place, json={"enabled": True}, headers={"if-match": shown.headers["etag"]}).json()["enabled"]
    assert client.post(f"{place}/test").status_code == 202
    assert await loop_of(site).tick() == 1
    assert b"webhook.test" in receiver.got[-1][1]


async def test_a_name_that_means_a_private_address_is_not_called(
    site: Site, hooked: tuple[str, str, str], receiver: Receiver
) -> None:
    becomes(site, hooked[0], RunPhase.FINISHED)
    assert await loop_of(site, private=False).tick() == 1
    assert receiver.got == []
    assert "no public address" in deliveries_of(site, hooked[1])[0]["answer"]


def test_secrets_are_shown_once_and_kept_encrypted(site: Site, hooked: tuple[str, str, str]) -> None:
    _, hook, secret = hooked
    with site.store.reading() as connection:
        for row in connection.execute(sa.select(webhooks)).mappings():
            assert secret.encode() not in row["secret"]
    client = site.client()
    for path in ("/v1/webhooks", f"/v1/webhooks/{hook}", "/v1/audit"):
        assert secret not in client.get(path).text
    again = [
        client.post("/v1/webhooks", json={"url": "https://example.com/"}, headers={"idempotency-key": "k"}).json()
        for _ in range(2)
    ]
    assert [one["secret"] is None for one in again] == [False, True]
    assert (site.settings.home / KEY_FILE).stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    "url",
    [
        *("ftp://example.com/", "https://", "https:///x", "example.com/hook", "javascript:alert(1)"),
        *("https://user:pass@example.com/", "https://example.com/#x", "https://exa mple.com/", "https://[::1/"),
        *("http://127.0.0.1/", "http://10.1.2.3:8080/", "http://169.254.169.254/latest/", "http://[::1]/"),
        *(
            "http://[::ffff:10.0.0.1]/",
            "http://[64:ff9b::a00:1]/",
            "http://[::7f00:1]/",
            "http://[2002:a00:1::]/",
            "http://0.0.0.0/",
        ),
        *("http://224.0.0.1/", "http://[fd00::1]/", "http://[fe80::1]/", "http://100.64.0.1/"),
    ],
)
def test_urls_that_lead_nowhere_good(shared_site: Site, url: str) -> None:
    answer = shared_site.client().post("/v1/webhooks", json={"url": url})
    assert (answer.status_code, answer.json()["errors"][0]["pointer"]) == (400, "#/url")


@given(st.integers(0, 2**32 - 1), st.sampled_from(["{}", "::ffff:{}", "64:ff9b::{}"]))
def test_only_public_addresses_however_written(number: int, form: str) -> None:
    inner = ipaddress.IPv4Address(number)
    host = form.format(inner)
    url = f"http://[{host}]/" if ":" in host else f"http://{host}/"
    if inner.is_global and not inner.is_multicast and "64:" not in host:
        assert checked(url, ()) == ("http", host, 80)
    elif not inner.is_global:
        with pytest.raises(UnsafeTarget):
            checked(url, ())


@pytest.mark.parametrize("host", ["2130706433", "0x7f.1", "127.1", "017700000001", "localhost"])
async def test_names_for_loopback_are_seen_through(host: str) -> None:
    with pytest.raises(UnsafeTarget):
        await resolved(f"http://{host}:80/", ())


LONG_LABEL = "a" * 64


@pytest.mark.parametrize(
    "host", [f"{LONG_LABEL}.example.com", "a..example.com", ".example.com", f"{LONG_LABEL}", "xn--" + "a" * 70]
)
def test_a_host_that_cannot_be_encoded_is_refused(shared_site: Site, host: str) -> None:
    answer = shared_site.client().post("/v1/webhooks", json={"url": f"https://{host}/hook"})
    assert (answer.status_code, answer.json()["errors"][0]["pointer"]) == (400, "#/url")


async def test_a_receiver_that_fails_is_left_alone_and_probed(
    site: Site, hooked: tuple[str, str, str], receiver: Receiver
) -> None:
    """A receiver fails as often as it takes until it is left alone."""
    _, hook, _ = hooked
    client, place = site.client(), f"/v1/webhooks/{hook}"
    receiver.statuses = [500]
    for _ in range(2 * OPENS_AFTER):
        client.post(f"{place}/test")
    for failures in range(1, OPENS_AFTER + 1):
        assert client.get(place).json()["circuit"] == "closed"
        assert await loop_of(site).tick() == 1
        assert client.get(place).json()["failures"] == failures
    shown = client.get(place).json()
    assert (shown["circuit"], shown["next_probe_at"] is None) == ("open", False)
    assert await loop_of(site).tick() == 0
    time_passes(site)
    assert client.get(place).json()["circuit"] == "half-open"
    assert await loop_of(site).tick() == 1  # Of many that wait one is the probe.
    assert await loop_of(site).tick() == 0
    assert client.get(place).json()["circuit"] == "open"
    receiver.statuses = [200]
    time_passes(site)
    assert await loop_of(site).tick() == 1
    assert (client.get(place).json()["circuit"], client.get(place).json()["failures"]) == ("closed", 0)
    while await loop_of(site).tick():
        pass
    assert {one["state"] for one in deliveries_of(site, hook)} == {"delivered"}


def test_circuits_open_longer_each_time_within_a_bound() -> None:
    opens = [opens_for_s(failures) for failures in range(100)]
    assert opens[:OPENS_AFTER] == [0] * OPENS_AFTER
    assert opens == sorted(opens)
    assert (opens[OPENS_AFTER], opens[-1]) == (OPEN_BASE_S, OPEN_MAX_S)


async def test_what_a_circuit_never_lets_be_tried_has_failed_in_the_end(
    site: Site, hooked: tuple[str, str, str]
) -> None:
    _, hook, _ = hooked
    site.client().post(f"/v1/webhooks/{hook}/test")
    with site.store.writing() as tx:
        tx.execute(sa.update(webhooks).values(failures=OPENS_AFTER, open_until_us=2**62))
        tx.execute(sa.update(deliveries).values(created_us=deliveries.c.created_us - (GIVEN_UP_S + 1) * 1_000_000))
    assert await loop_of(site).tick() == 0
    (delivery,) = deliveries_of(site, hook)
    assert (delivery["state"], delivery["attempts"]) == ("failed", 0)


@given(
    st.lists(st.sampled_from("abcdefgh"), max_size=300),
    st.dictionaries(st.sampled_from("abcdefgh"), st.integers(0, PROJECT_AT_ONCE)),
)
def test_every_project_has_its_share(projects: list[str], on_the_way: dict[str, int]) -> None:
    """No project has more than its share, none with something due has none while there is room for one more."""
    due = [DueWebhook(str(number), project) for number, project in enumerate(projects)]
    chosen = shared_out(due, on_the_way)
    held = {name: on_the_way.get(name, 0) + sum(one.project == name for one in chosen) for name in "abcdefgh"}
    assert all(count <= PROJECT_AT_ONCE for count in held.values())
    assert sum(held.values()) <= AT_ONCE
    assert all(held[name] > 0 for name in projects) or sum(held.values()) == AT_ONCE
    assert len(set(chosen)) == len(chosen)


async def test_a_dead_receiver_delays_its_own_project_only(site: Site, receiver: Receiver) -> None:
    """Its messages to receivers that never answer wait, more of them than may be on the way; others are told."""
    client = site.client()
    with socket.create_server(("127.0.0.1", 0), backlog=64) as dead:
        for number in range(2 * PROJECT_AT_ONCE):
            body = {"url": f"http://localhost:{dead.getsockname()[1]}/{number}", "project": "theirs"}
            hook = client.post("/v1/webhooks", json=body).json()["id"]
            client.post(f"/v1/webhooks/{hook}/test")
        task = asyncio.create_task(loop_of(site).run())
        await asyncio.sleep(0)
        ours = client.post("/v1/webhooks", json={"url": receiver.url, "project": "ours"}).json()["id"]
        client.post(f"/v1/webhooks/{ours}/test")
        async with asyncio.timeout(5):  # A third of what one that does not answer is waited for.
            while not receiver.got:  # noqa: ASYNC110 - a thread gets it
                await asyncio.sleep(0.01)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
