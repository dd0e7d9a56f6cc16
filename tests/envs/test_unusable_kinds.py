"""Environments of others that cannot be played end their env worker with one message, which says what is allowed."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from elastic.front.tiny import write_tokenizer
from elastic.testing.environments import EnvironmentUnderTest, EnvWorkerUnderTest, StandInRun
from tests.envs.test_kinds import (
    python_of,
    write_reasoning,
    write_verifiers,
)

pytestmark = pytest.mark.environments

RAISING = "raise ValueError('no such lake')\n"


def write_raising(folder: Path, _: bool) -> Mapping[str, Any]:
    (folder / "mine.py").write_text(RAISING)
    return {"settings": {"id": f"{folder}/mine.py:Lake"}}


def write_before(folder: Path, _: bool) -> Mapping[str, Any]:
    (folder / "saying.py").write_text("def load_environment():\n    raise NotImplementedError\n")
    return {"settings": {"id": "saying"}}


def named(key: str, name: str) -> Callable[[Path, bool], Mapping[str, Any]]:
    return lambda *_: {"settings": {key: name}}


@pytest.mark.parametrize(
    ("kind", "package", "write", "told"),
    [
        ("gymnasium", "reasoning-gym", write_raising, ("ValueError: no such lake", "mine.py, line 1")),
        ("gymnasium", "reasoning-gym", named("id", "FrozenLak-v1"), ("FrozenLak", "near are: FrozenLake-v1")),
        ("reasoning-gym", "reasoning-gym", named("dataset", "leg_count"), ("leg_count", "near are: leg_counting")),
        ("reasoning-gym", "openenv", write_reasoning, ("pip install reasoning-gym",)),
        ("openenv", "openenv", named("url", "http://127.0.0.1:9"), ("settings.url", "Failed to connect")),
        ("verifiers", "openenv", write_verifiers, ("verifiers cannot be imported",)),
        ("verifiers", "verifiers", write_before, ("saying is a package for verifiers before 0.4", "has 0.4")),
        ("verifiers", "verifiers", named("id", "nosuch-sums"), ("settings.id: found 'nosuch-sums'", "of which")),
        ("verifiers", "verifiers-old", write_verifiers, ("saying is a package for verifiers 0.4", "has 0.3")),
    ],
)
async def test_what_cannot_be_played_is_told(
    kind: str, package: str, write: Callable[[Path, bool], Mapping[str, Any]], told: tuple[str, ...], tmp_path: Path
) -> None:
    python = python_of(package)
    if not python.exists():
        pytest.skip(f"{python} is not there: `make test-environments` makes it")
    write_tokenizer(tmp_path / "policy")
    run = StandInRun(tmp_path / "run", tmp_path / "policy", {"name": kind, **write(tmp_path, False)})
    async with run.serving():
        worker = EnvWorkerUnderTest(run, EnvironmentUnderTest(name=kind, write=write, python=python))
        assert await worker.ended() == 2
    words = worker.words()
    assert f"error: {run.unusable}" in words
    assert str(python) in words
    assert [one for one in told if one not in " ".join(words.split())] == []
    assert "Traceback" not in words
