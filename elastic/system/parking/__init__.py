"""How jobs take turns on one device: each job brings its state there, and takes it away for the next job.

This module is light; `elastic.system.parking.tensors` moves tensors. Source: RollMux and Weave §5.1 (warm start).
"""

from typing import NamedTuple, Protocol, runtime_checkable


class Switch(NamedTuple):
    """The cost of one parking or resuming: seconds, bytes of state copied, and bytes of the device that stay in use."""

    seconds: float
    state_bytes: int
    rest_bytes: int = 0


@runtime_checkable
class Parkable(Protocol):
    """Something that gives its device to other jobs and comes back: an engine or a trainer. It begins resumed.

    `park` and `resume` return once they are done, may be called from any thread, and do nothing if there is nothing to
    do. If `resume` raises, the object is still parked.

    A parked engine aborts running turns, generates nothing, and holds its weights in host memory, where `load_version`
    replaces them without the device. An engine that is parked for the first time loses weights that were tensors of
    this process: it then needs a `load_version`, and keeps the weights that it gets from then on.
    """

    def park(self) -> Switch: ...

    def resume(self) -> Switch: ...
