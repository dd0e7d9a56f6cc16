"""What corrections do for an engine that computes otherwise than the trainer, and now and then says something odd.

A small policy learns to sample tokens of the lower half of its vocabulary. Its engine has the trainer's weights in
bfloat16, computes in that type, and records its own log-probabilities. Every few steps it records one token as far
less likely than it was (`outlier_nats`), as a broken kernel would. All arms have `bypass_mode = false` and the same
seeds: `none` corrects nothing, `untruncated` weighs by `rollout_is = "token"` up to 10⁶, `tis` up to 2, `icepop` masks
tokens outside of 0.5 to 5, `sequence_mask` sequences of a product beyond 3.

`gradient_norm_max` is the largest of all steps and seeds, `over_median_max` the largest over the median of its own run.
The outlier is enlarged until some run of `untruncated` exceeds ten times its median. `success_after` is the mean reward
of what the trained policy samples in float32, with the standard error over seeds.
"""

import copy
import random
import statistics
from collections.abc import Mapping

import torch
from torch import Tensor

from benchmarks._arms import standard_error
from benchmarks._common import Arguments, Figures, benchmark
from benchmarks._shapes import SHAPES
from elastic.config import TrainerConfig
from elastic.engine.model.config import Qwen3Config
from elastic.engine.model.qwen3 import Qwen3
from elastic.protocol.wire import TrainGroupFrame
from elastic.testing.trajectories import PlainTrajectory
from elastic.worker.trainer.embedded.trainer import GRPOTrainer

POLICY = Qwen3Config(**SHAPES["smallest"])
GROUPS, MEMBERS, TOKENS, NEEDED = 6, 8, 6, 5
"""A trajectory is rewarded if so many of its tokens are of the lower half."""
EVALUATED = 256
OUTLIER_EVERY, OUTLIER_NATS, OUTLIER_NATS_MOST = 4, 8.0, 13.0
OVER_MEDIAN = 10.0
ARMS: Mapping[str, Mapping[str, object]] = {
    "none": {},
    "untruncated": {"rollout_is": "token", "rollout_is_threshold": 1e6},
    "tis": {"rollout_is": "token", "rollout_is_threshold": 2.0},
    "icepop": {"rollout_is": "token", "rollout_is_threshold": "0.5_5"},
    "sequence_mask": {"rollout_is": "sequence", "rollout_is_threshold": "0_3"},
}


@torch.no_grad()
def sampled(model: Qwen3, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Tokens that the model samples after a prompt of two, [count, 2 + TOKENS], and their log-probabilities."""
    ids, logprobs = torch.ones(count, 2, dtype=torch.int64), torch.zeros(count, 0)
    for _ in range(TOKENS):
        lengths = torch.full((count,), ids.shape[1])
        states = model.states(ids, lengths).view(count, ids.shape[1], -1)[:, -1]
        log_softmax = model.lm_head(states).float().log_softmax(-1)
        token = torch.multinomial(log_softmax.exp(), 1, generator=generator)
        ids, logprobs = torch.cat((ids, token), 1), torch.cat((logprobs, log_softmax.gather(-1, token)), 1)
    return ids, logprobs


def rewards_of(ids: Tensor) -> Tensor:
    return ((ids[:, 2:] < POLICY.vocab_size // 2).sum(1) >= NEEDED).float()


def groups_of(engine: Qwen3, step: int, outlier_nats: float, generator: torch.Generator) -> list[TrainGroupFrame]:
    ids, logprobs = sampled(engine, GROUPS * MEMBERS, generator)
    if step % OUTLIER_EVERY == OUTLIER_EVERY - 1:
        rewards = rewards_of(ids)
        odd = int((rewards == rewards.max()).nonzero()[0])
        logprobs[odd, random.Random(step).randrange(TOKENS)] -= outlier_nats
    trajectories = [
        PlainTrajectory(
            str(place),
            row.tolist(),
            [0, 0, *[1] * TOKENS],
            [0.0, 0.0, *own.tolist()],
            [step] * (2 + TOKENS),
            float(reward),
            [("reserved-1/w", TOKENS)],
        ).packed()
        for place, (row, own, reward) in enumerate(zip(ids, logprobs, rewards_of(ids), strict=True))
    ]
    parts = [trajectories[begin : begin + MEMBERS] for begin in range(0, len(trajectories), MEMBERS)]
    return [TrainGroupFrame(step, f"g{index}", index, part) for index, part in enumerate(parts)]


def run(arm: Mapping[str, object], seed: int, steps: int, outlier_nats: float) -> Figures:
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    settings = TrainerConfig.model_validate(
        {"learning_rate": 1e-3, "warmup_updates": 0, "mismatch_max": 1e9, "bypass_mode": False, **arm}
    )
    trainer = GRPOTrainer(settings, Qwen3(POLICY), GROUPS, 1.0)
    norms: list[float] = []
    skipped = 0.0
    for step in range(steps):
        engine = copy.deepcopy(trainer.model).to(torch.bfloat16)
        for group in groups_of(engine, step, outlier_nats, generator):
            trainer.train_group(group)
        metrics = trainer.update()
        skipped += metrics["groups_unusable"]
        if metrics["updates"]:
            norms.append(metrics["gradient_norm"])
    ids, _ = sampled(trainer.model, EVALUATED, torch.Generator().manual_seed(1000 + seed))
    return {"norms": norms, "skipped": skipped, "success": rewards_of(ids).mean().item()}


def over_median(norms: list[float]) -> float:
    return max(norms) / statistics.median(norms)


def figures_of(runs: list[Figures]) -> dict[str, float]:
    success = [one["success"] for one in runs]
    return {
        "gradient_norm_max": max(max(one["norms"]) for one in runs),
        "over_median_max": max(over_median(one["norms"]) for one in runs),
        "skipped_groups": sum(one["skipped"] for one in runs),
        "success_after": statistics.fmean(success),
        "standard_error": standard_error(success),
    }


def main(arguments: Arguments) -> Figures:
    quick = arguments.quick
    torch.set_num_threads(1)
    seeds, steps = (1, 8) if quick else (5, 24)
    nats = OUTLIER_NATS
    found = figures_of([run(ARMS["untruncated"], seed, steps, nats) for seed in range(seeds)])
    while found["over_median_max"] <= OVER_MEDIAN and nats < OUTLIER_NATS_MOST:
        nats += 1.0
        found = figures_of([run(ARMS["untruncated"], seed, steps, nats) for seed in range(seeds)])
    arms = {
        name: found if name == "untruncated" else figures_of([run(keys, seed, steps, nats) for seed in range(seeds)])
        for name, keys in ARMS.items()
    }
    figures: Figures = {**arms, "outlier_nats": nats, "seeds": seeds, "steps": steps}
    if quick:
        figures["skipped_because"] = {"bars": "one seed of few steps says nothing of success"}
        return figures
    least = arms["none"]["success_after"] - 2 * arms["none"]["standard_error"]
    corrected = [arms[name] for name in ("tis", "icepop", "sequence_mask")]
    figures["bars"] = {
        "untruncated_exceeds": arms["untruncated"]["over_median_max"] > OVER_MEDIAN,
        "corrected_do_not": all(one["over_median_max"] <= OVER_MEDIAN for one in corrected),
        "as_successful": all(one["success_after"] >= least for one in corrected),
    }
    return figures


if __name__ == "__main__":
    benchmark(__doc__, main)
