"""The live panel at 80 columns, and the lines elsewhere."""

import io
import os
import sys
from typing import Any

import pytest
from rich.console import Console

from elastic.cli.output import console, say
from elastic.cli.progress import LINES_APART_S, ProgressDisplay, bar, line, render
from elastic.core.types import RunWarning
from elastic.runtime.status import ProviderStatus, RunStatus, ServingStatus
from elastic.system.host import Host, on


def status(**fields: Any) -> RunStatus:
    providers = {
        "serving": ProviderStatus(ready=2, capacity_turns=32, running_turns=30, tokens=12_345),
        "spot": ProviderStatus(
            ready=1, booting=2, capacity_turns=16, running_turns=16, preemptions=3, deaths=2, replaced=1, usd=0.1234
        ),
        "trainer": ProviderStatus(ready=1, tokens=999, usd=0.3),
    }
    body: dict[str, Any] = {
        "run": "frozenlake",
        "phase": "running",
        "step": 12,
        "steps": 80,
        "elapsed_s": 75.3,
        "success_rate": None,
        "last_success_rate": 0.42,
        "last_mean_reward": -0.217,
        "trajectories_running": 113,
        "queued_turns": 7,
        "tokens_per_s": 812.4,
        "preemptions": 3,
        "usd": 0.4234,
        "cpu_share": 0.5,
        "pacing_holds": True,
        "trainer": "awake",
        "providers": providers,
    }
    return RunStatus(**(body | fields))


def shown(status: RunStatus, width: int = 80) -> list[str]:
    console = Console(width=width, force_terminal=True, color_system=None, file=io.StringIO())
    console.print(render(status))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


BUSY = {"cpu_share": 0.97, "late_share": 0.12, "pacing_holds": False}
EARLY = {"phase": "starting", "step": 0, "last_success_rate": None, "tokens_per_s": 0.0, "trainer": "absent"}
LARGE = {
    "step": 79,
    "tokens_per_s": 99_999.0,
    "trajectories_running": 2048,
    "queued_turns": 2048,
    "usd": 1234.5678,
    "elapsed_s": 45_000.0,
    "trainer": "asleep",
    "last_success_rate": 1.0,
    "last_mean_reward": -99.25,
    "providers": {"serving": ProviderStatus(ready=64, capacity_turns=1024, running_turns=1024, tokens=123_456_789)},
}


@pytest.mark.parametrize("fields", [{}, BUSY, EARLY, LARGE])
def test_panel_fits_80_columns_whole(fields: dict[str, Any]) -> None:
    lines = shown(status(**fields))
    assert all(len(text) <= 80 for text in lines)
    assert not any("…" in text for text in lines)


def test_panel_says_what_a_run_is_at() -> None:
    head, facts, columns, *rows, _ = shown(status())
    assert "frozenlake" in head
    assert "step 13/80" in head
    assert "1:15" in head
    assert "success  42%  mean reward -0.217" in facts
    assert "812 tokens/s" in facts
    assert columns.split() == ["provider", "ready", "booting", "turns", "tokens", "preempted", "died", "cost"]
    assert [row.split()[0] for row in rows] == ["serving", "spot", "trainer", "all"]
    assert rows[-1].split() == ["all", "4", "2", "46/48", "13,344", "3", "2", "$0.4234"]


def test_figures_do_not_move_the_panel() -> None:
    calm, busy = shown(status()), shown(status(**BUSY, tokens_per_s=7.0, queued_turns=1234, last_success_rate=None))
    assert len(calm) == len(busy)
    for mark in ("tokens/s", "trajectories", "queued"):
        assert calm[1].index(mark) == busy[1].index(mark)
    assert [text.rindex("$") for text in calm[3:7]] == [text.rindex("$") for text in busy[3:7]]


def test_panel_says_when_pacing_does_not_hold() -> None:
    assert not any("paced" in text for text in shown(status()))
    assert "12% of paced iterations took longer than modelled, with the CPU at 97%" in shown(status(**BUSY))[-1]


def test_a_line_a_step_where_there_is_no_terminal() -> None:
    console = Console(width=80, file=io.StringIO())
    progress = ProgressDisplay(console)
    with progress.context:
        for step in (0, 0, 1, 1, 2):
            progress.observe(status(step=step, last_success_rate=0.5 if step else None))
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert [text.split()[1] for text in lines] == ["1/80", "1/80", "2/80"]
    assert lines[0].startswith("step 1/80 begins  trainer generates  workers serving:2 spot:1 (and 2 on their way)")
    assert "workers serving:2 spot:1 trainer:1" in lines[1]
    assert "preemptions 3  deaths spot:2 (1 replaced)" in lines[1]
    assert "12% of paced iterations took longer" in line(status(**BUSY), 0.0)


def test_lines_some_seconds_apart_in_place_of_a_bar_where_there_is_no_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    now_s = [0.0]
    with on(Host(monotonic=lambda: now_s[0])), bar("base policy") as show:
        for step in range(5):
            now_s[0] = step * LINES_APART_S / 2
            show(step, 5, "")
    assert capsys.readouterr().err.splitlines() == ["base policy: 2/5", "base policy: 4/5"]


def test_a_run_that_others_train_says_what_it_serves() -> None:
    console = Console(width=80, file=io.StringIO())
    progress = ProgressDisplay(console)
    for version in (6, 6, 7):
        serving = ServingStatus(version=version, label=f"step_{version}0", running=5, waiting=2, held=version == 7)
        serves = status(serving=serving, steps=10**9, last_success_rate=None)
        progress.observe(serves)
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    workers = "812 tokens/s  workers serving:2 spot:1 (and 2 on their way) trainer:1  75 s"
    assert lines == [
        f"version 6 (step_60)  requests 5 running, 2 waiting  {workers}",
        f"version 7 (step_70)  requests 5 running, 2 held  {workers}",
    ]
    panel = shown(serves)
    assert all(len(text) <= 80 for text in panel)
    assert "version 7 (step_70)" in panel[0]
    assert "requests 5 running, 2 held     812 tokens/s" in panel[1]
    assert not any("1000000000" in text or "mean reward" in text for text in [*lines, *panel])


def test_what_comes_before_the_first_step_is_said_as_it_comes() -> None:
    console = Console(width=80, file=io.StringIO())
    progress = ProgressDisplay(console)
    none = {"step": 0, "last_success_rate": None, "phase": "starting", "trainer": "absent"}
    booting = {"trainer": ProviderStatus(booting=1)}
    for fields in (
        none | {"providers": {}},
        *[none | {"providers": booting, "elapsed_s": elapsed_s} for elapsed_s in (1.0, 2.0, 3.0)],
        none | {"providers": {"trainer": ProviderStatus(ready=1)}, "phase": "running", "trainer": "awake"},
    ):
        progress.observe(status(**fields))
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue().splitlines() == [
        "starting  trainer starts  75 s",
        "starting  trainer starts  workers trainer:0 (and 1 on their way)  1 s",
        "step 1/80 begins  trainer generates  workers trainer:1  75 s",
    ]


@pytest.mark.parametrize("width", [80, 120])
def test_a_simulation_shows_neither_success_nor_reward(width: int) -> None:
    console = Console(width=width, file=io.StringIO())
    ProgressDisplay(console, learns=False).observe(status(step=1))
    assert isinstance(console.file, io.StringIO)
    panel = Console(width=width, force_terminal=True, color_system=None, file=console.file)
    panel.print(render(status(), learns=False))
    assert "tokens/s" in console.file.getvalue()
    assert not any(word in console.file.getvalue() for word in ("success", "reward"))


def test_a_steps_line_has_the_rate_since_the_line_before() -> None:
    console = Console(width=120, file=io.StringIO())
    progress = ProgressDisplay(console)
    for step, elapsed_s, tokens in ((1, 10.0, 500), (1, 12.0, 900), (2, 14.0, 900), (3, 18.0, 2900)):
        providers = {"spot": ProviderStatus(tokens=tokens - 100), "trainer": ProviderStatus(tokens=100)}
        progress.observe(status(step=step, elapsed_s=elapsed_s, tokens_per_s=0.0, providers=providers))
    assert isinstance(console.file, io.StringIO)
    rates = [text.split(" tokens/s")[0].split()[-1] for text in console.file.getvalue().splitlines()]
    assert rates == ["50", "100", "500"]


def test_a_run_goes_on_when_nobody_watches(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w") as gone:
        monkeypatch.setattr(sys, "stderr", gone)
        progress = ProgressDisplay(console(stderr=True))
        for step in range(3):
            progress.observe(status(step=step))
        progress.say("stopping")
        say("stopped")


@pytest.mark.parametrize("terminal", [False, True])
def test_what_a_run_warns_of_stands_in_a_line_of_its_own_whole(terminal: bool) -> None:
    """On a terminal, too, above the panel."""
    shown = Console(width=40, force_terminal=terminal, color_system=None, file=io.StringIO())
    display = ProgressDisplay(shown)
    message = "spot-1 does not generate with the weights of version 3: its log-probabilities are 2 nats away"
    with display.context:
        display.observe(status(warnings=[RunWarning(kind="Mismatch", message=message)]))
        display.observe(status())
    assert isinstance(shown.file, io.StringIO)
    assert shown.file.getvalue().count(f"warning: {message}") == 1
