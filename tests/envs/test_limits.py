"""Limits of env workers' processes hold for what they start, too."""

import asyncio
import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

BEGIN = "from elastic.environments.limits import ProcessLimits, bound_output; "
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


@pytest.mark.environments
def test_a_process_that_computes_for_too_long_is_killed() -> None:
    assert run("ProcessLimits(cpu_s=1).hold()\nwhile True: pass").returncode == -24, "SIGXCPU"


@pytest.mark.environments
async def test_what_is_printed_has_a_bound(tmp_path: Path) -> None:
    code = (
        "import asyncio, sys\nasync def main():\n  bound_output()\n"
        "  for _ in range(100):\n    print('x' * 2**20); await asyncio.sleep(0.03)\n  print('done', file=sys.stderr)\n"
        "asyncio.run(main())"
    )
    log = tmp_path / "log"
    with log.open("ab") as output:
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", BEGIN + code, stdout=output, stderr=output)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(60):
                await process.wait()
    assert process.returncode == 0
    assert 64 * 2**20 <= log.stat().st_size < 101 * 2**20
    assert b"this log is full" in log.read_bytes()[-200:]


async def test_a_log_on_a_full_disk_has_the_same_bound(tmp_path: Path) -> None:
    code = (
        "import os, resource, time\nsize = os.fstat(2).st_size\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))\nbound_output()\n"
        "while os.fstat(2).st_rdev != os.stat(os.devnull).st_rdev: time.sleep(0.01)"
    )
    log = tmp_path / "log"
    log.touch()
    os.truncate(log, 64 * 2**20)  # Its limit is where nothing more can be written.
    with log.open("ab") as output:
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", BEGIN + code, stdout=output, stderr=output)
        async with asyncio.timeout(60):
            assert await process.wait() == 0
    assert log.stat().st_size == 64 * 2**20
