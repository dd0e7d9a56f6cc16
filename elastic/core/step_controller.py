"""Steps: from launching their groups to publishing their weights, and what the trainer's device is used for.

Source: ROSE §4.2 (workflow of a step); RLBoost §4.1 (seeding); docs/design.md, "The trainer's device".
"""

from collections.abc import Sequence

from msgspec import UNSET

from elastic.core import commands as c
from elastic.core import events as e
from elastic.core.evaluation_manager import EvaluationManager
from elastic.core.group_manager import INFRASTRUCTURE, GroupManager
from elastic.core.mixing import counts_before
from elastic.core.outcomes import counted, in_words
from elastic.core.policy import StepRecord
from elastic.core.reward_manager import RewardManager
from elastic.core.run_state import Deadlines, Handlers, Phase, RunState
from elastic.core.serving_manager import ServingManager
from elastic.core.steps import BatchRule, Step
from elastic.core.trainer_device import TrainerDevice, TrainerMode
from elastic.core.trainer_permit import PermitState, TrainerPermit
from elastic.core.turn_manager import TurnManager
from elastic.core.turns import Turn
from elastic.core.types import EndCause, GroupState, LogprobCheck, WorkerState
from elastic.core.worker_manager import WorkerManager

_COMING = (WorkerState.BOOTING, WorkerState.DETACHED)
"""States of the trainer's worker in which its work is unknown, and in which it may have to catch up."""


class StepController:
    def __init__(
        self,
        run: RunState,
        turns: TurnManager,
        workers: WorkerManager,
        rewards: RewardManager,
        groups: GroupManager,
        evaluations: EvaluationManager,
        device: TrainerDevice,
        permit: TrainerPermit,
        serving: ServingManager,
    ) -> None:
        self._run = run
        self._turns = turns
        self._workers = workers
        self._rewards = rewards
        self._groups = groups
        self._evaluations = evaluations
        self._device = device
        self._permit = permit
        self._serving = serving
        self._reseed = False
        self._told_progress: tuple[int, int, int] | None = None
        self.seeding_plan = run.policies.seeding.first()
        run.leases.worker_bound = self.seeding_plan.worker_bound
        self.handlers: Handlers = {
            e.GroupTrained: self._on_group_trained,
            e.WeightsPublished: self._on_published,
            e.VersionRefused: self._on_offer_refused,
            e.TrainerFailed: self._on_trainer_failed,
        }
        self.due: Deadlines = {
            "seeding": lambda _: None,
            "reseed": self._reseed_due,
        }

    def _on_group_trained(self, event: e.GroupTrained) -> None:
        step = self._run.step
        if self._run.heard_from_trainer(event.worker, event.epoch) is None:
            return
        if step is not None and event.group == self._device.training and self._counts:
            self._device.done()
            step.move(step.groups[event.group], GroupState.TRAINED, self._run.now_ns, "trained")
            self._compare(event.checks)

    def _compare(self, checks: Sequence[LogprobCheck]) -> None:
        """Bar workers whose tokens are not of the weights that they name."""
        run = self._run
        for mismatch in run.agreement.note(checks, run.plan.mismatch_max):
            run.warn("Mismatch", str(mismatch))
            worker = run.fleet.workers.get(mismatch.worker)
            if worker is not None and worker.state is not WorkerState.GONE:
                self._workers.bar(worker, EndCause.MISMATCHED, str(mismatch))

    def advance(self) -> None:
        """Move the trainer's device between generating and training, and the step towards its end."""
        self._advance()
        if self._run.active and self._permit.needed:
            self._follow_permit()

    def _advance(self) -> None:
        run = self._run
        if run.phase is Phase.STARTING and self._trainer_is_there(self._device.mode):
            self._begin()
        self._follow_evaluation()
        mode, step = self._device.mode, run.step
        if not run.active:
            return
        if run.between_steps:
            self._offer_device_between_steps(mode)
            return
        if step is None:
            return
        if step.rollout_ended_ns is None and step.rollouts_done:
            step.rollout_ended_ns = run.now_ns
            self._groups.drop_surplus(step)
        if mode is TrainerMode.AWAKE:
            self._end_seeding_if_due(step)
        elif mode is TrainerMode.ASLEEP:
            self._use_sleeping_device(step)
        elif mode is not TrainerMode.WAKING:
            self._forget_reseeding()
            self._note_end_of_seeding(step)
        self._measure(step)
        if run.leases.grant_within_ns:
            self._tell_progress(step)

    def _trainer_is_there(self, mode: TrainerMode) -> bool:
        """A first trainer comes awake; without a permit it is put to sleep at once."""
        return mode is TrainerMode.AWAKE or (self._permit.needed and mode is not TrainerMode.ABSENT)

    @property
    def _counts(self) -> bool:
        """Whether what the trainer says it has done was done under its present permit. Otherwise it is told again, and
        says so again."""
        return self._device.at_work or not self._permit.needed

    def _follow_permit(self) -> None:
        """Ask for a permit when there is something to compute on the trainer's device, and yield it when there is
        nothing any more."""
        trainer, device, permit = self._run.fleet.trainer, self._device, self._permit
        comes = trainer is not None and trainer.state in _COMING
        wanted = comes or (not self._run.trainer_away and (device.order is not None or self._has_work()))
        if device.idle and (permit.state is PermitState.RECALLED or not wanted):
            permit.give_up(finished=not wanted)
        if wanted:
            permit.ask()

    def _has_work(self) -> bool:
        """Return whether the step is ready to train, or turns wait that no other worker can take."""
        step = self._run.step
        if self._device.mode is not TrainerMode.ASLEEP:
            return False
        if step is None or self._run.between_steps:
            return self._reseed
        return self._reseed or (step.rollouts_done and not step.updating and self._trainable(step))

    def _tell_progress(self, step: Step) -> None:
        of = step.trajectories
        progress = (step.number, of - step.unended + len(self._rewards.scorings), of)
        if progress != self._told_progress:
            self._told_progress = progress
            self._run.out.append(c.TellProgress(step=progress[0], done=progress[1], of=progress[2]))

    def _helped(self, head: Turn | None) -> bool:
        """Return whether a worker besides the trainer's device could take the head of the queue, or turns to come."""
        run = self._run
        return run.fleet.helped(run.oldest_version if head is None else head.oldest_version)

    def _use_sleeping_device(self, step: Step) -> None:
        """In synchronous training, run turns that no other worker can take; otherwise train."""
        needed = self._needs_reseeding()
        if step.updating or not self._device.free or self._device.order is not None:
            return
        if needed and (self._synchronous or not self._trainable(step)):
            self._wake()
        else:
            self._train_next(step)

    def _measure(self, step: Step) -> None:
        run, device = self._run, self._device
        at_work = device.at_work
        step.meter.look(
            run.now_ns,
            training=at_work,
            waiting=not at_work and device.mode is TrainerMode.ASLEEP and not step.rollouts_done,
            # Workers that were given back for want of rollouts were there while they were needed.
            workers=run.fleet.helping_workers if run.leases.lull_since_ns is None else step.meter.workers,
        )

    @property
    def _synchronous(self) -> bool:
        return self._run.plan.staleness_bound == 0

    def _trainable(self, step: Step) -> bool:
        return step.next_group() is not None or self._may_update(step)

    def _may_update(self, step: Step) -> bool:
        """Whether the next version may come: never while this one is evaluated, nor before others have trained it."""
        serving = self._run.serving
        return step.settled and self._run.evaluation is None and (serving is None or bool(serving.offers))

    def _begin(self) -> None:
        """The trainer is there: its weights are the run's, and version v means that v steps are done."""
        run, trainer = self._run, self._run.fleet.trainer
        assert trainer is not None
        assert trainer.version is not None
        run.phase = Phase.RUNNING
        run.timers.clear("start", "run")
        run.version = trainer.version
        # At a checkpoint without a journal that leads there: so many groups its steps have had at least.
        run.groups_launched = trainer.version * run.plan.groups
        run.launched_of = counts_before([one.ratio for one in run.plan.environments], run.groups_launched)
        self._workers.ensure_weights_everywhere()
        self._go_on(trainer.version)
        self._turns.dispatch()  # Requests may have come before the trainer.

    def _go_on(self, number: int) -> None:
        """Begin the step with this number, unless that waits for the evaluation of the version that begins here."""
        run = self._run
        self._make_step(number)
        due, ends = run.version is not None and self._evaluations.is_due(run.version), run.step is None
        if due and (ends or not self._evaluations.overlaps):
            self._evaluations.begin(number)
            return
        self._open_step()
        if due:
            self._evaluations.begin(None)

    def _make_step(self, number: int) -> None:
        """Have the step that comes next, with what goes on from the one before; none after the last."""
        run, plan = self._run, self._run.plan
        assert run.version is not None
        if number >= plan.steps:
            self._drop_left("the run is over")
            run.step = None
            return
        left = run.step.in_play() if run.step else []
        run.step = step = Step(number, run.version, plan.groups, self._taking, plan.minibatches, run.now_ns, left)
        self._groups.drop_stale(step)

    def _open_step(self) -> None:
        """Launch the step's groups; after the last step the run is over."""
        step = self._run.step
        if step is None:
            self._run.over = True
            return
        self._groups.launch(step)
        if self._synchronous:
            self._begin_seeding()

    def _follow_evaluation(self) -> None:
        """Begin what has room of an evaluation; record one that is over, and begin the step that has waited for it."""
        run, evaluation = self._run, self._run.evaluation
        if evaluation is None or not run.active:
            return
        if evaluation.unended:
            self._evaluations.go_on()
            return
        waited = run.between_steps
        self._evaluations.conclude()
        if self._evaluations.ends_early:
            run.over = True
        elif waited:
            if run.step is not None:
                run.step.begin_now(run.now_ns)
            self._forget_reseeding()
            self._open_step()

    def _offer_device_between_steps(self, mode: TrainerMode) -> None:
        """Between two steps the trainer's device generates for the evaluation, where it does for steps or has to."""
        seeds = self.seeding_plan.window_ns > 0 and not self._permit.needed
        if mode is TrainerMode.AWAKE:
            if not seeds and self._helped(self._run.turns.head()):
                self._device.rest("others play the evaluation")
        elif mode is TrainerMode.ASLEEP:
            needed = self._needs_reseeding()
            if (needed or seeds) and self._device.free:
                self._wake()
        elif mode is not TrainerMode.WAKING:
            self._forget_reseeding()

    @property
    def _taking(self) -> BatchRule:
        if self._run.policies.sampling.replaces_rejected:
            return BatchRule.FIRST_OF_USE
        return BatchRule.ALL if self._synchronous else BatchRule.AS_READY

    def _begin_seeding(self) -> None:
        run = self._run
        window_ns = self.seeding_plan.window_ns
        run.wait("seeding", "trainer", window_ns)
        permitted = not self._permit.needed or (self._permit.allows and window_ns > 0)
        if permitted and self._device.mode is TrainerMode.ASLEEP:
            self._wake()

    def _end_seeding_if_due(self, step: Step) -> None:
        """End the seeding window when its time is over, but not while no other worker could take its turns. End it
        with the last trajectory in any case. In asynchronous training, end it as soon as the trainer need not wait."""
        run = self._run
        window_over = not run.timers.waiting("seeding", "trainer") and (self._synchronous or self._trainable(step))
        helped = self._helped(run.turns.head()) or (self._permit.needed and bool(run.leases.slices))
        if not (step.rollouts_done and run.evaluation is None) and not (window_over and helped):
            return
        self._note_end_of_seeding(step)
        self._device.rest("seeding ends")

    def _note_end_of_seeding(self, step: Step) -> None:
        if step.seeding_ended_ns is None:
            step.seeding_ended_ns = self._run.now_ns
        self._run.timers.clear("seeding", "trainer")

    def _needs_reseeding(self) -> bool:
        """Return whether turns wait that no other worker can take. The trainer's device takes them after a short
        delay."""
        head = self._run.turns.head()
        alone = self._run.serving is None
        if head is None or not alone or self._run.leases.slices or (self._synchronous and self._helped(head)):
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
        chosen = step.next_group()
        if chosen is not None:
            step.take(*chosen, self._run.now_ns)
            self._device.train(step.number, *chosen)
        elif self._may_update(step):
            step.updating = True
            serving = self._run.serving
            source = UNSET if serving is None else serving.offers[0].source
            self._device.update(step.number, step.version + 1, step.free_slots, source)

    def _on_published(self, event: e.WeightsPublished) -> None:
        run, step, trainer = self._run, self._run.step, self._run.heard_from_trainer(event.worker, event.epoch)
        if step is None or trainer is None or not run.active or not self._counts:
            return
        if not step.updating or event.version != step.version + 1:
            return
        self._device.done()
        trainer.version = run.version = event.version
        run.fleet.reindex(trainer)
        run.agreement.expect(event.version, event.proof)
        self._compare(event.checks)
        self._serving.published(event.version)
        self._conclude(step, event)
        self._check_outcomes(ends=event.version >= run.plan.steps)
        if not run.active:
            return
        self._workers.ensure_weights_everywhere()
        self._go_on(step.number + 1)

    def _on_offer_refused(self, event: e.VersionRefused) -> None:
        step = self._run.step
        if step is None or self._run.heard_from_trainer(event.worker, event.epoch) is None or not self._counts:
            return
        if step.next_version == event.version and self._run.serving is not None:
            self._give_up_update(step, event.reason, again=event.again)

    def _give_up_update(self, step: Step, reason: str, *, again: bool) -> None:
        """The step goes on without what was offered to end it."""
        self._device.done()
        step.updating = False
        self._serving.refused(reason, again=again)

    def _on_trainer_failed(self, event: e.TrainerFailed) -> None:
        run, trainer = self._run, self._run.heard_from_trainer(event.worker, event.epoch)
        if trainer is None:
            return
        if run.serving is None:
            run.fail(f"the trainer failed: {event.error}")
            return
        if run.step is not None and run.step.updating:
            self._give_up_update(run.step, f"the importer failed: {event.error}", again=True)
        run.warn("ImporterFailed", event.error)
        self._workers.give_up(trainer.id, EndCause.LOST)

    def _conclude(self, step: Step, published: e.WeightsPublished) -> None:
        """The step is over: what it taught decides how the next one seeds, and how many workers are worth having."""
        run = self._run
        step.meter.add_up(run.now_ns)
        record = _record(step, run.now_ns)
        run.history.append(record)
        self.seeding_plan = run.policies.seeding.following(self.seeding_plan, record)
        run.leases.worker_bound = self.seeding_plan.worker_bound

        if run.serving is None and record.groups_trained <= published.unusable:
            why = self._why_nothing(step, published)
            run.warn("NothingTrained", f"step {step.number} had nothing to train on: {why}")

    def _why_nothing(self, step: Step, published: e.WeightsPublished) -> str:
        outcomes = self._run.outcomes.now
        failed = sum(outcomes.failed.values())
        words: list[str] = []
        if published.unusable:
            words.append(f"no gradient came of {published.unusable} groups: {published.reason}")
        if failed:
            of = failed + outcomes.finished
            words.append(f"{failed} of {of} trajectories failed: {in_words(counted(outcomes))}")
        if dropped := {why: count for why, count in step.reasons.items() if not why.startswith(INFRASTRUCTURE)}:
            words.append(f"groups were dropped: {in_words(dropped)}")
        return "; ".join(words)

    def _check_outcomes(self, *, ends: bool) -> None:
        """Fail a run of which too much has failed, or cannot be believed, in the last steps; `ends`: in all of them.

        What a run was judged by at its end is kept, for it is judged by that again where somebody resumes it.
        """
        run = self._run
        cause = run.agreement.failing()
        if not cause and (ends or run.outcomes.enough):
            cause = run.outcomes.failing(run.plan.max_failed_share)
        if cause:
            run.fail(cause)
        run.agreement.begin_step(run.oldest_version)
        if not (cause or ends):
            run.outcomes.begin_step()

    def abandon(self, reason: str) -> None:
        """The run is over: what is not trained yet never will be."""
        run = self._run
        for what, key in (("start", "run"), ("seeding", "trainer"), ("reseed", "queue")):
            run.timers.clear(what, key)
        self._device.abandon()
        self._serving.abandon(reason)
        self._permit.give_up(finished=True)
        self._evaluations.abandon(reason)
        self._drop_left(reason)
        self._rewards.forget_all()
        self._turns.cancel_all(reason)

    def _drop_left(self, reason: str) -> None:
        step = self._run.step
        if step is not None:
            self._groups.drop_all(step, step.in_play(), reason)


def _record(step: Step, now_ns: int) -> StepRecord:
    rollout_ended_ns = now_ns if step.rollout_ended_ns is None else step.rollout_ended_ns
    seeding_ended_ns = rollout_ended_ns if step.seeding_ended_ns is None else step.seeding_ended_ns
    duration_ns, meter = now_ns - step.started_ns, step.meter
    return StepRecord(
        step=step.number,
        duration_ns=duration_ns,
        seeding_ns=seeding_ended_ns - step.started_ns,
        rollout_ns=rollout_ended_ns - step.started_ns,
        groups_trained=step.count(GroupState.TRAINED),
        groups_dropped=step.count(GroupState.DROPPED),
        groups_of_use=step.finished + step.spared,
        groups_rejected=step.rejected,
        train_ns=meter.train_ns,
        train_wait_ns=meter.train_wait_ns,
        remote_wait_ns=now_ns - rollout_ended_ns,
        workers_mean=meter.worker_ns / max(1, duration_ns),
        workers_end=meter.workers,
    )
