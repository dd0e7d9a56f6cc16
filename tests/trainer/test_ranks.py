"""A trainer of several ranks learns what one does; when a rank dies or hangs, its process ends, and nothing is lost."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.trainer.hugging_face import MODELS, write_model
from tests.trainer.ranks import RankedProcess, config_of

pytestmark = pytest.mark.trainers

Start = Callable[..., RankedProcess]


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Directories of models, made once each."""
    pytest.importorskip("transformers")
    made: dict[str, Path] = {}

    def directory(kind: str) -> Path:
        if kind not in made:
            made[kind] = write_model(tmp_path_factory.mktemp(kind), kind)
        return made[kind]

    return directory


@pytest.fixture
def start(stored: Callable[[str], Path]) -> Iterator[Start]:
    """Starts trainers of a model on so many ranks."""
    started: list[RankedProcess] = []

    def begin(gpus: int, kind: str = "llama", own: dict[str, object] | None = None, **settings: Any) -> RankedProcess:
        started.append(RankedProcess(config_of(stored(kind), gpus, own, **settings)))
        return started[-1]

    yield begin
    for process in started:
        process.close()


def weights(made: RankedProcess, path: Path) -> dict[str, Tensor]:
    made.ask("weights", str(path))
    return load_file(path)


def same_bits(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def as_of_one(found: dict[str, Any], one: dict[str, Any]) -> None:
    """The same decisions, and the same figures but for how sums are rounded."""
    assert found["metrics"] == pytest.approx(one["metrics"], rel=1e-4, abs=1e-7)
    assert found["unusable"] == one["unusable"]
    assert [check[:2] for check in found["checks"]] == [check[:2] for check in one["checks"]]


@pytest.mark.parametrize("kind", MODELS)
def test_two_ranks_learn_what_one_does(start: Start, tmp_path: Path, kind: str) -> None:
    one, two = start(1, kind), start(2, kind)
    for seed in range(2):
        as_of_one(two.ask("train", seed), one.ask("train", seed))
    expected = weights(one, tmp_path / "one")
    for name, tensor in weights(two, tmp_path / "two").items():
        torch.testing.assert_close(tensor, expected[name], atol=2e-3, rtol=2e-2, msg=name)


def test_two_ranks_keep_first_weights_and_compare_with_a_reference_as_one_does(start: Start, tmp_path: Path) -> None:
    keys: dict[str, Any] = {"bypass_mode": False, "rollout_is": "sequence", "kl_coefficient": 0.5, "loss": "gspo"}
    one, two = (start(gpus, updates_per_step=2, entropy_coefficient=0.01, **keys) for gpus in (1, 2))
    for seed in range(2):
        found = two.ask("train", seed)
        as_of_one(found, one.ask("train", seed))
    assert found["metrics"]["kl"] > 0
    expected = weights(one, tmp_path / "one")
    for name, tensor in weights(two, tmp_path / "two").items():
        torch.testing.assert_close(tensor, expected[name], atol=2e-3, rtol=2e-2, msg=name)


def test_four_ranks_leave_out_what_one_does(start: Start, tmp_path: Path) -> None:
    """Whatever rank the odd group's trajectories are on; and the same orders come to the same bits."""
    one, four, again = start(1), start(4), start(4)
    for seed in range(2):
        expected, found = one.ask("train", seed, 1), four.ask("train", seed, 1)
        assert found["unusable"] == {"g1": "its gradient is not finite"}
        as_of_one(found, expected)
        assert again.ask("train", seed, 1) == found
    assert same_bits(weights(four, tmp_path / "four"), weights(again, tmp_path / "again"))
    expected_weights = weights(one, tmp_path / "one")
    for name, tensor in weights(four, tmp_path / "four").items():
        torch.testing.assert_close(tensor, expected_weights[name], atol=2e-3, rtol=2e-2, msg=name)


def test_ranks_park_and_resume_together(start: Start, tmp_path: Path) -> None:
    own = {"dtype": "bfloat16", "offload": "optimizer"}
    through, parked, one = start(2, own=own), start(2, own=own), start(1, own=own)
    for seed in range(2):
        found = through.ask("train", seed)
        parked.ask("park")
        parked.ask("resume")
        assert parked.ask("train", seed) == found
        assert found["metrics"]["loss"] == pytest.approx(one.ask("train", seed)["metrics"]["loss"], rel=0.05)
    _, state_bytes, _ = parked.ask("park")
    held = weights(parked, tmp_path / "parked")
    assert same_bits(held, weights(through, tmp_path / "through"))
    # A weight's shard and its sum, of which the latter is zero and not copied.
    assert state_bytes >= sum(4 * tensor.numel() for tensor in held.values())
