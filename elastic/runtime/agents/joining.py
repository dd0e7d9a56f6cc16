"""Which calls of an agent are one: a call that is made again joins the turns that it had asked for.

Clients ask again when a connection breaks or an answer is late, and few of them say so. A call joins the last one of
the same trajectory, route and body if it is marked as a repetition, if both have one idempotency key, or if the
answer to that one was never delivered whole. An equal call after delivery is a new turn: samples of one prompt are
legitimate. Pure.
"""

from dataclasses import dataclass, field

from elastic.core.types import TurnId
from elastic.protocol.front_messages import AgentCall


class OtherBody(Exception):
    """The idempotency key belongs to a call with another body."""


@dataclass(slots=True)
class AskedCall:
    """A call that has turns: one for each choice, the first choice first."""

    key: str
    turns: list[TurnId] = field(default_factory=list[TurnId])
    undelivered: set[TurnId] = field(default_factory=set[TurnId])


@dataclass(slots=True)
class Calls:
    """The last call of each route and body of a trajectory."""

    last: dict[tuple[str, bytes], AskedCall] = field(default_factory=dict[tuple[str, bytes], AskedCall])
    bodies: dict[str, tuple[str, bytes]] = field(default_factory=dict[str, tuple[str, bytes]])
    """By idempotency key."""

    def joined(self, call: AgentCall) -> AskedCall | None:
        """The call that this one repeats, if it does. Raises `OtherBody`."""
        body = (call.route, call.digest)
        if call.key and self.bodies.setdefault(call.key, body) != body:
            raise OtherBody(call.key)
        last = self.last.get(body)
        if last is None or not last.turns:
            return None
        return last if call.retry or last.undelivered or (call.key and call.key == last.key) else None

    def asked(self, call: AgentCall, turn: TurnId, choice: int) -> None:
        """The call has asked for this turn; with choice 0 it is another call than the last one."""
        body = (call.route, call.digest)
        if choice == 0 or body not in self.last:
            self.last[body] = AskedCall(call.key)
        if call.key:
            self.bodies[call.key] = body
        self.last[body].turns.append(turn)
        self.last[body].undelivered.add(turn)

    def delivered(self, call: AgentCall, turn: TurnId) -> None:
        if (last := self.last.get((call.route, call.digest))) is not None:
            last.undelivered.discard(turn)

    def forget(self, call: AgentCall, turn: TurnId) -> None:
        """The turn came to nothing: the next such call is a new one."""
        body = (call.route, call.digest)
        if (last := self.last.get(body)) is not None and turn in last.turns:
            del self.last[body]
