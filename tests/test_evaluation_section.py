"""What `[evaluation]` may say, and what is known of evaluations where a run goes on."""

from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from elastic.compose.data import data_source
from elastic.compose.evaluating import evaluation_of, run_to_evaluate
from elastic.compose.evaluation import check_evaluation, held_out, with_tasks
from elastic.compose.incarnations import check_same, evaluations_until
from elastic.compose.runs import new_run_dir, save_run_config
from elastic.config import Config, ConfigError, JournalConfig, validate
from elastic.core.evaluation import EvaluationRecord
from elastic.core.scores import Estimate
from elastic.environments.rows import BadData, read_rows
from elastic.runtime.journal import DirectoryStore, EvaluationRow, RunDirectory


def config_of(evaluation: Mapping[str, Any] | None = None) -> Config:
    sections: dict[str, Any] = {} if evaluation is None else {"evaluation": evaluation}
    return validate(Config, {"model": {"checkpoint": "policy"}, **sections}, "test")


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"splits": [{"like": ["frozenlake"]}]}, "evaluation.splits.0.like: must be an environment of the run"),
        ({"splits": [{"like": {}}]}, "evaluation.splits.0.like: must be an environment of the run"),
        (
            {"environments": ["frozenlake"] * 2},
            "evaluation.environments must name each once (found 'frozenlake' twice)",
        ),
    ],
)
def test_what_cannot_be_evaluated_is_refused(section: Mapping[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        config_of(section)
    assert words in str(refused.value)


def test_the_section_neither_comes_nor_goes_where_a_run_goes_on() -> None:
    without, having = config_of(), config_of({"every": 2})
    check_same(having, having)
    for now, former in ((without, having), (having, without)):
        with pytest.raises(ConfigError, match=r"--resume: evaluation\."):
            check_same(now, former)


def test_of_a_splits_processes_others_may_go_on_and_of_its_tasks_none() -> None:
    split = {"name": "held", "like": "frozenlake", "tasks": 4}
    former = config_of({"splits": [split]})
    check_same(
        config_of({"splits": [{**split, "processes": 3, "python": "bin/python", "limits": {"files": 64}}]}), former
    )
    for splits in ([{**split, "tasks": 5}], [split, {**split, "name": "other"}], []):
        with pytest.raises(ConfigError, match=r"--resume: evaluation\.splits: found"):
            check_same(config_of({"splits": splits}), former)


def test_a_split_has_nothing_of_how_the_environment_that_it_is_like_is_trained_on() -> None:
    lake = {"name": "lake", "kind": "frozenlake", "ratio": 3.0, "redundancy": 2.0}
    sections = {"environments": [lake], "evaluation": {"splits": [{"name": "held", "like": "lake"}]}}
    config = validate(Config, {"model": {"checkpoint": "policy"}, **sections}, "test")
    assert [(one.name, one.ratio, one.redundancy) for one in config.mixture] == [("lake", 3.0, 2.0), ("held", 0.0, 1.0)]
    assert validate(Config, config.model_dump(mode="json"), "test") == config


def test_rows_of_the_hub_are_looked_at_by_env_workers_alone(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1 + 1"}\n{"prompt": "2 + 2"}\n')
    of_file, of_hub = {"source": f"{tmp_path}/rows.jsonl"}, {"source": "hf:nobody/sums"}
    sums = {"name": "sums", "kind": "chat"}

    def having(trained: Mapping[str, Any], held: Mapping[str, Any], tasks: int) -> Config:
        split = {"name": "held", "like": "sums", "data": held, "tasks": tasks}
        sections = {"environments": [{**sums, "data": trained}], "evaluation": {"splits": [split]}}
        return with_tasks(validate(Config, {"model": {"checkpoint": "policy"}, **sections}, "test"), "test")

    for trained, held in ((of_file, of_hub), (of_hub, of_file), (of_hub, of_hub)):
        config = having(trained, held, 2)
        check_evaluation(config, "test")
        assert held_out(config, "sums") is None
        there = held_out(config, "held")
        assert there is not None
        assert (there.tasks, [*there.trained]) == (2, ["sums"])
    config = having(of_file, of_hub, 2)
    there, rows = held_out(config, "held"), read_rows(data_source(config.trained[0], 7) or pytest.fail("no rows"))
    assert there is not None
    with pytest.raises(BadData, match="2 of the 2 tasks of 'held' have prompts that are trained on, by 'sums'"):
        there.check(rows)
    there = held_out(having(of_file, of_hub, 3), "held")
    assert there is not None
    with pytest.raises(BadData, match=r"found 3 tasks, but .*rows\.jsonl has 2 rows; allowed: up to 2"):
        there.check(rows)
    there = held_out(having(of_file, of_file, 2), "held")
    assert there is not None
    assert not there.trained, "those were looked at before the run began"


def evaluated_run(directory: Path, values: Mapping[int, float | None], *, ended_at: int = -1) -> RunDirectory:
    run = RunDirectory(directory)
    with closing(run.begin_journal(JournalConfig.model_validate({}), notes={"run": "lake"})) as journal:
        for version, value in values.items():
            record = EvaluationRecord(
                version=version,
                started_ns=0,
                ended_ns=version,
                timed_out=value is None,
                metrics={} if value is None else {"avg@4": Estimate(mean=value, error=None, tasks=1)},
                sets={},
            )
            ends = "no better" if version == ended_at else ""
            journal.append(EvaluationRow(version=version, t_ns=version, record=record, ends=ends))
    return run


def test_who_begins_anew_is_told_of_evaluations_up_to_its_checkpoint(tmp_path: Path) -> None:
    run, config = evaluated_run(tmp_path, {0: 0.25, 2: None, 4: 0.5, 6: 0.75}), config_of({"keep_best": "avg@4"})
    with run.journals() as journals:
        (told,) = evaluations_until(journals, config, 4)
        assert told.values == {0: {"avg@4": 0.25}, 2: {}, 4: {"avg@4": 0.5}}
        assert not evaluations_until(journals, config_of(), 4)


def test_who_goes_on_with_a_run_that_had_ended_early_has_new_patience(tmp_path: Path) -> None:
    run = evaluated_run(tmp_path, {0: 0.25, 2: 0.5, 4: 0.5, 6: 0.25, 8: 0.25}, ended_at=6)
    with run.journals() as journals:
        (told,) = evaluations_until(journals, config_of({"stop_when": {"metric": "avg@4", "no_better_for": 2}}), 8)
    assert told.values == {2: {"avg@4": 0.5}, 8: {"avg@4": 0.25}}


def test_the_latest_run_to_evaluate_is_no_evaluation(tmp_path: Path) -> None:
    trained = config_of()
    trained = trained.model_copy(update={"run": trained.run.model_copy(update={"directory": tmp_path})})
    evaluation, store = evaluation_of(trained, "other-policy"), DirectoryStore(tmp_path)
    places = list[Path]()
    for config in (evaluation, trained, evaluation):
        places.append(new_run_dir(config))
        save_run_config(places[-1], config)
        expected = places[min(len(places) - 1, 1)]
        assert run_to_evaluate(store, "latest").path == expected
    assert run_to_evaluate(store, places[2].name).path == places[2]
