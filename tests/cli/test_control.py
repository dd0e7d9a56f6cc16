"""`elastic stop`, `cap` and `budget`: what they say, and with which exit code."""

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.runtime.test_control import CommandedRun


@pytest.fixture
def commanded(tmp_path: Path) -> Iterator[CommandedRun]:
    """A run's process, on a thread of its own."""
    path = tmp_path / "runs" / "lake"
    path.mkdir(parents=True)
    (path / "config.json").write_text("{}")
    run, up, over, loop = CommandedRun(path), threading.Event(), asyncio.Event(), asyncio.new_event_loop()

    async def serve() -> None:
        await run.socket.start()
        up.set()
        await over.wait()
        await run.socket.aclose()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    assert up.wait(30)
    yield run
    loop.call_soon_threadsafe(over.set)
    thread.join()
    loop.close()


def test_commands_reach_the_run(elastic, commanded: CommandedRun) -> None:
    path = str(commanded.path)
    code, out, _ = elastic("cap", path, "spot=8", "--id", "a", "--json")
    told = {"run": "lake", "command": "cap", "provider": "spot", "gpus": 8, "id": "a", "repeated": False}
    assert (code, json.loads(out)) == (0, told)
    code, out, err = elastic("cap", path, "spot=8", "--id", "a")
    assert (code, out) == (0, "")
    assert "at most 8 GPUs of spot; what exceeds that drains (as it was told before)" in err
    assert elastic("cap", path, "spot=none")[0] == 0
    assert elastic("budget", path, "12.50")[0] == 0
    controls = commanded.core.controls
    assert (controls.caps, controls.budget_usd) == ({}, 12.5)
    assert elastic("budget", path, "none")[0] == 0
    assert controls.budget_usd is None
    code, _, err = elastic("stop", path, "--reason", "the GPUs are needed")
    assert (code, commanded.core.stopped) == (0, "the GPUs are needed")
    assert "run --resume" in err
    code, _, err = elastic("stop", path)
    assert code == 1
    assert "ending already: the GPUs are needed" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("cap", "spot"), "PROVIDER=GPUS"),
        (("cap", "spot=many"), "PROVIDER=GPUS"),
        (("cap", "spot=-1"), "PROVIDER=GPUS"),
        (("cap", "spot=1.5"), "PROVIDER=GPUS"),
        (("cap", "=3"), "PROVIDER=GPUS"),
        (("cap", "clouds=3"), "no provider 'clouds'; allowed: spot, serving"),
        (("cap", "trainer=0"), "the run's own"),
        (("budget", "a lot"), "found 'a lot'; allowed: dollars"),
        (("budget", "nan"), "found 'nan'"),
        (("budget", "1e99"), "found '1e99'"),
    ],
)
def test_bad_input_is_named(elastic, commanded: CommandedRun, arguments, message: str) -> None:
    command, *rest = arguments
    code, out, err = elastic(command, str(commanded.path), *rest)
    assert (code, out) == (2, "")
    assert message in err
    assert not commanded.events


def test_a_run_that_nobody_is_at_takes_no_commands(elastic, tmp_path: Path) -> None:
    path = tmp_path / "lake"
    path.mkdir()
    (path / "config.json").write_text("{}")
    code, _, err = elastic("stop", str(path))
    assert code == 1
    assert "no process is at it now" in err
    assert "run --resume" in err
    code, _, err = elastic("stop", "nosuch", "--directory", str(tmp_path))
    assert (code, "no run 'nosuch'" in err) == (2, True)


def test_a_budget_is_a_positive_number(elastic) -> None:
    code, _, err = elastic("run", "examples/frozenlake.toml", "--budget-usd", "0", "--dry-run")
    assert code == 2
    assert "run.budget_usd" in err
