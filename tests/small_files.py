"""A disk that is full, for files that would become large."""

import contextlib
import resource
from collections.abc import Iterator


@contextlib.contextmanager
def small_files(bytes_max: int) -> Iterator[None]:
    """For a while this process can write no file larger than this: "File too large", after what there was room for."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (bytes_max, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
