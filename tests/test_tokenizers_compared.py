"""Two policies' tokenizers are compared by their files, and where these differ by what they make of texts."""

import json
import shutil
from pathlib import Path

import pytest

from elastic.compose.tokenizers_compared import TEXTS, tokenizers_remark
from elastic.front.tiny import write_tokenizer


@pytest.fixture
def policies(tmp_path: Path) -> tuple[Path, Path]:
    for name in ("one", "other"):
        write_tokenizer(tmp_path / name)
    return tmp_path / "one", tmp_path / "other"


def test_of_the_same_files_nothing_is_said(policies: tuple[Path, Path], tmp_path: Path) -> None:
    assert tokenizers_remark(*policies) == ""
    assert tokenizers_remark(tmp_path / "none", tmp_path / "neither") == "", "policies in token ids have none"
    (policies[0] / "tokenizer.model").write_bytes(b"from which the other file was made")
    assert tokenizers_remark(*policies) == ""


def test_one_that_was_saved_anew_makes_the_same_tokens(policies: tuple[Path, Path]) -> None:
    path = policies[1] / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()), indent=7))
    told = f"the two policies' tokenizers are of different files, and make the same tokens of {len(TEXTS)} texts"
    assert tokenizers_remark(*policies) == told


def test_one_that_makes_others_is_told_with_a_text(policies: tuple[Path, Path]) -> None:
    path = policies[1] / "tokenizer.json"
    found = json.loads(path.read_text())
    found["added_tokens"] = [one for one in found["added_tokens"] if one["content"] != "<|im_start|>"]
    path.write_text(json.dumps(found))
    assert "have different tokenizers, which differ in '<|im_start|>" in tokenizers_remark(*policies)


@pytest.mark.parametrize("content", ["{}", pytest.param(None, marks=pytest.mark.nightly)])
def test_one_that_cannot_be_read_is_told(policies: tuple[Path, Path], content: str | None) -> None:
    shutil.rmtree(policies[1])
    policies[1].mkdir()
    if content is not None:
        (policies[1] / "tokenizer.json").write_text(content)
    told = tokenizers_remark(*policies)
    assert f"that of {policies[1]} cannot be read" in told
    assert told.endswith("tasks and answers are the same as texts, and not as tokens")
