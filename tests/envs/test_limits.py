"""Limits of env workers' processes hold for what they start, too."""

import subprocess
import sys

import pytest

from elastic.environments.limits import LEFT_STATUS

BEGIN = "from elastic.environments.limits import ProcessLimits; "
GREEDY = {
    "memory": ("ProcessLimits(memory_gb=1.0).hold(); bytearray(2 * 1024**3)", "MemoryError"),
    "files": ("ProcessLimits(files=64).hold(); [open('/dev/null') for _ in range(100)]", "Too many open files"),
    "children": (
        "ProcessLimits(files=64).hold(); import subprocess, sys; "
        "subprocess.run([sys.executable, '-c', '[open(\"/dev/null\") for _ in range(100)]'], check=True)",
        "Too many open files",
    ),
}


def run(code: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, "-c", BEGIN + code], text=True, capture_output=True, check=False)


@pytest.mark.parametrize("greedy", GREEDY)
def test_what_a_process_takes_is_limited(greedy: str) -> None:
    code, told = GREEDY[greedy]
    found = run(code)
    assert found.returncode != 0
    assert told in found.stderr


def test_a_limit_that_is_lower_already_stays() -> None:
    code = "ProcessLimits(files=64).hold(); ProcessLimits(None, None, 100).hold(); import resource; "
    assert run(code + "print(resource.getrlimit(resource.RLIMIT_NOFILE))").stdout == "(64, 64)\n"


def test_a_process_that_nobody_wants_any_more_ends_whatever_it_is_at() -> None:
    code = "import time; from elastic.environments.limits import end_once_abandoned; "
    code += "wanted = iter([True] * 3); end_once_abandoned(lambda: next(wanted, False), 0.2); time.sleep(600)"
    assert run(code).returncode == LEFT_STATUS


def test_what_a_start_that_hangs_stands_at_is_said_once() -> None:
    code = "import threading, time; from elastic.environments.limits import say_where_it_stands; "
    code += "over, quick = threading.Event(), threading.Event(); quick.set(); "
    code += "say_where_it_stands(0.0, quick, print); say_where_it_stands(0.1, over, lambda at: print(at) or over.set())"
    assert run(code + "\nwhile not over.is_set(): time.sleep(0.01)").stdout == "<string>, line 2\n"


@pytest.mark.environments
def test_a_process_that_computes_for_too_long_is_killed() -> None:
    assert run("ProcessLimits(cpu_s=1).hold()\nwhile True: pass").returncode == -24, "SIGXCPU"
