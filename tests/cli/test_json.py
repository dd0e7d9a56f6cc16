"""With `--json`, standard output is one JSON object and nothing else."""

import json
from pathlib import Path

import pytest


def parsed(out: str) -> dict:
    (only,) = out.splitlines()
    body = json.loads(only)
    assert isinstance(body, dict)
    return body


def test_doctor(elastic) -> None:
    code, out, _ = elastic("doctor", "--json")
    body = parsed(out)
    assert code == (0 if body["healthy"] else 1)
    assert {"python", "torch", "disk", "elastic.providers"} <= {finding["what"] for finding in body["findings"]}


def test_dry_run_starts_nothing(elastic, config: Path) -> None:
    code, out, err = elastic("run", config, "--providers", "serving,spot", "--seed", 9, "--dry-run", "--json")
    assert (code, err) == (0, "")
    body = parsed(out)
    assert body["config"]["run"]["seed"] == 9
    rows = {row["provider"]: row for row in body["would_acquire"]}
    assert set(rows) == {"trainer", "serving", "spot"}
    assert rows["spot"]["usd_per_hour_max"] == 2.0
    assert not (config.parent / "runs").exists()


def test_dry_run_for_people(elastic, config: Path) -> None:
    code, out, _ = elastic("run", config, "--providers", "spot", "--dry-run")
    assert code == 0
    assert "would acquire, at most" in out
    assert "trainer" in out


def test_no_runs_yet(elastic, tmp_path: Path) -> None:
    code, out, _ = elastic("runs", "--directory", tmp_path, "--json")
    assert code == 0
    assert parsed(out) == {"runs": []}


@pytest.mark.slow
def test_run_and_what_tells_of_it(start, elastic, config: Path) -> None:
    process = start("run", config, "--json")
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    body = parsed(out)
    assert Path(body["report"]).is_file()
    assert "step 2/2" in err

    directory = config.parent / "runs"
    code, out, err = elastic("report", "--directory", directory, "--json")
    assert (code, err) == (0, "")
    assert parsed(out).items() <= body.items()

    code, out, err = elastic("runs", "--directory", directory, "--json")
    assert (code, err) == (0, "")
    (row,) = parsed(out)["runs"]
    assert row["status"] == "finished"
    assert row["run"] == Path(body["report"]).parent.name

    code, out, _ = elastic("report", "--directory", directory, "--md")
    assert code == 0
    assert out.startswith("#")
