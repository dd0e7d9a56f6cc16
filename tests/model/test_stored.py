"""What is said of a stored policy by its headers is what reading it says, without the models' library."""

import json
import os
import shutil

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from elastic.engine.model.checkpoint import CheckpointError, model_tensors, read_tensors
from elastic.engine.model.config import Qwen3Config
from elastic.engine.model.qwen3 import Qwen3
from elastic.engine.model.stored import (
    check_stored,
    count_float32,
    float32_names,
    misfit,
    parameter_shapes,
    read_config,
    stored_tensors,
)
from tests.model.test_checkpoint import misshapen, missing, unexpected
from tests.seeds import examples
from tests.trainer.hugging_face import change_config


@given(
    st.builds(
        Qwen3Config,
        vocab_size=st.integers(1, 40),
        hidden_size=st.integers(1, 24),
        intermediate_size=st.integers(1, 24),
        num_hidden_layers=st.integers(1, 3),
        num_attention_heads=st.sampled_from((2, 4)),
        num_key_value_heads=st.sampled_from((1, 2)),
        head_dim=st.sampled_from((2, 6)),
        tie_word_embeddings=st.booleans(),
    )
)
@settings(max_examples=examples(10, 25), deadline=None)
def test_shapes_are_those_of_the_model(config):
    with torch.device("meta"):
        model = Qwen3(config)
    assert list(parameter_shapes(config).items()) == [(name, tuple(p.shape)) for name, p in model.named_parameters()]


def test_what_is_float32_in_the_files_travels_so(tmp_path):
    tensors = {"a": torch.zeros(3, 4), "b": torch.zeros(5).bfloat16(), "c": torch.zeros(2).half(), "d": torch.zeros(())}
    save_file(tensors, tmp_path / "model.safetensors")
    stored = stored_tensors(tmp_path)
    assert float32_names(stored) == {"a", "d"}
    assert count_float32(stored) == 13


def _whole(tensors):
    pass


def _tied_twice(tensors):
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()


def _untied(tensors):
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["lm_head.weight"][-1, -1] += 1


def _wider(tensors):
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].to(torch.float32)


def _int8(tensors):
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.int8)


def _fp8(tensors):
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.float8_e4m3fn)


def said_by(check):
    try:
        check()
    except CheckpointError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("spoil", [_whole, _tied_twice, _untied, _wider, _int8, _fp8, missing, misshapen, unexpected])
@pytest.mark.parametrize("cut", [0, 1])
def test_it_says_what_reading_says(make_model, tmp_path, spoil, cut):
    model = make_model()
    tensors = model_tensors(model)
    spoil(tensors)
    file = tmp_path / "model.safetensors"
    save_file(tensors, file)
    file.write_bytes(file.read_bytes()[: file.stat().st_size - cut])
    (tmp_path / "config.json").write_text(json.dumps(model.config.to_dict()))
    found = said_by(lambda: check_stored(tmp_path))
    assert found == said_by(lambda: read_tensors(tmp_path, model.config))
    if not found:
        assert check_stored(tmp_path) == (model.config, sum(p.numel() for p in model.parameters()))


def stored(directory, model, spoil):
    tensors = model_tensors(model)
    spoil(tensors)
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(model.config.to_dict()))
    return directory


@pytest.mark.parametrize("spoil", [_untied, _wider])
def test_a_head_of_its_own_beside_a_tied_embedding_is_refused(make_model, tmp_path, spoil):
    """transformers 5 does not tie such a checkpoint: to drop the tensor would train another model than it loads."""
    with pytest.raises(CheckpointError, match=r"lm_head.weight: is another tensor than .*tie_word_embeddings"):
        check_stored(stored(tmp_path, make_model(), spoil))


@pytest.mark.parametrize(("spoil", "type_"), [(_int8, "I8"), (_fp8, "F8_E4M3")])
def test_quantised_weights_are_refused(make_model, tmp_path, spoil, type_):
    with pytest.raises(CheckpointError, match=rf"model.norm.weight: expected one of .*found {type_}: quantised"):
        check_stored(stored(tmp_path, make_model(), spoil))


@pytest.mark.parametrize(("layers", "missing_or_not"), [(2, "not a parameter of this model"), (4, "missing")])
def test_another_number_of_layers_is_named_with_the_right_one(make_model, tmp_path, layers, missing_or_not):
    stored(tmp_path, make_model(), _whole)
    change_config(tmp_path, num_hidden_layers=layers)
    with pytest.raises(CheckpointError, match=rf"{missing_or_not}.*; found 3 layers; allowed: {layers}, as its config"):
        check_stored(tmp_path)


def test_no_model_is_made_of_more_layers_than_there_are_tensors(make_model, tmp_path):
    """Its shapes alone would take all memory."""
    stored(tmp_path, make_model(), _whole)
    change_config(tmp_path, num_hidden_layers=10**9)
    with pytest.raises(CheckpointError, match=r"num_hidden_layers: found 1000000000, but the files have \d+ tensors"):
        check_stored(tmp_path)


def test_a_layers_number_may_be_any_in_the_files():
    """More digits than Python makes numbers of."""
    strange = f"layers.{'9' * 5000}.x"
    assert misfit({"layers.0.x": (1,), strange: (1,)}, {"layers.0.x": (1,)}) == (
        f"{strange}: not a parameter of this model (found shape [1])"
    )


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "", "..", "a\0b", "x" * 256, "\ud800"])
def test_an_index_names_files_beside_it(make_model, tmp_path, name):
    stored(tmp_path, make_model(), _whole)
    (tmp_path / "model.safetensors").rename(tmp_path / "whole.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(CheckpointError, match=r"weight_map: found .*allowed: names of files beside it"):
        stored_tensors(tmp_path)


def test_a_tensor_is_in_one_file(make_model, tmp_path):
    stored(tmp_path, make_model(), _whole)
    shutil.copy(tmp_path / "model.safetensors", tmp_path / "b.safetensors")
    (tmp_path / "model.safetensors").rename(tmp_path / "a.safetensors")
    index = {"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"b\.safetensors: .*: is in a\.safetensors, too; allowed: once"):
        stored_tensors(tmp_path)


@pytest.mark.parametrize("kind", ["pipe", "directory"])
def test_what_is_no_file_is_not_waited_for(make_model, tmp_path, kind):
    stored(tmp_path, make_model(), _whole)
    for name, words in (("config.json", "cannot be read"), ("model.safetensors", "is not a file")):
        (tmp_path / name).unlink()
        os.mkfifo(tmp_path / name) if kind == "pipe" else (tmp_path / name).mkdir()
        with pytest.raises(CheckpointError, match=words):
            read_config(tmp_path) if name == "config.json" else stored_tensors(tmp_path)


@pytest.mark.parametrize(
    ("written", "words"),
    [
        ('{"rms_norm_eps": NaN}', "a NaN, which is no number"),
        ("[" * 100_000, "nested too deeply"),
        ('{"rms_norm_eps": Infinity}', "rms_norm_eps: must be a positive number"),
        ('{"compression_config": {}}', "compression_config"),
    ],
)
def test_an_odd_config_is_named(make_model, tmp_path, written, words):
    config = stored(tmp_path, make_model(), _whole) / "config.json"
    whole = config.read_text()
    config.write_text(f"{whole[:-1]}, {written[1:]}" if written.startswith("{") else written)
    with pytest.raises(CheckpointError, match=words):
        read_config(tmp_path)


@pytest.mark.parametrize(
    ("ends", "more", "found"),
    [(1, [1, 2], (1, 2)), (1, 1, (1,)), (None, 3, (3,)), ([5, 1], None, (5, 1)), (None, None, ()), (2, [3], (2, 3))],
)
def test_end_tokens_of_both_configs_count(make_model, tmp_path, ends, more, found):
    stored(tmp_path, make_model(), _whole)
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**raw, "eos_token_id": ends}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": more}))
    assert read_config(tmp_path).eos_token_ids == found


@pytest.mark.parametrize("content", ['{"eos_token_id": "x"}', "[]", "{"])
def test_an_odd_generation_config_is_named(make_model, tmp_path, content):
    stored(tmp_path, make_model(), _whole)
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"generation_config\.json: "):
        read_config(tmp_path)


@pytest.mark.parametrize("gone", ["link", "file"])
def test_a_shard_that_the_index_names_and_is_not_there_is_named(make_model, tmp_path, gone):
    model = make_model()
    stored(tmp_path, model, _whole)
    (tmp_path / "model.safetensors").rename(tmp_path / "model-1.safetensors")
    names = enumerate(parameter_shapes(model.config))
    weight_map = {name: f"model-{1 + place % 2}.safetensors" for place, name in names}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    if gone == "link":
        (tmp_path / "model-2.safetensors").symlink_to("../../blobs/gone")
    said = r"a link to \.\./\.\./blobs/gone" if gone == "link" else "is not there, and model.safetensors.index.json"
    with pytest.raises(CheckpointError, match=rf"model-2\.safetensors: {said}"):
        check_stored(tmp_path)
