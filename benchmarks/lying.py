"""Workers that hold valid sessions and lie: what comes of it for the run and for everybody else.

A live gateway, the whole orchestrator and a journal, behind real sockets on loopback; the trainer and the honest
workers are models whose tokens follow from a turn's seed alone. Each lie is one frame of one of the types that
workers send, extreme, random or not a message at all, over a fresh session. `kinds` counts the frames by type;
`wrong_rows` are rows of trajectories, turns, groups, steps and pulls that differ from the run without Byzantine
workers.

Under `beside`, one Byzantine worker beside one honest worker, by what it does all the time: `speed` of the run's steps
and size of the `journal`, as shares of those of the honest worker alone; the `turns` that the Byzantine worker was
given; and what the report says of it. `hold` says that its turns wait, `trickle` sends chunks without tokens, `drip` a
token just before it would be late, `badstart` tokens from elsewhere; `flap` begins its session anew; `one_in_three`
ends every third of its turns at once, and says that it computes the others; the others flood with valid frames, as
fast as they can.

Both go on at the same time, in a process each; the floods come when one of the two is over.
"""

import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor

import uvloop

from benchmarks._common import Arguments, Figures, benchmark, log_faults_only
from benchmarks._processes import uninterrupted
from tests.runtime.byzantine import RunBeside, play, play_beside, wrong_rows

FRAMES_QUICK, FRAMES = 2_520, 24_000
STEPS_QUICK, STEPS = 18, 100
BESIDE_TOKEN_S = 0.005
ALONE = ""
CALM_ARMS = ("hold", "trickle", "drip", "badstart", "flap", "one_in_three")
FLOODS = ("flood_tokens", "flood_reports", "flood_beats")


def main(arguments: Arguments) -> Figures:
    frames, steps = (FRAMES_QUICK, STEPS_QUICK) if arguments.quick else (FRAMES, STEPS)
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn"), log_faults_only) as processes:
        with uninterrupted():
            lies = processes.submit(_lies, frames)
            calm = processes.submit(_beside, (ALONE, *CALM_ARMS), steps)
            floods = processes.submit(_beside, FLOODS, steps)
        return lies.result() | {"beside": beside(calm.result() | floods.result())}


def _lies(frames: int) -> Figures:
    return uvloop.run(measure(frames))


def _beside(arms: Sequence[str], steps: int) -> dict[str, RunBeside]:
    """One run after the other, by arm."""
    return {arm: uvloop.run(play_beside(arm, steps, BESIDE_TOKEN_S)) for arm in arms}


def beside(runs: dict[str, RunBeside]) -> Figures:
    alone = runs.pop(ALONE)
    if alone.failed:
        raise RuntimeError(f"the run without a Byzantine worker is no measure: {alone.failed}")
    figures: Figures = {"alone_steps_per_s": round(alone.steps_per_s, 2)}
    for arm, run in runs.items():
        figures[arm] = {
            "speed": round(run.steps_per_s / alone.steps_per_s, 3),
            "journal": round(run.journal_bytes / alone.journal_bytes, 3),
            "turns": run.turns_of_liar,
            "named": run.named,
            "honest_fenced": run.honest_fenced,
            "cause": run.failed,
        }
    return figures


async def measure(frames: int, seed: int = 1) -> Figures:
    quiet = await play(0, seed)
    if quiet.failed or quiet.faults:
        raise RuntimeError(f"the run without Byzantine workers is no measure: {quiet.failed or quiet.faults}")
    lied = await play(frames, seed)
    return {
        "frames": lied.told.total(),
        "kinds": dict(lied.told),
        "runs_ended": int(bool(lied.failed)),
        "other_workers_fenced": len(lied.fenced),
        "wrong_rows": len(wrong_rows(quiet, lied)),
        "rows": len(quiet.rows),
        "liars_barred": lied.refused,
        "turns_of_liars": lied.turns_of_liars,
        "cause": lied.failed,
    }


if __name__ == "__main__":
    benchmark(__doc__, main)
