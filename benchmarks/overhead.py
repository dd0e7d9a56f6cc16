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
import os
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import mean, median
from typing import ClassVar, NamedTuple

import msgspec
from pydantic import BaseModel

from benchmarks._common import Arguments, Figures, Measured, benchmark
from benchmarks._configurations import configuration
from benchmarks._episodes import EpisodePlayer, PlayedEpisode, episode
from benchmarks._live import live_run
from benchmarks._paced import FixedTask, TaskSettings
from benchmarks._processes import Child
from benchmarks._shapes import write_policy
from elastic.config import Config
from elastic.core.types import WeightMode
from elastic.environments.base import Environment, StepResult
from elastic.environments.frozenlake import FrozenLake, FrozenLakeSettings
from elastic.protocol import wire
from elastic.protocol.sampled import ids_of
from elastic.runtime.episodes import stable_hash
from elastic.runtime.journal import RunDirectory, TrajectoryRow, TurnRow
from elastic.weights.source import TensorSource

SEED = 7
GROUPS, GROUP_SIZE = 8, 8
STEPS, QUICK_STEPS = 7, 4
"""Pairs of steps that count."""
WARM_UP_STEPS = 1
READY_TIMEOUT_S = 120.0
STEP_TIMEOUT_S = 300.0

TokenIds = dict[str, list[int]]
"""By trajectory."""

Task = type[FixedTask] | type[FrozenLake]


class CpuTime(NamedTuple):
    """CPU seconds of a step, and of its rollouts alone."""

    step_s: float
    rollout_s: float

    def __add__(self, other: "CpuTime") -> "CpuTime":  # pyright: ignore[reportIncompatibleMethodOverride]
        return CpuTime(self.step_s + other.step_s, self.rollout_s + other.rollout_s)


class ParityLake(FrozenLake):
    """FrozenLake that rewards something of which even an untrained policy does more or less."""

    async def step(self, token_ids: Sequence[int]) -> StepResult:
        return msgspec.structs.replace(await super().step(token_ids), reward=float(len(token_ids) % 2))


class StoppingTask(FixedTask):
    """Four turns that each end with the one stop token: an untrained policy says it every 32 tokens."""

    stop_token_ids: ClassVar[tuple[int, ...]] = (0,)


class OverheadCase(NamedTuple):
    """An environment, and the longest turn."""

    task: Task
    settings: BaseModel
    max_tokens_per_turn: int


TALK = OverheadCase(StoppingTask, TaskSettings(prompts={"": 24}, turns=4, observations={"": 6}), max_tokens_per_turn=96)
LAKE = OverheadCase(ParityLake, FrozenLakeSettings(), max_tokens_per_turn=16)


def played_for(policy: Path, case: OverheadCase, steps: int, *, paced: bool) -> Config:
    return configuration(
        *("untimed", "overhead", *(["overhead-paced"] if paced else [])),
        policy=policy,
        run={"steps": steps},
        rollout={"max_tokens_per_turn": case.max_tokens_per_turn},
    )


class StepGate:
    """Holds a step's episodes back until it is to be played, and measures the processes' CPU time.

    A step ends when the first episode of the next one arrives: what it learned is published by then.
    """

    def __init__(self, steps: int) -> None:
        self._step_of = {stable_hash(SEED, step, group): step for step in range(steps) for group in range(GROUPS)}
        self._open = [asyncio.Event() for _ in range(steps)]
        self._arrived = [asyncio.Event() for _ in range(steps)]
        self._size = GROUPS * GROUP_SIZE
        self._left = 0
        self._ended_s: list[float] = []
        self._rolled_out_s: list[float] = []
        self.process_ids: list[int] = []

    async def play(self, step: int) -> list[CpuTime]:
        """What a step costs each process."""
        async with asyncio.timeout(STEP_TIMEOUT_S):
            await self._arrived[step].wait()
            self._left = self._size
            began_s = self._spent_s()
            self._open[step].set()
            await self._arrived[step + 1].wait()
        times = zip(began_s, self._ended_s, self._rolled_out_s, strict=True)
        return [CpuTime(ended_s - start_s, rolled_out_s - start_s) for start_s, ended_s, rolled_out_s in times]

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


def gated(task: Task, gate: StepGate) -> type[Environment]:
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


class InProcess:
    """Trains on episodes that it plays on an engine of its own."""

    def __init__(self, config: Config, case: OverheadCase) -> None:
        from elastic.engine import create_engine
        from elastic.engine.model.checkpoint import load_model, read_config
        from elastic.worker.trainer.embedded.trainer import GRPOTrainer

        self._case, rollout, checkpoint = case, config.rollout, config.model.checkpoint
        self._engine = create_engine(read_config(checkpoint).to_dict(), config.engine)
        self._player = EpisodePlayer(self._engine, rollout, case.task.stop_token_ids, config.engine.max_context_tokens)
        model = load_model(checkpoint, "cpu")
        self._trainer = GRPOTrainer(config.trainer, model, rollout.groups, rollout.temperature)
        self._load_weights()

    def play(self, step: int) -> tuple[CpuTime, TokenIds]:
        """What a step costs this process, and what was said in it."""
        began_s = time.process_time()
        groups = [[self._episode(step, group, member) for member in range(GROUP_SIZE)] for group in range(GROUPS)]
        self._player.play([episode for group in groups for episode in group])
        rolled_out_s = time.process_time()
        for number, group in enumerate(groups):
            order = wire.TrainGroupFrame(step, f"{step}/{number}", number, [episode.data.packed() for episode in group])
            self._trainer.train_group(order)
        self._trainer.update()
        self._load_weights()
        cost = CpuTime(time.process_time() - began_s, rolled_out_s - began_s)
        return cost, {one.data.trajectory: one.data.token_ids for group in groups for one in group}

    def _load_weights(self) -> None:
        self._engine.load_version(TensorSource(self._trainer.version, self._trainer.tensors()), WeightMode.FINISH)

    def _episode(self, step: int, group: int, member: int) -> PlayedEpisode:
        return episode(
            self._case.task(self._case.settings),
            stable_hash(SEED, step, group),
            lambda turn: stable_hash(SEED, step, group, member, turn),
            f"{step}/{group}/{member}",
        )


def play_in_process(pipe: Connection, config: Config, case: OverheadCase) -> None:
    """A process's whole life: steps come in, CPU time and episodes go out. Makes the policy first."""
    import torch

    write_policy(config.model.checkpoint)
    torch.set_num_threads(config.trainer.threads)
    side = InProcess(config, case)
    pipe.send(None)
    while (step := pipe.recv()) is not None:
        pipe.send(side.play(step))


class StepPair(NamedTuple):
    """The same step, orchestrated (two processes) and in-process."""

    orchestrator: CpuTime
    worker: CpuTime
    in_process: CpuTime

    @property
    def ratios(self) -> CpuTime:
        both = self.orchestrator + self.worker
        return CpuTime(both.step_s / self.in_process.step_s, both.rollout_s / self.in_process.rollout_s)


async def compare(directory: Path, case: OverheadCase, steps: int, *, paced: bool) -> tuple[list[StepPair], float]:
    """The pairs, and the tokens in a turn; raises `RuntimeError` if the two sides' episodes differ."""
    steps += WARM_UP_STEPS
    directory.mkdir()  # noqa: ASYNC240 - nothing else runs yet
    policy, run_dir = directory / "policy", directory / "run"
    config = played_for(policy, case, steps + 1, paced=paced)
    with Child(play_in_process, config, case) as other:
        await asyncio.to_thread(other.hear, STEP_TIMEOUT_S)
        gate = StepGate(steps + 1)
        task = gated(case.task, gate)
        played: list[StepPair] = []
        said: TokenIds = {}
        async with live_run(config, run_dir, {}, task, case.settings) as run:
            trainer = await run.until("the trainer", run.orchestrator.scheduler.trainer, READY_TIMEOUT_S)
            gate.process_ids = [os.getpid(), run.process_id(trainer)]
            for step in range(steps):
                orchestrator, worker = await gate.play(step)
                in_process, episodes = await other.ask(step, STEP_TIMEOUT_S)
                said |= episodes
                played.append(StepPair(orchestrator, worker, in_process))
    journaled, tokens_per_turn = read_journal(run_dir)
    if said != journaled:
        raise RuntimeError("the two sides did not say the same")
    return played[WARM_UP_STEPS:], tokens_per_turn


def read_journal(run_dir: Path) -> tuple[TokenIds, float]:
    """Finished trajectories, and the mean length of a turn."""
    with RunDirectory(run_dir).newest_journal() as journal:
        rows, turns = journal.rows(TrajectoryRow), journal.rows(TurnRow)
    finished = [row for row in rows if not row.cause]
    said = {row.trajectory: ids_of(row.token_ids) for row in finished}
    return said, mean(turn.tokens for turn in turns)


async def measure(quick: bool, directory: Path) -> Figures:
    steps = QUICK_STEPS if quick else STEPS
    pairs, tokens_per_turn = await compare(directory / "plain", TALK, steps, paced=False)
    paced = short = None
    if not quick:
        paced, _ = await compare(directory / "paced", TALK, steps, paced=True)
        short = await compare(directory / "short", LAKE, steps, paced=True)
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
        "trajectories": GROUPS * GROUP_SIZE,
    }


def main(arguments: Arguments) -> Measured:
    return measure(arguments.quick, arguments.scratch)


if __name__ == "__main__":
    benchmark(__doc__, main)
