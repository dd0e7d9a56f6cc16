"""Codecs are imported wherever their sources lie: read-only, and without a home."""

import os
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

import elastic
from elastic.system.compiled import FOLDER, VARIABLE, place_below

PROGRAM = """
import os, elastic.weights.codecs, numba
print(elastic.__file__, os.environ.get("NUMBA_CACHE_DIR", "none"), numba.config.CACHE_DIR)
"""


@pytest.fixture
def read_only(tmp_path: Path) -> Path:
    """Sources beside which nothing can be written, not even by root: a file is in the way."""
    source, copied = Path(elastic.__file__).parent, tmp_path / "tree" / "elastic"
    shutil.copytree(source, copied, ignore=shutil.ignore_patterns("__pycache__", "cli", "server", "chaos", "sim"))
    (copied / "weights" / "codecs" / "__pycache__").touch()
    return copied.parent


def imported(tree: Path, **variables: str) -> list[str]:
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
    environment |= {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1", "XDG_CACHE_HOME": "/dev/null"}
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=tree,
        env=environment | variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.split()


def test_codecs_of_read_only_sources_are_kept_elsewhere(read_only: Path, tmp_path: Path) -> None:
    """New interpreters compile codecs anew."""
    module, own, kept = imported(read_only)
    assert module.startswith(str(read_only))
    assert own != "none"
    assert kept == f"{own}/numba-{version('numba')}", "another numba, which shares the place, reads nothing of it"
    assert not Path(own).exists(), "a process's own place goes with it"
    chosen = str(tmp_path / "chosen")
    assert imported(read_only, NUMBA_CACHE_DIR=chosen)[1:] == [chosen, f"{chosen}/numba-{version('numba')}"]


def test_processes_of_a_run_keep_them_below_it_just_where_they_must(read_only: Path, tmp_path: Path) -> None:
    assert place_below(tmp_path) == {}, "the default place can be written"
    program = "import pathlib, elastic.system.compiled; print(elastic.system.compiled.place_below(pathlib.Path('run')))"
    environment = {"PYTHONPATH": str(read_only), "XDG_CACHE_HOME": "/dev/null", "PATH": os.environ["PATH"]}
    told = subprocess.check_output([sys.executable, "-c", program], cwd=read_only, env=environment, text=True)
    assert told.strip() == str({VARIABLE: f"run/{FOLDER}"})
