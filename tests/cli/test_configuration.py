"""`elastic config explain`, the page of all keys, and what a dry run says differs from the defaults."""

import json
from pathlib import Path

import pytest

from benchmarks._shapes import write_chat_policy
from elastic.cli.configuration import reference
from elastic.compose.reference import changed, explained, key_meanings
from elastic.config import load_config

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"


def test_the_page_is_current() -> None:
    assert PAGE.read_text() == reference(), "run: python -m elastic.cli.configuration > docs/configuration.md"


def test_every_key_has_a_meaning_and_every_section_is_found_also_by_its_end() -> None:
    meanings = key_meanings()
    assert [one.key for one in meanings if not one.meaning] == []
    for section in {one.section for one in meanings if one.section}:
        keys = {one.key for one in meanings if one.section == section}
        for asked in (section, section.replace("NAME", "mine"), section.partition("NAME.")[2]):
            assert not asked or keys <= {one.key for one in explained(asked, meanings)}, asked


def test_keys_of_other_packages_are_explained(elastic, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    about = tmp_path / "theirs-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1\n")
    points = "[elastic.environments]\ntheirs = theirs:Theirs\n[elastic.providers]\ngone = nosuch:Gone\n"
    (about / "entry_points.txt").write_text(points)
    (tmp_path / "theirs.py").write_text(
        "import sys\nfrom pydantic import BaseModel, Field\nassert 'elastic.cli.app' not in sys.modules\n"
        "class Theirs:\n    class Settings(BaseModel):\n        highest: int = Field(9, description='up to this')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    code, out, err = elastic("config", "explain", "environment.settings.highest")  # A provider is broken meanwhile.
    assert (code, out.splitlines()[1].strip()) == (0, "up to this"), err
    assert "environment.settings.highest (of environment 'theirs'): whole number; default 9" in out


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("trainer.learning_rate", ("trainer.learning_rate: number > 0; default 0.0002", "AdamW")),
        ("rollout", ("rollout.groups: whole number", "rollout.temperature")),
        ("providers.spot", ("providers.NAME.trace (for `kind = 'spot-replay'`)",)),
        ("providers.mine.trace", ("providers.NAME.trace (for `kind = 'spot-replay'`)",)),
        ("providers.mine.lending.stall_s", ("providers.NAME.lending.stall_s",)),
        ("providers.ec2.max_workers", ("providers.NAME.max_workers (for `kind = 'ec2'`)",)),
        (
            "pool",
            (
                "pool.policy (in POOL.toml)",
                "pool.rollout.memory_gb (in POOL.toml): number ≥ 0, ≤ 1e+06, in GB",
                "spot.trace",
            ),
        ),
        ("limits.silence_s", ("default 10.0", "node agent that says nothing")),
        ("job", ("job.slo: ", "job.plan.rollout_s: ")),
        ("executor.admission", ("providers.NAME.executor.admission.settings.arriving_share (with policy slo)",)),
        ("learning_rate", ("trainer.learning_rate: number > 0",)),
        ("engine.vllm", ("engine.vllm.restart_max_s",)),
    ],
)
def test_a_key_or_a_section_is_explained(elastic, key: str, words: tuple[str, ...]) -> None:
    code, out, err = elastic("config", "explain", key)
    assert (code, err) == (0, "")
    for each in words:
        assert each in out


def test_an_unknown_key_suggests_near_ones(elastic, refused) -> None:
    refused(elastic("config", "explain", "trainer.lerning_rate"), "unknown key", "near: trainer.learning_rate")
    refused(elastic("config", "explain", "providers.nosuch.trade"), "unknown key", "providers.NAME.trace")
    refused(elastic("config", "explain", ""), "unknown key ''", "sections: ", "trainer")
    refused(elastic("config", "explain", "trainer."), "unknown key 'trainer.'", "near: trainer, ")
    refused(elastic("config", "explain", "zzz"), "sections: ", "trainer")


def test_what_differs_is_what_was_set(config: Path) -> None:
    resolved = json.loads(load_config(config, ["trainer.learning_rate=1e-3"]).model_dump_json())
    told = changed(resolved)
    assert told["trainer.learning_rate"] == 1e-3
    assert told["rollout.groups"] == 2
    assert "trainer.betas" not in told
    assert "rollout.temperature" not in told


def test_a_dry_run_begins_with_what_differs(elastic, config: Path) -> None:
    code, out, err = elastic("run", config, "--dry-run")
    assert code == 0, err
    assert out.startswith("what differs from the defaults:\n")
    assert "  rollout.groups = 2\n" in out


def test_a_run_that_others_train_holds_its_leases_unless_it_is_said_otherwise(elastic, tmp_path: Path) -> None:
    policy = write_chat_policy(tmp_path / "policy")
    config = tmp_path / "rollouts.toml"
    config.write_text(f"[model]\ncheckpoint = '{policy}'\n[providers.spot]\nkind = 'spot-replay'\n")
    served = ("serve-rollouts", config, "--providers", "spot", "--weights-root", tmp_path, "--dry-run", "--json")
    for said, hold in ((), "auto"), (("--set", "provisioning.hold=rollouts"), "rollouts"):
        ended = elastic(*served, *said)
        assert ended.code == 0, ended.err
        assert json.loads(ended.out)["config"]["provisioning"]["hold"] == hold


def test_an_image_is_told_what_its_kind_of_environment_needs(elastic, refused) -> None:
    assert "0-py3-none-any.whl verifiers\n" in elastic("environments", "dockerfile", "verifiers").out
    assert elastic("environments", "dockerfile").out.endswith("0-py3-none-any.whl\n")
    refused(elastic("environments", "dockerfile", "calculator"), "found 'calculator'; allowed: agent, chat")
