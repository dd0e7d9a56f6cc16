"""A start that cannot succeed ends the wait for it, with its cause, on the terminal and in the report."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import Ended

FAILS = """
import os, sys
if "worker" in sys.orig_argv and {which}:
    os.write(2, b"RuntimeError: the driver is too old\\n")
    os._exit(3)
"""
CAUSE = "its process exited with status 3: RuntimeError: the driver is too old"


@pytest.fixture
def failing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Has workers fail as they begin: those for which this expression is true."""

    def make(which: str) -> None:
        (tmp_path / "site").mkdir()
        (tmp_path / "site" / "sitecustomize.py").write_text(FAILS.format(which=which))
        monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))

    return make


def test_a_trainer_that_cannot_start_ends_the_run(
    elastic: Callable[..., Ended], config: Path, failing: Callable[[str], None]
) -> None:
    failing("'--trainer' in sys.orig_argv")
    ended = elastic("run", config, "--set", "scheduler.retry_base_s=0.1")
    assert ended.code == 1
    assert f"error: the run failed: the trainer's device cannot start: {CAUSE}" in ended.err
    (run,) = (config.parent / "runs").iterdir()
    assert "the driver is too old" in (run / "report.html").read_text()
    assert not (run / "logs" / "trainer-3.log").exists()


@pytest.mark.nightly
def test_a_provider_whose_workers_cannot_start_is_stopped_and_the_run_goes_on(
    elastic: Callable[..., Ended], config: Path, failing: Callable[[str], None]
) -> None:
    """A whole run by the command line, two of whose workers die as they start."""
    failing("'--trainer' not in sys.orig_argv")
    ended = elastic("run", config, "--providers", "spot", "--set", "scheduler.retry_base_s=0.1")
    assert ended.code == 0, ended.err
    assert f"spot is asked for nothing more, for its workers cannot start: {CAUSE}" in ended.err
    (run,) = (config.parent / "runs").iterdir()
    assert "the driver is too old" in (run / "report.html").read_text()
    assert len(list((run / "logs").glob("spot-*.log"))) == 2
