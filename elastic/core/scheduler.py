"""The scheduler: every event of a run goes in, commands come out, and `next_wakeup_ns` says when to ask again.

It composes the managers (of turns, workers, leases, rewards, groups), the trainer's device and the step controller.
These own every decision that depends on time or failure. Nothing here reads a clock or does I/O, so the same events at
the same times always lead to the same state. Sources: docs/design.md; ROSE §4.3; RLBoost §4.1–4.3.
"""

from collections.abc import Callable, Mapping
from typing import Any

from elastic.core import commands as c
from elastic.core import events as e
from elastic.core.agreement import Agreement
from elastic.core.allowance import budget_forecast, spent_nano_usd
from elastic.core.balancer import Balancer
from elastic.core.control_manager import ControlManager
from elastic.core.controls import Controls
from elastic.core.departures import Departures
from elastic.core.evaluation import Evaluation
from elastic.core.evaluation_manager import EvaluationManager
from elastic.core.fleet import Fleet, Worker
from elastic.core.group_manager import GroupManager
from elastic.core.lease_manager import LeaseManager
from elastic.core.leases import LeaseTable
from elastic.core.ledger import NANO_USD_PER_USD, Ledger
from elastic.core.outcomes import Outcomes
from elastic.core.patience import Patience
from elastic.core.policy import Policies, SeedingPlan, StepRecord
from elastic.core.profiles import BatchProfile
from elastic.core.reward_manager import RewardManager, Scoring
from elastic.core.run_state import Changed, Phase, RunState, SchedulerPart, most
from elastic.core.serving import Serving
from elastic.core.serving_manager import ServingManager
from elastic.core.step_controller import StepController
from elastic.core.steps import Step
from elastic.core.timers import Timers
from elastic.core.trainer_device import TrainerDevice, TrainerMode
from elastic.core.trainer_permit import TrainerPermit
from elastic.core.turn_manager import TurnManager
from elastic.core.turns import Turns
from elastic.core.types import BudgetForecast, Limits, Nanoseconds, Plan, RunWarning, TrajectoryId, WorkerKind
from elastic.core.worker_manager import WorkerManager

__all__ = ["Phase", "Scheduler", "TrainerMode"]


class Scheduler:
    """One run's state machine. `handle` is its only way in; everything else may be read."""

    def __init__(self, plan: Plan, limits: Limits, policies: Policies, now_ns: Nanoseconds) -> None:
        self._run = run = RunState(plan, limits, policies, now_ns)
        self._turn_manager = TurnManager(run)
        self._worker_manager = WorkerManager(run, self._turn_manager)
        self._balancer = Balancer(run, self._turn_manager)
        self._departures = Departures(run, self._turn_manager, self._worker_manager)
        self._lease_manager = LeaseManager(run, self._worker_manager, self._departures)
        self._control_manager = ControlManager(run, self._lease_manager)
        self._reward_manager = RewardManager(run)
        self._permit = TrainerPermit(run)
        self._device = TrainerDevice(run, self._turn_manager, self._permit)
        self._evaluation_manager = EvaluationManager(run, self._turn_manager, self._reward_manager)
        self._group_manager = GroupManager(run, self._turn_manager, self._reward_manager, self._evaluation_manager)
        self._serving_manager = ServingManager(run, self._lease_manager)
        self._driver = StepController(
            run,
            self._turn_manager,
            self._worker_manager,
            self._reward_manager,
            self._group_manager,
            self._evaluation_manager,
            self._device,
            self._permit,
            self._serving_manager,
        )
        self._parts: tuple[SchedulerPart, ...] = (
            self._turn_manager,
            self._worker_manager,
            self._balancer,
            self._departures,
            self._lease_manager,
            self._control_manager,
            self._reward_manager,
            self._permit,
            self._device,
            self._evaluation_manager,
            self._group_manager,
            self._serving_manager,
            self._driver,
        )
        self._handlers: dict[type[e.Event], Callable[[Any], Changed | None]] = {
            e.Tick: lambda _: Changed.PROGRESS,
            e.AgentNoted: lambda _: Changed.PROGRESS,
            e.Suspended: run.sleep_through,
            e.StopRequested: lambda event: run.fail(event.reason),
            e.Resumed: run.take_up,
        }
        self._followed: int | None = None
        """The oldest version that the turn allows which waits first, as the step has seen it; None where none waits."""
        self._due: dict[str, Callable[[str], Changed | None]] = {
            "start": lambda _: run.fail("the trainer's device did not come in time"),
            "stop": lambda _: self._end(),
        }
        for part in self._parts:
            self._handlers |= part.handlers
            self._due |= part.due
        run.wait_for_start()

    def handle(self, event: e.Event, now_ns: Nanoseconds) -> list[c.Command]:
        """Take one event at a time; returns what the shell is to do, in order. Time never goes backwards."""
        run = self._run
        if run.phase is Phase.ENDED:
            return []
        if now_ns > run.now_ns:
            run.now_ns = now_ns
        changed = self._handlers[type(event)](event)
        if run.timers.due(run.now_ns):
            for what, key in run.timers.pop_due(run.now_ns):
                changed = most(changed, self._due[what](key))
        # What strikes lead to depends on the time, too; and turns may wait for the next event to be sent.
        if changed is not Changed.PROGRESS or run.fleet.struck or self._turn_manager.goes_on:
            self._settle(changed)
        out, run.out = run.out, []
        return out

    def _settle(self, changed: Changed | None) -> None:
        """Draw the conclusions from what has changed, from the parts below to those above.

        Where that is at most who has room and which turns wait, turns are dispatched. Something else follows only if
        turns wait now and did not before, or the other way round, or for another version, or if other workers are of
        help.
        """
        run = self._run
        if run.phase is Phase.ENDED:
            return
        all_else = changed is None or bool(run.struck_out or run.vacated)
        if all_else:
            self._settle_leases()
        if run.active:
            if run.serving is not None:  # Leases go back where no turn is requested, and come again with the first.
                all_else |= not run.turns.live or run.serving.quiet_since_ns is not None
            if run.phase is Phase.RUNNING:
                self._turn_manager.dispatch()
                self._balancer.watch()
            head = run.turns.head()
            waits = None if head is None else head.oldest_version
            all_else |= waits is not None and run.evaluation is not None  # As there is room, more of it may begin.
            if not (all_else or waits != self._followed or run.fleet.help_changed):
                return
            run.fleet.help_changed, self._followed = False, waits
            self._driver.advance()
            if self._follow_rollouts():
                run.fleet.help_changed = True
        if run.over and run.phase in (Phase.STARTING, Phase.RUNNING):
            self._stop()
        if run.phase is Phase.STOPPING and not run.leases.leases:
            self._end()

    def _follow_rollouts(self) -> bool:
        """Hold leases as there are rollouts to do. Returns whether others are held from now on."""
        if self._run.serving is not None:
            return self._serving_manager.follow_requests()
        return self._lease_manager.follow_rollouts(to_do=self._group_manager.rollouts_to_do())

    def _settle_leases(self) -> None:
        """What leads to other leases, another mode of the trainer's device or other outcomes of trajectories."""
        run = self._run
        if run.struck_out:
            self._worker_manager.strike_out()
        if run.vacated:
            self._lease_manager.release_vacated()
        if run.leases.newly_ready:
            self._lease_manager.plan_replacements()
        if run.active:
            self._device.follow()
            self._group_manager.take_rewards()
            self._lease_manager.follow_bound()

    def _stop(self) -> None:
        """Begin nothing new, and give everything back."""
        run = self._run
        run.phase = Phase.STOPPING
        run.timers.clear("budget", "run")
        self._balancer.stop()
        self._driver.abandon("the run is over")
        self._lease_manager.give_back_all("the run is over")
        proof_ns = max((lease.offer.ending_ns for lease in run.leases.leases.values()), default=0)
        run.wait("stop", "run", run.limits.drain_timeout_ns + max(3 * run.limits.release_timeout_ns, proof_ns))

    def _end(self) -> None:
        run = self._run
        if run.leases.leases and not run.failed:
            beyond = "; what they still cost is beyond the budget" if run.controls.budget_usd is not None else ""
            run.failed = f"leases not confirmed as ended: {', '.join(sorted(run.leases.leases))}{beyond}"
        run.phase = Phase.ENDED
        run.timers.clear_all()
        run.out.append(c.EndRun(failed=run.failed))

    def next_wakeup_ns(self) -> Nanoseconds | None:
        """When to call `handle` with a Tick if nothing else happens before."""
        return self._run.timers.next_ns()

    @property
    def pieces(self) -> tuple[RunState, tuple[SchedulerPart, ...]]:
        """The scheduler's parts, for saving their state."""
        return self._run, self._parts

    def trainer(self) -> Worker | None:
        return self._run.fleet.trainer

    @property
    def plan(self) -> Plan:
        return self._run.plan

    @property
    def limits(self) -> Limits:
        return self._run.limits

    @property
    def patience(self) -> Patience:
        """The limits that follow what the run has measured."""
        return self._run.patience

    @property
    def policies(self) -> Policies:
        return self._run.policies

    @property
    def now_ns(self) -> Nanoseconds:
        return self._run.now_ns

    @property
    def phase(self) -> Phase:
        return self._run.phase

    @property
    def failed(self) -> str:
        """Why the run failed; empty while it has not."""
        return self._run.failed

    @property
    def stopped(self) -> str:
        """Why the run was stopped before its end, which is no failure; empty where it was not."""
        return self._run.controls.stopped

    def warnings(self, told: int) -> list[RunWarning]:
        """Return the last of the warnings, of which the first `told` are known already."""
        new = self._run.warned - told
        return self._run.warnings[-new:] if new else []

    @property
    def warned(self) -> int:
        """How many warnings there have been."""
        return self._run.warned

    @property
    def agreement(self) -> Agreement:
        """What workers' log-probabilities have come to beside the trainer's."""
        return self._run.agreement

    @property
    def outcomes(self) -> Outcomes:
        """What the trajectories of the last steps came to."""
        return self._run.outcomes

    @property
    def controls(self) -> Controls:
        """The state that commands have left."""
        return self._run.controls

    @property
    def budget(self) -> BudgetForecast | None:
        """How the run's budget stands, and when it ends; None for a run without one."""
        return budget_forecast(self._run, self._run.now_ns)

    def spent_usd(self, provider: str) -> float:
        """Return the most that the provider's resources have cost which are over, in all incarnations of the run."""
        return spent_nano_usd(self._run, provider) / NANO_USD_PER_USD

    @property
    def version(self) -> int | None:
        """The weights version that the trainer has published last."""
        return self._run.version

    @property
    def oldest_version(self) -> int:
        """The oldest weights version that new tokens may come from (invariant 4)."""
        return self._run.oldest_version

    @property
    def step(self) -> Step | None:
        return self._run.step

    @property
    def evaluation(self) -> Evaluation | None:
        """The evaluation that is under way."""
        return self._run.evaluation

    @property
    def serving(self) -> Serving | None:
        """What the run knows of those who train elsewhere; None where it trains itself."""
        return self._run.serving

    @property
    def ended_early(self) -> str:
        """Why the run has come to its end before its last step, by its evaluations; empty where it has not."""
        return self._evaluation_manager.ends_early

    @property
    def best_version(self) -> int | None:
        """The version whose checkpoint is to be kept for what its evaluation came to; None where there is none."""
        return self._evaluation_manager.best_version

    @property
    def history(self) -> list[StepRecord]:
        return self._run.history

    @property
    def seeding_plan(self) -> SeedingPlan:
        return self._driver.seeding_plan

    @property
    def leases(self) -> LeaseTable:
        return self._run.leases

    @property
    def fleet(self) -> Fleet:
        return self._run.fleet

    @property
    def turns(self) -> Turns:
        return self._run.turns

    @property
    def profiles(self) -> Mapping[WorkerKind, BatchProfile]:
        return self._run.profiles

    @property
    def scorings(self) -> dict[TrajectoryId, Scoring]:
        """Trajectories that are being scored."""
        return self._reward_manager.scorings

    @property
    def ledger(self) -> Ledger:
        return self._run.ledger

    @property
    def timers(self) -> Timers:
        return self._run.timers

    @property
    def trainer_mode(self) -> TrainerMode:
        return self._device.mode

    @property
    def permit(self) -> TrainerPermit:
        """The right to compute on the trainer's device, where other jobs share that."""
        return self._permit

    @property
    def training(self) -> str | None:
        """The group that the trainer is at."""
        return self._device.training

    @property
    def trainer_order(self) -> c.TrainGroup | c.UpdateWeights | None:
        """The order that the trainer has not answered yet."""
        return self._device.order
