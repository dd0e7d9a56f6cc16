"""A trainer's ranks on other nodes of its pool, as its first rank sees them.

Each of these nodes has a resident of the same job (`rank_node`), which starts its ranks. All of them dial the first
rank: a node for itself, and for each of its ranks twice. No rank uses a device unless every node has been given its
own under the same permit, and a node gives its own back once all ranks have parked.
"""

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing import AuthenticationError

import msgspec
import structlog

from elastic.pool.messages import RankPlaces
from elastic.worker.trainer.transformers import rank_messages as m

log = structlog.get_logger(__name__)

PROOF_S = 10
"""For a dialler to prove that it belongs here."""
UNPROVEN_MAX = 64
"""Diallers that are given this time at once; with one more the first of them has had it."""


class OtherNodes:
    """The nodes of all ranks but the first one's. `lost` ends the process: one of them is gone."""

    def __init__(self, places: RankPlaces, lost: Callable[[str], object]) -> None:
        self._places, self._lost = places, lost
        self._listener = socket.socket(fileno=places.descriptor)
        self._changed = threading.Condition()
        self._lines: dict[m.LineOpened, m.RankLine] = {}
        self._unproven: dict[m.RankLine, float] = {}
        """When each was accepted that has not proved that it belongs here."""
        self._strangers, self._told_s = 0, float("-inf")
        self._given: dict[int, int] = {}
        """By node, the permit under which its devices were given."""
        self._taken: set[int] = set()
        """Nodes whose devices are to be given back."""
        self._computing = self._closed = False
        self._nodes = range(1, len(places.counts))

    @property
    def host(self) -> str:
        """The address by which the others reach this process."""
        return str(self._listener.getsockname()[0])

    def join(self) -> Sequence[tuple[m.RankLine, m.RankLine]]:
        """Wait for all nodes and ranks; returns each rank's lines, for orders and for publications. Blocks."""
        threading.Thread(target=self._accept, name="ranks elsewhere", daemon=True).start()
        for node in self._nodes:
            line = self._line(m.LineOpened(node))
            threading.Thread(target=self._hear, args=(node, line), name=f"node {node}", daemon=True).start()
        found: list[tuple[m.RankLine, m.RankLine]] = []
        for node in self._nodes:
            for rank in msgspec.structs.replace(self._places, place=node).here:
                orders, publications = (self._line(m.LineOpened(node, rank, which)) for which in (False, True))
                found.append((m.RankLine.of_first(orders.detach()), m.RankLine.of_first(publications.detach())))
        return found

    def wait_for_devices(self) -> None:
        """Wait until every node has its devices, all under one permit: from now on they are used."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._given) == len(self._nodes) and len({*self._given.values()}) == 1)
            self._computing = True

    def left(self) -> None:
        """No rank uses its device any more."""
        with self._changed:
            self._computing = False
            for node in [*self._taken]:
                self._give_back(node)

    def close(self) -> None:
        """Let all of them end."""
        with self._changed:
            self._closed = True
            for line in self._lines.values():
                line.cut()

    def _line(self, opened: m.LineOpened) -> m.RankLine:
        with self._changed:
            self._changed.wait_for(lambda: opened in self._lines)
            return self._lines[opened]

    def _accept(self) -> None:
        self._listener.settimeout(PROOF_S / 4)
        while True:
            try:
                dialled, _ = self._listener.accept()
                line = m.RankLine.dialled(m.kept(dialled, PROOF_S))
            except TimeoutError:
                pass
            except OSError as error:
                log.warning("who dials is not let in", cause=str(error))
                time.sleep(PROOF_S / 10)
            else:
                with self._changed:
                    self._unproven[line] = time.monotonic()
                threading.Thread(target=self._let_in, args=(line,), name="a rank dials", daemon=True).start()
            with self._changed:
                while len(self._unproven) > UNPROVEN_MAX:
                    line = next(iter(self._unproven))
                    del self._unproven[line]
                    line.cut()
                for line, since_s in self._unproven.items():
                    if time.monotonic() - since_s > PROOF_S:
                        line.cut()

    def _let_in(self, line: m.RankLine) -> None:
        cause: str | None = None
        try:
            line.prove(self._places.token, dials=False)
            opened = line.receive()
        except (AuthenticationError, EOFError, OSError, msgspec.DecodeError) as error:
            opened, cause = None, repr(error)
        with self._changed:
            self._unproven.pop(line, None)
            if isinstance(opened, m.LineOpened) and opened not in self._lines:
                line.wait_for_ever()
                self._lines[opened] = line
                self._changed.notify_all()
                return
            self._strangers += 1
            if time.monotonic() - self._told_s > PROOF_S:
                self._told_s = time.monotonic()
                cause = cause or f"it says {opened}"
                log.warning("somebody dials who is none of the ranks", such=self._strangers, cause=cause)
        line.close()

    def _hear(self, node: int, line: m.RankLine) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                message = line.receive()
                with self._changed:
                    if isinstance(message, m.NodeGiven):
                        self._given[node] = message.permit
                        self._changed.notify_all()
                    elif isinstance(message, m.NodeTaken):
                        self._taken.add(node)
                        if not self._computing:
                            self._give_back(node)
        if not self._closed:
            self._lost(f"the ranks of the trainer's node {node + 1} are gone")

    def _give_back(self, node: int) -> None:
        self._taken.discard(node)
        self._given.pop(node, None)
        with contextlib.suppress(OSError):
            self._lines[m.LineOpened(node)].send(m.NodeLeft())
