"""Checks of submissions in processes beside the server's, with a limit of time: what one costs delays nobody else.

`python -m elastic.server.intake.checking FD` is such a process. It answers at the socket of that descriptor until the
server closes it.
"""

import atexit
import contextlib
import pickle
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import structlog

from elastic.protocol.api import DryRun, Submission
from elastic.server.intake import submissions
from elastic.server.problems import ApiProblem
from elastic.server.settings import ServerSettings
from elastic.server.side_processes import SideProcess, answer_orders
from elastic.server.store.runs import NewRun
from elastic.system.installed import installed
from traces.errors import untrusted

log = structlog.get_logger(__name__)

WAIT_S = 20.0
"""Longest that a check waits for a process."""
PROCESSES = 2
WAITING_PER_PROJECT = 8
"""Checks of one project that wait at once; each holds a thread of the server's."""
_LOOKED_AT = ("elastic.providers", "elastic.engines", "elastic.environments", "elastic.function_pools")


@dataclass(frozen=True)
class _CheckOrder:
    settings: ServerSettings
    submission: Submission
    project: str


@dataclass(frozen=True)
class CheckedSubmission:
    """A run that may be submitted, and what it would hold at most."""

    new: NewRun
    would: DryRun


class CheckProcesses:
    """At most `PROCESSES` processes, started as they are needed; a project has one of them at a time."""

    def __init__(self) -> None:
        self._free: list[SideProcess] = []
        self._busy = 0
        self._waiting: Counter[str] = Counter()
        self._checking: set[str] = set()
        self._changed = threading.Condition()

    def checked(self, settings: ServerSettings, submission: Submission, project: str) -> CheckedSubmission:
        """Return the run that is asked for. Raises `ApiProblem` with all faults that can be told at once."""
        with self._process(project, settings.check_timeout_s) as process:
            order = pickle.dumps(_CheckOrder(settings, submission, project))
            answer = pickle.loads(process.ask(order, settings.check_timeout_s))
        if isinstance(answer, ApiProblem):
            raise answer
        if not isinstance(answer, CheckedSubmission):
            raise RuntimeError(f"a submission could not be checked: {answer}")
        return answer

    def warm(self) -> None:
        """Start the processes, so that no submission waits for that. Whoever asks meanwhile starts one."""
        for _ in range(PROCESSES):
            with self._changed:
                if self._busy + len(self._free) >= PROCESSES:
                    return
                self._busy += 1
            process = SideProcess(__name__)
            try:
                process.ready()
            except (EOFError, OSError) as error:
                log.error("no process that checks submissions", error=str(error))
                process.end()
                process = None
            with self._changed:
                self._busy -= 1
                self._free += [] if process is None else [process]
                self._changed.notify_all()

    def end(self) -> None:
        """End the processes that nobody uses."""
        with self._changed:
            ended, self._free = self._free, []
        for process in ended:
            process.end()

    @contextlib.contextmanager
    def _process(self, project: str, within_s: float) -> Iterator[SideProcess]:
        """A context: a process for one check. Raises `ApiProblem` if there is none, or if the check takes too long."""
        process = self._take(project)
        keep = False
        try:
            if process is None:
                process = SideProcess(__name__)
                process.ready()
            yield process
            keep = True
        except TimeoutError:
            raise ApiProblem(
                "invalid-configuration",
                f"its check took longer than {within_s:g} s; allowed: fewer keys, smaller files",
            ) from None
        except (EOFError, OSError) as error:
            log.error("a process that checks submissions has ended", error=str(error))
            raise ApiProblem("unavailable", "the check of the submission has broken off") from None
        finally:
            if process is not None and not keep:
                process.end()
            with self._changed:
                if process is not None and keep:
                    self._free.append(process)
                self._busy -= 1
                self._checking.discard(project)
                self._changed.notify_all()

    def _take(self, project: str) -> SideProcess | None:
        """Return a free process, or None where a new one may be started. Raises `ApiProblem`."""
        until_s = time.monotonic() + WAIT_S
        with self._changed:
            if self._waiting[project] >= WAITING_PER_PROJECT:
                raise ApiProblem("unavailable", f"{WAITING_PER_PROJECT} submissions of the project are being checked")
            self._waiting[project] += 1
            try:
                while project in self._checking or self._busy >= PROCESSES:
                    if not self._changed.wait(until_s - time.monotonic()):
                        raise ApiProblem("unavailable", "other submissions are being checked")
                self._busy += 1
                self._checking.add(project)
                return self._free.pop() if self._free else None
            finally:
                self._waiting[project] -= 1
                if not self._waiting[project]:
                    del self._waiting[project]


_processes = CheckProcesses()
atexit.register(_processes.end)
checked, warm = _processes.checked, _processes.warm


def _answer(content: bytes) -> bytes:
    return pickle.dumps(_checked(pickle.loads(content)))


def _checked(order: _CheckOrder) -> object:
    with untrusted():
        try:
            new, plan = submissions.check(order.settings, order.submission, order.project)
            return CheckedSubmission(new, submissions.dry_run(plan))
        except ApiProblem as problem:
            return problem
        except Exception as error:
            log.error("a submission could not be checked", exc_info=True)
            return type(error).__name__


def main(descriptor: int) -> None:
    """Answer until the server closes the socket of this descriptor.

    What checks look at is imported before the first, whose project would wait for it.
    """
    for group in _LOOKED_AT:
        for point in installed(group).values():
            with contextlib.suppress(Exception):  # A submission that names it is told why.
                point.load()
    answer_orders(descriptor, _answer)


if __name__ == "__main__":
    from elastic.server.intake import checking

    # What is sent is of this module, and not of `__main__`.
    checking.main(int(sys.argv[1]))
