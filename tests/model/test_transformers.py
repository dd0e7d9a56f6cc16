"""The reference implementation must agree on the same checkpoint directory."""

import json

import pytest
import torch

from elastic.engine.model.checkpoint import load_model, model_tensors, write_checkpoint

pytestmark = pytest.mark.slow


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def both(request, make_model, tmp_path):
    transformers = pytest.importorskip("transformers")
    model = make_model(tie_word_embeddings=request.param, rope_theta=5e5)
    write_checkpoint(tmp_path / "policy", model.config, model_tensors(model))
    reference = transformers.Qwen3ForCausalLM.from_pretrained(tmp_path / "policy", dtype=torch.float32)
    return load_model(tmp_path / "policy"), reference


@torch.no_grad()
def test_logits_agree(both):
    model, reference = both
    ids = torch.randint(0, 32, (2, 200))
    assert (model(ids) - reference(ids).logits).abs().max() < 1e-4


def test_reads_what_transformers_writes(both, tmp_path):
    model, reference = both
    reference.to(torch.bfloat16).save_pretrained(tmp_path / "theirs")
    assert json.loads((tmp_path / "theirs" / "config.json").read_text())["model_type"] == "qwen3"
    loaded = load_model(tmp_path / "theirs")
    assert all(
        torch.equal(a, b) for a, b in zip(model.state_dict().values(), loaded.state_dict().values(), strict=True)
    )
