"""The example is valid, overrides are typed, and no number of a configuration is infinite."""

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.config import Config, ConfigError, apply_override, load_config, validate

EXAMPLE = Path(__file__).parents[1] / "examples" / "frozenlake.toml"
NUMBERS = (
    "run.steps",
    "rollout.temperature",
    "trainer.learning_rate",
    "trainer.weight_decay",
    "scheduler.drain_timeout_s",
    "journal.commit_interval_s",
    "engine.pacing.prefill_tokens_per_s",
)


def test_example_is_valid_and_comes_back_from_its_own_json(tmp_path: Path) -> None:
    config = load_config(EXAMPLE)
    saved = tmp_path / "config.json"
    saved.write_text(config.model_dump_json())
    assert load_config(saved) == config


def test_overrides_have_tomls_types_or_are_strings() -> None:
    overrides = ["run.steps=3", "rollout.temperature=0.5", "run.name=plain", "providers.spot.repeat=false"]
    config = load_config(
        EXAMPLE, [*overrides, "environment.settings.sizes=[4, 5]", "engine.pacing.decode_step_s={1=1}"]
    )
    assert (config.run.steps, config.rollout.temperature, config.run.name) == (3, 0.5, "plain")
    assert config.providers["spot"]["repeat"] is False
    assert config.mixture[0].settings["sizes"] == [4, 5]
    assert config.engine.pacing is not None
    assert config.engine.pacing.decode_step_s == {1: 1.0}


@pytest.mark.parametrize("key", NUMBERS)
@pytest.mark.parametrize("value", ["inf", "-inf", "nan", "Infinity", "1e999"])
def test_infinite_numbers_are_refused(key: str, value: str) -> None:
    with pytest.raises(ConfigError, match=key):
        load_config(EXAMPLE, [f"{key}={value}"])


@given(st.floats(allow_nan=True, allow_infinity=True), st.sampled_from(["temperature", "group_size"]))
def test_a_number_is_taken_or_refused_by_name(value: float, key: str) -> None:
    raw = {"model": {"checkpoint": "base"}, "rollout": {key: value}}
    try:
        config = validate(Config, raw, "test")
    except ConfigError as error:
        refused = str(error)
    else:
        refused = ""
        assert math.isfinite(getattr(config.rollout, key))
        assert getattr(config.rollout, key) == value
    assert not refused or f"test: rollout.{key}: " in refused


def test_what_a_run_asks_of_a_pool(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('[model]\ncheckpoint = "base"\n[job]\nslo = 1.2\nplan = { rollout_s = 4, train_s = 2 }\n')
    job = load_config(path).job
    assert (job.slo, job.plan and job.plan.rollout_s, job.rollout_nodes) == (1.2, 4.0, 1)
    for override, words in (
        ("job.slo=0.9", "job.slo: .* 1 .found 0.9"),
        ("job.plan.rollout_s=0", "greater than or equal to 0.000001"),
    ):
        with pytest.raises(ConfigError, match=words):
            load_config(path, [override])


MIXED = {
    "model": {"checkpoint": "base"},
    "environments": [{"name": "frozenlake"}, {"name": "wide", "kind": "frozenlake"}],
}


def test_an_environment_is_a_list_of_one_whose_kind_is_its_name_unless_given() -> None:
    alone = validate(Config, {"model": {"checkpoint": "base"}, "environment": {"name": "outside"}}, "test")
    assert [(one.name, one.kind) for one in alone.mixture] == [("outside", "outside")]
    assert alone.front is not None, "agents elsewhere need fronts"
    mixed = validate(Config, MIXED, "test")
    assert [(one.name, one.kind) for one in mixed.mixture] == [("frozenlake", "frozenlake"), ("wide", "frozenlake")]
    assert (mixed.environment, mixed.front) == (None, None)
    for config in (alone, mixed):
        assert validate(Config, config.model_dump(mode="json"), "saved") == config
    driven = validate(Config, MIXED | {"environments": [{"name": "lake", "kind": "outside"}]}, "test")
    assert driven.front is not None


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"environment": {"name": "frozenlake"}}, "environment and environments are both given"),
        ({"environments": [{"name": "a", "ratio": -0.5}]}, "environments.0.ratio: input should be greater"),
        ({"environments": [{"name": "a", "ratio": 0}, {"name": "b", "ratio": 0.0}]}, "the ratio of every one is 0"),
        ({"environments": [{"name": "a"}, {"name": "b"}, {"name": "a"}]}, "found 'a' more than once"),
        ({"environments": [{"name": "outside"}, {"name": "o", "kind": "outside"}]}, "allowed: one 'outside'"),
        ({"environments": [{"name": "a", "redundancy": 0.9}]}, "environments.0.redundancy"),
        ({"environments": [{"name": "a", "ration": 2}]}, "unknown key"),
        ({"environments": {"name": "a"}}, "environments"),
        ({"environments": ["a"]}, "environments.0"),
    ],
)
def test_environments_that_cannot_be_are_told_by_their_keys(given: dict[str, object], told: str) -> None:
    with pytest.raises(ConfigError) as refused:
        validate(Config, MIXED | given, "test")
    (problem,) = refused.value.problems
    assert told in str(problem)


def test_a_section_that_a_resolved_configuration_has_none_of_is_made() -> None:
    raw = {"evaluation": None, "run": {"steps": 3}}
    apply_override(raw, "evaluation.samples=8")
    assert raw == {"evaluation": {"samples": 8}, "run": {"steps": 3}}
    with pytest.raises(ConfigError, match="steps is not a section"):
        apply_override(raw, "run.steps.x=1")


def test_one_of_several_environments_is_overridden_by_its_number(tmp_path: Path) -> None:
    file = tmp_path / "mixed.toml"
    file.write_text('model.checkpoint = "base"\n[[environments]]\nname = "a"\n[[environments]]\nname = "b"\n')
    config = load_config(file, ["environments.1.ratio=3", "environments.0.settings.sizes=[5]"])
    assert [one.ratio for one in config.mixture] == [1, 3]
    assert config.mixture[0].settings == {"sizes": [5]}
    for wrong in ("environments.2.ratio=3", "environments.ratio=3", "environments.x.ratio=3"):
        with pytest.raises(ConfigError, match="environments"):
            load_config(file, [wrong])


def test_flush_intervals_in_the_wrong_order_are_both_named() -> None:
    with pytest.raises(ValueError, match=r"flush_interval_max_s \(0.25\) must be at least flush_interval_s \(0.5\)"):
        Config.model_validate({"model": {"checkpoint": "p"}, "scheduler": {"flush_interval_s": 0.5}})
