"""The node agent of an env worker's log: a process beside it through which all goes that it and its children print.

What looks like a key of a run is hidden, whichever code has printed it and by whatever call, however it is cut into
pieces. The log is bounded: a full one keeps its beginning and its newest part. The node agent ends once nobody can
print any more, so that last words reach the log of a worker that was killed. This file runs by itself, without the
package.
"""

import contextlib
import fcntl
import os
import re
import select
import stat
import subprocess
import sys
import threading

STDIN, STDOUT, STDERR = 0, 1, 2
READ_BYTES = 64 * 1024
HELD_BYTES = 1024
"""The most bytes that are held of a line without an end. A key is shorter."""
HIDDEN = b"[key]"
UNKEPT_STATUS = 71
"""The exit status of a process whose node agent is gone."""
LOG_BYTES_MAX, FIRST_BYTES, NEWEST_BYTES = 16 * 1024**2, 1024**2, 7 * 1024**2
"""A log that has become larger than the first is cut down to the other two."""
_LEFT_OUT = re.compile(rb"\n\[(\d+) bytes are left out here\]\n")


def keep_output(key_pattern: str) -> None:
    """Have all that this process prints from now on, and what it starts, go through a node agent to where it would go.

    It ends if the node agent does: whatever prints would raise from then on.
    """
    nowhere = os.open(os.devnull, os.O_WRONLY)
    reading, writing = os.pipe()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    command = (sys.executable, "-I", "-S", __file__, key_pattern)
    # With an environment of its own: it is not among those that are ended with the worker, and ends by itself.
    subprocess.run(command, stdin=reading, stdout=STDERR, stderr=nowhere, env={}, check=True)
    for stream in (STDOUT, STDERR):
        os.dup2(writing, stream)
    for descriptor in (nowhere, reading):
        os.close(descriptor)
    threading.Thread(target=_end_unkept, args=(writing,), name="log keeper", daemon=True).start()
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]


def _end_unkept(pipe: int) -> None:
    reader_gone = select.poll()
    reader_gone.register(pipe, 0)
    reader_gone.poll()
    os._exit(UNKEPT_STATUS)


class KeptLog:
    """Masks what is given, and writes it to a descriptor; a regular file is bounded."""

    def __init__(self, descriptor: int, key_pattern: bytes) -> None:
        self._key = re.compile(key_pattern)
        self._held = b""
        self._out = descriptor
        self._is_file = stat.S_ISREG(os.fstat(descriptor).st_mode)
        if self._is_file:
            self._out = os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR | os.O_APPEND)
            with contextlib.suppress(OSError):  # Another one still writes for who outlived a former worker.
                fcntl.flock(self._out, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def take(self, said: bytes) -> None:
        """Write what ends in a whole line; of a line without an end all but its last part."""
        held = self._held + said
        whole = held.rfind(b"\n") + 1
        if len(held) - whole > READ_BYTES:
            held = self._key.sub(HIDDEN, held)
            whole = len(held) - HELD_BYTES
        self._write(held[:whole])
        self._held = held[whole:]

    def end(self) -> None:
        self._write(self._held)
        self._held = b""

    def _write(self, said: bytes) -> None:
        left = memoryview(self._key.sub(HIDDEN, said))
        with contextlib.suppress(OSError):  # The disk is full: the printing code goes on.
            while left:
                left = left[os.write(self._out, left) :]
            if self._is_file and os.fstat(self._out).st_size > LOG_BYTES_MAX:
                self._cut()

    def _cut(self) -> None:
        """Leave out what is between the log's beginning and its newest part."""
        size = os.fstat(self._out).st_size
        newest = os.pread(self._out, NEWEST_BYTES, size - NEWEST_BYTES)
        before = _LEFT_OUT.match(os.pread(self._out, 100, FIRST_BYTES))
        left_out = size - FIRST_BYTES - NEWEST_BYTES + (0 if before is None else int(before[1]) - len(before[0]))
        os.ftruncate(self._out, FIRST_BYTES)
        left = memoryview(b"\n[%d bytes are left out here]\n" % left_out + newest)
        while left:
            left = left[os.write(self._out, left) :]


def main() -> None:
    log = KeptLog(STDOUT, sys.argv[1].encode())
    if os.fork():  # Nobody's child: users' code may wait for all that it has.
        os._exit(0)
    while said := os.read(STDIN, READ_BYTES):
        log.take(said)
    log.end()


if __name__ == "__main__":
    main()
