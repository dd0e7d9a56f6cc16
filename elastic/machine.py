"""What this machine gives a process: file descriptors, and a look at its processors."""

import contextlib
import resource

import psutil


def raise_descriptor_limit() -> int:
    """Allow this process as many open files as it may have, instead of the fewer that it was given; returns how many.

    Every connection takes one.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


class CpuSampler:
    """The share of the machine's processors that was in use since the last look.

    Where it cannot be read (no descriptor is left), it is what it was last.
    """

    def __init__(self) -> None:
        self._share = 0.0

    def share(self) -> float:
        with contextlib.suppress(OSError):
            self._share = psutil.cpu_percent() / 100
        return self._share
