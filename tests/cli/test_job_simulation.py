"""`elastic simulate --jobs`: what it tells, the page it writes, and what it refuses."""

import json
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "jobs.toml"


def test_jobs_share_nodes_within_their_slos_for_less_than_alone(elastic, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    ended = elastic("simulate", "--jobs", str(EXAMPLE), "--policy", "ours", "--output", str(page), "--json")
    assert ended.code == 0, ended.err
    report = json.loads(ended.out)
    assert report["policy"] == "ours"
    assert report["slo_met_share"] == 1.0
    assert [job["how"] for job in report["jobs"]] == ["new", "packed", "new"]
    assert report["usd"] < report["usd_alone"]
    assert report["usd_unbilled"] == pytest.approx(0.0, abs=1e-6)
    for node in report["nodes"]:
        assert sum(node[f"{account}_share"] for account in ("slice", "switching", "idle", "down")) == pytest.approx(1.0)
    written = page.read_text()
    for heading in ("Turns by node", "Jobs", "Groups", "Nodes"):
        assert f"<h2>{heading}</h2>" in written
    assert written.count("agent-14b") > written.count("<title>agent-14b")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("slo = 1.3", "slo = 0.9"), ("job math-7b: slo: found 0.9", "allowed: at least 1")),
        (("slo = 1.3", "slo = 1.01"), ("it cannot keep its slo of 1.01 even alone", "it could keep 1.017")),
        (
            ("rollout_memory_gb = 276", "rollout_gb = 276"),
            ("jobs.0.rollout_gb: unknown key", "near: rollout_", "rollout_memory_gb"),
        ),
        (("rollout_memory_gb = 276", "rollout_memory_gb = 2000"), ("needed 2000000000000 bytes", "largest: 10000")),
        (("at_s = 600", "at_s = -1"), ("job code-8b: at_s: found -1", "allowed: at least 0")),
        (("at_s = 1200", "at_s = 20"), ("job agent-14b: at_s: found 20", "allowed: at least 600, in order")),
        (
            ("usd_per_gpu_hour = 5.28", "usd_per_gpu_hour = -1"),
            ("pool.train.usd_per_gpu_hour: input should be greater", "(found -1)"),
        ),
        (
            ("[pool.train]\nnodes = 4", "[pool.train]\nnodes = 0"),
            ("pool.train.nodes: input should be greater", "(found 0)"),
        ),
        (("memory_gb = 1000", "memory_gb = -1"), ("pool.rollout.memory_gb: input should", "(found -1)")),
        (("train_s = 110", "trains = 110"), ("trains",)),
        (("train_s = 110", "train_s = -110"), ("jobs.0.train_s: input should be greater", "(found -110)")),
        (("steps = 100", "steps = 0"), ("jobs.0.steps: input should be greater", "(found 0)")),
        (('name = "code-8b"', 'name = "math-7b"'), ("job math-7b: found 2 of that name",)),
    ],
)
def test_bad_input_is_one_message_and_exit_code_2(
    elastic, tmp_path: Path, change: tuple[str, str], words: tuple[str, ...]
) -> None:
    workload = tmp_path / "jobs.toml"
    text = EXAMPLE.read_text()
    assert change[0] in text
    workload.write_text(text.replace(*change, 1))
    ended = elastic("simulate", "--jobs", str(workload))
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.startswith("error: ")
    for each in words:
        assert each in ended.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--jobs", str(EXAMPLE), "--policy", "best"), "--policy: pool.policy: found 'best'; allowed: 'gavel', "),
        (("--jobs", str(EXAMPLE), "--policy", "optimum"), "(of an optimum there would be only a bound here"),
        (("--jobs", str(EXAMPLE), "--seed", "3"), "--seed does not apply"),
        (("some.toml", "--policy", "ours"), "--policy is for --jobs"),
        (("--jobs", "nowhere.toml"), "nowhere.toml: cannot be read (No such file or directory)"),
    ],
)
def test_what_does_not_apply_is_refused_with_jobs(elastic, arguments: tuple[str, ...], words: str) -> None:
    ended = elastic("simulate", *arguments)
    assert ended.code == 2
    assert words in ended.err
