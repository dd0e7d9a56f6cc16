"""A run's policy as a directory, and what cannot be had of it."""

import contextlib
import json
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from elastic.compose.export import export
from elastic.compose.runs import new_run_dir
from elastic.config import load_config
from elastic.engine.model.checkpoint import load_model, model_tensors, read_tensors
from elastic.engine.model.stored import read_config
from elastic.runtime.journal import RunDirectory
from elastic.worker.trainer import create_trainer

TOKENIZER = {"tokenizer.json": "{}", "chat_template.jinja": "{{ messages }}", "generation_config.json": "{}"}


@pytest.fixture
def run(config: Path, checkpoint: Path) -> Iterator[Path]:
    """A run with checkpoints of two steps; its base policy has a tokenizer as long as the test lasts."""
    before = {name: (checkpoint / name).read_bytes() for name in TOKENIZER if (checkpoint / name).exists()}
    for name, content in TOKENIZER.items():
        (checkpoint / name).write_text(content)
    run, made = new_run_dir(load_config(config)), create_trainer(load_config(config))
    for step in (1, 2):
        with torch.no_grad():
            for parameter in made.model.parameters():  # type: ignore[attr-defined]
                parameter.add_(0.5)
        for group in range(2):
            made.skip_group(group, 0, ())
        made.update()
        made.save(run / "checkpoints" / f"{step:08d}.safetensors")
    yield run
    for name in TOKENIZER:
        (checkpoint / name).unlink()
        if name in before:
            (checkpoint / name).write_bytes(before[name])


def test_it_is_a_policy_like_any_other(elastic, run: Path, config: Path, checkpoint: Path, tmp_path: Path) -> None:
    for step, moved in ((1, 0.5), (None, 1.0)):
        output = tmp_path / f"policy-{step}"
        steps = () if step is None else ("--step", step)
        ended = elastic("export", run, "-o", output, *steps, "--json")
        assert ended.code == 0
        assert json.loads(ended.out)["step"] == (step or 2)
        assert read_config(output) == read_config(checkpoint)
        base = load_model(checkpoint)
        for parameter in base.parameters():
            parameter.data += moved
        found = read_tensors(output, read_config(output))
        assert all(torch.equal(found[name], tensor) for name, tensor in model_tensors(base).items())
        assert {name: (output / name).read_text() for name in TOKENIZER} == TOKENIZER
        card = (output / "README.md").read_text()
        assert card.startswith("---\nlibrary_name: transformers\n")
        assert f"| step | {step or 2} of 2 |" in card
    resolved = elastic("run", config, "--set", f"model.checkpoint={output}", "--dry-run")
    assert resolved.code == 0
    assert not list(tmp_path.glob(".policy*"))


def test_it_may_have_several_files(run: Path, tmp_path: Path) -> None:
    export(RunDirectory(run), tmp_path / "one")
    found = export(RunDirectory(run), tmp_path / "many", shard_bytes=1024)
    assert len(list((tmp_path / "many").glob("model-*.safetensors"))) > 2
    one, many = (read_tensors(tmp_path / name, read_config(tmp_path / name)) for name in ("one", "many"))
    assert one.keys() == many.keys()
    assert all(torch.equal(one[name], many[name]) for name in one)
    assert found.size_bytes == sum(tensor.nbytes for tensor in one.values())


@contextlib.contextmanager
def full_disk() -> Iterator[None]:
    """No file becomes longer than a config."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2_000, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_and_a_base_policy_that_is_gone_are_named(elastic, refused, run: Path, tmp_path: Path) -> None:
    with full_disk():
        ended = elastic("export", run, "-o", tmp_path / "policy")
    refused(ended, "-o", "cannot be written", "File too large")
    given = json.loads((run / "config.json").read_text())
    given["model"]["checkpoint"] = str(tmp_path / "gone")
    (run / "config.json").write_text(json.dumps(given))
    refused(elastic("export", run, "-o", tmp_path / "policy"), str(tmp_path / "gone"), "base policy")
    assert not list(tmp_path.glob("*policy*"))


def test_what_cannot_be_exported(elastic, refused, run: Path, config: Path, tmp_path: Path) -> None:
    refused(elastic("export", run, "-o", tmp_path / "policy", "--step", 7), "--step: found 7", "of steps 1, 2")
    refused(elastic("export", run, "-o", tmp_path / "policy", "--merge"), "--merge", "trains whole models")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").touch()
    refused(elastic("export", run, "-o", tmp_path / "full"), str(tmp_path / "full"), "not empty")
    bare = new_run_dir(load_config(config))
    refused(elastic("export", bare, "-o", tmp_path / "policy"), bare.name, "no checkpoint yet")
    (saved,) = (run / "checkpoints").glob("*2.safetensors")
    saved.write_bytes(saved.read_bytes()[:1000])
    refused(elastic("export", run, "-o", tmp_path / "policy"), str(saved), "cannot be read")
    assert not (tmp_path / "policy").exists()
    assert not list(tmp_path.glob(".policy*"))
