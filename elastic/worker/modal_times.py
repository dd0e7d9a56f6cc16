"""When this container began."""

import time

import psutil

_IMPORTED_S = time.time()


def container_born_s() -> float:
    """Unix time of its first process's start, or of this module's import where it was restored from a snapshot."""
    return min(_IMPORTED_S, psutil.Process().create_time())
