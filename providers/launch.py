"""Run a command that dies with the process that started it: `python launch.py PARENT_PID COMMAND…`.

A script rather than a function run between fork and exec, where a process with threads may safely do next to
nothing. Imports nothing but the standard library, so that it starts in some milliseconds.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    parent_pid, *command = sys.argv[1:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != int(parent_pid):
            sys.exit("the process that started this one has died")
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
