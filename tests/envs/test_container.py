"""What is asked of docker and podman, and what is told where there is none, no image, or one without Elastic."""

import csv
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from elastic.compose.containers import check_env_workers, container_order
from elastic.compose.plan import resolve
from elastic.config import Config, ConfigError, EnvironmentConfig, validate
from elastic.environments.container import (
    ContainerOrder,
    ContainerUnusable,
    check_image,
    code_folders,
    container_command,
    dockerfile_lines,
    find_engine,
)
from elastic.environments.limits import ProcessLimits

ORDER = ContainerOrder(
    name="elastic-x-agent_0",
    image="mine:1",
    network="none",
    folder=Path("/runs/one/doors/agent_0"),
    files=(Path("/home/me/code"),),
    variables=("KEY",),
    limits=ProcessLimits(memory_gb=2.0, cpu_s=100.0, files=512),
    command=("python", "-m", "elastic.cli", "env-worker", "/elastic", "--environment", "agent"),
)


def engine(folder: Path, name: str, script: str) -> str:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def test_a_container_has_no_network_and_no_key_in_its_command() -> None:
    command = container_command("/usr/bin/podman", ORDER)
    told = " ".join(command)
    assert "--network none" in told
    assert "--mount type=bind,source=/home/me/code,target=/home/me/code,readonly" in told
    assert "--env KEY --env" in told, "the value is in the environment alone"
    assert f"--memory {2 * 1024**3} --ulimit cpu=100 --ulimit nofile=512" in told
    assert told.endswith("--entrypoint python mine:1 -m elastic.cli env-worker /elastic --environment agent")
    assert "--user" not in command
    assert f"--user {os.getuid()}:{os.getgid()}" in " ".join(container_command("/usr/bin/docker", ORDER))


def test_paths_may_have_commas_and_quotes() -> None:
    order = replace(ORDER, folder=Path('/runs/a,b"c"/doors'), files=(Path("/home/me, too"),))
    command = container_command("/usr/bin/docker", order)
    mounts = [command[place + 1] for place, part in enumerate(command) if part == "--mount"]
    assert list(csv.reader(mounts)) == [
        ["type=bind", 'source=/runs/a,b"c"/doors', "target=/elastic"],
        ["type=bind", "source=/home/me, too", "target=/home/me, too", "readonly"],
    ]


def test_docker_is_taken_before_podman(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ContainerUnusable, match=r"found neither docker nor podman; allowed: one of them on the PATH"):
        find_engine()
    podman = engine(tmp_path, "podman", "exit 0")
    assert find_engine() == podman
    assert find_engine() != engine(tmp_path, "docker", "exit 0") == find_engine()


def test_an_image_that_is_not_there_or_has_no_elastic_is_told(tmp_path: Path) -> None:
    missing = engine(tmp_path, "docker", '[ "$1" = image ] && echo "Error: No such image: mine:1" >&2 && exit 1')
    with pytest.raises(ContainerUnusable, match=r"No such image.*allowed: an image that is on .*docker pull mine:1"):
        check_image(missing, "mine:1", "python")
    bare = engine(tmp_path, "podman", '[ "$1" = run ] || exit 0; echo "No module named elastic" >&2; exit 1')
    with pytest.raises(ContainerUnusable, match="cannot import Elastic: No module named elastic") as told:
        check_image(bare, "mine:1", "python")
    assert [line in str(told.value) for line in dockerfile_lines().splitlines()] == [False, False, True, True]
    check_image(engine(tmp_path, "docker", "exit 0"), "mine:1", sys.executable)


def test_the_folders_of_code_are_seen() -> None:
    settings = {"rewards": ["/a/b/mine.py:right", "package:right"], "nested": {"tools": ("/a/c/tools.py:add",)}}
    assert list(code_folders(settings)) == [Path("/a/b"), Path("/a/c")]


def in_container(folder: Path, runs: Path) -> dict[str, object]:
    return {
        "run": {"directory": str(runs)},
        "model": {"checkpoint": str(folder)},
        "environment": {"name": "agent", "container": "mine:1", "settings": {"rollout": f"{folder}/mine.py:rollout"}},
    }


def test_no_container_sees_the_runs(tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "mine.py").touch()
    (tmp_path / "link").symlink_to("code")
    run = tmp_path / "code" / "runs" / "one"
    run.mkdir(parents=True)
    for code in ("code", "link"):
        config = validate(Config, in_container(tmp_path / code, run.parent), "")
        order = container_order(run, config, 0)
        assert (order.files, order.hidden) == ([tmp_path / code], [tmp_path / code / "runs"])
        assert list(order.nothing.iterdir()) == []
        masked = f"--mount type=bind,source={order.nothing},target={tmp_path / code}/runs,readonly"
        assert masked in " ".join(container_command("/usr/bin/docker", order))
    elsewhere = container_order(run, validate(Config, in_container(tmp_path / "code", tmp_path / "runs"), ""), 0)
    assert elsewhere.hidden == []


def test_what_an_environment_reads_is_not_among_the_runs(tmp_path: Path) -> None:
    (tmp_path / "mine.py").touch()
    plan = resolve(validate(Config, in_container(tmp_path, tmp_path), ""), [], "")
    with pytest.raises(ConfigError, match=rf"^run\.directory: found {tmp_path}, of which .* without {tmp_path}, which"):
        check_env_workers(plan)


@pytest.mark.parametrize(
    ("script", "told"),
    [
        ("", "and there is no such program"),
        ("echo it has no elastic >&2; exit 1", "which cannot import Elastic: it has no elastic"),
    ],
    ids=["not there", "without Elastic"],
)
def test_an_interpreter_that_is_none_of_ours_is_told(script: str, told: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").touch()
    python = engine(tmp_path, "python", script) if script else f"{tmp_path}/bin/python"
    own = {"name": "agent", "python": python, "settings": {"rollout": f"{tmp_path}/mine.py:rollout"}}
    written = {**in_container(tmp_path, tmp_path / "runs"), "environment": own}
    plan = resolve(validate(Config, written, ""), [], "")
    with pytest.raises(ConfigError, match=rf"^environment\.python: found '{python}', {told}; allowed: an interpreter"):
        check_env_workers(plan)


def test_a_network_is_of_containers() -> None:
    with pytest.raises(ConfigError, match="set container"):
        validate(EnvironmentConfig, {"network": "host"}, "", "environment")
    assert validate(EnvironmentConfig, {"network": "host", "container": "a/b:1@sha256:0"}, "").network == "host"
    with pytest.raises(ConfigError, match="container"):
        validate(EnvironmentConfig, {"container": "--privileged"}, "", "environment")
