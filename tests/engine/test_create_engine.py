import pytest

from elastic.config import Config, ConfigError, EngineConfig, validate
from elastic.engine import create_engine, resolve_engine
from elastic.engine.model.config import ModelConfigError, Qwen3Config


def test_an_unknown_kind_names_what_is_installed():
    with pytest.raises(ValueError, match=r"engine\.kind: unknown engine .warp.; installed: .*torch"):
        create_engine(Qwen3Config().to_dict(), EngineConfig(kind="warp"))


def test_an_unsupported_model_is_refused_by_name():
    with pytest.raises(ModelConfigError, match="model_type"):
        create_engine({"model_type": "llama"}, EngineConfig())


def test_a_cache_that_holds_no_sequence_is_refused():
    with pytest.raises(ValueError, match=r"kv_blocks: 3 blocks of 16 tokens hold less than max_context_tokens=64"):
        create_engine(Qwen3Config().to_dict(), EngineConfig(device="cpu", kv_blocks=3, max_context_tokens=64))


def _config(**engine) -> Config:
    return validate(Config, {"model": {"checkpoint": "base"}, "engine": engine}, "run.toml")


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ({"max_btach": 3}, r"run\.toml: engine\.max_btach: unknown key; allowed: .*max_batch"),
        ({"warp": {"speed": 9}}, r"run\.toml: engine\.warp: unknown key; allowed: .*, and sections of: .*torch"),
        ({"torch": {"speed": 9}}, r"run\.toml: engine\.torch\.speed: unknown key"),
        ({"kind": "warp"}, r"run\.toml: engine\.kind: unknown engine 'warp'; installed: .*torch"),
    ],
)
def test_settings_that_no_engine_has_are_refused_by_name(engine, message):
    with pytest.raises(ConfigError, match=message):
        resolve_engine(_config(**engine).engine, "run.toml")


def test_an_overlay_takes_the_place_of_single_keys():
    engine = EngineConfig.model_validate({"max_batch": 4, "warp": {"speed": 9, "crew": 1}})
    overlaid = EngineConfig.model_validate(engine.overlaid({"max_batch": 5, "warp": {"speed": 3}}))
    assert (overlaid.max_batch, overlaid.sections) == (5, {"warp": {"speed": 3, "crew": 1}})
    assert EngineConfig.model_validate_json(overlaid.model_dump_json()) == overlaid
