"""`elastic top`: how things stand now, from a journal and from a server."""

from pathlib import Path

import pytest
from rich.console import Console

from elastic.cli.tables import FittedListing
from elastic.cli.top import Screen, bars
from tests.pool.stand_in import POOL, StandIn
from tests.server.written_runs import write_run


def test_a_run_on_disk_is_watched_by_its_journal(elastic, tmp_path: Path) -> None:
    write_run(tmp_path / "lake", steps=12)
    (tmp_path / "lake" / "config.json").write_text("{}")
    code, out, err = elastic("top", "lake", "--directory", str(tmp_path))
    assert (code, err) == (0, "")
    assert "step 13/12" not in out
    assert "spot" in out
    assert "tokens/s, up to 10" in out
    code, out, _ = elastic("top", "--directory", str(tmp_path))
    assert (code, out) == (0, f"no run goes on in {tmp_path}\n")
    code, out, err = elastic("top", "nosuch", "--directory", str(tmp_path))
    assert (code, out) == (2, "")
    assert "nosuch" in err


def test_a_pool_of_this_machine_is_watched(elastic, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    file = tmp_path / "pool.toml"
    file.write_text(POOL.format(directory=tmp_path))
    with StandIn(file):
        code, out, err = elastic("top", "--pool", "lab", "--pools", tmp_path / "pools")
    assert (code, err) == (0, "")
    assert f"pool lab in {tmp_path}/pools/lab, up 0 s" in out
    assert "no job goes on" in out
    code, out, err = elastic("top", "--pool", "nosuch", "--pools", tmp_path / "pools")
    assert (code, out) == (2, "")
    assert "nosuch" in err


def test_bars_are_as_high_as_what_they_stand_for() -> None:
    assert bars([]) == ""
    assert bars([0.0, 0.0]) == "▁▁"
    assert bars([0.0, 50.0, 100.0]) == "▁▅█"
    assert len(bars([1.0] * 500)) == 60


def shown(what: object, *, width: int, height: int, terminal: bool) -> list[str]:
    console = Console(width=width, height=height, force_terminal=terminal, color_system=None)
    with console.capture() as captured:
        console.print(what, height=height, crop=False)
    return captured.get().splitlines()


def test_a_list_leaves_out_what_a_terminal_has_no_room_for() -> None:
    rows = [("run_1", "running", "0.500", "$1.00")] * 30
    listing = FittedListing(("run", "phase", "reward", "cost"), rows, spare=("reward", "cost"), right=("cost",))
    assert shown(listing, width=80, height=24, terminal=True)[0].split() == ["run", "phase", "reward", "cost"]
    assert shown(listing, width=26, height=24, terminal=True)[0].split() == ["run", "phase", "cost"]
    assert shown(listing, width=20, height=24, terminal=True)[0].split() == ["run", "phase"]
    assert shown(listing, width=40, height=24, terminal=False)[0].split() == ["run", "phase", "reward", "cost"]
    assert len(shown(listing, width=80, height=24, terminal=True)) == 31
    screen = shown(Screen(listing), width=80, height=24, terminal=True)
    assert (len(screen), screen[-1]) == (24, "… 8 more lines: there is no room for them here")
    assert len(shown(Screen(listing), width=80, height=40, terminal=True)) == 31
