"""Making the base policy: once for its settings, and never over anything else."""

from collections.abc import Callable
from pathlib import Path

import pytest

from elastic.engine.model.checkpoint import load_model
from elastic.engine.model.config import Qwen3Config
from elastic.environments.frozenlake import VOCABULARY
from elastic.front.rendering.tokenizer import Tokenizer
from elastic.worker.trainer.embedded import warmup

SHORTER = {"steps": 1, "batch_size": 2}


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = warmup.warm_up

    def short(settings: warmup.WarmupSettings, model: Qwen3Config, directory: Path, progress: warmup.Progress) -> None:
        whole(settings.model_copy(update=SHORTER), model, directory, progress)

    monkeypatch.setattr(warmup, "warm_up", short)


@pytest.fixture
def prepare(elastic: Callable, config: Path) -> Callable:
    """`elastic prepare` of a checkpoint, with more arguments."""

    def run(checkpoint: Path, *arguments: object):
        return elastic("prepare", config, "--set", f"model.checkpoint={checkpoint}", *arguments)

    return run


def test_is_made_once_for_its_settings(prepare: Callable, tmp_path: Path) -> None:
    base = tmp_path / "cache" / "base"
    assert "made" in prepare(base).err
    load_model(base)
    assert Tokenizer(base).decode([1, 2, 3]) == "".join(VOCABULARY[1:4])
    (base / "tokenizer.json").unlink()
    before = (base / "model.safetensors").read_bytes()
    code, _, err = prepare(base)
    assert (code, err.strip().endswith("is there already")) == (0, True)
    assert (base / "tokenizer.json").is_file(), "one that an earlier version made gets what it lacks"

    others = ("--set", "environment.settings.sizes=[5]")
    code, _, err = prepare(base, *others)
    assert code == 0
    assert "other environment.settings" in err
    assert "--force" in err
    assert (base / "model.safetensors").read_bytes() == before

    assert "made" in prepare(base, *others, "--force").err
    assert (base / "model.safetensors").read_bytes() != before
    assert prepare(base, *others).err.strip().endswith("is there already")


def test_a_policy_from_elsewhere_is_taken_as_it_is(prepare: Callable, checkpoint: Path) -> None:
    code, _, err = prepare(checkpoint)
    assert (code, err.strip().endswith("is there already")) == (0, True)


@pytest.mark.parametrize("force", [(), ("--force",)])
def test_a_directory_of_anything_else_is_left_alone(prepare: Callable, tmp_path: Path, force: tuple[str, ...]) -> None:
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "thesis.tex").write_text("years")
    code, out, err = prepare(tmp_path / "work", *force)
    assert (code, out) == (2, "")
    assert "model.checkpoint" in err
    assert "no config.json" in err
    assert [path.name for path in (tmp_path / "work").iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize("checkpoint", ["/proc/nosuch/base", "/dev/null/base", "/dev/null", "/proc/self/fd"])
def test_where_nothing_can_be_written(prepare: Callable, checkpoint: str) -> None:
    code, out, err = prepare(Path(checkpoint))
    assert (code, out) == (2, "")
    assert f"model.checkpoint: {checkpoint}" in err
    assert "Traceback" not in err


def test_full_disk(prepare: Callable, small_disk: Path) -> None:
    code, _, err = prepare(small_disk / "base")
    assert code == 2
    assert f"model.checkpoint: {small_disk / 'base'}: cannot be written" in err
    assert "Traceback" not in err
