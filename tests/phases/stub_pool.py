"""A pool's process as a script sees it: it listens, grants what is asked for, recalls, goes away and comes back."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import msgspec

from elastic.core.cluster.types import PhaseKind
from elastic.pool import messages as w
from elastic.pool.client import PoolMembership
from elastic.pool.connection import FromDialler, PoolLink
from elastic.protocol.connection import ConnectionLost
from elastic.protocol.endpoint import Endpoint
from tests.pool.model import listen_as_pool

NODES = {PhaseKind.ROLLOUT: ("rollout-1", "rollout-2"), PhaseKind.TRAIN: ("train-1",)}
PATIENCE_S = 20.0


class StubPool:
    """Runs on a thread of its own. `heard` is what the script said, without its heartbeats."""

    def __init__(self, *, grants: bool = True) -> None:
        self.grants = grants
        self.heard: list[msgspec.Struct] = []
        self.held: w.Granted | None = None
        self.permits = 0
        self.grant_within_s = 60.0
        self.welcomes = 0
        self.port = 0
        self._links: list[PoolLink[FromDialler]] = []
        self._changed = threading.Condition()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._server: Any = None

    def __enter__(self) -> "StubPool":
        self._thread.start()
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(PATIENCE_S)
        self._loop.close()

    @property
    def endpoint(self) -> Endpoint:
        return Endpoint(f"127.0.0.1:{self.port}")

    def environment(self) -> dict[str, str]:
        """Of the process of a script that is its job."""
        return PoolMembership(endpoint=self.endpoint, job="script", placement=3, token="token").variables()

    def start(self) -> None:
        async def listening() -> None:
            self._server = await listen_as_pool(self._connected, self.port)
            self.port = self._server.sockets[0].getsockname()[1]

        self.there(listening)

    def stop(self) -> None:
        """Its process is killed: no connection is closed in order."""

        async def stopping() -> None:
            self._server.close()
            for link in self._links:
                link.abort()
            self._links.clear()
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()

        self.there(stopping)

    def there(self, what: Callable[[], Any]) -> None:
        asyncio.run_coroutine_threadsafe(what(), self._loop).result(PATIENCE_S)

    def tell(self, message: msgspec.Struct) -> None:
        async def telling() -> None:
            self._links[-1].send(message)

        self.there(telling)

    def change(self, **changes: Any) -> None:
        """Change the permit that the script holds, and tell it so."""
        assert self.held is not None
        self.held = msgspec.structs.replace(self.held, **changes)
        self.tell(self.held)

    def until(self, condition: Callable[["StubPool"], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: condition(self), PATIENCE_S), self.heard

    def said(self, kind: type) -> list[Any]:
        return [message for message in self.heard if isinstance(message, kind)]

    def grant(self, phase: PhaseKind, *, both: bool = False) -> None:
        async def granting() -> None:
            self._grant(phase, both=both)

        self.there(granting)

    def _grant(self, phase: PhaseKind, *, both: bool = False) -> None:
        self.permits += 1
        nodes = (*NODES[PhaseKind.ROLLOUT], *NODES[PhaseKind.TRAIN]) if both else NODES[phase]
        self.held = w.Granted(self.permits, phase, nodes, 30.0, both)
        if self._links:
            self._links[-1].send(self.held)

    def _connected(self, link: PoolLink[FromDialler]) -> None:
        self._links.append(link)
        task = asyncio.get_running_loop().create_task(self._serve(link))
        task.add_done_callback(lambda done: done.cancelled() or done.exception())

    async def _serve(self, link: PoolLink[FromDialler]) -> None:
        try:
            while True:
                message = await link.receive()
                self._hear(link, message)
                with self._changed:
                    self.heard.append(message)
                    self._changed.notify_all()
        except ConnectionLost:
            pass

    def _hear(self, link: PoolLink[FromDialler], message: FromDialler) -> None:
        match message:
            case w.JobHello(token=token):
                if token != "token":
                    link.send(w.RefusedFrame("an older process of this job", retry=False))
                    return
                link.send(
                    w.JobWelcome(
                        NODES[PhaseKind.ROLLOUT],
                        NODES[PhaseKind.TRAIN],
                        1.0,
                        2.0,
                        1,
                        1,
                        self.grant_within_s,
                        permits=() if self.held is None else (self.held,),
                        silence_s=5.0,
                    )
                )
                link.watch(5.0)
                self.welcomes += 1
            case w.AskPhase(phase=phase, both=both) if self.grants and self.held is None:
                self._grant(PhaseKind.TRAIN if both else phase, both=both)
            case w.YieldPhase(permit=permit) if self.held is not None and self.held.permit == permit:
                self.held = None
            case _:
                pass
