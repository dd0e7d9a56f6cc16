"""`elastic profile`: a live engine's speeds become a file that `elastic simulate` takes."""

import json
import tomllib
from pathlib import Path

import pytest

from elastic.compose.runs import new_run_dir
from elastic.config import load_config
from elastic.runtime.journal import RunDirectory

QUICK = ("--set", "engine.pacing.decode_step_s={1=0.004}", "--set", "engine.max_batch=2")


def test_a_measured_engine_can_be_simulated(elastic, config: Path, tmp_path: Path) -> None:
    """An engine is really measured, and what was measured is simulated."""
    path = tmp_path / "machine.toml"
    code, out, err = elastic("profile", "--engine", config, "-o", path, "--json", *QUICK)
    assert code == 0, err
    (line,) = out.splitlines()
    body = json.loads(line)
    assert body["profile"] == str(path)
    assert set(body["decode_step_s"]) == {"1", "2"}
    assert body["numbers"]["prefill_tokens_per_s"]["source"]
    assert "boot_s" in body["estimates"]
    assert "prefill_tokens_per_s" not in body["estimates"]
    assert tomllib.loads(path.read_text())["kv_tokens"]["value"] == body["numbers"]["kv_tokens"]["value"]
    code, out, err = elastic("simulate", config, "--providers", "spot", "--profile", path, "--json")
    assert code == 0, err


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        ((), "give a RUN, --engine CONFIG, or both"),
        (("latest", "--set", "run.steps=3"), "--set overrides keys of --engine CONFIG"),
        (("latest",), "no run 'latest' in"),
        (("nosuch",), "no run 'nosuch'"),
        (("--engine", "nosuch.toml"), "nosuch.toml: cannot be read"),
    ],
)
def test_bad_input(elastic, tmp_path: Path, arguments: tuple[str, ...], found: str) -> None:
    path = tmp_path / "machine.toml"
    code, out, err = elastic("profile", *arguments, "-o", path, "--directory", tmp_path / "runs")
    assert (code, out) == (2, "")
    assert found in err
    assert not path.exists()


@pytest.mark.parametrize(
    ("override", "found"),
    [
        ("engine.kind=nosuch", "unknown engine 'nosuch'"),
        ("model.checkpoint=nosuch", "model.checkpoint: nosuch/config.json cannot be read"),
    ],
)
def test_engines_that_are_not_there(elastic, config: Path, tmp_path: Path, override: str, found: str) -> None:
    code, out, err = elastic("profile", "--engine", config, "-o", tmp_path / "machine.toml", "--set", override)
    assert (code, out) == (2, "")
    assert found in err


def test_runs_are_told_with_their_estimates(elastic, config: Path, tmp_path: Path) -> None:
    settings = load_config(config)
    run_dir = new_run_dir(settings)
    journal = RunDirectory(run_dir).begin_journal(settings.journal)
    journal.meta("status", "finished")
    journal.meta("config", settings.model_dump_json())
    journal.close()
    path = tmp_path / "machine.toml"
    where = ("--directory", settings.run.directory)
    code, out, err = elastic("profile", "latest", "-o", path, *where)
    assert code == 0, err
    assert str(path) in out
    assert "estimate: boot_s = 4 (2 to 10): " in err
    code, out, err = elastic("profile", "latest", "-o", path, "--base", "nosuch", *where)
    assert (code, out) == (2, "")
    assert "no profile 'nosuch'" in err


@pytest.mark.nightly
def test_a_live_unpaced_run_and_its_engine_make_a_profile(start, elastic, config: Path, tmp_path: Path) -> None:
    """Which simulates what could not be simulated without one."""
    paced, _, rest = config.read_text().partition("[engine.pacing]")
    config.write_text(paced + "[providers.spot]" + rest.partition("[providers.spot]")[2])
    process = start("run", config)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    path, directory = tmp_path / "machine.toml", config.parent / "runs"
    arguments = ("--engine", config, "-o", path, "--directory", directory, "--json")
    code, out, err = elastic("profile", "latest", *arguments)
    assert code == 0, err
    body = json.loads(out)
    for key in ("trainer_boot_s", "reset_s"):
        assert body["numbers"][key]["source"].startswith("measured in small-")
    assert body["numbers"]["prefill_tokens_per_s"]["source"].startswith("measured: torch on cpu")
    assert {"boot_s", "serving_boot_s", "keyframe_bytes", "link_bytes_per_s"} <= set(body["estimates"])
    code, _, err = elastic("simulate", config, "--providers", "spot", "--json")
    assert code == 2
    assert "no --profile given" in err
    code, _, err = elastic("simulate", config, "--providers", "spot", "--profile", path, "--json")
    assert code == 0, err
    # The simulated run is the later one.
    code, out, err = elastic("profile", "latest", *arguments)
    assert code == 0, err
    assert "measured in small-" in json.loads(out)["numbers"]["trainer_boot_s"]["source"]
