"""Which of a machine's devices each of the pool's nodes there has, and which are of no use. Pure."""

import signal
from collections.abc import Collection, Iterable, Mapping, Sequence

import msgspec

from elastic.core.cluster.types import JobId, NodeId
from elastic.system.devices import DeviceName

KILLED = (-signal.SIGKILL, -signal.SIGTERM)
"""Exit statuses of residents that somebody has ended: that says nothing of their devices."""


class StartDeath(msgspec.Struct, frozen=True):
    """The end of a resident that had not come up. `fault`: what is wrong with its devices, if that is known."""

    job: JobId
    cause: str
    fault: str = ""


def unfit(deaths: Sequence[StartDeath], elsewhere: Collection[JobId]) -> str:
    """Return why a node's devices are of no use; empty as long as they may be.

    The last residents there, two at least, have died as they started. `elsewhere`: jobs whose residents are up on
    other nodes of the kind. A fault that is known is one of the devices. Else a job that dies is at fault itself,
    unless it is up elsewhere, or another one has died here, too, and some are up elsewhere.
    """
    jobs = {death.job for death in deaths}
    count = f"{len(deaths)} residents in a row have died there as they started"
    fault = next((death.fault for death in deaths if death.fault), "")
    if len(deaths) < 2:
        return ""
    if fault:
        return f"{count}: {fault}"
    if elsewhere and (len(jobs) > 1 or not jobs.isdisjoint(elsewhere)):
        return f"{count}, and not elsewhere: {deaths[-1].cause}"
    return ""


class DeviceAllotment:
    """The devices of the pool's machine: each is one node's, or free, or set aside with a reason.

    Without `devices` nodes have none of their own: each sees all that the machine has.
    """

    def __init__(self, devices: Sequence[DeviceName] = (), set_aside: Mapping[DeviceName, str] | None = None) -> None:
        self._devices = tuple(devices)
        self._nodes: dict[NodeId, tuple[DeviceName, ...]] = {}
        self._set_aside = dict(set_aside or {})

    @property
    def set_aside(self) -> Mapping[DeviceName, str]:
        """Devices that no node gets, with the reason."""
        return self._set_aside

    @property
    def free(self) -> Sequence[DeviceName]:
        taken = {device for devices in self._nodes.values() for device in devices}
        return [device for device in self._devices if device not in taken and device not in self._set_aside]

    def of(self, node: NodeId) -> tuple[DeviceName, ...]:
        return self._nodes.get(node, ())

    def take(self, node: NodeId, count: int) -> bool:
        """Give so many free devices to a node that has none; returns False, and gives none, if there are fewer."""
        free = self.free
        if self._devices and len(free) < count:
            return False
        self._nodes[node] = tuple(free[:count])
        return True

    def adopt(self, node: NodeId, devices: Iterable[DeviceName]) -> None:
        """Note what a node has whose node agent an earlier process has started."""
        self._nodes[node] = tuple(devices)

    def give_back(self, node: NodeId) -> None:
        self._nodes.pop(node, None)

    def put_aside(self, node: NodeId, reason: str) -> None:
        """Set a node's devices aside: once the node gives them back, no other gets them."""
        self._set_aside |= dict.fromkeys(self.of(node), reason)

    def put_back(self, device: DeviceName) -> bool:
        """Let nodes have the device again; returns whether it was set aside."""
        return self._set_aside.pop(device, None) is not None
