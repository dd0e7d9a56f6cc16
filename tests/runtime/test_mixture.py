"""Several ways of playing in one run: each hears of its own trajectories, also those of a former process."""

from typing import Any

from elastic.core import commands as c
from elastic.core import events as e
from elastic.core.types import InfrastructureCause, SamplingParameters
from elastic.environments.base import StepResult
from elastic.runtime.agents import AgentRollouts
from elastic.runtime.episodes import RolloutLimits
from elastic.runtime.mixture import MixedRollouts, played_by
from elastic.runtime.rollout import Rollouts
from tests.runtime.agents.test_agent_rollouts import LIMITS as AGENT_LIMITS

LIMITS = RolloutLimits(4, 64, 5.0, SamplingParameters(max_new_tokens=8, noise_seed=0), 8)


class Waits:
    stop_token_ids = ()

    async def reset(self, seed: int) -> list[int]:
        return [1]

    async def step(self, token_ids: list[int]) -> StepResult:
        return StepResult([], True, 1.0)

    async def truncate(self) -> float:
        return 0.0

    async def aclose(self) -> None:
        pass


def mixed() -> MixedRollouts:
    def feed(event: e.Event, payload: Any = None) -> None:
        """Nobody listens."""

    def spawn(work: Any, name: str) -> Any:
        work.close()  # Loops stay where they begin.

    make: Any = Waits
    loops = Rollouts(7, LIMITS, make, feed, lambda: 0, spawn, environment="lake")
    agents = AgentRollouts(7, AGENT_LIMITS, feed, lambda: 0)
    found = played_by({"lake": loops, "chat": agents, "tools": agents})
    assert isinstance(found, MixedRollouts)
    return found


def group(name: str, environment: str, place: int) -> c.StartGroup:
    members = tuple(f"{name}/{member}" for member in range(2))
    return c.StartGroup(step=0, group=name, index=0, trajectories=members, environment=environment, place=place)


def due(rollouts: MixedRollouts, worker: str) -> tuple[str, int] | None:
    player = next(one for one in rollouts.players if isinstance(one, AgentRollouts))
    begun = player.begin_due(worker)
    return None if begun is None else (begun.trajectory, begun.place)


def test_an_env_worker_is_given_groups_of_its_own_environment() -> None:
    rollouts = mixed()
    for start in (group("0/0", "lake", 0), group("0/1", "tools", 0), group("0/2", "chat", 4)):
        rollouts.start(start)
    assert due(rollouts, "chat_0") == ("0/2/0", 4)
    assert due(rollouts, "tools_11") == ("0/1/0", 0)
    assert due(rollouts, "chat_1") == ("0/2/1", 4)
    assert due(rollouts, "chat_1") is None


def test_another_process_knows_who_plays_what() -> None:
    starts = [group("0/0", "lake", 0), group("0/1", "tools", 0)]
    saved = mixed()
    for start in starts:
        saved.start(start)
    restored, recalled = mixed(), mixed()
    restored.restore(saved.saved())  # type: ignore[arg-type]
    for start in starts:
        recalled.recalled(e.Tick(), start)
    for rollouts in (restored, recalled):
        assert due(rollouts, "lake_0") is None
        rollouts.refill(c.RefillMember(trajectory="0/1/2", replaces="0/1/0", cause=InfrastructureCause.CAPACITY))
        rollouts.cancel("0/1/0")
        rollouts.cancel("0/1/1")
        assert due(rollouts, "tools_0") == ("0/1/2", 0)
        for start in starts:
            rollouts.drop(start.trajectories)
            rollouts.cancel(start.trajectories[0])
        assert due(rollouts, "tools_0") is None
