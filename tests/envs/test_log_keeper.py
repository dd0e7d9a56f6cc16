"""What an env worker and its children print: no key of a run, no more than a log may have, and its last words."""

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from elastic.environments.log_keeper import FIRST_BYTES, LOG_BYTES_MAX, NEWEST_BYTES, READ_BYTES, UNKEPT_STATUS, KeptLog
from elastic.protocol.run_secrets import RunSecrets
from elastic.system.last_words import RUN_KEY

SECRETS = RunSecrets(b"0" * 32)
KEYS = (SECRETS.agent_key("3/1/2", 1), SECRETS.driver_key("agent_0"), SECRETS.viewer_key("judge"))
BEGIN = """
import ctypes, os, signal, subprocess, sys
from elastic.environments.log_keeper import keep_output
from elastic.system.last_words import RUN_KEY
key = os.environ["KEY"]
keep_output(RUN_KEY.pattern)
"""
PRINTS = """
print("printed", key)
os.write(1, b"written " + key.encode() + b"\\n")
subprocess.run(["sh", "-c", "echo of a child $KEY; printf '%s' \\"in pieces $(echo $KEY | cut -c -30)\\" >&2; "
                "echo $KEY | cut -c 31- >&2"], check=True)
ctypes.CDLL(None).dprintf(2, b"by C %s\\n", key.encode())
try:
    os.wait()
except ChildProcessError:
    print("no child is left")
print("last words", key, end="", flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
LOSES_ITS_NODE_AGENT = """
import threading
from pathlib import Path
def keeps(process):
    try:
        return b"log_keeper.py" in (process / "cmdline").read_bytes() and os.readlink(process / "fd/0") == pipe
    except OSError:
        return False
pipe = os.readlink("/proc/self/fd/1")
(node_agent,) = [int(one.name) for one in Path("/proc").iterdir() if one.name.isdigit() and keeps(one)]
os.kill(node_agent, signal.SIGKILL)
threading.Event().wait(60)
"""


def kept(code: str, log: Path, **environment: str) -> int:
    """The status of a process that does this, once its log is whole."""
    with log.open("ab") as output:
        command = [sys.executable, "-c", BEGIN + code]
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**os.environ, **environment},
            check=False,
        )
    if log.is_file():
        with log.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH)
    return done.returncode


def test_no_key_is_in_a_log_whoever_prints_it(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert kept(PRINTS, log, KEY=KEYS[0]) == -9
    lines = ["printed", "written", "of a child", "in pieces", "by C"]
    assert log.read_text() == "".join(f"{line} [key]\n" for line in lines) + "no child is left\nlast words [key]"


def test_who_prints_does_not_wait_for_a_full_disk() -> None:
    assert kept("print('x' * 2**20)", Path("/dev/full"), KEY="") == 0


def test_who_prints_ends_with_the_node_agent(tmp_path: Path) -> None:
    assert kept(LOSES_ITS_NODE_AGENT, tmp_path / "log", KEY="") == UNKEPT_STATUS


def test_a_full_log_keeps_its_beginning_and_its_newest_part(tmp_path: Path) -> None:
    path, said = tmp_path / "log", 0
    with path.open("ab") as output:
        log, line = KeptLog(output.fileno(), RUN_KEY.pattern.encode()), b"%9d" + b"." * 990 + b"\n"
        block = b"".join(line % number for number in range(1000))
        for _ in range(4 * LOG_BYTES_MAX // len(block)):
            log.take(block)
            said += len(block)
            assert path.stat().st_size <= LOG_BYTES_MAX
        log.take(b"the end\n")
    found = path.read_bytes()
    assert found[:FIRST_BYTES] == (block * 2)[:FIRST_BYTES]
    assert found.endswith(block[-1000:] + b"the end\n")
    left_out = int(found[FIRST_BYTES + 2 :].split(b" ", 1)[0])
    marker = b"\n[%d bytes are left out here]\n" % left_out
    assert found[FIRST_BYTES:].startswith(marker)
    assert len(found) - len(marker) + left_out == said + len(b"the end\n")
    assert len(found) > NEWEST_BYTES


@pytest.mark.parametrize("size", [1, 7, 100, 70_000])
def test_a_key_is_hidden_however_it_is_cut(size: int, tmp_path: Path) -> None:
    said = b"".join(b"%s %s " % (b"x" * 40_000, key.encode()) for key in KEYS) + b"\nlast"
    with (tmp_path / "log").open("ab") as output:
        log = KeptLog(output.fileno(), RUN_KEY.pattern.encode())
        for begin in range(0, len(said), size):
            log.take(said[begin : begin + size])
        log.end()
    assert (tmp_path / "log").read_bytes() == b" ".join([*[b"x" * 40_000, b"[key]"] * 3, b"\nlast"])


@pytest.mark.parametrize("before", ["\\n", "%20", "x_", "agent." * 20_000])
def test_a_key_is_hidden_whatever_it_stands_behind(before: str) -> None:
    assert RUN_KEY.sub("[key]", f"{before}{KEYS[0]} {before}{KEYS[0]}") == f"{before}[key] {before}[key]"


def test_a_key_with_a_long_name_is_hidden_where_its_line_has_no_end(tmp_path: Path) -> None:
    key = SECRETS.driver_key("an_environment_with_a_name_that_is_as_long_as_a_proof_0").encode()
    for late in range(0, len(key), 5):
        said = b" " * (READ_BYTES + 1 - late) + key
        with (tmp_path / "log").open("wb") as output:
            log = KeptLog(output.fileno(), RUN_KEY.pattern.encode())
            for part in (said[: READ_BYTES + 1], said[READ_BYTES + 1 :]):
                log.take(part)
            log.end()
        assert (tmp_path / "log").read_bytes().strip() == b"[key]"
