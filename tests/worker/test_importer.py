"""The trainer's host with the importer: directories that others write become versions, bit for bit, or are refused."""

import asyncio
import json
import math
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from structlog.testing import capture_logs

from elastic.config import Config
from elastic.engine.model.stored import CheckpointError
from elastic.protocol import wire
from elastic.protocol.offers import OfferedWeights, look_of, source_of_offer
from elastic.system.parking import Parkable
from elastic.weights.versions import discard_all
from elastic.worker.trainer.base import OfferRefused, saved
from elastic.worker.trainer.imported.forms import WholeModels
from elastic.worker.trainer.imported.trainer import PIECE, ImportedTrainer, is_finite
from tests.worker.conftest import MODEL, policy
from tests.worker.trainer_house import TrainerHouse

Tensors = dict[str, torch.Tensor]


def equal(one: Tensors, other: Tensors) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def write(directory: Path, tensors: Tensors, shards: int = 1) -> Path:
    """As Hugging Face's libraries write a model."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(MODEL.to_dict()))
    if shards == 1:
        save_file(tensors, directory / "model.safetensors")
        return directory
    names = sorted(tensors)
    where = {name: f"model-{place % shards + 1:05d}-of-{shards:05d}.safetensors" for place, name in enumerate(names)}
    for file in set(where.values()):
        save_file({name: tensors[name] for name in names if where[name] == file}, directory / file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return directory


def offer(directory: Path, *, lasting: bool = True) -> str:
    return source_of_offer(OfferedWeights(str(directory), lasting))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "weights").mkdir()
    return tmp_path / "weights"


@pytest.fixture
def importer(base: Path, root: Path) -> ImportedTrainer:
    return ImportedTrainer(WholeModels(base), [root])


@pytest.mark.parametrize("shards", [1, 2])
def test_a_directory_is_a_version_bit_for_bit(importer: ImportedTrainer, root: Path, shards: int) -> None:
    assert isinstance(importer, Parkable)
    assert (importer.version, equal(importer.tensors(), policy())) == (0, True)
    importer.take(offer(write(root / "1", policy(1), shards)))
    assert equal(importer.tensors(), policy())
    assert importer.update()["import_bytes"] == sum(tensor.nbytes for tensor in policy().values())
    assert (importer.version, equal(importer.tensors(), policy(1))) == (1, True)


def test_what_was_published_stays_as_it_is_though_its_files_are_written_again(
    importer: ImportedTrainer, root: Path
) -> None:
    importer.take(offer(write(root / "w", policy(1))))
    importer.update()
    published = importer.tensors()
    path = root / "w" / "model.safetensors"
    os.truncate(path, path.stat().st_size // 2)
    assert equal(published, policy(1))


@pytest.mark.parametrize(("lasting", "shards"), [(True, 1), (True, 2), (False, 1)])
def test_a_successor_begins_at_what_was_kept(
    importer: ImportedTrainer, base: Path, root: Path, tmp_path: Path, lasting: bool, shards: int
) -> None:
    directory = write(root / "1", policy(1), shards)
    importer.take(offer(directory, lasting=lasting))
    importer.update()
    kept = tmp_path / "checkpoints" / "00000001.shards"
    importer.save(kept)
    files = sorted(directory.glob("*.safetensors"))
    assert all((kept / file.name).samefile(file) is lasting for file in files)
    for file in files:
        file.unlink()
    successor = ImportedTrainer(WholeModels(base), [root])
    successor.load(kept)
    assert (successor.version, successor.metrics) == (1, importer.metrics)
    assert equal(successor.tensors(), policy(1))
    successor.save(tmp_path / "checkpoints" / "again.shards")


def test_what_is_not_as_it_was_kept_is_refused(
    importer: ImportedTrainer, base: Path, root: Path, tmp_path: Path
) -> None:
    importer.take(offer(write(root / "1", policy(1))))
    importer.update()
    kept = tmp_path / "00000001.shards"
    importer.save(kept)
    with (root / "1" / "model.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x55")
    successor = ImportedTrainer(WholeModels(base), [root])
    with pytest.raises(CheckpointError, match="not as it was written"):
        successor.load(kept)
    assert (successor.version, equal(successor.tensors(), policy())) == (0, True)


def half_written(directory: Path) -> None:
    write(directory, policy(1), shards=2)
    (directory / "model-00002-of-00002.safetensors").unlink()


def pickled(directory: Path) -> None:
    directory.mkdir()
    (directory / "pytorch_model.bin").write_bytes(b"\x80\x04.")


def of_float16(directory: Path) -> None:
    write(directory, {name: tensor.half() for name, tensor in policy(1).items()})


def of_other_names(directory: Path) -> None:
    write(directory, {f"actor.{name}": tensor for name, tensor in policy(1).items()})


def of_other_shapes(directory: Path) -> None:
    write(directory, {name: tensor[:1] for name, tensor in policy(1).items()})


def of_fewer(directory: Path) -> None:
    write(directory, dict(list(policy(1).items())[:-1]))


def outside(directory: Path) -> None:
    directory.symlink_to(write(directory.parent.parent / "outside", policy(1)))


def with_a_file_outside(directory: Path) -> None:
    directory.mkdir()
    elsewhere = write(directory.parent.parent / "outside", policy(1))
    (directory / "model.safetensors").symlink_to(elsewhere / "model.safetensors")


def cut_off(directory: Path) -> None:
    path = write(directory, policy(1)) / "model.safetensors"
    os.truncate(path, path.stat().st_size - 8)


def of_numbers_that_are_none(directory: Path) -> None:
    tensors = policy(1)
    tensors[min(tensors)].view(-1)[-1] = torch.nan
    write(directory, tensors)


@pytest.mark.parametrize(
    ("spoilt", "said"),
    [
        (lambda directory: None, "is not there"),
        (half_written, "model.safetensors.index.json names it"),
        (pickled, "pickles are never read"),
        (of_float16, "expected BF16, found F16"),
        (of_other_names, "missing; expected shape"),
        (of_other_shapes, "expected shape"),
        (of_fewer, "missing; expected shape"),
        (outside, "below no root of weights"),
        (with_a_file_outside, "below no root of weights"),
        (cut_off, "cannot be read"),
        (of_numbers_that_are_none, "numbers that are not finite"),
    ],
)
def test_what_cannot_be_served_is_refused_in_words_and_changes_nothing(
    importer: ImportedTrainer, root: Path, spoilt: Callable[[Path], None], said: str
) -> None:
    spoilt(root / "1")
    with pytest.raises(OfferRefused, match=said) as refused:
        importer.take(offer(root / "1"))
    assert not refused.value.again
    assert (importer.version, equal(importer.tensors(), policy())) == (0, True)
    with pytest.raises(ValueError, match="no weights were offered"):
        importer.update()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_one_number_that_is_not_finite_is_found_wherever_it_is(dtype: torch.dtype, odd: float) -> None:
    largest = torch.finfo(dtype)
    tensor = torch.full((3, PIECE), largest.min, dtype=dtype)
    tensor[1] = largest.max
    assert is_finite(tensor)
    assert is_finite(tensor[:0])
    tensor[2, -1] = odd
    assert not is_finite(tensor)


def test_what_is_no_offer_is_refused(importer: ImportedTrainer) -> None:
    with pytest.raises(OfferRefused, match="found no offer"):
        importer.take("")


def test_what_was_written_again_since_it_was_offered_is_refused_and_can_be_asked_for_again(
    importer: ImportedTrainer, root: Path
) -> None:
    directory = write(root / "w", policy(1))
    offered = OfferedWeights(str(directory), look=look_of(directory))
    write(directory, policy(2))
    with pytest.raises(OfferRefused, match="written again since it was offered") as refused:
        importer.take(source_of_offer(offered))
    assert refused.value.again
    importer.take(source_of_offer(OfferedWeights(str(directory), look=look_of(directory))))
    importer.update()
    assert equal(importer.tensors(), policy(2))


def test_a_directory_looks_the_same_until_its_weights_are_written_again(root: Path) -> None:
    directory = write(root / "1", policy(1))
    before = look_of(directory)
    (directory / "README.md").write_text("other files do not count")
    assert look_of(directory) == before
    write(directory, policy(2))
    assert look_of(directory) != before


# In its process.


@pytest.fixture
def config(base: Path, root: Path) -> Config:
    return Config.model_validate(
        {
            "run": {"steps": 9},
            "model": {"checkpoint": str(base)},
            "environment": {"name": "outside", "kind": "outside"},
            "rollout": {"groups": 0},
            "seeding": {"policy": "none"},
            "doors": {},
            "trainer": {"kind": "imported", "imported": {"roots": [str(root)]}, "checkpoint_every_steps": 1},
            "engine": {"max_context_tokens": 64, "kv_blocks": 16, "max_batch": 4},
            "weights": {"keep_versions": 3, "pull_timeout_s": 1.0},
        }
    )


@pytest.fixture
async def house(config: Config, tmp_path: Path) -> AsyncIterator[TrainerHouse]:
    async with TrainerHouse(config, tmp_path) as house:
        yield house


async def updated(house: TrainerHouse, version: int, directory: Path) -> wire.Stepped:
    house.send(wire.UpdateFrame(version - 1, version, source=offer(directory)))
    stepped = await house.stepped(version)
    await house.until(lambda: any(published.version == version for published in house.of(wire.PublishedFrame)))
    return stepped


async def test_offers_are_published_and_signed_and_a_refusal_leaves_all_as_it_was(
    house: TrainerHouse, root: Path
) -> None:
    await house.ready()
    assert equal(house.weights(0), policy())
    await updated(house, 1, write(root / "1", policy(1)))
    assert equal(house.weights(1), policy(1))
    half_written(root / "2")
    house.send(wire.UpdateFrame(1, 2, source=offer(root / "2")))
    refused = await house.first(wire.UpdateRefused)
    assert (refused.version, refused.again, "names it" in refused.reason) == (2, False, True)
    await updated(house, 2, write(root / "3", policy(3)))
    assert equal(house.weights(2), policy(3))


async def test_a_successor_stands_where_the_importer_stood_and_answers_again(house: TrainerHouse, root: Path) -> None:
    first = house.host("w")
    await house.first(wire.Ready)
    stepped = await updated(house, 1, write(root / "1", policy(1)))
    (kept,) = saved(house.run_dir / "checkpoints")
    assert kept.name == "00000001.shards"
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    for file in (root / "1").iterdir():
        file.unlink()
    begin = len(house.heard)
    house.host("again", resume=True)
    assert (await house.first(wire.Ready, after=begin)).weights_version == 1
    assert equal(house.weights(1), policy(1))
    house.send(wire.UpdateFrame(0, 1, source=offer(root / "1")), worker="again")
    again = await house.first(wire.Stepped, after=begin)
    assert again.metrics.items() <= stepped.metrics.items()


async def written_over(house: TrainerHouse, root: Path) -> int:
    """An importer is gone, and what it has kept by links is another model's by now; returns how much was heard."""
    first = house.host("w")
    await house.first(wire.Ready)
    await updated(house, 1, write(root / "1", policy(1)))
    await updated(house, 2, write(root / "2", policy(2)))
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    (root / "2" / "model.safetensors").write_bytes((write(root / "3", policy(3)) / "model.safetensors").read_bytes())
    return len(house.heard)


async def test_a_successor_goes_on_from_what_was_published_where_what_was_kept_is_written_over(
    house: TrainerHouse, root: Path
) -> None:
    begin = await written_over(house, root)
    for worker in ("again", "and again"):
        successor = house.host(worker, resume=True)
        ready = await house.first(wire.Ready, after=begin)
        assert (ready.weights_version, ready.source) == (2, offer(root / "2"))
        assert equal(house.weights(2), policy(2))
        successor.cancel()
        await asyncio.gather(successor, return_exceptions=True)
        begin = len(house.heard)


async def test_where_nothing_is_left_of_a_version_that_is_written_over_its_place_is_named(
    house: TrainerHouse, root: Path
) -> None:
    await written_over(house, root)
    discard_all(house.relay)
    with capture_logs() as logs:
        ended = await house.host("again", resume=True)
    assert f"{root / '2'}: was written over after its update was answered" in ended.reason
    assert not any(one.get("exc_info") for one in logs)


async def test_a_successor_does_not_answer_for_what_was_kept_of_another_offer(house: TrainerHouse, root: Path) -> None:
    """The offer had been refused after its checkpoint was saved, and another one is to be that version by now."""
    first = house.host("w")
    await house.first(wire.Ready)
    await updated(house, 1, write(root / "1", policy(1)))
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    begin, stepped = len(house.heard), len(house.of(wire.Stepped))
    house.host("again", resume=True)
    assert (await house.first(wire.Ready, after=begin)).source == offer(root / "1")
    house.send(wire.UpdateFrame(0, 1, source=offer(write(root / "2", policy(2)))), worker="again")
    failed = await house.first(wire.TrainerFailedFrame, after=begin)
    assert "another offer" in failed.error
    assert len(house.of(wire.Stepped)) == stepped
