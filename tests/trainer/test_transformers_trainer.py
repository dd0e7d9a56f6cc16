"""What transformers loads is trained as it is: rows that sequences share, tensors as on disk, odd groups left out."""

import json
import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import save_file

from elastic.config import ConfigError, TrainerConfig
from elastic.engine.model.checkpoint import CheckpointError, load_model
from elastic.protocol.wire import TrainGroupFrame
from elastic.testing.trajectories import PlainTrajectory
from elastic.worker.trainer.base import PolicyTrainer
from elastic.worker.trainer.batches import micro_batches
from elastic.worker.trainer.embedded.trainer import GRPOTrainer
from elastic.worker.trainer.packing import PackedRow, row_of
from tests.trainer.conftest import random_group
from tests.trainer.hugging_face import (
    EXACT,
    FLOAT32_BUFFER,
    MODELS,
    SIZES,
    VOCABULARY,
    change_config,
    read_weights,
    write_glm,
    write_model,
)

transformers = pytest.importorskip("transformers")

from elastic.worker.trainer.transformers import TransformersSettings  # noqa: E402
from elastic.worker.trainer.transformers.examination import examine  # noqa: E402
from elastic.worker.trainer.transformers.model import CausalModel  # noqa: E402
from elastic.worker.trainer.transformers.trainer import TransformersTrainer  # noqa: E402

IN_CI = ("llama", "qwen3_moe", "gpt_oss")
"""The least alike."""
KINDS = [pytest.param(kind, marks=[] if kind in IN_CI else pytest.mark.trainers) for kind in MODELS]
GROUPS = 4
LENGTHS = (7, 19, 1, 12)
PLAIN = {"updates_per_step": 1, "warmup_updates": 0, "mismatch_max": 1e9, "learning_rate": 1e-3}


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Directories of models, made once each."""
    made: dict[str, Path] = {}

    def directory(kind: str) -> Path:
        if kind not in made:
            made[kind] = write_model(tmp_path_factory.mktemp(kind), kind)
        return made[kind]

    return directory


def loaded(directory: Path, checkpointing: bool = True) -> CausalModel:
    return CausalModel(directory, torch.device("cpu"), "auto", checkpointing)


def trainer_of(directory: Path, own: dict[str, object] | None = None, **settings: object) -> TransformersTrainer:
    chosen = TransformersSettings.model_validate(own or {})
    model = CausalModel(directory, torch.device("cpu"), chosen.attention, chosen.activation_checkpointing)
    return TransformersTrainer(TrainerConfig.model_validate(PLAIN | settings), chosen, model, GROUPS, 1.0)


def groups_of(seed: int) -> list[TrainGroupFrame]:
    rng = random.Random(seed)
    return [random_group(index, rng, [1.0, 0.0, 0.0, 1.0]) for index in range(GROUPS)]


def step(made: PolicyTrainer, groups: Sequence[TrainGroupFrame]) -> dict[str, float]:
    for group in groups:
        made.train_group(group)
    return made.update()


def shared_row() -> PackedRow:
    rng = random.Random(0)
    trajectories = [
        PlainTrajectory(
            str(number),
            [rng.randrange(VOCABULARY) for _ in range(length + 1)],
            [0, *[1] * length],
            [-3.0] * (length + 1),
            [0] * (length + 1),
        ).packed()
        for number, length in enumerate(LENGTHS)
    ]
    return row_of(list(micro_batches(trajectories, [0.0] * len(LENGTHS), 10**6)))


@pytest.mark.parametrize("kind", KINDS)
def test_a_shared_row_is_a_plain_forward_a_sequence(stored, kind: str) -> None:
    """In log-probabilities and in gradients, by transformers' own model."""
    row, made = shared_row(), loaded(stored(kind))
    assert made.packs
    found = made.distribution(row, 1.0)
    parameters = made.named_parameters()
    gradients = torch.autograd.grad(found.logprobs.sum(), list(parameters.values()), allow_unused=True)

    plain = transformers.AutoModelForCausalLM.from_pretrained(
        stored(kind), dtype=torch.float32, attn_implementation="eager"
    )
    expected = [
        plain(ids[None]).logits[0, :-1].log_softmax(-1).gather(-1, ids[1:, None]).squeeze(-1)
        for ids in row.token_ids.split(row.sequences)
    ]
    torch.testing.assert_close(found.logprobs, torch.cat(expected), atol=2e-5, rtol=1e-5)
    references = torch.autograd.grad(torch.cat(expected).sum(), list(plain.parameters()), allow_unused=True)
    for (name, gradient), reference in zip(zip(parameters, gradients, strict=True), references, strict=True):
        if reference is None or gradient is None:
            assert reference is None or not reference.any(), name
        else:
            torch.testing.assert_close(gradient, reference, atol=2e-4, rtol=1e-3, msg=name)


@pytest.mark.trainers
@pytest.mark.parametrize(
    ("kind", "chances"),
    [
        ("starcoder2", {"residual_dropout": 0.3, "embedding_dropout": 0.3, "attention_dropout": 0.3}),
        ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "router_jitter_noise": 0.3}),
    ],
)
def test_nothing_is_left_to_chance(tmp_path: Path, kind: str, chances: dict[str, object]) -> None:
    """What a model drops, or jitters, as it trains is none of the policy that is sampled from."""
    config = transformers.AutoConfig.for_model(kind, **SIZES, **chances)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    row, made = shared_row(), loaded(tmp_path)
    with torch.no_grad():
        found = made.distribution(row, 1.0).logprobs
        assert torch.equal(found, made.distribution(row, 1.0).logprobs)
        made.model.eval()
        torch.testing.assert_close(found, made.distribution(row, 1.0).logprobs)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_published_are_the_tensors_on_disk(stored, kind: str) -> None:
    """Before any step they are the same, bit for bit, also where transformers fuses them as it loads."""
    published, on_disk = trainer_of(stored(kind)).tensors(), read_weights(stored(kind))
    if MODELS[kind].get("tie_word_embeddings"):
        on_disk.pop("lm_head.weight", None)
    assert published.keys() == on_disk.keys()
    for name, tensor in published.items():
        assert torch.equal(tensor, on_disk[name]), name


@pytest.mark.trainers
def test_buffers_and_float32_tensors_are_published_as_they_are_on_disk(tmp_path: Path) -> None:
    """GLM's routers have biases that are persistent buffers in float32, and no parameters; all else is bfloat16."""
    made, on_disk = trainer_of(write_glm(tmp_path)), read_weights(tmp_path)
    published = made.tensors()
    assert published.keys() == on_disk.keys()
    for name, tensor in published.items():
        assert tensor.dtype is (torch.float32 if name == FLOAT32_BUFFER else torch.bfloat16)
        assert torch.equal(tensor, on_disk[name]), name
    step(made, groups_of(0))
    assert torch.equal(made.tensors()[FLOAT32_BUFFER], torch.tensor(EXACT))
    assert not torch.equal(made.tensors()["lm_head.weight"], on_disk["lm_head.weight"])


def test_an_attention_that_a_model_does_not_have_is_named(stored) -> None:
    for wanted in ("sdpa", "flash_attention_2"):
        with pytest.raises(ValueError, match=rf"trainer\.transformers\.attention: found '{wanted}'.*allowed: 'auto'"):
            CausalModel(stored("gpt_oss"), torch.device("cpu"), wanted, activation_checkpointing=False)


def test_a_step_is_the_embedded_trainers(tmp_path: Path) -> None:
    directory = write_model(tmp_path / "qwen3", "qwen3")
    settings = TrainerConfig.model_validate(PLAIN | {"learning_rate": 1e-2, "adam_epsilon": 1e-4})
    embedded = GRPOTrainer(settings, load_model(directory), GROUPS, 1.0)
    ours = trainer_of(directory, micro_batch_tokens=60, learning_rate=1e-2, adam_epsilon=1e-4)
    for seed in range(2):
        expected, found = step(embedded, groups_of(seed)), step(ours, groups_of(seed))
        assert found == pytest.approx(expected, rel=2e-3, abs=1e-4)
    for name, tensor in embedded.tensors().items():
        torch.testing.assert_close(ours.tensors()[name], tensor, atol=2e-2, rtol=2e-2, msg=name)


@pytest.mark.parametrize(
    "keys",
    [
        pytest.param({"loss": "gspo", "loss_agg_mode": "seq-mean-token-mean"}, marks=pytest.mark.trainers),
        {"bypass_mode": False, "rollout_is": "sequence", "updates_per_step": 2, "kl_coefficient": 0.1},
        pytest.param(
            {"loss": "distillation", "reference": "teacher", "entropy_coefficient": 0.01}, marks=pytest.mark.trainers
        ),
    ],
    ids=["gspo", "corrected", "distilled"],
)
def test_every_loss_is_the_embedded_trainers(tmp_path: Path, keys: dict[str, object]) -> None:
    """With the same weights kept from the step's beginning, and the same reference."""
    directory, teacher = write_model(tmp_path / "qwen3", "qwen3"), write_model(tmp_path / "teacher", "qwen3", seed=5)
    settings = TrainerConfig.model_validate(PLAIN | {"learning_rate": 1e-2, "adam_epsilon": 1e-4} | keys)
    embedded = GRPOTrainer(settings, load_model(directory), GROUPS, 1.0, reference=load_model(teacher))
    chosen = TransformersSettings.model_validate({})
    settings = settings.model_copy(update={"micro_batch_tokens": 60})
    ours = TransformersTrainer(settings, chosen, loaded(directory), GROUPS, 1.0, reference=loaded(teacher))
    for seed in range(2):
        expected, found = step(embedded, groups_of(seed)), step(ours, groups_of(seed))
        assert found == pytest.approx(expected, rel=5e-3, abs=1e-4)
    for name, tensor in embedded.tensors().items():
        torch.testing.assert_close(ours.tensors()[name], tensor, atol=2e-2, rtol=2e-2, msg=name)


def test_how_rows_are_filled_changes_no_gradient(stored) -> None:
    metrics = [step(trainer_of(stored("llama"), micro_batch_tokens=tokens), groups_of(3)) for tokens in (1, 45, 10_000)]
    assert metrics[1] == pytest.approx(metrics[0], rel=1e-4)
    assert metrics[2] == pytest.approx(metrics[0], rel=1e-4)


@pytest.mark.parametrize(("order", "bypass_mode"), [("launch", True), ("launch", False), ("arrival", True)])
def test_the_order_of_arrival_changes_no_bit_where_launches_count(stored, order: str, bypass_mode: bool) -> None:
    def train(places: Sequence[int]) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
        made = trainer_of(
            stored("llama"), {"order": order}, micro_batch_tokens=60, updates_per_step=2, bypass_mode=bypass_mode
        )
        groups = groups_of(6)
        for place in places:
            if place == 1:
                made.skip_group(1, 5)
            else:
                made.train_group(groups[place])
        return made.update(), made.tensors()

    (metrics, weights), (others, other_weights) = train([0, 1, 2, 3]), train([3, 2, 1, 0])
    assert metrics == (others if order == "launch" else pytest.approx(others, rel=1e-4))
    if order == "launch":
        assert all(torch.equal(tensor, other_weights[name]) for name, tensor in weights.items())


@pytest.mark.parametrize("micro_batch_tokens", [1, 60, 10_000])
def test_an_odd_group_is_left_out_whole_and_named(stored, micro_batch_tokens: int) -> None:
    """Also where a row that it shared, or an earlier one, was trained before that was seen."""
    good = groups_of(4)
    spoilt = PlainTrajectory.of(good[2].trajectories[-1])
    spoilt.logprobs = [math.nan] * len(spoilt.logprobs)
    bad = replace(good[2], trajectories=[*good[2].trajectories[:-1], spoilt.packed()])
    with_bad, without = (trainer_of(stored("llama"), micro_batch_tokens=micro_batch_tokens) for _ in range(2))
    found = step(with_bad, [*good[:2], bad, good[3]])
    assert dict(with_bad.unusable) == {"g2": "its gradient is not finite"}
    for group in (*good[:2], good[3]):
        without.train_group(group)
    without.skip_group(2)
    assert found == pytest.approx(without.update() | {"groups_unusable": 1.0}, rel=1e-4)
    assert all(tensor.isfinite().all() for tensor in with_bad.tensors().values())
    for name, tensor in without.tensors().items():
        torch.testing.assert_close(with_bad.tensors()[name], tensor, atol=1e-2, rtol=1e-2, msg=name)


def test_a_group_of_nothing_but_odd_tokens_leaves_no_gradient(stored) -> None:
    made = trainer_of(stored("llama"))
    before = made.tensors()
    odd = [
        replace(group, trajectories=[
            replace(one, sampled=replace(one.sampled, logprobs=bytearray(b"\0\0\xc0\x7f" * one.sampled.tokens)))
            for one in group.trajectories
        ])
        for group in groups_of(5)
    ]  # fmt: skip
    assert step(made, odd)["updates"] == 0
    assert all(torch.equal(tensor, before[name]) for name, tensor in made.tensors().items())


def test_bfloat16_keeps_float32_masters(stored) -> None:
    """Steps too small for bfloat16's weights add up all the same."""
    made = trainer_of(stored("llama"), {"dtype": "bfloat16"}, learning_rate=1e-6, adam_epsilon=1e-12)
    before = made.tensors()
    for seed in range(3):
        step(made, groups_of(seed))
    made.save(stored("llama").parent / "small-steps.safetensors")
    weights = read_weights(stored("llama"))
    from safetensors.torch import load_file

    state = load_file(stored("llama").parent / "small-steps.safetensors")
    moved = [not torch.equal(state[f"master.{name}"], tensor.float()) for name, tensor in weights.items()]
    assert all(moved)
    still = [torch.equal(tensor, before[name]) for name, tensor in made.tensors().items()]
    assert any(still)


class TestPoliciesThatCannotBeTrained:
    def refused(self, directory: Path, *words: str) -> None:
        with pytest.raises(ConfigError) as caught:
            examine(directory, TransformersSettings.model_validate({}))
        for word in ("model.checkpoint", str(directory), *words):
            assert word in str(caught.value)
        assert "Traceback" not in str(caught.value)

    def test_by_their_headers(self, tmp_path: Path) -> None:
        directory = write_model(tmp_path / "llama", "llama")
        change_config(directory, quantization_config={"quant_method": "gptq"})
        self.refused(directory, "quantised weights", "gptq")
        change_config(directory, quantization_config=None)
        (directory / "model.safetensors").unlink()
        self.refused(directory, "model.safetensors")
        index = {"weight_map": {"lm_head.weight": "model-00001-of-00002.safetensors"}}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index))
        self.refused(directory, "model-00001-of-00002.safetensors")

    def test_by_whatever_ends_who_looks_at_them(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """After something was printed, which is no answer."""
        directory = write_model(tmp_path / "llama", "llama")
        (tmp_path / "sitecustomize.py").write_text("import os\nprint('loading', flush=True)\nos._exit(9)\n")
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        self.refused(directory, "did not get through with it (exit status 9)")

    @pytest.mark.trainers
    def test_by_what_they_say(self, tmp_path: Path) -> None:
        """Not by their headers: as they are loaded."""
        for kind, spoil, words in (
            ("llama", lambda name, tensor: tensor * math.nan if "norm" in name else tensor, "are no numbers"),
            ("bert", lambda name, tensor: tensor, "tokens see those behind them"),
        ):
            directory = tmp_path / kind
            config = transformers.AutoConfig.for_model(kind, **MODELS["llama"])
            transformers.AutoModelForCausalLM.from_config(config).save_pretrained(directory)
            spoilt = {name: spoil(name, tensor) for name, tensor in read_weights(directory).items()}
            save_file(spoilt, directory / "model.safetensors", metadata={"format": "pt"})
            with pytest.raises(CheckpointError, match=words):
                CausalModel(directory, torch.device("cpu"), "auto", False)

    @pytest.mark.trainers
    def test_by_their_model(self, tmp_path: Path) -> None:
        directory = write_model(tmp_path / "llama", "llama")
        assert examine(directory, TransformersSettings.model_validate({})).vocab_size == VOCABULARY
        change_config(directory, intermediate_size=50)
        self.refused(directory, "does not fit the model", "mlp", "expected shape")
        change_config(directory, model_type="nonesuch", architectures=["Nonesuch"])
        self.refused(directory, "model_type", "'nonesuch'")
