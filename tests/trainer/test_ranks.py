"""A trainer of several ranks learns what one does; when a rank dies or hangs, its process ends, and nothing is lost."""

import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from elastic.engine.model.stored import CheckpointError
from elastic.pool.messages import BEAT_VARIABLE
from elastic.system.processes import lives
from elastic.weights.directory import DirectoryRelay
from elastic.weights.plan import PublishedUpdate
from elastic.weights.puller import Puller
from elastic.weights.records import request_key
from elastic.weights.signing import Trust
from elastic.weights.versions import published_updates, published_versions
from elastic.worker.trainer import checkpoint
from elastic.worker.trainer.base import remove_saved, saved
from tests.trainer.hugging_face import MODELS, read_weights, write_glm, write_model
from tests.trainer.ranks import RankedProcess, config_of

pytestmark = pytest.mark.trainers

Start = Callable[..., RankedProcess]

KEYFRAME_S = 60.0
"""For one that was asked for; it takes two seconds on an idle machine."""


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

    def begin(
        gpus: int, kind: str = "llama", own: dict[str, object] | None = None, beat_s: str = "", **settings: Any
    ) -> RankedProcess:
        resident = {BEAT_VARIABLE: beat_s} if beat_s else {}
        started.append(RankedProcess(config_of(stored(kind), gpus, own, **settings), (), **resident))
        return started[-1]

    yield begin
    for process in started:
        process.close()


def weights(made: RankedProcess, path: Path, *, one: bool = False) -> dict[str, Tensor]:
    made.ask("weights", str(path), one=one)
    return load_file(path)


def same_bits(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def on_disk(directory: Path, kind: str) -> dict[str, Tensor]:
    """The tensors of the files, but for such as are another one's."""
    found = read_weights(directory)
    if MODELS[kind].get("tie_word_embeddings"):
        found.pop("lm_head.weight", None)
    return found


def relays(directory: Path) -> list[tuple[DirectoryRelay, Trust]]:
    """To which ranks have published, and whom to believe there."""
    keys = directory.glob("relay-*.key")
    return [(DirectoryRelay(key.with_suffix("")), Trust("run", key.read_text())) for key in keys]


def as_of_one(found: dict[str, Any], one: dict[str, Any]) -> None:
    """The same decisions, and the same figures but for how sums are rounded."""
    assert found["metrics"] == pytest.approx(one["metrics"], rel=1e-4, abs=1e-7)
    assert found["unusable"] == one["unusable"]
    assert [check[:2] for check in found["checks"]] == [check[:2] for check in one["checks"]]


def about_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, expected[name], atol=2e-3, rtol=2e-2, msg=name)


@pytest.mark.parametrize("kind", MODELS)
def test_two_ranks_publish_what_is_on_disk_and_learn_what_one_does(
    start: Start, stored: Callable[[str], Path], tmp_path: Path, kind: str
) -> None:
    made = start(2, kind)
    assert same_bits(weights(made, tmp_path / "base"), on_disk(stored(kind), kind))
    for seed in range(2):
        as_of_one(made.ask("train", seed), made.ask("train", seed, one=True))
    about_equal(weights(made, tmp_path / "two"), weights(made, tmp_path / "one", one=True))


def test_ranks_publish_buffers_and_float32_tensors_as_they_are_on_disk_and_keyframes_on_request(tmp_path: Path) -> None:
    made = RankedProcess(config_of(write_glm(tmp_path / "glm"), 2))
    try:
        assert same_bits(weights(made, tmp_path / "base"), read_weights(tmp_path / "glm"))
        made.ask("train", 0)
        held = weights(made, tmp_path / "trained")
        ((relay, trust),) = relays(tmp_path)
        assert published_updates(relay)[-1] == PublishedUpdate(2, 1)
        relay.put(request_key(2), b"")
        asked_s = time.time()
        while PublishedUpdate(2, None) not in published_updates(relay):
            assert time.time() < asked_s + KEYFRAME_S
            time.sleep(0.05)
        for key in relay.list_keys("versions/00000001/"):
            relay.delete(key)
        assert same_bits(Puller(relay, trust).pull(2), held)
    finally:
        made.close()


def test_two_ranks_train_adapters_as_one_does(start: Start, tmp_path: Path) -> None:
    """They are published and kept as those of one rank are, and compared with the base, which is sharded, too."""
    pytest.importorskip("peft")
    lora = {"r": 4, "lora_alpha": 8}
    made = start(2, own={"lora": lora}, bypass_mode=False, rollout_is="sequence", kl_coefficient=0.5)
    found: dict[str, Any] = {}
    for seed in range(2):
        found = made.ask("train", seed)
        as_of_one(found, made.ask("train", seed, one=True))
    assert found["metrics"]["kl"] > 0
    held = weights(made, tmp_path / "two")
    assert all(".lora_" in name for name in held)
    about_equal(held, weights(made, tmp_path / "one", one=True))
    directory = tmp_path / "00000002.shards"
    made.ask("save", str(directory))
    assert made.ask("load", str(directory), one=True) == 2
    assert same_bits(weights(made, tmp_path / "one", one=True), held)


def test_two_ranks_keep_first_weights_and_compare_with_a_reference_as_one_does(start: Start, tmp_path: Path) -> None:
    keys: dict[str, Any] = {"bypass_mode": False, "rollout_is": "sequence", "kl_coefficient": 0.5, "loss": "gspo"}
    made = start(2, updates_per_step=2, entropy_coefficient=0.01, **keys)
    found: dict[str, Any] = {}
    for seed in range(2):
        found = made.ask("train", seed)
        as_of_one(found, made.ask("train", seed, one=True))
    assert found["metrics"]["kl"] > 0
    about_equal(weights(made, tmp_path / "two"), weights(made, tmp_path / "one", one=True))


def test_four_ranks_leave_out_what_one_does(start: Start, tmp_path: Path) -> None:
    """Whatever rank the odd group's trajectories are on; and the same orders come to the same bits."""
    made = start(4)
    made.ask("save", str(tmp_path / "00000000.shards"))
    steps: list[dict[str, Any]] = []
    for seed in range(2):
        steps.append(made.ask("train", seed, 1))
        assert steps[-1]["unusable"] == {"g1": "its gradient is not finite"}
        as_of_one(steps[-1], made.ask("train", seed, 1, one=True))
    held = weights(made, tmp_path / "four")
    about_equal(held, weights(made, tmp_path / "one", one=True))
    assert made.ask("load", str(tmp_path / "00000000.shards")) == 0
    assert [made.ask("train", seed, 1) for seed in range(2)] == steps
    assert same_bits(weights(made, tmp_path / "again"), held)


def test_ranks_park_and_resume_together(start: Start, tmp_path: Path) -> None:
    made = start(2, own={"dtype": "bfloat16", "offload": "optimizer"})
    made.ask("save", str(tmp_path / "00000000.shards"))
    steps = [made.ask("train", seed) for seed in range(2)]
    held = weights(made, tmp_path / "through")
    for found, seed in zip(steps, range(2), strict=True):
        loss = made.ask("train", seed, one=True)["metrics"]["loss"]
        assert found["metrics"]["loss"] == pytest.approx(loss, rel=0.05)
    made.ask("load", str(tmp_path / "00000000.shards"))
    for found, seed in zip(steps, range(2), strict=True):
        made.ask("park")
        made.ask("resume")
        assert made.ask("train", seed) == found
    _, state_bytes, _ = made.ask("park")
    assert same_bits(weights(made, tmp_path / "parked"), held)
    # The weights' shards; masters and moments are in host memory.
    assert state_bytes >= sum(4 * tensor.numel() for tensor in held.values())


def test_any_number_of_ranks_reads_what_another_wrote(start: Start, tmp_path: Path) -> None:
    """A directory of two ranks by one and by four, a file of one by two; each goes on as the others do."""
    two = start(2)
    two.ask("train", 0)
    directory, file = tmp_path / "00000001.shards", tmp_path / "00000002.safetensors"
    two.ask("save", str(directory))
    held = weights(two, tmp_path / "two")
    assert [path.name for path in saved(tmp_path)] == [directory.name]
    assert two.ask("load", str(directory), one=True) == 1
    two.ask("save", str(file), one=True)
    two.ask("load", str(file))
    four = start(4)
    four.ask("load", str(directory))
    assert same_bits(weights(two, tmp_path / "read"), held)
    assert same_bits(weights(two, tmp_path / "one", one=True), held)
    assert same_bits(weights(four, tmp_path / "four"), held)
    expected = two.ask("train", 1, one=True)
    for process in (two, four):
        as_of_one(process.ask("train", 1), expected)

    assert dict(checkpoint.masters(directory)).keys() == held.keys()
    shard = next(directory.glob("__1_*"))
    whole, shapes = shard.read_bytes(), {name: tuple(one.shape) for name, one in checkpoint.masters(directory)}
    for spoil in (lambda: shard.write_bytes(whole[:-1000]), shard.unlink):
        spoil()
        with pytest.raises(CheckpointError, match=f"damaged: {shard.name}"):
            checkpoint.check_header(directory, shapes)  # which reads no tensor
    shard.write_bytes(whole)
    checkpoint.check_header(directory, shapes)
    for damaged in (next(directory.glob("__1_*")), directory / ".metadata"):
        content = bytearray(damaged.read_bytes())
        content[-100] ^= 0x80
        damaged.write_bytes(content)
        for process, one in ((two, False), (two, True), (four, False)):
            with pytest.raises(ValueError, match=rf"damaged: {damaged.name} is not as it was written"):
                process.ask("load", str(directory), one=one)
    remove_saved(directory)
    assert [path.name for path in saved(tmp_path)] == [file.name]
    assert not list(tmp_path.glob(".checkpoint-*"))


def test_a_rank_without_room_leaves_no_half_of_a_checkpoint(start: Start, tmp_path: Path) -> None:
    two, path = start(2), tmp_path / "00000001.shards"
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.prlimit(two.pids[0], resource.RLIMIT_FSIZE, (2_000, hard))
    with pytest.raises(ValueError, match=r"cannot be written, with [\d.,]+ MB free there"):
        two.ask("save", str(path))
    assert not list(tmp_path.iterdir())
    resource.prlimit(two.pids[0], resource.RLIMIT_FSIZE, (hard, hard))
    two.ask("save", str(path))
    assert two.ask("load", str(path)) == 0


HELD_UP = {
    "backward": ("Sharded.gradients", signal.SIGKILL),
    "optimiser step": ("AdamW.step", signal.SIGKILL),
    "publish": ("Encoder.put_delta", signal.SIGKILL),
    "checkpoint": ("save_shards", signal.SIGKILL),
    "stopped": ("Sharded.gradients", signal.SIGSTOP),
}
"""A function in which a rank is struck, and how."""
ENDS_WITHIN_S = 2.0
BEAT_S = 0.2
"""How often a resident says that it lives: a rank that is stopped for three times as long hangs."""


@pytest.mark.timeout(120)
def test_an_order_that_takes_too_long_ends_the_trainer() -> None:
    told = "o = OtherRanks(); o.start(0, 0, (), 'lo')\nwith o.within(0.3): time.sleep(3600)"
    program = f"import time\nfrom elastic.worker.trainer.transformers.ranked import OtherRanks\n{told}"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert "a rank has not done in time what all of them do" in ended.stdout + ended.stderr


@pytest.mark.timeout(3000)
def test_a_rank_that_dies_or_hangs_ends_all_and_nothing_is_lost(start: Start, tmp_path: Path) -> None:
    """Each time a successor goes on from the last checkpoint; in the end the weights are those of a run without. Of six
    trainers each imports everything twice."""

    def last_step(made: RankedProcess) -> dict[str, Tensor]:
        made.ask("train", 1)
        found = weights(made, tmp_path / "weights")
        made.ask("save", str(tmp_path / "00000002.shards"))
        return found

    def nothing_is_half_published() -> None:
        """Whatever can be pulled is as it was published."""
        for relay, trust in relays(tmp_path):
            for version in published_versions(relay):
                assert same_bits(Puller(relay, trust).pull(version), undisturbed)

    made = start(2, beat_s=str(BEAT_S))
    made.ask("train", 0)
    made.ask("save", str(tmp_path / "00000001.shards"))
    undisturbed = last_step(made)
    remove_saved(tmp_path / "00000002.shards")
    made.ask("load", str(tmp_path / "00000001.shards"))
    for what, (function, number) in HELD_UP.items():
        made.ask("signal_when", function, number, 1, str(tmp_path / "struck"))
        with pytest.raises(ConnectionError, match=rf"status {128 + number if number == signal.SIGKILL else 1}:"):
            last_step(made)
        struck_s = float((tmp_path / "struck").read_text())
        longest_s = ENDS_WITHIN_S + (0 if number == signal.SIGKILL else 3 * BEAT_S)
        assert time.time() - struck_s < longest_s, what
        while any(lives(pid) for pid in made.pids):
            assert time.time() - struck_s < longest_s, what
            time.sleep(0.01)
        checkpoint.sweep(tmp_path)
        assert [path.name for path in saved(tmp_path)] == ["00000001.shards"], what
        nothing_is_half_published()
        made = start(2, beat_s=str(BEAT_S))
        assert made.ask("load", str(tmp_path / "00000001.shards")) == 1
    assert same_bits(last_step(made), undisturbed)


LONE = """
import os
import time

if "ELASTIC_OF_FIRST_RANK" not in os.environ:
    raise ValueError("nothing is passed on to this rank")
if os.environ["ELASTIC_OF_FIRST_RANK"] == "waits":
    time.sleep(3600)


def mine(tokens, settings):
    return -tokens.advantages * tokens.logprobs
"""


@pytest.mark.parametrize("first", ["goes on", "waits"])
def test_what_another_rank_refuses_alone_is_told_before_anybody_waits_for_long(
    start: Start, tmp_path: Path, first: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "lone.py").write_text(LONE)
    monkeypatch.setenv("ELASTIC_OF_FIRST_RANK", first)
    with pytest.raises(ConnectionError, match="ended with status 1") as ended:
        start(2, loss=f"{tmp_path}/lone.py:mine")
    words = str(ended.value) + capfd.readouterr().err
    assert "rank 1 refuses what the first one does not" in words
    assert "ValueError: nothing is passed on to this rank" in words


def test_what_fails_on_the_first_rank_alone_is_told_and_ends_the_others(start: Start) -> None:
    """Also where it looks like a line that breaks: they are out of step."""
    made = start(2)
    made.ask("fail_when", "AdamW.step")
    with pytest.raises(RuntimeError, match="OSError: the disk is gone"):
        made.ask("train", 0)
    given_up_s = time.time() + ENDS_WITHIN_S
    while any(lives(pid) for pid in made.pids):
        assert time.time() < given_up_s
        time.sleep(0.01)
    with pytest.raises(RuntimeError, match="the ranks have been ended: OSError: the disk is gone"):
        made.ask("park")
