"""Requests of those who train elsewhere: trajectories of one turn each, of no group and without a reward.

A request is named VERSION/N/CHOICE: the version that its turns have at least, its number in the run, and the choice.
One that is asked again under its key, or by its name, joins its turns; without either, one whose client has vanished
is taken up by another with the same body. If a later version was answered since, that holds only shortly after the end
of its front, when its client asks again and hardly anybody else asks the same. It is forgotten once it was delivered,
with a key a while after that.
"""

from collections.abc import Callable, Mapping
from hashlib import blake2b
from typing import Any

import msgspec

from elastic.core import commands as c
from elastic.core import events as e
from elastic.core.ids import group_of, parse_trajectory, parse_turn, trajectory_id, turn_id
from elastic.core.scheduler import Scheduler
from elastic.core.types import (
    NS_PER_S,
    InfrastructureCause,
    Nanoseconds,
    SamplingParameters,
    TrajectoryId,
    TurnId,
    TurnState,
)
from elastic.protocol.front_messages import CHOICES_MAX, AgentCall, BranchFound, LookUp, OpenTurns, WantedSampling
from elastic.protocol.sampled import TOKEN_BYTES
from elastic.runtime.agents import notes
from elastic.runtime.agents.branches import Opening
from elastic.runtime.agents.limits import TEMPERATURE_MAX, TEMPERATURE_MIN, AgentLimits
from elastic.runtime.agents.refusals import TOO_MANY_TURNS, CallRefused
from elastic.runtime.agents.rollouts import AgentRollouts
from elastic.runtime.agents.trajectory import AgentTurn
from elastic.runtime.episodes import OpenTurn, stable_hash
from elastic.runtime.ports import Feed

KEPT_S = 600.0
"""How long a request with a key is kept once it was delivered."""
LEFT_S = 1.5
"""How long a request without a key is generated on after its client has left: a client that lost its connection asks
again."""
AGAIN_S = 10.0
"""How soon after the end of a front its clients ask another one."""
PREFIX_LEAST = 32
"""Tokens of a beginning that is worth computing once."""
MARK_BYTES = 8
STOPPING = f"{InfrastructureCause.CAPACITY}: the run is stopping"


class RequestRollouts(AgentRollouts):
    """The turns of requests, and the offers of the trainers that send them (`elastic.runtime.ports.Offers`)."""

    def __init__(
        self,
        seed: int,
        limits: AgentLimits,
        scheduler: Scheduler,
        feed: Feed,
        clock_ns: Callable[[], Nanoseconds],
        prompted: Callable[[TurnId], None] = lambda _: None,
    ) -> None:
        super().__init__(seed, limits, feed, clock_ns, prompted=prompted)
        self.answers: Callable[[c.AnswerOffer], None] = lambda _: None
        """Told of each offer that is answered."""
        self._scheduler = scheduler
        self._requests: dict[TurnId, AgentTurn] = {}
        """All that are not forgotten."""
        self._keyed: dict[str, list[TurnId]] = {}
        """By key, in the order of their choices."""
        self._given_ns: dict[TurnId, Nanoseconds] = {}
        self._alone: dict[TurnId, None] = {}
        """Those whose clients have vanished, since the longest time first."""
        self._left: dict[TurnId, None] = {}
        """Those of them whose clients have hung up, at a front that goes on."""
        self._asked = 0
        """How many requests there have been."""

    # What fronts ask

    def look_up(self, ask: LookUp) -> list[AgentTurn] | BranchFound:
        """The turns of the request that this one repeats, or nothing to go on from. Raises `CallRefused`."""
        turns = self._named(ask.caller.trajectory) or self._repeated(ask.call)
        self._attend(turns)
        return turns or BranchFound(ask.request, "")

    def _attend(self, turns: list[AgentTurn]) -> None:
        """A client waits for them again."""
        for turn in turns:
            turn.alone_ns = None
            self._alone.pop(turn.id, None)
            self._left.pop(turn.id, None)

    def _named(self, trajectory: TrajectoryId) -> list[AgentTurn]:
        """The turns of the request that the trajectory is of, in the order of their choices."""
        if not trajectory:
            return []
        step, number, _ = parse_trajectory(trajectory)
        names = (turn_id(trajectory_id(step, number, choice), 0) for choice in range(CHOICES_MAX))
        return [self._requests[name] for name in names if name in self._requests]

    def _repeated(self, call: AgentCall) -> list[AgentTurn]:
        if call.key and (keyed := [self._requests[turn] for turn in self._keyed.get(call.key, ())]):
            if keyed[0].call.digest != call.digest:
                raise CallRefused(422, "idempotency_key_reused", f"the key {call.key!r} was another request's")
            return keyed
        orphans: dict[str, list[AgentTurn]] = {}
        for turn in map(self._requests.__getitem__, self._alone):
            request, _ = parse_turn(turn.id)
            if turn.call == call and (self._asked_again(turn) or parse_trajectory(request).step >= self.version):
                orphans.setdefault(group_of(request), []).append(turn)
        return next(iter(orphans.values()), [])

    def _asked_again(self, turn: AgentTurn) -> bool:
        """Whether an equal request can be taken for this one, whatever was answered since."""
        return turn.cut_off and turn.alone_ns is not None and self._clock_ns() - turn.alone_ns <= AGAIN_S * NS_PER_S

    def open(self, ask: OpenTurns) -> tuple[list[AgentTurn], bool]:
        """The request's turns, one for each choice, and whether it has joined those of an equal one: that a front is
        gone may be known only after its client has begun to ask again at another one. Raises `CallRefused`."""
        limits, wanted = self._limits, ask.sampling
        if len(repeated := self._repeated(ask.call)) == ask.choices:
            self._attend(repeated)
            return repeated, True
        limits.check_ids(ask.ids)
        if len(self._turns) + ask.choices > limits.open_turns_max:
            said = f"{len(self._turns)} turns are open already; allowed: {limits.open_turns_max} (front.open_turns_max)"
            raise CallRefused(429, TOO_MANY_TURNS, said, retry_after_s=1.0)
        prompt_tokens = len(ask.ids) // TOKEN_BYTES
        sampling = self._sampling(wanted, prompt_tokens)
        version, number = self._scheduler.version or 0, self._asked
        marks = marks_of(ask.session, ask.ids)
        turns: list[AgentTurn] = []
        for choice in range(ask.choices):
            trajectory = trajectory_id(version, number, choice)
            drawn = (wanted.seed, choice) if wanted.seed is not None else (self._seed, version, number, choice)
            asked = notes.TurnAsked(
                ask.call,
                choice,
                None,
                0,
                ask.ids,
                stable_hash(*drawn),
                sampling.temperature,
                sampling.stop_token_ids,
                sampling.top_p,
                sampling.top_k,
            )
            turn = self._opened(turn_id(trajectory, 0), asked, sampling.max_new_tokens)
            turns.append(turn)
            self._feed(
                e.TurnRequested(
                    turn=turn.id,
                    trajectory=trajectory,
                    prompt_tokens=prompt_tokens,
                    max_new_tokens=sampling.max_new_tokens,
                    note=notes.encode_note(asked),
                    marks=marks,
                )
            )
        return turns, False

    def _sampling(self, wanted: WantedSampling, prompt_tokens: int) -> SamplingParameters:
        """What a request gets of what it wants; its seed is not set. Raises `CallRefused`."""
        limits = self._limits
        room = limits.max_context_tokens - prompt_tokens
        if room < 1:
            said = f"the prompt has {prompt_tokens} tokens, and the context room for {limits.max_context_tokens}"
            raise CallRefused(400, "context_length_exceeded", said, param="prompt")
        if not prompt_tokens:
            raise CallRefused(400, "invalid_prompt", "the prompt is empty", param="prompt")
        temperature = 1.0 if wanted.temperature is None else wanted.temperature
        if temperature != 0 and not TEMPERATURE_MIN <= temperature <= TEMPERATURE_MAX:
            found = f"temperature is {temperature}; allowed: 0, or from {TEMPERATURE_MIN:g} to {TEMPERATURE_MAX:g}"
            raise CallRefused(400, "invalid_temperature", found, param="temperature")
        top_p = 1.0 if wanted.top_p is None else wanted.top_p
        if not 0 < top_p <= 1:
            raise CallRefused(400, "invalid_top_p", f"top_p is {top_p}; allowed: above 0, at most 1", param="top_p")
        stops = () if wanted.ignore_eos else limits.sampling.stop_token_ids
        return SamplingParameters(
            max_new_tokens=min(wanted.max_tokens or room, room),
            noise_seed=0,
            stop_token_ids=tuple(sorted({*stops, *wanted.stop_token_ids})),
            temperature=temperature,
            top_p=top_p,
            top_k=max(0, wanted.top_k or 0),
        )

    def _opened(self, turn: TurnId, asked: notes.TurnAsked, max_new_tokens: int) -> AgentTurn:
        prompt_tokens = len(asked.ids) // TOKEN_BYTES
        generated = OpenTurn(turn, prompt_tokens, prompt=bytearray(asked.ids))
        generated.sampling = SamplingParameters(
            max_new_tokens=max_new_tokens,
            noise_seed=asked.seed,
            stop_token_ids=asked.stop_token_ids,
            temperature=asked.temperature,
            top_p=asked.top_p,
            top_k=asked.top_k,
        )
        opened = AgentTurn(asked, Opening(0, prompt_tokens, 0), generated)
        self._turns[turn] = self._requests[turn] = opened
        if asked.call.key:
            self._keyed.setdefault(asked.call.key, []).append(turn)
        trajectory, _ = parse_turn(turn)
        self._asked = max(self._asked, parse_trajectory(trajectory).group + 1)
        return opened

    def said(self, turn: AgentTurn) -> tuple[bytes, bytes]:
        return bytes(turn.generated.token_ids), bytes(turn.generated.logprobs)

    def settle(self, turn: AgentTurn, kept: int, answer: bytes, history: bytes = b"", behind: bytes = b"") -> None:
        """Raises `CallRefused` for a turn that was given up, or is not over."""
        if turn.kept is not None:
            return
        if turn.id not in self._turns or not turn.over or not turn.finish:
            raise CallRefused(409, "turn_not_over", f"turn {turn.id} has no answer")
        if kept < turn.tokens:
            self._cut(turn, kept)
        self._note(notes.AnswerSettled(turn.id, kept, b""))

    def deliver(self, turn: AgentTurn) -> None:
        if turn.kept is not None and not turn.given and turn.id in self._requests:
            self._note(notes.AnswerGiven(turn.id))
            if turn.id in self._given_ns:
                self._given_ns[turn.id] = self._clock_ns()

    def alone(self, turn: AgentTurn, *, cut_off: bool = False) -> None:
        super().alone(turn, cut_off=cut_off)
        if turn.id in self._requests:
            self._alone[turn.id] = None
            if not cut_off and not turn.call.key:
                self._left[turn.id] = None

    def abort_all(self) -> int:
        """End all turns with what they have; returns how many there were."""
        open_turns = [turn for turn in self._turns.values() if not turn.over]
        for turn in open_turns:
            turn.aborted = True
            turn.generated.ended = ""
            self._feed(e.TurnCut(turn=turn.id, kept=turn.tokens, aborted=True))
            self.watcher.over(turn)
        return len(open_turns)

    def hold_turns(self, *, held: bool) -> None:
        """Hold turns that wait in the queue, or none any more."""
        serving = self._scheduler.serving
        if serving is None or serving.held is not held:
            self._feed(e.TurnsHeld(held=held))

    def at_work(self) -> tuple[int, int]:
        """How many turns are at workers, and how many are not."""
        live = self._scheduler.turns.live.values()
        waiting = sum(turn.state is TurnState.QUEUED for turn in live)
        return len(live) - waiting, waiting

    def _is_at_work(self, turn: TurnId) -> bool:
        """Whether a worker has it: who waits in the queue costs nothing."""
        live = self._scheduler.turns.live.get(turn)
        return live is not None and live.state is not TurnState.QUEUED

    def offer(self, source: str, look: str, label: str) -> None:
        """Have weights served; `answers` is told once they are, or cannot be."""
        self._feed(e.VersionOffered(source=source, look=look, label=label))

    def answered(self, answer: c.AnswerOffer) -> None:
        self.answers(answer)

    def labels(self) -> Mapping[int, str]:
        serving = self._scheduler.serving
        return {} if serving is None else serving.labels

    @property
    def version(self) -> int:
        """The version that new turns get."""
        return self._scheduler.version or 0

    @property
    def held(self) -> bool:
        serving = self._scheduler.serving
        return serving is not None and serving.held

    @property
    def workers(self) -> int:
        """Those that can take turns."""
        return self._scheduler.fleet.helping_workers

    def look_after(self) -> None:
        """Give up what no client waits for any more, and forget what was delivered long ago."""
        super().look_after()
        now_ns = self._clock_ns()
        for turn in [self._requests[turn] for turn in self._left]:
            gone = turn.alone_ns is not None and now_ns - turn.alone_ns > LEFT_S * NS_PER_S
            if gone and self._is_at_work(turn.id):
                self._give_up(turn)
        for turn in [turn for turn, given_ns in self._given_ns.items() if now_ns - given_ns > KEPT_S * NS_PER_S]:
            self._forget(turn)
        for turn in [self._requests[turn] for turn in self._alone]:
            if turn.alone_ns is not None and now_ns - turn.alone_ns > KEPT_S * NS_PER_S:
                self._note(notes.Abandoned(turn.id))

    def _forget(self, turn: TurnId) -> None:
        self._given_ns.pop(turn, None)
        self._turns.pop(turn, None)
        self._alone.pop(turn, None)
        self._left.pop(turn, None)
        known = self._requests.pop(turn, None)
        if known is not None and known.call.key and turn in (of := self._keyed.get(known.call.key, [])):
            of.remove(turn)
            if not of:
                del self._keyed[known.call.key]

    # What the run asks

    def cancel(self, trajectory: TrajectoryId) -> None:
        """The run takes no requests any more: its clients ask another process of it."""
        turn = turn_id(trajectory, 0)
        if turn in self._requests:
            self.fail_turn(turn, STOPPING)

    def fail_turn(self, turn: TurnId, cause: str) -> None:
        super().fail_turn(turn, cause)
        if cause:
            self._forget(turn)

    def _recall_event(self, event: e.Event) -> None:
        match event:
            case e.TurnRequested():
                asked = notes.decode_note(event.note)
                assert isinstance(asked, notes.TurnAsked)
                self._opened(event.turn, asked, event.max_new_tokens)
            case e.TurnCut() if event.aborted is True:
                if (turn := self._turns.get(event.turn)) is not None:
                    turn.aborted = True
                    turn.generated.ended = ""
            case e.AgentNoted() | e.TurnCut():
                super()._recall_event(event)
            case _:
                pass

    def saved(self) -> object:
        return self._requests, self._given_ns, self._asked

    def restore(self, saved: tuple[Any, Any, Any]) -> None:
        self._requests, self._given_ns, self._asked = saved
        self._turns = {name: turn for name, turn in self._requests.items() if turn.kept is None}
        for name, turn in self._requests.items():
            if turn.call.key:
                self._keyed.setdefault(turn.call.key, []).append(name)

    def resume(self) -> None:
        now_ns = self._clock_ns()
        self._given_ns = dict.fromkeys(self._given_ns, now_ns)
        for turn in self._requests.values():
            if not turn.given:
                turn.alone_ns = now_ns
                self._alone[turn.id] = None
        for turn in list(self._turns):
            self._prompted(turn)

    def _apply(self, note: notes.AgentNote) -> None:
        match note:
            case notes.AnswerSettled():
                turn = self._turns.pop(note.turn)
                turn.kept = note.kept
                turn.asked, turn.generated.prompt = msgspec.structs.replace(turn.asked, ids=b""), bytearray()
            case notes.AnswerGiven():
                if (given := self._requests.get(note.turn)) is None:
                    return
                given.given = True
                if given.call.key:
                    self._given_ns[note.turn] = 0
                else:
                    self._forget(note.turn)
            case notes.Abandoned():
                self._forget(note.turn)
            case _:
                super()._apply(note)


def marks_of(session: str, prompt: bytes) -> tuple[str, ...]:
    """What a request may have in common with others that go well with it on one worker: its session, and how its packed
    prompt begins, by the largest power of two of tokens that it has, and by half as many."""
    parts = [b"session " + session.encode()] if session else []
    tokens = len(prompt) // TOKEN_BYTES
    largest = 1 << (tokens.bit_length() - 1) if tokens else 0
    parts += [prompt[: size * TOKEN_BYTES] for size in (largest, largest // 2) if size >= PREFIX_LEAST]
    return tuple(blake2b(part, digest_size=MARK_BYTES).hexdigest() for part in parts)
