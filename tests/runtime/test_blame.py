"""Whose doing a death of an env worker is: tasks that kill have failed, and no others, by either way to play them."""

import asyncio
import random
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.core import commands as c
from elastic.core import events as e
from elastic.core.ids import env_worker_id
from elastic.core.types import TrajectoryId
from elastic.environments.base import StepResult
from elastic.protocol.front_messages import AgentCall, AgentCaller
from elastic.runtime.agents import EnvWorkerOrder, EnvWorkers, EnvWorkersOrder
from elastic.runtime.agents.trajectory import AgentTurn
from elastic.runtime.blame import ALONE_MAX, NO_DEATHS, TOGETHER_MAX, WAITED_MAX, Blame, Floor
from elastic.runtime.hosted import EpisodeLost
from tests.runtime.agents.test_agent_rollouts import Bench
from tests.runtime.test_hosted import Adding, Workers, workers
from tests.seeds import examples
from tests.standing_clock import StandingClock

__all__ = ["workers"]  # A fixture.

DEATHS_MAX = TOGETHER_MAX + ALONE_MAX


@given(st.lists(st.booleans(), max_size=40))
def test_an_episode_is_alone_before_it_fails_however_it_was_struck(struck: list[bool]) -> None:
    deaths, alone = NO_DEATHS, 0
    for running in struck:
        if deaths.failed:
            break
        alone += deaths.alone
        deaths = deaths.one_more(running=running)
    assert alone >= ALONE_MAX or not deaths.failed
    assert deaths.failed or len(struck) < WAITED_MAX + DEATHS_MAX


class Played:
    """Trajectories of agents in env workers, each of which is killed by a task that kills, and now and then by chance.

    A killer kills as its code runs; `while_waiting` too, as others of its branches wait for the policy.
    """

    def __init__(self, rng: random.Random, tasks: int, killers: int, strikes: int, *, while_waiting: bool) -> None:
        self.rng = rng
        self.bench = Bench()
        self.strikes_left, self.struck = strikes, 0
        self.deaths = Counter[TrajectoryId]()
        """That a killer has brought about."""
        self.names = [f"1/{number}/0" for number in range(tasks)]
        self.killers = set(rng.sample(self.names, killers))
        self.drivers = [env_worker_id("tools", number) for number in range(rng.randint(1, 3))]
        self.slots = rng.randint(1, 6)
        self.while_waiting = while_waiting
        for name in self.names:
            group = name.rpartition("/")[0]
            start = c.StartGroup(step=1, group=group, index=0, trajectories=(name,), environment="tools")
            self.bench.rollouts.start(start)
        self.plays: dict[TrajectoryId, tuple[str, int, int]] = {}
        """By whom, under which restart, and how many turns it has had."""

    def take(self) -> None:
        """Env workers take what is due, in some order."""
        order = [driver for driver in self.drivers for _ in range(self.slots)]
        self.rng.shuffle(order)
        for driver in order:
            if sum(by == driver for by, *_ in self.plays.values()) < self.slots:
                begun = self.bench.rollouts.begin_due(driver)
                if begun is not None:
                    self.plays[begun.trajectory] = driver, begun.restart, 0
        claims, *_ = self.bench.rollouts.saved()  # type: ignore[misc]
        for name, (driver, *_) in self.plays.items():
            beside = [one for one, (by, *_) in self.plays.items() if by == driver]
            assert beside == [name] or not claims.deaths(name).alone, "it is to be alone"

    def die(self, driver: str) -> None:
        self.bench.rollouts.hold(driver, (), "it was killed")
        self.plays = {name: play for name, play in self.plays.items() if play[0] != driver}

    def go_on(self, name: TrajectoryId | None = None) -> None:
        """One of them, if not this one, does something."""
        name = name or self.rng.choice(sorted(self.plays))
        driver, restart, turns = self.plays[name]
        if self.strikes_left and self.rng.random() < 0.1:
            self.strikes_left, self.struck = self.strikes_left - 1, self.struck + 1
            self.die(driver)
        elif name in self.killers and turns:
            if self.while_waiting:
                self.ask(name, restart, b"waits")
            self.deaths[name] += 1
            self.die(driver)
        elif turns < 2:
            turn = self.ask(name, restart, b"%d" % turns)
            self.bench.generate(turn, 8)
            self.bench.rollouts.settle(turn, 8, b"")
            self.bench.rollouts.deliver(turn)
            self.plays[name] = driver, restart, turns + 1
        else:
            own = AgentCaller(driver=driver, named=name.replace("/", "-"))
            self.bench.rollouts.reward(own, 1.0)
            self.bench.rollouts.end(own, "")
            del self.plays[name]

    def ask(self, name: TrajectoryId, restart: int, call: bytes) -> AgentTurn:
        caller = AgentCaller(trajectory=name, restart=restart)
        (turn,), _ = self.bench.ask(AgentCall("chat", call), None, 0, [1, 2], caller=caller)
        return turn


@settings(max_examples=examples(24, 60), deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 14), st.integers(0, 4), st.integers(0, ALONE_MAX - 1), st.booleans())
def test_killers_fail_and_nobody_else(seed: int, innocents: int, killers: int, strikes: int, waiting: bool) -> None:
    played = Played(random.Random(seed), innocents + killers, killers, strikes, while_waiting=waiting)
    for _ in range(100 * len(played.names)):
        played.take()
        if not played.plays:
            break
        played.go_on()
    ended = played.bench.ended
    assert ended.keys() == set(played.names)
    failed = {name for name, (event, _) in ended.items() if isinstance(event, e.TrajectoryFailed)}
    assert failed == played.killers
    most = DEATHS_MAX + WAITED_MAX if waiting else DEATHS_MAX
    assert all(deaths <= most for deaths in played.deaths.values())


def test_env_workers_that_need_not_be_emptied_are_given_more() -> None:
    played = Played(random.Random(1), 12, 0, 0, while_waiting=False)
    played.drivers, played.slots = ["tools_0", "tools_1"], 3
    played.take()
    begun = [name for name, (by, *_) in played.plays.items() if by == "tools_0"]
    played.die("tools_0")
    played.take()
    assert [name for name, (by, *_) in played.plays.items() if by == "tools_0"] == begun, "together, as before"
    played.die("tools_0")
    for alone in begun:
        played.take()
        assert [name for name, (by, *_) in played.plays.items() if by == "tools_0"] == [alone]
        assert sum(by == "tools_1" for by, *_ in played.plays.values()) == 3
        while alone in played.plays:
            played.go_on(alone)


class Lethal(Adding):
    """Whoever steps it with 13 dies."""

    kill = staticmethod(lambda: None)

    async def step(self, token_ids: list[int]) -> StepResult:
        await asyncio.sleep(0)
        if 13 in token_ids:
            self.kill()
            await asyncio.Event().wait()
        return await super().step(token_ids)


@pytest.mark.parametrize("seed", range(6))
async def test_of_episodes_in_token_ids_too(seed: int, workers: Workers) -> None:
    rng, deaths = random.Random(seed), Counter[str]()
    names = [f"theirs_{number}" for number in range(rng.randint(1, 3))]
    killers = set(rng.sample(range(16), rng.randint(1, 4)))
    strikes = [rng.choice(names) for _ in range(seed % ALONE_MAX)]

    async def keep(driver: str) -> None:
        """Start it again and again."""
        while True:
            killed = asyncio.Event()
            kind = cast("type[Adding]", type("Kind", (Lethal,), {"kill": staticmethod(killed.set)}))
            cut = await workers.begin(driver, kind)
            if driver in strikes:
                strikes.remove(driver)
                asyncio.get_running_loop().call_later(rng.uniform(0.001, 0.02), killed.set)
            await killed.wait()
            deaths[driver] += 1
            cut()

    async def play(number: int) -> float:
        environment = workers.hosts.make("theirs")
        await environment.reset(number)
        await environment.step([1])
        await environment.step([13 if number in killers else 2])
        return (await environment.step([3])).reward

    keeping = [asyncio.create_task(keep(name)) for name in names]
    ends = await asyncio.gather(*(play(number) for number in range(16)), return_exceptions=True)
    for task in keeping:
        task.cancel()
    for number, end in enumerate(ends):
        assert isinstance(end, EpisodeLost) if number in killers else end == float((number + 6) % 64), number
    assert deaths.total() <= DEATHS_MAX * len(killers) + seed % ALONE_MAX


async def test_a_floor_is_given_in_the_order_in_which_it_was_asked_for() -> None:
    floor, on_it = Floor(), list[str]()

    async def stay(name: str, leave: asyncio.Event) -> None:
        alone = name.startswith("alone")
        await floor.take(alone=alone)
        on_it.append(name)
        await leave.wait()
        on_it.remove(name)
        floor.give(alone=alone)

    leave = {name: asyncio.Event() for name in ("one", "two", "alone", "left", "three", "four")}
    staying = {name: asyncio.create_task(stay(name, event)) for name, event in leave.items()}

    async def settled() -> list[str]:
        for _ in range(5):
            await asyncio.sleep(0)
        return sorted(on_it)

    assert await settled() == ["one", "two"]
    staying["left"].cancel()
    leave["one"].set()
    assert await settled() == ["two"], "nobody overtakes who is to be alone"
    leave["two"].set()
    assert await settled() == ["alone"]
    leave["alone"].set()
    assert await settled() == ["four", "three"]
    leave["three"].set()
    leave["four"].set()
    await asyncio.gather(*staying.values(), return_exceptions=True)


class Ended:
    """It has ended, or does so once it is killed, if it has no `status` yet."""

    def __init__(self, status: int | None) -> None:
        self.status = status
        self._over = asyncio.Event()
        if status is not None:
            self._over.set()

    @property
    def over(self) -> bool:
        return self._over.is_set()

    async def wait(self) -> int | None:
        await self._over.wait()
        return self.status

    def kill(self) -> None:
        assert not self.over
        self.status = -9
        self._over.set()


class Dying:
    """Env workers that are over as soon as they have begun, by these blames, or that never dial, if their `status` is
    None; `done` has what they have got done when so many have begun. The last of either holds on."""

    def __init__(
        self, blames: Sequence[Blame], done: Sequence[int] = (0,), status: int | None = -9, heard_s: float | None = None
    ) -> None:
        self.started = 0
        self._status, self._heard_s = status, heard_s
        self.why, self.bad_input = "", False
        self._blames, self._done = blames, done

    async def take_over(self, names: Collection[str]) -> None: ...

    def get(self, name: str) -> None: ...

    def start(self, name: str, command: Sequence[str], environment: Mapping[str, str]) -> Ended:
        self.started += 1
        return Ended(self._status)

    async def forget(self, name: str) -> None: ...

    def log(self, name: str) -> Path:
        return Path("none")

    async def aclose(self, drain_s: float) -> None: ...

    def heard_s(self, driver: str) -> float | None:
        return self._heard_s

    def unusable(self, driver: str) -> str:
        return self.why

    def done(self, driver: str) -> int:
        return self._done[min(self.started, len(self._done) - 1)]

    def lost(self, driver: str, holds: Collection[TrajectoryId], cause: str) -> Blame:
        return self._blames[min(self.started, len(self._blames)) - 1]


def failure(dying: Dying, run_dir: Path) -> str:
    """Why the run of such env workers fails."""
    causes = list[str]()
    order = EnvWorkerOrder(command=(), variables={}, start_timeout_s=9.0, step_timeout_s=1.0, max_restarts=3)
    workers = EnvWorkersOrder(run_dir=run_dir, workers={"theirs_0": order}, secrets=())

    async def until_it_fails() -> None:
        failed = asyncio.Event()

        def fail(cause: str, *, bad_input: bool = False) -> None:
            assert bad_input == dying.bad_input
            causes.append(cause)
            failed.set()

        kept = EnvWorkers(workers, dying, fail, dying)
        await kept.start()
        await failed.wait()
        await kept.aclose()

    with asyncio.Runner(loop_factory=StandingClock) as runner:
        runner.run(until_it_fails())
    return causes[0]


@pytest.mark.parametrize(
    ("dying", "deaths"),
    [
        (Dying([Blame.WORKERS]), 4),
        (Dying([Blame.ANY, Blame.ANY, Blame.ANY, Blame.EPISODES]), 7),
        (Dying([*[Blame.EPISODES] * 20, Blame.WORKERS], [1]), 24),
        (Dying([Blame.WORKERS], [0, 0, 0, 1]), 6),
        (Dying([Blame.WORKERS], status=3, heard_s=0.0), 4),
        (Dying([Blame.WORKERS], status=None, heard_s=-1.0), 4),
    ],
    ids=[
        "do nothing",
        "die of each episode",
        "die of some, and then do nothing",
        "have done something in between",
        "could begin once",
        "hang now, and did not before",
    ],
)
def test_env_workers_that_die_by_themselves_fail_the_run(dying: Dying, deaths: int, tmp_path: Path) -> None:
    cause = failure(dying, tmp_path)
    assert dying.started == deaths
    assert "env worker theirs_0 has ended" in cause
    assert "environment.max_restarts" in cause


def test_code_that_cannot_be_used_ends_the_run_at_once_unless_it_could_be_before(tmp_path: Path) -> None:
    dying = Dying([Blame.WORKERS])
    dying.why, dying.bad_input = "environment.settings.rewards: no such function", True
    assert (failure(dying, tmp_path), dying.started) == (dying.why, 1)
    worked = Dying([Blame.WORKERS], [1])
    worked.why = dying.why
    assert "has ended 4 times" in failure(worked, tmp_path)


@pytest.mark.parametrize(
    ("status", "told"),
    [
        (
            3,
            "settings: env worker theirs_0 could not begin: exited with status 3; it said nothing; allowed: code",
        ),
        (
            None,
            "start_timeout_s: env worker theirs_0 could not begin: it did not dial the run within 9 s; it said",
        ),
    ],
    ids=["ends", "hangs"],
)
def test_the_first_start_that_loads_no_code_ends_the_run(status: int | None, told: str, tmp_path: Path) -> None:
    dying = Dying([Blame.WORKERS], status=status)
    dying.bad_input = True
    assert failure(dying, tmp_path).startswith(f"environment.{told}")
    assert dying.started == 1
