"""What a token, a turn and a trajectory take of an orchestrator's memory.

The orchestrator is live and whole (`_streaming.py`), with its journal; stand-ins for workers are in another process.
First all trajectories are open, and their environments think. Then each has a turn that runs on a worker. Then some of
the turns get 32k tokens each, by frames as workers send them. After each of these, once all garbage is collected, the
resident memory of the orchestrator's process is read.

- bytes_per_trajectory: of one that is open, with its environment's loop and no turn;
- bytes_per_turn: of one that runs, on top of its trajectory, its prompt of 64 tokens included;
- bytes_per_token: of an accepted one of an open trajectory;
- rss_mb: what the process had in the end.

Memory that the allocator has and nobody uses counts.
"""

import asyncio
import gc

import psutil

from benchmarks._common import Arguments, Figures, Measured, benchmark
from benchmarks._stand_ins import PATIENCE_S, Fill
from benchmarks._streaming import (
    GROUP_SIZE,
    STREAMS_PER_WORKER,
    PausingEnvironment,
    StandInFleet,
    grows_to,
    streamed_run,
    streaming_config,
)

TRAJECTORIES, FILLED, TOKENS = 100_000, 1_000, 32_000
QUICK_SHARE = 10
"""A tenth of the trajectories, and of those that are filled."""
WORKERS = 64
AT_ONCE = 1_000
"""Turns that begin together: what all of them send would be in the orchestrator's buffers at one moment."""
CHUNK_TOKENS = 12
"""Of a turn in a frame, as after a flush interval of 250 ms."""
SETTLE_S = 0.5
"""For what the journal still writes, and for the collections of a run."""


class Thoughts:
    """How many environments think over their first prompts, and whether they may say them."""

    def __init__(self) -> None:
        self.thinking = 0
        self._may_speak = asyncio.Semaphore(0)

    async def think(self) -> None:
        self.thinking += 1
        await self._may_speak.acquire()

    def speak(self, environments: int) -> None:
        """Let so many more say their prompts."""
        for _ in range(environments):
            self._may_speak.release()


class ThinkingEnvironment(PausingEnvironment):
    def __init__(self, thoughts: Thoughts) -> None:
        super().__init__()
        self._thoughts = thoughts

    async def reset(self, seed: int) -> list[int]:
        await self._thoughts.think()
        return await super().reset(seed)


async def _measure(trajectories: int, filled: int) -> Figures:
    await _bytes(WORKERS, 0)  # What a process takes for its first run, it takes once.
    return await _bytes(trajectories, filled)


async def _bytes(trajectories: int, filled: int) -> Figures:
    config = streaming_config(WORKERS, trajectories, "unlimited")
    credit = -(-trajectories // WORKERS)
    fleet = StandInFleet(1, credit, produces=False)
    thoughts = Thoughts()
    none_bytes = await _settled_bytes()
    async with streamed_run(config, WORKERS, fleet, make_environment=lambda: ThinkingEnvironment(thoughts)) as run:
        workers, turns = run.scheduler.fleet.workers, run.scheduler.turns
        await grows_to("open trajectories", lambda: thoughts.thinking, trajectories)
        await grows_to("workers", lambda: sum(worker.connected for worker in workers.values()), WORKERS)
        open_bytes = await _settled_bytes()
        for speak in range(AT_ONCE, trajectories + AT_ONCE, AT_ONCE):
            thoughts.speak(AT_ONCE)
            wanted = min(speak, trajectories)
            await grows_to("turns", lambda: sum(t.worker is not None for t in turns.live.values()), wanted)
        await fleet.ask(Fill(WORKERS, trajectories - (WORKERS - 1) * credit, 0, CHUNK_TOKENS), 10 * PATIENCE_S)
        running_bytes = await _settled_bytes()
        fill = Fill(-(-filled // STREAMS_PER_WORKER), STREAMS_PER_WORKER, TOKENS, CHUNK_TOKENS)
        told = await fleet.ask(fill, 10 * PATIENCE_S)
        produced = sum(one.produced for one in told)
        await grows_to("accepted tokens", lambda: run.accepted, produced)
        filled_bytes = await _settled_bytes()
    return {
        "bytes_per_token": (filled_bytes - running_bytes) / max(1, produced),
        "bytes_per_turn": (running_bytes - open_bytes) / trajectories,
        "bytes_per_trajectory": (open_bytes - none_bytes) / trajectories,
        "trajectories": trajectories,
        "tokens": produced,
        "rss_mb": filled_bytes / 2**20,
    }


async def _settled_bytes() -> int:
    await asyncio.sleep(SETTLE_S)
    gc.collect()
    await asyncio.sleep(SETTLE_S)
    return psutil.Process().memory_info().rss


def main(arguments: Arguments) -> Measured:
    share = QUICK_SHARE if arguments.quick else 1
    return _measure(TRAJECTORIES // share // GROUP_SIZE * GROUP_SIZE, FILLED // share)


if __name__ == "__main__":
    benchmark(__doc__, main)
