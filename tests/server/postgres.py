"""A PostgreSQL of one's own, from Debian's packages: on a socket in a directory, gone afterwards."""

import contextlib
import itertools
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

SERVERS = Path("/usr/lib/postgresql")
USER = "postgres"
STARTED_TIMEOUT_S = 60


def skipped_without_postgresql() -> str:
    """Why what needs PostgreSQL is skipped; empty where it is installed."""
    if _programs() is None:
        return "PostgreSQL is not installed here: apt-get install postgresql"
    return ""


def _programs() -> Path | None:
    found = sorted(SERVERS.glob("*/bin/pg_ctl"), key=lambda path: int(path.parts[-3]))
    return found[-1].parent if found else None


class PostgresCluster:
    """A server of databases, down until started."""

    def __init__(self, directory: Path, programs: Path) -> None:
        self._directory = directory
        self._programs = programs
        self._numbers = itertools.count()

    def start(self) -> None:
        options = f"-c listen_addresses= -c unix_socket_directories={self._directory}"
        self._run("pg_ctl", "start", "-w", "-t", str(STARTED_TIMEOUT_S), "-l", f"{self._directory}/log", "-o", options)

    def stop(self) -> None:
        """At once: every client that is connected is cut off."""
        self._run("pg_ctl", "stop", "-m", "immediate", "-w")

    @contextlib.contextmanager
    def hanging(self) -> Iterator[None]:
        """None of its processes answers, and none has ended."""
        main = int((self._directory / "data/postmaster.pid").read_text().split()[0])
        children = Path(f"/proc/{main}/task/{main}/children").read_text().split()
        those = [main, *map(int, children)]
        for one in those:
            os.kill(one, signal.SIGSTOP)
        try:
            yield
        finally:
            for one in those:
                os.kill(one, signal.SIGCONT)

    def new_database(self) -> str:
        """An empty database's URL."""
        name = f"elastic_{next(self._numbers)}"
        self._run("createdb", "-h", str(self._directory), "-U", USER, name)
        return f"postgresql://{USER}@/{name}?host={self._directory}"

    def create(self) -> None:
        self._run("initdb", "--username", USER, "--auth", "trust", "--no-sync", "--encoding", "UTF8")

    def _run(self, program: str, *arguments: str) -> None:
        # PostgreSQL refuses to be root.
        user = USER if os.getuid() == 0 else None
        environment = {**os.environ, "PGDATA": str(self._directory / "data"), "LC_ALL": "C.UTF-8"}
        done = subprocess.run(
            [str(self._programs / program), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=environment,
            user=user,
            cwd=self._directory,
            timeout=2 * STARTED_TIMEOUT_S,
        )
        if done.returncode:
            raise RuntimeError(f"{program}: {done.stderr.decode(errors='replace').strip()}")


@contextlib.contextmanager
def cluster() -> Iterator[PostgresCluster]:
    """A cluster that runs. Raises `RuntimeError` where PostgreSQL is missing."""
    programs = _programs()
    if programs is None:
        raise RuntimeError(skipped_without_postgresql())
    # A socket's path has at most 107 characters.
    directory = Path(tempfile.mkdtemp(prefix="elastic-pg-", dir="/tmp"))
    try:
        if os.getuid() == 0:
            account = pwd.getpwnam(USER)
            os.chown(directory, account.pw_uid, account.pw_gid)
        made = PostgresCluster(directory, programs)
        made.create()
        made.start()
        try:
            yield made
        finally:
            with contextlib.suppress(RuntimeError):  # It is down already.
                made.stop()
    finally:
        shutil.rmtree(directory, ignore_errors=True)
