import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from elastic.engine.model.checkpoint import (
    CheckpointError,
    load_model,
    model_tensors,
    read_config,
    read_tensors,
    write_checkpoint,
)
from tests.small_files import small_files


@pytest.mark.parametrize("tied", [True, False])
def test_round_trip_is_exact(make_model, tmp_path, tied):
    model = make_model(tie_word_embeddings=tied)
    write_checkpoint(tmp_path / "policy", model.config, model_tensors(model))
    loaded = load_model(tmp_path / "policy")
    assert loaded.config == model.config
    for (name, expected), (_, found) in zip(model.named_parameters(), loaded.named_parameters(), strict=True):
        assert torch.equal(expected, found), name
    ids = torch.randint(0, 32, (1, 9))
    assert torch.equal(model(ids), loaded(ids))


@pytest.mark.nightly
def test_a_trainer_begins_without_torchs_compiler(make_model, tmp_path):
    """It takes a process 2 s and 100 MB."""
    model = make_model()
    write_checkpoint(tmp_path / "policy", model.config, model_tensors(model))
    trains = """
import sys
from pathlib import Path
import torch
from elastic.engine.model.checkpoint import load_model
from elastic.worker.trainer.adamw import AdamW
model = load_model(Path(sys.argv[1]))
model(torch.tensor([[1, 2, 3]])).sum().backward()
AdamW(model.parameters()).step([one.grad for one in model.parameters()], 1e-3)
sys.exit("torch._dynamo" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", trains, str(tmp_path / "policy")], check=False).returncode == 0


def test_stored_as_bfloat16_and_nothing_else_is_left(make_model, tmp_path):
    model = make_model()
    write_checkpoint(tmp_path / "policy", model.config, model_tensors(model))
    assert {t.dtype for t in read_tensors(tmp_path / "policy", model.config).values()} == {torch.bfloat16}
    assert [p.name for p in tmp_path.iterdir()] == ["policy"]
    assert sorted(p.name for p in (tmp_path / "policy").iterdir()) == ["config.json", "model.safetensors"]


def test_an_existing_checkpoint_is_replaced(make_model, tmp_path):
    for seed in (0, 1):
        model = make_model(seed)
        write_checkpoint(tmp_path / "policy", model.config, model_tensors(model))
    assert torch.equal(load_model(tmp_path / "policy").model.norm.weight, make_model(1).model.norm.weight)
    assert [p.name for p in tmp_path.iterdir()] == ["policy"]


def test_a_failed_write_leaves_the_old_checkpoint(make_model, tmp_path):
    model = make_model()
    write_checkpoint(tmp_path / "policy", model.config, model_tensors(model))
    with small_files(1000), pytest.raises(CheckpointError, match="File too large"):
        write_checkpoint(tmp_path / "policy", model.config, model_tensors(make_model(1)))
    assert torch.equal(load_model(tmp_path / "policy").model.norm.weight, model.model.norm.weight)
    assert [p.name for p in tmp_path.iterdir()] == ["policy"]


def test_reads_shards(make_model, tmp_path):
    model = make_model()
    tensors = model_tensors(model)
    names = sorted(tensors)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, members in shards.items():
        save_file({name: tensors[name] for name in members}, tmp_path / file)
    weight_map = {name: file for file, members in shards.items() for name in members}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (tmp_path / "config.json").write_text(json.dumps(model.config.to_dict()))
    found = read_tensors(tmp_path, read_config(tmp_path))
    assert all(torch.equal(found[name], tensors[name]) for name in names)


def test_a_redundant_tied_head_is_ignored(make_model, tmp_path):
    model = make_model()
    tensors = model_tensors(model)
    save_file(
        {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, tmp_path / "model.safetensors"
    )
    assert read_tensors(tmp_path, model.config).keys() == tensors.keys()


def missing(tensors):
    del tensors["model.layers.1.mlp.up_proj.weight"]


def misshapen(tensors):
    tensors["model.norm.weight"] = torch.ones(64)


def unexpected(tensors):
    tensors["model.layers.9.mlp.up_proj.weight"] = torch.ones(2, 2)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (missing, r"model\.layers\.1\.mlp\.up_proj\.weight: missing; expected shape \[384, 128\]"),
        (misshapen, r"model\.norm\.weight: expected shape \[128\], found \[64\]"),
        (unexpected, r"model\.layers\.9\.mlp\.up_proj\.weight: not a parameter .* \[2, 2\]"),
    ],
)
def test_a_checkpoint_that_does_not_match_its_config_names_the_tensor(make_model, tmp_path, spoil, message):
    model = make_model()
    tensors = model_tensors(model)
    spoil(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        read_tensors(tmp_path, model.config)
    with pytest.raises(CheckpointError, match=message):
        write_checkpoint(tmp_path / "again", model.config, tensors)
    assert not (tmp_path / "again").exists()


def test_unreadable_files_are_named(make_model, tmp_path):
    config = make_model().config
    with pytest.raises(CheckpointError, match=r"config\.json: cannot be read"):
        read_config(tmp_path)
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor"):
        read_tensors(tmp_path, config)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json: not valid JSON"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(CheckpointError, match=r"config\.json: model_type: only 'qwen3'"):
        read_config(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not a tensor file")
    with pytest.raises(CheckpointError, match=r"model\.safetensors: cannot be read"):
        read_tensors(Path(tmp_path), config)
