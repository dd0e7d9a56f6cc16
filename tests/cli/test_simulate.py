"""`elastic simulate`: what the options mean, what is said beside the figures, and what is refused."""

import json
import math
import zlib
from pathlib import Path

import pytest

from elastic.simulation.performance.profile import DATA

LOCAL = (DATA / "profile-local.toml").read_text()
CALM = ("--set", "run.steps=1")


def runs(config: Path) -> list[Path]:
    return sorted((config.parent / "runs").glob("*"))


def test_reports_as_a_live_run_does(elastic, config: Path) -> None:
    code, out, err = elastic("simulate", config, "--providers", "spot", "--json")
    assert code == 0, err
    report = json.loads(out)
    assert report["simulated"] is True
    assert report["notes"] == []
    assert len(report["steps"]) == 2
    assert Path(report["report"]).is_file()
    assert "step 2/2" in err


def test_latest_is_the_run_before(refused, elastic, config: Path) -> None:
    refused(elastic("simulate", config, "--turns-from", "latest"), "no run 'latest'")
    assert runs(config) == []
    assert elastic("simulate", config, "--json").code == 0
    code, out, err = elastic("simulate", config, "--turns-from", "latest", "--set", "rollout.groups=3", "--json")
    assert code == 0, err
    (note,) = json.loads(out)["notes"]
    assert note.startswith("8 of 24 trajectories are not in the run")
    assert f"note: {note}" in err


def test_sessions_that_are_cut_are_counted(elastic, config: Path) -> None:
    code, out, err = elastic("simulate", config, *CALM, "--turns-from", "claude-code-sessions", "--json")
    assert code == 0, err
    assert json.loads(out)["notes"] == [
        "8 of 8 trajectories are longer than rollout.max_turns, rollout.max_tokens_per_turn or "
        "engine.max_context_tokens allows, and were cut"
    ]


def test_nothing_comes_of_no_workers_and_says_so(elastic, config: Path) -> None:
    nobody = ("--set", "providers.spot.max_workers=0")
    code, out, err = elastic("simulate", config, *CALM, "--providers", "spot", *nobody, "--json")
    assert code == 0
    note = "providers.spot.max_workers is 0: no worker comes from it"
    assert json.loads(out)["notes"] == [note]
    assert f"note: {note}" in err


def test_a_configuration_says_how_it_is_simulated(elastic, config: Path, tmp_path: Path) -> None:
    config.write_text(config.read_text() + '[simulation]\nproviders = ["spot"]\n[simulation.numbers]\nboot_s = 3.5\n')
    code, out, _ = elastic("simulate", config, *CALM, "--json")
    assert code == 0
    assert json.loads(out)["requested_providers"] == ["spot"]
    code, out, _ = elastic("simulate", config, *CALM, "--providers", "", "--json")
    assert json.loads(out)["requested_providers"] == []


def test_a_file_is_the_same_by_any_path(elastic, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "slow.toml").write_text(LOCAL.replace("value = 8000", "value = 80"))
    figures = []
    for name in ("slow.toml", "./slow.toml", str(tmp_path / "slow.toml")):
        code, out, err = elastic("simulate", config, *CALM, "--profile", name, "--json")
        assert code == 0, err
        figures.append(json.loads(out)["wall_s"])
    assert len(set(figures)) == 1


H100 = "H100/Qwen3-8B"
HURRIED = ("--set", "scheduler.boot_timeout_s=60")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--profile", H100, *HURRIED), ("scheduler.boot_timeout_s: 60 s", "90 s", "trainer_boot_s")),
        (("--profile", f"{H100}:tp0"), ("tp0", "N from 1 on")),
        (("--profile", f"{H100}:tp2"), ("trainer.gpus: found 1", f"{H100}:tp2 has 2 GPUs")),
        (
            ("--profile", H100, "--profile", f"spot={H100}:tp4"),
            ("providers.spot.gpus_per_worker: found 1", f"{H100}:tp4 has 4 GPUs"),
        ),
        (("--profile", H100, "--profile", "local"), ("local", f"{H100} is for all already", "PROVIDER=local")),
        (("--profile", f"serverless={H100}"), ("no provider 'serverless'", "trainer, spot")),
        (("--profile", "/tmp"), ("no profile '/tmp'", "neither a file nor one of local")),
        (("--hours", "nan"), ("--hours: found nan", "positive")),
        (("--hours", "inf"), ("--hours: found inf", "positive")),
        (("--hours", "0"), ("--hours: found 0", "positive")),
        (("--frame-s", "nan"), ("--frame-s: found nan", "positive")),
        (("--environment-times",), ("--environment-times: needs --turns-from RUN",)),
        (("--set", "simulation.numbers.speed=2.0"), ("simulation.numbers.speed: unknown key", "boot_s")),
    ],
)
def test_options_that_do_not_fit(
    refused, elastic, config: Path, options: tuple[str, ...], words: tuple[str, ...]
) -> None:
    refused(elastic("simulate", config, "--providers", "spot", *options), *words)
    assert runs(config) == []


@pytest.mark.parametrize("key", ["train_tokens_per_s", "link_bytes_per_s", "relay_bytes_per_s", "prefill_tokens_per_s"])
def test_rates_of_a_profile_are_positive(refused, elastic, config: Path, tmp_path: Path, key: str) -> None:
    path = tmp_path / "machine.toml"
    zero = f'{key} = {{ value = 0, source = "x" }}'
    path.write_text("\n".join(zero if line.startswith(key) else line for line in LOCAL.splitlines()))
    refused(elastic("simulate", config, "--profile", path), f"{path}: {key}: found 0", "positive")


def test_a_serving_trace_with_a_hole(refused, elastic, config: Path, tmp_path: Path) -> None:
    times = [*range(60), *range(3000, 3060)]
    rows = [f"2026-01-01 00:{at // 60:02d}:{at % 60:02d},10,10" for at in times]
    path = tmp_path / "load.csv"
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    ended = elastic("simulate", config, "--providers", "serving", "--set", f"providers.serving.load.trace={path}")
    refused(ended, f"{path}:62: found a hole of 2941 s", "allowed: up to 600 s")


def test_devices_of_two_kinds(elastic, config: Path) -> None:
    """Rollouts on H20, training on H800."""
    profiles = ("--profile", "H800/Qwen3-8B", "--profile", "spot=H20/Qwen3-8B")
    code, out, err = elastic("simulate", config, "--providers", "spot", *profiles, "--json")
    assert code == 0, err
    assert math.isfinite(json.loads(out)["wall_s"])


@pytest.mark.parametrize(
    ("route", "words"),
    [
        ("return 'nowhere'", "route returned 'nowhere' (str); allowed: None, or the id"),
        ("return None", "route returned None for turn "),
        ("while True: pass", "route raised Interrupted: this held the simulation for more than 0.3 s, at "),
    ],
)
def test_a_policy_of_another_package_that_decides_nonsense_is_named(
    refused, elastic, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, route: str, words: str
) -> None:
    about, module = tmp_path / "site" / "lost-2.dist-info", f"lost_{zlib.crc32(route.encode())}"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: lost\nVersion: 2\n")
    (about / "entry_points.txt").write_text(f"[elastic.policies]\nrouting.lost = {module}:Lost\n")
    (about.parent / f"{module}.py").write_text(
        "import msgspec\nclass Lost(msgspec.Struct, frozen=True):\n"
        f"    def route(self, turn, fleet):\n        {route}\n"
    )
    monkeypatch.syspath_prepend(str(about.parent))
    limit = ("--set", "scheduler.plug_in_timeout_s=0.3")
    answer = elastic("simulate", config, *CALM, *limit, "--set", "routing.policy=lost")
    refused(answer, f"routing.lost of the package lost 2: {words}")
    assert runs(config) == []
