"""Large arrays in memory that was used before: the first touch of fresh memory costs many times a copy."""

import contextlib
import mmap
import weakref

import numpy as np
import numpy.typing as npt

SPARE = 2
"""Pieces of memory kept for later."""


class Memory:
    """Memory for arrays of patterns. It is reused when nobody holds an array, or a view of it, any more."""

    def __init__(self) -> None:
        self._spare: list[mmap.mmap] = []

    def empty(self, elements: int) -> npt.NDArray[np.uint16]:
        """Uninitialised."""
        if not elements:
            return np.empty(0, np.uint16)
        size_bytes = 2 * elements
        memory = self._take_spare(size_bytes) or mmap.mmap(-1, size_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # NumPy's views of this array all refer to it, since what it refers to itself is no array.
        bits = np.frombuffer(memory, np.uint16)
        weakref.finalize(bits, self._take_back, memory).atexit = False
        return bits

    def _take_spare(self, size_bytes: int) -> mmap.mmap | None:
        for piece in tuple(self._spare):
            if len(piece) == size_bytes:
                # A finalizer may run at any moment, here too, and let go of it.
                with contextlib.suppress(ValueError):
                    self._spare.remove(piece)
                    return piece
        return None

    def _take_back(self, memory: mmap.mmap) -> None:
        self._spare.append(memory)
        del self._spare[:-SPARE]
