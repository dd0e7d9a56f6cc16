"""What a run has come to, held against what it had to come to. Everything here follows from the seed alone."""

from typing import TYPE_CHECKING

import msgspec

from elastic.chaos.models import ModelEnvironment, NoSettings, drawn, turn_tokens
from elastic.compose import replay
from elastic.core.ids import parse_trajectory
from elastic.report.history import history_of
from elastic.runtime.journal import GroupRow, StepRow, TrajectoryRow
from elastic.runtime.rollout import stable_hash

if TYPE_CHECKING:
    from elastic.chaos.world import World


def judge(world: "World") -> None:
    """Raises `AssertionError` that names what is wrong."""
    plan = world.plan
    require(world.result == "", f"the run failed: {world.result}")
    require(not any(cloud.leases for cloud in world.clouds.values()), "a lease is left")
    scheduler = replay(world.run)
    require(scheduler.ledger.imbalance_ns() == 0, f"out by {scheduler.ledger.imbalance_ns()} ns")
    with history_of(world.run) as history:
        require(len(history.lives) == 1, f"{len(history.lives)} lives")
        steps = [row.step for row in history.rows(StepRow)]
        groups = history.rows(GroupRow)
        rows = {row.trajectory: row for row in history.rows(TrajectoryRow)}
    require(steps == list(range(plan.steps)), f"steps {steps}")
    for row in rows.values():
        if not row.cause:
            _check_trajectory(world, row)
    trained = {row.group: row for row in groups if not row.dropped}
    learnt = [(step, group) for step, group, _ in world.weights.learnt]
    require(len(set(learnt)) == len(learnt), "a group is trained twice")
    require({group for _, group in learnt} == set(trained), "what was trained is not what was to be trained")
    require(world.weights.version == plan.steps, f"weights of version {world.weights.version}")
    for _, group, what in world.weights.learnt:
        members = sorted((r for r in rows.values() if r.group == group), key=lambda r: r.trajectory)
        of_use = [row for row in members if row.reward is not None]
        parts = [p for row in of_use for p in (row.trajectory, *msgspec.msgpack.decode(row.token_ids), row.reward)]
        require(drawn(*parts) == what, f"{group} was trained on something else")


def require(holds: bool, found: str) -> None:
    if not holds:
        raise AssertionError(found)


def _check_trajectory(world: "World", row: TrajectoryRow) -> None:
    """Every token is the one that the seed has for its place, and the reward follows from them."""
    seed, (step, group, member) = world.config.run.seed, parse_trajectory(row.trajectory)
    environment, tokens = ModelEnvironment(NoSettings()), list[int]()
    tokens += environment.begin(stable_hash(seed, step, group))
    for number in range(row.turns):
        noise = stable_hash(seed, step, group, member, number)
        turn = turn_tokens(noise, world.config.rollout.max_tokens_per_turn)
        tokens += turn
        result = environment.answer(turn)
        if result.done:
            require(result.reward == row.reward, f"{row.trajectory}: reward {row.reward}")
        else:
            tokens += result.token_ids
    found = msgspec.msgpack.decode(row.token_ids, type=list[int])
    require(found == tokens or found == tokens[: len(found)], f"{row.trajectory}: {found} instead of {tokens}")
