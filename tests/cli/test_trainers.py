"""A whole run with another kind of trainer, and what is made of its policy afterwards."""

import json
import re
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from elastic.runtime.journal import DirectoryStore, JournalReader
from elastic.weights.directory import DirectoryRelay
from elastic.weights.puller import Puller
from elastic.weights.signing import Trust
from tests.trainer.hugging_face import change_config, read_weights, write_model

pytestmark = [pytest.mark.trainers, pytest.mark.alone]


def test_a_run_trains_what_transformers_loads_and_exports_it(elastic, refused, config: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    ended = elastic("run", config, "--set", "trainer.kind=transformers", "--providers", "spot")
    assert ended.code == 0, ended.err
    run = DirectoryStore(tmp_path / "runs").find("latest")
    saved = {path.name for path in (run.path / "checkpoints").glob("*.safetensors")}
    assert saved == {"00000001.safetensors", "00000002.safetensors"}
    ended = elastic("export", run.path, "-o", tmp_path / "policy", "--json")
    assert json.loads(ended.out)["step"] == 2
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "policy", dtype=torch.float32)
    assert model(torch.tensor([[1, 2, 3]])).logits.isfinite().all()
    ended = elastic("run", config, "--set", f"model.checkpoint={tmp_path / 'policy'}", "--set", "run.steps=1")
    assert ended.code == 0, ended.err
    ended = elastic("run", config, "--resume", run.path, "--set", "run.steps=3")
    assert ended.code == 0, ended.err
    newest, older = (run.path / "checkpoints" / f"{step:08d}.safetensors" for step in (3, 2))
    for path in (newest, older):
        path.write_bytes(path.read_bytes()[:1000])
    both = (f"{newest}: cannot be read", f"{older}: cannot be read")
    refused(elastic("run", config, "--resume", run.path, "--set", "run.steps=4"), *both)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "warp"}, ("model_type: found 'warp', which transformers", "does not load")),
        ({"model_type": "t5"}, ("model_type: found 't5', which transformers", "does not load")),
        ({"num_attention_heads": 0}, ("model_type: found 'llama'", "ZeroDivisionError")),
        ({"quantization_config": {"quant_method": "fp8"}}, ("found a quantization_config (fp8)", "made of")),
        ({"hidden_size": 64}, ("embed_tokens.weight: expected shape [32, 64], found [32, 32]",)),
        ({"num_hidden_layers": 3}, ("model.layers.2.", "missing; expected shape", "found 2 layers; allowed: 3")),
        ({"num_hidden_layers": 1}, ("model.layers.1.", "not a parameter", "found 2 layers; allowed: 1")),
        ({"num_hidden_layers": 10**9}, ("num_hidden_layers: found 1000000000, but the files have 21 tensors",)),
        ({"rms_norm_eps": float("nan")}, ("it has a NaN, which is no number",)),
        ({"eos_token_id": "end"}, ("eos_token_id: found 'end'; allowed: a number",)),
        ({"compression_config": {"quant_method": "int4"}}, ("found a compression_config (int4)", "made of")),
        ({"text_config": [1]}, ("text_config: expected a JSON object (found list)",)),
        (
            {"model_type": "warp", "auto_map": {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}},
            ("model_type: found 'warp'", "custom code"),
        ),
    ],
)
def test_a_policy_that_cannot_be_trained_is_named(
    elastic, refused, config: Path, tmp_path: Path, changes: dict[str, object], words: tuple[str, ...]
) -> None:
    pytest.importorskip("transformers")
    directory = write_model(tmp_path / "llama", "llama")
    change_config(directory, **changes)
    kinds = ("trainer.kind=transformers", f"model.checkpoint={directory}", "engine.kind=vllm", "trainer.engine={}")
    ended = elastic("run", config, "--dry-run", *(word for kind in kinds for word in ("--set", kind)))
    refused(ended, f"model.checkpoint: {directory}", *words)


def test_what_transformers_leaves_out_may_be_there_and_nothing_else(
    elastic, refused, config: Path, tmp_path: Path
) -> None:
    pytest.importorskip("transformers")
    directory = write_model(tmp_path / "qwen3", "qwen3")
    weights = read_weights(directory)
    given = ("--set", "trainer.kind=transformers", "--set", f"model.checkpoint={directory}")
    for name, words in (
        ("model.layers.0.self_attn.rotary_emb.inv_freq", ()),
        ("model.layers.0.spare.weight", ("model.layers.0.spare.weight: not a parameter of this model",)),
    ):
        save_file(weights | {name: torch.ones(4)}, directory / "model.safetensors", metadata={"format": "pt"})
        ended = elastic("run", config, "--dry-run", *given)
        if words:
            refused(ended, *words)
        else:
            assert ended.code == 0, ended.err


def test_an_attention_that_is_not_here_is_named(elastic, refused, config: Path, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    if find_spec("flash_attn") is not None:
        pytest.skip("it is here")
    directory = write_model(tmp_path / "qwen3", "qwen3")
    keys = ("trainer.kind=transformers", f"model.checkpoint={directory}")
    given = (*keys, "trainer.transformers.attention=flash_attention_2")
    ended = elastic("run", config, "--dry-run", *(word for key in given for word in ("--set", key)))
    refused(ended, "trainer.transformers.attention: found 'flash_attention_2'", "allowed: 'auto'")


def test_a_context_beyond_the_models_is_named(elastic, refused, config: Path, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    directory = write_model(tmp_path / "llama", "llama")
    change_config(directory, max_position_embeddings=100)
    small = tmp_path / "without-pacing.toml"
    small.write_text(re.sub(r"\[engine\.pacing\][^\[]*", "", config.read_text()))
    keys = ("trainer.kind=transformers", f"model.checkpoint={directory}", "engine.kind=vllm")
    ended = elastic("run", small, "--dry-run", *(word for key in keys for word in ("--set", key)))
    refused(ended, "trainer.engine.max_context_tokens: 192 exceeds", "allowed: up to 100")


def test_an_engine_that_cannot_serve_the_model_is_named(elastic, refused, config: Path, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    directory = write_model(tmp_path / "llama", "llama")
    kinds = ("--set", "trainer.kind=transformers", "--set", f"model.checkpoint={directory}")
    ended = elastic("run", config, *kinds, "--set", "rollout.max_tokens_per_turn=8")
    refused(ended, "trainer.engine.kind: found 'torch'", "model_type", "'llama'", "allowed: 'vllm'")
    mixed = (*kinds, "--set", "trainer.engine.kind=vllm", "--providers", "spot")
    refused(elastic("run", config, *mixed), "providers.spot.engine.kind: found 'torch'", "allowed: 'vllm'")


def test_what_workers_have_of_two_ranks_is_the_checkpoint_bit_for_bit(elastic, config: Path, tmp_path: Path) -> None:
    """Each rank publishes its own; what can be pulled in the end is what `elastic export` makes of the checkpoint."""
    pytest.importorskip("transformers")
    keys = ("trainer.kind=transformers", "trainer.gpus=2", "trainer.engine={device = 'cpu'}", "weights.relay=http")
    ended = elastic("run", config, "--providers", "spot", *(word for key in keys for word in ("--set", key)))
    assert ended.code == 0, ended.err
    run = DirectoryStore(tmp_path / "runs").find("latest")
    assert elastic("export", run.path, "-o", tmp_path / "policy").code == 0
    with JournalReader(run.journal_paths()[-1]) as journal:
        trust = Trust(run.path.name, journal.meta()["publisher"])
    relay = DirectoryRelay(run.path / "weights")
    assert relay.list_keys("versions/00000002/delta-00000001.part-00001")
    pulled, exported = Puller(relay, trust).pull(2), read_weights(tmp_path / "policy")
    assert pulled.keys() == exported.keys()
    assert all(torch.equal(tensor, exported[name]) for name, tensor in pulled.items())


@pytest.mark.parametrize(
    ("gpus", "providers", "words"),
    [
        (2, (), "trainer.gpus: found 2, whose devices do not generate, and no provider"),
        (10_000_000, ("--providers", "spot"), "trainer.gpus: found 10000000 ranks on CPUs"),
    ],
)
def test_ranks_that_nobody_generates_for_or_that_are_too_many(
    elastic, refused, config: Path, tmp_path: Path, gpus: int, providers: tuple[str, ...], words: str
) -> None:
    pytest.importorskip("transformers")
    directory = write_model(tmp_path / "qwen3", "qwen3")
    keys = ("trainer.kind=transformers", f"model.checkpoint={directory}", f"trainer.gpus={gpus}")
    sets = (word for key in (*keys, "trainer.engine={device = 'cpu'}") for word in ("--set", key))
    refused(elastic("run", config, "--dry-run", *providers, *sets), words)


def test_a_model_in_the_hubs_cache_is_found_by_its_name(
    start, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One whose links lead nowhere is refused, and one that is not there."""
    pytest.importorskip("huggingface_hub")
    cached, commit = tmp_path / "hub" / "models--some--llama", "0" * 40
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text(commit)
    directory = write_model(cached / "snapshots" / commit, "llama")
    (directory / "model.safetensors").unlink()
    (directory / "model.safetensors").symlink_to("../../blobs/none")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    for name, words in (("some/llama", "a link to ../../blobs/none"), ("some/other", "not in its cache here")):
        ended = start("run", config, "--set", f"model.checkpoint={name}", "--set", "trainer.kind=transformers")
        _, complaint = ended.communicate(timeout=120)
        assert ended.returncode == 2
        assert words in complaint
        assert "Traceback" not in complaint
