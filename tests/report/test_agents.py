"""What a report says of agents' policies, and of their calls of models elsewhere."""

import msgspec
import pytest

from elastic.core import events as e
from elastic.protocol.sampled import Sampled, SampledBranch, pack_ids, pack_logprobs
from elastic.report import as_json, as_markdown
from elastic.runtime.agents import notes
from elastic.runtime.journal import TrajectoryRow, event_row

CONFIG = msgspec.json.encode(
    {
        "model": {"checkpoint": "models/base"},
        "front": {"policies": ["solver", "critic", "unused"], "upstream": "https://api.example"},
    }
).decode()


def sampled(policy: str, turns: int, reward: float | None) -> Sampled:
    return Sampled(
        [(10 * turn, 4) for turn in range(1, turns + 1)],
        bytearray(pack_logprobs([0.0] * 4 * turns)),
        policy=policy,
        policy_reward=reward,
    )


def trajectory(name: str, reward: float | None, first: Sampled, *others: Sampled) -> TrajectoryRow:
    ids = bytearray(pack_ids(range(20)))
    branches = [SampledBranch(number, ids, one) for number, one in enumerate(others, 1)]
    return TrajectoryRow(
        trajectory=name,
        step=0,
        group="0/0",
        started_ns=0,
        ended_ns=10**9,
        reward=reward,
        cause="" if reward is not None else "it was ended without a reward",
        turns=3,
        policy_tokens=8,
        token_ids=bytes(ids),
        sampled=msgspec.msgpack.encode(first),
        branches=msgspec.msgpack.encode(branches) if branches else b"",
    )


def test_policies_stand_beside_each_other(summary_of):
    def fill(run):
        run.meta(config=CONFIG, run="run")
        run.journal.append(
            trajectory("0/0/0", 0.5, sampled("solver", 2, 1.0), sampled("critic", 1, 0.0), sampled("solver", 1, 1.0)),
            trajectory("0/0/1", 0.25, sampled("solver", 1, None), sampled("", 1, None)),
            trajectory("0/0/2", None, sampled("critic", 1, 1.0)),
        )

    summary = summary_of(fill)
    assert [(one.policy, one.trajectories, one.turns, one.tokens, one.mean_reward) for one in summary.policies] == [
        ("base", 1, 1, 4, 0.25),
        ("solver", 2, 4, 16, 0.625),
        ("critic", 1, 1, 4, 0.0),
    ]
    assert "| solver | 2 | 4 | 16 | 0.625 |" in as_markdown(summary)
    assert as_json(summary)["policies"][1]["policy"] == "solver"


def asked(call: int, model: str, trajectory: str, nano_usd: int) -> notes.UpstreamAsked:
    return notes.UpstreamAsked(call, model, "/v1/chat/completions", trajectory, "", 100, 100, nano_usd, 0)


def test_calls_of_models_elsewhere_are_told_by_model_and_trajectory(summary_of):
    said = [
        asked(0, "judge", "0/0/0", 10**9),
        asked(1, "judge", "0/0/1", 10**9),
        asked(2, "user", "0/0/0", 10**9),
        notes.UpstreamTold(0, 200, 30, 4, 2 * 10**8, 1.5),
        notes.UpstreamTold(1, 504, None, None, 10**9, 60.0),
        asked(3, "judge", "", 10**9),
        notes.UpstreamTold(3, 0, None, None, 0, 0.0),
        notes.AnswerGiven("0/0/0/1"),
    ]

    def fill(run):
        run.meta(config=CONFIG, run="run")
        run.journal.append(*(event_row(e.AgentNoted(note=notes.encode_note(note)), 1) for note in said))

    summary = summary_of(fill)
    found = {(one.model, one.trajectory): one for one in summary.upstream}
    assert sorted(found) == [("judge", "0-0-0"), ("judge", "0-0-1"), ("user", "0-0-0")]
    whole, lost, still = (found[key] for key in sorted(found))
    assert (whole.calls, whole.failed, whole.prompt_tokens, whole.answer_tokens, whole.usd) == (1, 0, 30, 4, 0.2)
    assert (lost.calls, lost.failed, lost.bounded, lost.usd, lost.duration_s) == (1, 1, 1, 1.0, 60.0)
    assert (still.calls, still.open, still.usd, still.held_usd) == (0, 1, 0.0, 1.0)
    text = as_markdown(summary)
    assert "| judge | 2 | 1 | 1 | 0 | 30 | 4 |" in text
    assert text.index("| 0-0-1 | judge |") < text.index("| 0-0-0 | judge |"), "the dearest first"


@pytest.mark.parametrize("config", ["{}", '{"front": null}', '{"front": {"policies": []}}'])
def test_other_runs_have_neither(summary_of, config):
    def fill(run):
        run.meta(config=config, run="run")
        run.journal.append(trajectory("0/0/0", 0.5, sampled("", 1, None)))

    summary = summary_of(fill)
    assert summary.policies == summary.upstream == []
    assert "Models elsewhere" not in as_markdown(summary)


def test_metrics_of_environments_are_means_of_the_scored_trajectories_that_have_them(summary_of):
    def fill(run):
        run.meta(config=CONFIG, run="run")
        told = [{"calls": 1.0}, {"calls": 2.0, "rewards/right": 0.5}, {"calls": 9.0}, {}]
        rows = [
            msgspec.structs.replace(
                trajectory(f"0/0/{member}", None if member == 2 else 1.0, sampled("", 1, None)),
                metrics=msgspec.msgpack.encode(metrics) if metrics else b"",
            )
            for member, metrics in enumerate(told)
        ]
        run.journal.append(*rows)
        run.step(0, 1.0)

    (step,) = summary_of(fill).steps
    assert step.metrics == {"calls": 1.5, "rewards/right": 0.5}
