"""A policy is evaluated without training, two are compared task by task, and what cannot be is told in one message."""

import json
import shutil
import signal
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
import torch

from elastic.engine.model.checkpoint import read_tensors
from elastic.engine.model.stored import read_config
from elastic.runtime.journal import EvaluationRow, RunDirectory, StepRow

EVALUATION = """
[evaluation]
every = 1
samples = 2
tasks = 3
keep_best = "avg@2"
"""
ROWS = [{"prompt": f"What is {n} + {n}?", "answer": str(2 * n)} for n in range(6)]


@pytest.fixture
def evaluating(config: Path) -> Path:
    """A small run's configuration, with evaluations."""
    path = config.with_name("evaluating.toml")
    path.write_text(config.read_text() + EVALUATION)
    return path


def records(run: Path) -> list[EvaluationRow]:
    with RunDirectory(run).journals() as journals:
        return [row for journal in journals for row in journal.rows(EvaluationRow)]


def only_run(config: Path, name: str = "small-*") -> Path:
    (run,) = (config.parent / "runs").glob(name)
    return run


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("evaluation.k=[3]", ("evaluation: k must be at most samples = 2", "found 3")),
        ("evaluation.keep_best=avg@9", ("no environment gives 'avg@9'", "allowed: avg@2, pass@1, pass@2")),
        ("evaluation.keep_best=lake/avg@2", ("no environment gives 'lake/avg@2'",)),
        ("evaluation.stop_when={metric='success',at_least=1.0}", ("stop_when: no environment gives 'success'",)),
        ("evaluation.stop_when={metric='avg@2'}", ("allowed: at_least, no_better_for, or both",)),
        ("evaluation.environments=['lake']", ("must be environments of the run: 'frozenlake'", "found 'lake'")),
        ("evaluation.max_tokens=192", ("must be below engine.max_context_tokens = 192",)),
        ("evaluation.splits=[{name='frozenlake'}]", ("must have other names", "'frozenlake' twice")),
        ("evaluation.splits=[{name='held',like='sums'}]", ("splits.0.like", "'frozenlake'", "found 'sums'")),
        ("evaluation.temperature=3", ("evaluation.temperature",)),
        ("evaluation.timeout_s=1e300", ("evaluation.timeout_s", "less than or equal to")),
        ("evaluation.splits=[{name='all',like='frozenlake'},{name='b',like='frozenlake'}]", ("'all' is what all",)),
        (
            "evaluation.splits=[{name='held',like='frozenlake',redundancy=1.5,ratio=2.0}]",
            ("says how a split is trained on", "found ratio = 2.0, redundancy = 1.5"),
        ),
        (
            "evaluation.splits=[{name='held',kind='chat',data={source='hf:nobody/sums',answer='answer'}}]",
            ("evaluation.splits.0.tasks: is missing", "hf:nobody/sums, split 'train'", "allowed: tasks = N"),
        ),
        (
            "evaluation.splits=[{name='held',kind='chat',data={source='rows.jsonl',order='in_order'}}]",
            ("says how a split is trained on", "found data.order = 'in_order'"),
        ),
        ("evaluation.tasks=600000", ("600,000 tasks of 2 samples are 1,200,000 episodes", "up to 1,000,000")),
    ],
)
def test_evaluations_that_cannot_be(elastic, refused, evaluating: Path, override: str, words: tuple[str, ...]) -> None:
    refused(elastic("run", evaluating, "--dry-run", "--set", override), *words)


def test_a_split_that_shares_rows_with_training_is_refused_with_their_number(
    elastic, refused, config: Path, tmp_path: Path
) -> None:
    for name, rows in (("train", ROWS[:4]), ("test", ROWS[2:])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "reward.py").write_text("def right(answer, **_):\n    return 1.0\n")
    text = (
        config.read_text()
        + f"""
[environment]
name = "sums"
kind = "chat"
data = {{ source = "{tmp_path}/train.jsonl", answer = "answer" }}
settings = {{ rewards = ["{tmp_path}/reward.py:right"] }}
"""
    )
    config.write_text(text + "[evaluation]\nevery = 1\n")
    refused(elastic("evaluate", config), "the tasks of 'sums' are all trained on", "like = 'sums'")
    splits = f"""
[evaluation]
[[evaluation.splits]]
name = "held"
like = "sums"
data = {{ source = "{tmp_path}/test.jsonl", answer = "answer" }}
"""
    config.write_text(text + splits)
    from elastic.compose.evaluation import check_evaluation
    from elastic.compose.plan import resolve
    from elastic.config import ConfigError, load_config

    plan = resolve(load_config(config), [], str(config))
    assert [(one.name, one.ratio) for one in plan.config.mixture] == [("sums", 1.0), ("held", 0.0)]
    assert plan.config.evaluation is not None
    assert plan.config.evaluation.splits[0].tasks == 4
    with pytest.raises(ConfigError, match="2 of the 4 tasks of 'held' have prompts that are trained on, by 'sums'"):
        check_evaluation(plan.config, str(config))
    too_many = load_config(config, ["evaluation.splits.0.tasks=5"])
    with pytest.raises(ConfigError, match="has 4 rows; allowed: up to 4"):
        check_evaluation(resolve(too_many, [], str(config)).config, str(config))
    (tmp_path / "test.jsonl").unlink()
    again = resolve(plan.config, [], str(config))
    assert again.config == plan.config, "a journal is read again without the rows that it was about"


def test_what_cannot_be_evaluated(elastic, refused, evaluating: Path, checkpoint: Path, tmp_path: Path) -> None:
    refused(elastic("evaluate", evaluating, "--step", 3), "--step", "is a configuration")
    refused(elastic("evaluate", "none", "--directory", tmp_path), "no run 'none'")
    refused(elastic("evaluate"), "give a configuration file, a run, or --resume RUN")
    refused(elastic("evaluate", evaluating, "--resume", "x", "--step", 1), "--step", "do not apply", "--providers")
    refused(elastic("evaluate", "--resume", "none", "--directory", tmp_path), "no run 'none'")
    refused(elastic("evaluate", checkpoint), "is a policy, and no run", "--set model.checkpoint=")
    refused(elastic("evaluate", evaluating, "--against", tmp_path / "none"), "no run")
    other = tmp_path / "other"
    shutil.copytree(checkpoint, other)
    said = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(said | {"model_type": "mamba"}))
    refused(elastic("evaluate", evaluating, "--against", other), "architecture 'mamba'", "allowed: 'qwen3'")
    assert not list((evaluating.parent / "runs").glob("*")), "what is refused leaves nothing"


@pytest.mark.nightly
def test_two_policies_are_compared_task_by_task(elastic, evaluating: Path, checkpoint: Path, tmp_path: Path) -> None:
    same = tmp_path / "same"
    shutil.copytree(checkpoint, same)
    (same / "tokenizer.json").write_text("{}")
    ended = elastic("evaluate", evaluating, "--against", same, "--json")
    assert ended.code == 0, ended.err
    found = json.loads(ended.out)
    assert [one["policy"] for one in found["policies"]] == [str(checkpoint), str(same)]
    assert found["policies"][0]["sets"] == found["policies"][1]["sets"], "the same weights, tasks and seeds"
    assert found["differences"]["all"]["estimate"]["mean"] == 0.0
    assert "tokenizers" in found["remarks"][0]
    assert found["remarks"][0] in ended.err
    for one in found["policies"]:
        with RunDirectory(Path(one["run"])).journals() as journals:
            assert not [row for journal in journals for row in journal.rows(StepRow)], "nothing is trained"
        assert (Path(one["run"]) / "report.html").is_file()
    again = elastic("evaluate", "--resume", found["policies"][1]["run"], "--json")
    assert json.loads(again.out) == found, "what has come to its end is told, and not done again"


@pytest.mark.nightly
def test_an_evaluation_that_is_killed_is_taken_up(
    elastic, start: Callable[..., object], evaluating: Path, checkpoint: Path, tmp_path: Path
) -> None:
    same = tmp_path / "same"
    shutil.copytree(checkpoint, same)
    process = start("evaluate", evaluating, "--against", same)
    deadline_s = time.monotonic() + 120
    while not _in_an_evaluation(evaluating, "small-evaluation-*"):
        assert time.monotonic() < deadline_s, "it came to no evaluation"
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)  # type: ignore[attr-defined]
    process.wait()  # type: ignore[attr-defined]
    ended = elastic("evaluate", "--resume", "latest", "--directory", evaluating.parent / "runs", "--json")
    assert ended.code == 0, ended.err
    one, other = json.loads(ended.out)["policies"]
    assert one["sets"] == other["sets"], "the same weights, tasks and seeds"


@pytest.mark.nightly
def test_weights_are_those_of_a_run_without_evaluations_and_the_best_checkpoint_is_evaluated(
    elastic, config: Path, evaluating: Path
) -> None:
    for path, name in ((config, "without"), (evaluating, "with")):
        ended = elastic("run", path, "--set", f"run.name={name}", "--json")
        assert ended.code == 0, ended.err
    without, with_it = only_run(config, "without-*"), only_run(config, "with-*")
    policies: list[dict[str, torch.Tensor]] = []
    for run in (without, with_it):
        output = config.parent / f"{run.name}-policy"
        assert elastic("export", run, "-o", output, "--step", 2).code == 0
        policies.append(read_tensors(output, read_config(output)))
    assert policies[0].keys() == policies[1].keys()
    assert all(torch.equal(policies[0][name], policies[1][name]) for name in policies[0])
    assert [row.version for row in records(with_it)] == [0, 1, 2]
    assert not records(without)
    ended = elastic("evaluate", with_it, "--step", 2, "--json")
    assert ended.code == 0, ended.err
    again = json.loads(ended.out)["policies"][0]["sets"]["frozenlake"]["rewards"]
    assert again == records(with_it)[-1].record.sets["frozenlake"].rewards, "the same policy, tasks and seeds"


@pytest.mark.nightly
def test_a_run_that_is_killed_in_an_evaluation_goes_on_with_it(
    elastic, start: Callable[..., object], evaluating: Path
) -> None:
    ended = elastic("run", evaluating, "--set", "run.name=whole", "--set", "run.steps=1", "--json")
    assert ended.code == 0, ended.err
    process = start("run", evaluating, "--set", "run.name=killed", "--set", "run.steps=1")
    deadline_s = time.monotonic() + 120
    while not _in_an_evaluation(evaluating):
        assert time.monotonic() < deadline_s, "it came to no evaluation"
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)  # type: ignore[attr-defined]
    process.wait()  # type: ignore[attr-defined]
    killed = only_run(evaluating, "killed-*")
    ended = elastic("run", "--resume", killed, "--json")
    assert ended.code == 0, ended.err
    whole = only_run(evaluating, "whole-*")
    assert [(row.version, row.record.sets, row.record.metrics) for row in records(killed)] == [
        (row.version, row.record.sets, row.record.metrics) for row in records(whole)
    ]


def _in_an_evaluation(config: Path, name: str = "killed-*") -> bool:
    """Whether some episodes of the first evaluation have ended, and not all."""
    for journal in (config.parent / "runs").glob(f"{name}/journal.sqlite"):
        try:
            with closing(sqlite3.connect(f"file:{journal}?mode=ro", uri=True)) as connection:
                (ended,) = connection.execute("SELECT count(*) FROM evaluated").fetchone()
                return 0 < ended < 6
        except sqlite3.Error:
            return False
    return False
