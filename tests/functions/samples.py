"""Functions that do and fail in every way a pool must know. They run in the pool's processes."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

from functions.process import HEADER, Returned

not_a_function = 3


def double(value: float) -> float:
    return 2 * value


async def double_later(value: float) -> float:
    return 2 * value


def process_id(_: Any) -> int:
    return os.getpid()


def count(path: str) -> int:
    """Leaves a line for each run: who repeats a key must not see another."""
    with Path(path).open("a") as lines:
        lines.write("run\n")
    time.sleep(0.05)
    return len(Path(path).read_text().splitlines())


def hang(path: str) -> None:
    """Says who hangs, and so does a child, which must not outlive the call either."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    partial = Path(f"{path}.partial")
    partial.write_text(f"{os.getpid()} {child.pid}")
    partial.replace(path)
    time.sleep(600)


def detach(path: str) -> None:
    """Starts a process in a session of its own, says which, and hangs."""
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    child = subprocess.Popen(command, start_new_session=True)
    partial = Path(f"{path}.partial")
    partial.write_text(str(child.pid))
    partial.replace(path)
    time.sleep(600)


def large(size_bytes: int) -> bytes:
    return bytes(size_bytes)


def fail_at_length(length: int) -> None:
    raise ValueError("x" * length)


def forge(size_bytes: int) -> None:
    """Says on the pool's own pipe that so much follows, and begins with it."""
    pipe = _pipe()
    os.write(pipe, HEADER.pack(size_bytes))
    while True:
        os.write(pipe, bytes(2**20))


def forge_nested(depth: int) -> None:
    body = b"\x91" * depth + b"\xc0"
    answer = msgspec.msgpack.encode(Returned(msgspec.Raw(body)))
    os.write(_pipe(), HEADER.pack(len(answer)) + answer)
    time.sleep(600)


def _pipe() -> int:
    """The pool's: beyond the standard three, the one that is a pipe or a socket and can be written."""
    for number in sorted(int(name) for name in os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):
            if number > 2 and os.readlink(f"/proc/self/fd/{number}").startswith(("pipe:", "socket:")):
                return number
    raise AssertionError("the pool has no pipe")


def environment(_: Any) -> dict[str, str]:
    return dict(os.environ)


def die(_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_once(path: str) -> str:
    if not Path(path).exists():
        Path(path).touch()
        die(None)
    return "alive"


def fail(value: Any) -> None:
    raise ValueError(f"not with {value}")


def fail_once(path: str) -> str:
    if not Path(path).exists():
        Path(path).touch()
        raise ValueError("not yet")
    return "well"


def unsendable(_: Any) -> object:
    return object()


def chat(_: Any) -> str:
    """Prints where a careless pool keeps its frames."""
    print("nothing of this is an answer", flush=True)
    os.write(1, b"nor of this\n")
    return "said"


def length(text: str) -> int:
    return len(text)


def hang_once(path: str) -> str:
    """Hangs where it runs for the first time."""
    if not Path(path).exists():
        Path(path).touch()
        time.sleep(600)
    return "went on"


def print_mib(mib: int) -> None:
    print("x" * (mib * 2**20), flush=True)
