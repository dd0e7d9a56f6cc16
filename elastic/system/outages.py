"""Failures that may pass by themselves, as of a vendor, a network, a relay or an address, and when to try again."""

from typing import TypeVar

T = TypeVar("T", int, float)

EXIT_OUTAGE = 75
"""The exit status of a run's process that could not begin for an outage: the run is as it was, and is to be tried
again. (sysexits.h calls it EX_TEMPFAIL.)"""
_DOUBLINGS_MAX = 30


class Outage(Exception):
    """What failed may succeed later, without anybody's doing. The message says who does not answer."""


def backoff(failures: int, base: T, longest: T) -> T:
    """Return how long to wait before the next try: `base`, and twice as long after each of `failures` in a row, up to
    `longest`."""
    return min(base * 2 ** min(failures, _DOUBLINGS_MAX), longest)
