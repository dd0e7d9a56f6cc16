"""What orchestration costs: CPU time of a step's rollouts through orchestrator and worker, over the same in-process.

One side is a real run: this process is the orchestrator (gateway, core, environments, journal), and one worker
process generates all turns; the CPU time of both counts, from the first episode's reset to the last one's end. The
other side is the same engine in one process, driven by the least code that plays FrozenLake with it: what an engine
produces goes into the episode, and the next turn is asked for. Both play the same episodes, from the same seeds, and
the benchmark fails unless every trajectory is the same token for token. Rounds of new episodes alternate between the
two, and the figure is the median of the pairs' ratios.

Engines are paced, as the example's are (`cpu_ratio`). That is the fair comparison: with a modelled device both
sides run the same iterations, and what they differ in is orchestration, with everything that orchestration does by
the clock (heartbeats, commits, samples) counted over the time that a step takes. Unpaced (`unpaced_cpu_ratio`), the
engine here takes a few milliseconds an iteration, so it also counts that turns come back to the engine some
milliseconds later and its batches are a little smaller; no GPU's CPU time is like that.

It is a hard case: the model is the examples' (untrained), so small that an iteration over 16 turns costs 4 ms of
CPU, and its turns are short (`tokens_per_turn`), while most of what orchestration costs is by the turn.

Not counted on either side: the trainer's process, which sleeps meanwhile, and starting up.
"""

import asyncio
import multiprocessing
import multiprocessing.connection
import os
import queue
import tempfile
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median
from typing import Any, ClassVar, NamedTuple, TypeVar

import msgspec
from _common import Arguments, emit, parse_arguments
from _live import LiveRun, live_run, run_to_end, write_policy
from pydantic import BaseModel, ConfigDict

from elastic.config import Config
from elastic.core.trainer_device import TrainerMode
from elastic.core.types import WeightMode
from elastic.engine.base import GenerateRequest, RolloutEngine, TokenChunk
from elastic.envs.base import StepResult
from elastic.envs.frozenlake import FrozenLake, FrozenLakeSettings
from elastic.runtime.journal import JournalReader
from elastic.runtime.rollout import stable_hash
from providers.base import ProviderSettings
from providers.reserved import ReservedProvider

T = TypeVar("T")

SEED = 7
GROUP_SIZE = 8
WARM_UP_ROUNDS = 1
READY_TIMEOUT_S = 120.0
ROUND_TIMEOUT_S = 300.0

TokenIds = dict[str, list[int]]
"""By trajectory."""


def configuration(policy: Path, groups: int, *, paced: bool) -> Config:
    pacing = {"prefill_tokens_per_s": 8000, "decode_step_s": {1: 0.014, 8: 0.018, 16: 0.024}}
    return Config.model_validate(
        {
            "run": {"seed": SEED},
            "model": {"checkpoint": policy},
            "environment": {"step_timeout_s": 86_400},
            "rollout": {"groups": groups, "group_size": GROUP_SIZE},
            "engine": {"max_pending": 8, "pacing": pacing if paced else None},
            "seeding": {"window_s": 0},
        }
    )


# Orchestrated


class Gate:
    """Holds episodes back until their round, and measures CPU time from its first reset to its last end."""

    def __init__(self, rounds: int, groups: int) -> None:
        """Of `groups` groups each; one more group waits for ever, so that the run does."""
        self._round_of = {stable_hash(SEED, 0, group): group // groups for group in range(rounds * groups + 1)}
        self._open = [asyncio.Event() for _ in range(rounds + 1)]
        self._size = groups * GROUP_SIZE
        self._running = self._left = 0
        self._over = asyncio.Event()
        self._cpu_s: list[float] = []
        self.process_ids: list[int] = []

    async def play(self, number: int) -> list[float]:
        """CPU seconds of each process in a round."""
        self._left = self._size
        self._over.clear()
        began_s = self._spent_s()
        self._open[number].set()
        async with asyncio.timeout(ROUND_TIMEOUT_S):
            await self._over.wait()
        return [ended_s - start_s for start_s, ended_s in zip(began_s, self._cpu_s, strict=True)]

    async def enter(self, seed: int) -> None:
        await self._open[self._round_of[seed]].wait()

    def leave(self) -> None:
        self._left -= 1
        if not self._left:
            self._cpu_s = self._spent_s()
            self._over.set()

    def _spent_s(self) -> list[float]:
        return [cpu_s(process_id) for process_id in self.process_ids]


def cpu_s(process_id: int) -> float:
    """CPU time of a process by Linux's clock of it, to the nanosecond; what /proc says is in hundredths."""
    return time.clock_gettime((~process_id << 3) | 2)


class GatedSettings(BaseModel):
    model_config = ConfigDict(arbitrary_types_allowed=True)

    gate: Gate
    lake: FrozenLakeSettings


class GatedLake(FrozenLake):
    """FrozenLake round by round. Nothing is rewarded, so that no group is worth training on."""

    Settings: ClassVar[type[BaseModel]] = GatedSettings

    def __init__(self, settings: BaseModel) -> None:
        assert isinstance(settings, GatedSettings)
        super().__init__(settings.lake)
        self._gate = settings.gate
        self._entered = False

    async def reset(self, seed: int) -> list[int]:
        await self._gate.enter(seed)
        self._entered = True
        return await super().reset(seed)

    async def step(self, token_ids: Sequence[int]) -> StepResult:
        return msgspec.structs.replace(await super().step(token_ids), reward=0.0)

    async def aclose(self) -> None:
        await super().aclose()
        if self._entered:
            self._gate.leave()


async def settle(run: LiveRun) -> int:
    """Wait until the one worker has the turns to itself; its process id."""
    (worker,) = await run.until("the worker", lambda: run.ready("reserved"), READY_TIMEOUT_S)
    scheduler = run.orchestrator.scheduler
    await run.until("the trainer asleep", lambda: scheduler.trainer_mode is TrainerMode.ASLEEP, READY_TIMEOUT_S)
    return run.process_id(worker)


# In-process


@dataclass(slots=True)
class Player:
    """One episode under way: all it has said and heard, and what a trainer needs of the policy's own tokens."""

    coordinates: tuple[int, int, int]
    lake: FrozenLake
    token_ids: list[int]
    turns: int = 0
    turn: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    versions: list[int] = field(default_factory=list[int])


class InProcess:
    """Plays episodes on an engine of its own."""

    def __init__(self, config: Config) -> None:
        self._rollout = config.rollout
        self._context_tokens = config.engine.max_context_tokens
        self._produced: queue.SimpleQueue[Sequence[TokenChunk]] = queue.SimpleQueue()
        self._players: dict[str, Player] = {}
        self._engine = _engine(config)
        self._engine.start(self._produced.put)
        self._engine.load_weights(0, _tensors(config.model.checkpoint), WeightMode.FINISH)

    def play(self, groups: Sequence[int]) -> tuple[float, TokenIds]:
        """CPU seconds of this process for the groups' episodes, and what was said in them."""
        began_s = time.process_time()
        episodes: TokenIds = {}
        self._engine.submit([self._begin(group, member) for group in groups for member in range(GROUP_SIZE)])
        while self._players:
            self._engine.submit([request for chunk in self._produced.get() for request in self._take(chunk, episodes)])
        return time.process_time() - began_s, episodes

    def _begin(self, group: int, member: int) -> GenerateRequest:
        lake = FrozenLake(FrozenLakeSettings())
        return self._ask(Player((0, group, member), lake, _now(lake.reset(stable_hash(SEED, 0, group)))))

    def _ask(self, player: Player) -> GenerateRequest:
        name = "/".join(map(str, (*player.coordinates, player.turns)))
        self._players[name] = player
        return GenerateRequest(
            request_id=name,
            token_ids=list(player.token_ids),
            start=0,
            max_new_tokens=self._rollout.max_tokens_per_turn,
            stop_token_ids=FrozenLake.stop_token_ids,
            temperature=self._rollout.temperature,
            noise_seed=stable_hash(SEED, *player.coordinates, player.turns),
        )

    def _take(self, chunk: TokenChunk, episodes: TokenIds) -> list[GenerateRequest]:
        """Add to the turn; at its end, the next turn of the episode, if it has one."""
        player = self._players[chunk.request_id]
        player.turn += chunk.token_ids
        player.logprobs += chunk.logprobs
        player.versions += [chunk.weights_version] * len(chunk.token_ids)
        if chunk.finish is None:
            return []
        del self._players[chunk.request_id]
        result = _now(player.lake.step(player.turn))
        player.token_ids += player.turn
        player.turns += 1
        player.turn = []
        if not result.done:
            player.token_ids += result.token_ids
            room = len(player.token_ids) + self._rollout.max_tokens_per_turn <= self._context_tokens
            if room and player.turns < self._rollout.max_turns:
                return [self._ask(player)]
        episodes["/".join(map(str, player.coordinates))] = player.token_ids
        return []


def _engine(config: Config) -> RolloutEngine:
    from elastic.engine import create_engine
    from elastic.model.checkpoint import read_config

    return create_engine(read_config(config.model.checkpoint).to_dict(), config.engine)


def _tensors(checkpoint: Path) -> dict[str, Any]:
    from elastic.model.checkpoint import read_config, read_tensors

    return dict(read_tensors(checkpoint, read_config(checkpoint)))


def _now(answer: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that waits for nothing."""
    try:
        answer.send(None)
    except StopIteration as end:
        return end.value
    raise RuntimeError("the environment waits for something")


def play_in_process(pipe: multiprocessing.connection.Connection, config: Config, policy: Path) -> None:
    """A process's whole life: groups come in, CPU time and episodes go out. Makes the policy first."""
    write_policy(policy)
    side = InProcess(config)
    pipe.send(None)
    while (groups := pipe.recv()) is not None:
        pipe.send(side.play(groups))


# Both


class Round(NamedTuple):
    """CPU seconds of the same episodes, orchestrated (two processes) and in-process."""

    orchestrator_s: float
    worker_s: float
    in_process_s: float

    @property
    def ratio(self) -> float:
        return (self.orchestrator_s + self.worker_s) / self.in_process_s


async def compare(directory: Path, rounds: int, groups: int, *, paced: bool) -> tuple[list[Round], float]:
    """The rounds, and the tokens in a turn; raises `RuntimeError` if the two sides' episodes differ."""
    rounds += WARM_UP_ROUNDS
    directory.mkdir()  # noqa: ASYNC240 - nothing else runs yet
    policy, run_dir = directory / "policy", directory / "run"
    config = configuration(policy, rounds * groups + 1, paced=paced)
    near, far = multiprocessing.Pipe()
    other = multiprocessing.Process(target=play_in_process, args=(far, config, policy), daemon=True)
    other.start()
    far.close()
    try:
        await answer(near)
        gate = Gate(rounds, groups)
        settings = GatedSettings(gate=gate, lake=FrozenLakeSettings())
        providers = {"reserved": (ReservedProvider, ProviderSettings.model_validate({}))}
        played: list[Round] = []
        said: TokenIds = {}
        async with live_run(config, run_dir, providers, GatedLake, settings) as run:
            gate.process_ids = [os.getpid(), await settle(run)]
            for number in range(rounds):
                orchestrator_s, worker_s = await gate.play(number)
                near.send(range(number * groups, (number + 1) * groups))
                in_process_s, episodes = await answer(near)
                said |= episodes
                played.append(Round(orchestrator_s, worker_s, in_process_s))
    finally:
        other.kill()
        other.join()
    journaled, tokens_per_turn = read_journal(run_dir)
    if said != journaled:
        raise RuntimeError("the two sides did not say the same")
    return played[WARM_UP_ROUNDS:], tokens_per_turn


async def answer(pipe: multiprocessing.connection.Connection) -> Any:
    """The other process's next word, while this one's loop goes on."""
    if not await asyncio.to_thread(pipe.poll, ROUND_TIMEOUT_S):
        raise TimeoutError(f"the in-process side said nothing for {ROUND_TIMEOUT_S:g} s")
    return pipe.recv()


def read_journal(run_dir: Path) -> tuple[TokenIds, float]:
    """Finished trajectories, and the mean length of a turn."""
    reader = JournalReader(run_dir / "journal.sqlite")
    try:
        rows, turns = reader.rows("trajectories"), reader.rows("turns")
    finally:
        reader.close()
    finished = [row for row in rows if not row["cause"]]
    said = {row["trajectory"]: msgspec.msgpack.decode(row["token_ids"], type=list[int]) for row in finished}
    return said, mean(turn["tokens"] for turn in turns)


async def measure(rounds: int, groups: int, *, unpaced: bool) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        paced, tokens_per_turn = await compare(Path(name) / "paced", rounds, groups, paced=True)
        free = (await compare(Path(name) / "unpaced", rounds, groups, paced=False))[0] if unpaced else []
    return {
        "cpu_ratio": median(r.ratio for r in paced),
        "cpu_ratio_min": min(r.ratio for r in paced),
        "cpu_ratio_max": max(r.ratio for r in paced),
        "orchestrator_cpu_s": median(r.orchestrator_s for r in paced),
        "worker_cpu_s": median(r.worker_s for r in paced),
        "in_process_cpu_s": median(r.in_process_s for r in paced),
        "unpaced_cpu_ratio": median(r.ratio for r in free) if free else None,
        "pairs": len(paced),
        "trajectories": groups * GROUP_SIZE,
        "tokens_per_turn": tokens_per_turn,
    }


def main(arguments: Arguments) -> dict[str, Any]:
    multiprocessing.set_start_method("spawn")
    return run_to_end(measure(4, 3, unpaced=False) if arguments.quick else measure(7, 16, unpaced=True))


if __name__ == "__main__":
    emit(main(args := parse_arguments(__doc__)), args)
