#!/usr/bin/env python3
"""Stands in for `docker run`: the same process, in namespaces of its own for networks and mounts, but of no image.

It has no network but its own loopback, sees what is mounted where it is mounted, and gets the variables that are named.
"""

import os
import subprocess
import sys

FLAGS = ("--rm", "--interactive", "--init")


def main() -> None:
    if sys.argv[1] != "run":  # Every image is there, and no container has been left.
        return
    arguments, options = sys.argv[2:], list[tuple[str, str]]()
    while arguments[0].startswith("--"):
        name = arguments.pop(0)
        options.append((name, "" if name in FLAGS else arguments.pop(0)))
    _image, *command = arguments
    given = dict(options)
    assert given["--network"] == "none"
    unshare = ["unshare", "--net", "--mount", "--propagation", "private"]
    if os.environ.get("STANDING_IN") != "inside":
        os.execvpe(unshare[0], [*unshare, sys.executable, *sys.argv], {**os.environ, "STANDING_IN": "inside"})
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    for name, value in options:
        if name == "--mount":
            mounted = dict(part.partition("=")[::2] for part in value.split(","))
            os.makedirs(mounted["target"], exist_ok=True) if os.path.isdir(mounted["source"]) else None
            subprocess.run(["mount", "--bind", mounted["source"], mounted["target"]], check=True)
    environment = {"PATH": os.environ["PATH"]}
    for name, value in options:
        if name == "--env":
            key, has_value, own = value.partition("=")
            environment |= {key: own} if has_value else {key: os.environ[key]} if key in os.environ else {}
    os.chdir(given.get("--workdir", "/tmp"))
    program = given["--entrypoint"]
    os.execve(program, [program, *command], environment)


main()
