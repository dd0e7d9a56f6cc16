"""Running `elastic run` as a user does: to its end, or in a process to watch and to disturb."""

import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

import psutil

from benchmarks import ROOT
from benchmarks._waiting import until

T = TypeVar("T")

POLL_S = 0.05
TIMEOUT_S = 240.0
ELASTIC = (sys.executable, "-m", "elastic.cli")
EXAMPLE = ROOT / "examples" / "frozenlake.toml"


class RunFailed(Exception):
    pass


def elastic(*arguments: str, timeout_s: float = 900, within: Sequence[str] = ()) -> str:
    """Run a command of `elastic` from the repository's root, by the command `within` if there is one; its standard
    output."""
    done = subprocess.run(
        [*within, *ELASTIC, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    if done.returncode != 0:
        raise RunFailed(f"elastic {' '.join(arguments)} exited with {done.returncode}:\n{done.stderr[-2000:]}")
    return done.stdout


def sets(settings: Iterable[str]) -> list[str]:
    """Settings as arguments of a command."""
    return [part for setting in settings for part in ("--set", setting)]


def prepare() -> None:
    """The example's base policy, if it is not there yet."""
    elastic("prepare", str(EXAMPLE))


def run(directory: Path, providers: str, settings: Sequence[str], seed: int) -> tuple[Path, dict[str, Any]]:
    """One run under `directory`: its own directory, and its summary as `--json` gives it."""
    overrides = [f"run.directory={directory}", *settings]
    out = elastic(
        "run",
        str(EXAMPLE),
        *(("--providers", providers) if providers else ()),
        "--seed",
        str(seed),
        "--json",
        *sets(overrides),
    )
    summary = json.loads(out.splitlines()[-1])
    return ROOT / Path(summary["report"]).parent, summary


class CommandRun:
    """An `elastic run` with these arguments in a process of its own, which may be followed by others for the same run.

    It is kept below `runs`, with the logs beside them. `limit` is called in each process before it begins.
    """

    def __init__(self, runs: Path, arguments: Sequence[str], limit: Callable[[], None] | None = None) -> None:
        runs.mkdir(parents=True, exist_ok=True)
        self._runs, self._limit = runs, limit
        self.exec_ns: list[int] = []
        """When each process was started."""
        known = set(runs.iterdir())
        self.start("run", *arguments, *sets([f"run.directory={runs}"]))
        self.run_dir: Path = self.until(
            "its directory", lambda: next((p for p in runs.iterdir() if p not in known and p.is_dir()), None)
        )

    @classmethod
    def of_example(
        cls, runs: Path, *settings: str, providers: str = "", seed: int | None = None, example: Path = EXAMPLE
    ) -> Self:
        """An example's run with these settings, and of its providers these alone."""
        chosen = (("--providers", providers), ("--seed", "" if seed is None else str(seed)))
        options = [part for name, value in chosen if value for part in (name, value)]
        return cls(runs, [str(example), *options, *sets(settings)])

    def start(self, *arguments: str) -> None:
        self.log = Path(tempfile.mkstemp(prefix="process-", suffix=".log", dir=self._runs.parent)[1])
        with self.log.open("wb") as out:
            self.exec_ns.append(time.monotonic_ns())
            self.process = subprocess.Popen(
                [*ELASTIC, *arguments],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=out,
                start_new_session=True,
                preexec_fn=self._limit,
            )

    def ended(self) -> bool:
        """Whether the process that there is now has ended by itself, and well. Raises `RunFailed`."""
        code = self.process.poll()
        if code:
            raise RunFailed(f"process {len(self.exec_ns)} ended with {code}:\n{self.log.read_text()[-3000:]}")
        return code == 0

    def until(self, what: str, condition: Callable[[], T | None], timeout_s: float = TIMEOUT_S) -> T:
        """The first true value of `condition`. Raises `TimeoutError`, or `RunFailed` where the run ends before."""

        def found() -> T | None:
            ended = self.ended()
            if not (value := condition()) and ended:
                raise RunFailed(f"it ended before {what}")
            return value

        return until(f"{what}; see {self.log}", found, timeout_s, POLL_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.discard()

    def discard(self) -> None:
        """End what is left of it, whatever happened."""
        self.process.kill()
        self.process.wait()
        for process in processes_of(self.run_dir.name):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


def processes_of(run: str) -> list[psutil.Process]:
    """Living processes that are tagged as this run's."""
    found: list[psutil.Process] = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if process.status() != psutil.STATUS_ZOMBIE and process.environ().get("ELASTIC_RUN") == run:
                found.append(process)
    return found
