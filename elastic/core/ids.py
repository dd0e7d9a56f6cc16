"""How things are named: the one place where identifiers are made of their parts and taken apart again.

lease       spot-3          the third that was asked of the provider `spot`
worker      spot-3, spot-3.1    the first and the second of that lease
group       2/5             the group with index 5 of training step 2
trajectory  2/5/0           its first member
turn        2/5/0/4         the fifth turn of that
evaluated   e10/3, e10/3/1  task 3 of the evaluation of version 10, and its second episode
agent       2-5-0           that trajectory in an address, for an agent
env worker  chat_1          the second process that plays episodes of the environment `chat`
"""

import hashlib
import re
from typing import NamedTuple

from elastic.core.types import LeaseId, TrajectoryId, TurnId, WorkerId

EVALUATED = "e"
"""How the names begin of what is not trained on, but evaluated."""
GROUP = re.compile(rf"{EVALUATED}?[0-9]+/[0-9]+", re.ASCII)
DRAWN_FOR_EVALUATION = -1
"""Stands for the step in what episodes of evaluations are drawn from: the same for every version."""


class Member(NamedTuple):
    """The place of a trajectory: a training step, the index of a group in it, and the member's number in the group. Of
    an evaluation the step is the version, and the group the task."""

    step: int
    group: int
    member: int


def lease_id(provider: str, number: int) -> LeaseId:
    return f"{provider}-{number}"


def parse_lease(lease: LeaseId) -> tuple[str, int]:
    """The provider and the number of a lease, counted from 1. Raises `ValueError` for what is no lease's name."""
    provider, _, number = lease.rpartition("-")
    if not provider or not number.isdecimal():
        raise ValueError(f"{lease!r} is not the name of a lease")
    return provider, int(number)


def worker_id(lease: LeaseId, number: int) -> WorkerId:
    """The lease's worker with this number, counted from 0."""
    return f"{lease}.{number}" if number else lease


def lease_of(worker: WorkerId) -> LeaseId:
    provider, dash, rest = worker.rpartition("-")
    return provider + dash + rest.partition(".")[0]


def provider_of(worker: WorkerId) -> str:
    """The provider of a worker, or of a lease."""
    return worker.rpartition("-")[0]


def group_id(step: int, group: int) -> str:
    return f"{step}/{group}"


def evaluated_group_id(version: int, task: int) -> str:
    return f"{EVALUATED}{version}/{task}"


def trajectory_id(step: int, group: int, member: int, *, evaluation: bool = False) -> TrajectoryId:
    return f"{EVALUATED if evaluation else ''}{step}/{group}/{member}"


def is_group(name: str) -> bool:
    """Whether it is the name of a group, or of a task of an evaluation."""
    return GROUP.fullmatch(name) is not None


def is_evaluated(name: str) -> bool:
    """Whether a group, a trajectory or a turn is of an evaluation."""
    return name.startswith(EVALUATED)


def parse_trajectory(trajectory: TrajectoryId) -> Member:
    """Raises `ValueError` for what is no trajectory's name."""
    step, group, member = trajectory.removeprefix(EVALUATED).split("/")
    return Member(int(step), int(group), int(member))


def drawn_from(trajectory: TrajectoryId) -> Member:
    """What an episode and its sampling noise are drawn from besides the run's seed. Of an evaluation that is the same
    whichever version is evaluated, and never that of a trajectory which is trained on."""
    member = parse_trajectory(trajectory)
    return member._replace(step=DRAWN_FOR_EVALUATION) if is_evaluated(trajectory) else member


def agent_id(trajectory: TrajectoryId) -> str:
    """The trajectory's name where a slash would not do: in an address and in a key."""
    return trajectory.replace("/", "-")


def parse_agent_id(name: str) -> TrajectoryId:
    """Raises `ValueError` for what is no trajectory's name."""
    trajectory = name.replace("-", "/")
    return trajectory_id(*parse_trajectory(trajectory), evaluation=is_evaluated(trajectory))


def group_of(trajectory: TrajectoryId) -> str:
    return trajectory.rpartition("/")[0]


def turn_id(trajectory: TrajectoryId, number: int) -> TurnId:
    return f"{trajectory}/{number}"


def parse_turn(turn: TurnId) -> tuple[TrajectoryId, int]:
    """The trajectory of a turn and the turn's number in it, counted from 0. Raises `ValueError` for what is no turn."""
    trajectory, _, number = turn.rpartition("/")
    return trajectory, int(number)


def env_worker_id(environment: str, number: int) -> str:
    """The process with this number, counted from 0, of those that play episodes of an environment."""
    return f"{environment}_{number}"


def environment_of(env_worker: str) -> str:
    """The environment of an env worker; empty for what is no env worker's name."""
    return env_worker.rpartition("_")[0]


def turn_of(name: str) -> TurnId:
    """The turn whose `agent_id` this is, if it is one's."""
    return name.replace("-", "/")


def tagged(run: str, secret: str) -> str:
    """Return the run's name with a hash of a secret that no other run has."""
    return f"{run}-{hashlib.sha256(secret.encode()).hexdigest()[:8]}"
