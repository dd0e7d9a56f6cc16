"""`elastic simulate --faults`: worlds full of faults, one seed after the other."""

import time
from contextlib import nullcontext
from typing import Any

import msgspec
import typer

from elastic.cli.output import EXIT_FAILED, EXIT_INTERRUPTED, console, emit, say
from elastic.testing.faults.outcome import WorldFailed
from elastic.testing.faults.worlds import WorldOptions, live

TOLD_EVERY_S = 2.0


class FaultsSeen(msgspec.Struct, kw_only=True):
    """What the worlds lived through so far have shown; `seeds` counts the failed ones too."""

    world: str
    first_seed: int
    seeds: int = 0
    events: int = 0
    faults: int = 0
    failed_seeds: list[dict[str, Any]] = msgspec.field(default_factory=list[dict[str, Any]])
    histories: list[dict[str, Any]] = msgspec.field(default_factory=list[dict[str, Any]])

    def live_through(self, seed: int, options: WorldOptions) -> None:
        try:
            outcome = live(self.world, seed, options)
        except WorldFailed as failure:
            self.failed_seeds.append({"seed": seed, "error": str(failure)})
            say(f"error: {failure}")
        else:
            self.events += outcome.events
            self.faults += outcome.faults
            self.histories.append({"seed": seed, "history": outcome.history, "state": outcome.state})
        self.seeds += 1

    def __str__(self) -> str:
        figures = f"{self.events:,} events, {self.faults:,} faults, {len(self.failed_seeds)} failed"
        return f"{self.seeds:,} worlds from seed {self.first_seed}: {figures}"


def faults_command(world: str, first: int, worlds: int, options: WorldOptions, *, as_json: bool) -> int:
    """Live through worlds of consecutive seeds, every invariant checked after every event; 1 if one failed.

    Interrupted, it reports what it has seen.
    """
    seen, interrupted, began_s = FaultsSeen(world=world, first_seed=first), False, time.monotonic()
    try:
        _live_through(seen, worlds, options)
    except KeyboardInterrupt:
        interrupted = True
    if as_json:
        emit(
            {
                **msgspec.to_builtins(seen),
                "interrupted": interrupted,
                "events_per_s": seen.events / (time.monotonic() - began_s),
            }
        )
    else:
        typer.echo(f"{seen}{f', interrupted before {worlds:,}' if interrupted else ''}")
        if worlds == 1 and seen.histories:
            told = {name: hashed for name, hashed in seen.histories[0].items() if name != "seed" and hashed}
            typer.echo("  ".join(f"{name} {hashed}" for name, hashed in told.items()))
    return EXIT_INTERRUPTED if interrupted else EXIT_FAILED if seen.failed_seeds else 0


def _live_through(seen: FaultsSeen, worlds: int, options: WorldOptions) -> None:
    """Progress is a status that changes on a terminal, and a line now and then elsewhere, or where worlds govern all
    threads: a status has one."""
    terminal = console(stderr=True)
    changes = terminal.is_terminal and seen.world == "core"
    told_s = time.monotonic()
    with terminal.status("") if changes else nullcontext() as status:
        for seed in range(seen.first_seed, seen.first_seed + worlds):
            seen.live_through(seed, options)
            if time.monotonic() - told_s >= (0.1 if changes else TOLD_EVERY_S):
                told_s = time.monotonic()
                line = f"{seen}, {worlds:,} to see"
                say(line) if status is None else status.update(line)
