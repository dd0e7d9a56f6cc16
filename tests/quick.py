"""A look at what has changed, within a minute: lint, types, the import contract and unit tests.

    python -m tests.quick [ROOM …]        # `make quick`, `make quick ROOM="core pool"`

Without a room it looks at the rooms whose files differ from the branch `main`, committed or not. It leaves out tests
that are slow, need the machine alone, or have a suite of their own. Tests that import a changed module come first, and
those that have not begun after `TESTS_S` are skipped: `make test` has all. The exit code is 0 if nothing was found, 1
if something was, and 2 if there is no such room.
"""

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent
MAIN = "main"
TESTS_S = 40.0
"""How long tests may begin; lint and types take a core beside them at first."""
UNTIL = "ELASTIC_QUICK_UNTIL"
"""The variable with that time on the monotonic clock."""
UNIT = (
    "not slow and not alone and not nightly and not netns and not ray and not clouds and not dashboard "
    "and not postgres and not trl and not clients and not trainers and not loggers and not environments"
)
TESTS: dict[str, tuple[str, ...]] = {
    "benchmarks": ("tests/test_house.py",),
    "cli": ("tests/cli",),
    "compose": ("tests/test_compose.py", "tests/test_isolation.py", "tests/test_evaluation_section.py"),
    "config": ("tests/test_config.py", "tests/cli/test_configuration.py"),
    "core": ("tests/core", "tests/cluster"),
    "docs": ("tests/cli/test_documented_commands.py",),
    "engine": ("tests/engine", "tests/model"),
    "environments": ("tests/envs",),
    "examples": ("tests/cli/test_documented_commands.py",),
    "front": ("tests/front", "tests/doors"),
    "functions": ("tests/functions",),
    "infra": ("tests/test_infra.py",),
    "integrations": ("tests/doors",),
    "policies": ("tests/policies", "tests/cluster"),
    "pool": ("tests/pool", "tests/phases"),
    "protocol": ("tests/test_wire.py", "tests/test_http_server.py", "tests/test_tickets.py", "tests/test_endpoint.py"),
    "providers": ("tests/providers",),
    "report": ("tests/report",),
    "runtime": ("tests/runtime",),
    "server": ("tests/server",),
    "simulation": ("tests/sim", "tests/calibration"),
    "system": ("tests/parking", "tests/test_logs.py", "tests/test_cores.py", "tests/test_proof.py"),
    "testing": ("tests/chaos",),
    "traces": ("tests/traces",),
    "weights": ("tests/weights",),
    "worker": ("tests/worker", "tests/trainer"),
}
"""The tests of each room. A changed file of tests is one of them by itself."""


def room_of(path: str) -> str:
    """`elastic/core/turns.py` → `core`, `providers/ec2.py` → `providers`, `README.md` → `docs`; empty for no room."""
    first, *others = Path(path).parts
    name = Path(others[0]).stem if first == "elastic" and others else first
    return "docs" if path.endswith(".md") else name if name in TESTS else ""


def changed() -> list[str]:
    """Files that differ from where this branch left `main`, and that are there."""
    base = _git("merge-base", MAIN, "HEAD") or ["HEAD"]
    names = {*_git("diff", "--name-only", base[0]), *_git("ls-files", "--others", "--exclude-standard")}
    return sorted(name for name in names if (ROOT / name).is_file())


def _git(*arguments: str) -> list[str]:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True).stdout.split()


def nearest(files: Iterable[str]) -> list[str]:
    """Test files that import a module among these files."""
    modules = [Path(name).with_suffix("").as_posix().replace("/", ".") for name in files if name.endswith(".py")]
    if not modules:
        return []
    imports = re.compile(rf"^(from|import) ({'|'.join(map(re.escape, modules))})\b", re.MULTILINE)
    tests = sorted((ROOT / "tests").glob("**/test_*.py"))
    return [str(path.relative_to(ROOT)) for path in tests if imports.search(path.read_text(encoding="utf-8"))]


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests that come too late: this module is a plugin of pytest's, too."""
    if time.monotonic() > float(os.environ[UNTIL]):
        pytest.skip("it would have begun too late")


def checks(rooms: Iterable[str], files: Sequence[str]) -> dict[str, list[str]]:
    """Commands by name: of these rooms, and of these files where they are tests."""
    of_rooms = [name for room in sorted(set(rooms)) for name in TESTS[room]]
    tests = [name for name in files if Path(name).name.startswith("test_") and name.endswith(".py")]
    found: dict[str, list[str]] = {
        "lint": [str(BIN / "ruff"), "check", "--quiet", "."],
        "format": [str(BIN / "ruff"), "format", "--quiet", "--check", "."],
        "types": [str(BIN / "pyrefly"), "check"],
        "imports": [str(BIN / "lint-imports")],
        "house": [sys.executable, "-m", "pytest", "-q", "-x", "tests/test_house.py"],
    }
    if of_rooms or tests:
        near = [name for name in nearest(files) if name.startswith(tuple(of_rooms))]
        chosen = list(dict.fromkeys([*tests, *near, *of_rooms]))
        pytest_of = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "tests.quick", "--processes", "2"]
        found["tests"] = [*pytest_of, "-m", UNIT, *chosen]
    return found


def main(rooms: Sequence[str]) -> int:
    if unknown := sorted(set(rooms) - TESTS.keys()):
        print(f"there is no room {', '.join(unknown)}; allowed: {', '.join(TESTS)}", file=sys.stderr)
        return 2
    files = [] if rooms else changed()
    wanted = rooms or sorted({room for name in files if (room := room_of(name))})
    print(f"rooms: {', '.join(wanted) or 'none has changed'}")
    began = time.monotonic()
    with ThreadPoolExecutor(max_workers=2) as pool:
        commands = checks(wanted, files)
        order = sorted(commands, key=["tests", "types", "imports", "house", "lint", "format"].index)
        fine = list(pool.map(lambda name: _run(name, commands[name]), order))
    failed = [name for name, one in zip(order, fine, strict=True) if not one]
    print(f"{'failed: ' + ', '.join(failed) if failed else 'all fine'}, after {time.monotonic() - began:.0f} s")
    return 1 if failed else 0


def _run(name: str, command: list[str]) -> bool:
    began = time.monotonic()
    environment = {**os.environ, UNTIL: str(began + TESTS_S)}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    # Pytest says 5 where it is given no test to run.
    fine = done.returncode == 0 or (name == "tests" and done.returncode == 5)
    came_to = f": {done.stdout.splitlines()[-1]}" if name == "tests" and fine and done.stdout else ""
    print(f"{name}: {'fine' if fine else 'FAILED'} ({time.monotonic() - began:.0f} s){came_to}")
    if not fine:
        print("\n".join(done.stdout.splitlines()[-40:]))
    return fine


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
