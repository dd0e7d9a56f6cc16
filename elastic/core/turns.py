"""The lives of turns: queued, running under an attempt, moving, finished. Positions, never token ids."""

import heapq
from dataclasses import dataclass, field

from elastic.core.transitions import Story, take_transition
from elastic.core.types import Nanoseconds, TrajectoryId, TurnId, TurnState, WorkerId


@dataclass(slots=True)
class Turn:
    """One generation call of a trajectory. `attempt` is the fencing number: only its chunks count."""

    id: TurnId
    trajectory: TrajectoryId
    prompt_tokens: int
    max_new_tokens: int
    oldest_version: int
    order: int
    state: TurnState = TurnState.QUEUED
    attempt: int = 0
    accepted: int = 0
    worker: WorkerId | None = None
    affine_worker: WorkerId | None = None
    engine_errors: int = 0
    story: Story = field(default_factory=Story)

    @property
    def over(self) -> bool:
        return self.state in (TurnState.FINISHED, TurnState.CANCELLED, TurnState.FAILED)


class Turns:
    """Turns that are not over yet, and the queue of those that wait for a worker, oldest request first."""

    def __init__(self) -> None:
        self.live: dict[TurnId, Turn] = {}
        self._queue: list[tuple[int, TurnId]] = []
        self._requested = 0

    def request(
        self, turn: TurnId, trajectory: TrajectoryId, prompt_tokens: int, max_new_tokens: int, oldest_version: int
    ) -> Turn:
        record = Turn(turn, trajectory, prompt_tokens, max_new_tokens, oldest_version, order=self._requested)
        self._requested += 1
        self.live[turn] = record
        heapq.heappush(self._queue, (record.order, turn))
        return record

    def move(self, turn: Turn, state: TurnState, now_ns: Nanoseconds, cause: str) -> None:
        """Change a turn's state; raises `IllegalTransition` where the table forbids it."""
        take_transition(turn.id, turn.state, state, turn.story, now_ns, cause)
        turn.state = state
        if state is TurnState.QUEUED:
            turn.worker = None
            heapq.heappush(self._queue, (turn.order, turn.id))
        elif turn.over:
            turn.worker = None
            del self.live[turn.id]

    def head(self) -> Turn | None:
        """The queued turn that was requested first."""
        while self._queue:
            turn = self.live.get(self._queue[0][1])
            if turn is not None and turn.state is TurnState.QUEUED:
                return turn
            heapq.heappop(self._queue)
        return None
