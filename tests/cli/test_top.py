"""`elastic top`: how things stand now, from a journal and from a server."""

from pathlib import Path

import pytest

from elastic.cli.top import bars
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
    assert f"pool lab in {tmp_path}/pools/lab, up 0 min" in out
    assert "no job goes on" in out
    code, out, err = elastic("top", "--pool", "nosuch", "--pools", tmp_path / "pools")
    assert (code, out) == (2, "")
    assert "nosuch" in err


def test_bars_are_as_high_as_what_they_stand_for() -> None:
    assert bars([]) == ""
    assert bars([0.0, 0.0]) == "▁▁"
    assert bars([0.0, 50.0, 100.0]) == "▁▅█"
    assert len(bars([1.0] * 500)) == 60
