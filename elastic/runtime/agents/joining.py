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
    """A call that has turns, by choice; `key` is its idempotency header's."""

    key: str
    turns: dict[int, TurnId] = field(default_factory=dict[int, TurnId])
    undelivered: set[TurnId] = field(default_factory=set[TurnId])


@dataclass(slots=True)
class Calls:
    """The last call of each route and body of a trajectory, and those that had an idempotency key."""

    last: dict[tuple[str, bytes], AskedCall] = field(default_factory=dict[tuple[str, bytes], AskedCall])
    keyed: dict[str, tuple[tuple[str, bytes], AskedCall]] = field(
        default_factory=dict[str, tuple[tuple[str, bytes], AskedCall]]
    )

    def joined(self, call: AgentCall) -> AskedCall | None:
        """The call that this one repeats, if it does. Raises `OtherBody`.

        One with another idempotency key is another call, whatever its body.
        """
        body = (call.route, call.digest)
        if call.key:
            known_body, keyed = self.keyed.get(call.key, (body, None))
            if known_body != body:
                raise OtherBody(call.key)
            if keyed is not None and keyed.turns:
                return keyed
        last = self.last.get(body)
        if last is None or not last.turns or (call.key and last.key):
            return None
        return last if call.retry or last.undelivered else None

    def asked(self, call: AgentCall, turn: TurnId, choice: int) -> None:
        """The call has asked for this turn; with a choice that it has had already, it is another call."""
        body = (call.route, call.digest)
        asked = self.keyed[call.key][1] if call.key in self.keyed else self.last.get(body)
        if asked is None or choice in asked.turns or (call.key and call.key != asked.key):
            asked = AskedCall(call.key)
        self.last[body] = asked
        if call.key:
            self.keyed[call.key] = body, asked
        asked.turns[choice] = turn
        asked.undelivered.add(turn)

    def delivered(self, call: AgentCall, turn: TurnId) -> None:
        for asked in self._of(call):
            asked.undelivered.discard(turn)

    def forget(self, call: AgentCall, turn: TurnId) -> None:
        """The turn came to nothing: the next such call is a new one."""
        for asked in self._of(call):
            if turn in asked.turns.values():
                asked.turns.clear()
                asked.undelivered.clear()

    def _of(self, call: AgentCall) -> list[AskedCall]:
        """Calls of the same body that a turn of it may be of."""
        last, keyed = self.last.get((call.route, call.digest)), self.keyed.get(call.key)
        return [one for one in (last, keyed and keyed[1]) if one is not None]
