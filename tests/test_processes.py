"""Tests that processes share are each run once, and whatever becomes of one is told."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
TESTS = """
import os, pytest

@pytest.fixture(scope="session")
def begun(tmp_path_factory):
    (tmp_path_factory.getbasetemp() / str(os.getpid())).touch()

@pytest.mark.parametrize("number", range(50))
def test_each(begun, number, tmp_path_factory):
    (tmp_path_factory.getbasetemp() / f"begun {number}").touch()
    print("told by", number)
    assert number % 20 != 5

@pytest.mark.slow
def test_that_ends_its_process():
    os._exit(3)

@pytest.mark.alone
def test_alone(tmp_path_factory):
    print("after", len([*tmp_path_factory.getbasetemp().glob("begun *")]))
"""


def test_each_is_run_once_and_told_of(tmp_path: Path) -> None:
    """Pytest runs within pytest, with processes of its own."""
    (tmp_path / "test_some.py").write_text(TESTS)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "tests.processes",
        "--processes",
        "3",
        "--basetemp",
        tmp_path / "t",
    ]
    ran = subprocess.run(
        [*command, "-W", "ignore", "-rA", "--rootdir", tmp_path, tmp_path], cwd=ROOT, capture_output=True, text=True
    )
    assert ran.returncode == 1, ran.stderr
    passed = re.findall(r"^PASSED .*\[(\d+)\]$", ran.stdout, re.MULTILINE)
    failed = re.findall(r"^FAILED .*\[(\d+)\]", ran.stdout, re.MULTILINE)
    assert failed != []
    assert all(f"told by {number}\n" in ran.stdout for number in failed)
    ended = re.search(r"the process that ran it ended with 3; it had taken (\d+) more tests", ran.stdout)
    assert ended is not None
    assert f"after {len(passed) + len(failed)}\n" in ran.stdout
    assert len({*passed}) == len(passed) == 50 - len(failed) - int(ended[1])
    assert 1 <= len([each for each in (tmp_path / "t").iterdir() if each.name.isdigit()]) <= 2
