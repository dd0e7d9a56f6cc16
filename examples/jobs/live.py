"""`make jobs`: two jobs take turns on one set of devices while their processes are killed, and what that came to.

Some three minutes on two cores. A pool starts, two jobs are submitted to it, and every now and then one of its
processes is killed: a rollout resident, a job's trainer or orchestrator, a node agent, the pool's own process. Then the
report is written: every node's turns, cycles, bubbles, switches, slowdowns, and each job's bill beside the bill alone.
"""

import argparse
import json
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

HERE = Path(__file__).parent
WORK = Path(".cache/jobs")
KINDS = ("a rollout resident", "a trainer", "an orchestrator", "the pool's process")
"""Of the pool's processes and its jobs'; a node agent, whose node is gone with it, comes last, if asked for."""


def elastic(*arguments: object) -> str:
    """A command's standard output; what it says on standard error is shown. Raises `SystemExit` where it fails."""
    command = [sys.executable, "-m", "elastic.cli", *map(str, arguments)]
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if ended.returncode:
        raise SystemExit(f"elastic {' '.join(map(str, arguments))} exited with status {ended.returncode}")
    return ended.stdout


def told(*arguments: object) -> Any:
    return json.loads(elastic(*arguments, "--json"))


def processes(matches: Callable[[list[str], dict[str, str]], bool]) -> list[psutil.Process]:
    """Those of this user whose command line and environment match."""
    found: list[psutil.Process] = []
    for process in psutil.process_iter():
        try:
            if process.status() != psutil.STATUS_ZOMBIE and matches(process.cmdline(), process.environ()):
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def victims(kind: str, pool: Path, jobs: Sequence[dict[str, Any]]) -> list[psutil.Process]:
    """The processes of one kind that are there now."""
    runs = {str(Path(job["directory"]).resolve()) for job in jobs if not job["over"]}
    directory = str(pool.resolve())

    def matches(command: list[str], environment: dict[str, str]) -> bool:
        words = set(command)
        match kind:
            case "a rollout resident":
                return "pool-resident" in words and bool(words & runs)
            case "a trainer":
                return "--trainer" in words and bool(words & runs)
            case "an orchestrator":
                return {"run", "--resume"} <= words and bool(words & runs)
            case "the pool's process":
                of_pool = any(_is(word, directory) for word in command[1:])
                return "pool-run" in words and "--supervise" not in words and of_pool
            case _:
                return "pool-host" in words and environment.get("ELASTIC_POOL_RECORDS", "").startswith(f"{directory}/")

    found = processes(matches)
    # Its successor waits beside it, and listens nowhere.
    return [one for one in found if one.net_connections()] if kind == "the pool's process" else found


def _is(path: str, directory: str) -> bool:
    return str(Path(path).resolve()) == directory


def wait_until(done: Callable[[], bool], within_s: float, what: str) -> None:
    deadline = time.monotonic() + within_s
    while not done():
        if time.monotonic() > deadline:
            raise SystemExit(f"{what}: not within {within_s:g} s")
        time.sleep(0.5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1, help="draws when who is killed")
    parser.add_argument("--kills", type=int, default=6)
    parser.add_argument("--node-agent", action="store_true", help="kill a node agent, too: its node is lost")
    parser.add_argument("--timeout-s", type=float, default=600.0)
    parser.add_argument("--json", action="store_true", help="print one object at the end instead of tables")
    options = parser.parse_args()

    for job in ("one", "two"):
        elastic("prepare", HERE / f"{job}.toml")
    shutil.rmtree(WORK, ignore_errors=True)
    WORK.mkdir(parents=True)
    file = WORK / "pool.toml"
    text = (HERE.parent / "pool.toml").read_text(encoding="utf-8")
    file.write_text(text.replace('directory = "pools" ', f'directory = "{WORK}/pools" '), encoding="utf-8")
    pool = Path(told("pool", "start", file)["directory"])
    try:
        kills = live(pool, options)
        report = told("report", pool)
        if options.json:
            print(json.dumps({"kills": kills, **report}))
        else:
            print(elastic("report", pool))
            dead = ", ".join(f"{kill['kind']} at {kill['at_s']:.0f} s" for kill in kills)
            print(f"{len(kills)} processes were killed after the submissions: {dead or 'none'}")
            print(f"look at {report['report']}")
    finally:
        elastic("pool", "stop", pool, "--now")


def live(pool: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Submit both jobs, kill until as many as were asked for are dead, and wait for the jobs; what was killed."""
    names: list[str] = []
    for job in ("one", "two"):
        config, runs = HERE / f"{job}.toml", f"run.directory='{WORK / 'runs'}'"
        print(elastic("jobs", "submit", config, "--set", runs, "--dry-run", "--pool", pool), file=sys.stderr)
        names.append(told("jobs", "submit", config, "--set", runs, "--name", job, "--pool", pool)["job"])
    rng, kills, began_s = random.Random(options.seed), list[dict[str, Any]](), time.monotonic()
    kinds = [*KINDS, *(["a node agent"] if options.node_agent else [])]
    begun = "a first step of each job"
    wait_until(lambda: all(job["steps_done"] or job["over"] for job in jobs_of(pool)), options.timeout_s, begun)
    planned = [kinds[i % len(kinds)] for i in range(options.kills)]
    for kind in planned:
        time.sleep(rng.uniform(4.0, 9.0))
        jobs = jobs_of(pool)
        if all(job["over"] for job in jobs):
            break
        found = victims(kind, pool, jobs)
        if not found:
            continue
        victim = rng.choice(found)
        at_s = time.monotonic() - began_s
        print(f"{at_s:6.1f} s: SIGKILL for {kind} ({victim.pid})", file=sys.stderr)
        victim.send_signal(signal.SIGKILL)
        kills.append({"at_s": at_s, "kind": kind})
    for name in names:
        jobs_of(pool)  # Its process may just have been killed.
        command = [sys.executable, "-m", "elastic.cli", "jobs", "wait", name, "--pool", str(pool)]
        subprocess.run([*command, "--timeout-s", str(options.timeout_s)], check=False)
    return kills


def jobs_of(pool: Path) -> list[dict[str, Any]]:
    """The pool's jobs, once its process answers."""
    deadline = time.monotonic() + 60.0
    command = [sys.executable, "-m", "elastic.cli", "jobs", "list", "--all", "--json", "--pool", str(pool)]
    while True:
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        if not ended.returncode:
            return json.loads(ended.stdout)["jobs"]
        if time.monotonic() > deadline:
            raise SystemExit(ended.stderr)
        time.sleep(0.5)


if __name__ == "__main__":
    main()
