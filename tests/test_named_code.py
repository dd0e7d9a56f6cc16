"""Code that a configuration names is checked without an import, and loaded with errors that tell why not."""

import sys
from pathlib import Path

import pytest
from pydantic import BaseModel, ValidationError

from elastic.compose.plan import check_live, resolve
from elastic.config import ConfigError, load_config
from elastic.system.named_code import CodeUnusable, GivenCode, in_file, load, parsed, placed

EXAMPLE = Path(__file__).parents[1] / "examples" / "frozenlake.toml"


class Settings(BaseModel):
    loss: GivenCode


@pytest.mark.parametrize("text", ["loss.py:mine", "/a b/loss.py:mine", "../x.py:f", "package.module:Name", "m:f"])
def test_names_of_code(text: str) -> None:
    assert str(parsed(text)) == Settings(loss=text).loss == text


@pytest.mark.parametrize(
    "text", ["", "mine", "loss.py", "loss.py:", ":mine", "loss.py:a.b", "loss.py:class", "a/b:c", "a..b:c", "m:1"]
)
def test_what_is_no_name_of_code(text: str) -> None:
    with pytest.raises(ValidationError, match=r"FILE\.py:NAME"):
        Settings(loss=text)
    assert in_file(text) is None


def test_files_are_relative_to_the_configuration(tmp_path: Path) -> None:
    raw = {"a": ["x.py:f", "x.py", "package.x:f", 3], "b": {"c": "/x/y.py:f", "d": "--plugin=x.py:f"}}
    here = str(tmp_path)
    assert placed(raw, tmp_path) == {
        "a": [f"{here}/x.py:f", "x.py", "package.x:f", 3],
        "b": {"c": "/x/y.py:f", "d": "--plugin=x.py:f"},
    }


def test_a_configuration_is_read_without_its_code_being_imported(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("raise SystemExit('imported')")
    (tmp_path / "config.toml").write_text(
        f"{EXAMPLE.read_text()}\n[simulation.profiles]\na = 'mine.py:a'\nb = 'gone.py:b'\n"
    )
    config = load_config(tmp_path / "config.toml", ["simulation.profiles.c=mine.py:c"])
    assert config.simulation.profiles == {
        "a": f"{tmp_path}/mine.py:a",
        "b": f"{tmp_path}/gone.py:b",
        "c": f"{tmp_path}/mine.py:c",
    }
    with pytest.raises(ConfigError) as refused:
        check_live(resolve(config, [], "config.toml"))
    assert str(refused.value) == f"simulation.profiles.b: found '{tmp_path}/gone.py:b', but no such file"


def test_a_file_is_run_once_and_finds_what_is_beside_it(tmp_path: Path) -> None:
    (tmp_path / "beside_it.py").write_text("SAID = []")
    (tmp_path / "json.py").write_text("raise RuntimeError('a file stood in for the standard library')")
    (tmp_path / "mine.py").write_text(
        "import json, beside_it\nfrom dataclasses import dataclass\nbeside_it.SAID.append(1)\n"
        "@dataclass\nclass Kept:\n    said: 'list[int]'\nkept = Kept(beside_it.SAID)\n"
    )
    for _ in range(2):
        assert load(f"{tmp_path}/mine.py:kept").said == [1]
    assert load("math:sqrt")(4) == 2


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("import nowhere_to_be_found", "ModuleNotFoundError: No module named 'nowhere_to_be_found'"),
        ("\nraise SystemExit(0)", "SystemExit: 0"),
        ("def f(:", "SyntaxError"),
    ],
)
def test_what_cannot_be_loaded_is_told_with_its_own_last_line(tmp_path: Path, body: str, told: str) -> None:
    file = tmp_path / "broken.py"
    file.write_text(body)
    with pytest.raises(CodeUnusable) as unusable:
        load(f"{file}:f")
    message = str(unusable.value)
    assert message.startswith(f"{file}:f: cannot be loaded by {sys.executable}: {told}")
    assert file.name in message.removeprefix(f"{file}:f")
    assert "\n" not in message


def test_what_is_imported_as_it_is_asked_for_is_told_alike(tmp_path: Path) -> None:
    (tmp_path / "lazy.py").write_text("def __getattr__(name):\n    import not_there_at_all\n")
    with pytest.raises(CodeUnusable, match=r"lazy\.py:mine: cannot be loaded by .*: ModuleNotFoundError: No module"):
        load(f"{tmp_path}/lazy.py:mine")


def test_a_name_that_is_not_there_is_told_with_those_that_are(tmp_path: Path) -> None:
    (tmp_path / "names.py").write_text("def score(): ...\n_hidden = 1")
    with pytest.raises(CodeUnusable, match=r"has no 'scores'; it has score$"):
        load(f"{tmp_path}/names.py:scores")
    with pytest.raises(CodeUnusable, match="No module named 'nowhere_at_all'"):
        load("nowhere_at_all:f")
