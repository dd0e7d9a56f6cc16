"""The worlds of faults by their names: each is drawn from a seed, lived through and checked."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from elastic.config import ConfigError
from elastic.testing.faults.kinds import FaultKind
from elastic.testing.faults.outcome import Lived, WorldFailed

if TYPE_CHECKING:
    from elastic.testing.faults.shell.simulate import Plan


class WorldOptions(msgspec.Struct, frozen=True, kw_only=True):
    """`only` restricts the kinds of faults that are drawn; `keep` names those of the drawn ones that happen, by
    their numbers, or `none`. `shrink_s` is how long to leave out faults that a failure does not take. `tell` gets what
    processes log."""

    only: str = ""
    keep: str = ""
    shrink_s: float = 0.0
    tell: Callable[[str], None] | None = None


OF_THE_SHELL = "run", "outside", "pool"
"""The worlds of the production shell."""
DRAWN = WorldOptions()
"""All that the seed draws."""


def live(world: str, seed: int, options: WorldOptions = DRAWN) -> Lived:
    """Live through the world, one of `WORLDS`. Raises `WorldFailed`, and `ConfigError` for options that are not for
    it."""
    if world not in WORLDS:
        raise ConfigError(f"--world: found {world}; allowed: {', '.join(WORLDS)}")
    given = {"only": options.only, "keep": options.keep, "shrink-within": options.shrink_s, "log": options.tell}
    if world not in OF_THE_SHELL and (option := next((name for name, value in given.items() if value), None)):
        shell = " and --world ".join(OF_THE_SHELL)
        raise ConfigError(f"--{option} is for --world {shell}, found --world {world}")
    return WORLDS[world](seed, options)


def _core(seed: int, _: WorldOptions) -> Lived:
    from elastic.testing.faults.core.world import simulate

    outcome = simulate(seed)
    return Lived(events=outcome.events, faults=outcome.faults, history=outcome.history, state=outcome.state)


def _shell(world: str, seed: int, options: WorldOptions) -> Lived:
    from elastic.testing.faults.shell.shrink import shrunk
    from elastic.testing.faults.shell.simulate import SHELL_WORLDS, simulate

    of = SHELL_WORLDS[world]
    plan = _kept(options.keep, of.draw(seed, _kinds(options.only, of.kinds)))
    try:
        return simulate(plan, options.tell)
    except WorldFailed:
        if not options.shrink_s:
            raise
        raise shrunk(plan, options.shrink_s)[1] from None


def _pool_shell(seed: int, _: WorldOptions) -> Lived:
    from elastic.testing.faults.pool.pool_worlds import PoolWorld, draw_pool

    return PoolWorld(draw_pool(seed)).run()


WORLDS: dict[str, Callable[[int, WorldOptions], Lived]] = {
    "core": _core,
    **{name: partial(_shell, name) for name in OF_THE_SHELL},
    "pool-shell": _pool_shell,
}


def _kinds(names: str, allowed: Sequence[FaultKind]) -> list[FaultKind]:
    wanted = [name for name in names.split(",") if name]
    if unknown := [name for name in wanted if name not in allowed]:
        raise ConfigError(f"--only: unknown {', '.join(unknown)}; allowed: {', '.join(allowed)}")
    return [FaultKind(name) for name in wanted]


def _kept(numbers: str, plan: "Plan") -> "Plan":
    """The plan with those of its faults that have these numbers."""
    if not numbers:
        return plan
    try:
        kept = () if numbers == "none" else tuple(plan.faults[int(number)] for number in numbers.split(","))
    except (ValueError, IndexError):
        raise ConfigError(
            f"--keep: found {numbers}; allowed: none, or numbers from 0 to {len(plan.faults) - 1} with commas between "
            "them"
        ) from None
    return msgspec.structs.replace(plan, faults=kept)
