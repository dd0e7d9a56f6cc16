import dataclasses
import json
import math
import pickle
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from elastic.config import TrainerConfig
from elastic.engine.model.checkpoint import CheckpointError
from elastic.protocol.sampled import pack_ids
from elastic.protocol.wire import TrainGroupFrame, TrajectoryData
from elastic.testing.trainers import step_of
from elastic.testing.trajectories import PlainTrajectory
from elastic.worker.trainer import checkpoint
from elastic.worker.trainer.base import remove_saved
from elastic.worker.trainer.checkpoint_shards import METADATA_FILE, StoredDirectory, save_whole
from elastic.worker.trainer.embedded.trainer import GRPOTrainer
from elastic.worker.trainer.ranks import ALONE
from elastic.worker.trainer.soundness import damage
from tests.seeds import examples
from tests.small_files import small_files

GROUPS = 6

few = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=examples(4, 10))


def state_of(trainer: GRPOTrainer, path: Path) -> dict[str, torch.Tensor]:
    trainer.save(path)
    return load_file(path)


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def step(trainer: GRPOTrainer, groups: list[TrainGroupFrame]) -> dict[str, float]:
    for group in groups:
        trainer.train_group(group)
    return trainer.update()


def groups_of(make, seed: int, count: int = GROUPS) -> list[TrainGroupFrame]:
    rng = random.Random(seed)
    return [make(index, rng, [1.0, 0.0, 0.0, 1.0]) for index in range(count)]


@few
@given(
    seed=st.integers(0, 2**31),
    order=st.permutations(range(GROUPS)),
    skipped=st.sets(st.integers(0, GROUPS - 1)),
    updates=st.sampled_from([1, 2, 4]),
    corrected=st.sampled_from([{}, {"bypass_mode": False, "rollout_is": "token", "loss": "gspo"}]),
)
def test_the_order_of_arrival_changes_no_bit(
    trainer,
    group,
    tmp_path_factory,
    seed: int,
    order: list[int],
    skipped: set[int],
    updates: int,
    corrected: dict[str, object],
):
    """Whole steps are trained in several orders, and compared bit for bit."""
    directory = tmp_path_factory.mktemp("order")

    def train(arrivals: list[int]) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
        made = trainer(GROUPS, updates_per_step=updates, **corrected)
        for index in arrivals:
            if index in skipped:
                made.skip_group(index)
            else:
                made.train_group(groups[index])
        metrics = made.update()
        return state_of(made, directory / "state"), metrics

    groups = groups_of(group, seed)
    (state, metrics), (other_state, other_metrics) = train(list(range(GROUPS))), train(order)
    assert metrics == other_metrics
    assert equal(state, other_state)


CORRECTED = {"bypass_mode": False, "warmup_updates": 0, "learning_rate": 1e-2, "mismatch_max": 1e9}


def test_ratios_of_a_later_mini_batch_are_to_the_weights_at_the_steps_beginning(trainer, group):
    """And engines are compared with these, however many updates the step has made."""
    groups = groups_of(group, 3)
    one, two, bypassed = (
        step(trainer(GROUPS, **(CORRECTED | keys)), groups)
        for keys in ({"updates_per_step": 1}, {"updates_per_step": 2}, {"updates_per_step": 2, "bypass_mode": True})
    )
    assert one["ratio_mean"] == one["ratio_max"] == 1.0
    assert 1.0 != two["ratio_mean"] == pytest.approx(1.0, abs=0.3)
    assert two["log_ratio_mean"] == one["log_ratio_mean"] != bypassed["log_ratio_mean"]


@pytest.mark.parametrize("keys", [{}, {"loss": "distillation", "reference": "teacher"}], ids=str)
def test_a_park_within_a_step_changes_no_bit_of_kept_weights_or_the_reference(trainer, model, group, keys):
    def train(parks: bool) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
        settings = CORRECTED | {"updates_per_step": 2, "kl_coefficient": 0.1} | keys
        made = trainer(2, frozen=model(7), **settings)
        for each in groups_of(group, 4, 2):
            made.train_group(each)
            if parks:
                made.park()
                with torch.no_grad():
                    for tensor in (*made.model.parameters(), *made.reference.parameters()):
                        tensor.fill_(113)
                made.resume()
        return made.update(), made.tensors()

    (metrics, tensors), (parked_metrics, parked_tensors) = train(parks=False), train(parks=True)
    assert metrics == parked_metrics
    assert metrics["kl"] > 0
    assert equal(tensors, parked_tensors)


def test_a_reference_that_is_the_policy_itself_holds_nothing_back_at_first_and_then_does(trainer, model, group):
    free, held = trainer(GROUPS, **CORRECTED), trainer(GROUPS, frozen=model(), kl_coefficient=5.0, **CORRECTED)
    apart: list[float] = []
    for seed in range(3):
        groups = groups_of(group, seed)
        free_metrics, held_metrics = step(free, groups), step(held, groups)
        assert "kl" not in free_metrics
        if not seed:
            assert held_metrics["kl"] == pytest.approx(0.0, abs=1e-2)
        apart.append(held_metrics["kl"])
    assert apart[-1] > 0
    start = model().state_dict()

    def moved(made: GRPOTrainer) -> float:
        return math.fsum((one - start[name]).norm().item() for name, one in made.model.state_dict().items())

    assert moved(held) < moved(free)


def test_groups_of_equal_rewards_are_trained_on_where_rewards_are_not_all(trainer, model, group):
    rng = random.Random(0)
    equal_rewards = [group(0, rng, [1.0] * 4)]
    alone = CORRECTED | {"updates_per_step": 1}
    assert step(trainer(1, **alone), equal_rewards)["updates"] == 0
    distilled = {"loss": "distillation", "reference": "teacher"}
    for keys in ({"kl_coefficient": 0.1}, {"entropy_coefficient": 0.1}, distilled):
        assert step(trainer(1, frozen=model(3), **alone, **keys), equal_rewards)["updates"] == 1


def test_figures_tell_one_bad_source_from_the_others(trainer):
    """By provider, with the engine that it has."""
    rng = random.Random(1)
    groups = step_of(0)
    for each in groups:
        for one in each.trajectories:
            tokens = dict(one.sampled.origins)
            logprobs = np.frombuffer(one.sampled.logprobs, np.float32)
            logprobs = np.array(logprobs)
            logprobs[tokens.get("reserved-1/w", 0) :] = -15.0 - rng.random()
            one.sampled.logprobs[:] = logprobs.astype(np.float32).tobytes()
    made = trainer(
        len(groups), mismatch_max=1e9, bypass_mode=False, rollout_is="token", rollout_is_threshold="0.5_20000"
    )
    metrics = step(made, groups)
    good, bad = "reserved", "spot"
    assert metrics[f"tokens_seen/{good}"] + metrics[f"tokens_seen/{bad}"] == metrics["tokens_seen"] == metrics["tokens"]
    assert metrics[f"log_ratio_mean/{good}"] < 2 < 8 < metrics[f"log_ratio_mean/{bad}"]
    assert metrics[f"log_ratio_max/{bad}"] == metrics["log_ratio_max"] > 10
    assert metrics[f"mismatch_kl/{bad}"] == pytest.approx(10.0), "each token's estimate is bounded"
    assert metrics[f"masked_fraction/{good}"] < 0.7 < metrics[f"masked_fraction/{bad}"] <= 1
    names = {name.partition("/")[0] for name in metrics if name.endswith(f"/{bad}")}
    assert names == {
        "tokens_seen", "log_ratio_mean", "log_ratio_max", "mismatch_kl", "masked_fraction", "clip_fraction",
    }  # fmt: skip


undisturbed: dict[tuple[int, int], list[dict[str, torch.Tensor]]] = {}
"""What training without parks comes to, by seed and updates."""


@few
@given(
    seed=st.integers(0, 2),
    parks=st.lists(st.booleans(), min_size=2 * (GROUPS + 1), max_size=2 * (GROUPS + 1)),
    updates=st.sampled_from([1, 2]),
)
def test_parks_change_no_bit(trainer, group, tmp_path_factory, seed: int, parks: list[bool], updates: int):
    """Others use the arena between any two orders; what is saved while it is parked is the same, too."""
    directory = tmp_path_factory.mktemp("parked")

    def train(parks: list[bool]) -> list[dict[str, torch.Tensor]]:
        made, coming, states = trainer(GROUPS, updates_per_step=updates, warmup_updates=0), iter(parks), []
        for step in range(2):
            for each in groups_of(group, seed + step):
                make_way(made, next(coming))
                made.train_group(each)
            make_way(made, next(coming))
            made.update()
            make_way(made, parked := parks[step], stay=True)
            states += [state_of(made, directory / "state")]
            made.resume()
            assert made.metrics["gradient_norm"] > 0 or not parked
        return states

    if (seed, updates) not in undisturbed:
        undisturbed[seed, updates] = train([False] * len(parks))
    for state, expected in zip(train(parks), undisturbed[seed, updates], strict=True):
        assert equal(state, expected)


def make_way(trainer: GRPOTrainer, parks: bool, stay: bool = False) -> None:
    if not parks:
        return
    state = [*trainer.model.parameters(), *trainer.optimizer.exp_avg, *trainer.optimizer.exp_avg_sq]
    size_bytes = trainer.park().state_bytes
    assert size_bytes >= sum(tensor.nbytes for tensor in state)
    with torch.no_grad():
        for tensor in (*state, *trainer.accumulator.sums):
            tensor.fill_(113)
    if not stay:
        assert trainer.resume().state_bytes == size_bytes


def test_a_later_mini_batch_is_trained_on_the_earlier_ones_weights(trainer, group):
    groups = groups_of(group, 1, 4)
    together = trainer(4, updates_per_step=2, warmup_updates=0, learning_rate=1e-2)
    assert step(together, groups[::-1])["updates"] == 2
    apart = trainer(2, updates_per_step=1, warmup_updates=0, learning_rate=1e-2)
    for pair in (groups[:2], groups[2:]):
        step(apart, [TrainGroupFrame(g.step, g.group, index, g.trajectories) for index, g in enumerate(pair)])
    assert equal(together.tensors(), apart.tensors())


@pytest.mark.parametrize(
    "loss", [{}, {"loss": "gspo", "loss_agg_mode": "seq-mean-token-mean"}, {"loss": "cispo"}], ids=str
)
def test_micro_batches_do_not_change_the_gradient(trainer, group, loss: dict[str, str]):
    groups = groups_of(group, 2)
    norms = [
        step(trainer(GROUPS, micro_batch_tokens=tokens, updates_per_step=1, **loss), groups)["gradient_norm"]
        for tokens in (1, 60, 10_000)
    ]
    assert norms == pytest.approx([norms[0]] * 3, rel=1e-5)


def test_the_step_is_adamws_on_the_token_mean(trainer, group, model):
    """Against the textbook: one batch, float64 arithmetic from the definition, torch's own AdamW."""
    groups = groups_of(group, 3, 2)
    made = trainer(2, updates_per_step=1, warmup_updates=0, learning_rate=1e-3, gradient_clip=1e9, adam_epsilon=1e-4)
    metrics = step(made, groups)
    reference = model(0).double()
    terms = []
    for trajectory in (PlainTrajectory.of(t) for g in groups for t in g.trajectories):
        advantage = (trajectory.reward - 0.5) / (torch.tensor([1.0, 0.0, 0.0, 1.0]).std().item() + 1e-6)
        logits = reference(torch.tensor([trajectory.token_ids]))[0]
        for at, mine in enumerate(trajectory.trained):
            if mine:
                logprob = logits[at - 1].log_softmax(-1)[trajectory.token_ids[at]]
                ratio = (logprob - trajectory.logprobs[at]).exp()
                pessimistic = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)
                terms.append(-(pessimistic if advantage > 0 else pessimistic.clamp(min=3 * advantage)))
    loss = torch.stack(terms).mean()
    optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-3, betas=(0.9, 0.99), eps=1e-4, weight_decay=0.0)
    loss.backward()
    optimizer.step()
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-4)
    assert metrics["tokens"] == len(terms)
    for (name, expected), found in zip(reference.named_parameters(), made.model.parameters(), strict=True):
        torch.testing.assert_close(found.double(), expected, rtol=0, atol=2e-6, msg=name)


def test_groups_without_variance_contribute_nothing(trainer, group):
    rng = random.Random(5)
    even = [group(index, rng, [1.0] * 4) for index in range(GROUPS)]
    made = trainer(GROUPS)
    before = made.tensors()
    metrics = step(made, even)
    assert equal(before, made.tensors())
    assert (metrics["updates"], metrics["tokens"], metrics["reward_mean"]) == (0, 0, 1.0)
    assert (made.version, made.updates) == (1, 0)


def test_temperature_is_that_of_sampling(trainer, group, model):
    groups = groups_of(group, 7, 1)
    reference = model(0)
    for number, data in enumerate(groups[0].trajectories):
        trajectory = PlainTrajectory.of(data)
        with torch.no_grad():
            now = (reference(torch.tensor([trajectory.token_ids]))[0] / 0.7).log_softmax(-1)
        for at, mine in enumerate(trajectory.trained):
            trajectory.logprobs[at] = mine * now[at - 1, trajectory.token_ids[at]].item()
        groups[0].trajectories[number] = trajectory.packed()
    metrics = step(trainer(1, temperature=0.7, updates_per_step=1), groups)
    assert metrics["ratio_mean"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["clip_fraction"] == 0
    assert step(trainer(1, temperature=1.0, updates_per_step=1), groups)["ratio_max"] > 1.001


def test_gradients_are_clipped_and_the_learning_rate_rises(trainer, group):
    made = trainer(1, updates_per_step=1, warmup_updates=4, learning_rate=1e-3)
    rates = [step(made, groups_of(group, seed, 1))["learning_rate"] for seed in range(6)]
    assert rates == pytest.approx([0.25e-3, 0.5e-3, 0.75e-3, 1e-3, 1e-3, 1e-3])
    start = trainer().tensors()
    clipped, free = (trainer(1, updates_per_step=1, gradient_clip=clip, adam_epsilon=1.0) for clip in (1e-9, 1e9))
    norms = [step(one, groups_of(group, 8, 1))["gradient_norm"] for one in (clipped, free)]
    assert norms[0] == norms[1] > 1e-3
    assert equal(start, clipped.tensors())
    assert not equal(start, free.tensors())


def test_a_step_waits_for_all_its_groups(trainer, group):
    made = trainer(4, updates_per_step=2)
    one, two, *_ = groups_of(group, 9, 4)
    made.train_group(one)
    with pytest.raises(ValueError, match=r"neither trained nor skipped: 1, 2, 3"):
        made.update()
    for again in (lambda: made.train_group(one), lambda: made.skip_group(0)):
        with pytest.raises(ValueError, match="group 0: already"):
            again()
    for index in (4, -1):
        with pytest.raises(ValueError, match="groups 0 to 3"):
            made.skip_group(index)
    made.train_group(two)
    made.skip_group(2)
    made.skip_group(3)
    assert made.update()["groups"] == 2
    assert made.version == 1


def changed(data: TrajectoryData, **fields: object) -> TrajectoryData:
    return dataclasses.replace(PlainTrajectory.of(data), **fields).packed()


def oddly(data: TrajectoryData, **fields: object) -> TrajectoryData:
    """With other columns than fit."""
    return replace(data, sampled=replace(data.sampled, **fields))


DAMAGE: dict[str, Callable[[TrajectoryData], TrajectoryData]] = {
    "differ in length": lambda t: oddly(t, logprobs=t.sampled.logprobs[:-4]),
    "logprobs and versions differ": lambda t: oddly(t, versions=[(0, 1), *t.sampled.versions]),
    "spans, logprobs": lambda t: oddly(t, spans=[(10**6, t.sampled.tokens)]),
    "one after the other": lambda t: oddly(t, spans=[(5, t.sampled.tokens - 1), (2, 1)]),
    "origins are not": lambda t: oddly(t, origins=[("w", t.sampled.tokens + 1)]),
    "needs a prompt": lambda t: changed(t, trained=[1] * (len(t.token_ids) // 4)),
    "at least one token of the policy": lambda t: changed(t, trained=[0] * (len(t.token_ids) // 4)),
    "token 32 is not in the vocabulary of 32": lambda t: replace(t, token_ids=pack_ids([32]) + t.token_ids[4:]),
    "token -1 is not in the vocabulary of 32": lambda t: replace(t, token_ids=t.token_ids[:-4] + pack_ids([-1])),
    "magnitude nan": lambda t: changed(t, logprobs=[math.nan] * (len(t.token_ids) // 4)),
    "its reward is inf": lambda t: changed(t, reward=math.inf),
    "rewards from": lambda t: changed(t, reward=-1.7e308 if t.sampled.reward else 1.7e308),
}


FOUND_LATE = ("magnitude nan",)
"""Trajectories of the group before it have their gradients by then."""
skipped: dict[tuple[int, int], tuple[dict[str, float], dict[str, torch.Tensor]]] = {}
"""What training without the group comes to, by updates and tokens of a micro-batch."""


@pytest.mark.parametrize(
    ("problem", "updates", "micro_batch_tokens"),
    [
        pytest.param(problem, *each, marks=[] if problem in FOUND_LATE or each == (1, 1) else pytest.mark.nightly)
        for problem in DAMAGE
        for each in ((1, 1), (3, 10_000), *(((1, 10_000), (3, 1)) if problem in FOUND_LATE else ()))
    ],
)
def test_a_group_of_no_use_is_left_out_whole_and_named(
    trainer, group, problem: str, updates: int, micro_batch_tokens: int
):
    """As if it had been skipped, however far its gradient had come."""
    good = groups_of(group, 10, 4)
    bad = replace(good[2], trajectories=[DAMAGE[problem](t) for t in good[2].trajectories])
    if problem == "magnitude nan":
        bad = replace(bad, trajectories=[*good[2].trajectories[:-1], bad.trajectories[-1]])
    if (updates, micro_batch_tokens) not in skipped:
        without = trainer(4, updates_per_step=updates, micro_batch_tokens=micro_batch_tokens)
        for one in (*good[:2], good[3]):
            without.train_group(one)
        without.skip_group(2)
        skipped[updates, micro_batch_tokens] = without.update(), without.tensors()
    expected, tensors = skipped[updates, micro_batch_tokens]
    with_bad = trainer(4, updates_per_step=updates, micro_batch_tokens=micro_batch_tokens)
    metrics = step(with_bad, [*good[:2], bad, good[3]])
    assert list(with_bad.unusable) == ["g2"]
    assert problem in with_bad.unusable["g2"]
    assert metrics == expected | {"groups_unusable": 1.0}
    assert equal(with_bad.tensors(), tensors)
    step(with_bad, good)
    assert with_bad.unusable == {}


def test_a_group_without_trajectories_is_of_no_use(trainer):
    made = trainer(1, updates_per_step=1)
    assert step(made, [TrainGroupFrame(0, "g0", 0, [])])["groups_unusable"] == 1
    assert made.unusable == {"g0": "has no trajectories"}


@few
@given(
    seed=st.integers(0, 2**31),
    wild=st.lists(
        st.one_of(st.floats(-1e3, 1e3), st.floats(), st.sampled_from([-10.0, -12.0, -1e30])), min_size=1, max_size=20
    ),
    rewards=st.lists(st.floats(), min_size=2, max_size=4),
    age=st.integers(0, 3),
)
def test_no_log_probability_and_no_reward_ends_a_step(
    trainer, group, seed: int, wild: list[float], rewards: list[float], age: int
):
    rng = random.Random(seed)
    odd = group(0, rng, rewards)
    for number, data in enumerate(odd.trajectories):
        trajectory = PlainTrajectory.of(data)
        for at, mine in enumerate(trajectory.trained):
            trajectory.versions[at] = -age
            if mine and rng.random() < 0.5:
                trajectory.logprobs[at] = rng.choice(wild)
        odd.trajectories[number] = trajectory.packed()
    made = trainer(2, updates_per_step=1)
    metrics = step(made, [odd, group(1, rng, [1.0, 0.0])])
    assert all(map(math.isfinite, metrics.values()))
    assert all(tensor.isfinite().all() for tensor in made.tensors().values())


def test_one_outlier_does_not_drown_the_rest(trainer, group):
    """One token in a group that was sampled with far less than its probability, and has a negative advantage."""

    def norm(log_ratio: float) -> float:
        only = groups_of(group, 11, 1)[0]
        outlier = PlainTrajectory.of(only.trajectories[1])
        outlier.logprobs[-1] -= log_ratio
        only.trajectories[1] = outlier.packed()
        return step(trainer(1, updates_per_step=1), [only])["gradient_norm"]

    assert [norm(log_ratio) for log_ratio in (10.0, 12.0, 1e3)] == pytest.approx([norm(0.0)] * 3, rel=0.5)


def test_groups_without_signal_count_in_the_mean(trainer, group):
    """Trained as a group or skipped with as many tokens: a quarter of the groups with signal, a quarter of the step."""
    rng = random.Random(12)
    signal = group(0, rng, [1.0, 0.0])
    even = [replace(signal, group=f"g{i}", index=i, trajectories=[changed(t, reward=1.0) for t in signal.trajectories])
            for i in range(1, 4)]  # fmt: skip
    tokens = sum(t.sampled.tokens for t in signal.trajectories)

    def norm(groups: int, skipped: Sequence[int] = ()) -> float:
        made = trainer(groups, updates_per_step=1)
        made.train_group(signal)
        for one in even[: groups - 1]:
            if one.index in skipped:
                made.skip_group(one.index, tokens)
            else:
                made.train_group(one)
        return made.update()["gradient_norm"]

    assert norm(4) == norm(4, skipped=(1, 3)) == norm(4, skipped=(1, 2, 3)) == pytest.approx(norm(1) / 4)


def test_more_updates_than_groups_are_refused(trainer):
    with pytest.raises(ValueError, match="updates_per_step"):
        trainer(2, updates_per_step=3)


def test_a_resumed_trainer_goes_on_bit_for_bit(trainer, group, tmp_path: Path):
    through, stopped = trainer(), trainer()
    for made in (through, stopped):
        for seed in (20, 21):
            step(made, groups_of(group, seed))
    stopped.save(tmp_path / "deep" / "trainer.safetensors")
    resumed = trainer(seed=1)
    resumed.load(tmp_path / "deep" / "trainer.safetensors")
    assert (resumed.version, resumed.updates) == (2, 4)
    for made in (through, resumed):
        step(made, groups_of(group, 22))
    assert equal(state_of(through, tmp_path / "a"), state_of(resumed, tmp_path / "b"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "deep"]


def test_a_checkpoint_is_taken_between_steps(trainer, tmp_path: Path):
    made = trainer()
    made.save(tmp_path / "state")
    made.skip_group(0)
    for action in (made.save, made.load):
        with pytest.raises(ValueError, match="a step is under way"):
            action(tmp_path / "state")


def test_a_checkpoint_that_does_not_fit_is_named_and_changes_nothing(trainer, tmp_path: Path):
    made = trainer()
    path = tmp_path / "state"
    good = state_of(made, path)
    before = made.tensors()
    missing, reshaped = dict(good), dict(good)
    del missing["exp_avg.model.norm.weight"]
    reshaped["master.model.norm.weight"] = torch.ones(3)
    header = {"elastic_trainer": '{"version":1,"updates":1,"schema_version":2}'}
    newer = {"elastic_trainer": '{"version":1,"updates":1,"schema_version":9}'}
    for tensors, metadata, problem in [
        (missing, header, "exp_avg.model.norm.weight: missing"),
        ({**good, "odd": torch.ones(1)}, header, "odd: not a parameter of this model"),
        (reshaped, header, r"master.model.norm.weight: expected shape .*, found \[3\]"),
        (good, newer, "schema version 9"),
        (good, None, "not a trainer's checkpoint"),
        (good, header, "damaged: it has no digests"),
    ]:
        save_file(tensors, path, metadata=metadata)
        with pytest.raises(CheckpointError, match=problem) as caught:
            made.load(path)
        assert str(path) in str(caught.value)
    path.write_bytes(path.read_bytes()[:-7])
    for unreadable in (path, tmp_path / "missing"):
        with pytest.raises(CheckpointError, match="cannot be read"):
            made.load(unreadable)
    assert equal(before, made.tensors())
    assert made.version == 0


class Touch(NamedTuple):
    """Whoever unpickles it makes a file."""

    path: Path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_a_checkpoint_of_another_machine_runs_no_code_and_names_no_file_elsewhere(tmp_path: Path):
    directory, elsewhere = tmp_path / "00000001.shards", tmp_path / "elsewhere"
    directory.mkdir()
    save_whole(directory, {"one": torch.ones(2)})
    good = FileSystemReader(directory).read_metadata()

    def opened(metadata: object) -> StoredDirectory:
        place = directory / METADATA_FILE
        place.write_bytes(pickle.dumps(metadata))
        header = {checkpoint.DIGESTS_KEY: json.dumps({METADATA_FILE: checkpoint.digest_of(place)})}
        (directory / checkpoint.HEADER_FILE).write_text(json.dumps(header))
        return StoredDirectory(directory)

    assert torch.equal(opened(good).load(["one"], ALONE)["one"], torch.ones(2))
    for its in (Touch(elsewhere), dataclasses.replace(good, planner_data=Touch(elsewhere)), BytesStorageMetadata(), 1):
        with pytest.raises(CheckpointError, match=r"damaged: \.metadata cannot be read"):
            opened(its)
    assert not elsewhere.exists()
    (directory / "__0_0.distcp").rename(elsewhere)
    for path in ("../elsewhere", str(elsewhere)):
        for one in good.storage_data.values():
            one.relative_path = path
        with pytest.raises(CheckpointError, match="damaged: elsewhere is not as it was written"):
            opened(good)


@pytest.mark.parametrize(
    ("bit", "kind"), [(30, "master"), (30, "exp_avg"), (30, "exp_avg_sq"), (0, "master"), (31, "exp_avg")]
)
def test_a_flipped_bit_of_a_number_is_found_and_named(trainer, group, tmp_path: Path, bit: int, kind: str):
    made = trainer()
    step(made, groups_of(group, 26))
    path = tmp_path / "state"
    state = state_of(made, path)
    raw = bytearray(path.read_bytes())
    name = f"{kind}.model.norm.weight"
    at = raw.index(state[name].numpy().tobytes())
    raw[at + 4 + bit // 8] ^= 1 << bit % 8
    path.write_bytes(raw)
    resumed = trainer(seed=1)
    before = resumed.tensors()
    with pytest.raises(CheckpointError, match=f"damaged: {name} is not as it was written") as caught:
        resumed.load(path)
    assert damage(path) == str(caught.value)
    assert equal(before, resumed.tensors())
    assert resumed.version == 0


def test_no_flipped_bit_is_read(trainer, group, tmp_path: Path):
    """In the header, too: whatever is read is what was written."""
    made = trainer()
    step(made, groups_of(group, 27))
    path = tmp_path / "state"
    state_of(made, path)
    raw, rng = path.read_bytes(), random.Random(27)
    header_bytes = int.from_bytes(raw[:8], "little")
    resumed = trainer(seed=1)
    header, rest = range(8 + header_bytes), range(8 + header_bytes, len(raw))
    for at in [*rng.sample(header, examples(50, 150)), *rng.sample(rest, examples(20, 50))]:
        flipped = bytearray(raw)
        flipped[at] ^= 1 << rng.randrange(8)
        path.write_bytes(flipped)
        with pytest.raises(CheckpointError):
            resumed.load(path)
        assert damage(path)
    path.write_bytes(raw)
    assert not damage(path)


def test_of_a_checkpoint_that_is_a_link_only_the_link_is_removed(tmp_path: Path):
    elsewhere, link = tmp_path / "elsewhere", tmp_path / "00000001.shards"
    elsewhere.mkdir()
    link.symlink_to(elsewhere)
    remove_saved(link)
    assert [*tmp_path.iterdir()] == [elsewhere]


def test_what_a_killed_save_left_is_swept_and_nothing_else(trainer, tmp_path: Path):
    made = trainer()
    made.save(tmp_path / "00000001.safetensors")
    (tmp_path / ".checkpoint-abc").mkdir()
    (tmp_path / ".checkpoint-abc" / "00000002.safetensors").write_bytes(b"half of it")
    checkpoint.sweep(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["00000001.safetensors"]
    checkpoint.sweep(tmp_path / "none")


def test_a_checkpoint_that_cannot_be_written_leaves_the_old_one(trainer, group, tmp_path: Path):
    made = trainer()
    before = state_of(made, tmp_path / "state")
    step(made, groups_of(group, 24))
    with small_files(1000), pytest.raises(CheckpointError, match="File too large"):
        made.save(tmp_path / "state")
    assert equal(before, load_file(tmp_path / "state"))
    assert [path.name for path in tmp_path.iterdir()] == ["state"]


def test_published_tensors_stay_on_the_trainers_device(trainer):
    made = trainer()
    made._parameters = [parameter.to("meta") for parameter in made._parameters]
    assert {tensor.device.type for tensor in made.tensors().values()} == {"meta"}


def test_published_tensors_are_rounded_copies(trainer, group):
    made = trainer()
    published = made.tensors()
    assert {tensor.dtype for tensor in published.values()} == {torch.bfloat16}
    copies = {name: tensor.clone() for name, tensor in published.items()}
    step(made, groups_of(group, 25))
    assert equal(published, copies)
    assert not equal(published, made.tensors())


def test_what_is_float32_in_the_files_is_published_exactly(model):
    exact = ["model.norm.weight", "model.layers.0.mlp.up_proj.weight"]
    made = GRPOTrainer(TrainerConfig(), model(), 6, 1.0, float32=exact)  # type: ignore[call-arg]
    masters = dict(made.model.named_parameters())
    for name, tensor in made.tensors().items():
        assert tensor.dtype is (torch.float32 if name in exact else torch.bfloat16)
        assert torch.equal(tensor, masters[name].detach().to(tensor.dtype))
        assert tensor.data_ptr() != masters[name].data_ptr()
