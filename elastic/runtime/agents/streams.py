"""Answers fronts' messages to the run, and sends tokens of turns to the fronts whose clients wait for them.

A connected front has streams, each a turn that a client of its waits for. What is answered by `durable` survives this
process. `elastic.runtime.agents.hub` listens for fronts and hands their connections over.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Sequence

import msgspec

from elastic.core import commands as c
from elastic.core.ids import environment_of, parse_turn
from elastic.core.types import TrajectoryId, TurnId
from elastic.protocol import front_messages as m
from elastic.protocol.frames import WireError
from elastic.protocol.run_connection import PeerConnection
from elastic.protocol.run_secrets import RunSecrets
from elastic.protocol.sampled import TOKEN_BYTES, last_of
from elastic.runtime.agents.chats import CHATS, Chats
from elastic.runtime.agents.hub import STOPPING
from elastic.runtime.agents.metrics import RunMetrics
from elastic.runtime.agents.refusals import TOO_MANY_TURNS, CallRefused, refused_turn
from elastic.runtime.agents.requests import RequestRollouts
from elastic.runtime.agents.rollouts import AgentRollouts, Watcher
from elastic.runtime.agents.trajectory import AgentTurn
from elastic.runtime.blame import Blame

LOOK_S = 0.5
"""How often it is looked whether turns have ended that somebody waits for; most of them say so themselves."""


class _Front:
    """A connected front, and the turns that its clients wait for; or an env worker, then with a `driver`'s name."""

    def __init__(self, connection: PeerConnection, driver: str = "") -> None:
        self.connection = connection
        self.driver = driver
        self.streams: dict[int, AgentTurn] = {}
        self.calls: set[int] = set()
        """Its calls of models elsewhere."""
        self._number = 0

    def attach(self, turn: AgentTurn) -> int:
        self._number += 1
        self.streams[self._number] = turn
        return self._number


class FrontStreams(Watcher):
    """`durable` is the journal's. With `secrets` env workers are given trajectories, once fronts serve their calls.

    Once the run is `stopped` no message counts any more: a resumed run begins before the stop.
    """

    def __init__(
        self,
        rollouts: AgentRollouts,
        durable: Callable[[Callable[[], None]], None],
        stopped: Callable[[], bool],
        metrics: RunMetrics | None = None,
        chats: Chats | None = None,
        secrets: RunSecrets | None = None,
    ) -> None:
        self._base_url = ""
        self._secrets = secrets
        self._begins: dict[str, deque[tuple[_Front, m.BeginTrajectory]]] = {}
        """Env workers that wait for a trajectory, by environment, the longest waiting first."""
        self._gives_out = False
        """Whether it is about to be looked what is due to them."""
        self._heard_s: dict[str, float] = {}
        self._finished = Counter[str]()
        self._unusable: dict[str, str] = {}
        """Why env workers cannot play, by driver."""
        self._metrics = metrics
        self._rejections = 0
        self._stopped = stopped
        self._rollouts = rollouts
        self._durable = durable
        self._fronts: set[_Front] = set()
        self._waiting: dict[TurnId, list[tuple[_Front, int]]] = {}
        """The fronts that wait for a turn, and the stream of each."""
        self._leaves: deque[tuple[_Front, m.AskUpstream]] = deque()
        """The calls that wait for leave to call a model elsewhere, the next one first."""
        self._offers: dict[str, list[tuple[_Front, m.OfferWeights]]] = {}
        """The requests that wait for an offer's answer, by the offer's look."""
        self._ends: list[tuple[_Front, m.HoldTurns]] = []
        """The requests that wait for the ends of running turns."""
        rollouts.watcher = self
        if isinstance(rollouts, RequestRollouts):
            rollouts.answers = self._offer_answered
        self._chats = chats
        if chats is not None:
            chats.watcher = self

    @property
    def connections(self) -> int:
        return len(self._fronts)

    def served_at(self, base_url: str) -> None:
        """Calls of env workers go there; who has come before waits until then."""
        self._base_url = base_url
        self.offered()

    def serves(self, driver: str) -> bool:
        return not driver or self._secrets is not None

    def take(self, connection: PeerConnection, driver: str, holds: list[TrajectoryId]) -> None:
        front = _Front(connection, driver)
        self._fronts.add(front)
        if driver:
            self._note_heard(driver)
            self._rollouts.hold(driver, holds, "its env worker is another one")
        who = f"env worker {driver}" if driver else "front"
        connection.take_over(who, lambda said: self._hear(front, said), lambda _: self._lost(front))

    def close(self) -> None:
        for front in list(self._fronts):
            front.connection.close()

    def _lost(self, front: _Front) -> None:
        self._fronts.discard(front)
        for stream in list(front.streams):
            self._detach(front, stream, gone=True, cut_off=True)
        self._leaves = deque(waiting for waiting in self._leaves if waiting[0] is not front)
        self._ends = [waiting for waiting in self._ends if waiting[0] is not front]
        self._offers = {
            look: [waiting for waiting in of if waiting[0] is not front] for look, of in self._offers.items()
        }
        self._begins = {
            environment: deque(waiting for waiting in begins if waiting[0] is not front)
            for environment, begins in self._begins.items()
        }
        if not self._stopped():
            for call in front.calls:
                self._rollouts.lost_call(call)
            self.freed()

    # What fronts say

    def _hear(self, front: _Front, messages: Sequence[m.FromFront]) -> None:
        for message in messages:
            if self._stopped():
                front.connection.close(STOPPING)
                return
            try:
                if front.driver:
                    self._answer_driver(front, message)
                else:
                    self._answer(front, message)
            except CallRefused as refused:
                self._rejections += refused.code == TOO_MANY_TURNS
                request = getattr(message, "request", None)
                if request is not None:
                    front.connection.send(declined(request, refused))

    def _answer(self, front: _Front, message: m.FromFront) -> None:
        rollouts = self._rollouts
        match message:
            case m.LookUp():
                found = self._asked(message.caller).look_up(message)
                if isinstance(found, m.BranchFound):
                    front.connection.send(found)
                else:
                    self._take(front, message.request, found, joined=True, ids_before=message.ids_before)
            case m.RecallHistory():
                front.connection.send(m.HistoryFound(message.request, rollouts.recall(message)))
            case m.OpenTurns():
                turns, joined = self._asked(message.caller).open(message)
                self._take(front, message.request, turns, joined=joined)
            case m.CutTurn():
                if (turn := front.streams.get(message.stream)) is not None:
                    self._opener(turn).cut(turn, message.kept)
            case m.SettleTurn():
                self._settle(front, message)
            case m.AnswerDelivered():
                if (turn := self._detach(front, message.stream, gone=False)) is not None:
                    self._opener(turn).deliver(turn)
            case m.ClientGone():
                self._detach(front, message.stream, gone=True)
            case m.BeginTrajectory():
                trajectory, again = rollouts.begin(message)
                self._reply(front, m.TrajectoryBegun(message.request, trajectory, again=again))
            case m.BindSession() | m.GiveReward() | m.EndTrajectory():
                self._take_word(front, message, message.caller)
            case m.ShowTrajectory():
                front.connection.send(m.TrajectoryShown(message.request, rollouts.show(message.caller)))
            case m.AskMetrics():
                if self._metrics is None:
                    raise CallRefused(404, "no_metrics", "the run counts nothing")
                front.connection.send(self._metrics.told(message.request, self._rejections))
            case m.AskUpstream():
                self._leaves.append((front, message))
                self.freed()
            case m.UpstreamWaived():
                self._leaves = deque(
                    (of, ask) for of, ask in self._leaves if of is not front or ask.request != message.asked
                )
                self.freed()
            case m.UpstreamOver():
                front.calls.discard(message.call)
                rollouts.called(message)
            case m.OfferWeights() | m.HoldTurns() | m.AbortTurns() | m.AskServing():
                if not isinstance(rollouts, RequestRollouts):
                    raise CallRefused(404, "no_doors", "the run trains itself, and takes no offers", retry=False)
                self._serve(front, message, rollouts)
            case m.FrontHello() | m.DriverHello() | m.DriverBeat():
                raise WireError("a second hello")
            case m.EnvironmentUnusable() | m.EpisodesHosted() | m.EpisodeAnswered() | m.EpisodeFailed():
                raise WireError(f"{type(message).__name__} is nothing that a front may say")

    def _serve(
        self,
        front: _Front,
        message: m.OfferWeights | m.HoldTurns | m.AbortTurns | m.AskServing,
        requests: RequestRollouts,
    ) -> None:
        """What a trainer elsewhere asks of the run besides requests."""
        match message:
            case m.OfferWeights():
                self._offers.setdefault(message.look, []).append((front, message))
                requests.offer(message.source, message.look, message.label)
            case m.HoldTurns():
                requests.hold_turns(held=message.held)
                ended = requests.abort_all() if message.abort else 0
                if message.wait and message.held and requests.at_work()[0]:
                    self._ends.append((front, message))
                    asyncio.get_running_loop().call_later(LOOK_S, self._look_for_ends)
                else:
                    self._reply(front, self._told(message.request, requests, ended))
            case m.AbortTurns():
                ended = requests.abort_all()
                self._reply(front, self._told(message.request, requests, ended))
            case m.AskServing():
                front.connection.send(self._told(message.request, requests))

    def _told(self, request: int, requests: RequestRollouts, ended: int = 0) -> m.ServingTold:
        running, waiting = requests.at_work()
        labels = dict(requests.labels())
        workers, held = requests.workers, requests.held
        return m.ServingTold(request, requests.version, labels, held, workers, running, waiting, ended)

    def _offer_answered(self, answer: c.AnswerOffer) -> None:
        requests, waiting = self._rollouts, self._offers.pop(answer.look, [])
        if isinstance(requests, RequestRollouts) and any(ask.abort_running for _, ask in waiting):
            requests.abort_all()
        for front, ask in waiting:
            if answer.refused:
                status = 503 if answer.again else 400
                refused = CallRefused(status, "offer_refused", answer.refused, retry=answer.again)
                front.connection.send(declined(ask.request, refused))
            else:
                front.connection.send(m.VersionServed(ask.request, answer.version, ask.label))

    def _look_for_ends(self) -> None:
        """Answer those who wait for running turns to end, once they have."""
        requests = self._rollouts
        if not self._ends or self._stopped() or not isinstance(requests, RequestRollouts):
            return
        if requests.at_work()[0]:
            asyncio.get_running_loop().call_later(LOOK_S, self._look_for_ends)
            return
        ends, self._ends = self._ends, []
        for front, message in ends:
            self._reply(front, self._told(message.request, requests))

    def _answer_driver(self, front: _Front, message: m.FromFront) -> None:
        """An env worker speaks for its own trajectories, and asks for no turns here."""
        driver = front.driver
        self._note_heard(driver)
        match message:
            case m.DriverBeat():
                pass
            case m.EnvironmentUnusable(cause):
                self._unusable[driver] = cause
                front.connection.close()
            case m.BeginTrajectory():
                self._begins.setdefault(environment_of(driver), deque()).append((front, message))
                self.offered()
            case m.BindSession() | m.GiveReward() | m.EndTrajectory():
                self._take_word(front, message, m.AgentCaller(driver=driver, named=message.caller.named))
            case _:
                raise WireError(f"{type(message).__name__} is nothing that an env worker may say")

    def _take_word(
        self, front: _Front, message: m.BindSession | m.GiveReward | m.EndTrajectory, caller: m.AgentCaller
    ) -> None:
        """What a trajectory's owner says of it. What env workers end is counted."""
        rollouts = self._rollouts
        match message:
            case m.BindSession():
                status = rollouts.bind(caller, message.session)
            case m.GiveReward():
                status = rollouts.reward(caller, message.reward, message.policy)
            case m.EndTrajectory():
                ended_before = rollouts.is_over(caller)
                status = rollouts.end(caller, message.cause, truncated=message.truncated, metrics=message.metrics)
                self._finished[front.driver] += not ended_before and status.state in ("finished", "truncated")
        self._reply(front, m.TrajectoryShown(message.request, status))

    def _note_heard(self, driver: str) -> None:
        self._heard_s[driver] = asyncio.get_running_loop().time()

    def offered(self) -> None:
        if not self._gives_out and any(self._begins.values()):
            # Not now: the core may be told of something else at this moment, and its events have an order.
            self._gives_out = True
            asyncio.get_running_loop().call_soon(self._give_out)

    def _give_out(self) -> None:
        """Give out trajectories that are due to the env workers that have waited for longest."""
        self._gives_out = False
        if self._stopped() or not self._base_url:
            return
        for waiting in self._begins.values():
            has_none, waits_on = set[str](), deque[tuple[_Front, m.BeginTrajectory]]()
            while waiting:
                front, ask = waiting.popleft()
                begun = None if front.driver in has_none else self._rollouts.begin_due(front.driver)
                if begun is None:
                    has_none.add(front.driver)
                    waits_on.append((front, ask))
                    continue
                assert self._secrets is not None
                key = self._secrets.agent_key(begun.trajectory, begun.restart)
                answer = msgspec.structs.replace(begun, request=ask.request, key=key, base_url=self._base_url)
                self._reply(front, answer)
            waiting.extend(waits_on)

    # What is known of env workers (`elastic.runtime.agents.env_workers.Drivers`)

    def heard_s(self, driver: str) -> float | None:
        return self._heard_s.get(driver)

    def unusable(self, driver: str) -> str:
        return self._unusable.get(driver, "")

    def done(self, driver: str) -> int:
        return self._finished[driver]

    def lost(self, driver: str, holds: Collection[TrajectoryId], cause: str) -> Blame:
        return Blame.WORKERS if self._stopped() else self._rollouts.hold(driver, holds, cause)

    def _reply(self, front: _Front, answer: m.FromRun) -> None:
        """Answer once all that was said so far is durable."""
        self._durable(lambda: front.connection.send(answer))

    def _settle(self, front: _Front, message: m.SettleTurn) -> None:
        turn = front.streams.get(message.stream)
        if turn is None:
            return
        try:
            self._opener(turn).settle(turn, message.kept, message.answer, message.history, message.behind)
        except CallRefused as refused:
            front.connection.send(failed(message.stream, refused))
            return
        self._reply(front, m.TurnSettled(message.stream))

    def _take(
        self,
        front: _Front,
        request: int,
        turns: Sequence[AgentTurn],
        *,
        joined: bool,
        ids_before: int | None = None,
    ) -> None:
        opened: list[m.OpenedTurn] = []
        for turn in turns:
            stream = front.attach(turn)
            self._waiting.setdefault(turn.id, []).append((front, stream))
            limit = turn.generated.sampling
            opened.append(
                m.OpenedTurn(
                    stream,
                    turn.id,
                    turn.asked.choice,
                    turn.at.prompt_tokens,
                    0 if limit is None else limit.max_new_tokens,
                )
            )
        trajectory, _ = parse_turn(turns[0].id)
        first = turns[0]
        prompt = b""
        if ids_before is not None:
            prompt = last_of(first.generated.prompt, first.at.prompt_tokens, ids_before)
        front.connection.send(m.TurnsTaken(request, trajectory, opened, joined, prompt))
        for turn, one in zip(turns, opened, strict=True):
            self._repeat(front, one.stream, turn)

    def _repeat(self, front: _Front, stream: int, turn: AgentTurn) -> None:
        """Say what the turn has come to so far."""
        runs, (token_ids, logprobs) = turn.generated.runs, self._opener(turn).said(turn)
        if token_ids:
            front.connection.send(
                m.StreamTokens(
                    [stream] * len(runs),
                    [run.tokens for run in runs],
                    [run.version for run in runs],
                    token_ids,
                    logprobs,
                )
            )
        if turn.over:
            front.connection.send(_over(stream, turn))

    def _detach(self, front: _Front, stream: int, *, gone: bool, cut_off: bool = False) -> AgentTurn | None:
        turn = front.streams.pop(stream, None)
        if turn is None:
            return None
        waiting = [one for one in self._waiting.pop(turn.id, []) if one != (front, stream)]
        if waiting:
            self._waiting[turn.id] = waiting
        elif gone:
            self._opener(turn).alone(turn, cut_off=cut_off)
        return turn

    def _asked(self, caller: m.AgentCaller) -> AgentRollouts | Chats:
        """Return what opens the caller's turns. Raises `CallRefused`."""
        if not caller.viewer:
            return self._rollouts
        if self._chats is None:
            raise CallRefused(403, "no_chats", "the run answers no chats: front.chats_max is 0", retry=False)
        return self._chats

    def _opener(self, turn: AgentTurn) -> AgentRollouts | Chats:
        """Return what has opened the turn."""
        if self._chats is not None and parse_turn(turn.id)[0] == CHATS:
            return self._chats
        return self._rollouts

    def freed(self) -> None:
        """Give leave to those who wait for it, in their order, until one has to wait on."""
        while self._leaves:
            front, ask = self._leaves[0]
            try:
                call = self._rollouts.leave(ask)
            except CallRefused as refused:
                front.connection.send(declined(ask.request, refused))
            else:
                if call is None:
                    return
                front.calls.add(call)
                self._reply(front, m.UpstreamAllowed(ask.request, call))
            self._leaves.popleft()

    # What fronts are told of turns

    def accepted(self, columns: Sequence[tuple[AgentTurn, int, int]], token_ids: bytes, logprobs: bytes) -> None:
        by_front: dict[_Front, tuple[list[int], list[int], list[int], list[slice]]] = {}
        begin = 0
        for turn, version, count in columns:
            end = begin + TOKEN_BYTES * count
            for front, stream in self._waiting.get(turn.id, ()):
                streams, counts, versions, parts = by_front.setdefault(front, ([], [], [], []))
                streams.append(stream)
                counts.append(count)
                versions.append(version)
                parts.append(slice(begin, end))
            begin = end
        for front, (streams, counts, versions, parts) in by_front.items():
            whole = len(by_front) == 1 and len(parts) == len(columns)
            ids, probs = (
                column if whole else b"".join([column[part] for part in parts]) for column in (token_ids, logprobs)
            )
            front.connection.send(m.StreamTokens(streams, counts, versions, ids, probs))

    def over(self, turn: AgentTurn) -> None:
        for front, stream in self._waiting.get(turn.id, ()):
            front.connection.send(_over(stream, turn))

    def left(self, turns: Iterable[TurnId]) -> None:
        """Their clients are told that the trajectory is over; where the run is being stopped they are not, as it may
        go on later."""
        if self._stopped():
            for front in list(self._fronts):
                front.connection.close(STOPPING)
            return
        gone = CallRefused(410, "trajectory_over", "the trajectory is over", retry=False)
        for turn in turns:
            for front, stream in self._waiting.pop(turn, ()):
                front.streams.pop(stream, None)
                front.connection.send(failed(stream, gone))


def _over(stream: int, turn: AgentTurn) -> m.TurnOver:
    if turn.generated.ended:
        return failed(stream, refused_turn(turn.generated.ended))
    return m.TurnOver(stream, turn.finish)


def failed(stream: int, refused: CallRefused) -> m.TurnOver:
    return m.TurnOver(stream, "", str(refused), refused.status, refused.code, refused.retry, refused.retry_after_s)


def declined(request: int, refused: CallRefused) -> m.Declined:
    return m.Declined(
        request, refused.status, refused.code, str(refused), refused.param, refused.retry, refused.retry_after_s
    )
