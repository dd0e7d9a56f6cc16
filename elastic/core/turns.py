"""The lives of turns: queued, running under an attempt, moving, finished. Positions, never token ids."""

import heapq
from dataclasses import dataclass, field

from elastic.core.demand import Demand
from elastic.core.transitions import Story, take_transition
from elastic.core.types import Nanoseconds, TrajectoryId, TurnId, TurnState, WorkerId

OVER = (TurnState.FINISHED, TurnState.CANCELLED, TurnState.FAILED)


@dataclass(slots=True)
class Turn:
    """One generation call of a trajectory. `attempt` is the fencing number: only its chunks count.

    `affine_worker` has served the trajectory last, and holds `affine_tokens` of its context if it still has them.
    `demand` is what turns of its tag have cost so far. A turn that is balanced is on its way to `destination`, and
    was last moved with `moved_at` tokens accepted.
    """

    id: TurnId
    trajectory: TrajectoryId
    prompt_tokens: int
    max_new_tokens: int
    oldest_version: int
    order: int
    affine_worker: WorkerId | None = None
    affine_tokens: int = 0
    demand: Demand = field(default_factory=Demand)
    state: TurnState = TurnState.QUEUED
    attempt: int = 0
    accepted: int = 0
    prefilled: int = 0
    worker: WorkerId | None = None
    engine_errors: int = 0
    destination: WorkerId | None = None
    moved_at: int | None = None
    story: Story = field(default_factory=Story)

    @property
    def context_tokens(self) -> int:
        return self.prompt_tokens + self.accepted


@dataclass(slots=True)
class Conversation:
    """What is known of a trajectory while it lives: every turn it ever asked for, and who holds how much prefix."""

    turns: dict[TurnId, None] = field(default_factory=dict[TurnId, None])
    affine_worker: WorkerId | None = None
    affine_tokens: int = 0


class Turns:
    """Turns that are not over yet, and the queue of those that wait for a worker, oldest request first."""

    def __init__(self) -> None:
        self.live: dict[TurnId, Turn] = {}
        self.conversations: dict[TrajectoryId, Conversation] = {}
        self.demands: dict[str, Demand] = {}
        self._queue: list[tuple[int, TurnId]] = []
        self._requested = 0

    def request(
        self,
        turn: TurnId,
        trajectory: TrajectoryId,
        prompt_tokens: int,
        max_new_tokens: int,
        oldest_version: int,
        tag: str = "",
    ) -> Turn | None:
        """Queue a new turn; None for one that its trajectory has asked for before, whatever became of it."""
        conversation = self.conversations.setdefault(trajectory, Conversation())
        if turn in conversation.turns or turn in self.live:
            return None
        conversation.turns[turn] = None
        record = Turn(
            turn,
            trajectory,
            prompt_tokens,
            max_new_tokens,
            oldest_version,
            order=self._requested,
            affine_worker=conversation.affine_worker,
            affine_tokens=conversation.affine_tokens,
            demand=self.demands.setdefault(tag, Demand()),
        )
        self._requested += 1
        self.live[turn] = record
        heapq.heappush(self._queue, (record.order, turn))
        return record

    def served(self, turn: Turn, worker: WorkerId) -> None:
        """The worker has ended the turn: it holds the trajectory's prefix, and such turns are known better."""
        conversation = self.conversations[turn.trajectory]
        conversation.affine_worker = worker
        conversation.affine_tokens = turn.context_tokens
        turn.demand.note(turn.prefilled, turn.accepted)

    def live_of(self, trajectory: TrajectoryId) -> list[Turn]:
        conversation = self.conversations.get(trajectory)
        return [self.live[turn] for turn in conversation.turns if turn in self.live] if conversation else []

    def forget(self, trajectory: TrajectoryId) -> None:
        """The trajectory has ended and none of its turns is live."""
        self.conversations.pop(trajectory, None)

    def move(self, turn: Turn, state: TurnState, now_ns: Nanoseconds, cause: str) -> None:
        """Change a turn's state; raises `IllegalTransition` where the table forbids it."""
        at = f"token {turn.accepted} of attempt {turn.attempt}"
        take_transition(turn.id, turn.state, state, turn.story, now_ns, cause, at)
        turn.state = state
        if state is TurnState.QUEUED:
            turn.worker = None
            heapq.heappush(self._queue, (turn.order, turn.id))
        elif state in OVER:
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
