"""A checker that walks a scheduler's whole state (docs/design.md). It runs after every event in tests and worlds.

What only the history can show (that a position was accepted once, that nothing of an ended lease was) is checked
by the simulated world, which keeps its own record.
"""

from collections.abc import Set

from elastic.core.fleet import Worker
from elastic.core.ids import group_of, is_evaluated
from elastic.core.leases import Lease
from elastic.core.ledger import DeviceBook
from elastic.core.reward_manager import Scoring
from elastic.core.run_state import Phase
from elastic.core.scheduler import Scheduler
from elastic.core.steps import CUT_OFF, Group
from elastic.core.timers import Wait
from elastic.core.trainer_device import TrainerMode
from elastic.core.trainer_permit import HAD, PermitState
from elastic.core.transitions import Story
from elastic.core.turn_manager import QUEUE_WAITS
from elastic.core.turns import Turn
from elastic.core.types import (
    GroupState,
    LeaseState,
    ScoringState,
    StalenessDrop,
    TrajectoryId,
    TurnState,
    WorkerRole,
    WorkerState,
)

NUMBERS = {
    1: "accepted tokens form one gapless sequence",
    3: "a trajectory is trained at most once",
    4: "staleness within the bound",
    5: "no work without a live lease",
    6: "accounts sum to the duration",
    7: "no orphans",
    9: "progress",
    11: "an infrastructure failure is never scored",
    12: "nothing waits without a bound and a name",
    16: "caps and budgets hold",
    17: "a shared device is had by permit",
}
"""the invariants of docs/design.md that the state alone can show."""

_HOLDING = (TurnState.RUNNING, TurnState.MOVING)
_WORKER_WAITS = frozenset({"boot", "load", "reload", "heartbeat", "stall", "resume", "drain", "rest", "departure"})
_LEASE_WAITS = frozenset({"grant", "slice", "release", "expiry", "early replacement"})
_TURN_WAITS = frozenset({"handover", "retry"})
_NONE = frozenset[str]()
_WAITS_OF_A_PHASE = {
    "start": Phase.STARTING,
    "stop": Phase.STOPPING,
    "balance": Phase.RUNNING,
    "seeding": Phase.RUNNING,
    "waking": Phase.RUNNING,
    "training": Phase.RUNNING,
    "replacement": Phase.RUNNING,
    "evaluation": Phase.RUNNING,
}
_SCORING_WAITS = {ScoringState.RUNNING: {"score"}, ScoringState.BACKING_OFF: {"score again"}}


class InvariantViolated(AssertionError):
    """The state is one that must not be. Names the invariant by its number in docs/design.md, and the thing's story."""

    def __init__(self, number: int, thing: str, found: str, story: Story | None = None) -> None:
        self.number, self.thing, self.found = number, thing, found
        told = f"\n{story}" if story is not None else ""
        super().__init__(f"invariant {number} ({NUMBERS[number]}): {thing}: {found}{told}")


def check(scheduler: Scheduler) -> None:
    """Raises `InvariantViolated` on the first thing that is not as it must be."""
    if scheduler.phase is Phase.ENDED:
        _check_ended(scheduler)
        return
    all_waits = scheduler.timers.waits()
    waits = _by_key(all_waits)
    for turn in scheduler.turns.live.values():
        _check_turn(scheduler, turn)
    for worker in scheduler.fleet.workers.values():
        _check_worker(scheduler, worker, waits.get(worker.id, _NONE))
    for lease in scheduler.leases.leases.values():
        _check_lease(scheduler, lease, waits.get(lease.id, _NONE))
    for scoring in scheduler.scorings.values():
        _check_scoring(scheduler, scoring)
    _check_scorings(scheduler)
    _check_index(scheduler)
    _check_ledger(scheduler)
    _check_controls(scheduler)
    _check_queue(scheduler)
    _check_lull(scheduler)
    _check_step(scheduler)
    _check_evaluation(scheduler)
    _check_trainer(scheduler)
    _check_waits(scheduler, all_waits)


def _by_key(waits: list[Wait]) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for wait in waits:
        found.setdefault(wait.key, set()).add(wait.what)
    return found


def _check_turn(s: Scheduler, turn: Turn) -> None:
    def wrong(number: int, found: str) -> InvariantViolated:
        return InvariantViolated(number, f"turn {turn.id}", found, turn.story)

    total = max(1, turn.max_new_tokens)
    if not 0 <= turn.accepted < total:
        raise wrong(1, f"{turn.accepted} of {turn.max_new_tokens} tokens")
    newest = 0 if s.version is None and s.serving is not None else s.version
    admits = newest is not None and s.oldest_version <= turn.oldest_version <= newest
    if not admits:
        raise wrong(4, f"admits versions from {turn.oldest_version} on, the bound is {s.oldest_version}")
    state = s.turns.trajectories.get(turn.trajectory)
    if not (state is not None and turn.id in state.turns):
        raise wrong(12, "its trajectory does not know it")
    outcome = _outcome(s, turn.trajectory)
    if outcome is not None:
        raise wrong(12, f"its trajectory has ended: {outcome}")
    if turn.state not in _HOLDING:
        if not (turn.state is TurnState.QUEUED and turn.worker is None):
            raise wrong(1, f"{turn.state} on {turn.worker}")
        named = s.timers.waiting("retry", turn.id) is bool(turn.avoided)
        if not named:
            raise wrong(12, f"keeps from {turn.avoided}, and its back-off is not named so")
        unknown = [worker for worker in turn.avoided if worker not in turn.given_back]
        if unknown:
            raise wrong(9, f"keeps from {unknown}, who never gave it back")
        return
    if s.timers.waiting("retry", turn.id):
        raise wrong(12, f"{turn.state}, and still waits to be tried again")
    worker = s.fleet.workers.get(turn.worker or "")
    has_it = worker is not None and turn.id in worker.turns
    if not has_it:
        raise wrong(5, f"{turn.state} on {turn.worker}, which has it not")
    assert worker is not None
    if worker.slots.get(turn.slot) != turn.id:
        raise wrong(1, f"is not in slot {turn.slot} of {worker.slots}")
    if turn.state is TurnState.RUNNING:
        watched_ns = s.timers.until_ns("token", worker.id)
        watched = watched_ns is not None and watched_ns <= turn.due_ns
        if not watched:
            raise wrong(12, f"{turn.state} until {turn.due_ns}, its worker is watched until {watched_ns}")
    else:
        if not s.timers.waiting("handover", turn.id):
            raise wrong(12, f"{turn.state} without a handover deadline")


def _outcome(s: Scheduler, trajectory: TrajectoryId) -> float | str | None:
    """What a trajectory has come to, which is trained on, evaluated or a request; None before its end."""
    if s.serving is not None:
        return None if trajectory in s.turns.trajectories else "forgotten"
    if is_evaluated(trajectory):
        task = None if s.evaluation is None else s.evaluation.tasks.get(group_of(trajectory))
        return "unknown" if task is None else task.members[trajectory]
    group = s.step.group_of(trajectory) if s.step else None
    return group.members[trajectory] if group else "unknown"


def _check_worker(s: Scheduler, worker: Worker, waits: Set[str]) -> None:
    def wrong(number: int, found: str) -> InvariantViolated:
        return InvariantViolated(number, f"worker {worker.id} ({worker.state})", found, worker.story)

    lease = s.leases.leases.get(worker.lease)
    leased = lease is not None and lease.live and worker.id in lease.workers
    if not leased:
        raise wrong(5, f"lease {worker.lease} is not live")
    assert lease is not None
    for turn_id in worker.turns:
        turn = s.turns.live.get(turn_id)
        held = turn is not None and turn.worker == worker.id and turn.state in _HOLDING
        if not held:
            raise wrong(1, f"holds turn {turn_id}, which is not on it")
        moved = held and turn is not None and turn.state is TurnState.MOVING
        if worker.state is not WorkerState.READY and not moved:
            raise wrong(5, f"works on {turn_id}")
    may_hold = worker.state in (WorkerState.READY, WorkerState.ASLEEP, WorkerState.DRAINING)
    if not may_hold and worker.turns:
        raise wrong(5, f"holds {list(worker.turns)}")
    pending = list(worker.turns.values()).count(False)
    if worker.pending != pending:
        raise wrong(9, f"{worker.pending} pending")
    due_tokens = sum(s.turns.live[turn].due_tokens for turn in worker.turns)
    if worker.due_tokens != due_tokens:
        raise wrong(9, f"{worker.due_tokens} tokens due")
    known = worker.version is None or s.version is None or worker.version <= s.version
    if not known and worker.state not in (WorkerState.DRAINING, WorkerState.GONE):
        raise wrong(4, "has weights newer than the run's")
    gone = worker.state in (WorkerState.DRAINING, WorkerState.GONE)
    if not gone and worker.leaves_ns is None and lease.leaving:
        raise wrong(5, "its lease is leaving")
    loading = worker.state is WorkerState.LOADING
    if worker.version is not None and loading:
        raise wrong(9, f"serves version {worker.version}, and is still loading")
    lost = worker.state is WorkerState.GONE
    if not lost and worker.resting is not ("rest" in waits):
        raise wrong(12, f"rests: {worker.resting}, without a deadline")
    if worker.resting and not worker.declines + worker.strikes > 0:
        raise wrong(9, "rests, and has declined nothing")
    if (worker.id in s.fleet.struck) is not (worker.strikes > 0):
        raise wrong(9, f"{worker.strikes} strikes, not indexed")
    waited, expected = (waits & _WORKER_WAITS) - ({"rest"} if not lost else set()), _worker_waits(s, worker)
    if worker.leaves_ns is not None and not gone:
        expected |= {"departure"}
    if not expected <= waited:
        raise wrong(12, f"waits for {sorted(waited)}, must for {sorted(expected)}")
    spare = waited - expected - ({"stall"} if worker.state in (WorkerState.READY, WorkerState.ASLEEP) else set())
    spare -= {"stall", "heartbeat"} if worker.state in (WorkerState.DRAINING, WorkerState.LOADING) else set()
    if spare:
        raise wrong(12, f"still waits for {sorted(spare)}")


def _worker_waits(s: Scheduler, worker: Worker) -> set[str]:
    """Return what a worker in its state must be waiting for."""
    match worker.state:
        case WorkerState.BOOTING:
            return {"boot"}
        case WorkerState.DETACHED:
            return {"resume"}
        case WorkerState.DRAINING:
            return {"drain"}
        case WorkerState.GONE:
            return set()
        case _:
            behind = worker.version != s.version and worker.role is not WorkerRole.TRAINER and s.version is not None
            loading = {"load" if worker.loading_version is not None else "reload"} if behind else set[str]()
            return {"heartbeat"} | loading


def _check_lease(s: Scheduler, lease: Lease, waits: Set[str]) -> None:
    def wrong(number: int, found: str) -> InvariantViolated:
        return InvariantViolated(number, f"lease {lease.id} ({lease.state})", found, lease.story)

    waiting, workers = waits & _LEASE_WAITS, s.fleet.of_lease(lease.id)
    if {w.id for w in workers} != set(lease.workers):
        raise wrong(7, f"workers {lease.workers}, found {len(workers)}")
    match lease.state:
        case LeaseState.REQUESTED:
            awaited = "slice" if lease.id in s.leases.slices else "grant"
            if waiting != {awaited}:
                raise wrong(12, f"waits for {sorted(waiting)}, must for {awaited}")
        case LeaseState.RELEASING:
            if waiting != {"release"}:
                raise wrong(12, f"waits for {sorted(waiting)}")
            if not lease.leaving:
                raise wrong(7, "is released, but its workers may stay")
        case _:
            if not any(w.state is not WorkerState.GONE for w in workers):
                raise wrong(7, "is held although nobody is left on it")
            expiry = {"expiry"} if lease.expires_at_ns is not None else set[str]()
            planned = {"early replacement"} if expiry and not lease.leaving else set[str]()
            if waiting - planned != expiry:
                raise wrong(12, f"waits for {sorted(waiting)}")
            ended = lease.expires_at_ns is not None and lease.expires_at_ns <= s.now_ns
            if ended:
                raise wrong(5, f"is believed past its end at {lease.expires_at_ns}")


def _check_scoring(s: Scheduler, scoring: Scoring) -> None:
    name = f"reward of {scoring.trajectory} ({scoring.state})"
    outcome = _outcome(s, scoring.trajectory)
    if outcome is not None:
        raise InvariantViolated(11, name, f"its trajectory has ended: {outcome}", scoring.story)
    waited = {w for waits in _SCORING_WAITS.values() for w in waits if s.timers.waiting(w, scoring.trajectory)}
    expected = _SCORING_WAITS.get(scoring.state, set[str]())
    if waited != expected:
        raise InvariantViolated(12, name, f"waits for {sorted(waited)}, must for {sorted(expected)}", scoring.story)
    if scoring.attempt > s.limits.score_attempts_max:
        raise InvariantViolated(12, name, f"is at attempt {scoring.attempt}", scoring.story)


def _check_scorings(s: Scheduler) -> None:
    states = [scoring.state for scoring in s.scorings.values()]
    running, room = states.count(ScoringState.RUNNING), s.limits.scorings_max
    if running > room or (ScoringState.QUEUED in states and running < room):
        raise InvariantViolated(9, "rewards", f"{running} of {room} attempts run, {states} in all")


def _check_index(s: Scheduler) -> None:
    stale = s.fleet.stale_index()
    if stale:
        raise InvariantViolated(9, "the fleet's index", stale)
    moving = {turn.id for turn in s.turns.live.values() if turn.state is TurnState.MOVING}
    if moving != s.turns.moving.keys():
        raise InvariantViolated(9, "the turns' index", f"{list(s.turns.moving)} are said to move, {moving} do")
    for provider in s.leases.offers:
        leases = [lease for lease in s.leases.leases.values() if lease.provider == provider]
        asked = sum(lease.state is LeaseState.REQUESTED for lease in leases)
        counted = (s.leases.held(provider), s.leases.asked(provider))
        if counted != (len(leases), asked):
            raise InvariantViolated(7, f"provider {provider}", f"counts {counted} leases, has {(len(leases), asked)}")


def _check_ledger(s: Scheduler) -> None:
    for book in s.ledger.books.values():
        _check_book(book, s.now_ns)
        live = book.worker in s.fleet.workers
        if live is not (book.closed_ns is None):
            raise InvariantViolated(6, f"book of {book.worker}", f"closed at {book.closed_ns}, lease live: {live}")
    for worker in s.fleet.workers.values():
        if worker.id not in s.ledger.books:
            raise InvariantViolated(6, f"worker {worker.id}", "has no book", worker.story)


def _check_book(book: DeviceBook, now_ns: int) -> None:
    total_ns = sum(book.accounts_ns.values())
    if total_ns != book.cursor_ns - book.opened_ns or min(book.accounts_ns.values(), default=0) < 0:
        raise InvariantViolated(6, f"book of {book.worker}", f"{book.accounts_ns} up to {book.cursor_ns}")
    if book.closed_ns is not None and book.cursor_ns != book.closed_ns:
        raise InvariantViolated(6, f"book of {book.worker}", f"closed at {book.closed_ns}, kept to {book.cursor_ns}")
    if book.cursor_ns > now_ns:
        raise InvariantViolated(6, f"book of {book.worker}", f"kept to {book.cursor_ns}, which is to come")


def _check_controls(s: Scheduler) -> None:
    """Caps hold, but for what is on its way back, and a budget's end is waited for."""
    for provider, cap in s.controls.caps.items():
        kept = [x for x in s.leases.leases.values() if x.provider == provider and not x.goes]
        gpus = sum(lease.offer.gpus_per_worker * lease.offer.workers_per_lease for lease in kept)
        if gpus > cap and s.phase in (Phase.STARTING, Phase.RUNNING):
            raise InvariantViolated(16, f"provider {provider}", f"{gpus} GPUs are held, the cap is {cap}")


def _check_queue(s: Scheduler) -> None:
    queued = [turn for turn in s.turns.live.values() if turn.state is TurnState.QUEUED]
    head = s.turns.head()
    if (head is not None) is not bool(queued) or (head and head.order != min(turn.order for turn in queued)):
        raise InvariantViolated(9, "the queue", f"its head is {head and head.id}, queued are {[t.id for t in queued]}")
    if head is None or s.phase is not Phase.RUNNING:
        return
    if s.serving is not None and s.serving.held:
        return
    if s.timers.waiting("dispatch", "queue"):
        return
    for turn in s.turns.heads():
        others = (w for w in s.fleet.workers.values() if w.id not in turn.avoided)
        room = next((w for w in others if s.fleet.with_room(w.id, turn.oldest_version)), None)
        if room is not None:
            raise InvariantViolated(9, f"turn {turn.id}", f"queued although {room.id} has room", turn.story)
    if not s.timers.waiting("place", "queue"):
        raise InvariantViolated(12, f"turn {head.id}", "queued without a deadline", head.story)


def _check_lull(s: Scheduler) -> None:
    """Without rollouts no lease is requested, and no request is open; neither of a provider that is stopped."""
    table = s.leases
    if table.paused and table.lull_since_ns is None:
        raise InvariantViolated(9, "leases", f"nothing is asked of {list(table.paused)}, and rollouts are to do")
    for lease in table.leases.values():
        if lease.provider in table.paused and not lease.goes:
            raise InvariantViolated(7, f"lease {lease.id} ({lease.state})", "is kept without rollouts", lease.story)
        if lease.provider in table.stopped and lease.state is LeaseState.REQUESTED and not lease.goes:
            raise InvariantViolated(15, f"lease {lease.id}", "is asked for of a provider that is stopped", lease.story)
    asked = {lease.id for lease in table.leases.values() if lease.state is LeaseState.REQUESTED}
    if not table.slices.keys() <= asked:
        raise InvariantViolated(
            12, "leases", f"{list(table.slices)} are said to wait for a turn, {asked} are asked for"
        )
    if table.lull_since_ns is not None and s.turns.live and s.phase is Phase.RUNNING:
        raise InvariantViolated(9, "leases", f"are given back although {list(s.turns.live)} are to do")


def _check_step(s: Scheduler) -> None:
    if s.step is None:
        return
    training = [group.id for group in s.step.in_state(GroupState.TRAINING)]
    if s.phase is Phase.RUNNING and training != ([s.training] if s.training else []):
        raise InvariantViolated(3, f"step {s.step.number}", f"{training} are training, the trainer is at {s.training}")
    for group in s.step.groups.values():
        _check_group(s, group)
        _check_staleness(s, group, s.step.version)
    slots = [group.slot for group in s.step.groups.values() if group.slot is not None]
    if sorted([*slots, *s.step.free_slots]) != list(range(s.plan.groups)):
        raise InvariantViolated(3, f"step {s.step.number}", f"slots {slots} filled, {s.step.free_slots} free")
    unended = sum(len(g.unfinished) for g in s.step.groups.values() if g.state is not GroupState.DROPPED)
    if s.step.unended != unended:
        raise InvariantViolated(9, f"step {s.step.number}", f"counts {s.step.unended} unended, has {unended}")


def _check_evaluation(s: Scheduler) -> None:
    """An evaluation is of the run's version, has an end, and is no part of a step."""
    evaluation = s.evaluation
    if (evaluation is not None) is not s.timers.waiting("evaluation", "run"):
        raise InvariantViolated(12, "the evaluation", f"has no deadline, or a deadline without one: {evaluation}")
    if evaluation is None:
        return
    name = f"the evaluation of version {evaluation.version}"
    if evaluation.version != s.version:
        raise InvariantViolated(4, name, f"goes on at version {s.version}")
    assert s.plan.evaluation
    ended = sum(outcome is not None for task in evaluation.tasks.values() for outcome in task.members.values())
    unended = s.plan.evaluation.episodes - ended
    if evaluation.unended != unended or not unended:
        raise InvariantViolated(9, name, f"counts {evaluation.unended} unended episodes, has {unended}")
    scored = [one for task in evaluation.tasks.values() for one in task.members.values() if isinstance(one, float)]
    if not all(reward - reward == 0 for reward in scored):
        raise InvariantViolated(11, name, f"has rewards {scored}")
    trained = [t for group in (s.step.groups.values() if s.step else ()) for t in group.members if is_evaluated(t)]
    if trained:
        raise InvariantViolated(3, name, f"{trained} are members of groups")
    launched = s.step.launched if s.step is not None and evaluation.next_step is not None else 0
    if launched:
        raise InvariantViolated(9, name, f"{launched} groups are launched meanwhile, and the next step waits for it")


def _check_group(s: Scheduler, group: Group) -> None:
    def wrong(number: int, found: str) -> InvariantViolated:
        return InvariantViolated(number, f"group {group.id} ({group.state})", found, group.story)

    unfinished = None in group.members.values()
    runs = (group.state is GroupState.RUNNING) is unfinished or group.state is GroupState.DROPPED
    if not runs:
        raise wrong(3, f"unfinished: {group.unfinished}")
    if (group.state is GroupState.DROPPED) is not bool(group.drop_reason):
        raise wrong(3, f"reason {group.drop_reason!r}")
    scored = all(reward - reward == 0 for reward in group.members.values() if isinstance(reward, float))
    if not scored:
        raise wrong(11, f"rewards {group.finished}")
    size = len(group.members) - len(group.refills)
    begun = max((one.members for one in s.plan.environments if one.name == group.environment), default=0)
    begun = begun if group.wanted else s.plan.group_size
    if size != begun:
        raise wrong(3, f"is of {size} members, but for those in the place of others")
    taken = len(group.finished)
    if group.wanted and not taken <= group.wanted:
        raise wrong(3, f"takes {taken} members, {group.wanted} are wanted")
    cut_off = CUT_OFF in group.members.values()
    if cut_off and taken != group.wanted:
        raise wrong(3, f"cuts members off, and takes {taken}")
    replaced = [refill.replaces for refill in group.refills.values()]
    if len(set(replaced)) != len(replaced):
        raise wrong(3, f"one member is replaced twice: {replaced}")
    failed = all(isinstance(group.members[trajectory], str) for trajectory in replaced)
    if not failed:
        raise wrong(11, f"of {group.members} are replaced {replaced}")
    often = max(map(group.times_refilled, group.refills), default=0)
    if not often <= s.plan.refill_most:
        raise wrong(12, f"a place was refilled {often} times")


def _check_staleness(s: Scheduler, group: Group, trained_at: int) -> None:
    """Everything that is or may be trained on is within the staleness bound. Everything else was dropped."""
    if group.state is GroupState.DROPPED:
        return
    if s.plan.staleness_drop is StalenessDrop.TOKEN:
        if not group.unfinished and group.overtaken(trained_at - s.plan.staleness_bound):
            found = f"has no token within the bound, is trained on at {trained_at} at the earliest"
            raise InvariantViolated(4, f"group {group.id} ({group.state})", found, group.story)
        return
    tokens = [group.oldest_token, *(s.turns.oldest_token(trajectory) for trajectory in group.unfinished)]
    oldest = min((version for version in tokens if version is not None), default=trained_at)
    if trained_at - oldest > s.plan.staleness_bound:
        found = f"has tokens of version {oldest}, is trained on at {trained_at} at the earliest"
        raise InvariantViolated(4, f"group {group.id} ({group.state})", found, group.story)


def _check_trainer(s: Scheduler) -> None:
    if s.phase is not Phase.RUNNING:
        return
    mode, trainer = s.trainer_mode, s.trainer()

    def wrong(number: int, found: str) -> InvariantViolated:
        return InvariantViolated(number, "the trainer's device", found, trainer.story if trainer is not None else None)

    coming = trainer is not None and trainer.state in (WorkerState.BOOTING, WorkerState.DETACHED)
    replaced = s.timers.waiting("replacement", "trainer")
    lacking = mode is TrainerMode.ABSENT and not coming
    if replaced is not lacking:
        raise wrong(12, f"{mode}, is to be replaced: {replaced}")
    changing = mode in (TrainerMode.RESTING, TrainerMode.WAKING)
    if changing is not s.timers.waiting("waking", "trainer"):
        raise wrong(12, f"{mode}, deadline: {not changing}")
    ordered, updating = s.trainer_order is not None, s.step is not None and s.step.updating
    due = s.training is not None or updating
    if ordered is not due:
        raise wrong(3, f"is to train or update: {due}, was told {s.trainer_order}")
    generates = mode in (TrainerMode.AWAKE, TrainerMode.WAKING)
    if ordered and generates:
        raise wrong(3, f"{mode} while it trains {s.training}")
    bounded = s.timers.waiting("training", "trainer")
    awaits = s.permit.needed and s.timers.waiting("permit", "trainer")
    working = ordered and mode is TrainerMode.ASLEEP and not (awaits and not bounded)
    if working is not bounded:
        raise wrong(12, f"trains: {working}, until a deadline: {bounded}")
    _check_permit(s, trainer, computes=bounded or generates)
    if mode is not TrainerMode.ASLEEP or trainer is None:
        return
    if trainer.turns:
        raise wrong(9, f"asleep with {list(trainer.turns)}")
    head = s.turns.head()
    alone = s.plan.staleness_bound > 0 or (head is not None and not s.fleet.helped(head.oldest_version))
    needed = head is not None and s.serving is None and alone
    waits = working or awaits or s.timers.waiting("reseed", "queue") or bool(s.leases.slices)
    if not waits and needed:
        raise wrong(9, "sleeps while nobody else can go on")


def _check_permit(s: Scheduler, trainer: Worker | None, *, computes: bool) -> None:
    """On a device that others share, nothing is computed but by permit, and both it and the wait for it have an end."""
    state, story = s.permit.state, trainer.story if trainer is not None else None
    asked, had = s.timers.waiting("permit", "trainer"), s.timers.waiting("permit over", "trainer")
    if (asked, had) != (state is PermitState.ASKED, state in HAD):
        raise InvariantViolated(12, "the trainer's permit", f"is {state}; awaited: {asked}, ends: {had}", story)
    if s.permit.needed and computes and state not in HAD:
        raise InvariantViolated(17, "the trainer's device", f"computes while its permit is {state}", story)
    if not s.permit.needed and state is not PermitState.NONE:
        raise InvariantViolated(17, "the trainer's permit", f"is {state}, and none is needed", story)


def _check_waits(s: Scheduler, waits: list[Wait]) -> None:
    """Every wait is about something that is there, and none is overdue."""
    for wait in waits:
        if not _known(s, wait.what, wait.key):
            raise InvariantViolated(12, f"wait {wait.what} of {wait.key}", "is left behind")
        if wait.until_ns < s.now_ns:
            raise InvariantViolated(12, f"wait {wait.what} of {wait.key}", f"was due at {wait.until_ns}")
    if not waits:
        raise InvariantViolated(12, "the run", "waits for nothing")


def _known(s: Scheduler, what: str, key: str) -> bool:
    if what in _WORKER_WAITS:
        return key in s.fleet.workers
    if what == "token":
        return key in s.fleet.workers and bool(s.fleet.workers[key].turns)
    if what in _LEASE_WAITS:
        return key in s.leases.leases
    if what in _TURN_WAITS:
        return key in s.turns.live
    if what in ("score", "score again"):
        return key in s.scorings
    if what in (*QUEUE_WAITS, "reseed"):
        return s.turns.head() is not None
    if what == "back-off":
        return key in s.leases.offers
    if what == "lull":
        return key in s.leases.paused
    if what in ("permit", "permit over"):
        return s.permit.state in (HAD if what == "permit over" else (PermitState.ASKED,))
    if what == "idle":
        quiet = s.serving is not None and s.serving.quiet_since_ns is not None
        return quiet and s.phase in (Phase.STARTING, Phase.RUNNING)
    if what in ("provision", "budget"):
        return s.phase in (Phase.STARTING, Phase.RUNNING)
    return s.phase is _WAITS_OF_A_PHASE[what]


def _check_ended(s: Scheduler) -> None:
    left = list(s.leases.leases)
    if left and not s.failed:
        raise InvariantViolated(7, "the run", f"ended in peace, but holds {left}")
    if s.turns.live or s.timers.waits():
        raise InvariantViolated(12, "the run", f"ended, but {list(s.turns.live)} and {s.timers.waits()} are left")
    for book in s.ledger.books.values():
        _check_book(book, s.now_ns)
    if not left and s.ledger.imbalance_ns():
        raise InvariantViolated(6, "the ledger", f"is out by {s.ledger.imbalance_ns()} ns")
