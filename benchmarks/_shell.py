"""The production shell under faults: its worlds, how much of its code they go through, and the bugs that they find."""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from benchmarks._coverage import Coverage, lines_of
from elastic.system.cores import cores


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


def import_shell() -> None:
    """Once, before processes are forked that live through its worlds."""
    import elastic.testing.faults.shell.simulate
    from elastic.weights import codecs

    assert elastic.testing.faults.shell.simulate
    codecs.warm_up()


def shell_files() -> list[Path]:
    """Run, gateway, journal writer, rollout loops and the worker's service."""
    from elastic.runtime import gateway, rollout, run
    from elastic.runtime.journal import writer
    from elastic.worker import service

    return [Path(module.__file__ or "") for module in (run, gateway, writer, rollout, service)]


def shell_lines() -> set[tuple[str, int]]:
    return lines_of(shell_files())


def live_through(world: str, seeds: Iterable[int]) -> WorldsSeen:
    """Live through these seeds of a world, of a name that `elastic simulate --faults --world` knows."""
    from elastic.testing.faults.worlds import WorldFailed, live

    seen = WorldsSeen()
    for seed in seeds:
        try:
            outcome = live(world, seed)
        except WorldFailed as failure:
            seen.failed.append({"seed": seed, "error": str(failure)})
            seen.needless[getattr(failure.__cause__, "act", "none")] += 1
        else:
            seen.events += outcome.events
            seen.faults += outcome.faults
        seen.seeds += 1
    return seen


def live_through_shell_watched(seeds: Iterable[int]) -> WorldsSeen:
    """Worlds of runs, with the lines of the shell that ran."""
    with Coverage(shell_files()) as coverage:
        seen = live_through("run", seeds)
    seen.lines = coverage.seen
    return seen


def is_production_shell() -> bool:
    """Whether a world's run, gateway, journal, rollout loops, workers, trainer's host and relay client are of the
    classes that a live run has."""
    from elastic.compose import execution
    from elastic.runtime import gateway, journal, orchestrator, rollout, run
    from elastic.system.installed import installed
    from elastic.testing.faults.shell import models, simulate, stage, world
    from elastic.testing.faults.shell.plan import draw_plan
    from elastic.weights import client, http
    from elastic.worker import agent, service, trainer_host

    plan = msgspec.structs.replace(draw_plan(0), steps=1, groups=1, faults=(), end_s=0.0)
    lived = simulate.RunWorld(plan, stage.Stage(plan.seed))
    stage.live_on_stage(lived, ())
    shell = lived.shell
    return (
        shell is not None
        and type(shell) is execution.Orchestrator is orchestrator.Orchestrator
        and type(shell._run) is run.Run
        and type(shell._gateway) is gateway.Gateway
        and type(shell._rollouts) is rollout.Rollouts
        and type(shell._journal) is journal.SqliteJournal
        and world.run_agent is agent.run_agent
        and agent.Service is service.Service
        and world.TrainerHost is trainer_host.TrainerHost
        and models.WeightsClient is client.WeightsClient
        and installed("elastic.relays")["http"].load() is http.HttpRelay
    )


def planted_bugs(seeds: range | None) -> dict[str, int | None]:
    """Every planted bug with the seed that shows it, None where none does of these, or of those where it is known to
    show."""
    from tests.chaos import planted

    worlds = planted.known_worlds() if seeds is None else dict.fromkeys(planted.names(), seeds)
    return dict(planted.found(worlds, cores()))
