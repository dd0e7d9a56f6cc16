"""A server of the control API and its runner as processes that can be killed, and jobs as cheap as processes can be.

Both are forked from a process that has imported what they need: an interpreter's start, which is no part of what they
do, would take most of their time.
"""

import contextlib
import functools
import ipaddress
import json
import math
import multiprocessing
import os
import shutil
import socket
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any, Literal, TypeAlias

import psutil

from benchmarks import ROOT
from benchmarks._processes import processes_in, uninterrupted
from benchmarks._waiting import until
from elastic.server.settings import ServerSettings
from elastic.system.sqlite import open_sqlite

Part: TypeAlias = Literal["api", "runner"]

HOST = "127.0.0.1"
CONFIG = tomllib.loads("""
[run]
name = "job"
steps = 2
[model]
checkpoint = "policy"
[rollout]
groups = 2
group_size = 4
[providers.spot]
trace = "rlboost-a"
max_workers = 1
""")
JOB = """
import fcntl, os, random, shutil, signal, sys, time
from pathlib import Path
from elastic.system.sqlite import open_sqlite

run = Path(sys.argv[sys.argv.index("--resume") + 1])
with (run / "begun").open("a") as begun:
    begun.write(f"{os.getpid()}\\n")
lock = (run / "lock").open("w")
fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
begins = len(list(run.glob("journal*.sqlite"))) + 1
path = run / ("journal.sqlite" if begins == 1 else f"journal.{begins}.sqlite")
shutil.copy(Path(__file__).with_name("template.sqlite"), run / "copy")
journal = open_sqlite(run / "copy", "rw")
with journal:
    columns = ", ".join(f'"{row[1]}"' for row in journal.execute("PRAGMA table_info(events)") if row[1] != "seq")
    journal.execute("INSERT OR REPLACE INTO meta VALUES ('incarnation', ?)", (f"{run.name}.{begins}",))
    journal.execute("INSERT OR REPLACE INTO meta VALUES ('status', 'running')")
journal.close()
os.rename(run / "copy", path)
journal = open_sqlite(path, "rw", timeout_s=60)
values = columns.replace('"t_ns"', "?")
copy = f"INSERT INTO events ({columns}) SELECT {values} FROM events WHERE seq = 1"
stopped = []
signal.signal(signal.SIGTERM, lambda *_: stopped.append(1))
sample = "INSERT INTO samples (t_ns, status) SELECT ?, json_set(status, '$.elapsed_s', ?) FROM samples LIMIT 1"
begun_s = sampled_s = time.monotonic()
end_s = begun_s + random.Random(run.name).uniform(FROM_S, TO_S)
while time.monotonic() < end_s and not stopped:
    with journal:
        journal.execute(copy, (time.time_ns(),))
        if time.monotonic() - sampled_s >= SAMPLE_EVERY_S:
            sampled_s = time.monotonic()
            journal.execute(sample, (int(1e9 * (sampled_s - begun_s)), sampled_s - begun_s))
    time.sleep(EVERY_S)
with journal:
    said = "stopped: told to" if stopped else "finished"
    journal.execute("INSERT OR REPLACE INTO meta VALUES ('status', ?)", (said,))
"""
UP_TIMEOUT_S = 60.0


def write_job(directory: Path, from_s: float, to_s: float, every_s: float, sample_every_s: float) -> Path:
    """A job's program, and the journal that it begins with. It takes a while, and makes an event and a sample every so
    often."""
    from elastic.config import JournalConfig, validate
    from elastic.core import events as e
    from elastic.runtime.journal import RunDirectory, SampleRow, event_row
    from tests.journal_rows import run_status

    directory.mkdir()
    made = RunDirectory(directory).begin_journal(validate(JournalConfig, {}, "a job"), notes={"run": "job"})
    made.append(event_row(e.StopRequested(reason="a job's event"), 1), SampleRow(t_ns=0, status=run_status()))
    made.durable().result()
    made.close()
    (path,) = RunDirectory(directory).journal_paths()
    with contextlib.closing(open_sqlite(path, "rw")) as journal:
        journal.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    path.rename(directory / "template.sqlite")
    job = directory / "job.py"
    text = JOB
    told = {"FROM_S": from_s, "TO_S": to_s, "SAMPLE_EVERY_S": sample_every_s, "EVERY_S": every_s}
    for name, value in told.items():
        text = text.replace(name, f"float('{value}')")
    job.write_text(text)
    return job


def answers(port: int) -> bool:
    """Whether somebody listens there, on this machine."""
    with contextlib.suppress(OSError), socket.create_connection((HOST, port), timeout=1):
        return True
    return False


@dataclass
class HostedSite:
    """A server's home, with the two processes that look after it."""

    home: Path
    job: Path
    database: str = ""
    pools: tuple[Path, ...] = ()
    port: int = 0
    secret: str = ""
    processes: dict[Part, ForkServerProcess] = field(default_factory=dict[Part, ForkServerProcess])

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    @property
    def server_home(self) -> Path:
        return self.home / "server"

    @property
    def settings(self) -> ServerSettings:
        return ServerSettings(
            home=self.server_home,
            database=self.database,
            models=(self.home / "models",),
            shared_trust=True,
            pools=self.pools,
            webhook_networks=(ipaddress.ip_network("127.0.0.0/8"),),
            command=(sys.executable, "-S", str(self.job)),
            environment={"PYTHONDONTWRITEBYTECODE": "1"},
        )

    def log(self, part: Part) -> Path:
        return self.home / f"{part}.log"

    @classmethod
    @contextlib.contextmanager
    def up(
        cls,
        from_s: float,
        to_s: float,
        every_s: float,
        database: str = "",
        pools: tuple[Path, ...] = (),
        parts: Sequence[Part] = ("api", "runner"),
        sample_every_s: float = math.inf,
    ) -> Iterator["HostedSite"]:
        """A site whose runs are those of `write_job`, with these processes up until the block is left. Without a runner
        runs stay as they are written down."""
        home = Path(tempfile.mkdtemp(prefix="elastic-hosted-"))
        site = cls(home, write_job(home / "job", from_s, to_s, every_s, sample_every_s), database, pools)
        try:
            site._prepare()
            for part in parts:
                site.start(part)
            site.wait_up()
            yield site
        finally:
            site.end()
            shutil.rmtree(home, ignore_errors=True)

    def _prepare(self) -> None:
        """Make the store and its first key, and find a port."""
        from elastic.server.serving import first_key, open_store

        (self.home / "models" / "policy").mkdir(parents=True)
        store = open_store(self.settings)
        self.secret = first_key(store) or ""
        store.close()
        with socket.create_server((HOST, 0)) as listener:
            self.port = listener.getsockname()[1]

    def start(self, part: Part) -> None:
        alone = replace(self, processes={})
        self.processes[part] = process = forks().Process(target=_main, args=(part, alone))
        with uninterrupted():
            process.start()

    def kill(self, part: Part) -> None:
        self.processes[part].kill()
        self.processes[part].join()

    def end(self) -> None:
        for process in self.processes.values():
            process.terminate()
        for process in self.processes.values():
            process.join(10)
            process.kill()
            process.join()
        # Runs outlive server and runner.
        for job in processes_in(self.home):
            with contextlib.suppress(psutil.NoSuchProcess):
                job.kill()

    def wait_up(self) -> None:
        """Until the API answers. Raises `TimeoutError`."""
        until(f"an answer of {self.url}; see {self.log('api')}", lambda: answers(self.port), UP_TIMEOUT_S)

    def logged(self, part: Part) -> list[dict[str, Any]]:
        """What a part has logged as JSON."""
        lines = self.log(part).read_text(errors="replace").splitlines()
        return [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]


@functools.cache
def forks() -> ForkServerContext:
    """A context of processes that begin with what servers and crowds need imported."""
    os.environ["PYTHONPATH"] = str(ROOT)
    context = multiprocessing.get_context("forkserver")
    servers = ["elastic.system.logs", "elastic.server.serving", "alembic.command", "psycopg"]
    context.set_forkserver_preload([*servers, "benchmarks._crowds"])
    return context


def _main(part: Part, site: HostedSite) -> None:
    from elastic.compose.processes import run_loop
    from elastic.server.serving import listen, open_store, run_runner, serve
    from elastic.system.logs import STANDARD_ERROR, log_to

    os.dup2(os.open(site.log(part), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), STANDARD_ERROR)
    log_to(STANDARD_ERROR)
    settings = site.settings
    store = open_store(settings)
    if part == "runner":
        run_loop(run_runner(store, settings))
    else:
        with listen(HOST, site.port) as listener:
            run_loop(serve(store, settings, listener, with_runner=False))
    store.close()
