"""How jobs take turns on one device: who has it brings its state there, and takes it away again for the next.

Light; `elastic.parking.tensors` has what moves tensors. Source: RollMux and Weave §5.1 (warm start).
"""

from typing import NamedTuple, Protocol, runtime_checkable


class Switch(NamedTuple):
    """What parking or resuming took: seconds, the bytes of state that left the device or came to it, and what of the
    device is held all the time."""

    seconds: float
    state_bytes: int
    rest_bytes: int = 0


@runtime_checkable
class Parkable(Protocol):
    """What makes way on its device for other jobs, and comes back: an engine, a trainer. It begins resumed.

    Both return once they are done, may be called from any thread, and do nothing where nothing is to be done. Where
    `resume` raises it is parked still.

    A parked engine aborts what runs, generates nothing, and holds its weights in host memory; there `load_version`
    brings newer ones into force without the device. Weights that were tensors of this process are lost to an engine
    that is parked for the first time: it needs a `load_version`, and keeps what it is given from then on.
    """

    def park(self) -> Switch: ...

    def resume(self) -> Switch: ...
