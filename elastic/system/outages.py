"""Failures that may pass by themselves: a vendor, a network, a relay or an address that is not to be had now."""

EXIT_OUTAGE = 75
"""The exit status of a run's process that could not begin for an outage: the run is as it was, and is to be tried
again. (sysexits.h calls it EX_TEMPFAIL.)"""


class Outage(Exception):
    """What failed may succeed later, without anybody's doing. The message says who does not answer."""
