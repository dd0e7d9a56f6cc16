"""Commands from outside the run, and its budget.

Each command is done once, and remembered by its id for as long as the run lives. The budget's end is waited for; when
it comes the run stops, early enough that all is given back before more is spent.
"""

from elastic.core import commands as c
from elastic.core import events as e
from elastic.core.allowance import committed_nano_usd, last_end_ns, room, stopping_ns
from elastic.core.controls import BUDGET_EXHAUSTED
from elastic.core.lease_manager import LeaseManager
from elastic.core.ledger import NANO_USD_PER_USD
from elastic.core.run_state import Deadlines, Handlers, RunState


class ControlManager:
    def __init__(self, run: RunState, leases: LeaseManager) -> None:
        self._run = run
        self._leases = leases
        self.handlers: Handlers = {
            e.StopCommanded: self._on_stop,
            e.CapSet: self._on_cap,
            e.BudgetSet: self._on_budget,
            e.BudgetExhausted: lambda event: self._run.stop(f"{BUDGET_EXHAUSTED}: {event.cause}"),
            e.CostCarried: self._on_carried,
            e.FunctionsBilled: self._on_functions,
        }
        self.due: Deadlines = {"budget": self._budget_due}

    def _first(self, event: e.ControlEvent) -> bool:
        """Whether the command was not done before. From now on it was."""
        done = self._run.controls.commands
        first = event.command not in done
        done.setdefault(event.command, event.words)
        return first

    def _on_stop(self, event: e.StopCommanded) -> None:
        if self._first(event) and not event.undone:
            self._run.stop(event.reason)

    def _on_cap(self, event: e.CapSet) -> None:
        if not self._first(event):
            return
        caps = self._run.controls.caps
        caps.pop(event.provider, None)
        if event.gpus is not None:
            caps[event.provider] = event.gpus
        self._run.leases.offer_again(event.provider)
        self._leases.follow_cap(event.provider)
        self._leases.provision()

    def _on_budget(self, event: e.BudgetSet) -> None:
        if self._first(event):
            self._run.controls.budget_usd = event.usd
            self._run.timers.clear("budget", "run")
            self._run.count_budget()
            self._leases.provision()

    def _on_carried(self, event: e.CostCarried) -> None:
        told = self._run.controls
        told.carried_nano_usd += event.nano_usd
        for provider, nano_usd in event.of_providers.items():
            told.carried_of[provider] = told.carried_of.get(provider, 0) + nano_usd
        self._run.count_budget()

    def _on_functions(self, event: e.FunctionsBilled) -> None:
        told = self._run.controls
        told.functions_nano_usd = max(told.functions_nano_usd, event.nano_usd)
        told.call_nano_usd = event.call_nano_usd
        self._run.count_budget()

    def _budget_due(self, _: str) -> None:
        """Wait for the budget's end, or stop for it. Until that is heard it is said again."""
        run = self._run
        end_ns = last_end_ns(run)
        left_ns = None if end_ns is None else end_ns - stopping_ns(run) - run.now_ns
        if (left_ns is not None and left_ns <= 0) or self._lacks_trainer():
            committed_usd = committed_nano_usd(run, run.now_ns + stopping_ns(run)) / NANO_USD_PER_USD
            cause = f"of a budget of ${run.controls.budget_usd:.2f} are ${committed_usd:.2f} spent or committed"
            run.wait("budget", "run", run.limits.retry_base_ns)
            run.out.append(c.ExhaustBudget(cause=cause))
        elif left_ns is not None:
            run.wait("budget", "run", left_ns)

    def _lacks_trainer(self) -> bool:
        """Whether the run has no trainer's device and cannot afford to ask for one."""
        run = self._run
        offer = run.leases.offers.get(run.plan.trainer_provider)
        return offer is not None and not run.leases.held(offer.provider) and room(run, offer) == 0
