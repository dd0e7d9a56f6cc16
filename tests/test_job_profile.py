"""Plans from timed steps: the first does not count, responses at their limit or a quantile, and where nothing is to be
read."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from elastic.compose.job_profile import JobProfileError, plan_of_run, profile_overrides
from elastic.compose.plan import resolve
from elastic.config import Config, JournalConfig, load_config
from elastic.core.events import LeaseGranted, WorkerJoined
from elastic.core.types import NS_PER_S, Capabilities
from elastic.engine import resolve_engine
from elastic.engine.vllm import VllmSettings
from elastic.runtime.journal import GroupRow, RunDirectory, StepRow, event_row
from tests.journal_rows import step_record

CONFIG = """
[model]
checkpoint = "base"
[rollout]
max_turns = 4
max_tokens_per_turn = 10
[job]
rollout_nodes = 2
"""


@pytest.fixture
def config(tmp_path: Path) -> Config:
    path = tmp_path / "run.toml"
    path.write_text(CONFIG)
    return load_config(path)


STARTS = (("reserved-1", 60), ("reserved-2", 40), ("trainer-1", 90))


def timed(
    path: Path,
    *steps: tuple[float, float, float],
    lengths: tuple[int, ...] = (10, 20),
    device: str = "cpu",
    starts: Sequence[tuple[str, int]] = STARTS,
) -> RunDirectory:
    """A run whose steps took so long: rollouts, training, all of it, in seconds. Its workers start for 60 s and 40 s,
    its trainer for longer."""
    path.mkdir(exist_ok=True)
    run = RunDirectory(path)
    journal = run.begin_journal(JournalConfig.model_validate({}))
    said = Capabilities(engine="torch", replayable_sampling=True, max_context_tokens=1024, device=device)
    for worker, started_s in starts:
        journal.append(event_row(LeaseGranted(lease=worker, workers=(worker,)), 5))
        joined = WorkerJoined(worker=worker, epoch=1, capabilities=said, weights_version=None)
        journal.append(event_row(joined, 5 + started_s * NS_PER_S))
    for number, (rollout_s, train_s, whole_s) in enumerate(steps):
        record = step_record(
            number,
            duration_ns=round(whole_s * NS_PER_S),
            rollout_ns=round(rollout_s * NS_PER_S),
            groups_trained=1,
            train_ns=round(train_s * NS_PER_S),
        )
        journal.append(StepRow(step=number, t_ns=number, record=record, success_rate=None, trainer={}))
        group = GroupRow(
            group=str(number), t_ns=0, step=number, version=0, dropped="", lengths=list(lengths), tokens_by_age={}
        )
        journal.append(group)
    journal.close()
    return run


def test_phases_at_the_token_limit_last_as_if_every_response_went_on_to_it(config: Config, tmp_path: Path) -> None:
    plan = plan_of_run(timed(tmp_path, (90.0, 90.0, 200.0), (4.0, 3.0, 8.0), (5.0, 2.0, 7.0)), config)
    assert plan.rollout_s == pytest.approx(5.0 * 40 / 20)
    assert plan.train_s == pytest.approx(3.0 * 40 / 15)
    assert plan.sync_s == pytest.approx(1.0)


def test_phases_at_a_quantile_are_those_that_were_seen(config: Config, tmp_path: Path) -> None:
    job = config.job.model_copy(update={"plan_quantile": 0.5})
    run = timed(tmp_path, (90.0, 90.0, 200.0), (4.0, 3.0, 8.0), (5.0, 2.0, 7.0))
    plan = plan_of_run(run, config.model_copy(update={"job": job}))
    assert (plan.rollout_s, plan.train_s, plan.sync_s) == pytest.approx((4.0, 2.0, 0.0))


@pytest.mark.parametrize(
    ("kind", "device", "sleep_level", "parks"),
    [("torch", "cuda", 0, True), ("vllm", "cuda", 0, False), ("vllm", "cuda", None, True), ("vllm", "cpu", 0, True)],
)
def test_a_cold_start_is_that_of_the_slowest_worker_and_the_engine_tells_how_often(
    config: Config, tmp_path: Path, kind: str, device: str, sleep_level: int | None, *, parks: bool
) -> None:
    own = [] if sleep_level is None else [f"engine.vllm.sleep_level={sleep_level}"]
    changed = load_config(tmp_path / "run.toml", [f"engine.kind={kind}", *own])
    plan = plan_of_run(timed(tmp_path / "run", (4.0, 3.0, 6.0), device=device), changed)
    assert (plan.rollout_cold_s, plan.rollout_parks) == (60.0, parks)


@pytest.mark.parametrize(
    ("provider", "own", "level"),
    [("pool", [], 1), ("pool", ["sleep_level=0"], 0), ("pool", ["base=base"], None), ("spot", [], None)],
)
def test_vllm_sleeps_between_a_job_s_slices_unless_it_is_said_otherwise(
    config: Config, tmp_path: Path, provider: str, own: list[str], level: int | None
) -> None:
    vllm = load_config(tmp_path / "run.toml", ["engine.kind=vllm", *(f"engine.vllm.{one}" for one in own)])
    _, settings = resolve_engine(resolve(vllm, [provider], "test").config.engine, "test")
    assert isinstance(settings, VllmSettings)
    assert settings.sleep_level == level


def test_steps_that_the_trainer_s_other_engine_generated_are_not_timed(config: Config, tmp_path: Path) -> None:
    run = timed(tmp_path / "run", (4.0, 3.0, 6.0), starts=STARTS[2:])
    assert plan_of_run(run, config).rollout_cold_s == 0
    other = load_config(tmp_path / "run.toml", ["engine.kind=vllm", "trainer.engine.kind=torch"])
    with pytest.raises(JobProfileError, match="its 1 steps were over before its engine 'vllm' had started"):
        plan_of_run(run, other)


def test_one_step_is_better_than_none_and_none_is_said(config: Config, tmp_path: Path) -> None:
    assert plan_of_run(timed(tmp_path / "one", (4.0, 3.0, 6.0)), config).rollout_s == pytest.approx(8.0)
    with pytest.raises(JobProfileError, match="no step of it has finished"):
        plan_of_run(timed(tmp_path / "none"), config)


def test_what_is_overridden_is_a_run_of_its_own_workers(config: Config, tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    changed = load_config(path, profile_overrides(config, 4))
    assert (changed.run.steps, changed.seeding.policy, changed.seeding.window_s) == (4, "fixed", 0.0)
    assert changed.providers["reserved"]["max_workers"] == 2
