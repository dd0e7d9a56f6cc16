"""`ElasticWeights`, called in the order in which TRL's trainer calls it, against doors over a real socket."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic.front.doors.base import DoorRefused, PauseMode
from elastic.integrations.trl import KEY_VARIABLE, ElasticError, ElasticWeights
from elastic.protocol.tls import run_certificate
from tests.doors.served import CONTROL, REQUESTS, THEIRS, ServedDoors, served_doors


def parameters(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"model.embed_tokens.weight": (8, 4), "model.norm.weight": (4,), "model.layers.0.mlp.up.weight": (4, 6)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


async def said(function: Callable[[], object]) -> None:
    """As the trainer calls it, from a thread that it blocks."""
    await asyncio.to_thread(function)


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[ServedDoors]:
    async with served_doors(tmp_path, theirs=str(tmp_path)) as under_test:
        yield under_test


@pytest.fixture
def weights_of() -> Iterator[Callable[..., ElasticWeights]]:
    """Makes the trainer's side, on a machine where the weights' root has the same name."""
    made: list[ElasticWeights] = []

    def make(served: ServedDoors, **settings: Any) -> ElasticWeights:
        settings = {"key": CONTROL, "timeout_s": 30.0, **settings}
        made.append(ElasticWeights(f"{served.url}/v1", served.root / "trainer", **settings))
        return made[-1]

    yield make
    for weights in made:
        weights.destroy()


@pytest.mark.parametrize(("shard_bytes", "files"), [(1 << 30, 1), (100, 2)])
async def test_three_updates_are_the_runs_bit_for_bit(
    served: ServedDoors, weights_of: Any, shard_bytes: int, files: int
) -> None:
    weights = weights_of(served, shard_bytes=shard_bytes)
    await said(weights.init_weight_transfer)
    for update in range(3):
        own = parameters(update)
        await said(weights.pause)
        assert served.run.paused
        await said(lambda own=own: weights.send_weights(iter(own.items())))
        await said(weights.resume)
        assert not served.run.paused
        taken = served.run.taken[-1]
        assert {name: tensor.dtype for name, tensor in taken.items()} == dict.fromkeys(own, torch.bfloat16)
        assert all(torch.equal(taken[name], own[name].to(torch.bfloat16)) for name in own)
    await said(weights.destroy)
    assert served.run.pauses == [PauseMode.KEEP] * 3
    assert served.run.files == [files] * 3
    assert [offer.label[-6:] for offer in served.run.offers] == ["000001", "000002", "000003"]
    assert list((served.root / "trainer").iterdir()) == []


async def test_a_dtype_that_is_given_is_kept_and_numbers_stay_what_they_are(
    served: ServedDoors, weights_of: Any
) -> None:
    weights = weights_of(served, dtype=torch.float32)
    own = {"a": torch.randn(3), "steps": torch.tensor([7])}
    await said(lambda: weights.send_weights(iter(own.items())))
    assert {name: tensor.dtype for name, tensor in served.run.taken[0].items()} == {
        "a": torch.float32,
        "steps": torch.int64,
    }
    assert torch.equal(served.run.taken[0]["a"], own["a"])


async def test_a_refusal_is_raised_in_the_runs_words_and_leaves_nothing(served: ServedDoors, weights_of: Any) -> None:
    weights = weights_of(served)
    served.run.refuses = DoorRefused("model.norm.weight: found shape [4]; allowed: [8]")
    with pytest.raises(ElasticError, match=r"/update_weights at .*: 400: model\.norm\.weight: found shape"):
        await said(lambda: weights.send_weights(iter(parameters(0).items())))
    assert list((served.root / "trainer").iterdir()) == []
    with pytest.raises(ElasticError, match="403: a requests key offers no weights"):
        await said(weights_of(served, key=REQUESTS).pause)


async def test_what_can_help_later_is_asked_again(served: ServedDoors, weights_of: Any) -> None:
    served.run.refuses = DoorRefused("no room on the disk", again=True)
    weights = weights_of(served)
    asked = asyncio.create_task(said(lambda: weights.send_weights(iter(parameters(0).items()))))
    await served.run.until(lambda: served.run.refused == 1)
    served.run.refuses = None
    await asked
    assert len(served.run.offers) == 1


async def test_parameters_that_break_off_leave_no_directory(served: ServedDoors, weights_of: Any) -> None:
    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        yield "a", torch.zeros(2)
        raise ValueError("gathering failed")

    with pytest.raises(ValueError, match="gathering failed"):
        await said(lambda: weights_of(served).send_weights(broken()))
    assert list((served.root / "trainer").iterdir()) == []
    assert served.run.offers == []


async def test_the_key_is_the_environments_and_the_authority_the_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, CONTROL)
    certificate = run_certificate(tmp_path, ["127.0.0.1"])
    async with served_doors(tmp_path, certificate=certificate) as served:
        weights = ElasticWeights(served.url, THEIRS, authority=tmp_path / "tls" / "ca.pem")
        await said(weights.pause)
        await said(weights.destroy)
    assert served.run.paused
