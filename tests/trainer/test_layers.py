import pytest

from elastic.worker.trainer.layers import changed_shares, layer_of


@pytest.mark.parametrize(
    ("tensor", "layer"),
    [
        ("model.embed_tokens.weight", "embedding"),
        ("model.layers.0.self_attn.q_proj.weight", "0"),
        ("model.layers.63.mlp.down_proj.weight", "63"),
        ("layers.7.norm", "7"),
        ("model.norm.weight", "head"),
        ("lm_head.weight", "head"),
    ],
)
def test_the_layer_is_in_the_name(tensor: str, layer: str):
    assert layer_of(tensor) == layer


def test_shares_are_of_the_layers_elements_from_input_to_output():
    elements = {
        "lm_head": 10,
        "layers.10.a": 8,
        "layers.2.a": 4,
        "layers.2.b": 4,
        "embed_tokens": 2,
        "layers.3.empty": 0,
    }
    shares = changed_shares({"layers.2.a": 1, "layers.2.b": 1, "lm_head": 10}, elements)
    assert list(shares.items()) == [("embedding", 0.0), ("2", 0.25), ("10", 0.0), ("head", 1.0)]


def test_a_keyframe_says_nothing_about_changes():
    assert changed_shares({}, {"a": 3}) == {}
