"""A trainer's device that other jobs use in turn. The node's agent says when the trainer may compute, and when it
parks.

Every use of the device first waits for the node agent, and then for the device's thread. On that thread the state is
parked and resumed too, after the work under way. Source: Weave §5.1; `elastic.pool.messages`.
"""

import asyncio
import os
import socket
from collections.abc import Mapping
from typing import NoReturn

import structlog

from elastic.config import ConfigError
from elastic.core.types import Account
from elastic.pool.connection import TO_RESIDENT, show_life
from elastic.pool.messages import NODE_AGENT_VARIABLE, DeviceResumed, Leave, Park, Parked, Resume, Warm, WorkAs
from elastic.protocol.connection import over_socket
from elastic.system.parking import Parkable, Switch
from elastic.worker.accounts import DeviceAccounts
from elastic.worker.threads import DaemonThread

log = structlog.get_logger(__name__)


class DevicePermit:
    """Says whether the worker may use its device. Without a node agent it always may."""

    def __init__(self, node_agent: socket.socket | None = None) -> None:
        self._node_agent = node_agent
        self._changed = asyncio.Condition()
        self._may = node_agent is None
        self._leaving = False

    @property
    def shared(self) -> bool:
        return self._node_agent is not None

    async def granted(self) -> bool:
        """Wait until the device may be used. Returns False if the worker leaves first; then nothing may begin."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._may or self._leaving)
            return self._may

    async def give_up(self) -> None:
        """Release all waiters, because the worker leaves."""
        async with self._changed:
            self._leaving = True
            self._changed.notify_all()

    async def obey(self, state: Parkable, device: DaemonThread, accounts: DeviceAccounts, timeout_s: float) -> NoReturn:
        """Park and resume `state` on the device's thread as the node agent says; it begins without the device.

        Raises `ConnectionLost` once the node agent is gone, `TimeoutError`, and what parking or resuming raises: the
        worker is of no more use then.
        """
        assert self._node_agent is not None
        accounts.devote(Account.PARKED)
        link = await over_socket(self._node_agent, TO_RESIDENT, "the node agent")
        show_life(link)
        try:
            link.send(Warm())
            while True:
                match await link.receive():
                    case Resume(permit=permit):
                        switch = await device.run(timeout_s, self._resumed, state, accounts)
                        await self._allow(True)
                        link.send(DeviceResumed(permit, switch.seconds, switch.state_bytes))
                    case Park(permit=permit):
                        await self._allow(False)
                        switch = await device.run(timeout_s, self._parked, state, accounts)
                        link.send(Parked(permit, switch.seconds, switch.state_bytes, switch.rest_bytes))
                    case WorkAs() | Leave() as message:
                        log.warning("a trainer takes no order of this kind", asked=type(message).__name__)
        finally:
            link.abort()

    async def _allow(self, may: bool) -> None:
        async with self._changed:
            self._may = may
            self._changed.notify_all()

    @staticmethod
    def _resumed(state: Parkable, accounts: DeviceAccounts) -> Switch:
        accounts.devote(Account.SWITCHING)
        switch = state.resume()
        accounts.leave_to_engine()
        return switch

    @staticmethod
    def _parked(state: Parkable, accounts: DeviceAccounts) -> Switch:
        accounts.devote(Account.SWITCHING)
        switch = state.park()
        accounts.devote(Account.PARKED)
        return switch


def node_agent_socket(environment: Mapping[str, str] = os.environ) -> socket.socket | None:
    """Return the socket to the node agent that has started this process, if any. Raises `ConfigError`."""
    named = environment.get(NODE_AGENT_VARIABLE, "")
    if not named:
        return None
    try:
        descriptor = int(named)
        os.set_inheritable(descriptor, False)
        return socket.socket(fileno=descriptor)
    except (ValueError, OSError) as error:
        raise ConfigError(
            f"{NODE_AGENT_VARIABLE}: takes the descriptor of a socket (found {named!r}: {error})"
        ) from error
