"""Checks a finished run against the result that follows from its seed.

If a disk has lost synced data, or a user has resumed a run that had failed, the run may have gone on from an earlier
moment. Then the weights that the trainer has in the end count.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

from elastic.compose.incarnations import replay
from elastic.core import commands as c
from elastic.core import events as e
from elastic.core.agreement import DISBELIEVED, LAST_TOKENS, LEAST_TOKENS
from elastic.core.evaluation import EvaluationRecord
from elastic.core.ids import drawn_from
from elastic.core.scheduler import Scheduler
from elastic.core.types import NS_PER_S, LogprobCheck, TrajectoryId, WorkerId
from elastic.protocol.sampled import ids_of
from elastic.report.history import history_of
from elastic.report.refusals import refused_of
from elastic.runtime.episodes import stable_hash
from elastic.runtime.journal import EvaluatedRow, EvaluationRow, GroupRow, StepRow, TrajectoryRow
from elastic.testing.faults.kinds import LASTING, FaultKind
from elastic.testing.faults.shell.agents.checker import check_agents, contexts_of
from elastic.testing.faults.shell.models import SKIPPED, ModelEnvironment, NoSettings, drawn, scored, turn_tokens
from elastic.testing.faults.shell.world import World

EVENTS_MAX, EVENTS_PER_INTERVAL = 200, 4
"""Events of one worker that lies and lies: its turns', and heartbeats."""
KNOWN_AFTER, KNOWN_AFTER_TURNS = 1.05, 4
"""When a Byzantine worker is known for one: how many times the limit of a token it was heard since it was given its
first turn, and how many turns others have finished since."""


def check_world(world: World) -> None:
    """Raise `AssertionError` with everything that is wrong."""
    plan, forgot = world.plan, world.disk.forgot
    if world.oracle.impostors and (world.result or "").endswith(DISBELIEVED):
        return
    require(world.result == "", f"the run failed: {world.result}")
    may_forget = plan.durable_against == "process" or plan.lying_disk
    require(may_forget or not forgot, "something final was lost with the power")
    require(not any(cloud.leases for cloud in world.clouds.values()), "a lease is left")
    require(not (halves := world.half_checkpoints()), f"half checkpoints: {halves}")
    touched, origins, core = _whose_tokens(world)
    _check_impostors(world, core)
    _check_lasting(world)
    lost = set(world.acknowledged) - core.controls.commands.keys()
    earlier = forgot or world.began_anew
    require(forgot or not lost, f"commands were acknowledged and are not known: {sorted(lost)}")
    with history_of(world.run) as history:
        require(earlier or len(history.segments) == 1, f"{len(history.segments)} segments")
        steps = [row.step for row in history.rows(StepRow)]
        groups = {row.group: row for row in history.rows(GroupRow)}
        rows = {row.trajectory: row for row in history.rows(TrajectoryRow)}
        evaluations = {row.version: row.record for row in history.rows(EvaluationRow)}
        rows |= {row.trajectory: row for row in history.rows(EvaluatedRow)}
        nothing_left = not history.segments[-1].rows(StepRow)
    if earlier:
        require(steps == sorted(set(steps)), f"steps {steps}")
        # The last checkpoint may have outlived what the journal said of the step before it.
        require(steps[-1:] == [plan.steps - 1] or nothing_left, f"steps {steps}")
    else:
        require(steps == list(range(plan.steps)), f"steps {steps}")
    require(world.weights.version == plan.steps, f"weights of version {world.weights.version}")
    learnt = [(step, group) for step, group, _ in world.weights.learnt]
    require(len(set(learnt)) == len(learnt), "a group is trained twice")
    if earlier:
        return
    _check_evaluations(world, evaluations)
    for row in rows.values():
        if not row.cause and row.trajectory not in touched and world.agents is None:
            _check_trajectory(world, row)
    if world.agents is not None:
        check_agents(world.agents.record, world.run, world.config, [*rows.values()], touched, by_functions=plan.scored)
    trained = {name for name, row in groups.items() if not row.dropped}
    require({group for _, group in learnt} == trained, "what was trained is not what was to be trained")
    for group in trained:
        for trajectory, taken in world.seen[group].origins.items():
            truth = origins[trajectory]
            if world.agents is not None:
                # Branches are in another order than their tokens came, and not all that came is an answer.
                require(_totals(taken) <= _totals(truth), f"{trajectory} is of {truth}, not of {taken}")
                continue
            require(taken == truth, f"{trajectory} is of {truth}, and the trainer was told that it is of {taken}")
    for step, group, what in world.weights.learnt:
        late = step - min(world.seen[group].versions, default=step)
        require(late <= plan.staleness_bound, f"{group} was trained on tokens that are {late} versions old")
        rewards = {row.trajectory: row.reward for row in rows.values() if row.group == group and row.reward is not None}
        require(world.seen[group].members == rewards, f"{group} has {rewards}, taken as {world.seen[group].members}")
        members = sorted((r for r in rows.values() if r.group == group), key=lambda r: r.trajectory)
        of_use = [row for row in members if row.reward is not None]
        parts = [p for row in of_use for ids in contexts_of(row) for p in (row.trajectory, *ids, row.reward)]
        require(drawn(*parts) == what, f"{group} was trained on something else")


def _check_evaluations(world: World, records: Mapping[int, EvaluationRecord]) -> None:
    """Check that each version was evaluated, in time. That its episodes are what the seed gives, whatever was killed,
    is checked of them as of others."""
    plan = world.plan
    versions = list(range(plan.steps + 1)) if plan.evaluates else []
    require(sorted(records) == versions, f"versions {sorted(records)} are evaluated, not {versions}")
    for version, record in records.items():
        (figures,) = record.sets.values()
        require(not record.timed_out, f"the evaluation of version {version} ran out of time")
        require(len(figures.rewards) == plan.evaluates, f"version {version} has {len(figures.rewards)} tasks")
        ended = figures.finished + figures.failed
        require(ended == 2 * plan.evaluates, f"of version {version} {ended} episodes have ended")


def _totals(origins: list[tuple[WorkerId, int]]) -> Counter[WorkerId]:
    totals: Counter[WorkerId] = Counter()
    for worker, tokens in origins:
        totals[worker] += tokens
    return totals


def require(holds: bool, found: str) -> None:
    if not holds:
        raise AssertionError(found)


def _whose_tokens(world: World) -> tuple[set[TrajectoryId], dict[TrajectoryId, list[tuple[WorkerId, int]]], Scheduler]:
    """Return the trajectories with tokens of a worker that lies, which may harm its own turns only, and who has made
    how many of each trajectory's accepted tokens, in their order.

    Replays the run for this; the replay must come to the same ledger, without a gap.
    """
    touched: set[TrajectoryId] = set()
    origins: dict[TrajectoryId, list[tuple[WorkerId, int]]] = {}

    def tell(_: int, event: e.Event, tokens: object, commands: Sequence[c.Command]) -> None:
        if not isinstance(event, e.TokensReceived):
            return
        chunks = list(event.chunks)
        accepted = (command for command in commands if isinstance(command, c.AcceptTokens))
        for turn, place in (pair for command in accepted for pair in zip(command.turns, command.chunks, strict=True)):
            trajectory = turn.rpartition("/")[0]
            if world.oracle.has_lied(event.worker):
                touched.add(trajectory)
            parts = origins.setdefault(trajectory, [])
            count = chunks[place].count + (parts.pop()[1] if parts and parts[-1][0] == event.worker else 0)
            parts += [(event.worker, count)] if count else []

    scheduler = replay(world.run, tell)
    require(scheduler.ledger.imbalance_ns() == 0, f"out by {scheduler.ledger.imbalance_ns()} ns")
    return touched, origins, scheduler


def _check_lasting(world: World) -> None:
    """Check that who lies for as long as it lives fills no journal, and that the report names it once it has had turns
    for long enough while others finished theirs. Other faults may be the cause of what it does."""
    scheduler = world.config.scheduler
    alone = all(fault.kind in LASTING or fault.kind is FaultKind.WEATHER for fault in world.plan.faults)
    with history_of(world.run) as history:
        named = {refused.worker for refused in refused_of(history) if refused.what != "report"}
    for worker, byzantine in world.oracle.lasting.items():
        lied_s = (world.clock.now_ns - byzantine.since_ns) / NS_PER_S
        events_max = EVENTS_MAX + EVENTS_PER_INTERVAL * lied_s / scheduler.heartbeat_interval_s
        require(byzantine.events <= events_max, f"{byzantine.events} events of {worker}, which lies and lies")
        served_s = (byzantine.heard_ns - byzantine.given_ns) / NS_PER_S
        others = byzantine.others_finished
        known = served_s > KNOWN_AFTER * scheduler.turn_stall_timeout_s and others >= KNOWN_AFTER_TURNS
        unnamed = alone and known and worker not in named
        require(not unnamed, f"nobody has named {worker}, which lies and lies and was given {byzantine.turns} turns")


def _check_impostors(world: World, core: Scheduler) -> None:
    """Check that each worker that generated with other weights than it named was found, and nobody else, and that from
    then on none of its tokens was trained on."""
    found = {mismatch.worker: mismatch for mismatch in core.agreement.mismatches}
    suspects = {worker for worker in found if not world.oracle.has_lied(worker)}
    require(suspects <= world.oracle.impostors.keys(), f"found wrong without a cause: {sorted(suspects)}")
    bound = world.config.trainer.mismatch_max
    learnt = {group for _, group, _ in world.weights.learnt}
    seen: dict[tuple[WorkerId, int], list[LogprobCheck]] = {}
    for group, made in world.seen.items():
        for check in made.checks.values() if group in learnt or group.startswith(SKIPPED) else ():
            seen.setdefault((check.worker, check.version), []).append(check)
            kept = check.worker in made.trained_on and check.mean > bound
            require(not kept, f"{group} was trained on tokens of {check.worker}, which are of other weights")
    for (worker, version), checks in seen.items():
        tokens, log_ratio = sum(check.tokens for check in checks), sum(check.log_ratio for check in checks)
        # Fewer than `LEAST_TOKENS` of former versions may have been counted besides. A mean that runs on over the last
        # tokens can hide as many that are wrong.
        besides = LEAST_TOKENS + (LAST_TOKENS if tokens > LAST_TOKENS else 0)
        plain = tokens >= LEAST_TOKENS and log_ratio > bound * (tokens + besides)
        require(not plain or worker in found, f"nobody has found {worker}, of {tokens} tokens of version {version}")
    for mismatch in found.values():
        later = [group for step, group, _ in world.weights.learnt if step > mismatch.version]
        after = [group for group in later if group in world.seen and mismatch.worker in world.seen[group].trained_on]
        require(not after, f"{after} were trained on tokens of {mismatch.worker}, which was found wrong before")


def _check_trajectory(world: World, row: TrajectoryRow) -> None:
    """Check that every token is the one that the seed gives for its position, and that the reward follows from them."""
    seed, (step, group, member) = world.config.run.seed, drawn_from(row.trajectory)
    environment, tokens = ModelEnvironment(NoSettings()), list[int]()
    tokens += environment.begin(stable_hash(seed, step, group))
    reward = 0.0
    for number in range(row.turns):
        noise = stable_hash(seed, step, group, member, number)
        turn = turn_tokens(noise, world.config.rollout.max_tokens_per_turn)
        tokens += turn
        result = environment.answer(turn)
        if result.done:
            reward = result.reward
        else:
            tokens += result.token_ids
    found = ids_of(row.token_ids)
    require(found == tokens or found == tokens[: len(found)], f"{row.trajectory}: {found} instead of {tokens}")
    if world.plan.scored:
        reward = scored(found)
    require(row.reward == reward, f"{row.trajectory}: reward {row.reward} instead of {reward}")
