"""Rows of a data set of the hub, by the package `datasets` itself where it is installed; nothing is downloaded."""

import importlib.util
import json
from pathlib import Path

import pytest

from elastic.config import ConfigError, DataConfig, validate
from elastic.environments.hub_rows import HubSource
from elastic.environments.rows import BadData, DataSource, check_first_row, read_rows

INSTALLED = importlib.util.find_spec("datasets") is not None


def source(name: str = "mine/sums", split: str = "train", prompt: str = "q") -> DataSource:
    return DataSource(source=HubSource(name, "", split), prompt=prompt, answer="", order="in_order", seed=0)


def test_a_name_of_the_hub_is_no_path() -> None:
    found = validate(DataConfig, {"source": "hf:openai/gsm8k", "subset": "main"}, "", "data")
    assert (found.source, found.subset, found.split) == ("hf:openai/gsm8k", "main", "train")
    assert validate(DataConfig, {"source": "rows.jsonl"}, "", "data").source == Path("rows.jsonl")
    with pytest.raises(ConfigError, match="split"):
        validate(DataConfig, {"source": "hf:gsm8k", "split": ""}, "", "data")


@pytest.mark.skipif(INSTALLED, reason="the package is installed")
def test_without_the_package_it_is_named_before_anything_is_loaded() -> None:
    told = r"hf:mine/sums, split 'train': needs the package 'datasets'.*pip install -e '.\[hub\]'"
    for reads in (check_first_row, read_rows):
        with pytest.raises(BadData, match=told):
            reads(source())
    check_first_row(source(), elsewhere=True)


SPLITS = {"train": [{"q": "1+1", "a": {"n": 2}}, {"q": "2+2", "a": {"n": 4}}], "test": [{"q": "3+3"}]}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data set that is there without the hub, and no network."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    pytest.importorskip("datasets")
    (tmp_path / "mine" / "sums").mkdir(parents=True)
    for split, rows in SPLITS.items():
        (tmp_path / "mine" / "sums" / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.environments
def test_a_split_is_read_in_its_order(folder: Path) -> None:
    assert [row["q"] for row in read_rows(source()).rows] == ["1+1", "2+2"]
    assert [row["q"] for row in read_rows(source(split="test")).rows] == ["3+3"]


@pytest.mark.environments
@pytest.mark.parametrize(
    ("of", "told"),
    [
        (
            {"name": "mine/nothing"},
            "hf:mine/nothing, split 'train': cannot be loaded: .*allowed: a split of a data set",
        ),
        ({"split": "dev"}, "split 'dev': cannot be loaded: ValueError: Unknown split"),
        ({"split": "train[:0]"}, "cannot be loaded: .*corresponds to no data"),
        ({"prompt": "question"}, "row 0 has no column 'question'; it has q, a"),
    ],
)
def test_what_cannot_be_read_is_told(folder: Path, of: dict[str, str], told: str) -> None:
    with pytest.raises(BadData, match=told):
        read_rows(source(**of))
