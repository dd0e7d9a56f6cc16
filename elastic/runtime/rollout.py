"""Rollout loops: one task a trajectory, from its environment's reset to its reward.

A loop asks for a turn and waits; which workers generate it, and how often it moves, it never learns. What has been
accepted for a running trajectory is kept turn by turn: when its process dies, the next one's environment goes through
the finished turns once more and comes to where it was. An environment in an env worker that is gone goes through them
in another one; if it comes to something else there, the trajectory begins again, with turns of higher numbers. Its
reward is the environment's, unless a function is to compute it: then its trajectory ends once the core says so. An
episode that a limit of turns or tokens ends is truncated, and its environment says what it is worth so far. What is not
the policy's doing (an environment that raises, hangs or answers what its contract does not allow, a prompt that leaves
no room for a turn, a turn given up) ends the trajectory as failed, with its cause, and is never scored. However an
environment ends a loop, also by `SystemExit` or a `CancelledError` of its own, the core hears of it.
"""

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from itertools import islice
from types import TracebackType

import msgspec
import structlog

from elastic.core import commands as c
from elastic.core import events as e
from elastic.core.ids import drawn_from, turn_id
from elastic.core.types import SamplingParameters, TrajectoryId, TurnId
from elastic.environments.answers import Answers, BadAnswer
from elastic.environments.base import Environment
from elastic.protocol import wire
from elastic.protocol.sampled import TOKEN_BYTES, ids_of
from elastic.runtime.agents import notes
from elastic.runtime.episodes import (
    FinishedEpisodes,
    OpenTurn,
    RolloutLimits,
    RolloutTrajectory,
    ScoringSettings,
    stable_hash,
)
from elastic.runtime.hosted import EpisodeLost, ReplayDiffers
from elastic.runtime.journal import TrajectoryRow
from elastic.runtime.ports import Feed
from elastic.runtime.status import LostPlays
from elastic.runtime.tasks import Spawn
from elastic.system.plain_values import told
from functions.rewards import FinishedTrajectory

log = structlog.get_logger(__name__)


_ENDS = (asyncio.CancelledError, GeneratorExit)
"""How a loop ends that is told to."""
STUBBORN_S = 2.0
"""How long an environment may take to end once it is told to. It may catch what tells it."""
BEGUN_AT_ONCE = 1_024
DIVERGED_MAX = 3
"""How often a trajectory begins again whose environment does not repeat itself; then it has failed."""
"""Trajectories that begin before the event loop comes to others: a step's may be tens of thousands, each costs the time
of its environment's making and of a decision, and a busy loop comes to the next ones some ten times a second only."""
_TOLD_TIMES = 5
"""How often the loops that are left at the end are told so, `STUBBORN_S` apart, before they are left behind."""


class TurnFailed(Exception):
    """The turn was given up for a cause that is not the policy's."""


class Diverged(Exception):
    """The environment behaves differently than in the process before this one."""


class Unanswered(Exception):
    """The environment did not answer in time."""


class NoRoom(Exception):
    """The context has no room for a single turn after the prompt."""


class _TimeToAnswer:
    """The context of one call of an environment. Raises `Unanswered`, also where the call held the event loop for so
    long that no timer could end it. `give_up` is called if what tells the call to end does not end it.

    A class, as a call may be left behind with its loop, which ends no generator in order.
    """

    def __init__(
        self, limit_s: float, clock_ns: Callable[[], int], give_up: Callable[[], None], told_to_end: Callable[[], bool]
    ) -> None:
        self._limit_s, self._clock_ns = limit_s, clock_ns
        self._give_up, self._told_to_end = give_up, told_to_end
        self._limit = asyncio.timeout(limit_s)

    async def __aenter__(self) -> None:
        self._began_ns = self._clock_ns()
        self._stubborn = asyncio.get_running_loop().call_later(self._limit_s + STUBBORN_S, self._give_up)
        await self._limit.__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stubborn.cancel()
        try:
            await self._limit.__aexit__(kind, error, trace)
        except TimeoutError as late:
            raise Unanswered(unanswered(self._limit_s)) from late
        if isinstance(error, TimeoutError) and self._limit.expired():
            raise Unanswered(unanswered(self._limit_s)) from error
        if error is not None:
            return
        if self._told_to_end():
            raise asyncio.CancelledError  # The environment has caught it.
        if self._clock_ns() - self._began_ns > self._limit_s * 1e9:
            raise Unanswered(unanswered(self._limit_s))


def unanswered(limit_s: float) -> str:
    return f"the environment did not answer within {limit_s:g} s"


class Rollouts:
    """The loops of the trajectories that run now (`elastic.runtime.ports.Trajectories`).

    `feed` takes events to the core, `clock_ns` is the run's time. Without `scoring` the environments score. `stored`
    reads what a trajectory came to that finished in an earlier process, `prompted` is told of each turn that a
    recalled trajectory was at, once its environment is there; `raised` gets what each environment raised. `environment`
    is its name.
    """

    def __init__(
        self,
        seed: int,
        limits: RolloutLimits,
        make_environment: Callable[[], Environment],
        feed: Feed,
        clock_ns: Callable[[], int],
        spawn: Spawn,
        scoring: ScoringSettings | None = None,
        stored: Callable[[TrajectoryId], TrajectoryRow] | None = None,
        prompted: Callable[[TurnId], None] = lambda _: None,
        raised: Callable[[BaseException], None] = lambda _: None,
        environment: str = "",
    ) -> None:
        self._running: dict[TrajectoryId, list[OpenTurn]] = {}
        """Their turns, the one in progress last."""
        self._open: dict[TurnId, OpenTurn] = {}
        """Those in progress."""
        self._left: dict[TrajectoryId, list[int]] = {}
        """The turns with which running trajectories have begun again."""
        self.lost = LostPlays()
        """What trajectories had come to that have begun again."""
        self._finished = FinishedEpisodes(seed, scoring, stored)
        self._seed = seed
        self._limits = limits
        self._make_environment = make_environment
        self._feed = feed
        self._clock_ns = clock_ns
        self._spawn = spawn
        self._scored_by_function = scoring is not None
        self._prompted = prompted
        self._raised = raised
        self._environment = environment
        self._tasks: dict[TrajectoryId, asyncio.Task[None]] = {}
        self._to_begin: dict[TrajectoryId, None] = {}
        """Those that are about to begin, in order."""
        self._told_to_end: set[TrajectoryId] = set()
        self._ending = False

    def start(self, group: c.StartGroup) -> None:
        for trajectory in group.trajectories:
            self._running[trajectory] = []
        self._begin_all(group.trajectories)

    def refill(self, member: c.RefillMember) -> None:
        self._running[member.trajectory] = []
        self._begin_all((member.trajectory,))

    def recalled(self, event: e.Event, command: c.Command | None) -> None:
        match command:
            case c.StartGroup():
                self._running |= {trajectory: [] for trajectory in command.trajectories}
            case c.RefillMember():
                self._running[command.trajectory] = []
            case c.FinishTurn():
                self.finish_turn(command.turn)
            case c.FailTurn():
                self.fail_turn(command.turn, command.cause)
            case c.CancelTrajectory():
                self._leave(command.trajectory)
                self._finished.forget((command.trajectory,))
            case c.RecordReward() if command.reward is None:
                self._finished.forget((command.trajectory,))
            case c.TrainGroup() | c.DropGroup():
                self._finished.forget(command.trajectories)
            case None:
                self._recall_event(event)
            case _:
                pass

    def _recall_event(self, event: e.Event) -> None:
        match event:
            case e.TurnRequested():
                if event.trajectory in self._running:
                    self._open_turn(event.trajectory, OpenTurn(event.turn, event.prompt_tokens))
            case e.RewardRequested() | e.TrajectoryFinished():
                if self._leave(event.trajectory):
                    self._finished.add(event.trajectory, None)
            case e.TrajectoryFailed():
                self._leave(event.trajectory)
            case e.AgentNoted():
                note = notes.decode_note(event.note)
                if isinstance(note, notes.BegunAgain) and note.trajectory in self._running:
                    self._begin_again(note)
            case _:
                pass

    def _begin_again(self, note: notes.BegunAgain) -> None:
        begun = self._left.setdefault(note.trajectory, [])
        begun.append((begun[-1] if begun else 0) + len(self._running[note.trajectory]))
        self._running[note.trajectory] = []
        self.lost.times, self.lost.tokens = self.lost.times + 1, self.lost.tokens + note.tokens

    def _open_turn(self, trajectory: TrajectoryId, turn: OpenTurn) -> None:
        self._running[trajectory].append(turn)
        self._open[turn.id] = turn

    def _leave(self, trajectory: TrajectoryId) -> bool:
        """The trajectory does not run any more. Returns whether it did."""
        turns = self._running.pop(trajectory, None)
        self._left.pop(trajectory, None)
        if turns:
            self._open.pop(turns[-1].id, None)
        return turns is not None

    def saved(self) -> object:
        """The turns of trajectories that run, without what only this process has of them, and who has finished."""
        turns = {
            trajectory: [OpenTurn(t.id, t.prompt_tokens, t.token_ids, t.logprobs, t.runs, t.ended) for t in of]
            for trajectory, of in self._running.items()
        }
        return turns, self._finished.saved(), self._left, self.lost

    def restore(
        self,
        saved: tuple[dict[TrajectoryId, list[OpenTurn]], list[TrajectoryId], dict[TrajectoryId, list[int]], LostPlays],
    ) -> None:
        self._running, finished, self._left, self.lost = saved
        self._open = {turn.id: turn for turns in self._running.values() for turn in turns if turn.ended is None}
        self._finished.restore(finished)

    def resume(self) -> None:
        self._begin_all(self._running)

    def _begin_all(self, trajectories: Iterable[TrajectoryId]) -> None:
        begins = not self._to_begin
        self._to_begin |= dict.fromkeys(trajectories)
        if begins and self._to_begin:
            self._spawn(self._begin_in_order(), "beginning trajectories")

    async def _begin_in_order(self) -> None:
        """Begin what is about to, not too many at once."""
        while self._to_begin:
            for trajectory in list(islice(self._to_begin, BEGUN_AT_ONCE)):
                self._begin(trajectory)
            await asyncio.sleep(0)

    def _begin(self, trajectory: TrajectoryId) -> None:
        del self._to_begin[trajectory]
        task = self._tasks[trajectory] = self._spawn(self._run(trajectory), f"trajectory {trajectory}")
        task.add_done_callback(lambda _: self._forget(trajectory))

    def _forget(self, trajectory: TrajectoryId) -> None:
        self._tasks.pop(trajectory, None)
        self._told_to_end.discard(trajectory)

    def cancel(self, trajectory: TrajectoryId) -> None:
        if trajectory in self._to_begin:
            del self._to_begin[trajectory]
            self._leave(trajectory)
        self._finished.forget((trajectory,))  # It may be over, and wait to be scored.
        task = self._tasks.get(trajectory)
        if task is not None:
            self._told_to_end.add(trajectory)
            task.cancel()

    def cancel_all(self) -> None:
        self._ending = True
        self._to_begin.clear()
        for task in list(self._tasks.values()):
            task.cancel()

    @contextlib.asynccontextmanager
    async def ending(self) -> AsyncIterator[None]:
        """A context, at whose end all loops end. However that comes, no environment is to blame for it.

        Those whose environments catch what tells them to end are told so again, and then left behind.
        """
        try:
            yield
        finally:
            self.cancel_all()
            for _ in range(_TOLD_TIMES):
                if self._tasks:
                    await asyncio.wait(self._tasks.values(), timeout=STUBBORN_S)
                    self.cancel_all()
            for trajectory, task in self._tasks.items():
                log.warning("environment does not end: left behind", trajectory=trajectory)
                asyncio.tasks._unregister_task(task)  # Else the end of the event loop would wait for it.

    def _is_told_to_end(self, trajectory: TrajectoryId) -> bool:
        """Whether what ends this loop comes from outside of its environment. An environment may raise whatever the
        event loop itself would, and cancel the task that it runs in."""
        try:
            return self._ending or trajectory in self._told_to_end or asyncio.current_task() is None
        except RuntimeError:  # Without an event loop, it is what is left of one that was closed.
            return True

    def prompt(self, turn: TurnId) -> OpenTurn | None:
        found = self._open.get(turn)
        return found if found is not None and found.done is not None else None

    def accept(self, event: e.TokensReceived, accepted: c.AcceptTokens, payload: wire.Tokens | None) -> None:
        """Raises `KeyError` where a journal has the event, and not its tokens."""
        if payload is None:
            raise KeyError("the tokens that were accepted")
        ids, logprobs, worker, begin = payload.token_ids, payload.logprobs, event.worker, 0
        names = accepted.names(len(event.chunks))
        for name, (_, _, count, version) in zip(names, event.chunks.plain, strict=True):
            end = begin + TOKEN_BYTES * count
            if count and (turn := self._open.get(name)) is not None:
                turn.accept(ids[begin:end], logprobs[begin:end], version, worker)
            begin = end

    def finish_turn(self, turn: TurnId) -> None:
        """Let the turn's loop go on with its tokens."""
        self.fail_turn(turn, "")

    def fail_turn(self, turn: TurnId, cause: str) -> None:
        if (found := self._open.pop(turn, None)) is not None:
            found.end(cause)

    def finished(self, trajectory: TrajectoryId) -> FinishedTrajectory:
        return self._finished.to_score(trajectory, self._environment)

    def record_reward(self, trajectory: TrajectoryId, reward: float | None, cause: str) -> None:
        self._finished.record_reward(trajectory, reward)

    def take(self, trajectories: Sequence[TrajectoryId]) -> list[RolloutTrajectory]:
        return self._finished.take(trajectories)

    def drop(self, trajectories: Sequence[TrajectoryId]) -> list[RolloutTrajectory]:
        return self._finished.drop(trajectories)

    async def _run(self, trajectory: TrajectoryId) -> None:
        step, group, _ = drawn_from(trajectory)
        begun_ns, seed = self._clock_ns(), stable_hash(self._seed, step, group)
        episode = RolloutTrajectory(trajectory, begun_ns, seed)
        try:
            while True:
                environment = self._make_environment()
                try:
                    await self._play(episode, environment)
                    break
                except ReplayDiffers as differs:
                    if (times := len(self._left.get(trajectory, ()))) >= DIVERGED_MAX:
                        raise Diverged(f"it was begun {times + 1} times: {differs}") from differs
                    again = notes.BegunAgain(trajectory, str(differs), episode.policy_tokens)
                    self._begin_again(again)
                    self._feed(e.AgentNoted(note=notes.encode_note(again)))
                    episode = RolloutTrajectory(trajectory, begun_ns, seed)
                finally:
                    await self._close(episode, environment)
        except (TurnFailed, Diverged, NoRoom, BadAnswer, Unanswered, EpisodeLost) as failure:
            self._failed(episode, str(failure))
        except BaseException as error:
            if isinstance(error, _ENDS) and self._is_told_to_end(trajectory):
                raise
            self._raised(error)
            self._failed(episode, f"the environment raised {told(error)}")
        else:
            self._over(episode)
        finally:
            self._leave(trajectory)

    async def _close(self, episode: RolloutTrajectory, environment: Environment) -> None:
        if isinstance(sys.exception(), GeneratorExit):
            return  # It was left behind with its loop: nothing can be awaited any more.
        try:
            async with self._time_to_answer(episode):
                await environment.aclose()
        except BaseException as error:  # what the episode came to stands
            if isinstance(error, _ENDS) and self._is_told_to_end(episode.trajectory):
                raise
            log.warning("environment not closed", error=told(error))

    def _over(self, episode: RolloutTrajectory) -> None:
        trajectory, tokens = episode.trajectory, episode.policy_tokens
        if trajectory in self._told_to_end:
            return
        self._finished.add(trajectory, episode)
        if self._scored_by_function:
            self._feed(e.RewardRequested(trajectory=trajectory, tokens=tokens), episode)
        else:
            self._feed(
                e.TrajectoryFinished(trajectory=trajectory, reward=episode.sampled.reward, tokens=tokens), episode
            )

    def _failed(self, episode: RolloutTrajectory, cause: str) -> None:
        if episode.trajectory not in self._told_to_end:
            self._feed(e.TrajectoryFailed(trajectory=episode.trajectory, cause=cause), episode)

    def _give_up(self, episode: RolloutTrajectory, limit_s: float) -> None:
        """Go on without an environment that catches what tells it to end. Its loop is told so again, and unheard."""
        if self._ending:
            return
        self._failed(episode, f"{unanswered(limit_s)}, and does not end")
        self._leave(episode.trajectory)
        self.cancel(episode.trajectory)

    async def _play(self, episode: RolloutTrajectory, environment: Environment) -> None:
        limits, sampling = self._limits, self._limits.sampling_of(episode.trajectory)
        step, group, member = drawn_from(episode.trajectory)
        answers = Answers(type(environment).__name__, limits.vocab_size)
        async with self._time_to_answer(episode):
            prompt = await environment.reset(episode.seed)
        episode.observe(answers.prompt(prompt))
        episode.tag = answers.tag(getattr(environment, "tag", ""))
        if not self._has_room(episode):
            raise NoRoom(
                f"the prompt leaves no room for a turn of {sampling.max_new_tokens} tokens "
                f"in a context of {limits.max_context_tokens}"
            )
        while episode.turns < limits.max_turns and self._has_room(episode):
            number = self._first_turn(episode.trajectory) + episode.turns
            drawn = msgspec.structs.replace(
                sampling,
                noise_seed=stable_hash(self._seed, step, group, member, number),
                stop_token_ids=environment.stop_token_ids,
            )
            turn = await self._generate(episode, drawn)
            episode.act(turn)
            async with self._time_to_answer(episode):
                answer = await environment.step(ids_of(turn.token_ids))
            result = answers.step(answer)
            if result.done:
                episode.sampled.reward = result.reward
                return
            episode.observe(result.token_ids)
        episode.truncated = True
        async with self._time_to_answer(episode):
            reward = await environment.truncate()
        episode.sampled.reward = answers.reward("truncate", reward)

    def _time_to_answer(self, episode: RolloutTrajectory) -> contextlib.AbstractAsyncContextManager[None]:
        if (limit_s := self._limits.environment_timeout_s) is None:
            return contextlib.nullcontext()
        return _TimeToAnswer(
            limit_s,
            self._clock_ns,
            give_up=lambda: self._give_up(episode, limit_s),
            told_to_end=lambda: self._is_told_to_end(episode.trajectory),
        )

    def _has_room(self, episode: RolloutTrajectory) -> bool:
        most_tokens = self._limits.sampling_of(episode.trajectory).max_new_tokens
        return episode.tokens + most_tokens <= self._limits.max_context_tokens

    def _first_turn(self, trajectory: TrajectoryId) -> int:
        """The number of the turn that the trajectory has begun with, the last time that it did."""
        return self._left.get(trajectory, [0])[-1]

    async def _generate(self, episode: RolloutTrajectory, sampling: SamplingParameters) -> OpenTurn:
        trajectory, tokens = episode.trajectory, episode.tokens
        turns = self._running[trajectory]
        recalled = episode.turns < len(turns)
        if not recalled:
            name = turn_id(trajectory, self._first_turn(trajectory) + episode.turns)
            self._open_turn(trajectory, OpenTurn(name, tokens))
        turn = turns[episode.turns]
        if turn.prompt_tokens != tokens:
            raise Diverged(
                f"the environment did not repeat itself: {turn.id} began with {turn.prompt_tokens} tokens before the "
                f"orchestrator was restarted, and with {tokens} after it"
            )
        if turn.ended is None:
            turn.prompt, turn.sampling = episode.token_ids, sampling
            turn.done = asyncio.get_running_loop().create_future()
            if recalled:
                self._prompted(turn.id)
            else:
                self._ask_for(turn, episode, sampling)
            await turn.done
        if turn.ended:
            raise TurnFailed(turn.ended)
        return turn

    def _ask_for(self, turn: OpenTurn, episode: RolloutTrajectory, sampling: SamplingParameters) -> None:
        self._feed(
            e.TurnRequested(
                turn=turn.id,
                trajectory=episode.trajectory,
                prompt_tokens=turn.prompt_tokens,
                max_new_tokens=sampling.max_new_tokens,
                tag=episode.tag,
            )
        )
