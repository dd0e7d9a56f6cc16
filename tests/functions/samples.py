"""Functions that do and fail in every way a pool must know. They run in the pool's processes."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

not_a_function = 3


def double(value: float) -> float:
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
