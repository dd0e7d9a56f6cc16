"""Turns: to whom each goes, which of its tokens count, and how it comes back from a worker that cannot go on.

Source: docs/design.md, "A turn"; RLBoost §4.2 for collection by token and the continuation from accepted tokens.
"""

from collections.abc import Callable, Mapping
from itertools import islice

from elastic.core import commands as c
from elastic.core import events as e
from elastic.core.affinity import CACHED_SHARE, has_too_much
from elastic.core.fleet import STRUCK_OUT, RemainingFleet, Worker
from elastic.core.leaving import Leaving
from elastic.core.patience import MARGIN
from elastic.core.run_state import Changed, Handlers, RunState
from elastic.core.turns import Turn
from elastic.core.types import (
    NO_EXTRAS,
    NS_PER_S,
    TURN_ENDS,
    Chunk,
    FinishReason,
    InfrastructureCause,
    Nanoseconds,
    PolicyFault,
    TrajectoryId,
    TurnId,
    TurnState,
    WorkerId,
    WorkerRole,
)

QUEUE_WAITS = ("capacity", "place", "dispatch")
"""Waits of the queue: for a worker that could ever take a turn (capacity), for room on one (place), and for the next
pass, which the next event makes (dispatch)."""
SENT_AT_ONCE = 2
"""Turns that one pass over the queue sends: a worker that is lost leaves many, and other events wait meanwhile."""
NEXT_NS = 1
"""After as long the core is woken for the next pass, where no event comes before."""
STRUCK_LOOK_NS = NS_PER_S // 20
"""Pause after a look at the turns of workers with strikes that has led to nothing: these may be many, and events come
by thousands a second."""
LATE = "it took several times as long as other workers take for as many tokens"


class TurnManager:
    def __init__(self, run: RunState) -> None:
        self._run = run
        self._looked_ns: Nanoseconds = -STRUCK_LOOK_NS
        """When the turns of workers with strikes were looked at last, to no avail."""
        self._took_away = False
        """Whether the event that is being handled has taken many turns off a worker: sending is for those after it."""
        self.handlers: Handlers = {
            e.TokensReceived: self._on_tokens,
            e.TurnCut: self._on_cut,
        }
        self.due: Mapping[str, Callable[[str], Changed | None]] = {
            "token": self._token_due,
            "handover": self._handover_due,
            "capacity": self._capacity_due,
            "place": self._place_due,
            "dispatch": lambda _: Changed.ROOM,
            "retry": lambda turn: self._avoid(self._run.turns.live[turn]),
            "rest": lambda worker: self._run.fleet.rested(self._run.fleet.workers[worker]),
        }

    # Out to workers

    @property
    def goes_on(self) -> bool:
        """Whether the next event is to send turns, whatever it is."""
        run = self._run
        return bool(run.turns.queue.heads) and run.timers.waiting("dispatch", "queue")

    def request(self, event: e.TurnRequested, oldest_version: int) -> None:
        """Queue a turn of a running trajectory. Asking twice is asking once."""
        run = self._run
        turn = run.turns.request(
            event.turn, event.trajectory, event.prompt_tokens, event.max_new_tokens, oldest_version, event.tag
        )
        if turn is not None and run.serving is not None:
            holder = run.serving.affinity.asked(event.turn, event.marks)
            worker = None if holder is None else run.fleet.workers.get(holder)
            known = len(run.turns.live), run.fleet.helping_workers
            if worker is not None and not has_too_much(worker.outstanding, *known):
                turn.affine_worker = worker.id
                turn.affine_tokens = round(CACHED_SHARE * turn.prompt_tokens)

    def dispatch(self) -> None:
        """Send queued turns to workers while any worker has room (invariant 9).

        Who has found nobody for the queue looks again once a worker has opened, or a line has another head. Of many
        turns each pass sends a few, the next with the next event.
        """
        run = self._run
        if run.serving is not None and run.serving.held:
            self._clear_queue_waits()
            return
        queue, timers = run.turns.queue, run.timers
        took_away, self._took_away = self._took_away, False
        if took_away and queue.heads:
            run.wait("dispatch", "queue", NEXT_NS)
            return
        if run.fleet.struck:
            self._take_from_struck()
        opened, sent, goes_on = run.fleet.take_opened(), 0, False
        if queue.heads and (opened or queue.changed):
            while sent < SENT_AT_ONCE and queue.heads and (match := self._match()) is not None:
                self._start(*match)
                sent += 1
            queue.changed = goes_on = sent == SENT_AT_ONCE
        # A turn that waits for anything else waits for a place, too.
        if (sent or not queue.heads) and timers.waiting("place", "queue"):
            self._clear_queue_waits()
        if queue.heads:
            self._expect_place()
        if goes_on and queue.heads:
            run.wait("dispatch", "queue", NEXT_NS)
        else:
            timers.clear("dispatch", "queue")

    def _take_from_struck(self) -> None:
        """Route a turn again, as soon as another worker has a place, of which one with strikes has brought nothing, or
        that others would have finished long ago."""
        run = self._run
        if run.turns.queue.heads or run.now_ns < self._looked_ns + STRUCK_LOOK_NS:
            return
        for worker in list(run.fleet.struck.values()):
            for turn in self._of(worker):
                brought = turn.accepted - turn.start
                tokens, times = (max(turn.due_tokens, brought), MARGIN) if brought else (0, 1)
                overdue = run.patience.late(worker.id, tokens, run.now_ns - turn.sent_ns, times)
                if turn.state is not TurnState.RUNNING or (brought and not overdue):
                    continue
                other = run.policies.routing.route(turn, RemainingFleet(run.fleet, (worker.id,)))
                if other is None or other in run.fleet.struck or not run.fleet.workers[other].has_place:
                    continue
                self._take_to(other, turn, worker, overdue=overdue)
                return
        self._looked_ns = run.now_ns

    def _expect_place(self) -> None:
        """Bound the queue's wait: for a place by the longest that a place may take to come, for capacity by a short
        limit."""
        run = self._run
        if run.trainer_away or not run.timers.waiting("place", "queue"):
            run.wait("place", "queue", self._longest_ns())
        if self._somebody_could():
            run.timers.clear("capacity", "queue")
        elif not run.timers.waiting("capacity", "queue"):
            run.wait("capacity", "queue", run.limits.queue_timeout_ns)

    def _somebody_could(self) -> bool:
        """Whether a worker could take turns, or a lease is requested or about to be requested."""
        run = self._run
        if run.fleet.able or run.leases.coming or run.trainer_away:
            return True
        return any(run.leases.available(p) and run.timers.waiting("back-off", p) for p in run.leases.offers)

    def _longest_ns(self) -> Nanoseconds:
        """The longest wait for a place while capacity is coming: the sum of the limits of each stage on the way."""
        run = self._run
        limits, slice_ns = run.limits, run.leases.grant_within_ns
        boot_ns, load_ns = run.patience.limit_ns("boot", run.now_ns), run.patience.limit_ns("load", run.now_ns)
        coming_ns = limits.retry_max_ns + max(limits.acquire_timeout_ns, slice_ns) + boot_ns + load_ns
        return limits.queue_timeout_ns + max(coming_ns, limits.train_timeout_ns + slice_ns)

    def _clear_queue_waits(self) -> None:
        for what in QUEUE_WAITS:
            self._run.timers.clear(what, "queue")

    def _match(self) -> tuple[Turn, Worker] | None:
        """The first queued turn that a worker can take, with that worker."""
        run = self._run
        for _, _, head in run.turns.queue.heads:
            turn = run.turns.live[head]
            chosen = self._destination(turn) if turn.destination is not None else None
            if chosen is None and run.fleet.leaving:
                chosen = self._leaving(turn)
            if chosen is None:
                fleet = RemainingFleet(run.fleet, turn.avoided) if turn.avoided else run.fleet
                chosen = run.policies.routing.route(turn, fleet)
            if chosen is not None:
                return turn, run.fleet.workers[chosen]
        return None

    def _destination(self, turn: Turn) -> WorkerId | None:
        """The worker that the turn was being moved to, if it still has room."""
        destination, turn.destination = turn.destination, None
        if destination is None or destination in turn.avoided:
            return None
        return destination if self._run.fleet.with_room(destination, turn.oldest_version) is not None else None

    def _leaving(self, turn: Turn) -> WorkerId | None:
        """A worker that is about to leave and can still make use of its remaining, paid time for the turn.

        None where the holder of the turn's prefix has room.
        """
        run, policy = self._run, self._run.policies.departure
        if policy is None:
            return None
        holder = turn.affine_worker or ""
        if run.fleet.with_room(holder, turn.oldest_version) is not None:
            return None
        able = [
            worker
            for worker in run.fleet.leaving.values()
            if worker.has_place and (worker.version or 0) >= turn.oldest_version and run.fleet.may_take(worker)
        ]
        for worker in sorted(able, key=lambda worker: (worker.id != holder, worker.outstanding)):
            cached_tokens = turn.affine_tokens if worker.id == holder else 0
            if worker.id not in turn.avoided and policy.takes(turn, Leaving(run, worker), cached_tokens):
                return worker.id
        return None

    def _start(self, turn: Turn, worker: Worker) -> None:
        run = self._run
        run.turns.move(turn, TurnState.RUNNING, run.now_ns, worker.id)
        turn.attempt += 1
        turn.worker, turn.started_ns, turn.sent_ns = worker.id, run.now_ns, run.now_ns
        turn.start, turn.sent_version = turn.accepted, turn.oldest_version
        turn.due_tokens = round(turn.expected_tokens)
        if turn.moved_at is not None:
            turn.moved_at = turn.accepted  # What came while it was handed over has not come of the move.
        turn.slot = run.fleet.assign(worker, turn.id, turn.due_tokens)
        if run.serving is not None:
            run.serving.affinity.began(turn.id, worker.id)
        if turn.avoided:
            run.timers.clear("retry", turn.id)
        self._expect_whole(turn)
        run.out.append(
            c.StartTurn(
                worker=worker.id,
                epoch=worker.epoch,
                turn=turn.id,
                attempt=turn.attempt,
                slot=turn.slot,
                start=turn.accepted,
                recompute=turn.computed,
            )
        )

    def _capacity_due(self, _: str) -> None:
        self._waited_too_long(
            InfrastructureCause.CAPACITY, "there was no worker that could take a queued turn, for too long"
        )

    def _place_due(self, _: str) -> None:
        self._check_routing()
        self._waited_too_long(
            InfrastructureCause.PROGRESS,
            "no worker that could take a queued turn has made a place, nor got on with others",
        )

    def _check_routing(self) -> None:
        """Raises `PolicyFault` for routing that leaves a turn in the queue which a worker has room for."""
        run, routing = self._run, self._run.policies.routing
        for _, _, head in run.turns.queue.heads:
            turn = run.turns.live[head]
            fleet = RemainingFleet(run.fleet, turn.avoided)
            room = (worker for role in WorkerRole for worker in fleet.least_loaded(role, turn.oldest_version))
            worker = next(room, None)
            if worker is not None and routing.route(turn, fleet) is None:
                raise PolicyFault(
                    f"{routing}: route returned None for turn {turn.id} for too long, while {worker.id} had room for "
                    "it; allowed: None while no worker has room"
                )

    def _waited_too_long(self, cause: InfrastructureCause, detail: str) -> None:
        """Fail the run; where agents wait outside of it, their turns. Requests wait on: fronts tell their clients."""
        run = self._run
        if run.serving is not None:
            return
        if not run.plan.driven_outside:
            run.fail(f"{cause}: {detail}")
            return
        for turn in [turn for turn in run.turns.live.values() if turn.state is TurnState.QUEUED]:
            self._give_up(turn, cause, detail)
        self._clear_queue_waits()

    def _give_up(self, turn: Turn, cause: InfrastructureCause, detail: str) -> None:
        """Fail a turn for good."""
        run = self._run
        run.turns.trajectories[turn.trajectory].given_up = cause
        self._close(turn, TurnState.FAILED, detail)
        run.out.append(c.FailTurn(turn=turn.id, cause=f"{cause}: {detail}"))

    # Tokens in

    def _on_tokens(self, event: e.TokensReceived) -> Changed:
        """Most chunks go on where their turn's accepted tokens end, and change nothing else: these take a short way,
        whose condition stands here alone. It leads to where `_take` does."""
        run, chunks = self._run, event.chunks
        worker = run.heard_from(event.worker, event.epoch)
        if worker is None:
            run.ledger.lose(event.worker, sum(chunks.counts))
            return Changed.PROGRESS
        live, slots, now_ns, told = run.turns.live, worker.slots, run.now_ns, chunks.told
        worker_id, running, unsettled = worker.id, TurnState.RUNNING, worker.reputation < 1 or not worker.brought
        places, turns = list[int](), list[TurnId]()
        tokens = lost = longer = 0
        longest_ns, limit_ns, watched_ns = -1, 0, run.timers.until_ns("token", worker.id)
        for place, (slot, start, count, version) in enumerate(chunks.plain):
            turn = live.get(slots.get(slot, ""))
            if (
                turn is not None
                and turn.slot == slot
                and turn.worker == worker_id
                and turn.state is running
                and turn.start < turn.accepted == start
                and turn.oldest_version <= version == turn.version
                and 0 < count < turn.max_new_tokens - start
                and watched_ns is not None
                and place not in told
            ):
                turn.accepted = start + count
                if unsettled:
                    run.fleet.progressed(worker, count)
                    unsettled = worker.reputation < 1
                if (took_ns := now_ns - turn.heard_ns) > longest_ns:
                    run.patience.note("token", took_ns, now_ns)
                    longest_ns, limit_ns = took_ns, run.patience.limit_ns("token", now_ns)
                due_ns = now_ns + limit_ns
                if turn.ends_ns < due_ns:
                    due_ns = turn.ends_ns if turn.ends_ns > now_ns else now_ns
                turn.heard_ns, turn.due_ns = now_ns, due_ns
                if due_ns < watched_ns:
                    run.wait("token", worker.id, due_ns - now_ns)
                    watched_ns = due_ns
            else:
                longer += 1
                finish, detail, prefilled, cached = told.get(place, NO_EXTRAS)
                chunk = Chunk(slot, start, count, version, finish, detail, prefilled, cached)
                turn, refused = self._take(worker, turn, chunk)
                watched_ns = run.timers.until_ns("token", worker_id)
                unsettled = worker.reputation < 1 or not worker.brought
                if turn is None:
                    lost += refused
                    continue
            places.append(place)
            turns.append(turn.id)
            tokens += count
        if places:
            run.out.insert(0, c.AcceptTokens(chunks=tuple(places), turns=tuple(turns)))
        if tokens and run.timers.waiting("place", "queue"):
            run.wait("place", "queue", self._longest_ns())
        if lost:
            run.ledger.lose(event.worker, lost)
        return Changed.ROOM if longer else Changed.PROGRESS

    def _take(self, worker: Worker, turn: Turn | None, chunk: Chunk) -> tuple[Turn | None, int]:
        """Accept or refuse a chunk of the turn in its slot. Returns the turn if it was accepted, and how many tokens
        are lost if not."""
        found, lost = turn, 0
        if turn is None or turn.slot != chunk.slot or turn.worker != worker.id:  # Its present attempt is elsewhere.
            turn = found = None
            lost = chunk.count
        elif self._fits(turn, chunk):
            self._accept(turn, worker, chunk)
        else:
            lost = max(0, chunk.start + chunk.count - turn.accepted)
            self._refuse(turn, chunk)
            found = None
        if chunk.finish is not None and (turn is None or turn.worker is None):
            worker.slots.pop(chunk.slot, None)
        return found, lost

    def _fits(self, turn: Turn, chunk: Chunk) -> bool:
        if chunk.start != turn.accepted or chunk.start + chunk.count > turn.max_new_tokens:
            return False
        # The version is that of the tokens: a turn that was declined has none.
        return not chunk.count or turn.oldest_version <= chunk.version <= (self._run.version or 0)

    def _accept(self, turn: Turn, worker: Worker, chunk: Chunk) -> None:
        run, count, finish = self._run, chunk.count, chunk.finish
        turn.accepted += count
        # What others are expected to cost follows from it: no attempt has computed more than its context.
        turn.prefilled = min(turn.prefilled + chunk.prefilled, turn.attempt * turn.context_tokens)
        begins = bool(count or chunk.prefilled) and not worker.turns.get(turn.id)
        if begins:
            turn.computed = True
            run.fleet.begin(worker, turn.id)
        if count:
            if not worker.brought or worker.reputation < 1:
                run.fleet.progressed(worker, count)
            if turn.version != chunk.version:
                turn.version = chunk.version
                run.turns.trajectories[turn.trajectory].note_token(chunk.version)
        ends = finish in TURN_ENDS or turn.accepted == turn.max_new_tokens
        if turn.state is TurnState.RUNNING and (count or begins):
            if count:
                run.patience.note("token", run.now_ns - turn.heard_ns, run.now_ns)
            if not ends:
                self._expect_token(turn, run.patience.limit_ns("token", run.now_ns))
        if ends:
            self._finish(turn, worker, finish or FinishReason.LENGTH)
        elif finish is not None:
            self._given_up(turn, chunk)

    def _finish(self, turn: Turn, worker: Worker, finish: FinishReason) -> None:
        run = self._run
        run.turns.served(turn, worker.id)
        tokens, took_ns = turn.accepted - turn.start, run.now_ns - turn.started_ns
        if run.patience.late(worker.id, tokens, took_ns):
            run.fleet.bring_late(worker)
            if not worker.strikes:
                self._strike(worker, turn.sent_ns, LATE)
        elif worker.strikes:
            run.fleet.redeem(worker)
        run.patience.note_turn(worker.id, tokens, took_ns, run.now_ns)
        self._close(turn, TurnState.FINISHED, finish)
        run.out.append(c.FinishTurn(turn=turn.id))

    def _on_cut(self, event: e.TurnCut) -> None:
        """End a turn where its answer ends. What was accepted behind that is lost."""
        run = self._run
        for worker, tokens in event.lost:
            run.ledger.lose(worker, tokens)
        turn = run.turns.live.get(event.turn)
        if turn is None or event.kept > turn.accepted:
            return
        self._abort(turn)
        turn.accepted = event.kept
        if turn.worker is not None:
            run.turns.served(turn, turn.worker)
        self._close(turn, TurnState.FINISHED, "cut")
        run.out.append(c.FinishTurn(turn=turn.id))
        if run.turns.head() is None:
            self._clear_queue_waits()

    def _given_up(self, turn: Turn, chunk: Chunk) -> None:
        """The worker ends the attempt before the turn's end; what was accepted stays."""
        self._run.came("handover", turn.id)
        if chunk.finish is FinishReason.ERROR:
            self._blame_engine(turn, chunk.detail)
        else:
            self._prefer_others(turn, declined=not self._begun(turn))
            self._requeue(turn, f"{chunk.finish} {chunk.detail}".rstrip())

    def _refuse(self, turn: Turn, chunk: Chunk) -> None:
        """A repeated chunk is ignored; anything else that does not fit means that this attempt cannot succeed.

        It counts against the worker, unless the oldest version allowed is another one than when the turn was sent.
        """
        if chunk.start < turn.accepted:
            return
        self._abort(turn)
        found = f"{chunk.count} tokens of version {chunk.version} from {chunk.start}, expected from {turn.accepted}"
        turn.computed = True
        if turn.sent_version <= chunk.version < turn.oldest_version and chunk.start == turn.accepted:
            self._requeue(turn, found)
        elif chunk.start > turn.accepted or chunk.version < turn.oldest_version:
            self._failed_by_worker(turn, "its tokens do not go on where the accepted ones end, or are too old")
            self._requeue(turn, found)
        else:
            self._blame_engine(turn, found)

    def _blame_engine(self, turn: Turn, detail: str) -> None:
        """Try the turn on another worker; after `max_engine_errors` errors it fails for good."""
        turn.engine_errors += 1
        if turn.worker is not None:
            self._strike(self._run.fleet.workers[turn.worker], turn.sent_ns, "its engine failed")
        if turn.engine_errors < self._run.limits.max_engine_errors:
            self._prefer_others(turn, declined=False)
            self._requeue(turn, f"{InfrastructureCause.ENGINE}: {detail}")
        else:
            self._give_up(turn, InfrastructureCause.ENGINE, detail)

    def note_waiting(self, worker: Worker, pending: int, *, excused: bool) -> None:
        """A worker reports that `pending` of its turns wait in its engine's queue.

        These are its newest turns, since engines begin turns in order and preempt the newest first. Where the engine
        makes progress with the others (`excused`), the deadline for the waiting turns' next token starts anew.
        """
        run = self._run
        worker.waiting.clear()
        if not pending:
            return
        for turn in islice(map(run.turns.live.__getitem__, reversed(worker.turns)), pending):
            worker.waiting[turn.id] = turn.attempt
            if worker.turns[turn.id]:
                continue
            turn.started_ns = run.now_ns
            if excused and turn.state is TurnState.RUNNING:
                self._expect_whole(turn)

    def look_at_oldest(self, worker: Worker) -> None:
        """Hold it against the worker if others would have ended the turn long ago that it has had longest.

        While it loads weights, turns may stand still.
        """
        run = self._run
        turn = run.turns.live.get(next(iter(worker.turns), ""))
        if turn is None or turn.state is not TurnState.RUNNING or worker.loading_version is not None:
            return
        if run.patience.late(worker.id, turn.accepted - turn.start, run.now_ns - turn.started_ns):
            self._strike(worker, turn.sent_ns, LATE)

    def _expect_whole(self, turn: Turn) -> None:
        """Wait for the turn's first token, and for the end of the attempt."""
        run = self._run
        assert turn.worker is not None
        token_ns = run.patience.limit_ns("token", run.now_ns)
        whole_ns = run.patience.turn_ns(turn.worker, turn.max_new_tokens - turn.accepted, token_ns)
        turn.ends_ns = run.now_ns + whole_ns
        self._expect_token(turn, token_ns)

    def _expect_token(self, turn: Turn, token_ns: Nanoseconds) -> None:
        """Wait for the turn's next token. Its worker is watched until the first that a turn of it is due."""
        run = self._run
        assert turn.worker is not None
        now_ns = turn.heard_ns = run.now_ns
        due_ns = now_ns + token_ns
        if turn.ends_ns < due_ns:
            due_ns = max(now_ns, turn.ends_ns)
        turn.due_ns = due_ns
        watched_ns = run.timers.until_ns("token", turn.worker)
        if watched_ns is None or due_ns < watched_ns:
            run.wait("token", turn.worker, due_ns - now_ns)

    # Back from workers

    def _strike(self, worker: Worker, sent_ns: Nanoseconds, reason: str) -> None:
        """Hold it against the worker that it has failed a turn that it was sent then.

        The trainer's device has most to lose, and is judged by its engine's progress alone.
        """
        run = self._run
        if worker.role is WorkerRole.TRAINER or sent_ns <= worker.struck_ns:
            return  # What was sent before the last strike tells nothing new.
        run.fleet.strike(worker, run.now_ns, run.turns.finished)
        if worker.resting:
            run.wait("rest", worker.id, run.back_off_ns(max(1, worker.declines, worker.strikes - 1)))
        run.out.append(c.BlameWorker(worker=worker.id, reason=reason))
        finished = run.turns.finished - worker.others_finished
        if min(worker.strikes, finished) >= STRUCK_OUT:
            run.struck_out[worker.id] = None

    def _failed_by_worker(self, turn: Turn, reason: str, *, declined: bool = False) -> None:
        assert turn.worker is not None
        worker = self._run.fleet.workers[turn.worker]
        self._prefer_others(turn, declined=declined)
        self._strike(worker, turn.sent_ns, reason)

    def cut_off(self, worker: Worker, cause: str) -> None:
        """As `take_away`, for a worker whose connection is gone. Where no turn of it had begun, that counts against the
        worker once it is back: machines and networks go without its doing."""
        if worker.turns and not any(worker.turns.values()):
            worker.unbegun_ns = max(turn.sent_ns for turn in self._of(worker))
        self.take_away(worker, cause)

    def come_back(self, worker: Worker) -> None:
        """Hold against a worker that dials again what it had been sent, and had not begun."""
        if worker.unbegun_ns is not None:
            self._strike(worker, worker.unbegun_ns, "its connection was gone before it began a turn")
            worker.unbegun_ns = None

    def _prefer_others(self, turn: Turn, *, declined: bool) -> None:
        """The worker returns the turn unasked: the turn may go to any other worker at once, and to this one after a
        back-off.

        A worker that returned the turn before it began it (`declined`) gets no turn at all during that back-off.
        """
        run = self._run
        if turn.state is not TurnState.RUNNING or turn.worker is None:
            return
        worker = run.fleet.workers[turn.worker]
        times, _ = turn.given_back.get(worker.id, (0, 0))
        run.turns.note_given_back(turn, worker.id, run.now_ns + run.back_off_ns(times + 1))
        run.fleet.given_back(worker)
        if declined and not worker.resting:  # What it declines while it rests was sent before, and tells nothing new.
            run.fleet.rest(worker)
            run.wait("rest", worker.id, run.back_off_ns(worker.declines))

    def _begun(self, turn: Turn) -> bool:
        """Whether the worker has begun the turn's current attempt."""
        worker = self._run.fleet.workers.get(turn.worker or "")
        return worker is not None and worker.turns.get(turn.id, False)

    def _avoid(self, turn: Turn) -> None:
        """Keep a queued turn from workers whose back-off still runs, and look again when the first back-off ends."""
        run = self._run
        until_ns = {worker: until for worker, (_, until) in turn.given_back.items() if until > run.now_ns}
        run.turns.avoid(turn, tuple(sorted(until_ns)))
        if until_ns:
            run.wait("retry", turn.id, min(until_ns.values()) - run.now_ns)

    def call_back(self, worker: Worker, reason: str) -> None:
        """Ask a worker for its turns and whatever it still has of them."""
        for turn in self._of(worker):
            if turn.state is TurnState.RUNNING:
                self.call_back_turn(turn, reason)

    def call_back_turn(self, turn: Turn, reason: str) -> None:
        """As `call_back`, for one running turn."""
        self._abort(turn)
        self._expect_handover(turn, reason)

    def await_handover(self, worker: Worker, reason: str) -> None:
        """As `call_back`, for a worker that gives its turns back by itself because it goes to sleep."""
        for turn in self._of(worker):
            if turn.state is TurnState.RUNNING:
                self._expect_handover(turn, reason)

    def transfer(self, turn: Turn, to: WorkerId) -> None:
        """Have one running turn go on elsewhere, from what its worker still has of it.

        A worker that has brought no token of any of its turns has nothing to hand over, and is not waited for.
        """
        run = self._run
        assert turn.worker is not None
        worker = run.fleet.workers[turn.worker]
        turn.moved_at = turn.accepted
        if any(held.accepted > held.start for held in self._of(worker)):
            turn.destination = to
            self.call_back_turn(turn, f"balanced to {to}")
        else:
            loads = worker.loading_version is not None
            overdue = not loads and run.patience.late(worker.id, 0, run.now_ns - turn.sent_ns, 1)
            self._take_to(to, turn, worker, overdue=overdue)

    def _take_to(self, other: WorkerId, turn: Turn, worker: Worker, *, overdue: bool) -> None:
        """Route a turn to another worker at once; hold it against its own if others would have finished it."""
        turn.destination = other
        self._abort(turn)
        if overdue:
            self._strike(worker, turn.sent_ns, LATE)
        self._requeue_unheard(turn, f"{other} has a place")

    def take_away(self, worker: Worker, cause: str) -> None:
        """Queue a worker's turns again, at once: nothing more can come from these attempts. The passes after this
        event send them."""
        run = self._run
        turns = self._of(worker)
        run.fleet.unassign_all(worker)
        run.timers.clear("token", worker.id)
        for turn in turns:
            self._note_unheard(turn, worker)
            self._clear_waits(turn)
            self._queue(turn, cause)
        self._took_away |= len(turns) > SENT_AT_ONCE

    def cancel(self, trajectory: TrajectoryId, cause: str) -> None:
        """The trajectory is over: so are its turns, and nothing of it is remembered."""
        for turn in self._run.turns.live_of(trajectory):
            self._abort(turn)
            self._close(turn, TurnState.CANCELLED, cause)
        self._run.turns.forget(trajectory)
        if self._run.turns.head() is None:
            self._clear_queue_waits()

    def cancel_all(self, cause: str) -> None:
        for trajectory in list(self._run.turns.trajectories):
            self.cancel(trajectory, cause)

    def _of(self, worker: Worker) -> list[Turn]:
        return [self._run.turns.live[turn] for turn in worker.turns]

    def _expect_handover(self, turn: Turn, reason: str) -> None:
        run = self._run
        run.turns.move(turn, TurnState.MOVING, run.now_ns, reason)
        run.expect("handover", turn.id)

    def _abort(self, turn: Turn) -> None:
        worker = self._run.fleet.workers[turn.worker] if turn.worker is not None else None
        if worker is not None and worker.connected:
            self._run.out.append(c.AbortTurn(worker=worker.id, epoch=worker.epoch, turn=turn.id, attempt=turn.attempt))

    def _requeue_unheard(self, turn: Turn, cause: str) -> None:
        """Queue a turn whose worker left no word of its progress."""
        self._note_unheard(turn, self._run.fleet.workers[turn.worker] if turn.worker is not None else None)
        self._requeue(turn, cause)

    def _note_unheard(self, turn: Turn, worker: Worker | None) -> None:
        """The turn's prefill counts as paid, unless the worker has reported that this attempt still waited."""
        if worker is None or worker.waiting.get(turn.id) != turn.attempt:
            turn.computed = True

    def _requeue(self, turn: Turn, cause: str) -> None:
        self._leave_worker(turn)
        self._queue(turn, cause)

    def _queue(self, turn: Turn, cause: str) -> None:
        if turn.given_back:
            self._avoid(turn)
        self._run.turns.move(turn, TurnState.QUEUED, self._run.now_ns, cause)

    def _close(self, turn: Turn, state: TurnState, cause: str) -> None:
        self._leave_worker(turn)
        self._run.turns.move(turn, state, self._run.now_ns, cause)
        if self._run.serving is not None:  # It was a request, whose trajectory is over with it.
            self._run.turns.forget(turn.trajectory)
            self._run.serving.affinity.over(turn.id)

    def _leave_worker(self, turn: Turn) -> None:
        self._clear_waits(turn)
        if turn.worker is not None:
            worker = self._run.fleet.workers[turn.worker]
            self._run.fleet.unassign(worker, turn.id, turn.due_tokens)
            if not worker.turns:
                self._run.timers.clear("token", worker.id)

    def _clear_waits(self, turn: Turn) -> None:
        if turn.state is TurnState.MOVING:
            self._run.timers.clear("handover", turn.id)
        if turn.avoided:
            self._run.timers.clear("retry", turn.id)

    def _token_due(self, worker_id: WorkerId) -> None:
        run = self._run
        worker = run.fleet.workers[worker_id]
        for turn in self._of(worker):
            if turn.state is TurnState.RUNNING and turn.due_ns <= run.now_ns:
                cause = "not done in time" if run.now_ns >= turn.ends_ns else "no token in time"
                self._abort(turn)
                self._failed_by_worker(turn, cause, declined=not self._begun(turn))
                self._requeue_unheard(turn, cause)
        run.watch_turns(worker)

    def _handover_due(self, turn_id: str) -> None:
        turn = self._run.turns.live[turn_id]
        if turn.worker is not None:
            worker = self._run.fleet.workers[turn.worker]
            self._strike(worker, turn.sent_ns, "it did not hand a turn over in time")
        self._requeue_unheard(turn, "hand-over took too long")
