"""Turns and their states: queued, running under an attempt, moving, over. Token positions only, never token ids."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from elastic.core.demand import Demand
from elastic.core.transitions import Story, take_transition
from elastic.core.turn_queue import TurnQueue
from elastic.core.types import InfrastructureCause, Nanoseconds, TrajectoryId, TurnId, TurnState, WorkerId

OVER = (TurnState.FINISHED, TurnState.CANCELLED, TurnState.FAILED)


@dataclass(slots=True)
class Turn:
    """One generation call of a trajectory. `attempt` is the fencing number: only chunks of that attempt count.

    - `affine_worker` served the trajectory last, and probably still caches `affine_tokens` of its context.
    - `demand` summarises what finished turns of the same tag have cost.
    - `destination` is the worker that balancing moves the turn to; `moved_at` is how many tokens were accepted when
      it began again after the last such move.
    - `given_back` maps each worker that returned the turn to how often it did, and until when the turn may not go
      there.
    - `avoided` are the workers, in order, that are excluded while the turn is queued now.
    - Of the attempt: it was sent at `sent_ns` into `slot`, with `start` tokens accepted and versions from
      `sent_version` on allowed; it is over at `ends_ns`, however many tokens still come. While it runs its worker was
      last heard of it at `heard_ns`, and has until `due_ns` for the next token.
    - `version` is that of its last accepted token.
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
    computed: bool = False
    """Whether prefill was paid for, or may have been: the worker may have left without a report."""
    worker: WorkerId | None = None
    sent_ns: Nanoseconds = 0
    sent_version: int = 0
    slot: int = -1
    start: int = 0
    ends_ns: Nanoseconds = 0
    heard_ns: Nanoseconds = 0
    due_ns: Nanoseconds = 0
    version: int | None = None
    due_tokens: int = 0
    """Tokens that it was expected to decode when it was sent to its worker."""
    started_ns: Nanoseconds = 0
    """When the turn was sent to its worker, or was last reported as waiting there."""
    engine_errors: int = 0
    destination: WorkerId | None = None
    moved_at: int | None = None
    given_back: dict[WorkerId, tuple[int, Nanoseconds]] = field(default_factory=dict[WorkerId, tuple[int, Nanoseconds]])
    avoided: tuple[WorkerId, ...] = ()
    story: Story = field(default_factory=Story)

    @property
    def context_tokens(self) -> int:
        return self.prompt_tokens + self.accepted

    @property
    def expected_tokens(self) -> float:
        """Tokens still to decode: the mean of finished turns of its tag, or the upper limit before there is one."""
        expected = self.demand.decode_tokens if self.demand.turns else self.max_new_tokens
        return max(1.0, expected - self.accepted)

    def avoids(self, worker: WorkerId, now_ns: Nanoseconds) -> bool:
        """Whether the back-off after this worker returned the turn still runs."""
        return worker in self.given_back and self.given_back[worker][1] > now_ns


@dataclass(slots=True)
class TrajectoryState:
    """A running trajectory: every turn that it requested, and which worker caches how much of its prefix."""

    turns: dict[TurnId, None] = field(default_factory=dict[TurnId, None])
    affine_worker: WorkerId | None = None
    affine_tokens: int = 0
    oldest_token: int | None = None
    """The oldest weights version among its accepted tokens."""
    newest_token: int | None = None
    given_up: InfrastructureCause | None = None
    """Why a turn was given up since the last one that was finished, where one was."""

    def note_token(self, version: int) -> None:
        if self.oldest_token is None or version < self.oldest_token:
            self.oldest_token = version
        if self.newest_token is None or version > self.newest_token:
            self.newest_token = version


class Turns:
    """Turns that are not over, and the queue of those that wait for a worker."""

    def __init__(self) -> None:
        self.live: dict[TurnId, Turn] = {}
        self.moving: dict[TurnId, Turn] = {}
        """The live turns that are moving from one worker to another."""
        self.trajectories: dict[TrajectoryId, TrajectoryState] = {}
        self.demands: dict[str, Demand] = {}
        self.queue = TurnQueue()
        self._requested = 0
        self.finished = 0
        """How many turns have been finished, by all workers."""

    def request(
        self,
        turn: TurnId,
        trajectory: TrajectoryId,
        prompt_tokens: int,
        max_new_tokens: int,
        oldest_version: int,
        tag: str = "",
    ) -> Turn | None:
        """Queue a new turn; None if its trajectory has requested this turn before, whatever became of it."""
        state = self.trajectories.get(trajectory)
        if state is None:
            state = self.trajectories[trajectory] = TrajectoryState()
        if turn in state.turns or turn in self.live:
            return None
        state.turns[turn] = None
        demand = self.demands.get(tag)
        if demand is None:
            demand = self.demands[tag] = Demand()
        record = Turn(
            turn,
            trajectory,
            prompt_tokens,
            max_new_tokens,
            oldest_version,
            order=self._requested,
            affine_worker=state.affine_worker,
            affine_tokens=state.affine_tokens,
            demand=demand,
        )
        self._requested += 1
        self.live[turn] = record
        self._enqueue(record)
        return record

    def served(self, turn: Turn, worker: WorkerId) -> None:
        """The worker has finished the turn: it caches the trajectory's prefix, and `demand` has one more sample."""
        self.finished += 1
        state = self.trajectories[turn.trajectory]
        state.affine_worker = worker
        state.affine_tokens = turn.prompt_tokens + turn.accepted
        if turn.accepted:
            state.given_up = None
        turn.demand.note(turn.prefilled, turn.accepted)

    def note_given_back(self, turn: Turn, worker: WorkerId, until_ns: Nanoseconds) -> None:
        """The worker is not to have the turn before `until_ns`, and its prefix is not counted on any more."""
        times, _ = turn.given_back.get(worker, (0, 0))
        turn.given_back[worker] = times + 1, until_ns
        state = self.trajectories[turn.trajectory]
        for holder in (turn, state):
            if holder.affine_worker == worker:
                holder.affine_worker, holder.affine_tokens = None, 0

    def avoid(self, turn: Turn, workers: tuple[WorkerId, ...]) -> None:
        """Exclude exactly these workers from now on."""
        if turn.avoided != workers:
            turn.avoided = workers
            if turn.state is TurnState.QUEUED:
                self._enqueue(turn)

    def live_of(self, trajectory: TrajectoryId) -> list[Turn]:
        state = self.trajectories.get(trajectory)
        return [self.live[turn] for turn in state.turns if turn in self.live] if state else []

    def oldest_token(self, trajectory: TrajectoryId) -> int | None:
        """The oldest weights version among the accepted tokens of a trajectory that is not forgotten."""
        state = self.trajectories.get(trajectory)
        return state.oldest_token if state else None

    def newest_token(self, trajectory: TrajectoryId) -> int | None:
        """As `oldest_token`, of the newest."""
        state = self.trajectories.get(trajectory)
        return state.newest_token if state else None

    def given_up(self, trajectory: TrajectoryId) -> InfrastructureCause | None:
        """Why a turn of the trajectory was given up since the last one that was finished."""
        state = self.trajectories.get(trajectory)
        return state.given_up if state else None

    def forget(self, trajectory: TrajectoryId) -> None:
        """The trajectory has ended and none of its turns is live."""
        self.trajectories.pop(trajectory, None)

    def move(self, turn: Turn, state: TurnState, now_ns: Nanoseconds, cause: str) -> None:
        """Change a turn's state; raises `IllegalTransition` where the table forbids it."""
        at = f"token {turn.accepted} of attempt {turn.attempt}"
        former = turn.state
        take_transition(turn.id, former, state, turn.story, now_ns, cause, at)
        turn.state = state
        if former is TurnState.QUEUED:
            self.queue.remove(turn.id, turn.order)
        elif former is TurnState.MOVING:
            del self.moving[turn.id]
        if state is TurnState.QUEUED:
            turn.worker = None
            self._enqueue(turn)
        elif state is TurnState.MOVING:
            self.moving[turn.id] = turn
        elif state in OVER:
            turn.worker = None
            del self.live[turn.id]

    def _enqueue(self, turn: Turn) -> None:
        self.queue.add(turn.id, turn.order, (turn.oldest_version, turn.avoided))

    def require(self, oldest_version: int) -> None:
        """No turn may take tokens of versions before `oldest_version` any more."""
        for turn in self.live.values():
            if turn.oldest_version < oldest_version:
                turn.oldest_version = oldest_version
                if turn.state is TurnState.QUEUED:
                    self._enqueue(turn)

    def head(self) -> Turn | None:
        """The queued turn that was requested first."""
        head = self.queue.head()
        return None if head is None else self.live[head]

    def heads(self) -> Iterator[Turn]:
        """The turns that may go next, oldest request first: of those with the same needs the first. Until the queue
        changes."""
        return (self.live[turn] for _, _, turn in self.queue.heads)
