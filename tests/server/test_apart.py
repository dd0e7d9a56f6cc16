"""Reads of runs' files in processes of their own: what kills, hangs or floods a reader is that reader's alone."""

import contextlib
import os
import pwd
import runpy
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from elastic.server.history.apart import LIMITS, PER_OWNER, CannotBeRead, ReadingProcesses
from elastic.server.history.events import EventLog, Position
from elastic.server.history.journals import (
    Wanted,
    cost_nano_usd,
    entries_of,
    figures_of,
    metrics_of,
    offers_of,
    workers_of,
)
from tests.server.written_runs import write_run

LIMIT_S = 20.0
READS = 20
PAUSE_S = 0.0003
"""Between two truncations: a reader that gets no further than the first finds no journal, and lives on."""
WRITER = """
import sys, time
from pathlib import Path
from elastic.runtime.journal import SqliteJournal
journal = SqliteJournal(Path(sys.argv[1]))
print(".", flush=True)
time.sleep(600)
"""


@pytest.fixture
def processes() -> Iterator[ReadingProcesses]:
    made = ReadingProcesses()
    yield made
    made.end()


OWN = [Path("/proc/self" + "/task/.." * number) for number in range(2 * LIMITS.kept)]
"""Directories, each of an owner of its own, whose real path names the process that reads it."""
BREAKING = [
    ("import os, signal; os.kill(os.getpid(), signal.SIGBUS)", LIMIT_S),
    ("import time; time.sleep(600)", 0.5),
    ("held = bytearray(2**31)", LIMIT_S),
    ("import threading; told = threading.Lock()", LIMIT_S),
]


def test_what_breaks_a_reader_breaks_no_other(processes: ReadingProcesses, tmp_path: Path) -> None:
    """Readers really die: of a signal, their time limit, their memory limit, and by an answer that cannot be sent."""
    for number, (script, limit_s) in enumerate(BREAKING):
        odd = tmp_path / f"odd{number}.py"
        odd.write_text(script)
        with pytest.raises(CannotBeRead, match=rf"odd{number}\.py: its files cannot be read now"):
            processes.read(limit_s, runpy.run_path, odd)
        assert processes.read(LIMIT_S, figures_of, tmp_path) is None, script


def test_who_begins_as_the_server_is_killed_ends_without_a_word() -> None:
    """In a process of its own, whose priority it lowers."""
    begins = "a, b = socket.socketpair(); b.close(); answer_orders(a.detach(), print)"
    command = f"import socket; from elastic.server.side_processes import answer_orders; {begins}"
    ended = subprocess.run([sys.executable, "-c", command], capture_output=True, check=False, timeout=LIMIT_S)
    assert (ended.returncode, ended.stderr) == (0, b"")


def test_errors_of_a_read_are_told(processes: ReadingProcesses, tmp_path: Path) -> None:
    """An error crosses from the process that reads."""
    with pytest.raises(FileNotFoundError):
        processes.read(LIMIT_S, os.listdir, tmp_path / "missing")


def test_what_no_run_writes_cannot_be_read(processes: ReadingProcesses, tmp_path: Path) -> None:
    """Its user may write any value into any column: an event of another kind than its row says, a text for a time."""
    path = write_run(tmp_path / "run", steps=2) / "journal.sqlite"
    with contextlib.closing(sqlite3.connect(path)) as journal, journal:
        journal.execute("UPDATE events SET body = (SELECT body FROM events WHERE kind = 'WorkerJoined')")
        journal.execute("UPDATE events SET t_ns = 'noon'")
    for read, of in ((entries_of, (offers_of,)), (entries_of, (workers_of,)), (cost_nano_usd, ())):
        with pytest.raises(CannotBeRead, match="run: its files say what no run writes"):
            processes.read(LIMIT_S, read, path.parent, *of)
    with pytest.raises(CannotBeRead):
        EventLog(path.parent).read(Position(0, 0))


def test_a_user_who_truncates_what_is_mapped_ends_no_server(tmp_path: Path) -> None:
    """SQLite maps the index of a journal that is being written; whoever owns the file may shorten it at any moment."""
    writer = subprocess.Popen([sys.executable, "-c", WRITER, tmp_path / "journal.sqlite"], stdout=subprocess.PIPE)
    assert writer.stdout is not None
    over = threading.Event()

    def truncate() -> None:
        while not over.wait(PAUSE_S):
            os.truncate(tmp_path / "journal.sqlite-shm", 0)

    hostile = threading.Thread(target=truncate)
    try:
        assert writer.stdout.read(1) == b"."
        hostile.start()
        for _ in range(READS):
            try:
                assert figures_of(tmp_path) is None
            except CannotBeRead:  # Its reader has died of it.
                break
    finally:
        over.set()
        hostile.join()
        writer.kill()
        writer.communicate()


def test_orders_that_come_at_once_share_the_processes_that_are_kept(processes: ReadingProcesses) -> None:
    def reader(place: Path) -> psutil.Process:
        return psutil.Process(int(processes.read(LIMIT_S, Path.resolve, place).name))

    with ThreadPoolExecutor(3 * len(OWN)) as threads:
        readers = set(threads.map(reader, 3 * OWN))
    assert len(readers) <= LIMITS.kept
    assert reader(OWN[0]) in readers
    for one in readers:
        one.send_signal(signal.SIGKILL)
    while any(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in readers):
        time.sleep(0.01)
    assert reader(OWN[0]) not in readers, "what has died meanwhile is asked nothing"


def test_beside_those_that_are_stuck_another_process_begins(processes: ReadingProcesses, tmp_path: Path) -> None:
    def hang(number: int) -> None:
        stuck = tmp_path / f"stuck{number}.py"
        stuck.write_text("import time; time.sleep(600)")
        with pytest.raises(CannotBeRead):
            processes.read(4.0, runpy.run_path, stuck)

    with ThreadPoolExecutor(LIMITS.kept) as threads:
        hanging = [threads.submit(hang, number) for number in range(LIMITS.kept)]
        while processes.busy < LIMITS.kept:
            time.sleep(0.01)
        assert processes.read(LIMIT_S, figures_of, tmp_path) is None
        assert processes.busy == LIMITS.kept
        for one in hanging:
            one.result()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_one_users_slow_files_delay_that_user_alone(processes: ReadingProcesses, tmp_path: Path) -> None:
    """A read reaches its real time limit in a process of its own."""
    top = Path(tempfile.mkdtemp())
    slow = top / "slow.py"
    slow.write_text("import time; time.sleep(600)")
    os.chown(slow, pwd.getpwnam("nobody").pw_uid, -1)

    def read() -> None:
        with pytest.raises(CannotBeRead):
            processes.read(8.0, runpy.run_path, slow)

    reading = [threading.Thread(target=read) for _ in range(PER_OWNER)]
    try:
        for one in reading:
            one.start()
        while processes.busy < PER_OWNER:
            time.sleep(0.01)
        begun_s = time.monotonic()
        with pytest.raises(CannotBeRead, match="other files of its owner"):
            processes.read(LIMIT_S, runpy.run_path, slow)
        assert processes.read(LIMIT_S, metrics_of, tmp_path, "run", Wanted(10)).steps == []
        assert time.monotonic() - begun_s < LIMIT_S
    finally:
        for one in reading:
            one.join()
        shutil.rmtree(top)
