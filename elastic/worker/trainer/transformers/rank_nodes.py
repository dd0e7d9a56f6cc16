"""A trainer's ranks on other nodes of its pool, as its first rank sees them.

Each of these nodes has a resident of the same job (`rank_node`), which starts its ranks. All of them dial the first
rank: a node for itself, and for each of its ranks twice. No rank uses a device unless every node has been given its
own under the same permit, and a node gives its own back once all ranks have parked.
"""

import contextlib
import socket
import threading
from collections.abc import Callable, Sequence
from multiprocessing import AuthenticationError
from typing import NoReturn

import msgspec
import structlog

from elastic.pool.messages import RankPlaces
from elastic.worker.trainer.transformers import rank_messages as m

log = structlog.get_logger(__name__)

PROOF_S = 10
"""For a dialler to prove that it belongs here."""


class OtherNodes:
    """The nodes of all ranks but the first one's. `lost` ends the process: one of them is gone."""

    def __init__(self, places: RankPlaces, lost: Callable[[str], NoReturn]) -> None:
        self._places, self._lost = places, lost
        self._listener = socket.socket(fileno=places.descriptor)
        self._changed = threading.Condition()
        self._lines: dict[m.LineOpened, m.RankLine] = {}
        self._given: dict[int, int] = {}
        """By node, the permit under which its devices were given."""
        self._taken: set[int] = set()
        """Nodes whose devices are to be given back."""
        self._computing = False
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
            self._lost = _not_missed
            for line in self._lines.values():
                line.cut()

    def _line(self, opened: m.LineOpened) -> m.RankLine:
        with self._changed:
            self._changed.wait_for(lambda: opened in self._lines)
            return self._lines[opened]

    def _accept(self) -> None:
        while True:
            dialled, _ = self._listener.accept()
            threading.Thread(target=self._let_in, args=(dialled,), name="a rank dials", daemon=True).start()

    def _let_in(self, dialled: socket.socket) -> None:
        line = m.RankLine.dialled(m.kept(dialled, PROOF_S))
        try:
            line.prove(self._places.token, dials=False)
            opened = line.receive()
        except (AuthenticationError, EOFError, OSError, msgspec.DecodeError) as error:
            log.warning("somebody dials who is none of the ranks", cause=repr(error))
            line.cut()
            return
        line.wait_for_ever()
        with self._changed:
            if isinstance(opened, m.LineOpened) and opened not in self._lines:
                self._lines[opened] = line
                self._changed.notify_all()

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
        self._lost(f"the ranks of the trainer's node {node + 1} are gone")

    def _give_back(self, node: int) -> None:
        self._taken.discard(node)
        self._given.pop(node, None)
        with contextlib.suppress(OSError):
            self._lines[m.LineOpened(node)].send(m.NodeLeft())


def _not_missed(why: str) -> NoReturn:
    """They were told to end."""
    raise SystemExit(why)
