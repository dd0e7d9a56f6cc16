"""The trajectories that agents play (`elastic.runtime.ports.Trajectories`), and what may be asked of them.

A launched group waits until a driver names it; its members are handed out one by one. The holder of a trajectory asks
for turns, gives a reward, and ends it. Everything that is said is journaled before it is answered, so that another
process knows all of it: a trajectory is not played again after a restart, its agent goes on where it is.
"""

import contextlib
import math
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from elastic.core import commands as c
from elastic.core import events as e
from elastic.core.ids import agent_id, drawn_from, group_of, is_evaluated, turn_id
from elastic.core.types import NS_PER_S, Nanoseconds, SamplingParameters, TrajectoryId, TurnId
from elastic.protocol import wire
from elastic.protocol.front_messages import (
    AgentCall,
    AgentCaller,
    AskUpstream,
    BeginTrajectory,
    BranchFound,
    LookUp,
    OpenTurns,
    PolicyStatus,
    RecallHistory,
    TrajectoryBegun,
    TrajectoryStatus,
    UpstreamOver,
)
from elastic.protocol.sampled import TOKEN_BYTES, last_of
from elastic.runtime.agents import notes
from elastic.runtime.agents.claims import AgentClaims, AgentGroup, gone
from elastic.runtime.agents.joining import OtherBody
from elastic.runtime.agents.limits import AgentLimits
from elastic.runtime.agents.refusals import TOO_MANY_TURNS, CallRefused
from elastic.runtime.agents.trajectory import AgentTrajectory, AgentTurn, HistoryPiece, behind
from elastic.runtime.agents.upstream import UpstreamAccount, call_of
from elastic.runtime.blame import Blame
from elastic.runtime.episodes import FinishedEpisodes, OpenTurn, RolloutTrajectory, ScoringSettings, stable_hash
from elastic.runtime.journal import TrajectoryRow
from elastic.runtime.ports import Feed
from elastic.runtime.status import LostPlays, UpstreamStatus
from functions.base import Call
from functions.rewards import FinishedTrajectory

REWARD_MAX = 1e9
ALONE_S = 30.0
"""How long a turn goes on whose client has vanished, so that it can ask again; and how long a member that comes in the
place of another waits for a driver that asks for it."""


class Watcher:
    """Hears of turns that clients wait for; this one does nothing about it."""

    def accepted(self, columns: Sequence[tuple[AgentTurn, int, int]], token_ids: bytes, logprobs: bytes) -> None:
        """Tokens were accepted: by turn, of one version, so many; packed in the same order."""

    def over(self, turn: AgentTurn) -> None:
        """The turn has ended."""

    def left(self, turns: Iterable[TurnId]) -> None:
        """The trajectory of these turns is over."""

    def freed(self) -> None:
        """A call of a model elsewhere is over: another one may have leave now."""

    def offered(self) -> None:
        """There are trajectories that nobody plays."""


class AgentRollouts:
    """`feed` takes events to the core, `clock_ns` is the run's time; `stored` and `scoring` as in `Rollouts`. `billed`
    is told what each call of a model elsewhere has cost, and `owing` that such calls have cost, or may cost, something
    else than before."""

    def __init__(
        self,
        seed: int,
        limits: AgentLimits,
        feed: Feed,
        clock_ns: Callable[[], Nanoseconds],
        scoring: ScoringSettings | None = None,
        stored: Callable[[TrajectoryId], TrajectoryRow] | None = None,
        prompted: Callable[[TurnId], None] = lambda _: None,
        billed: Callable[[Call], None] = lambda _: None,
        owing: Callable[[], None] = lambda: None,
    ) -> None:
        self.watcher = Watcher()
        self._seed = seed
        self._limits = limits
        self._feed = feed
        self._clock_ns = clock_ns
        self._scored_by_function = scoring is not None
        self._finished = FinishedEpisodes(seed, scoring, stored)
        self._prompted = prompted
        self._billed = billed
        self._owing = owing
        self._claims = AgentClaims()
        self._upstream = UpstreamAccount()
        self._turns: dict[TurnId, AgentTurn] = {}
        """Those that are not settled."""

    @property
    def lost(self) -> Mapping[str, LostPlays]:
        """What env workers that are gone had played, by environment."""
        return self._claims.lost

    # What drivers ask

    def begin(self, ask: BeginTrajectory) -> tuple[TrajectoryId, bool]:
        """Give out a member of the group of this name. Returns it, and whether it was given before for this call."""
        driver = ask.caller.driver
        if not driver:
            raise CallRefused(403, "driver_key_required", "trajectories are opened with a driver's key")
        if ask.key and (former := self._claims.begun.get((driver, ask.key))) is not None:
            if (former.name, former.task) != (ask.group, ask.task):
                raise CallRefused(422, "idempotency_key_reused", f"the key {ask.key!r} was another call's")
            return former.trajectory, True
        group, now_ns = self._claims.group(driver, ask.group, self._limits.played), self._clock_ns()
        for session in ask.sessions:
            self._claims.is_free(driver, session)
        begun = notes.Begun(group.members[0], driver, ask.group, ask.task, ask.key, now_ns)
        self._note(begun)
        for session in ask.sessions:
            self._note(notes.Bound(begun.trajectory, session))
        return begun.trajectory, False

    def begin_due(self, driver: str) -> TrajectoryBegun | None:
        """Give an env worker the trajectory that is due; None while none is. Its request, key and URL are not set."""
        if (due := self._claims.due(driver)) is None:
            return None
        group, member = due
        begun = notes.Begun(member, driver, str(group.number), b"", "", self._clock_ns())
        self._note(begun)
        return TrajectoryBegun(
            0,
            begun.trajectory,
            self._claims.restart(begun.trajectory),
            number=group.number,
            place=group.place,
            row=group.row,
        )

    def hold(self, driver: str, holds: Collection[TrajectoryId], cause: str) -> Blame:
        """An env worker plays these trajectories, and no others that it was given: those begin again, or have failed
        (`elastic.runtime.blame`). Returns whom that may be blamed on."""
        held = self._claims.trajectories.items()
        lost = [(name, one) for name, one in held if one.driver == driver and name not in holds]
        calling = self._upstream.trajectories
        ran = {name for name, trajectory in lost if not trajectory.waits and name not in calling}
        blame = Blame.ANY if lost else Blame.WORKERS
        for name, trajectory in lost:
            deaths = self._claims.deaths(name).one_more(running=name in ran or not ran)
            if deaths.failed:
                blame = Blame.EPISODES
                self._end(trajectory, deaths.told(cause))
                continue
            turns = list(trajectory.turns)
            tokens = trajectory.branches.tokens
            for turn in [turn for turn in trajectory.turns.values() if turn.kept is None]:
                tokens += turn.tokens
                self._give_up(turn)
            self._note(notes.BegunAgain(name, cause, tokens, name in ran or not ran))
            self.watcher.left(turns)
        self.watcher.offered()
        return blame

    def bind(self, caller: AgentCaller, session: str) -> TrajectoryStatus:
        trajectory = self._claims.open(caller)
        if self._claims.is_free(trajectory.driver, session, trajectory.trajectory):
            self._note(notes.Bound(trajectory.trajectory, session))
        return self._status(trajectory)

    def reward(self, caller: AgentCaller, reward: float, policy: str = "") -> TrajectoryStatus:
        """Take the trajectory's reward, or that of the branches of one policy.

        Raises `CallRefused` for a number that no mean should have, an unknown policy, and another reward than it has.
        """
        if not abs(reward) <= REWARD_MAX:  # Neither is NaN.
            allowed = f"a number from {-REWARD_MAX:g} to {REWARD_MAX:g}"
            raise CallRefused(400, "invalid_reward", f"the reward is {reward:g}; allowed: {allowed}", param="reward")
        self._limits.check_policy(policy, 400)
        if (ended := self._claims.over(caller)) is not None:
            if ended.rewards.get(policy) == reward:
                return ended.status
            raise gone(ended)
        trajectory = self._claims.open(caller)
        given = trajectory.given_reward(policy)
        if given not in (None, reward):
            whose = f"policy {policy!r} of the trajectory" if policy else "the trajectory"
            raise CallRefused(409, "reward_given", f"{whose} has the reward {given}", retry=False)
        if given is None:
            self._note(notes.Rewarded(trajectory.trajectory, reward, policy))
        return self._status(trajectory)

    def end(
        self, caller: AgentCaller, cause: str, *, truncated: bool = False, metrics: Mapping[str, float] | None = None
    ) -> TrajectoryStatus:
        """End the trajectory with the reward that it has; as failed, where there is none, or with a cause."""
        if (ended := self._claims.over(caller)) is not None:
            return ended.status
        trajectory = self._claims.open(caller)
        if truncated and not trajectory.truncated:
            self._note(notes.Truncated(trajectory.trajectory))
        if known := {name: value for name, value in (metrics or {}).items() if math.isfinite(value)}:
            self._note(notes.MetricsTaken(trajectory.trajectory, known))
        self._end(trajectory, cause)
        return self._claims.ended[trajectory.trajectory].status

    def is_over(self, caller: AgentCaller) -> bool:
        return self._claims.over(caller) is not None

    def show(self, caller: AgentCaller) -> TrajectoryStatus:
        ended = self._claims.over(caller)
        return ended.status if ended is not None else self._status(self._claims.open(caller))

    # What agents ask

    def look_up(self, ask: LookUp) -> list[AgentTurn] | BranchFound:
        """The turns that the call joins, or the longest branch that its messages go on from."""
        trajectory = self._heard(ask.caller)
        self._limits.check_policy(ask.call.policy, 404)
        if joined := self._joined(trajectory, ask.call):
            return joined
        longest, known = trajectory.branches.longest(ask.chain, ask.call.policy), trajectory.known(ask.chain)
        if longest is None:
            return BranchFound(ask.request, trajectory.trajectory, known=known)
        matched, mark = longest
        ids = b""
        if ask.ids_before is not None:
            context = trajectory.branches.branches[mark.branch].token_ids
            ids = last_of(context, mark.tokens, mark.answer_tokens + ask.ids_before)
        return BranchFound(
            ask.request, trajectory.trajectory, mark.branch, mark.tokens, matched, mark.answer_tokens, ids, known
        )

    def recall(self, ask: RecallHistory) -> list[bytes]:
        """All that was said up to a turn's answer, piece by piece. Raises `CallRefused`."""
        # Of what viewers were answered nothing is kept.
        if not ask.caller.viewer and (pieces := self._heard(ask.caller).recall(ask.turn)):
            return pieces
        named = f"resp_{agent_id(ask.turn)}"
        raise CallRefused(
            400,
            "previous_response_not_found",
            f"Previous response with id {named!r} not found: no response of this trajectory that was stored has it.",
            param="previous_response_id",
        )

    def open(self, ask: OpenTurns) -> tuple[list[AgentTurn], bool]:
        """The call's turns, and whether it has joined them. Raises `CallRefused`."""
        trajectory, limits = self._heard(ask.caller), self._limits
        limits.check_policy(ask.call.policy, 404)
        choices = range(ask.first_choice, ask.first_choice + ask.choices)
        if joined := self._joined(trajectory, ask.call, choices):
            return joined, True
        left = limits.max_turns - trajectory.played
        if trajectory.truncated or left <= 0:
            if not trajectory.truncated:
                self._note(notes.Truncated(trajectory.trajectory))
            raise CallRefused(410, "max_turns", f"the trajectory has had its {limits.max_turns} turns", retry=False)
        if ask.choices > left:
            raise CallRefused(
                400, "max_turns", f"the trajectory has {left} turns left of {limits.max_turns}", param="n"
            )
        if len(self._turns) + ask.choices > limits.open_turns_max:
            said = f"{len(self._turns)} turns are open already; allowed: {limits.open_turns_max} (front.open_turns_max)"
            raise CallRefused(429, TOO_MANY_TURNS, said, retry_after_s=1.0)
        branch, tokens, ids = ask.branch, ask.tokens, ask.ids
        if branch is None:
            limits.check_ids(ids)
            branch, tokens = trajectory.branches.nearest(ids, ask.call.policy)
            ids = ids[tokens * TOKEN_BYTES :]
        prompt_tokens = tokens + len(ids) // TOKEN_BYTES
        sampling = limits.granted(ask.sampling, prompt_tokens, evaluated=is_evaluated(trajectory.trajectory))
        turns: list[AgentTurn] = []
        for choice in choices:
            asked = notes.TurnAsked(
                ask.call,
                choice,
                branch,
                tokens,
                ids,
                ask.sampling.seed if ask.sampling.seed is not None else self._seed,
                sampling.temperature,
                sampling.stop_token_ids,
            )
            turns.append(self._ask(trajectory, asked, sampling.max_new_tokens))
        return turns, False

    def _ask(self, trajectory: AgentTrajectory, asked: notes.TurnAsked, max_new_tokens: int) -> AgentTurn:
        turn = turn_id(trajectory.trajectory, trajectory.asked)
        try:
            opened = self._open(trajectory, turn, asked, max_new_tokens)
        except ValueError as error:
            raise CallRefused(409, "branch_gone", str(error)) from error
        self._feed(
            e.TurnRequested(
                turn=turn,
                trajectory=trajectory.trajectory,
                prompt_tokens=opened.at.prompt_tokens,
                max_new_tokens=max_new_tokens,
                tag=asked.call.route,
                note=notes.encode_note(asked),
            )
        )
        return opened

    def _open(
        self, trajectory: AgentTrajectory, turn: TurnId, asked: notes.TurnAsked, max_new_tokens: int
    ) -> AgentTurn:
        step, group, member = drawn_from(trajectory.trajectory)
        sampling = SamplingParameters(
            max_new_tokens=max_new_tokens,
            noise_seed=stable_hash(asked.seed, step, group, member, trajectory.asked),
            stop_token_ids=asked.stop_token_ids,
            temperature=asked.temperature,
            top_p=self._limits.top_p(evaluated=is_evaluated(trajectory.trajectory)),
        )
        opened = self._turns[turn] = trajectory.ask(turn, asked, sampling)
        return opened

    def _joined(
        self, trajectory: AgentTrajectory, call: AgentCall, choices: Sequence[int] | None = None
    ) -> list[AgentTurn]:
        """The turns of the call that this one repeats: of these choices, or all that it has."""
        try:
            joined = trajectory.calls.joined(call)
        except OtherBody as key:
            raise CallRefused(422, "idempotency_key_reused", f"the key {key} was another call's", retry=False) from key
        if joined is None:
            return []
        wanted = sorted(joined.turns) if choices is None else choices
        found = [trajectory.turns.get(joined.turns.get(choice, "")) for choice in wanted]
        turns = [turn for turn in found if turn is not None]
        if len(turns) < len(found):
            return []
        for turn in turns:
            turn.alone_ns = None
        return turns

    def said(self, turn: AgentTurn) -> tuple[bytes, bytes]:
        """The turn's ids and log-probabilities so far, packed."""
        trajectory = self._claims.trajectories.get(_trajectory(turn.id))
        return (b"", b"") if trajectory is None else trajectory.said(turn)

    def _heard(self, caller: AgentCaller) -> AgentTrajectory:
        trajectory = self._claims.open(caller)
        trajectory.heard_ns = self._clock_ns()
        return trajectory

    # Models elsewhere

    def upstream_status(self) -> UpstreamStatus | None:
        """What calls of models elsewhere have come to; None where there can be none."""
        bounds = self._limits.upstream
        return None if bounds is None else self._upstream.status(bounds)

    def leave(self, ask: AskUpstream) -> int | None:
        """The number of a call that may be made now; None where it has to wait. Raises `CallRefused`.

        A driver's key may name no trajectory.
        """
        bounds, caller = self._limits.upstream, ask.caller
        if bounds is None or caller.viewer:
            raise CallRefused(404, "model_not_found", f"no model {ask.model!r} here", param="model", retry=False)
        trajectory = self._heard(caller).trajectory if caller.trajectory or caller.named else ""
        leave = self._upstream.leave(ask, trajectory, bounds, self._clock_ns())
        if leave is None:
            return None
        self._note(leave)
        self._owing()
        return leave.call

    def called(self, over: UpstreamOver) -> None:
        """A call of a model elsewhere is over."""
        if (bounds := self._limits.upstream) is not None:
            self._bill(self._upstream.told(over, bounds))

    def lost_call(self, call: int) -> None:
        """Nobody will say what the call has come to."""
        self._bill(self._upstream.given_up(call, self._clock_ns()))

    def _bill(self, told: notes.UpstreamTold | None) -> None:
        if told is None:
            return
        asked = self._upstream.open[told.call]
        if told.status:
            # Before the account knows of it: what a crash leaves in between is billed twice rather than never.
            self._billed(call_of(self._upstream.named(asked.model), asked, told))
        self._note(told)
        self._owing()
        if (trajectory := self._claims.trajectories.get(asked.trajectory)) is not None:
            trajectory.heard_ns = self._clock_ns()
        self.watcher.freed()

    # What fronts say of turns

    def cut(self, turn: AgentTurn, kept: int) -> None:
        """The answer ends there; the turn is over. If it was before, its end is said with `settle`."""
        if turn.over:
            return
        self._cut(turn, min(kept, turn.tokens))
        self.watcher.over(turn)

    def settle(self, turn: AgentTurn, kept: int, answer: bytes, history: bytes = b"", behind: bytes = b"") -> None:
        """As in `SettleTurn`; said once more it changes nothing. Raises `CallRefused` for a turn that was given up, or
        is not over."""
        if turn.kept is not None:
            return
        if turn.id not in self._turns or not turn.over or not turn.finish:
            raise CallRefused(409, "turn_not_over", f"turn {turn.id} has no answer")
        if kept < turn.tokens:
            self._cut(turn, kept)
        if not self._claims.trajectories[_trajectory(turn.id)].keeps(answer, history, behind):
            history = b""
        self._note(notes.AnswerSettled(turn.id, kept, answer, history, behind))

    def deliver(self, turn: AgentTurn) -> None:
        trajectory = self._claims.trajectories.get(_trajectory(turn.id))
        if turn.kept is not None and not turn.given and trajectory is not None:
            trajectory.heard_ns = self._clock_ns()
            self._note(notes.AnswerGiven(turn.id))

    def alone(self, turn: AgentTurn, *, cut_off: bool = False) -> None:
        """No client waits for it any more: it has left, or was `cut_off` as its front ended."""
        turn.alone_ns, turn.cut_off = self._clock_ns(), cut_off

    def _cut(self, turn: AgentTurn, kept: int) -> None:
        lost = behind(turn.generated.runs, kept)
        turn.shorten(kept)
        self._feed(e.TurnCut(turn=turn.id, kept=kept, lost=lost))

    def look_after(self) -> None:
        """End what has waited for too long: turns without a client, idle trajectories, groups beyond their deadline."""
        now_ns, limits = self._clock_ns(), self._limits
        if limits.upstream is not None:
            for call in self._upstream.overdue(limits.upstream, now_ns):
                self.lost_call(call)
        calling = self._upstream.trajectories
        for turn in list(self._turns.values()):
            if turn.alone_ns is not None and now_ns - turn.alone_ns > ALONE_S * NS_PER_S:
                self._give_up(turn)
        for trajectory in list(self._claims.trajectories.values()):
            group = self._claims.groups.get(group_of(trajectory.trajectory))
            since_ns = now_ns if group is None or group.since_ns is None else group.since_ns
            times = limits.times(None if group is None else group.environment)
            if now_ns - since_ns > times.deadline_s * NS_PER_S:
                self._end(trajectory, "" if trajectory.worth is not None else f"not ended in {times.deadline_s:g} s")
            elif (
                now_ns - trajectory.heard_ns > times.idle_s * NS_PER_S
                and not trajectory.awaited
                and trajectory.trajectory not in calling
            ):
                self._end(trajectory, "" if trajectory.worth is not None else f"idle for {times.idle_s:g} s")
        self._give_back(now_ns)

    def _give_back(self, now_ns: Nanoseconds) -> None:
        """Members that nobody has asked for have failed: those of a group beyond its deadline, and sooner those that
        came in the place of others, of which a driver need not know."""
        for group in list(self._claims.groups.values()):
            limit_s, late = ALONE_S, [m for m, t in group.offered_ns.items() if now_ns - t > ALONE_S * NS_PER_S]
            deadline_s = self._limits.times(group.environment).deadline_s
            if group.since_ns is not None and now_ns - group.since_ns > deadline_s * NS_PER_S:
                limit_s, late = deadline_s, list(group.members)
            for member in late:
                group.take(member)
                cause = f"nobody asked for it in {limit_s:g} s"
                self._feed(e.TrajectoryFailed(trajectory=member, cause=cause), RolloutTrajectory(member, now_ns, 0))

    def _give_up(self, turn: AgentTurn) -> None:
        """A turn whose client is gone: nothing of it is trained."""
        self._cut(turn, 0)
        self._note(notes.Abandoned(turn.id))

    def _end(self, trajectory: AgentTrajectory, cause: str) -> None:
        """With a cause it has failed, and without a reward too."""
        name, turns = trajectory.trajectory, list(trajectory.turns)
        for turn in [turn for turn in trajectory.turns.values() if turn.kept is None]:
            self._give_up(turn)
        episode = trajectory.episode()
        if not cause and not episode.policy_tokens:
            cause = "its agent has asked for no turn"
        reward = trajectory.worth
        if not cause and reward is None and not self._scored_by_function:
            cause = "it was ended without a reward" + _for_policies(trajectory)
        state = "failed" if cause else "truncated" if trajectory.truncated else "finished"
        self._leave(name, state, cause, turns)
        if cause:
            self._feed(e.TrajectoryFailed(trajectory=name, cause=cause), episode)
            return
        self._finished.add(name, episode)
        tokens = episode.policy_tokens
        if reward is None:
            self._feed(e.RewardRequested(trajectory=name, tokens=tokens), episode)
            return
        by_policy = trajectory.by_policy(reward) if self._limits.policies else {}
        self._feed(e.TrajectoryFinished(trajectory=name, reward=reward, tokens=tokens, by_policy=by_policy), episode)

    # What the run asks

    def cancel_all(self) -> None:
        """Does nothing: agents end by themselves."""

    @contextlib.asynccontextmanager
    async def ending(self) -> AsyncIterator[None]:
        """A context at whose end nothing is left to end."""
        yield

    def start(self, group: c.StartGroup) -> None:
        self._claims.groups[group.group] = AgentGroup(
            list(group.trajectories), group.number, group.environment, group.place, group.row
        )
        self.watcher.offered()

    def refill(self, member: c.RefillMember) -> None:
        self._offer(member, self._clock_ns())
        self.watcher.offered()

    def _offer(self, member: c.RefillMember, now_ns: Nanoseconds) -> None:
        self._claims.groups[group_of(member.trajectory)].offer(member.trajectory, now_ns)

    def cancel(self, trajectory: TrajectoryId) -> None:
        self._finished.forget((trajectory,))  # It may be over, and wait to be scored.
        self._drop(trajectory, "the run has no use for it any more")

    def prompt(self, turn: TurnId) -> OpenTurn | None:
        found = self._turns.get(turn)
        return None if found is None or found.over else found.generated

    def accept(self, event: e.TokensReceived, accepted: c.AcceptTokens, payload: wire.Tokens | None) -> None:
        """Raises `KeyError` where a journal has the event, and not its tokens."""
        if payload is None:
            raise KeyError("the tokens that were accepted")
        ids, logprobs, worker, begin = payload.token_ids, payload.logprobs, event.worker, 0
        columns: list[tuple[AgentTurn, int, int]] = []
        kept: list[slice] = []
        names = accepted.names(len(event.chunks))
        for name, (_, _, count, version) in zip(names, event.chunks.plain, strict=True):
            end = begin + TOKEN_BYTES * count
            if count and (turn := self._turns.get(name)) is not None and not turn.over:
                turn.generated.accept(ids[begin:end], logprobs[begin:end], version, worker)
                columns.append((turn, version, count))
                kept.append(slice(begin, end))
            begin = end
        if columns:
            if len(columns) < len(names):
                ids, logprobs = (b"".join([column[part] for part in kept]) for column in (ids, logprobs))
            self.watcher.accepted(columns, bytes(ids), bytes(logprobs))

    def finish_turn(self, turn: TurnId) -> None:
        self.fail_turn(turn, "")

    def fail_turn(self, turn: TurnId, cause: str) -> None:
        found = self._turns.get(turn)
        if found is None or (found.over and not cause):
            return
        found.generated.ended = cause
        if cause:
            del self._turns[turn]
            if (trajectory := self._claims.trajectories.get(_trajectory(turn))) is not None:
                trajectory.withdraw(found)
        self.watcher.over(found)

    def finished(self, trajectory: TrajectoryId) -> FinishedTrajectory:
        return self._finished.to_score(trajectory, self._claims.groups[group_of(trajectory)].environment)

    def record_reward(self, trajectory: TrajectoryId, reward: float | None, cause: str) -> None:
        self._finished.record_reward(trajectory, reward)

    def take(self, trajectories: Sequence[TrajectoryId]) -> list[RolloutTrajectory]:
        self._forget_group(trajectories)
        return self._finished.take(trajectories)

    def drop(self, trajectories: Sequence[TrajectoryId]) -> list[RolloutTrajectory]:
        self._forget_group(trajectories)
        return self._finished.drop(trajectories)

    # From one process to the next

    def recalled(self, event: e.Event, command: c.Command | None) -> None:
        match command:
            case c.StartGroup():
                self.start(command)
            case c.RefillMember():
                self._offer(command, 0)
            case c.FinishTurn():
                self.finish_turn(command.turn)
            case c.FailTurn():
                self.fail_turn(command.turn, command.cause)
            case c.CancelTrajectory():
                self.cancel(command.trajectory)
            case c.RecordReward() if command.reward is None:
                self._finished.forget((command.trajectory,))
            case c.TrainGroup() | c.DropGroup():
                self._forget_group(command.trajectories)
                self._finished.forget(command.trajectories)
            case None:
                self._recall_event(event)
            case _:
                pass

    def _recall_event(self, event: e.Event) -> None:
        match event:
            case e.AgentNoted():
                self._apply(notes.decode_note(event.note))
            case e.TurnRequested():
                asked = notes.decode_note(event.note)
                trajectory = self._claims.trajectories.get(event.trajectory)
                if trajectory is not None and isinstance(asked, notes.TurnAsked):
                    self._open(trajectory, event.turn, asked, event.max_new_tokens)
            case e.TurnCut():
                if (turn := self._turns.get(event.turn)) is not None:
                    turn.shorten(event.kept)
            case e.RewardRequested() | e.TrajectoryFinished():
                if event.trajectory in self._claims.trajectories:
                    self._finished.add(event.trajectory, None)
                    truncated = self._claims.trajectories[event.trajectory].truncated
                    self._leave(event.trajectory, "truncated" if truncated else "finished", "", ())
            case e.TrajectoryFailed():
                self._leave(event.trajectory, "failed", event.cause, ())
                self._claims.unclaim(event.trajectory)
            case _:
                pass

    def saved(self) -> object:
        return self._claims, self._finished.saved(), self._upstream

    def restore(self, saved: tuple[Any, list[TrajectoryId], Any]) -> None:
        self._claims, finished, self._upstream = saved
        self._finished.restore(finished)
        self._turns = {
            turn.id: turn
            for trajectory in self._claims.trajectories.values()
            for turn in trajectory.turns.values()
            if turn.kept is None
        }

    def resume(self) -> None:
        """Clients have some time to ask again; what waits for its prompt gets it."""
        now_ns = self._clock_ns()
        for trajectory in self._claims.trajectories.values():
            trajectory.heard_ns = now_ns
            for turn in trajectory.turns.values():
                turn.alone_ns = now_ns
        for group in self._claims.groups.values():
            group.offered_ns = dict.fromkeys(group.offered_ns, now_ns)
        for turn in list(self._turns):
            self._prompted(turn)

    # What is kept

    def _note(self, note: notes.AgentNote) -> None:
        noted = e.AgentNoted(note=notes.encode_note(note))
        self._apply(note)
        self._feed(noted)

    def _apply(self, note: notes.AgentNote) -> None:
        trajectories = self._claims.trajectories
        match note:
            case notes.Begun():
                self._claims.give(note)
            case notes.Bound():
                self._claims.sessions[trajectories[note.trajectory].driver, note.session] = note.trajectory
            case notes.AnswerSettled():
                trajectory = trajectories[_trajectory(note.turn)]
                turn = self._turns.pop(note.turn)
                trajectory.settle(turn, note.kept, note.answer, self._limits.sampling.temperature)
                if note.history:
                    trajectory.histories[note.answer] = HistoryPiece(note.behind, note.history)
            case notes.AnswerGiven():
                trajectory = trajectories[_trajectory(note.turn)]
                if (given := trajectory.turns.get(note.turn)) is not None:
                    trajectory.deliver(given)
            case notes.Abandoned():
                if (turn := self._turns.pop(note.turn, None)) is not None:
                    trajectories[_trajectory(note.turn)].withdraw(turn)
            case notes.Rewarded():
                trajectories[note.trajectory].take_reward(note.policy, note.reward)
            case notes.MetricsTaken():
                trajectories[note.trajectory].metrics = note.metrics
            case notes.Truncated():
                trajectories[note.trajectory].truncated = True
            case notes.BegunAgain():
                if note.trajectory in trajectories:  # Else it is one of an environment that speaks token ids.
                    self._claims.begin_again(note.trajectory, note.tokens, ran=note.ran)
            case notes.UpstreamAsked() | notes.UpstreamTold() | notes.UpstreamCarried():
                self._upstream.apply(note)
            case notes.TurnAsked():
                raise AssertionError("calls come with the turns that they ask for")

    def _drop(self, trajectory: TrajectoryId, cause: str) -> None:
        """The run has no use for it any more: its turns come to nothing."""
        known = self._claims.trajectories.get(trajectory)
        turns = {} if known is None else dict(known.turns)
        for turn in turns.values():
            turn.generated.ended = turn.generated.ended or cause
        self._leave(trajectory, "dropped", cause, turns)
        self._claims.unclaim(trajectory)

    def _leave(self, trajectory: TrajectoryId, state: str, cause: str, turns: Iterable[TurnId]) -> None:
        """It is over, and so are `turns` for those who wait for them."""
        left = self._claims.trajectories.get(trajectory)
        if left is None:
            return
        for turn in left.turns:
            self._turns.pop(turn, None)
        self._claims.leave(trajectory, msgspec.structs.replace(self._status(left), state=state, cause=cause))
        self.watcher.left(turns)

    def _forget_group(self, trajectories: Sequence[TrajectoryId]) -> None:
        """The group is trained or dropped: its name means nothing any more."""
        for trajectory in trajectories:
            self._claims.former.pop(trajectory, None)
        for group in {group_of(trajectory) for trajectory in trajectories}:
            self._claims.groups.pop(group, None)

    def _status(self, trajectory: AgentTrajectory) -> TrajectoryStatus:
        return TrajectoryStatus(
            trajectory=trajectory.trajectory,
            group=trajectory.name,
            state="truncated" if trajectory.truncated else "open",
            turns=trajectory.played,
            tokens=trajectory.branches.tokens,
            branches=len(trajectory.branches.trained()),
            reward=trajectory.worth,
            policies=self._statuses(trajectory),
        )

    def _statuses(self, trajectory: AgentTrajectory) -> dict[str, PolicyStatus]:
        """Return the status of each policy that has a name of its own and was called or rewarded."""
        if not self._limits.policies:
            return {}
        turns = Counter(turn.call.policy for turn in trajectory.turns.values())
        tokens = Counter[str]()
        for branch in trajectory.branches.branches:
            tokens[branch.policy] += branch.sampled.tokens
        return {
            policy: PolicyStatus(
                turns=turns[policy], tokens=tokens[policy], reward=trajectory.policy_rewards.get(policy)
            )
            for policy in self._limits.policies
            if turns[policy] or policy in trajectory.policy_rewards
        }


def _for_policies(trajectory: AgentTrajectory) -> str:
    """Which policies have none, where others have rewards of their own."""
    named = [repr(policy) if policy else "the model's own name" for policy in trajectory.unrewarded]
    return f" for {' and '.join(named)}" if trajectory.policy_rewards and named else ""


def _trajectory(turn: TurnId) -> TrajectoryId:
    return turn.rpartition("/")[0]
