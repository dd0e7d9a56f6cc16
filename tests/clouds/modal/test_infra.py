"""The dry run of Modal's deployment: what it shows, and what it refuses."""

import copy
import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from elastic.system.modal import APP, version
from tests.clouds.modal_server import Bench

pytestmark = pytest.mark.clouds

DRY_RUN = Path(__file__).parents[3] / "infra" / "modal" / "dry_run.py"


@pytest.fixture(scope="module")
def dry_run() -> Any:
    spec = importlib.util.spec_from_file_location("dry_run", DRY_RUN)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_it_shows_what_would_be_deployed(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, DRY_RUN, "--package", "some-package==1.2"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    for words in ("Rollout.*: ", "batch: ", "function: ", "some-package==1.2", version()):
        assert words in done.stdout


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("function", {"autoscalerSettings": {"minContainers": 1, "scaledownWindow": 2}}, "function: keeps containers"),
        ("batch", {"warmPoolSize": 2}, "batch: keeps containers warm"),
        ("batch", {"autoscalerSettings": {"scaledownWindow": 600}}, "batch: an idle container goes after 600 s"),
        ("function", {"timeoutSecs": 0}, "function: a call ends after 0 s"),
        ("function", {"schedule": {}}, "function: has a schedule"),
        ("Rollout.*", None, "Rollout.*: not among"),
    ],
)
def test_what_would_cost_while_no_run_goes_on_is_refused(
    platform: Bench, dry_run: Any, name: str, change: dict[str, Any] | None, words: str
) -> None:
    app = copy.deepcopy(platform.app(APP))
    assert list(dry_run.wrong(app, version())) == []
    if change is None:
        del app["functions"][name]
    else:
        app["functions"][name] |= change
    (fault,) = dry_run.wrong(app, version())
    assert fault.startswith(words)


def test_another_version_is_refused(platform: Bench, dry_run: Any) -> None:
    (fault,) = dry_run.wrong(platform.app(APP), "0.0.0-another")
    assert "0.0.0-another" in fault
