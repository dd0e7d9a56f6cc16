"""Plants bugs of the production shell, one at a time, and lives through worlds until one fails.

Each of `bugs/*.patch`, here and in `tests/pool`, is a bug. Its first line names the faults that show it best in worlds
of a run, or the worlds that show it (`World: core`, `World: outside`, `World: pool`, `World: pool-shell`); its second
is a seed that does. A bug is planted in a fork, into the functions that are imported already, so that it costs no more
than its worlds.

python tests/chaos/planted.py [--known | --first N --seeds N] [NAME ...]     prints {name: seed or null} as JSON
"""

import argparse
import gc
import importlib
import inspect
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

from elastic.system.imports import importing

with importing():
    from elastic.testing.faults.worlds import WorldFailed, WorldOptions, live
    from elastic.weights import codecs

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
PLACES = (HERE / "bugs", HERE.parent / "pool" / "bugs")
SEEDS = 60
KNOWN_SEEDS = 8
"""From the one on that is known to show a bug: a change elsewhere may move it a little."""
WORLD_CPU_S = 30
"""Many times what a world takes: one that needs more has hung, and is found."""
FOUND_MAX = 250


def names() -> list[str]:
    return sorted(path.stem for place in PLACES for path in place.glob("*.patch"))


def _patch(name: str) -> Path:
    return next(path for place in PLACES if (path := place / f"{name}.patch").exists())


def known_seed(name: str) -> int:
    """A seed whose world the bug has made fail."""
    return int(_patch(name).read_text().splitlines()[1].removeprefix("Seed: "))


def known_worlds(*which: str) -> dict[str, range]:
    """Those bugs, or all, with the seeds where they are known to show."""
    return {name: range(seed := known_seed(name), seed + KNOWN_SEEDS) for name in which or names()}


def found(seeds: Mapping[str, range], at_once: int) -> Iterator[tuple[str, int | None]]:
    """Each bug with the first of its seeds whose world it makes fail, as they are found; None where none does."""
    running: dict[int, str] = {}
    waiting = [*seeds][::-1]
    codecs.warm_up()
    gc.freeze()
    while waiting or running:
        while waiting and len(running) < at_once:
            name = waiting.pop()
            running[_fork(name, seeds[name])] = name
        pid, status = os.wait()
        code = os.waitstatus_to_exitcode(status)
        name = running.pop(pid)
        yield name, None if code == FOUND_MAX else seeds[name].start + max(code, 0)


def _fork(name: str, seeds: range) -> int:
    pid = os.fork()
    if pid == 0:
        code = FOUND_MAX
        try:
            code = _first_failure(name, seeds)
        finally:
            os._exit(code)
    return pid


def _first_failure(name: str, seeds: range) -> int:
    """How many worlds do not fail before one does."""
    lives = plant(_patch(name))
    for number, seed in enumerate(seeds):
        signal.setitimer(signal.ITIMER_VIRTUAL, WORLD_CPU_S)
        try:
            lives(seed)
        except WorldFailed:
            return number
    return FOUND_MAX


def plant(patch: Path) -> Callable[[int], object]:
    """Change the functions of this process as the patch does; returns what lives through a seed's world."""
    for path, source in patched(patch).items():
        changed = {code.co_qualname: code for code in _codes(compile(source, str(ROOT / path), "exec"))}
        module = importlib.import_module(path.removesuffix(".py").replace("/", "."))
        for function in _functions(module, module.__name__):
            function.__code__ = changed[function.__code__.co_qualname]
    what, _, which = patch.read_text().partition("\n")[0].partition(": ")
    if what == "World":
        return lambda seed: live(which, seed)
    only = WorldOptions(only="" if which == "any" else which.replace(", ", ","))
    return lambda seed: live("run", seed, only)


def patched(patch: Path) -> dict[str, str]:
    """The sources that the patch changes, by their paths, as it makes them. Raises `CalledProcessError`."""
    lines = patch.read_text().splitlines()
    paths = [line.removeprefix("+++ b/").strip() for line in lines if line.startswith("+++ b/")]
    with tempfile.TemporaryDirectory() as directory:
        for path in paths:
            copy = Path(directory, path)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_text((ROOT / path).read_text())
        subprocess.run(["git", "apply", "-p1", str(patch)], cwd=directory, check=True)
        return {path: Path(directory, path).read_text() for path in paths}


def _codes(code: CodeType) -> Iterator[CodeType]:
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield inner
            yield from _codes(inner)


def _functions(owner: Any, module: str) -> Iterator[FunctionType]:
    """The functions that a module's source defines, and its classes' methods."""
    for value in list(vars(owner).values()):
        value = inspect.unwrap(getattr(value, "fget", None) or getattr(value, "__func__", value))
        if getattr(value, "__module__", None) != module:
            continue
        if isinstance(value, FunctionType):
            if value.__code__.co_filename.endswith(".py"):
                yield value
        elif inspect.isclass(value):
            yield from _functions(value, module)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=SEEDS, help="worlds for each bug")
    parser.add_argument("--first", type=int, default=0, help="the first world's seed")
    parser.add_argument("--known", action="store_true", help="begin where a bug is known to show, and end soon")
    parser.add_argument("names", nargs="*", help="bugs; all where none is named")
    given = parser.parse_args()
    if unknown := set(given.names) - set(names()):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are: {', '.join(names())}")
    verdicts = {}
    worlds = {name: range(given.first, given.first + given.seeds) for name in given.names or names()}
    if given.known:
        worlds = known_worlds(*worlds)
    for name, seed in found(worlds, os.cpu_count() or 1):
        verdicts[name] = seed
        print(f"{name}: {'not found' if seed is None else f'seed {seed}'}", file=sys.stderr, flush=True)
    print(json.dumps(verdicts))
    return int(None in verdicts.values())


if __name__ == "__main__":
    sys.exit(main())
