"""Comparing where the weights are gives what copying them and comparing them gives."""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from elastic.weights.compact import compact, on_device
from elastic.weights.directory import DirectoryRelay
from elastic.weights.errors import RelayError
from elastic.weights.publisher import Publisher, PublishSettings
from elastic.weights.puller import Puller
from tests.seeds import examples
from tests.weights.signed import KEY, TRUST, assert_same, full_disk

many = settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=examples(10, 25), deadline=None
)
DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device")),
]
SMALL = PublishSettings(bucket_elements=64, tile_elements=16, keyframe_every=3, merge_every=2)
SPECIALS = [0x0000, 0x8000, 0x0001, 0x7F80, 0xFF80, 0x7FC0, 0x7FC1, 0xFFFF]


def patterns(seed: int, size: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return np.where(rng.random(size) < 0.3, rng.choice(SPECIALS, size), rng.integers(0, 1 << 16, size)).astype(
        np.uint16
    )


def tensor_of(bits: np.ndarray, device: str, transposed: bool = False) -> Tensor:
    tensor = torch.from_numpy(bits.view(np.int16).copy()).view(torch.bfloat16).to(device)
    return tensor.view(-1, 2).t().contiguous().t() if transposed else tensor


@pytest.mark.parametrize("device", DEVICES)
@many
@given(
    seed=st.integers(0, 2**30),
    size=st.integers(0, 300),
    share=st.sampled_from([0.0, 0.05, 1.0]),
    piece=st.sampled_from([1, 64, 1000]),
)
def test_what_changed_is_what_numpy_finds(device: str, seed: int, size: int, share: float, piece: int):
    old, other = patterns(seed, size), patterns(seed + 1, size)
    new = np.where(np.random.default_rng(seed).random(size) < share, other, old)
    found = list(compact(*(tensor_of(bits, device).view(torch.int16) for bits in (old, new)), at_once=piece))
    index = np.concatenate([np.empty(0, np.int64), *(index.numpy() for index, _ in found)])
    values = np.concatenate([np.empty(0, np.int16), *(values.numpy() for _, values in found)])
    assert index.tolist() == np.flatnonzero(old != new).tolist()
    assert np.array_equal(values.view(np.uint16), new[index])
    assert all(index.numel() <= piece for index, _ in found)


@pytest.mark.parametrize("device", DEVICES)
@many
@given(seed=st.integers(0, 2**30), steps=st.lists(st.sampled_from(["step", "same", "fail", "all"]), max_size=7))
def test_a_mirrored_version_is_the_trainers_bit_for_bit(tmp_path_factory, device: str, seed: int, steps: list[str]):
    """A property over versions that are published, mirrored and compared bit for bit."""
    relay = DirectoryRelay(tmp_path_factory.mktemp("relay"))
    bits = [patterns(seed, 90), patterns(seed + 1, 40)]

    def tensors() -> dict[str, Tensor]:
        return {"a": tensor_of(bits[0], device, transposed=True), "b": tensor_of(bits[1], device)}

    rank, puller = Publisher(relay, "run", {}, SMALL, key=KEY, mirrored=lambda tensors: True), Puller(relay, TRUST)
    for version, step in enumerate(["first", *steps, "step"]):
        share = {"step": 0.1, "fail": 0.5, "all": 1.0}.get(step, 0.0)
        for at, each in enumerate(bits):
            moved = np.random.default_rng(seed + version).random(each.size) < share
            bits[at] = np.where(moved, patterns(seed + 2 + version, each.size), each)
        if step == "fail":
            with full_disk(), pytest.raises(RelayError):
                rank.publish(version, tensors())
            continue
        rank.publish(version, tensors())
        assert_same(puller.pull(version), {name: tensor.cpu() for name, tensor in tensors().items()})
    rank.close()


def test_tensors_on_the_host_are_not_mirrored():
    assert not on_device([torch.zeros(5, dtype=torch.bfloat16)])
