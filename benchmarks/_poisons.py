"""What one project can do to a server that serves another: poisons, and how long the other waits meanwhile."""

import contextlib
import gzip
import http.server
import itertools
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import sqlalchemy as sa

from benchmarks._common import Figures
from benchmarks._hosted import CONFIG, HostedSite
from benchmarks._waiting import until
from elastic.protocol.api import NewWebhook, RunPhase
from elastic.protocol.api_client import ApiError, Client, ClientError
from elastic.server.store import Store, webhooks
from elastic.server.store.database import now_us
from elastic.server.store.tables import deliveries as deliveries_table
from elastic.server.store.tables import webhooks as webhooks_table

WEBHOOKS, UPLOADS, ENDS, DEAD, MESSAGES_EACH = 20, 3, 4, 64, 5
UNPACKED_MB = 100
LONG_LABEL = "a" * 64
EVERY_S = 0.25
WARM_S = 3.0
"""For the server's start to be over: the processes that check submissions import for a while."""
DUE_IN_S = 3
QUIET_S = 1.0
"""Between messages of the other project before anything is poisoned."""
AFTER_S = 2.0
"""How long the other project goes on once all poisons are there."""
PATIENCE_S = 60.0


def poisoned(site: HostedSite) -> Figures:
    """Return how many poisons of which kind were taken, which loops they ended, and how long another project waited."""
    with (
        Client(site.url, site.secret) as client,
        _receiver() as (url, heard),
        socket.create_server(("127.0.0.1", 0), backlog=4 * DEAD) as dead,
    ):
        bad, good = (client.create_project(name).id for name in ("bad", "good"))
        hook = client.create_webhook(NewWebhook(url=url, project=good)).id
        client.dry_run(CONFIG, ["spot"], project=good)
        time.sleep(WARM_S)
        at = f"http://localhost:{dead.getsockname()[1]}"
        targets = {f"https://{LONG_LABEL}.{number}.example.com/": 1 for number in range(WEBHOOKS)}
        _keep_webhooks(site, bad, targets | {f"{at}/{number}": MESSAGES_EACH for number in range(DEAD)})
        other = _Other(site, hook, good, heard)
        other.start()
        time.sleep(QUIET_S)
        ended = _ends_by_signal(site, client, bad)
        refused = _uploads(site, client, bad)
        time.sleep(AFTER_S)
        delays_s = other.stop()
        lost = other.untold()
        over = lambda: all(client.run(run).phase is RunPhase.FINISHED for run in ended)  # noqa: E731
        went_on = until("the runs' ends", over, PATIENCE_S, must=False)
        settled = until("all tries", lambda: _poisons_tried(site), PATIENCE_S, must=False)
        died = [not process.is_alive() for process in site.processes.values()]
    return {
        "webhooks": WEBHOOKS,
        "uploads": refused,
        "ends_by_signal": len(ended),
        "receivers_dead": DEAD,
        "loops_ended": sum(died) + (lost > 0) + (not went_on) + (not settled),
        "other_projects_delayed_s": max(delays_s),
    }


class _Other:
    """The other project: has messages sent, and submissions checked, and notes how long each takes."""

    def __init__(self, site: HostedSite, hook: str, project: str, heard: dict[str, float]) -> None:
        self._site, self._hook, self._project, self._heard = site, hook, project, heard
        self._sent: dict[str, float] = {}
        self._checks_s: list[float] = []
        self._over = threading.Event()
        self._threads = [threading.Thread(target=one, daemon=True) for one in (self._tell, self._check)]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> list[float]:
        """Return the delays in seconds."""
        self._over.set()
        for thread in self._threads:
            thread.join(PATIENCE_S)
        until("all messages", lambda: not self.untold(), PATIENCE_S, must=False)
        arrived = [self._heard[one] - sent_s for one, sent_s in self._sent.items() if one in self._heard]
        return [*arrived, *self._checks_s]

    def untold(self) -> int:
        """Return the number of messages that have not arrived."""
        return sum(one not in self._heard for one in self._sent)

    def _tell(self) -> None:
        with Client(self._site.url, self._site.secret) as client:
            while not self._over.wait(EVERY_S):
                sent_s = time.monotonic()
                self._sent[client.try_webhook(self._hook).id] = sent_s

    def _check(self) -> None:
        with Client(self._site.url, self._site.secret) as client:
            while not self._over.wait(EVERY_S):
                began_s = time.monotonic()
                client.dry_run(CONFIG, ["spot"], project=self._project)
                self._checks_s.append(time.monotonic() - began_s)


def _ends_by_signal(site: HostedSite, client: Client, project: str) -> list[str]:
    """Submit runs, and end each one's process by another real-time signal; returns the runs."""
    found = [client.submit(CONFIG, ["spot"], project=project).id for _ in range(ENDS)]
    for run, number in zip(found, itertools.count(signal.SIGRTMIN + 1), strict=False):
        begun = site.server_home / "runs" / run / "begun"
        until("its process", lambda begun=begun: begun.exists() and begun.read_text().endswith("\n"), PATIENCE_S)
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(begun.read_text().split()[0]), number)
    return found


def _keep_webhooks(site: HostedSite, project: str, targets: dict[str, int]) -> None:
    """Put webhooks into the store, each with some messages, as a server that did not check their URLs would have.

    The messages are due in a while, for this transaction keeps others from writing.
    """
    store = Store(site.settings.database_url)
    try:
        with store.writing() as tx:
            (secret,) = tx.execute(sa.select(webhooks_table.c.secret).limit(1)).one()
            for url, messages in targets.items():
                row = webhooks.insert(tx, project, url, ["run.failed"], secret)
                for _ in range(messages):
                    webhooks.enqueue(tx, row["id"], webhooks.TEST, {})
            poisons = deliveries_table.c.type == webhooks.TEST
            tx.execute(sa.update(deliveries_table).where(poisons).values(not_before_us=now_us() + DUE_IN_S * 1_000_000))
    finally:
        store.close()


def _poisons_tried(site: HostedSite) -> bool:
    store = Store(site.settings.database_url)
    try:
        with store.reading() as connection:
            tried = sa.select(sa.func.count()).where(
                webhooks_table.c.url.startswith("https"), webhooks_table.c.failures > 0
            )
            return connection.execute(tried).scalar_one() >= WEBHOOKS
    finally:
        store.close()


def _uploads(site: HostedSite, client: Client, project: str) -> int:
    """Name traces that unpack to much, one after the other; returns how many were refused."""
    path = site.home / "bomb.csv.gz"
    with gzip.open(path, "wb", compresslevel=6) as file:
        file.write(b"time_s,event,instance_id\n0,add,a\n")
        for _ in range(UNPACKED_MB):
            file.write(b"\n" * 2**20)
    refused = 0
    for number in range(UPLOADS):
        with path.open("ab") as file:
            file.write(gzip.compress(f"{number}\n".encode()))
        upload = client.upload(path, f"bomb-{number}", project)
        config = {**CONFIG, "providers": {"spot": {"trace": f"upload:{upload.id}/{path.name}", "max_workers": 1}}}
        try:
            client.dry_run(config, ["spot"], project=project)
        except ApiError as error:
            refused += error.problem.status == 400
        except ClientError:
            pass
    return refused


@contextlib.contextmanager
def _receiver() -> Iterator[tuple[str, dict[str, float]]]:
    """A receiver of webhooks: its URL, and when each delivery arrived."""
    heard: dict[str, float] = {}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            heard.setdefault(self.headers["webhook-id"], time.monotonic())
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None: ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        yield f"http://localhost:{server.server_port}/hook", heard
        server.shutdown()
        thread.join()
