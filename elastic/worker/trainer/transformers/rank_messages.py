"""What passes between a trainer's first rank and its others, over pairs of connected sockets that only they have.

Those on other nodes of a pool dial the first one, and both prove that they know their common token (HMAC). What they
say is not encrypted.

The first says what to do, and the others do it, one order after the other: each is answered. What is published while
training goes on has a pair of its own.
"""

import contextlib
import os
import socket
import struct
import threading
from collections.abc import Collection, Sequence
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any, TypeAlias, dataclass_transform

import msgspec

from elastic.protocol.wire import TrainGroupFrame, TrajectoryData
from elastic.system.parking import Switch
from elastic.worker.publication import PublishingTerms, RelayPlace


@dataclass_transform(frozen_default=True, field_specifiers=(msgspec.field,))
class _RankMessage(msgspec.Struct, frozen=True, tag=True, array_like=True):
    pass


class BeRank(_RankMessage):
    """The first message: be this rank of `size`, and meet the others by the file that is open as `meeting`, or at that
    host and port. `config` is the run's; on another machine a rank has its own."""

    rank: int
    size: int
    device: str
    meeting: int | tuple[str, int]
    timeout_s: float
    config: dict[str, Any]


class TrainShare(_RankMessage):
    group: TrainGroupFrame


class SkipShare(_RankMessage):
    index: int
    tokens: int
    trajectories: Sequence[TrajectoryData]


class UpdateShare(_RankMessage):
    pass


class HoldShards(_RankMessage):
    """Keep a copy of what is published of the weights as they are."""

    in_host_memory: bool


class BePublisher(_RankMessage):
    """Publish on these terms from now on, as the other pair of sockets says."""

    terms: PublishingTerms


class SaveShards(_RankMessage):
    path: str


class LoadShards(_RankMessage):
    path: str


class ParkShards(_RankMessage):
    pass


class ResumeShards(_RankMessage):
    pass


RankOrder: TypeAlias = (
    TrainShare
    | SkipShare
    | UpdateShare
    | HoldShards
    | BePublisher
    | SaveShards
    | LoadShards
    | ParkShards
    | ResumeShards
)


class PublishShards(_RankMessage):
    """Publish what is held, under this version; those that are `pulled` stay on the relay."""

    version: int
    pulled: Collection[int]


class FollowRelay(_RankMessage):
    """The relay is there from now on. This is not answered, and heard also while something is published."""

    place: RelayPlace


class RankDone(_RankMessage):
    """The order was carried out; what it cost, where it is one that costs."""

    switch: Switch | None = None


class RankPublished(_RankMessage):
    """This rank's part of the version is on the relay; what that took."""

    encode_s: float
    put_s: float


class RankRefused(_RankMessage):
    """The order cannot be carried out, and nothing has changed: on no rank. Or a version cannot be published."""

    why: str


class LineOpened(_RankMessage):
    """First message on a line that was dialled: a rank's, for orders or publications, or its node's as `rank` -1."""

    node: int
    rank: int = -1
    publications: bool = False


class NodeGiven(_RankMessage):
    """The node's ranks may use their devices, under this permit."""

    permit: int


class NodeTaken(_RankMessage):
    """The node's devices are taken back: answered by `NodeLeft`, once no rank uses its own."""


class NodeLeft(_RankMessage):
    pass


FromDialler: TypeAlias = LineOpened | NodeGiven | NodeTaken
ToRank: TypeAlias = BeRank | RankOrder | PublishShards | FollowRelay
FromRank: TypeAlias = RankDone | RankPublished | RankRefused

_encoder = msgspec.msgpack.Encoder()
_to_rank = msgspec.msgpack.Decoder(ToRank)
_from_rank = msgspec.msgpack.Decoder(FromRank)
_from_dialler = msgspec.msgpack.Decoder(FromDialler)
_to_node = msgspec.msgpack.Decoder(NodeLeft)


DEATH_SHOWS_S = 1.0
"""After what it breaks, at most: a process's sockets are closed before it counts as dead."""
GONE_S = 20
"""After so much silence a machine that does not answer is gone."""


def kept(connection: socket.socket, receives_s: int = 0) -> int:
    """Return the descriptor of a connection between machines, whose end is seen also if one of them vanishes. What it
    receives may take `receives_s`; 0 for as long as it will."""
    connection.settimeout(None)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", receives_s, 0))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_NODELAY, 1),
        (socket.TCP_KEEPIDLE, GONE_S // 4),
        (socket.TCP_KEEPINTVL, GONE_S // 4),
        (socket.TCP_KEEPCNT, 3),
        (socket.TCP_USER_TIMEOUT, 1000 * GONE_S),
    ):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
    return connection.detach()


class RankLine:
    """One end of the connection. One thread receives; both ways raise `OSError` or `EOFError` at its end."""

    def __init__(self, descriptor: int, decoder: msgspec.msgpack.Decoder[Any]) -> None:
        self._connection = Connection(descriptor)
        self._decoder = decoder
        self._sending = threading.Lock()

    @classmethod
    def of_first(cls, descriptor: int) -> "RankLine":
        return cls(descriptor, _from_rank)

    @classmethod
    def of_rank(cls, descriptor: int) -> "RankLine":
        return cls(descriptor, _to_rank)

    @classmethod
    def dialled(cls, descriptor: int) -> "RankLine":
        """What the first rank has of a line until it knows whose it is, and of a node's."""
        return cls(descriptor, _from_dialler)

    @classmethod
    def of_node(cls, descriptor: int) -> "RankLine":
        return cls(descriptor, _to_node)

    def prove(self, token: str, *, dials: bool) -> None:
        """Have both ends prove that they know the token. Raises also `AuthenticationError`."""
        for step in (answer_challenge, deliver_challenge)[:: 1 if dials else -1]:
            step(self._connection, token.encode())

    def wait_for_ever(self) -> None:
        """Let what is received take as long as it will."""
        with self._socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 0))

    def cut(self) -> None:
        """End it at both ends."""
        with contextlib.suppress(OSError), self._socket() as connection:
            connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._connection.close()

    def _socket(self) -> socket.socket:
        return socket.socket(fileno=os.dup(self.fileno()))

    def detach(self) -> int:
        """Return a descriptor of its own for what this was."""
        descriptor = os.dup(self.fileno())
        self._connection.close()
        return descriptor

    def fileno(self) -> int:
        return self._connection.fileno()

    def send(self, message: ToRank | FromRank | FromDialler | NodeLeft) -> None:
        with self._sending:
            self._connection.send_bytes(_encoder.encode(message))

    def receive(self) -> Any:
        return self._decoder.decode(self._connection.recv_bytes())
