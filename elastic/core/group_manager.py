"""Groups of trajectories: launched as far ahead as the staleness bound allows, finished, dropped or handed on.

Source: ROSE §4.2 (workflow of a step), §6 (dynamic sampling); RollArt mechanism 2 (asynchrony); docs/design.md,
invariant 4.
"""

import math
from collections.abc import Sequence

from elastic.core import commands as c
from elastic.core import events as e
from elastic.core.evaluation_manager import EvaluationManager
from elastic.core.mixing import next_of
from elastic.core.policy import BatchView
from elastic.core.reward_manager import RewardManager
from elastic.core.rows import RowProgress
from elastic.core.run_state import Changed, Deadlines, Handlers, RunState
from elastic.core.steps import CUT_OFF, BatchRule, Group, Step
from elastic.core.turn_manager import TurnManager
from elastic.core.types import GroupState, InfrastructureCause, TrajectoryId

INFRASTRUCTURE = "infrastructure"
"""How the reason begins for dropping a group too few of whose members came to a reward."""
MIN_GROUP_SIZE = 2
"""An advantage is relative to the rest of the group; one trajectory alone has none (GRPO)."""


class GroupManager:
    def __init__(
        self, run: RunState, turns: TurnManager, rewards: RewardManager, evaluations: EvaluationManager
    ) -> None:
        self._run = run
        self._turns = turns
        self._rewards = rewards
        self._evaluations = evaluations
        self.handlers: Handlers = {
            e.TurnRequested: self._on_turn_requested,
            e.TrajectoryFinished: self._on_trajectory_finished,
            e.TrajectoryFailed: self._on_trajectory_failed,
            e.RewardRequested: self._on_reward_requested,
        }
        self.due: Deadlines = {}

    # Trajectories

    def _member(self, trajectory: TrajectoryId) -> tuple[Step, Group] | None:
        """The step and group of a trajectory that may still go on."""
        step = self._run.step
        group = step.group_of(trajectory) if step else None
        if step is None or group is None or group.state is not GroupState.RUNNING:
            return None
        return (step, group) if group.members[trajectory] is None else None

    def _on_turn_requested(self, event: e.TurnRequested) -> Changed:
        oldest_version = self._oldest_version_for(event.trajectory)
        if oldest_version is None or not self._run.active:
            self._run.out.append(c.CancelTrajectory(trajectory=event.trajectory, cause="it is over"))
        elif event.trajectory not in self._rewards.scorings:
            self._turns.request(event, oldest_version)
        return Changed.ROOM

    def _oldest_version_for(self, trajectory: TrajectoryId) -> int | None:
        """The oldest version that a turn of the trajectory may have tokens of; None where it may not go on."""
        if (evaluated := self._evaluations.version_of(trajectory)) is not None:
            return evaluated
        if self._run.serving is not None:
            return self._run.version or 0
        member = self._member(trajectory)
        return None if member is None else max(member[1].version_floor, self._run.oldest_version)

    def _on_trajectory_finished(self, event: e.TrajectoryFinished) -> None:
        reward, member = float(event.reward), self._member(event.trajectory)
        if member is not None and event.by_policy:
            member[1].by_policy[event.trajectory] = event.by_policy
        self._end_trajectory(event.trajectory, reward if math.isfinite(reward) else f"reward was {reward}")

    def _on_trajectory_failed(self, event: e.TrajectoryFailed) -> None:
        infrastructure = self._run.turns.given_up(event.trajectory)
        self._end_trajectory(event.trajectory, event.cause or "unknown cause", infrastructure)

    def _on_reward_requested(self, event: e.RewardRequested) -> None:
        if self._run.active:
            self._evaluations.request_reward(event.trajectory)
        member = self._member(event.trajectory)
        if member is not None and self._run.active:
            self._end_turns(member[1], event.trajectory, "the trajectory is being scored")
            self._rewards.request(event.trajectory)

    def take_rewards(self) -> None:
        """End the trajectories of which it is known by now what scoring them has come to."""
        for scored in self._rewards.take_outcomes():
            self._end_trajectory(*scored)

    def _end_trajectory(
        self, trajectory: TrajectoryId, outcome: float | str, infrastructure: InfrastructureCause | None = None
    ) -> None:
        self._evaluations.end(trajectory, outcome)
        member = self._member(trajectory)
        if member is None:
            return
        step, group = member
        refilled = infrastructure is not None and self._may_refill(step, group, trajectory)
        if refilled:
            self._turns.cancel(trajectory, "the trajectory is replaced")
        else:
            self._end_turns(group, trajectory, "the trajectory ended")
        self._rewards.forget((trajectory,))
        step.end(group, trajectory, outcome)
        self._run.outcomes.now.note(outcome)
        if infrastructure is not None and refilled:
            self._refill(step, group, trajectory, infrastructure)
        elif not group.unfinished or group.has_enough:
            self._cut_off(step, group)
            self._complete(step, group)

    def _cut_off(self, step: Step, group: Group) -> None:
        """End the members that still run: their group has as many as are wanted."""
        for trajectory in group.unfinished:
            self._rewards.forget((trajectory,))
            self._turns.cancel(trajectory, CUT_OFF)
            step.end(group, trajectory, CUT_OFF)
            self._run.outcomes.note_cut_off(group.environment)
            self._run.out.append(c.CancelTrajectory(trajectory=trajectory, cause=CUT_OFF))

    def _may_refill(self, step: Step, group: Group, trajectory: TrajectoryId) -> bool:
        """Whether another member may come in this one's place: while others of the step are under way, and the group
        does not already have to be trained on in this one of several steps."""
        run = self._run
        if not run.active or step.unended == 1 or group.times_refilled(trajectory) >= run.plan.refill_most:
            return False
        oldest = group.oldest_token
        lasts = run.plan.staleness_bound == 0 or run.drops_tokens
        return lasts or oldest is None or oldest > run.oldest_version

    def _refill(self, step: Step, group: Group, trajectory: TrajectoryId, cause: InfrastructureCause) -> None:
        further = step.refill(group, trajectory, cause)
        self._run.outcomes.note_refill(cause)
        self._run.out.append(c.RefillMember(trajectory=further, replaces=trajectory, cause=cause))

    def _end_turns(self, group: Group, trajectory: TrajectoryId, cause: str) -> None:
        turns = self._run.turns
        group.note_tokens(trajectory, turns.oldest_token(trajectory), turns.newest_token(trajectory))
        self._turns.cancel(trajectory, cause)

    # Groups

    def rollouts_to_do(self) -> bool:
        """Whether any trajectory in play may still ask for a turn, or the end of one have others launched."""
        step, evaluation = self._run.step, self._run.evaluation
        evaluated = 0 if evaluation is None else evaluation.unended
        if step is None and evaluation is None:
            return True
        if step is not None and step.taking is not BatchRule.ALL:
            return step.count(GroupState.RUNNING) + evaluated > 0
        return (0 if step is None else step.unended) + evaluated > len(self._rewards.scorings)

    def launch(self, step: Step) -> None:
        """Launch as many groups as the sampling policy wants, for this step and for steps that may run ahead.

        A group's place in launch order gives the version at which it would be trained; the staleness bound then gives
        the oldest version that its tokens may have.
        """
        run = self._run
        if run.between_steps:
            return
        ahead = min(run.plan.staleness_bound, run.plan.steps - 1 - step.number)
        running = step.count(GroupState.RUNNING)
        view = BatchView(
            wanted=(1 + ahead) * step.size,
            launched=step.launched,
            running=running,
            finished=step.finished,
            rejected=step.rejected,
        )
        in_order = running + step.finished + step.rejected
        for place in range(in_order, in_order + run.policies.sampling.launches(view, run.history)):
            trained_at = step.version + place // step.size
            floor = min(step.version, trained_at - run.plan.staleness_bound)
            chosen = next_of([one.ratio for one in run.plan.environments], run.launched_of)
            environment = run.plan.environments[chosen]
            wanted = run.plan.group_size
            begin = environment.members or wanted
            row = self._next_row(environment.name)
            group = step.launch(begin, floor, environment.name, wanted if begin > wanted else 0, row)
            run.out.append(
                c.StartGroup(
                    step=step.number,
                    group=group.id,
                    index=group.index,
                    trajectories=tuple(group.members),
                    number=run.groups_launched,
                    environment=environment.name,
                    place=run.launched_of[chosen],
                    row=row,
                )
            )
            run.groups_launched += 1
            run.launched_of[chosen] += 1

    def _next_row(self, environment: str) -> int | None:
        """The row of the environment's next group, where a curriculum chooses it. Raises `PolicyFault`."""
        curriculum = self._run.policies.curricula.get(environment)
        return (
            None if curriculum is None else self._run.rows.setdefault(environment, RowProgress()).next_row(curriculum)
        )

    def _note_row(self, group: Group) -> None:
        """Its curriculum hears what the group has come to."""
        if group.row is not None and (finished := group.finished):
            self._run.rows[group.environment].note(group.row, sum(finished.values()) / len(finished))

    def _complete(self, step: Step, group: Group) -> None:
        """All its members have ended: it is worth training on, or others may have to make up for it."""
        self._note_row(group)
        reason = self._why_of_no_use(group)
        if reason is None and group.overtaken(self._run.oldest_version):
            self.drop_all(step, [group], self._stale(step, group.oldest_token))
        elif reason is not None:
            step.reject(group, self._run.now_ns, reason)
            self._tell_dropped(step, group)
        else:
            step.move(group, GroupState.READY, self._run.now_ns, "all members finished")
        self.launch(step)

    def _why_of_no_use(self, group: Group) -> str | None:
        if len(group.finished) < MIN_GROUP_SIZE:
            return f"{INFRASTRUCTURE}: {'; '.join(group.failures)}"
        reasons = [self._run.policies.selection.drop_reason(rewards) for rewards in group.compared]
        return None if None in reasons else reasons[0]

    def drop_stale(self, step: Step) -> None:
        """Drop what can no longer be trained on within the bound, whatever version it began with (invariant 4). A group
        that lasts may have tokens which the trainer is told to leave out."""
        oldest_version = self._run.oldest_version
        self._run.turns.require(oldest_version)
        for group in step.in_play():
            oldest = self._oldest_token(group)
            if oldest is None or oldest >= oldest_version:
                continue
            if not self._run.drops_tokens or (not group.unfinished and group.overtaken(oldest_version)):
                self.drop_all(step, [group], self._stale(step, oldest))

    def _stale(self, step: Step, oldest: int | None) -> str:
        return f"stale: tokens of version {oldest}, the trainer is at {step.version}"

    def _oldest_token(self, group: Group) -> int | None:
        tokens = [self._run.turns.oldest_token(trajectory) for trajectory in group.unfinished]
        return min((version for version in (group.oldest_token, *tokens) if version is not None), default=None)

    def drop_surplus(self, step: Step) -> None:
        """The batch is complete; in synchronous training no later step may have what is left."""
        if step.taking is BatchRule.FIRST_OF_USE and self._run.plan.staleness_bound == 0:
            self.drop_all(step, step.surplus(), "surplus: the step has its groups")

    def drop_all(self, step: Step, groups: Sequence[Group], reason: str) -> None:
        """Drop groups that are not to be trained on, with all that still runs for them."""
        self._rewards.forget([trajectory for group in groups for trajectory in group.unfinished])
        for group in groups:
            step.drop(group, self._run.now_ns, reason)
            self._tell_dropped(step, group)
            for trajectory in group.unfinished:
                self._end_turns(group, trajectory, reason)
                self._run.out.append(c.CancelTrajectory(trajectory=trajectory, cause=reason))

    def _tell_dropped(self, step: Step, group: Group) -> None:
        self._run.out.append(
            c.DropGroup(
                group=group.id,
                trajectories=tuple(group.members),
                step=step.number,
                slot=group.slot,
                reason=group.drop_reason,
            )
        )
