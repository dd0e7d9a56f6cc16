"""What starts quietly gives way to everybody else; what computes later does not."""

import json
import os
import subprocess
import sys
import threading

import pytest

from elastic.pool.messages import QUIET_VARIABLE
from elastic.system.machine import LOWEST_PRIORITY, quietly

START = """
import json
import os
from pathlib import Path
from elastic.compose import processes

processes._load(processes._load_resident)
import numpy, torch

torch.ones(600, 600) @ torch.ones(600, 600)
numpy.ones((600, 600)) @ numpy.ones((600, 600))
own = os.getpriority(os.PRIO_PROCESS, 0)
assert not torch.cuda.is_initialized()
print([os.getpriority(os.PRIO_PROCESS, int(task.name)) - own for task in Path("/proc/self/task").iterdir()])
"""


def priority() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def test_only_the_quiet_work_has_the_lowest_priority() -> None:
    before = priority()
    assert quietly(priority) == LOWEST_PRIORITY
    assert priority() == before


def test_an_error_of_quiet_work_is_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        quietly(lambda: 1 // 0)


@pytest.mark.nightly
def test_a_resident_that_started_quietly_computes_at_its_own_priority() -> None:
    environment = os.environ | {QUIET_VARIABLE: "1"}
    done = subprocess.run([sys.executable, "-c", START], capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    assert {*json.loads(done.stdout)} == {0}
