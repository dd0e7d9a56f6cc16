"""Whether tests and worlds notice a mutant, checked in a process forked from one that has all but the code under test.

The checkers come in order of how quickly they find what is wrong: the unit tests nearest to the mutated module, a few
worlds full of faults, every unit test of the core and the policies, more worlds. A world checks by its invariants and
its record of what has happened; that its history differs is no verdict. Code that uses far more CPU time than it ever
needs hangs, and is noticed.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import os
import resource
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType

from benchmarks import ROOT
from benchmarks._mutants import Mutant

TESTS = ("tests/core", "tests/policies")
CLUSTER_TESTS = ("tests/cluster",)
JOBS_POLICIES = ("placement", "regrouping", "repartitioning", "charging", "tails", "drift", "clusters")
"""Modules that decide about many jobs: their own tests and worlds check them."""
FEW_WORLDS = range(8)
MORE_WORLDS = range(8, 60)
WORLD_CPU_S = 10
TEST_CPU_S = 20
"""Many times what the slowest world, the slowest test takes."""
MEMORY_BYTES = 4 << 30
CHECKERS = ("nearest tests", "worlds", "all tests", "more worlds")
BROKEN_OFF = "hang or crash"


class _Mutated(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports the mutant's source under its module's name."""

    def __init__(self, mutant: Mutant) -> None:
        self._mutant = mutant

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._mutant.module:
            return None
        return importlib.util.spec_from_file_location(fullname, self._mutant.path, loader=self)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        exec(compile(self._mutant.source(), str(self._mutant.path), "exec"), module.__dict__)


def check_mutants(mutants: Sequence[Mutant | None], at_once: int) -> Iterator[tuple[Mutant | None, str | None]]:
    """Each mutant with what has noticed it, None where nothing has, as verdicts come in; None is the code unchanged.

    Must not be called once the code under test is imported here.
    """
    import hypothesis  # noqa: F401  (what every check needs is imported once)
    import pytest  # noqa: F401

    running: dict[int, Mutant | None] = {}
    waiting = list(reversed(mutants))
    while waiting or running:
        while waiting and len(running) < at_once:
            mutant = waiting.pop()
            running[_fork(mutant)] = mutant
        pid, status = os.wait()
        code = os.waitstatus_to_exitcode(status)
        yield running.pop(pid), None if code == 0 else (CHECKERS[code - 1] if code > 0 else BROKEN_OFF)


def _fork(mutant: Mutant | None) -> int:
    pid = os.fork()
    if pid == 0:
        os._exit(_verdict(mutant))
    return pid


def _verdict(mutant: Mutant | None) -> int:
    """0, or the number of the checker that noticed."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    sink = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(sink, stream)
    os.chdir(ROOT)
    signal.signal(signal.SIGVTALRM, signal.SIG_DFL)
    if mutant is not None:
        sys.meta_path.insert(0, _Mutated(mutant))
    checkers = (
        lambda: _fails(nearest_tests(mutant)),
        lambda: _goes_wrong(FEW_WORLDS, mutant),
        lambda: _fails(CLUSTER_TESTS if of_many_jobs(mutant) else TESTS),
        lambda: _goes_wrong(MORE_WORLDS, mutant),
    )
    for number, notices in enumerate(checkers, start=1):
        try:
            if notices():
                return number
        except BaseException:
            return number
    return 0


def of_many_jobs(mutant: Mutant | None) -> bool:
    return mutant is not None and (
        mutant.module.startswith("elastic.core.cluster.")
        or mutant.module in {f"policies.{name}" for name in JOBS_POLICIES}
    )


def nearest_tests(mutant: Mutant | None) -> list[str]:
    """Files of unit tests named after the module, then those that name it."""
    if mutant is None:
        return []
    named = ROOT / "tests" / mutant.path.relative_to(ROOT).parent.name / f"test_{mutant.path.stem}.py"
    files = [
        path
        for folder in (CLUSTER_TESTS if of_many_jobs(mutant) else TESTS)
        for path in sorted((ROOT / folder).glob("test_*.py"))
    ]
    found = [path for path in files if path != named and mutant.module in path.read_text()]
    return [str(path) for path in ([named] if named.exists() else []) + found]


def _goes_wrong(seeds: range, mutant: Mutant | None) -> bool:
    from elastic.testing.faults.outcome import WorldFailed
    from elastic.testing.faults.worlds import live

    world = "pool-shell" if of_many_jobs(mutant) else "core"
    for seed in seeds:
        _allow_cpu(WORLD_CPU_S)
        try:
            live(world, seed)
        except WorldFailed:
            return True
    return False


class _TimedTests:
    """Gives every test so much CPU time."""

    def pytest_runtest_setup(self) -> None:
        _allow_cpu(TEST_CPU_S)


def _fails(tests: Sequence[str | Path]) -> bool:
    import pytest

    if not tests:
        return False
    _allow_cpu(TEST_CPU_S)
    options = ["-x", "-q", "--no-header", "--no-summary", "--assert=plain", "--hypothesis-seed=0"]
    return pytest.main([*options, "-p", "no:cacheprovider", *map(str, tests)], plugins=[_TimedTests()]) != 0


def _allow_cpu(seconds: float) -> None:
    """The process ends once it has used this much CPU time from now on."""
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
