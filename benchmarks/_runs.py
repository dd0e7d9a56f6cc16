"""Running `elastic run` as a user does, and what its journal proves afterwards."""

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from _common import ROOT

from elastic import compose
from elastic.core import commands as c
from elastic.core import events as e
from elastic.core.ids import lease_of, turn_id
from elastic.core.scheduler import Scheduler
from elastic.core.types import EndCause
from elastic.runtime.journal import JournalReader, MoveRow, RunDirectory, TrajectoryRow

EXAMPLE = ROOT / "examples" / "frozenlake.toml"


class RunFailed(Exception):
    pass


def elastic(*arguments: str, timeout_s: float = 900) -> str:
    """Run a command of `elastic` from the repository's root; its standard output."""
    done = subprocess.run(
        [sys.executable, "-m", "elastic.cli", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    if done.returncode != 0:
        raise RunFailed(f"elastic {' '.join(arguments)} exited with {done.returncode}:\n{done.stderr[-2000:]}")
    return done.stdout


def prepare() -> None:
    """The example's base policy, if it is not there yet."""
    elastic("prepare", str(EXAMPLE))


def run(directory: Path, providers: str, settings: Sequence[str], seed: int) -> tuple[Path, dict[str, Any]]:
    """One run under `directory`: its own directory, and its summary as `--json` gives it."""
    overrides = [f"run.directory={directory}", *settings]
    out = elastic(
        "run",
        str(EXAMPLE),
        *(("--providers", providers) if providers else ()),
        "--seed",
        str(seed),
        "--json",
        *(part for setting in overrides for part in ("--set", setting)),
    )
    summary = json.loads(out.splitlines()[-1])
    return ROOT / Path(summary["report"]).parent, summary


class Proof(msgspec.Struct, kw_only=True):
    """What replaying a journal shows of a run.

    `kills_under_turns` counts preempted leases that held running turns. A token is lost when it was accepted
    and is not in its trajectory, duplicated when its position was accepted before.
    """

    kills_under_turns: int
    accepted_tokens_lost: int
    tokens_duplicated: int
    trained_twice: int


def prove(run_dir: Path) -> Proof:
    """Replay a run's journal through a fresh core and hold what it accepted against the trajectories."""
    config = compose.load_run_config(run_dir)
    with RunDirectory(run_dir).newest_journal() as reader:
        plan = compose.resolve(config, [], str(run_dir))
        scheduler = Scheduler(compose.run_plan(plan), compose.limits(config), compose.policies(config), 0)
        accepted: dict[str, dict[int, int]] = {}
        duplicated = kills = 0
        trained: Counter[str] = Counter()
        for t_ns, event, chunks in reader.entries():
            if isinstance(event, e.LeaseEnded) and event.cause is EndCause.PREEMPTED:
                kills += any(w.turns for w in scheduler.fleet.workers.values() if w.lease == event.lease)
            for command in scheduler.handle(event, t_ns):
                if isinstance(command, c.AcceptTokens):
                    for chunk in (chunks[i] for i in command.chunks):
                        tokens = accepted.setdefault(chunk.turn, {})
                        positions = range(chunk.start, chunk.start + len(chunk.token_ids))
                        duplicated += sum(position in tokens for position in positions)
                        tokens.update(zip(positions, chunk.token_ids, strict=True))
                elif isinstance(command, c.TrainGroup):
                    trained.update(command.trajectories)
        kills = max(kills, _killed_under_turns(reader))
        return Proof(
            kills_under_turns=kills,
            accepted_tokens_lost=_lost(accepted, reader),
            tokens_duplicated=duplicated,
            trained_twice=sum(count - 1 for count in trained.values()),
        )


def _killed_under_turns(reader: JournalReader) -> int:
    """A broken connection often tells of a kill before the provider does: its turns have then left already."""
    preempted = {
        event.lease
        for _, event in reader.events_of("LeaseEnded")
        if isinstance(event, e.LeaseEnded) and event.cause is EndCause.PREEMPTED
    }
    return len({lease_of(row.from_worker) for row in reader.rows(MoveRow)} & preempted)


def _lost(accepted: dict[str, dict[int, int]], reader: JournalReader) -> int:
    """Accepted tokens that are not where they belong in their trajectory."""
    lost = 0
    for trajectory, (token_ids, finished_turns) in trajectories(reader).items():
        at = 0
        for turn in range(finished_turns):
            tokens = accepted.get(turn_id(trajectory, turn), {})
            wanted = [tokens.get(position) for position in range(len(tokens))]
            found = _find(token_ids, wanted, at)
            lost += 0 if found is not None else len(tokens)
            at = at if found is None else found + len(wanted)
    return lost


def _find(token_ids: list[int], wanted: Sequence[int | None], start: int) -> int | None:
    last = len(token_ids) - len(wanted)
    return next((at for at in range(start, last + 1) if token_ids[at : at + len(wanted)] == wanted), None)


def trajectories(reader: JournalReader) -> dict[str, tuple[list[int], int]]:
    """Token ids and turns of every finished trajectory."""
    return {
        row.trajectory: (msgspec.msgpack.decode(row.token_ids, type=list[int]), row.turns)
        for row in reader.rows(TrajectoryRow)
        if not row.cause
    }
