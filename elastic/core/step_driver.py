"""Steps: groups are launched, finished, trained or dropped, and the trainer's device is used for what is due.

Source: ROSE §4.2 (workflow of a step); RLBoost §4.1 (seeding).
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

from elastic.core import commands as c
from elastic.core import events as e
from elastic.core.policy import StepRecord
from elastic.core.reward_desk import RewardDesk
from elastic.core.run_state import Phase, RunState
from elastic.core.steps import Group, Step
from elastic.core.trainer_device import TrainerDevice, TrainerMode
from elastic.core.turn_desk import TurnDesk
from elastic.core.types import GroupState, TrajectoryId
from elastic.core.worker_desk import WorkerDesk

MIN_GROUP_SIZE = 2
"""An advantage is relative to the rest of the group; one trajectory alone has none (GRPO)."""


class StepDriver:
    def __init__(
        self, run: RunState, turns: TurnDesk, workers: WorkerDesk, rewards: RewardDesk, device: TrainerDevice
    ) -> None:
        self._run = run
        self._turns = turns
        self._workers = workers
        self._rewards = rewards
        self._device = device
        self._reseed = False
        self.history: list[StepRecord] = []
        self.seeding_plan = run.policies.seeding.first()
        self.handlers: Mapping[type[e.Event], Callable[[Any], None]] = {
            e.TurnRequested: self._on_turn_requested,
            e.TrajectoryFinished: self._on_trajectory_finished,
            e.TrajectoryFailed: self._on_trajectory_failed,
            e.RewardRequested: self._on_reward_requested,
            e.GroupTrained: self._on_group_trained,
            e.WeightsPublished: self._on_published,
        }
        self.due: Mapping[str, Callable[[str], None]] = {
            "seeding": lambda _: None,
            "reseed": self._reseed_due,
        }

    # Trajectories and groups

    def _member(self, trajectory: TrajectoryId) -> tuple[Step, Group] | None:
        """The step and group of a trajectory that may still go on."""
        step = self._run.step
        group = step.group_of(trajectory) if step else None
        if step is None or group is None or group.state is not GroupState.RUNNING:
            return None
        return (step, group) if group.members[trajectory] is None else None

    def _on_turn_requested(self, event: e.TurnRequested) -> None:
        if self._member(event.trajectory) is None or not self._run.active:
            self._run.out.append(c.CancelTrajectory(trajectory=event.trajectory, cause="it is over"))
        elif event.trajectory not in self._rewards.scorings:
            self._turns.request(event)

    def _on_trajectory_finished(self, event: e.TrajectoryFinished) -> None:
        reward = float(event.reward)
        self._end_trajectory(event.trajectory, reward if math.isfinite(reward) else f"reward was {reward}")

    def _on_trajectory_failed(self, event: e.TrajectoryFailed) -> None:
        self._end_trajectory(event.trajectory, event.cause or "unknown cause")

    def _on_reward_requested(self, event: e.RewardRequested) -> None:
        if self._member(event.trajectory) is not None and self._run.active:
            self._turns.cancel(event.trajectory, "the trajectory is being scored")
            self._rewards.request(event.trajectory)

    def _end_trajectory(self, trajectory: TrajectoryId, outcome: float | str) -> None:
        member = self._member(trajectory)
        if member is None:
            return
        step, group = member
        self._turns.cancel(trajectory, "the trajectory ended")
        self._rewards.forget(trajectory)
        group.members[trajectory] = outcome
        if not group.unfinished:
            self._group_complete(step, group)

    def _group_complete(self, step: Step, group: Group) -> None:
        rewards = list(group.finished.values())
        if len(rewards) < MIN_GROUP_SIZE:
            reason: str | None = f"infrastructure: {'; '.join(group.failures)}"
        else:
            reason = self._run.policies.selection.drop_reason(rewards)
        if reason is None:
            step.move(group, GroupState.READY, self._run.now_ns, "all members finished")
        else:
            step.drop(group, self._run.now_ns, reason)
            self._run.out.append(c.DropGroup(group=group.id, reason=reason))

    def _on_group_trained(self, event: e.GroupTrained) -> None:
        step = self._run.step
        if step is not None and event.group == self._device.training:
            self._device.done()
            step.move(step.groups[event.group], GroupState.TRAINED, self._run.now_ns, "trained")

    def take_rewards(self) -> None:
        """End the trajectories of which it is known by now what scoring them has come to."""
        for trajectory, outcome in self._rewards.take_outcomes():
            self._end_trajectory(trajectory, outcome)

    # The step

    def advance(self) -> None:
        """Move the trainer's device between generating and training, and the step towards its end."""
        run = self._run
        if run.phase is Phase.STARTING and self._device.mode is TrainerMode.AWAKE:
            self._begin()
        step = run.step
        if step is None or not run.active:
            return
        if step.rollouts_done and step.rollout_ended_ns is None:
            step.rollout_ended_ns = run.now_ns
        helped = run.fleet.helped(run.oldest_version)
        if self._device.mode is TrainerMode.AWAKE:
            self._end_seeding_if_due(step, helped)
        elif self._device.mode is TrainerMode.ASLEEP:
            self._use_sleeping_device(step, helped)
        self._measure(step)

    def _use_sleeping_device(self, step: Step, helped: bool) -> None:
        needed = self._needs_reseeding(helped)
        if step.updating or not self._device.free:
            return
        if needed:
            self._wake()
        else:
            self._train_next(step)

    def _measure(self, step: Step) -> None:
        run = self._run
        step.meter.look(
            run.now_ns,
            training=run.timers.waiting("training", "trainer"),
            waiting=self._device.free and not step.rollouts_done,
            workers=run.fleet.helping_workers,
            credits=run.fleet.helping_credits,
        )

    def _begin(self) -> None:
        """The trainer is there: its weights are the run's, and version v means that v steps are done."""
        run, trainer = self._run, self._run.fleet.trainer
        assert trainer is not None
        assert trainer.version is not None
        run.phase = Phase.RUNNING
        run.timers.clear("start", "run")
        run.version = trainer.version
        self._workers.ensure_weights_everywhere()
        self._start_step(trainer.version)

    def _start_step(self, number: int) -> None:
        run = self._run
        assert run.version is not None
        if number >= run.plan.steps:
            run.over = True
            return
        run.step = Step(number, run.version, run.plan.groups, run.plan.group_size, run.now_ns)
        run.wait("seeding", "trainer", self.seeding_plan.window_ns)
        if self._device.mode is TrainerMode.ASLEEP:
            self._wake()
        for group in run.step.groups.values():
            run.out.append(
                c.StartGroup(step=number, group=group.id, index=group.index, trajectories=tuple(group.members))
            )

    def _end_seeding_if_due(self, step: Step, helped: bool) -> None:
        """The window ends by time, but not while nobody else could go on; with the last trajectory in any case."""
        run = self._run
        window_over = not run.timers.waiting("seeding", "trainer")
        if not step.rollouts_done and not (window_over and helped):
            return
        if step.seeding_ended_ns is None:
            step.seeding_ended_ns = run.now_ns
        run.timers.clear("seeding", "trainer")
        self._device.rest("seeding ends")

    def _needs_reseeding(self, helped: bool) -> bool:
        """Turns wait and nobody else can take them: the trainer's device takes them back after a short delay."""
        if helped or self._run.turns.head() is None:
            self._forget_reseeding()
        elif not self._reseed and not self._run.timers.waiting("reseed", "queue"):
            self._run.wait("reseed", "queue", self._run.limits.reseed_delay_ns)
        return self._reseed

    def _wake(self) -> None:
        self._forget_reseeding()
        self._device.wake()

    def _forget_reseeding(self) -> None:
        self._reseed = False
        self._run.timers.clear("reseed", "queue")

    def _reseed_due(self, _: str) -> None:
        self._reseed = True

    def _train_next(self, step: Step) -> None:
        group = step.first(GroupState.READY)
        if group is not None:
            step.move(group, GroupState.TRAINING, self._run.now_ns, "sent to the trainer")
            self._device.train(group)
        elif step.settled:
            step.updating = True
            self._device.update(step.number, step.version + 1)

    def _on_published(self, event: e.WeightsPublished) -> None:
        run, step, trainer = self._run, self._run.step, self._run.fleet.trainer
        if step is None or trainer is None or not run.active:
            return
        if not step.updating or event.version != step.version + 1:
            return
        self._device.done()
        trainer.version = run.version = event.version
        run.fleet.reindex(trainer)
        self._conclude(step)
        run.step = None
        self._workers.ensure_weights_everywhere()
        self._start_step(step.number + 1)

    def _conclude(self, step: Step) -> None:
        """The step is over: what it taught decides how the next one seeds, and how many workers are worth having."""
        run = self._run
        self._measure(step)
        record = _record(step, run.now_ns)
        self.history.append(record)
        self.seeding_plan = run.policies.seeding.following(self.seeding_plan, record)
        run.leases.worker_bound = self.seeding_plan.worker_bound

    def abandon(self, reason: str) -> None:
        """The run is over: what is not trained yet never will be."""
        run = self._run
        for what, key in (("start", "run"), ("seeding", "trainer"), ("reseed", "queue")):
            run.timers.clear(what, key)
        self._device.abandon()
        self._rewards.forget_all()
        self._turns.cancel_all(reason)
        if run.step is None:
            return
        for group in run.step.in_state(GroupState.RUNNING):
            run.out += [c.CancelTrajectory(trajectory=t, cause=reason) for t in group.unfinished]
        for group in run.step.in_state(GroupState.RUNNING) + run.step.in_state(GroupState.READY):
            run.step.drop(group, run.now_ns, reason)


def _record(step: Step, now_ns: int) -> StepRecord:
    rollout_ended_ns = step.rollout_ended_ns or now_ns
    duration_ns, meter = now_ns - step.started_ns, step.meter
    return StepRecord(
        step=step.number,
        duration_ns=duration_ns,
        seeding_ns=(step.seeding_ended_ns or rollout_ended_ns) - step.started_ns,
        rollout_ns=rollout_ended_ns - step.started_ns,
        groups_trained=step.count(GroupState.TRAINED),
        groups_dropped=step.count(GroupState.DROPPED),
        train_ns=meter.train_ns,
        train_wait_ns=meter.train_wait_ns,
        remote_wait_ns=now_ns - rollout_ended_ns,
        workers_mean=meter.worker_ns / max(1, duration_ns),
        workers_end=meter.workers,
        credits_mean=meter.credit_ns / max(1, duration_ns),
        credits_end=meter.credits,
    )
