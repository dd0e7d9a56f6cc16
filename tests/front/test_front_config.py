"""What a configuration may say of names of the model, and of models elsewhere."""

from pathlib import Path

import pytest

from elastic.compose.agents import check_front
from elastic.compose.plan import resolve
from elastic.config import Config, ConfigError, validate
from elastic.front.tiny import write_tokenizer

BASE = {"model": {"checkpoint": "models/small"}, "environment": {"name": "outside"}}


def config(**front: object) -> Config:
    return validate(Config, {**BASE, "front": front}, "run.toml")


def refused(**front: object) -> str:
    with pytest.raises(ConfigError) as error:
        config(**front)
    return str(error.value)


@pytest.mark.parametrize("name", ["a/b", "new\nline", "", "-x", "x" * 65, "with space", "\x1b[31m", "ünlaut"])
def test_a_policy_has_a_plain_name(name: str):
    assert "front.policies.0" in refused(policies=[name])


def test_policies_have_different_names_which_are_not_the_models():
    assert "found 'solver' twice" in refused(policies=["solver", "critic", "solver"])
    assert "other names than the model's own" in refused(policies=["small"])
    assert "found 'actor'" in refused(policies=["actor"], model_name="actor")
    assert config(policies=["small"], model_name="actor").served_name == "actor"


@pytest.mark.parametrize("name", ["policy", "Qwen/Qwen3-0.6B", "/shared/models/qwen3.v1", "runs/.cache/base"])
def test_a_model_is_called_by_a_name_or_a_path(name: str):
    assert config(model_name=name).served_name == name


@pytest.mark.parametrize("name", ["a//b", "/", "a/", "a b", "a\nb", "-a", "ü"])
def test_a_model_has_no_other_names(name: str):
    assert "front.model_name" in refused(model_name=name)


@pytest.mark.parametrize(
    ("url", "kept"),
    [
        ("https://api.openai.com/v1", "https://api.openai.com"),
        ("https://api.example/openai/v1/", "https://api.example/openai"),
        ("https://api.anthropic.com", "https://api.anthropic.com"),
        ("http://127.0.0.1:8000/v1", "http://127.0.0.1:8000"),
        ("http://localhost:8000", "http://localhost:8000"),
        ("http://[::1]:8000", "http://[::1]:8000"),
    ],
)
def test_a_base_url_is_taken_with_and_without_its_version(url: str, kept: str):
    assert config(upstream=url).front.upstream == kept  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "url",
    [
        *("http://api.example", "ftp://api.example", "api.example", "https://", "https://api.example?key=1", "file:///x"),
        *("https://api.example/#x", "https://api.example:0", "https://api.example:99999", "https://api. example"),
        *("https://api.example/\n", "http://169.254.169.254/latest", "http://10.0.0.1", "https://[::1", "https:\\\\x"),
    ],
)  # fmt: skip
def test_other_base_urls_are_refused(url: str):
    assert refused(upstream=url).startswith("run.toml: front.upstream: must ")


def test_credentials_in_a_url_are_refused_and_not_shown():
    said = refused(upstream="https://me:sk-secret@api.example")
    assert "must have no credentials in it" in said
    assert "sk-secret" not in said


def test_money_needs_prices_and_a_key_needs_somewhere_to_go():
    assert "upstream_usd_max needs" in refused(upstream="https://api.example", upstream_usd_max=1.0)
    assert "upstream_key_env needs upstream" in refused(upstream_key_env="KEY")
    assert "front.upstream_key_env" in refused(upstream="https://api.example", upstream_key_env="sk-not a name")
    for key in (
        "upstream_calls_max",
        "upstream_usd_max",
        "upstream_usd_per_million_in",
        "upstream_usd_per_million_out",
    ):
        assert f"front.{key}" in refused(upstream="https://api.example", **{key: -1})


def test_a_key_that_is_not_there_is_told_before_a_run_begins(monkeypatch: pytest.MonkeyPatch, tiny_directory: Path):
    raw = {**BASE, "model": {"checkpoint": str(tiny_directory)}}
    front = {"upstream": "https://api.example", "upstream_key_env": "TESTS_KEY", "policies": ["critic"]}
    plan = resolve(validate(Config, {**raw, "front": front}, "run.toml"), [], "run.toml")
    for value, said in (("", "no TESTS_KEY"), (" ", "an empty one"), ("a\nb", "no header may have")):
        monkeypatch.setenv("TESTS_KEY", value)
        with pytest.raises(ConfigError, match=said) as error:
            check_front(plan)
        assert "front.upstream_key_env" in str(error.value)
    monkeypatch.setenv("TESTS_KEY", "sk-x")
    check_front(plan)


@pytest.mark.parametrize(
    ("environment", "refused_for"),
    [
        ({"name": "chat", "settings": {"rewards": ["mine:worth"], "tools": ["mine:add"]}}, "chat"),
        ({"name": "adder", "kind": "openenv", "settings": {"url": "http://127.0.0.1:9"}}, "adder"),
        ({"name": "chat", "settings": {"rewards": ["mine:worth"]}}, ""),
        ({"name": "openenv", "settings": {"url": "http://127.0.0.1:9", "field": "said"}}, ""),
    ],
)
def test_tools_need_a_parser_of_calls(tmp_path: Path, environment: dict[str, object], refused_for: str):
    write_tokenizer(tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "Say."}\n')
    data = {"data": {"source": str(tmp_path / "rows.jsonl")}} if environment["name"] == "chat" else {}
    base = {"model": {"checkpoint": str(tmp_path)}, "environment": {**environment, **data}}
    for parser in ("", "hermes"):
        plan = resolve(validate(Config, {**base, "front": {"tool_parser": parser}}, ""), [], "")
        if parser or not refused_for:
            check_front(plan)
            continue
        with pytest.raises(ConfigError) as error:
            check_front(plan)
        assert str(error.value) == (
            f"front.tool_parser: found '', and the tools of environment {refused_for!r} could not be called: "
            "nothing here reads calls of tools; front.tool_parser = 'hermes' does"
        )
