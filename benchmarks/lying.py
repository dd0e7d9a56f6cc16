"""Workers that hold valid sessions and lie: what comes of it for the run and for everybody else.

A live gateway, the whole orchestrator and a journal, behind real sockets on loopback; the trainer and the honest
workers are models whose tokens follow from a turn's seed alone. Each lie is one frame of one of the types that
workers send, extreme, random or not a message at all, over a fresh session. `kinds` counts the frames by type;
`wrong_rows` are rows of trajectories, turns, groups, steps and pulls that differ from the run without liars.
"""

from typing import Any

import uvloop
from _common import Arguments, emit, parse_arguments
from _liars import play, wrong_rows
from _live import log_faults_only

FRAMES_QUICK, FRAMES = 5_040, 24_000


def main(arguments: Arguments) -> dict[str, Any]:
    return uvloop.run(measure(FRAMES_QUICK if arguments.quick else FRAMES))


async def measure(frames: int, seed: int = 1) -> dict[str, Any]:
    quiet = await play(0, seed)
    if quiet.failed or quiet.faults:
        raise RuntimeError(f"the run without liars is no measure: {quiet.failed or quiet.faults}")
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
    log_faults_only()
    emit(main(args := parse_arguments(__doc__)), args)
