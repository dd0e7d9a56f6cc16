"""What orchestration costs: CPU time of a training step through orchestrator and one worker, over the same in-process.

One side is a real run: this process is the orchestrator (gateway, core, environments, journal), and one process, the
trainer's, generates all turns, trains and publishes the weights; the CPU time of both counts, from the step's first
reset until the next step could begin. The other side is the same engine and the same trainer in one process, driven
by the least code that plays episodes with them: what the engine produces goes into the episode, the next turn is
asked for, finished groups are trained, and the new weights go back into the engine. Both play the same episodes
from the same seeds, and the benchmark fails unless every trajectory is the same token for token; as each step plays
with the weights that the one before it learned, these are the same too. Steps alternate between the two sides, and a
figure is the median of the pairs' ratios: `cpu_ratio` of whole steps, `rollout_cpu_ratio` until the last episode's
end alone, where nearly all of the orchestration is.

`cpu_ratio` is of the engine as it is, as fast as this machine's processor. With engines paced to a modelled device, as
the example's are, the same step costs more (`paced_cpu_ratio`): it takes several times as long, so there is more of
what orchestration does by the clock (flushes, heartbeats, commits, samples), and every process wakes to caches that
another has used meanwhile.

Most of what orchestration costs is by the turn, so the length of turns decides. `cpu_ratio` is for turns of 32 tokens
on average, geometrically distributed: still short, since turns of coding agents have a median of 198 tokens
(`traces/data/claude-code-sessions.csv.gz`). `short_turns_cpu_ratio` is for the example's environment, whose turns an
untrained policy ends after some seven tokens, on paced engines: the toy's hard case. The model is the examples' in
both, so small that an iteration over 16 turns costs 4 ms of CPU. Episodes are rewarded by the parity of a turn's
length or of its tokens, so that there is something to train on.

Not counted on either side: starting up.
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
from _live import live_run, run_to_end, write_policy
from _paced import FixedTask, TaskSettings
from pydantic import BaseModel

from elastic import wire
from elastic.config import Config
from elastic.core.types import SamplingParameters, WeightMode
from elastic.engine.base import GenerateRequest, RolloutEngine, TokenChunk
from elastic.envs.base import Environment, StepResult
from elastic.envs.frozenlake import FrozenLake, FrozenLakeSettings
from elastic.runtime.journal import RunDirectory, TrajectoryRow, TurnRow
from elastic.runtime.rollout import stable_hash
from elastic.weights.source import TensorSource

T = TypeVar("T")

SEED = 7
GROUP_SIZE = 8
WARM_UP_STEPS = 1
READY_TIMEOUT_S = 120.0
STEP_TIMEOUT_S = 300.0

TokenIds = dict[str, list[int]]
"""By trajectory."""

Task = type[FixedTask] | type[FrozenLake]


class Cost(NamedTuple):
    """CPU seconds of a step, and of its rollouts alone."""

    step_s: float
    rollout_s: float

    def __add__(self, other: "Cost") -> "Cost":  # pyright: ignore[reportIncompatibleMethodOverride]
        return Cost(self.step_s + other.step_s, self.rollout_s + other.rollout_s)


class ParityLake(FrozenLake):
    """FrozenLake that rewards something of which even an untrained policy does more or less."""

    async def step(self, token_ids: Sequence[int]) -> StepResult:
        return msgspec.structs.replace(await super().step(token_ids), reward=float(len(token_ids) % 2))


class Talk(FixedTask):
    """Four turns that each end with the one stop token: an untrained policy says it every 32 tokens."""

    stop_token_ids: ClassVar[tuple[int, ...]] = (0,)


class Case(NamedTuple):
    """What is played, and how long a turn may get."""

    task: Task
    settings: BaseModel
    max_tokens_per_turn: int


TALK = Case(Talk, TaskSettings(prompts={"": 24}, turns=4, observations={"": 6}), max_tokens_per_turn=96)
LAKE = Case(ParityLake, FrozenLakeSettings(), max_tokens_per_turn=16)


def configuration(policy: Path, case: Case, steps: int, groups: int, *, paced: bool) -> Config:
    pacing = {"prefill_tokens_per_s": 8000, "decode_step_s": {1: 0.01, 8: 0.012, 16: 0.016}}
    return Config.model_validate(
        {
            "run": {"seed": SEED, "steps": steps},
            "model": {"checkpoint": policy},
            "environment": {"step_timeout_s": 86_400},
            "rollout": {"groups": groups, "group_size": GROUP_SIZE, "max_tokens_per_turn": case.max_tokens_per_turn},
            "trainer": {"learning_rate": 3e-4, "updates_per_step": 2},
            "engine": {"max_pending": 8, "pacing": pacing if paced else None},
        }
    )


# Orchestrated


class Gate:
    """Holds a step's episodes back until it is to be played, and measures the processes' CPU time.

    A step ends when the first episode of the next one arrives: what it learned is published by then.
    """

    def __init__(self, steps: int, groups: int) -> None:
        self._step_of = {stable_hash(SEED, step, group): step for step in range(steps) for group in range(groups)}
        self._open = [asyncio.Event() for _ in range(steps)]
        self._arrived = [asyncio.Event() for _ in range(steps)]
        self._size = groups * GROUP_SIZE
        self._left = 0
        self._ended_s: list[float] = []
        self._rolled_out_s: list[float] = []
        self.process_ids: list[int] = []

    async def play(self, step: int) -> list[Cost]:
        """What a step costs each process."""
        async with asyncio.timeout(STEP_TIMEOUT_S):
            await self._arrived[step].wait()
            self._left = self._size
            began_s = self._spent_s()
            self._open[step].set()
            await self._arrived[step + 1].wait()
        times = zip(began_s, self._ended_s, self._rolled_out_s, strict=True)
        return [Cost(ended_s - start_s, rolled_out_s - start_s) for start_s, ended_s, rolled_out_s in times]

    async def enter(self, seed: int) -> None:
        step = self._step_of[seed]
        if not self._arrived[step].is_set():
            self._ended_s = self._spent_s()
            self._arrived[step].set()
        await self._open[step].wait()

    def leave(self) -> None:
        self._left -= 1
        if not self._left:
            self._rolled_out_s = self._spent_s()

    def _spent_s(self) -> list[float]:
        return [cpu_s(process_id) for process_id in self.process_ids]


def cpu_s(process_id: int) -> float:
    """CPU time of a process by Linux's clock of it, to the nanosecond; what /proc says is in hundredths."""
    return time.clock_gettime((~process_id << 3) | 2)


def gated(task: Task, gate: Gate) -> type[Environment]:
    """The task, step by step."""

    class Gated(task):  # pyright: ignore[reportGeneralTypeIssues]
        entered = False

        async def reset(self, seed: int) -> list[int]:
            await gate.enter(seed)
            self.entered = True
            return await super().reset(seed)

        async def aclose(self) -> None:
            await super().aclose()
            if self.entered:
                gate.leave()

    return Gated


# In-process


@dataclass(slots=True)
class Player:
    """One episode under way: all it has said and heard, and what a trainer needs of the policy's own tokens."""

    coordinates: tuple[int, int, int]
    environment: FixedTask | FrozenLake
    data: wire.TrajectoryData
    turns: int = 0
    turn: list[int] = field(default_factory=list[int])

    def hear(self, token_ids: list[int]) -> None:
        self._add(token_ids, 0, [0.0] * len(token_ids), 0)

    def say(self, chunk: TokenChunk) -> None:
        self.turn += chunk.token_ids
        self._add(chunk.token_ids, 1, chunk.logprobs, chunk.weights_version)

    def _add(self, token_ids: Sequence[int], trained: int, logprobs: Sequence[float], version: int) -> None:
        self.data.token_ids.extend(token_ids)
        self.data.trained.extend([trained] * len(token_ids))
        self.data.logprobs.extend(logprobs)
        self.data.versions.extend([version] * len(token_ids))


class InProcess:
    """Trains on episodes that it plays on an engine of its own."""

    def __init__(self, config: Config, case: Case) -> None:
        from elastic.model.checkpoint import load_model
        from elastic.trainer.trainer import GRPOTrainer

        self._case = case
        self._rollout = config.rollout
        self._context_tokens = config.engine.max_context_tokens
        self._produced: queue.SimpleQueue[Sequence[TokenChunk]] = queue.SimpleQueue()
        self._players: dict[str, Player] = {}
        self._engine = _engine(config)
        model = load_model(config.model.checkpoint, "cpu")
        self._trainer = GRPOTrainer(config.trainer, model, config.rollout.groups, config.rollout.temperature)
        self._engine.start(self._produced.put)
        self._load_weights()

    def play(self, step: int) -> tuple[Cost, TokenIds]:
        """What a step costs this process, and what was said in it."""
        began_s = time.process_time()
        episodes = [[self._begin(step, group, member) for member in range(GROUP_SIZE)] for group in self._groups]
        self._engine.submit([self._ask(player) for group in episodes for player in group])
        while self._players:
            self._engine.submit([request for chunk in self._produced.get() for request in self._take(chunk)])
        rolled_out_s = time.process_time()
        for group, players in enumerate(episodes):
            trajectories = [player.data for player in players]
            self._trainer.train_group(wire.TrainGroupFrame(step, f"{step}/{group}", group, trajectories))
        self._trainer.update()
        self._load_weights()
        cost = Cost(time.process_time() - began_s, rolled_out_s - began_s)
        return cost, {player.data.trajectory: player.data.token_ids for group in episodes for player in group}

    @property
    def _groups(self) -> range:
        return range(self._rollout.groups)

    def _load_weights(self) -> None:
        self._engine.load_version(TensorSource(self._trainer.version, self._trainer.bf16_tensors()), WeightMode.FINISH)

    def _begin(self, step: int, group: int, member: int) -> Player:
        environment = self._case.task(self._case.settings)
        data = wire.TrajectoryData(f"{step}/{group}/{member}", [], [], [], [], 0.0)
        player = Player((step, group, member), environment, data)
        player.hear(_now(environment.reset(stable_hash(SEED, step, group))))
        return player

    def _ask(self, player: Player) -> GenerateRequest:
        name = f"{player.data.trajectory}/{player.turns}"
        self._players[name] = player
        return GenerateRequest(
            request_id=name,
            token_ids=list(player.data.token_ids),
            start=0,
            sampling=SamplingParameters(
                max_new_tokens=self._rollout.max_tokens_per_turn,
                stop_token_ids=self._case.task.stop_token_ids,
                temperature=self._rollout.temperature,
                noise_seed=stable_hash(SEED, *player.coordinates, player.turns),
            ),
        )

    def _take(self, chunk: TokenChunk) -> list[GenerateRequest]:
        """Add to the turn; at its end, the next turn of the episode, if it has one."""
        player = self._players[chunk.request_id]
        player.say(chunk)
        if chunk.finish is None:
            return []
        del self._players[chunk.request_id]
        result = _now(player.environment.step(player.turn))
        player.turns += 1
        player.turn = []
        if result.done:
            player.data = msgspec.structs.replace(player.data, reward=result.reward)
            return []
        player.hear(result.token_ids)
        room = len(player.data.token_ids) + self._rollout.max_tokens_per_turn <= self._context_tokens
        return [self._ask(player)] if room and player.turns < self._rollout.max_turns else []


def _engine(config: Config) -> RolloutEngine:
    from elastic.engine import create_engine
    from elastic.model.checkpoint import read_config

    return create_engine(read_config(config.model.checkpoint).to_dict(), config.engine)


def _now(answer: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that waits for nothing."""
    try:
        answer.send(None)
    except StopIteration as end:
        return end.value
    raise RuntimeError("the environment waits for something")


def play_in_process(pipe: multiprocessing.connection.Connection, config: Config, case: Case) -> None:
    """A process's whole life: steps come in, CPU time and episodes go out. Makes the policy first."""
    import torch

    write_policy(config.model.checkpoint)
    torch.set_num_threads(config.trainer.threads)
    side = InProcess(config, case)
    pipe.send(None)
    while (step := pipe.recv()) is not None:
        pipe.send(side.play(step))


# Both


class Scale(NamedTuple):
    """Pairs of steps, the groups in each, and whether paced engines and short turns are measured as well."""

    steps: int
    groups: int
    whole: bool


FULL = Scale(steps=7, groups=8, whole=True)
QUICK = Scale(steps=4, groups=8, whole=False)


class Pair(NamedTuple):
    """The same step, orchestrated (two processes) and in-process."""

    orchestrator: Cost
    worker: Cost
    in_process: Cost

    @property
    def ratios(self) -> Cost:
        both = self.orchestrator + self.worker
        return Cost(both.step_s / self.in_process.step_s, both.rollout_s / self.in_process.rollout_s)


async def compare(directory: Path, case: Case, steps: int, groups: int, *, paced: bool) -> tuple[list[Pair], float]:
    """The pairs, and the tokens in a turn; raises `RuntimeError` if the two sides' episodes differ."""
    steps += WARM_UP_STEPS
    directory.mkdir()  # noqa: ASYNC240 - nothing else runs yet
    policy, run_dir = directory / "policy", directory / "run"
    config = configuration(policy, case, steps + 1, groups, paced=paced)
    near, far = multiprocessing.Pipe()
    other = multiprocessing.Process(target=play_in_process, args=(far, config, case), daemon=True)
    other.start()
    far.close()
    try:
        await answer(near)
        gate = Gate(steps + 1, groups)
        task = gated(case.task, gate)
        played: list[Pair] = []
        said: TokenIds = {}
        async with live_run(config, run_dir, {}, task, case.settings) as run:
            trainer = await run.until("the trainer", run.orchestrator.scheduler.trainer, READY_TIMEOUT_S)
            gate.process_ids = [os.getpid(), run.process_id(trainer)]
            for step in range(steps):
                orchestrator, worker = await gate.play(step)
                near.send(step)
                in_process, episodes = await answer(near)
                said |= episodes
                played.append(Pair(orchestrator, worker, in_process))
    finally:
        other.kill()
        other.join()
    journaled, tokens_per_turn = read_journal(run_dir)
    if said != journaled:
        raise RuntimeError("the two sides did not say the same")
    return played[WARM_UP_STEPS:], tokens_per_turn


async def answer(pipe: multiprocessing.connection.Connection) -> Any:
    """The other process's next word, while this one's loop goes on."""
    if not await asyncio.to_thread(pipe.poll, STEP_TIMEOUT_S):
        raise TimeoutError(f"the in-process side said nothing for {STEP_TIMEOUT_S:g} s")
    return pipe.recv()


def read_journal(run_dir: Path) -> tuple[TokenIds, float]:
    """Finished trajectories, and the mean length of a turn."""
    with RunDirectory(run_dir).newest_journal() as journal:
        rows, turns = journal.rows(TrajectoryRow), journal.rows(TurnRow)
    finished = [row for row in rows if not row.cause]
    said = {row.trajectory: msgspec.msgpack.decode(row.token_ids, type=list[int]) for row in finished}
    return said, mean(turn.tokens for turn in turns)


async def measure(scale: Scale) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        pairs, tokens_per_turn = await compare(directory / "plain", TALK, scale.steps, scale.groups, paced=False)
        paced = short = None
        if scale.whole:
            paced, _ = await compare(directory / "paced", TALK, scale.steps, scale.groups, paced=True)
            short = await compare(directory / "short", LAKE, scale.steps, scale.groups, paced=True)
    ratios = [pair.ratios for pair in pairs]
    return {
        "cpu_ratio": median(ratio.step_s for ratio in ratios),
        "cpu_ratio_min": min(ratio.step_s for ratio in ratios),
        "cpu_ratio_max": max(ratio.step_s for ratio in ratios),
        "rollout_cpu_ratio": median(ratio.rollout_s for ratio in ratios),
        "orchestrator_cpu_s": median(pair.orchestrator.step_s for pair in pairs),
        "worker_cpu_s": median(pair.worker.step_s for pair in pairs),
        "in_process_cpu_s": median(pair.in_process.step_s for pair in pairs),
        "in_process_rollout_cpu_s": median(pair.in_process.rollout_s for pair in pairs),
        "tokens_per_turn": tokens_per_turn,
        "paced_cpu_ratio": median(pair.ratios.step_s for pair in paced) if paced else None,
        "short_turns_cpu_ratio": median(pair.ratios.step_s for pair in short[0]) if short else None,
        "short_turns_rollout_cpu_ratio": median(pair.ratios.rollout_s for pair in short[0]) if short else None,
        "short_turns_tokens_per_turn": short[1] if short else None,
        "pairs": len(pairs),
        "trajectories": scale.groups * GROUP_SIZE,
    }


def main(arguments: Arguments) -> dict[str, Any]:
    multiprocessing.set_start_method("spawn")
    return run_to_end(measure(QUICK if arguments.quick else FULL))


if __name__ == "__main__":
    emit(main(args := parse_arguments(__doc__)), args)
