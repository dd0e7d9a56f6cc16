"""`--processes N`: tests are collected once, and N processes that are forked then share them.

A process takes a few tests of one file at a time, and asks for the next few as it begins them: so fixtures of modules
and of the session live on from one to the next. Slow tests come first: none is begun when all others have ended. Tests
marked `alone` come last, one by one in one process.
"""

import os
import signal
import traceback
from collections import deque
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any, NoReturn

import pytest

SLOW_TESTS, QUICK_TESTS = 2, 20
"""How many a process takes at most."""

Share = list[pytest.Item]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--processes", type=int, default=1, help="share the tests among so many processes")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Returns None where pytest is to run the tests itself."""
    options = session.config.option
    count: int = options.processes
    if count < 2 or options.collectonly or (session.testsfailed and not options.continue_on_collection_errors):
        return None
    together: list[pytest.Item] = []
    alone: list[pytest.Item] = []
    for item in session.items:
        (alone if item.get_closest_marker("alone") else together).append(item)
    _Runners(session, count, together).run()
    _Runners(session, 1, alone).run()
    return True


def shares_of(items: Sequence[pytest.Item]) -> Iterator[Share]:
    """A few neighbours of one file each, of slow tests first."""
    slow = [item for item in items if item.get_closest_marker("slow")]
    quick = [item for item in items if not item.get_closest_marker("slow")]
    for tests, most in ((slow, SLOW_TESTS), (quick, QUICK_TESTS)):
        share: Share = []
        for item in tests:
            if share and (len(share) == most or share[0].path != item.path):
                yield share
                share = []
            share.append(item)
        if share:
            yield share


class _Runners:
    """The processes, each at the other end of a connection: it asks for shares by number, and tells of its tests."""

    def __init__(self, session: pytest.Session, count: int, items: Sequence[pytest.Item]) -> None:
        self._session = session
        self._count = count
        self._shares = list(shares_of(items))
        self._next = iter(range(len(self._shares)))
        self._pids: dict[Connection, int] = {}
        self._taken: dict[Connection, deque[pytest.Item]] = {}
        """Tests that each was given and has not told of, in their order."""

    def run(self) -> None:
        config: Any = self._session.config
        # It is made once, and emptied where it is given, before anybody is in it.
        config._tmp_path_factory.getbasetemp()
        for number in range(self._count):
            self._start(number)
        try:
            while self._pids:
                for told in wait([*self._pids]):
                    assert isinstance(told, Connection)
                    self._hear(told)
        finally:
            for pid in self._pids.values():
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)

    def _start(self, number: int) -> None:
        ours, theirs = Pipe()
        pid = os.fork()
        if pid == 0:
            for other in (ours, *self._pids):
                other.close()
            _Runner(self._session, self._shares, theirs).run(number)
        theirs.close()
        self._pids[ours] = pid
        self._taken[ours] = deque()

    def _hear(self, told: Connection) -> None:
        try:
            reports: list[dict[str, Any]] | None = told.recv()
        except EOFError:
            self._ended(told)
            return
        if reports is None:
            number = next(self._next, None)
            self._taken[told].extend([] if number is None else self._shares[number])
            told.send(number)
        else:
            self._tell(self._taken[told].popleft(), reports)

    def _tell(self, item: pytest.Item, reports: Sequence[dict[str, Any]]) -> None:
        hook = self._session.config.hook
        hook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        for data in reports:
            report = hook.pytest_report_from_serializable(config=self._session.config, data=data)
            hook.pytest_runtest_logreport(report=report)
        hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        if self._session.shouldfail:
            raise self._session.Failed(self._session.shouldfail)
        if self._session.shouldstop:
            raise self._session.Interrupted(self._session.shouldstop)

    def _ended(self, told: Connection) -> None:
        _, status = os.waitpid(self._pids.pop(told), 0)
        if status:
            at, *left = self._taken[told] or [None]
            nodeid, location = (at.nodeid, at.location) if at else ("between tests", ("", 0, "between tests"))
            code = os.waitstatus_to_exitcode(status)
            why = f"the process that ran it ended with {code}; it had taken {len(left)} more tests, which nobody runs"
            report = pytest.TestReport(nodeid, location, {}, "failed", why, "call")
            self._session.config.hook.pytest_runtest_logreport(report=report)


class _Runner:
    """One of the processes. As a plugin it tells of its tests what the terminal would show, once each has ended."""

    def __init__(self, session: pytest.Session, shares: Sequence[Share], line: Connection) -> None:
        self._session = session
        self._config = session.config
        self._shares = shares
        self._line = line
        self._reports: list[Any] = []
        """Of the test that runs now."""

    def run(self, number: int) -> NoReturn:
        status = 1
        try:
            plugins = self._config.pluginmanager
            plugins.unregister(name="terminalreporter")
            plugins.register(self)
            capture: Any = plugins.getplugin("capturemanager")
            if capture is not None:  # The file that output is captured in is the forking process's.
                capture.stop_global_capturing()
                capture.start_global_capturing()
            items = self._items()
            item = next(items, None)
            while item is not None:
                following = next(items, None)
                self._config.hook.pytest_runtest_protocol(item=item, nextitem=following)
                item = following
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)

    def _items(self) -> Iterator[pytest.Item]:
        while True:
            self._line.send(None)
            number = self._line.recv()
            if number is None:
                return
            yield from self._shares[number]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        shown = report.when == "call" or not report.passed or report.sections or self._config.option.durations
        if shown:
            data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
            self._reports.append(data)

    def pytest_runtest_logfinish(self) -> None:
        self._line.send(self._reports)
        self._reports.clear()
