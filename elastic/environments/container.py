"""Containers of env workers, by `docker` or `podman`: what is asked of them, and what an image needs.

A container has no network unless it is given the host's. Of the run it sees a folder with two sockets and its own
environment's configuration (`elastic.environments.doors`), and of other files those that the configuration names, which
it cannot write. It ends with the process that has started it, whatever ends that.
"""

import csv
import io
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elastic.environments.limits import GIB, ProcessLimits
from elastic.system.installed import installed, is_ours, package_of
from elastic.system.named_code import in_file

ENGINES = ("docker", "podman")
FOLDER = "/elastic"
"""Where a container has its doors and its configuration."""
INSIDE_VARIABLE = "ELASTIC_ENV_WORKER_INSIDE"
"""Set for an env worker in a container."""
SERVED_PORT = 8000
"""The port of a server in a container, as images of OpenEnv have it."""
ENGINE_S = 60.0
"""For an engine to answer a question."""
SAID_CHARACTERS = 300
IMPORTS = "import elastic.environments.env_worker"


class ContainerUnusable(Exception):
    """No container can be started. The message has what was found and what is allowed."""


@dataclass(frozen=True, kw_only=True)
class ContainerOrder:
    """A container `name` of `image`, with `folder` as its `FOLDER`. It runs `command` with variables of these names,
    which its engine's process has; `files` are seen where they are, and cannot be written. In the place of the
    directories that are `hidden` the container sees the empty directory `nothing`."""

    name: str
    image: str
    network: str
    folder: Path
    files: Sequence[Path]
    hidden: Sequence[Path] = ()
    nothing: Path = Path()
    variables: Sequence[str]
    limits: ProcessLimits
    command: Sequence[str]


def find_engine() -> str:
    """Which engine there is. Raises `ContainerUnusable`."""
    found = next(filter(None, map(shutil.which, ENGINES)), None)
    if found is None:
        raise ContainerUnusable("found neither docker nor podman; allowed: one of them on the PATH, or no container")
    return found


def check_image(engine: str, image: str, python: str) -> None:
    """The image is there, and has Elastic. Raises `ContainerUnusable`."""
    status, said = asked(engine, "image", "inspect", image)
    if status:
        allowed = f"an image that is on this machine ({Path(engine).name} pull {image})"
        raise ContainerUnusable(f"found {image!r}, and {Path(engine).name} says: {said}; allowed: {allowed}")
    status, said = asked(engine, "run", "--rm", "--network", "none", "--entrypoint", python, image, "-c", IMPORTS)
    if status:
        lines = "; ".join(line for line in dockerfile_lines().splitlines() if not line.startswith("#"))
        raise ContainerUnusable(
            f"found {image!r}, whose {python} cannot import Elastic: {said}; allowed: an image that was made with the "
            f"lines `{lines}` (elastic environments dockerfile)"
        )


LIBRARIES = {
    "frozenlake": "gymnasium",
    "gymnasium": "gymnasium",
    "openenv": "openenv",
    "reasoning-gym": "reasoning-gym",
    "verifiers": "verifiers",
}
"""The package that each of our kinds of environments imports besides Elastic."""


def dockerfile_lines(kind: str = "") -> str:
    """What makes an image one that env workers run in: of this kind of environment, which is installed, if one is
    named."""
    from importlib.metadata import version

    point = installed("elastic.environments")[kind] if kind else None
    package = LIBRARIES.get(kind, "")
    if point is not None and not is_ours(point):
        package = package_of(point).replace(" ", "==")
    wheel = f"elastic_rl-{version('elastic-rl')}-py3-none-any.whl"
    return (
        "# Behind the lines of an image with Python 3.11 or later. The wheel is made in a clone of elastic, by\n"
        "# python -m pip wheel --no-deps --wheel-dir . .\n"
        f"COPY {wheel} /tmp/\n"
        f"RUN python -m pip install --no-cache-dir {' '.join([f'/tmp/{wheel}', *([package] if package else [])])}\n"
    )


def container_command(engine: str, order: ContainerOrder) -> list[str]:
    """What starts a container. It ends once the standard input of this command does."""
    is_docker = Path(engine).name == "docker"
    # Who is root in podman's containers is its user outside.
    own = ["--user", f"{os.getuid()}:{os.getgid()}"] if is_docker else []
    limits: list[str] = []
    if order.limits.memory_gb is not None:
        limits += ["--memory", str(round(order.limits.memory_gb * GIB))]
    if order.limits.cpu_s is not None:
        limits += ["--ulimit", f"cpu={max(1, round(order.limits.cpu_s))}"]
    if order.limits.files is not None:
        limits += ["--ulimit", f"nofile={order.limits.files}"]
    seen = [*((file, file) for file in order.files), *((order.nothing, directory) for directory in order.hidden)]
    python, *arguments = order.command
    return [
        *(engine, "run", "--rm", "--interactive", "--init", "--pull", "never", "--name", order.name),
        *("--network", order.network, "--cap-drop", "ALL", "--security-opt", "no-new-privileges"),
        *own,
        *limits,
        *("--mount", _mount("type=bind", f"source={order.folder}", f"target={FOLDER}")),
        *(
            part
            for source, target in seen
            for part in ("--mount", _mount("type=bind", f"source={source}", f"target={target}", "readonly"))
        ),
        *(part for name in (INSIDE_VARIABLE, *order.variables) for part in ("--env", name)),
        *("--env", "HOME=/tmp", "--env", "PYTHONDONTWRITEBYTECODE=1", "--workdir", "/tmp"),
        *("--entrypoint", python, order.image, *arguments),
    ]


def _mount(*fields: str) -> str:
    """A line of CSV, as engines read it: there may be commas and quotes in paths."""
    line = io.StringIO()
    csv.writer(line, lineterminator="\n").writerow(fields)
    return line.getvalue().removesuffix("\n")


def start_server(engine: str, name: str, image: str, start_s: float) -> str:
    """Start a container of this name, whose image serves on its port `SERVED_PORT`, in the place of one that a former
    process has left; returns where that is on this machine, on loopback alone. Raises `ContainerUnusable`."""
    remove(engine, name)
    published = ("--publish", f"127.0.0.1::{SERVED_PORT}")
    status, said = asked(engine, "run", "--detach", "--name", name, *published, image, limit_s=start_s)
    if not status:
        status, said = asked(engine, "port", name, f"{SERVED_PORT}/tcp", limit_s=start_s)
    if status:
        raise ContainerUnusable(f"{Path(engine).name} starts no container of it: {said}")
    return said


def remove(engine: str, name: str) -> None:
    """End the container of this name, if there is one."""
    asked(engine, "rm", "--force", name)


def code_folders(settings: Any) -> Iterator[Path]:
    """The folders of the files whose code settings name: what lies beside a file may be imported by it."""
    if isinstance(settings, Mapping):
        for value in settings.values():
            yield from code_folders(value)
    elif isinstance(settings, list | tuple):
        for value in settings:
            yield from code_folders(value)
    elif (code := in_file(settings)) is not None:
        yield Path(code.place).absolute().parent


def asked(
    program: str, *arguments: str, limit_s: float = ENGINE_S, variables: Mapping[str, str] | None = None
) -> tuple[int, str]:
    """The exit status of an engine, or of another program, and what it said first, or last of an error. It has these
    environment variables, or ours."""
    command = [program, *arguments]
    try:
        said = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=limit_s, check=False, env=variables
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return 1, str(error)
    if not said.returncode:
        return 0, said.stdout.strip().partition("\n")[0]
    lines = [line.strip() for line in said.stderr.splitlines() if line.strip()]
    return said.returncode, (lines[-1] if lines else f"status {said.returncode}")[:SAID_CHARACTERS]
