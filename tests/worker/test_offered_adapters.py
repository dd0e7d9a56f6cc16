"""The importer of adapters: directories as peft writes them become versions of one rank and a scale of 1, or are
refused."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import save_file

from elastic.engine.model.stored import CheckpointError
from elastic.protocol.offers import OfferedWeights, source_of_offer
from elastic.weights.client import WeightsClient
from elastic.weights.directory import DirectoryRelay
from elastic.weights.publisher import Publisher
from elastic.weights.signing import SigningKey
from elastic.weights.source import RelaySource
from elastic.worker.trainer.base import OfferRefused
from elastic.worker.trainer.imported.forms import Adapters
from elastic.worker.trainer.imported.trainer import ImportedTrainer
from tests.worker.conftest import MODEL, policy

Tensors = dict[str, torch.Tensor]
RANK = 8
PREFIX = "base_model.model.model.layers."
B = f"{PREFIX}0.self_attn.q_proj.lora_B.weight"


def adapter(seed: int, rank: int = RANK) -> Tensors:
    noise = torch.Generator().manual_seed(seed)
    found: Tensors = {}
    for module in ("0.self_attn.q_proj", "0.mlp.down_proj"):
        rows, columns = policy()[f"model.layers.{module}.weight"].shape
        for part, shape in (("A", (rank, columns)), ("B", (rows, rank))):
            found[f"{PREFIX}{module}.lora_{part}.weight"] = torch.randn(shape, generator=noise).bfloat16()
    return found


def write(directory: Path, tensors: Mapping[str, torch.Tensor], **about: Any) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    said = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "bias": "none", "modules_to_save": None, **about}
    (directory / "adapter_config.json").write_text(json.dumps(said))
    save_file(dict(tensors), directory / "adapter_model.safetensors")
    return directory


def offer(directory: Path) -> str:
    return source_of_offer(OfferedWeights(str(directory)))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "weights").mkdir()
    return tmp_path / "weights"


@pytest.fixture
def importing(base: Path, root: Path) -> Callable[[], ImportedTrainer]:
    return lambda: ImportedTrainer(Adapters(base, 2 * RANK), [root])


def test_an_adapter_is_a_version_with_its_scale_in_b(importing: Callable[[], ImportedTrainer], root: Path) -> None:
    importer = importing()
    assert all(name.endswith("lora_A.weight") or not tensor.any() for name, tensor in importer.tensors().items())
    importer.take(offer(write(root / "lora", adapter(1), lora_alpha=4 * RANK)))
    importer.update()
    served = importer.tensors()
    assert served.keys() == adapter(1).keys()
    for name, tensor in adapter(1).items():
        assert torch.equal(served[name], tensor * 4 if "lora_B" in name else tensor)


def test_what_peft_keeps_in_float32_travels_as_engines_take_it(
    importing: Callable[[], ImportedTrainer], root: Path
) -> None:
    importer = importing()
    tensors = {name: tensor.float() + 1e-4 for name, tensor in adapter(1).items()}
    importer.take(offer(write(root / "lora", tensors, lora_alpha=RANK / 2)))
    importer.update()
    for name, tensor in importer.tensors().items():
        assert torch.equal(tensor, (tensors[name] * (0.5 if "lora_B" in name else 1.0)).bfloat16())


def test_a_worker_pulls_adapters_also_after_the_first_that_has_no_effect(
    importing: Callable[[], ImportedTrainer], root: Path, tmp_path: Path
) -> None:
    """One directory is written again for each version, as SkyRL does."""
    importer, key = importing(), SigningKey()
    publisher = Publisher(DirectoryRelay(tmp_path / "relay"), "run", MODEL.to_dict(), key=key)
    client = WeightsClient()
    for version in range(3):
        if version:
            importer.take(offer(write(root / "lora", adapter(version))))
            importer.update()
        publisher.publish(version, importer.tensors())
        source = RelaySource(run="run", version=version, relay=str(tmp_path / "relay"), publisher=key.public)
        client.stage(source, 30.0)
        pulled = cast("Tensors", client.apply(source).tensors)
        assert pulled.keys() == importer.tensors().keys()
        assert all(torch.equal(pulled[name], tensor) for name, tensor in importer.tensors().items())
    assert torch.equal(importer.tensors()[B], adapter(2)[B])
    client.close()
    publisher.close()


def test_a_successor_begins_at_the_adapter_that_was_kept(
    importing: Callable[[], ImportedTrainer], root: Path, tmp_path: Path
) -> None:
    importer, kept = importing(), tmp_path / "checkpoints" / "00000001.shards"
    importer.take(offer(write(root / "lora", adapter(1), lora_alpha=2 * RANK)))
    importer.update()
    importer.save(kept)
    write(root / "lora", adapter(2))
    successor = importing()
    successor.load(kept)
    assert successor.version == 1
    assert all(torch.equal(successor.tensors()[name], tensor) for name, tensor in importer.tensors().items())
    (kept / "adapter_config.json").write_text("{}")
    with pytest.raises(CheckpointError):
        importing().load(kept)


def without(tensors: Tensors, name: str) -> Tensors:
    return {other: tensor for other, tensor in tensors.items() if other != name}


REFUSED: Mapping[str, tuple[Callable[[], Tensors], dict[str, Any], str]] = {
    "odd scale": (lambda: adapter(1), {"lora_alpha": 3 * RANK}, "lora_alpha: found 24 with r = 8; allowed: r times a"),
    "no scale": (lambda: adapter(1), {"lora_alpha": None}, "lora_alpha: found None"),
    "truth": (lambda: adapter(1), {"lora_alpha": True}, "lora_alpha: found True"),
    "rank": (lambda: adapter(1, 64), {"r": 64, "lora_alpha": 64}, "r: found 64; allowed: from 1 to 16"),
    "two ranks": (lambda: adapter(1), {"rank_pattern": {"q_proj": 4}}, "rank_pattern: found"),
    "another rank": (lambda: adapter(1) | {B: adapter(1, 4)[B]}, {}, r"expected shape \[.*, 8\], found"),
    "dora": (lambda: adapter(1), {"use_dora": True}, "use_dora: found True; allowed: False"),
    "rslora": (lambda: adapter(1), {"use_rslora": True}, "use_rslora: found True"),
    "whole modules": (lambda: adapter(1), {"modules_to_save": ["lm_head"]}, "modules_to_save: found"),
    "bias": (lambda: adapter(1), {"bias": "all"}, "bias: found 'all'"),
    "kind": (lambda: adapter(1), {"peft_type": "IA3"}, "peft_type: found 'IA3'"),
    "half": (lambda: without(adapter(1), B), {}, "lora_B.weight is missing"),
    "module": (lambda: {B.replace("q_proj", "w_proj"): adapter(1)[B]}, {}, "the base has no linear layer"),
    "head": (lambda: {f"{PREFIX}lm_head.lora_B.weight": adapter(1)[B]}, {}, "found a tensor"),
    "whole model": (policy, {}, "found a tensor"),
    "nothing": (dict, {}, "has no tensors"),
    "float16": (lambda: adapter(1) | {B: adapter(1)[B].half()}, {}, "found F16; allowed: BF16, F32"),
    "no number": (lambda: adapter(1) | {B: adapter(1)[B] / 0}, {}, "not finite"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_adapter_of_one_rank_and_scale_is_refused(
    importing: Callable[[], ImportedTrainer], root: Path, case: str
) -> None:
    tensors, about, said = REFUSED[case]
    importer = importing()
    with pytest.raises(OfferRefused, match=said) as refused:
        importer.take(offer(write(root / "lora", tensors(), **about)))
    assert not refused.value.again
    assert importer.version == 0


def test_another_adapter_than_the_first_and_what_is_none_are_refused(
    importing: Callable[[], ImportedTrainer], root: Path
) -> None:
    importer = importing()
    importer.take(offer(write(root / "lora", adapter(1))))
    importer.update()
    with pytest.raises(OfferRefused, match="expected shape"):
        importer.take(offer(write(root / "wide", adapter(1, 16), r=16, lora_alpha=16)))
    (root / "pickled").mkdir()
    (root / "pickled" / "adapter_config.json").write_text("{}")
    (root / "pickled" / "adapter_model.bin").write_bytes(b"")
    with pytest.raises(OfferRefused, match=r"has no adapter_model\.safetensors.*pickles are never read"):
        importer.take(offer(root / "pickled"))
    (root / "linked").symlink_to("/tmp")
    with pytest.raises(OfferRefused, match="below no root of weights"):
        importer.take(offer(root / "linked"))
