"""The production shell under faults: its worlds, how much of its code they go through, and the bugs that they find."""

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
from _common import ROOT
from _coverage import Coverage, lines_of

PLANTED = ROOT / "tests" / "chaos" / "planted.py"


class WorldsSeen(msgspec.Struct):
    """What some worlds have come to."""

    seeds: int = 0
    events: int = 0
    faults: int = 0
    failed: list[dict[str, Any]] = []
    needless: Counter[str] = msgspec.field(default_factory=Counter)
    lines: set[tuple[str, int]] = set()

    def add(self, other: "WorldsSeen") -> None:
        self.seeds += other.seeds
        self.events += other.events
        self.faults += other.faults
        self.failed = self.failed + other.failed
        self.needless = self.needless + other.needless
        self.lines = self.lines | other.lines


def shell_files() -> list[Path]:
    """Run, gateway, journal writer, rollout loops and the worker's service."""
    from elastic.runtime import gateway, rollout, run
    from elastic.runtime.journal import writer
    from elastic.worker import service

    return [Path(module.__file__ or "") for module in (run, gateway, writer, rollout, service)]


def shell_lines() -> set[tuple[str, int]]:
    return lines_of(shell_files())


def live_through_shell_watched(seeds: Iterable[int]) -> WorldsSeen:
    """As `live_through_shell`, with the lines of the shell that ran."""
    with Coverage(shell_files()) as coverage:
        seen = live_through_shell(seeds)
    seen.lines = coverage.seen
    return seen


def live_through_shell(seeds: Iterable[int]) -> WorldsSeen:
    from elastic.chaos.simulate import WorldFailed, simulate
    from elastic.chaos.witness import Needless

    seen = WorldsSeen()
    for seed in seeds:
        try:
            outcome = simulate(seed)
        except WorldFailed as failure:
            seen.failed.append({"seed": seed, "error": str(failure)})
            if isinstance(failure.cause, Needless):
                seen.needless[failure.cause.act] += 1
        else:
            seen.events += outcome.events
            seen.faults += outcome.faults
        seen.seeds += 1
    return seen


def is_production_shell() -> bool:
    """Whether a world's run, gateway, journal, rollout loops and workers are of the classes that a live run has."""
    from elastic.chaos import simulate, world
    from elastic.chaos.faults import draw_plan
    from elastic.compose import execution
    from elastic.runtime import gateway, journal, orchestrator, rollout, run
    from elastic.worker import agent, service

    lived = world.World(draw_plan(0))
    simulate.live(lived)
    shell = lived.shell
    return (
        shell is not None
        and type(shell) is execution.Orchestrator is orchestrator.Orchestrator
        and type(shell._run) is run.Run
        and type(shell._gateway) is gateway.Gateway
        and type(shell._rollouts) is rollout.Rollouts
        and isinstance(shell._journal, journal.SqliteJournal)
        and world.run_agent is agent.run_agent
        and agent.Service is service.Service
    )


def planted_bugs(*which: str) -> dict[str, int | None]:
    """Every planted bug with the seed that shows it, None where none does of `which` seeds are asked for."""
    told = subprocess.run([sys.executable, PLANTED, *which], stdout=subprocess.PIPE, check=False)
    return json.loads(told.stdout)
