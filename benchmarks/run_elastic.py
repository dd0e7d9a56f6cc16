"""The main job under fire: a real run on serving and spot capacity, and what its journal proves afterwards.

Workers are processes that are killed with SIGKILL as a real spot trace says. Nothing here is simulated; devices
are modelled in speed only (paced engines). Success is measured on 256 held-out maps at the temperature of the
rollouts, for the base policy and for the last weights. `identical_share` compares, token for token, step one of a
run whose workers are killed every few seconds with that of an undisturbed run on the trainer's device alone.
"""

import asyncio
import math
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from _common import Arguments, emit, parse_arguments
from _runs import prepare, prove, run, trajectories

from elastic import compose
from elastic.engine import create_engine
from elastic.model.checkpoint import read_config, read_tensors
from elastic.runtime.journal import RunDirectory
from elastic.weights.puller import pull
from elastic.weights.relay import open_relay
from elastic.weights.signing import Trust
from elastic.weights.versions import published_versions
from elastic.worker.evaluate import Evaluation, evaluate

SEEDS = (7, 8, 9)
HELD_OUT_MAPS = 256
HELD_OUT_SEED = 10_000_000
"""Run seeds are hashed with step and group into 64 bits; these small numbers do not occur among them."""
SLOW_PACING = 'engine.pacing={prefill_tokens_per_s=4000, decode_step_s={"1"=0.04, "16"=0.08}}'
"""Makes step one long enough for several kills."""


def churn_trace(path: Path) -> Path:
    """Three spot instances at a time, each living long enough to boot and work, one killed every eight seconds."""
    rows = [("add", max(0.0, 8.0 * k - 16.0), k) for k in range(60)]
    rows += [("remove", 8.0 * k + 8.0, k) for k in range(60)]
    lines = [f"{at_s:.3f},{kind},node{k}" for kind, at_s, k in sorted(rows, key=lambda r: (r[1], r[0] == "add"))]
    path.write_text("\n".join(["time_s,event,instance_id", *lines]) + "\n")
    return path


def identical_share(directory: Path, seed: int) -> tuple[float, Any, dict[str, Any]]:
    """Share of step-one trajectories that kills left unchanged; the disturbed run's proof and summary."""
    trace = churn_trace(directory / "churn.csv")
    churn = [
        "run.steps=1",
        SLOW_PACING,
        "seeding.reserved_engines=3",
        f'providers.spot={{trace="{trace}", max_workers=3, boot_delay_s=0}}',
    ]
    disturbed, summary = run(directory, "spot", churn, seed)
    calm, _ = run(directory, "", ["run.steps=1"], seed)
    one, other = _trajectories(disturbed), _trajectories(calm)
    return sum(one[t] == other.get(t) for t in one) / len(one), prove(disturbed), summary


def _trajectories(run_dir: Path) -> dict[str, Any]:
    with RunDirectory(run_dir).newest_journal() as journal:
        return trajectories(journal)


def held_out(run_dir: Path) -> tuple[Evaluation, Evaluation]:
    """The base policy and the run's last weights on the same held-out maps."""
    config = compose.load_run_config(run_dir)
    base = config.model.checkpoint
    relay = open_relay(str((run_dir / "weights").resolve()))
    with RunDirectory(run_dir).newest_journal() as journal:
        trust = Trust(run_dir.name, journal.meta()["publisher"])
    last = pull(relay, trust, max(published_versions(relay)))
    plan = compose.resolve(config, [], str(run_dir))
    settings = config.engine.model_copy(update={"pacing": None, "max_batch": 64, "kv_blocks": 4096})

    def score(tensors: Any) -> Evaluation:
        return asyncio.run(
            evaluate(
                create_engine(compose.read_model_config(config), settings),
                tensors,
                lambda: plan.environment(plan.environment_settings),
                stop_token_ids=plan.environment.stop_token_ids,
                seeds=range(HELD_OUT_SEED, HELD_OUT_SEED + HELD_OUT_MAPS),
                max_turns=config.rollout.max_turns,
                max_tokens_per_turn=config.rollout.max_tokens_per_turn,
                temperature=config.rollout.temperature,
            )
        )

    return score(read_tensors(base, read_config(base))), score(last)


def main(arguments: Arguments) -> dict[str, Any]:
    began_s = time.monotonic()
    prepare()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        share, proof, summary = identical_share(directory, SEEDS[0])
        proofs, summaries, wall_s = [proof], [summary], [summary["wall_s"]]
        evaluations: list[tuple[Evaluation, Evaluation]] = []
        by_seed: list[dict[str, Any]] = []
        if not arguments.quick:
            wall_s = []
            for seed in SEEDS:
                run_dir, summary = run(directory, "serving,spot", [], seed)
                proofs.append(proof := prove(run_dir))
                summaries.append(summary)
                evaluations.append(scores := held_out(run_dir))
                wall_s.append(summary["wall_s"])
                by_seed.append(
                    {
                        "seed": seed,
                        "preemptions": proof.kills_under_turns,
                        "success_before": scores[0].success,
                        "success_after": scores[1].success,
                        "wall_s": summary["wall_s"],
                        "usd": summary["total"]["usd"],
                    }
                )
    full = proofs[1:] or proofs
    before = [one.success for one, _ in evaluations]
    after = [other.success for _, other in evaluations]
    errors = [math.hypot(one.standard_error, other.standard_error) for one, other in evaluations]
    return {
        "preemptions": min(p.kills_under_turns for p in full),
        "accepted_tokens_lost": sum(p.accepted_tokens_lost for p in proofs),
        "tokens_duplicated": sum(p.tokens_duplicated for p in proofs),
        "trained_twice": sum(p.trained_twice for p in proofs),
        "ledger_imbalance_ns": sum(s["ledger_imbalance_ns"] for s in summaries),
        "unattributed_share": max(s["unattributed_share"] for s in summaries),
        "identical_share": share,
        "identical_under_kills": proofs[0].kills_under_turns,
        "success_before": statistics.mean(before) if before else None,
        "success_after": statistics.mean(after) if after else None,
        "standard_error": statistics.mean(errors) / math.sqrt(len(errors)) if errors else None,
        "wall_s": statistics.median(wall_s),
        "total_s": time.monotonic() - began_s,
        "seeds": by_seed or None,
    }


if __name__ == "__main__":
    emit(main(args := parse_arguments(__doc__)), args)
