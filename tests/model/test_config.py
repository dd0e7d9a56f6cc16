import pytest

from elastic.engine.model.config import ModelConfigError, Qwen3Config

PUBLISHED = {  # Qwen/Qwen3-0.6B
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "initializer_range": 0.02,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "model_type": "qwen3",
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}


def test_reads_a_published_config():
    config = Qwen3Config.from_dict(PUBLISHED)
    assert (config.hidden_size, config.num_hidden_layers, config.head_dim) == (1024, 28, 128)
    assert config.rope_theta == 1e6
    assert config.tie_word_embeddings
    assert config.eos_token_id == 151645


@pytest.mark.parametrize("config", [Qwen3Config(), Qwen3Config(tie_word_embeddings=False, eos_token_id=(1, 2))])
def test_what_is_written_is_read_back(config):
    assert Qwen3Config.from_dict(config.to_dict()) == config


def test_theta_may_stand_in_rope_parameters():
    raw = {**PUBLISHED, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
    del raw["rope_theta"]
    assert Qwen3Config.from_dict(raw).rope_theta == 5e5


@pytest.mark.parametrize("field", ["vocab_size", "hidden_size", "num_key_value_heads", "head_dim", "rope_theta"])
def test_a_missing_field_is_named(field):
    raw = {name: value for name, value in PUBLISHED.items() if name != field}
    with pytest.raises(ModelConfigError, match=f"missing: {field}"):
        Qwen3Config.from_dict(raw)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("model_type", "llama", "model_type: only 'qwen3' is supported .found 'llama'"),
        ("hidden_act", "gelu", "hidden_act: only 'silu'"),
        ("attention_bias", True, "attention_bias: only False is supported .found True"),
        ("use_sliding_window", True, "use_sliding_window"),
        ("quantization_config", {"bits": 4}, "quantization_config"),
        ("rope_scaling", {"type": "yarn", "factor": 4.0}, "rope_type: only 'default' is supported .found 'yarn'"),
        ("rope_scaling", "yarn", "rope_scaling: expected an object"),
        ("vocab_size", "many", "vocab_size"),
        ("hidden_size", 0, "hidden_size: must be at least 1 .found 0"),
        ("num_key_value_heads", 3, "num_key_value_heads: must divide num_attention_heads=16 .found 3"),
        ("head_dim", 33, "head_dim"),
    ],
)
def test_what_cannot_be_run_is_refused_by_name(field, value, message):
    with pytest.raises(ModelConfigError, match=message):
        Qwen3Config.from_dict({**PUBLISHED, field: value})
