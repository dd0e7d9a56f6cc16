"""The main job under fire: a real run on serving and spot capacity, and what its journal proves afterwards.

Workers are processes that are killed with SIGKILL as a real spot trace says. Nothing here is simulated; devices
are modelled in speed only (paced engines). Success is measured on 256 held-out maps at the temperature of the
rollouts, for the base policy and for the last weights. `identical_share` compares, token for token, step one of a
run whose workers are killed every few seconds with that of an undisturbed run on the trainer's device alone.
"""

import math
import statistics
import time
from functools import partial
from operator import add
from pathlib import Path
from typing import NamedTuple

from benchmarks._common import Arguments, Figures, benchmark
from benchmarks._episodes import EpisodePlayer, episode
from benchmarks._runs import prepare, run
from elastic.compose.plan import read_model_config, resolve
from elastic.compose.runs import load_run_config
from elastic.core.types import WeightMode
from elastic.engine import create_engine
from elastic.engine.model.checkpoint import read_config, read_tensors
from elastic.runtime.journal import RunDirectory
from elastic.weights.puller import Puller
from elastic.weights.relay import open_relay
from elastic.weights.signing import Trust
from elastic.weights.source import TensorSource
from elastic.weights.versions import published_versions
from tests.proof import Verdict, check_run, trajectories

SEEDS = (7, 8, 9)
HELD_OUT_MAPS = 256
HELD_OUT_SEED = 10_000_000
"""Run seeds are hashed with step and group into 64 bits; these small numbers do not occur among them."""
SLOW_PACING = 'engine.pacing={prefill_tokens_per_s=4000, decode_step_s={"1"=0.04, "16"=0.08}}'
"""Makes step one long enough for several kills."""


class HeldOut(NamedTuple):
    """The share of held-out maps that were solved, and its standard error."""

    success: float
    standard_error: float


def churn_trace(path: Path) -> Path:
    """Three spot instances at a time, each living long enough to boot and work, one killed every eight seconds."""
    rows = [("add", max(0.0, 8.0 * k - 16.0), k) for k in range(60)]
    rows += [("remove", 8.0 * k + 8.0, k) for k in range(60)]
    lines = [f"{at_s:.3f},{kind},node{k}" for kind, at_s, k in sorted(rows, key=lambda r: (r[1], r[0] == "add"))]
    path.write_text("\n".join(["time_s,event,instance_id", *lines]) + "\n")
    return path


def identical_share(directory: Path, seed: int) -> tuple[float, Verdict, Figures]:
    """Share of step-one trajectories that kills left unchanged; the verdict on the disturbed run and its summary."""
    trace = churn_trace(directory / "churn.csv")
    churn = [
        "run.steps=1",
        SLOW_PACING,
        "seeding.reserved_engines=3",
        f'providers.spot={{trace="{trace}", max_workers=3, boot_delay_s=0}}',
    ]
    disturbed, summary = run(directory, "spot", churn, seed)
    calm, _ = run(directory, "", ["run.steps=1"], seed)
    one, other = (
        {name: row.token_ids for name, row in trajectories(RunDirectory(path)).items() if not row.cause}
        for path in (disturbed, calm)
    )
    return sum(one[t] == other.get(t) for t in one) / len(one), check_run(RunDirectory(disturbed)), summary


def held_out(run_dir: Path) -> tuple[HeldOut, HeldOut]:
    """The base policy and the run's last weights on the same held-out maps."""
    config = load_run_config(run_dir)
    base = config.model.checkpoint
    relay = open_relay(str((run_dir / "weights").resolve()))
    with RunDirectory(run_dir).newest_journal() as journal:
        trust = Trust(run_dir.name, journal.meta()["publisher"])
    last = Puller(relay, trust).pull(max(published_versions(relay)))
    (chosen,) = resolve(config, [], str(run_dir)).environments
    kind, make = chosen.kind, chosen.make
    assert kind is not None, "the example's environment is part of Elastic"
    assert make is not None, "the example's environment is part of Elastic"
    settings = config.engine.model_copy(update={"pacing": None, "max_batch": 64, "kv_blocks": 4096})

    scores: list[HeldOut] = []
    for tensors in (read_tensors(base, read_config(base)), last):
        engine = create_engine(read_model_config(config), settings)
        player = EpisodePlayer(engine, config.rollout, kind.stop_token_ids, settings.max_context_tokens)
        try:
            engine.load_version(TensorSource(0, tensors), WeightMode.FINISH)
            seeds = range(HELD_OUT_SEED, HELD_OUT_SEED + HELD_OUT_MAPS)
            played = [episode(make(), s, partial(add, s << 8)) for s in seeds]
            player.play(played)
        finally:
            engine.close()
        success = statistics.mean(one.data.reward > 0 for one in played)
        scores.append(HeldOut(success, math.sqrt(success * (1 - success) / HELD_OUT_MAPS)))
    return scores[0], scores[1]


def main(arguments: Arguments) -> Figures:
    began_s = time.monotonic()
    prepare()
    directory = arguments.scratch
    share, verdict, summary = identical_share(directory, SEEDS[0])
    verdicts, summaries, wall_s = [verdict], [summary], [summary["wall_s"]]
    evaluations: list[tuple[HeldOut, HeldOut]] = []
    by_seed: list[Figures] = []
    if not arguments.quick:
        wall_s = []
        for seed in SEEDS:
            run_dir, summary = run(directory, "serving,spot", [], seed)
            verdicts.append(verdict := check_run(RunDirectory(run_dir)))
            summaries.append(summary)
            evaluations.append(scores := held_out(run_dir))
            wall_s.append(summary["wall_s"])
            by_seed.append(
                {
                    "seed": seed,
                    "preemptions": verdict.kills_under_turns,
                    "success_before": scores[0].success,
                    "success_after": scores[1].success,
                    "wall_s": summary["wall_s"],
                    "usd": summary["total"]["usd"],
                }
            )
    full = verdicts[1:] or verdicts
    before = [one.success for one, _ in evaluations]
    after = [other.success for _, other in evaluations]
    errors = [math.hypot(one.standard_error, other.standard_error) for one, other in evaluations]
    return {
        "preemptions": min(v.kills_under_turns for v in full),
        "accepted_tokens_lost": sum(v.tokens_lost for v in verdicts),
        "tokens_duplicated": sum(v.tokens_duplicated for v in verdicts),
        "trained_twice": sum(v.groups_twice for v in verdicts),
        "ledger_imbalance_ns": sum(s["ledger_imbalance_ns"] for s in summaries),
        "unattributed_share": max(s["unattributed_share"] for s in summaries),
        "identical_share": share,
        "identical_under_kills": verdicts[0].kills_under_turns,
        "success_before": statistics.mean(before) if before else None,
        "success_after": statistics.mean(after) if after else None,
        "standard_error": statistics.mean(errors) / math.sqrt(len(errors)) if errors else None,
        "wall_s": statistics.median(wall_s),
        "total_s": time.monotonic() - began_s,
        "seeds": by_seed or None,
    }


if __name__ == "__main__":
    benchmark(__doc__, main)
