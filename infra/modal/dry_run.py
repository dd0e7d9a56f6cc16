#!/usr/bin/env python3
"""What `elastic modal deploy` would put on Modal, without Modal: the real client deploys to a server on this machine.

Prints the app, its functions and its image's commands. Ends with status 1 where something would cost while no run goes
on, could run without an end, or is not the version that runs from here ask for.

    .cache/clouds/bin/python infra/modal/dry_run.py [--package REQUIREMENT]… [--module MODULE]…
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

LONGEST_S = 86_400
"""Modal's own limit of a call."""
IDLE_S_MAX = 60
FUNCTIONS = {"Rollout.*", "function", "batch"}


def wrong(app: Mapping[str, Any], version: str) -> Iterator[str]:
    """What must not be deployed, and why."""
    if version not in app["tags"].values():
        yield f"the app's tags {app['tags']} do not have this version, {version}: runs from here would refuse it"
    if missing := FUNCTIONS - app["functions"].keys():
        yield f"{', '.join(sorted(missing))}: not among what would be deployed"
    for name, function in app["functions"].items():
        scaling = function.get("autoscalerSettings", {})
        warm = max(int(scaling.get(key, 0)) for key in ("minContainers", "bufferContainers"))
        if warm or int(function.get("warmPoolSize", 0)):
            yield f"{name}: keeps containers warm, which cost while no run goes on"
        idle_s = int(scaling.get("scaledownWindow", 0) or function.get("taskIdleTimeoutSecs", 0))
        if not 0 < idle_s <= IDLE_S_MAX:
            yield f"{name}: an idle container goes after {idle_s} s; allowed: 1 to {IDLE_S_MAX}"
        timeout_s = int(function.get("timeoutSecs", 0))
        if not 0 < timeout_s <= LONGEST_S:
            yield f"{name}: a call ends after {timeout_s} s; allowed: 1 to {LONGEST_S}"
        if "schedule" in function:
            yield f"{name}: has a schedule, and would run by itself"


def show(app: Mapping[str, Any]) -> None:
    print("tags:", ", ".join(f"{key}={value}" for key, value in app["tags"].items()))
    for name, function in sorted(app["functions"].items()):
        scaling = function.get("autoscalerSettings", {})
        idle_s = scaling.get("scaledownWindow") or function.get("taskIdleTimeoutSecs")
        print(f"{name}: a call ends after {function.get('timeoutSecs')} s, an idle container after {idle_s} s")
    for commands in app["images"]:
        print("image:", *commands, sep="\n  ")


def main() -> int:
    from elastic.system.modal import version
    from tests.clouds.modal_server import bench

    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--package", action="append", default=[], metavar="REQUIREMENT")
    options.add_argument("--module", action="append", default=[], metavar="MODULE")
    arguments = options.parse_args()
    more = [
        part for name in ("package", "module") for value in getattr(arguments, name) for part in (f"--{name}", value)
    ]
    with tempfile.TemporaryDirectory() as directory, bench(Path(directory)) as server:
        command = [sys.executable, "-m", "elastic.cli", "modal", "deploy", *more]
        deployed = subprocess.run(
            command, env={**os.environ, **server.environment}, check=False, stdout=subprocess.DEVNULL
        )
        if deployed.returncode:
            return deployed.returncode
        app = server.app("elastic")
    show(app)
    faults = list(wrong(app, version()))
    for fault in faults:
        print(f"wrong: {fault}", file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
