"""Agents and their driver: they append, edit, ask for several choices, call in parallel, repeat, vanish and end late.

They outlive the run's processes, and go on where they are.
"""

import asyncio
import itertools
from collections.abc import Callable, Coroutine
from hashlib import blake2b
from random import Random
from typing import Any, TypeVar

import msgspec

from elastic.core.types import TrajectoryId
from elastic.protocol import front_messages as m
from elastic.testing.faults.shell.agents.fronts import (
    AgentAsk,
    FrontGone,
    FrontRefusal,
    Message,
    ModelFront,
    ReplacedFronts,
    StreamTorn,
)
from elastic.testing.faults.shell.agents.record import AgentRecord
from elastic.testing.faults.shell.models import VOCABULARY

T = TypeVar("T")

DRIVER, OTHER_DRIVER = "main", "unknown"
POLICIES = ("critic",)
"""Names of the model besides its own."""
GROUP_SIZE = 2
TRY_AGAIN = 429, 500, 503
OUT_OF_DATE = "branch_gone", "turn_not_over"
AGAIN_S = 0.05, 1.0
VANISH_S = 0.01, 0.6
PAUSES_S = 0.05, 0.5, 2.0
LONG_PAUSE_S = 33.0
"""Longer than a turn goes on whose client has vanished."""
LEFT_ALONE, UNFINISHED, FAILED = 1 / 24, 1 / 12, 1 / 24
"""Shares of groups of which a member is never asked for, and of trajectories that are never ended, or end as failed."""


class Over(Exception):
    """The trajectory is over."""


class Agents:
    """All agents of a run, whose groups they play as many at once. `scored` says whether functions give the rewards."""

    def __init__(self, chance: Random, groups: int, scored: bool, found: Callable[[str], None]) -> None:
        self.record = AgentRecord()
        self._chance = chance
        self._groups = groups
        self._scored = scored
        self._found = found
        self.fronts = ReplacedFronts(lambda: ModelFront(self.record, self._found))
        self._numbers = itertools.count()

    async def live(self) -> None:
        self.fronts.begin()
        await asyncio.gather(*(self._drive() for _ in range(self._groups)))

    # The driver

    async def _drive(self) -> None:
        while True:
            group = f"group {next(self._numbers)}"
            members = 1 if self._chance.random() < LEFT_ALONE else GROUP_SIZE
            await asyncio.gather(*(self._member(group, number) for number in range(members)))

    async def _member(self, group: str, number: int) -> None:
        try:
            await self._play(await self._begin(group, f"{group}/{number}"))
        except Over:
            await asyncio.sleep(AGAIN_S[1])

    async def _begin(self, group: str, key: str) -> TrajectoryId:
        """Have a member of the group, asked for with an idempotency key."""
        caller = m.AgentCaller(driver=DRIVER)
        for _ in range(1 + (self._chance.random() < 1 / 8)):
            began = await self._surely(
                lambda front: front.request(
                    lambda request: m.BeginTrajectory(request, caller, b"{}", group, key, [f"session {key}"])
                )
            )
            known = self.record.begun.setdefault(key, began.trajectory)
            if known != began.trajectory:
                self._found(f"{key} has begun {known}, and {began.trajectory} as it was asked for again")
        return self.record.begun[key]

    async def _surely(self, ask: Callable[[ModelFront], Coroutine[Any, Any, T]], *, owned: bool = True) -> T:
        """Ask until there is an answer. What is asked for is `owned` by who asks.

        Raises `Over`, and `FrontRefusal` for what cannot be.
        """
        while True:
            front = self._chance.choice(self.fronts.all)
            try:
                return await ask(front)
            except (FrontGone, StreamTorn):
                pass
            except FrontRefusal as refused:
                if refused.status == 410 or refused.code == "max_turns":
                    raise Over from None
                if refused.status == 404 and owned:
                    self.record.unknown.append(str(refused))
                    raise Over from None
                if refused.status not in TRY_AGAIN and refused.code not in OUT_OF_DATE:
                    raise
            await asyncio.sleep(self._chance.uniform(*AGAIN_S))

    # An agent

    async def _play(self, trajectory: TrajectoryId) -> None:
        agent = Agent(self, self._chance, trajectory, self._caller(trajectory))
        await self._is_nobody_elses(trajectory)
        await agent.play()
        await self._conclude(agent.caller, trajectory)

    def _caller(self, trajectory: TrajectoryId) -> m.AgentCaller:
        session = next(f"session {key}" for key, begun in self.record.begun.items() if begun == trajectory)
        return self._chance.choice(
            (
                m.AgentCaller(trajectory=trajectory),
                m.AgentCaller(driver=DRIVER, named=trajectory.replace("/", "-")),
                m.AgentCaller(driver=DRIVER, named=session),
            )
        )

    async def _is_nobody_elses(self, trajectory: TrajectoryId) -> None:
        """Another driver reaches neither the trajectory nor its session."""
        if self._chance.random() > 1 / 8:
            return
        named = self._chance.choice((trajectory.replace("/", "-"), self._caller(trajectory).named or "nothing"))
        foreign = m.AgentCaller(driver=OTHER_DRIVER, named=named)
        try:
            await self._surely(
                lambda front: front.request(lambda request: m.ShowTrajectory(request, foreign)), owned=False
            )
        except FrontRefusal as refused:
            if refused.status == 404:
                return
        except Over:
            pass
        self._found(f"another driver reaches {trajectory} as {named!r}")

    async def _conclude(self, caller: m.AgentCaller, trajectory: TrajectoryId) -> None:
        if self._chance.random() < UNFINISHED:
            return
        if not self._scored:
            await self._reward(caller, trajectory)
            await self._reward_policies(caller, trajectory)
        cause = "its agent broke" if self._chance.random() < FAILED else ""
        for _ in range(self._chance.choice((1, 1, 2))):
            await self._surely(lambda front: front.request(lambda request: m.EndTrajectory(request, caller, cause)))

    async def _reward(self, caller: m.AgentCaller, trajectory: TrajectoryId) -> None:
        reward = float(self._chance.randrange(2))
        for _ in range(self._chance.choice((1, 1, 2))):
            await self._give(caller, reward)
            self.record.rewards[trajectory] = reward
        if self._chance.random() < 1 / 8:
            try:
                await self._give(caller, reward + 1)
            except FrontRefusal as refused:
                if refused.status == 409:
                    return
                raise
            self._found(f"{trajectory} was given the rewards {reward} and {reward + 1}")

    async def _reward_policies(self, caller: m.AgentCaller, trajectory: TrajectoryId) -> None:
        """Give some policies rewards of their own."""
        for policy in POLICIES:
            chance = chance_of(trajectory, policy)
            if chance.random() < 1 / 2:
                reward = float(chance.randrange(2))
                await self._give(caller, reward, policy)
                self.record.policy_rewards[trajectory, policy] = reward

    async def _give(self, caller: m.AgentCaller, reward: float, policy: str = "") -> None:
        await self._surely(lambda front: front.request(lambda request: m.GiveReward(request, caller, reward, policy)))

    async def ask(self, asked: AgentAsk) -> list[Message]:
        """A call of an agent, which is made again until it has its answer. Raises `Over`."""

        async def serve(front: ModelFront) -> list[Message]:
            nonlocal asked
            serving, asked = asked, _marked(asked, self._chance)
            return await front.serve(serving)

        return await self._surely(serve)


def chance_of(trajectory: TrajectoryId, what: str) -> Random:
    """What is drawn for a trajectory apart from all else, so that it moves nothing else."""
    return Random(f"{trajectory} {what}")


def _marked(asked: AgentAsk, chance: Random) -> AgentAsk:
    """The call as a client makes it again: with or without a mark that says so."""
    retry = asked.call.retry or chance.random() < 1 / 2
    return asked._replace(call=msgspec.structs.replace(asked.call, retry=retry))


class Agent:
    """Plays one trajectory."""

    def __init__(self, agents: Agents, chance: Random, trajectory: TrajectoryId, caller: m.AgentCaller) -> None:
        self.caller = caller
        self._agents = agents
        self._chance = chance
        self._trajectory = trajectory
        self._names = chance_of(trajectory, "names")
        self._history: tuple[Message, ...] = (self._said(5),)
        self._calls = itertools.count()

    def _said(self, tokens: int) -> Message:
        return tuple(self._chance.randrange(1, VOCABULARY) for _ in range(tokens))

    async def play(self) -> None:
        for _ in range(self._chance.choice((1, 1, 2, 3, 4))):
            act = self._chance.choice(
                (self._append, self._append, self._edit, self._choose, self._both, self._same, self._abandon)
            )
            await act()
            if self._chance.random() < 1 / 8:
                await asyncio.sleep(self._chance.choice(PAUSES_S))

    def _asked(self, messages: tuple[Message, ...], choices: int = 1) -> AgentAsk:
        chance, chat = self._chance, self._chance.random() < 3 / 4
        stop = chance.randrange(1, VOCABULARY) if chance.random() < 1 / 6 else None
        seed = chance.randrange(9) if chance.random() < 1 / 8 else None
        policy = self._names.choice(("", "", *POLICIES))
        digest = blake2b(repr((messages, choices, stop, seed, policy)).encode(), digest_size=m.DIGEST_BYTES).digest()
        key = f"{self._trajectory} {next(self._calls)}" if chance.random() < 1 / 6 else ""
        return AgentAsk(
            self.caller,
            m.AgentCall("chat" if chat else "completions", digest, key, policy=policy),
            messages,
            chat,
            stream=chance.random() < 1 / 2,
            choices=choices,
            stop=stop,
            sampling=m.WantedSampling(seed=seed),
        )

    async def _call(self, asked: AgentAsk) -> list[Message]:
        """Make the call, perhaps vanish in the middle of it, and make it again."""
        if self._chance.random() < 1 / 5:
            answers = await self._for_a_while(asked)
            if answers is not None:
                return answers
            long = self._chance.random() < 1 / 16
            await asyncio.sleep(LONG_PAUSE_S if long else self._chance.choice(PAUSES_S))
            asked = _marked(asked, self._chance)
        return await self._agents.ask(asked)

    async def _for_a_while(self, asked: AgentAsk) -> list[Message] | None:
        """Make the call, and leave before it is answered, or not."""
        calling = asyncio.create_task(self._agents.ask(asked), name="agent")
        await asyncio.wait([calling], timeout=self._chance.uniform(*VANISH_S))
        calling.cancel()
        await asyncio.wait([calling])
        return None if calling.cancelled() else calling.result()

    async def _abandon(self) -> None:
        """Make a call, and leave for good; sometimes say something else."""
        if await self._for_a_while(self._asked(self._history)) is None and self._chance.random() < 1 / 2:
            self._history += (self._said(2),)

    async def _append(self) -> None:
        (answer,) = await self._call(self._asked(self._history))
        self._history += (answer, self._said(3))

    async def _edit(self) -> None:
        """Go on from a part of its history, or from another one."""
        kept = self._chance.randrange(len(self._history))
        self._history = (*self._history[:kept], self._said(2))
        await self._append()

    async def _choose(self) -> None:
        answers = await self._call(self._asked(self._history, self._chance.choice((2, 3))))
        self._history += (self._chance.choice(answers), self._said(3))

    async def _both(self) -> None:
        """Two calls at once, from one history."""
        others = [(*self._history, self._said(2)) for _ in range(2)]
        calls = [self._call(self._asked(messages)) for messages in others]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
            self._history = (*others[1], *answer, self._said(3))

    async def _same(self) -> None:
        """The same call twice: the second one is another turn."""
        asked = self._asked(self._history)
        asked = asked._replace(call=msgspec.structs.replace(asked.call, key=""))
        await self._call(asked)
        (answer,) = await self._call(asked)
        self._history += (answer, self._said(3))
