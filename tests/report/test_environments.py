"""Figures by environment: what one came to is counted with it alone, in journals, reports and loggers."""

import msgspec

from elastic.core.steps import CUT_OFF
from elastic.report.environments import environments_of
from elastic.report.tracking.rows import figures_by_environment
from elastic.runtime.journal import GroupRow, StepRow, TrajectoryRow
from elastic.runtime.status import EnvironmentStatus, EnvironmentStep
from tests.report.test_tracking import group, step_row, trajectory


def of(environment: str, *rows: TrajectoryRow) -> list[TrajectoryRow]:
    return [msgspec.structs.replace(row, environment=environment) for row in rows]


def test_what_a_run_came_to_is_told_of_each_environment() -> None:
    trajectories = [
        *of("lake", trajectory("0/0/0", 1.0, tokens=7), trajectory("0/0/1", 0.0, truncated=True)),
        *of("lake", trajectory("0/0/2", None, CUT_OFF)),
        *of("chat", trajectory("0/1/0", 0.5), trajectory("0/1/1", None, "it hung", tokens=3)),
    ]
    groups: list[GroupRow] = [
        msgspec.structs.replace(group("0/0"), environment="lake"),
        msgspec.structs.replace(group("0/1", dropped="stale: old"), environment="chat"),
    ]
    status = {
        "lake": EnvironmentStatus(groups=2, cut_off=3),
        "chat": EnvironmentStatus(groups=1, begun_again=2, lost_tokens=90),
    }
    lake, chat = environments_of(trajectories, groups, status)
    assert (lake.environment, lake.groups, lake.groups_trained, lake.groups_dropped) == ("lake", 2, 1, 0)
    assert (lake.finished, lake.truncated, lake.failed, lake.cut_off) == (2, 1, 0, 3)
    assert (lake.success_rate, lake.mean_reward, lake.policy_tokens, lake.trained_tokens) == (0.5, 0.5, 9, 15)
    assert (chat.finished, chat.failed, chat.groups_dropped, chat.trained_tokens) == (1, 1, 1, 0)
    assert (chat.begun_again, chat.lost_tokens) == (2, 90)
    assert environments_of(of("", trajectory("0/0/0", 1.0)), [], {}) == [], "of older runs nobody knows it"


def test_loggers_get_a_steps_figures_of_each_environment() -> None:
    by_name = {
        "lake": EnvironmentStep(trajectories=3, failed=1, success_rate=1 / 3, mean_reward=0.5, groups_trained=1),
        "chat": EnvironmentStep(failed=2),
    }
    row: StepRow = msgspec.structs.replace(step_row(0), environments=by_name)
    assert figures_by_environment(row) == {
        "critic/rewards/mean/lake": 0.5,
        "elastic/success_rate/lake": 1 / 3,
        "has_error/mean/lake": 0.25,
        "elastic/groups_trained/lake": 1.0,
        "elastic/groups_dropped/lake": 0.0,
        "has_error/mean/chat": 1.0,
        "elastic/groups_trained/chat": 0.0,
        "elastic/groups_dropped/chat": 0.0,
    }
