"""Evaluations: begun at their versions, and over once their episodes are, or their time is.

No version follows before an evaluation is over, so all of its tokens are of the version that it is about. Its episodes
are no members of groups: nothing of them reaches the trainer, or counts among what training came to. Its tasks begin in
order, as many as a step has and the fleet has places for; the others as those end.
"""

from elastic.core import commands as c
from elastic.core import events as e
from elastic.core.evaluation import (
    EvaluatedTask,
    begin_next,
    best_version,
    deciding_values,
    is_due,
    planned,
    recorded,
    under_way,
    why_stop,
)
from elastic.core.ids import group_of
from elastic.core.reward_manager import RewardManager
from elastic.core.run_state import Deadlines, Handlers, RunState
from elastic.core.turn_manager import TurnManager
from elastic.core.types import PlannedEvaluation, TrajectoryId

EVALUATED = "it is evaluated, and never trained on"
"""Why what a task came to is dropped once it is recorded."""
TIME_IS_UP = "the evaluation's time is up"
EPISODES_PER_PLACE = 2
"""How many episodes are under way for each turn that workers can execute at once: some are in their environments."""


class EvaluationManager:
    def __init__(self, run: RunState, turns: TurnManager, rewards: RewardManager) -> None:
        self._run = run
        self._turns = turns
        self._rewards = rewards
        self.handlers: Handlers = {e.EvaluationsCarried: lambda event: self._run.evaluated.update(event.values)}
        self.due: Deadlines = {"evaluation": lambda _: self._time_is_up()}

    @property
    def plan(self) -> PlannedEvaluation | None:
        return self._run.plan.evaluation or None

    def is_due(self, version: int) -> bool:
        """Whether the policy is to be evaluated at this version, at which the run has just come."""
        return self.plan is not None and is_due(self.plan, version, self._run.plan.steps)

    @property
    def overlaps(self) -> bool:
        """Whether the next step goes on beside an evaluation."""
        return self.plan is not None and self.plan.overlap

    def begin(self, next_step: int | None) -> None:
        """Evaluate the run's version; `next_step` begins once that is over, None where one is under way."""
        run, plan = self._run, self.plan
        assert plan is not None
        assert run.version is not None
        run.evaluation = planned(plan, run.version, next_step, run.now_ns)
        run.wait("evaluation", "run", plan.timeout_ns)
        self.go_on()

    def go_on(self) -> None:
        """Begin further tasks, in their order, while fewer episodes are under way than are wanted at once."""
        run, plan, evaluation = self._run, self.plan, self._run.evaluation
        if plan is None or evaluation is None:
            return
        of_steps = run.plan.groups * run.plan.group_size * (1 + run.plan.staleness_bound)
        wanted = max(of_steps, EPISODES_PER_PLACE * run.fleet.places)
        while under_way(plan, evaluation) < wanted and (task := begin_next(plan, evaluation)) is not None:
            run.out.append(
                c.StartGroup(
                    step=evaluation.version,
                    group=task.group,
                    index=task.number,
                    trajectories=tuple(task.members),
                    number=task.number,
                    environment=task.environment,
                    place=task.place,
                    row=task.place,
                )
            )

    def _task(self, trajectory: TrajectoryId) -> EvaluatedTask | None:
        """The task of an episode that may still go on."""
        evaluation = self._run.evaluation
        task = None if evaluation is None else evaluation.tasks.get(group_of(trajectory))
        return task if task is not None and task.members.get(trajectory, "") is None else None

    def version_of(self, trajectory: TrajectoryId) -> int | None:
        """The version that an episode which may go on is to be played with; None for one that may not."""
        evaluation = self._run.evaluation
        return evaluation.version if evaluation is not None and self._task(trajectory) is not None else None

    def request_reward(self, trajectory: TrajectoryId) -> None:
        """The episode is over, and a function is to score it."""
        if self._task(trajectory) is not None:
            self._turns.cancel(trajectory, "the trajectory is being scored")
            self._rewards.request(trajectory)

    def end(self, trajectory: TrajectoryId, outcome: float | str) -> None:
        """An episode has come to a reward, or has none for this cause."""
        evaluation, task = self._run.evaluation, self._task(trajectory)
        if evaluation is None or task is None:
            return
        self._turns.cancel(trajectory, "the trajectory ended")
        self._rewards.forget((trajectory,))
        task.members[trajectory] = outcome
        evaluation.unended -= 1

    def _time_is_up(self) -> None:
        evaluation = self._run.evaluation
        if evaluation is not None:
            evaluation.timed_out = evaluation.unended > 0
            self._cancel(TIME_IS_UP)
            evaluation.unended = 0

    def _cancel(self, cause: str) -> None:
        """End the episodes that are under way. They have no outcome."""
        evaluation = self._run.evaluation
        if evaluation is None:
            return
        left = [name for task in evaluation.tasks.values() for name, had in task.members.items() if had is None]
        self._rewards.forget(left)
        for trajectory in left:
            self._turns.cancel(trajectory, cause)
            self._run.out.append(c.CancelTrajectory(trajectory=trajectory, cause=cause))

    def conclude(self) -> None:
        """Record the evaluation, which is over."""
        run, plan, evaluation = self._run, self.plan, self._run.evaluation
        assert plan is not None
        assert evaluation is not None
        record = recorded(plan, evaluation, run.now_ns)
        self._forget()
        run.evaluated[record.version] = deciding_values(plan, record)
        best = self.best_version == record.version
        run.out.append(c.EndEvaluation(record=record, best=best, ends=self.ends_early))

    @property
    def best_version(self) -> int | None:
        """The best version so far, by the metric that decides it; None where none does, or none is known."""
        plan = self.plan
        return best_version(self._values(plan.keep_best)) if plan is not None and plan.keep_best else None

    @property
    def ends_early(self) -> str:
        """Why the run ends before its last step, by what its evaluations have come to; empty where it does not."""
        plan = self.plan
        return "" if plan is None or plan.stop is None else why_stop(plan.stop, self._values(plan.stop.metric))

    def _values(self, metric: str) -> dict[int, float | None]:
        return {version: values.get(metric) for version, values in self._run.evaluated.items()}

    def abandon(self, reason: str) -> None:
        """The run is over, and the evaluation with it, without a result."""
        self._cancel(reason)
        self._forget()

    def _forget(self) -> None:
        run, evaluation = self._run, self._run.evaluation
        run.timers.clear("evaluation", "run")
        run.evaluation = None
        if evaluation is None:
            return
        for task in evaluation.tasks.values():
            run.out.append(
                c.DropGroup(
                    group=task.group,
                    trajectories=tuple(task.members),
                    step=evaluation.version,
                    slot=None,
                    reason=EVALUATED,
                )
            )
